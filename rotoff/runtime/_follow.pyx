"""The part of `live.LiveForward` that runs in each call of torch and of a module."""

cimport cython

import torch
from torch import Tensor
from torch.nn import Parameter

from ..capture.tape import SET_REQUIRES_GRAD
from ..tensors.kernel_flags import GETTERS
from .arguments import VALUES, tensors_in, tensors_of
from .torch_calls import KNOWN, find


cdef extern from "Python.h":
    ctypedef struct PyObject
    object PyObject_Call(object function, object args, PyObject* kwargs)
    object PyObject_GenericGetDict(object one, void* context)
    object PyWeakref_NewRef(object one, PyObject* callback)
    void PyObject_GC_UnTrack(PyObject* one)


TAG = "_rotoff_var"  # the attribute in which a tensor holds its `Var`

cdef int OUTSIDE = 0  # as in `capture.course`
cdef dict _properties = KNOWN
cdef str _name = TAG
cdef object _Tensor = Tensor, _Parameter = Parameter, _iter = Tensor.__iter__, _unbind = torch.unbind
cdef object _set_requires_grad = SET_REQUIRES_GRAD, _requires_grad = Tensor.requires_grad_
cdef object _values = VALUES
cdef tuple _kernel_flags = GETTERS
cdef object _is_grad_enabled = torch.is_grad_enabled, _is_any_autocast_enabled = torch._C._is_any_autocast_enabled


cdef bint _differ(tuple kernels_before):
    """Whether a flag that chooses kernels has another value than in `kernels_before`."""
    for n in range(len(_kernel_flags)):
        if _kernel_flags[n]() is not kernels_before[n]:
            return True
    return False


@cython.no_gc  # no cycle goes through it
cdef class Var:
    """Stands for a tensor of a step on its tapes. Called, it returns the tensor that the model's own code has, or None
    if that is gone. An attribute of the tensor holds it, and copies and pickles as None.

    origin: what identifies the forward, and the stage that made the tensor, 0 if it belongs to none. dead: whether the
    course expected nobody to need it. hollow: whether its bytes are freed now; gone: whether they have been freed
    before, even if `hollow` is False because a view of it was filled. stays: whether its bytes must not be freed.
    """

    cdef object _reference
    cdef public tuple origin
    cdef public bint dead, hollow, gone, stays

    def __call__(self):
        return self._reference()

    @property
    def stage(self):
        return self.origin[1]

    def __reduce__(self):
        return type(None), ()

    def __deepcopy__(self, _):
        return None


cdef Var _var_of(tensor):
    """Return the `Var` that a tensor holds, of whatever forward; None if it has none."""
    return (<dict>PyObject_GenericGetDict(tensor, NULL)).get(_name)


cdef object _plainly(function, tuple args, dict kwargs):
    # not `function(*args, **kwargs)`, which copies the keyword arguments
    return PyObject_Call(function, args, <PyObject*>kwargs if kwargs else NULL)


cdef object _untracked(one):
    """Hide from the garbage collector an object through which no cycle goes: a step makes thousands of them."""
    PyObject_GC_UnTrack(<PyObject*>one)
    return one


cdef bint _is_among(tensor, list tensors):
    for one in tensors:
        if one is tensor:
            return True
    return False


cdef class Follower:
    """Follows calls; its attributes are those of `LiveForward` and `OnCourse` that each call reads."""

    cdef public bint inside, on_course, as_measured, seen, dead, sets_flags, _unusual, _every
    cdef public Py_ssize_t _stage, _position, _next_entry, _within
    cdef public tuple _rows, _entries, _origin, _outside
    cdef public list _log, saved, dropped
    cdef public dict _numbered
    cdef public object _held, _dying, _token, _step, tape, outside, reads, frames, lender, autocast_before
    cdef public tuple kernels_before

    def call(self, function, tuple args, dict kwargs):
        """Run `function`, and record the call if a replay must repeat it."""
        cdef tuple row
        if self.inside:
            return _plainly(function, args, kwargs)
        known = _properties.get(function) or find(function)
        if not known.ordinary:
            if known.fact:
                return self.lender.answer(function, args, kwargs) if self.lender else _plainly(function, args, kwargs)
            if known.returns_itself is not None and known.returns_itself(*args, **kwargs):
                return _plainly(function, args, kwargs)
            if function is _iter:
                return iter(self.call(_unbind, args, {}))
            if function == _set_requires_grad:
                self.call(_requires_grad, args, kwargs)
                return None
            if known.instead is not None:
                function = known.instead
        self.inside = True  # if a wrapper called this, the mode is still active
        try:
            row = self._rows[self._position]
            if (
                row[0] is not function or self._within or not self.on_course or not self._may_read(row, args, kwargs)
            ):
                row = self._expected(function, args, kwargs)
            stage = row[1]
            if stage is not None and self._dying:
                self._let_go_all()
            if stage is None and self._stage == OUTSIDE:
                stage = 1  # an unexpected call belongs to the open stage
            if stage is not None and stage > self._stage:
                self._step.enter(stage)
            return self._followed(function, known, args, kwargs, row)
        finally:
            self.inside = False

    cpdef bint _may_read(self, tuple row, tuple args, dict kwargs):
        """Whether the call of `row` may have these arguments: if it belongs to no stage, and its result is needed, it
        reads no tensor that a stage has made."""
        cdef Var var
        if row[1] != OUTSIDE or row[4]:
            return True
        for tensor in tensors_in(args, kwargs):
            var = self._known(tensor)
            if var is not None and var.origin[1] != OUTSIDE:
                return False
        return True

    cdef object _followed(self, function, known, tuple args, dict kwargs, tuple row):
        """Run and record a call. What only few calls need is in other functions."""
        # not the measured stage: what needs no gradient may be measured in an earlier one than the open one
        cdef Py_ssize_t stage = OUTSIDE if row[1] == OUTSIDE else self._stage
        cdef Py_ssize_t n, saved = len(self.saved), dropped = len(self.dropped)
        cdef tuple numbers = row[2], origin = self._origin if stage else self._outside
        cdef bint dead = row[4], written = False, grad = _is_grad_enabled(), flat = not kwargs
        cdef list named = list(args), foreign = []  # those that the open stage has not made, but for parameters
        cdef dict attributes, named_kwargs = kwargs
        cdef Var var
        tape = self.tape if stage else self.outside
        constants = len(tape.constants)
        self.dead = dead
        for n, one in enumerate(args):
            kind = type(one)
            if kind is _Tensor and stage:
                var = _var_of(one)
                if var is not None and var.origin is origin and not (var.hollow or var.dead):
                    named[n] = var
                    continue
            if kind not in _values:
                named[n] = self._refer(foreign, stage, one)
                flat = flat and (kind is _Parameter or kind is _Tensor)
        if kwargs:
            named_kwargs = {name: self._refer(foreign, stage, one) for name, one in kwargs.items()}
        self.seen = stage != OUTSIDE
        try:
            if self._unusual or not known.ordinary or (kwargs and "out" in kwargs) or (
                foreign and self.reads.changing and self.reads.are_changing(foreign)
            ):
                result, written = self._carefully(function, known, args, kwargs, stage, numbers is not None)
            else:
                result = self._run(function, args, kwargs) if self._every else _plainly(function, args, kwargs)
        except BaseException:
            del self.saved[saved:], self.dropped[dropped:]  # the model may catch the error and go on
            self._forget_since(tape, constants)
            raise
        finally:
            self.seen = False
        var = None
        if type(result) is _Tensor:
            attributes = PyObject_GenericGetDict(result, NULL)
            if _name not in attributes and not _is_among(result, foreign):
                var = attributes[_name] = self._var(result, origin)
        if var is not None:
            made = _untracked((var,))
        else:
            made, new = self._made(tensors_of(result), tensors_in(args, kwargs), origin)
            if not written and not new:
                self._forget_since(tape, constants)
                return result  # a query, or no work: x.to(x.dtype)
        if var is not None and numbers is not None and len(numbers) == 1 and numbers[0] not in self._held:
            if numbers[0] is not None:
                self._numbered[numbers[0]] = var
            self._position += 1
            self._dying = row[3]
            self._log.append(function)
        elif not self._within:
            self._made_next(numbers, made, function)
        if dead and self._made_for_nothing(made, stage, written):
            return result
        around = None
        unlike = not grad or self.autocast_before or self.sets_flags
        if unlike or _is_any_autocast_enabled() or _differ(self.kernels_before):
            around = self._settings(grad)
        call = function, named, named_kwargs, made, around, dead
        if flat and known.ordinary:
            _untracked(named)
            _untracked(call)
        tape.calls.append(call)
        return result

    cdef Var _var(self, tensor, tuple origin):
        cdef Var var = Var.__new__(Var)
        var._reference = _untracked(PyWeakref_NewRef(tensor, NULL))
        var.origin = origin
        (<list>self.frames.every).append(var)
        return var

    def _tag(self, tensor, tuple origin):
        """Give a tensor a new `Var`."""
        cdef Var var = self._var(tensor, origin)
        setattr(tensor, _name, var)
        return var

    def _let_go_all(self):
        """Hollow the tensors that no later call needs."""
        cdef Var var
        numbers, self._dying = self._dying, ()
        for number in numbers:
            var = self._numbered.pop(number, None)
            if var is not None and var._reference() is not None:
                self._let_go(var)

    def _known(self, tensor):
        """Return the `Var` that this forward gave a tensor, if any."""
        cdef Var var = _var_of(tensor)
        return None if var is None or var.origin[0] is not self._token else var

    def _reference(self, list foreign, Py_ssize_t stage, leaf):
        """Return what the tape holds in place of one leaf of the arguments; a tensor other than a parameter is added to
        `foreign`."""
        return self._refer(foreign, stage, leaf)

    cdef object _refer(self, list foreign, Py_ssize_t stage, leaf):
        cdef Var var
        kind = type(leaf)
        if kind in _values:
            return leaf
        if kind is not _Tensor and kind is not _Parameter and not isinstance(leaf, _Tensor):
            if kind is tuple:
                for one in <tuple>leaf:
                    if type(one) not in _values:
                        break
                else:
                    return leaf
            return self._refer_within(foreign, stage, leaf)
        if kind is not _Parameter:
            foreign.append(leaf)
        var = _var_of(leaf)
        if var is None or var.origin[0] is not self._token:
            if stage != OUTSIDE:
                return self.reads.constant(leaf)
            self.reads.note_resident(leaf)
            return leaf
        return self._refer_made(var, stage, leaf)

    def called(self, module, tuple args, dict kwargs, run=None):
        """Replaces the call of a module. run: called instead of the module's own code, if given."""
        cdef tuple row = self._entries[self._next_entry]
        if (
            row[0] is not module
            or row[1] != self._position
            or self._within
            or not self.on_course
            or module._compiled_call_impl is not None
        ):
            return self._called_otherwise(module, args, kwargs, run)
        self._next_entry += 1
        self._log.append(row)
        try:
            if row[2]:
                self._begin_next()
            return _plainly(module._call_impl if run is None else run, args, kwargs)
        finally:
            self._log.append(None)
