// The compiled tape as a Python module. It uses the limited API, so one file serves all Pythons with a GIL, and one for
// each minor version of torch.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <torch/headeronly/version.h>

#include "_tape.h"

// While it lives, this thread runs Python.
struct WithPython {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithPython() { PyGILState_Release(state); }
};

// Of libtorch_python; its headers need all of Python's.
PyObject* THPVariable_Wrap(const at::TensorBase& t);
PyObject* THPStorage_Wrap(c10::Storage storage);
// An error of Python on its way through C++, which raises it again; with the fields of torch/csrc/Exceptions.h.
struct __attribute__((visibility("default"))) python_error : std::exception {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  std::string message = "python_error";

  python_error() = default;
  python_error(const python_error& other)
      : type(other.type), value(other.value), traceback(other.traceback), message(other.message) {
    WithPython python;
    for (auto* object : {type, value, traceback}) Py_IncRef(object);
  }
  ~python_error() override {
    if (!type && !value && !traceback) return;
    WithPython python;
    for (auto* object : {type, value, traceback}) Py_DecRef(object);
  }
  const char* what() const noexcept override { return message.c_str(); }
};
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace {

using namespace rotoff;

// -- Python

struct InPython {};  // thrown where Python has set its error

struct Release {
  void operator()(PyObject* object) const { Py_DecRef(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

Owned checked(PyObject* object) {
  if (!object) throw InPython();
  return Owned(object);
}

PyObject* none() { return Py_NewRef(Py_None); }

template <class N>
PyObject* as_number(N n) {
  return std::is_signed_v<N> ? PyLong_FromLongLong(n) : PyLong_FromUnsignedLongLong(n);
}

// While it lives, other threads may run Python.
struct WithoutPython {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutPython() { PyEval_RestoreThread(state); }
};

// One thread at a time makes contents again; none waits for it with Python's lock, which operations may take.
struct Locked {
  Tape& tape;
  explicit Locked(Tape& tape) : tape(tape) {
    if (tape.lock.try_lock()) return;
    WithoutPython others;
    tape.lock.lock();
  }
  ~Locked() { tape.lock.unlock(); }
};

// Gives Python the error that was caught.
PyObject* translated() {
  try {
    throw;
  } catch (const InPython&) {
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

template <PyObject* (*function)(PyObject*, PyObject*)>
PyObject* method(PyObject* self, PyObject* args) try {
  return function(self, args);
} catch (...) {
  return translated();
}

int integer(PyObject* object) {
  const long n = PyLong_AsLong(object);
  if (n == -1 && PyErr_Occurred()) throw InPython();
  return static_cast<int>(n);
}

template <class F>
void each_item(PyObject* iterable, F f) {
  auto items = checked(PyObject_GetIter(iterable));
  while (Owned item{PyIter_Next(items.get())}) f(item.get());
  if (PyErr_Occurred()) throw InPython();
}

// What a tensor or a storage of Python has below.
template <class Impl>
c10::intrusive_ptr<Impl> below(PyObject* object) {
  auto address = checked(PyObject_GetAttrString(object, "_cdata"));
  return c10::intrusive_ptr<Impl>::reclaim_copy(static_cast<Impl*>(PyLong_AsVoidPtr(address.get())));
}

Tensor tensor_of(PyObject* object) { return Tensor(below<c10::TensorImpl>(object)); }
Storage storage_of(PyObject* object) {
  return object == Py_None ? Storage() : Storage(below<c10::StorageImpl>(object));
}
PyObject* wrapped(const Storage& storage) { return storage ? THPStorage_Wrap(storage) : none(); }

// An object of Python with a value.
template <class T>
struct Object {
  PyObject_HEAD
  T value;
  static inline PyTypeObject* type = nullptr;

  static PyObject* with(T value) {
    auto object = checked(PyType_GenericAlloc(type, 0));
    new (&of(object.get())) T(std::move(value));
    return object.release();
  }
  static T& of(PyObject* object) { return reinterpret_cast<Object*>(object)->value; }
  static T& expect(PyObject* object) {
    if (!PyObject_TypeCheck(object, type)) {
      PyErr_SetString(PyExc_TypeError, "this is an object of another tape");
      throw InPython();
    }
    return of(object);
  }
  static void free(PyObject* object) {
    auto* its = Py_TYPE(object);
    of(object).~T();
    reinterpret_cast<freefunc>(PyType_GetSlot(its, Py_tp_free))(object);
    Py_DecRef(reinterpret_cast<PyObject*>(its));
  }
  static void make_type(PyObject* module, const char* name, std::vector<PyType_Slot> slots, unsigned flags = 0) {
    slots.push_back({Py_tp_dealloc, reinterpret_cast<void*>(free)});
    slots.push_back({0, nullptr});
    PyType_Spec spec{name, sizeof(Object), 0, static_cast<unsigned>(Py_TPFLAGS_DEFAULT) | flags, slots.data()};
    type = reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)).release());
    if (PyModule_AddType(module, type)) throw InPython();
  }
};

// -- contents and slots

using PyContent = Object<ContentPtr>;
using PySlot = Object<std::shared_ptr<Slot>>;

PyObject* content_hold(PyObject* self, PyObject* storage) {
  PyContent::of(self)->hold(storage_of(storage));
  return none();
}

PyObject* content_lose(PyObject* self, PyObject* copy) {
  PyContent::of(self)->lose(storage_of(copy));
  return none();
}

PyObject* content_storage(PyObject* self, PyObject* args, PyObject* named) try {
  int seen;
  const char* names[] = {"seen", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, named, "p", const_cast<char**>(names), &seen)) return nullptr;
  return wrapped(PyContent::of(self)->storage(seen));
} catch (...) {
  return translated();
}

PyObject* content_held(PyObject* self, PyObject*) { return wrapped(PyContent::of(self)->held); }

int content_set_held(PyObject* self, PyObject* storage, void*) try {
  PyContent::of(self)->held = storage_of(storage);
  return 0;
} catch (...) {
  translated();
  return -1;
}

// An object each time that Python asks for it: they are equal if the content is the same.
Py_hash_t content_hash(PyObject* self) { return reinterpret_cast<Py_hash_t>(PyContent::of(self).get()) >> 4; }

PyObject* content_compare(PyObject* self, PyObject* other, int how) {
  if ((how != Py_EQ && how != Py_NE) || !PyObject_TypeCheck(other, PyContent::type)) return Py_NewRef(Py_NotImplemented);
  return PyBool_FromLong((PyContent::of(self) == PyContent::of(other)) == (how == Py_EQ));
}

std::vector<ContentPtr> contents_in(PyObject* iterable) {
  std::vector<ContentPtr> contents;
  each_item(iterable, [&](PyObject* item) { contents.push_back(PyContent::expect(item)); });
  return contents;
}

// -- the tape

using PyKnown = Object<std::shared_ptr<const Known>>;
struct WithKeep {
  Tape tape;
  Owned keep{Py_NewRef(Py_False)};
};
using PyTape = Object<WithKeep>;
Tape& tape_in(PyObject* self) { return PyTape::of(self).tape; }

PyObject* known_new(PyTypeObject*, PyObject* args, PyObject*) try {
  PyObject *sure, *held;
  if (!PyArg_ParseTuple(args, "OO", &sure, &held)) return nullptr;
  auto known = std::make_shared<Known>();
  each_item(sure, [&](PyObject* key) { known->sure.insert(PyLong_AsUnsignedLongLong(key)); });
  each_item(held, [&](PyObject* pair) {
    unsigned long long key;
    int out;
    if (!PyArg_ParseTuple(pair, "Ki", &key, &out)) throw InPython();
    known->held.emplace(key, out);
  });
  return PyKnown::with(std::move(known));
} catch (...) {
  return translated();
}

// Tells that the forward has come to the position ahead, from within an operation, which runs without Python's lock.
void come_to(PyObject* self) {
  WithPython python;
  Owned told{PyObject_GetAttrString(self, "on_ahead")};
  if (told && Owned{PyObject_CallFunctionObjArgs(told.get(), self, nullptr)}) return;
  python_error error;
  PyErr_Fetch(&error.type, &error.value, &error.traceback);
  throw error;
}

PyObject* tape_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = PyType_GenericAlloc(type, 0);
  if (!self) return nullptr;
  new (&PyTape::of(self)) WithKeep();
  tape_in(self).come_to = [self] { come_to(self); };
  return self;
}

PyObject* tape_know(PyObject* self, PyObject* known) {
  tape_in(self).known = PyKnown::expect(known);
  return none();
}

PyObject* tape_begin(PyObject* self, PyObject*) {
  tape_in(self).begin();
  return none();
}

PyObject* tape_end(PyObject* self, PyObject*) {
  tape_in(self).end();
  return none();
}

PyObject* tape_enter(PyObject* self, PyObject* stage) {
  tape_in(self).enter(integer(stage));
  return none();
}

PyObject* tape_content_of(PyObject* self, PyObject* t) { return PyContent::with(tape_in(self).content_of(tensor_of(t))); }

PyObject* tape_content(PyObject* self, PyObject* args) {
  int stage, n, out;
  if (!PyArg_ParseTuple(args, "iii", &stage, &n, &out)) return nullptr;
  auto content = tape_in(self).content(stage, n, out);
  return content ? PyContent::with(content) : none();
}

PyObject* tape_pack(PyObject* self, PyObject* object) {
  const auto t = tensor_of(object);
  if (!is_plain(t)) return PyObject_CallMethod(self, "take_apart", "(O)", object);
  auto is_kept = [keep = PyTape::of(self).keep.get()](int op, int out) {
    if (keep == Py_False || keep == Py_True) return keep == Py_True;
    auto pair = checked(Py_BuildValue("(ii)", op, out));
    const int found = PySequence_Contains(keep, pair.get());
    if (found < 0) throw InPython();
    return found == 1;
  };
  return PySlot::with(tape_in(self).pack(t, is_kept));
}

std::vector<Storage> make(Tape& tape, const std::vector<ContentPtr>& contents) {
  WithoutPython others;
  return tape.make(contents);
}

void put(const Owned& dict, const ContentPtr& content, const Storage& storage) {
  auto key = checked(PyContent::with(content)), value = checked(wrapped(storage));
  if (PyDict_SetItem(dict.get(), key.get(), value.get())) throw InPython();
}

PyObject* tape_make(PyObject* self, PyObject* wanted) {
  const auto contents = contents_in(wanted);
  Locked alone(tape_in(self));
  const auto storages = make(tape_in(self), contents);
  auto found = checked(PyDict_New());
  for (size_t n = 0; n < contents.size(); ++n) put(found, contents[n], storages[n]);
  return found.release();
}

void fetch(Tape& tape, int stage) {
  Locked alone(tape);
  auto slots = tape.live(stage);
  slots.erase(std::remove_if(slots.begin(), slots.end(), [](const auto& slot) { return bool(slot->own); }), slots.end());
  std::vector<ContentPtr> contents;
  for (auto& slot : slots) contents.push_back(slot->reference->content);
  const auto storages = make(tape, contents);
  for (size_t n = 0; n < slots.size(); ++n) slots[n]->give(storages[n]);
}

PyObject* tape_fetch(PyObject* self, PyObject* stage) {
  fetch(tape_in(self), integer(stage));
  return none();
}

PyObject* tape_fill(PyObject* self, PyObject* args) {
  int stage;
  PyObject* storages;
  if (!PyArg_ParseTuple(args, "iO", &stage, &storages)) return nullptr;
  for (auto& slot : tape_in(self).live(stage)) {
    auto content = checked(PyContent::with(slot->reference->content));
    if (Owned storage{PyObject_GetItem(storages, content.get())})
      slot->give(storage_of(storage.get()));
    else if (PyErr_ExceptionMatches(PyExc_KeyError))
      PyErr_Clear();
    else
      return nullptr;
  }
  return none();
}

PyObject* tape_owned(PyObject* self, PyObject* stage) {
  auto found = checked(PyDict_New());
  for (auto& slot : tape_in(self).live(integer(stage)))
    if (slot->own) put(found, slot->reference->content, slot->own);
  return found.release();
}

PyObject* tape_empty(PyObject* self, PyObject* stage) {
  for (auto& slot : tape_in(self).live(integer(stage))) slot->own = Storage();
  return none();
}

PyObject* tape_let_go(PyObject* self, PyObject* stage) {
  tape_in(self).let_go(integer(stage));
  return none();
}

PyObject* tape_saved_contents(PyObject* self, PyObject* stage) {
  auto found = checked(PyDict_New());
  for (auto& slot : tape_in(self).live(integer(stage))) put(found, slot->reference->content, Storage());
  return PyDict_Keys(found.get());
}

// Tells that the backward has reached another stage.
void reach(PyObject* self, int stage) {
  if (stage == tape_in(self).reached) return;
  tape_in(self).reached = stage;
  auto told = checked(PyObject_GetAttrString(self, "on_backward"));
  if (told.get() == Py_None) return;
  Locked alone(tape_in(self));
  c10::impl::ExcludeDispatchKeyGuard unseen(KEY);
  auto number = checked(PyLong_FromLong(stage));
  checked(PyObject_CallFunctionObjArgs(told.get(), self, number.get(), nullptr));
}

PyObject* tape_unpack(PyObject* self, PyObject* packed) {
  if (PyTuple_Check(packed)) return PyObject_CallMethod(self, "put_together", "(O)", packed);
  if (!PyObject_TypeCheck(packed, PySlot::type)) return Py_NewRef(packed);
  const auto slot = PySlot::of(packed);
  slot->check();
  reach(self, slot->stage);
  if (!slot->reference) return THPVariable_Wrap(slot->tensor);
  if (!slot->own) {
    Locked alone(tape_in(self));
    if (!slot->own) fetch(tape_in(self), slot->stage);
  }
  return THPVariable_Wrap(slot->reference->on(slot->own));
}

PyObject* tape_begins(PyObject* self, PyObject*) {
  auto found = checked(PyDict_New());
  for (const auto& [stage, first] : tape_in(self).begins) {
    auto key = checked(PyLong_FromLong(stage)), value = checked(PyLong_FromLong(first));
    if (PyDict_SetItem(found.get(), key.get(), value.get())) return nullptr;
  }
  return found.release();
}

PyObject* tape_keep(PyObject* self, PyObject*) { return Py_NewRef(PyTape::of(self).keep.get()); }
int tape_set_keep(PyObject* self, PyObject* keep, void*) {
  PyTape::of(self).keep.reset(Py_NewRef(keep));
  return 0;
}

// -- the module

template <PyObject* (*function)(PyObject*, PyObject*)>
PyObject* getter(PyObject* self, void*) {
  return method<function>(self, nullptr);
}

// Fields of `self`: a number that Python reads, one that it changes, a flag that it changes.
#define NUMBER(name, value) { name, [](PyObject* self, void*) { return as_number(value); }, nullptr, nullptr, nullptr }
#define COUNT(name, value)                                                   \
  { name, [](PyObject* self, void*) { return as_number(value); },            \
    [](PyObject* self, PyObject* n, void*) { return value = PyLong_AsLong(n), PyErr_Occurred() ? -1 : 0; }, nullptr, nullptr }
#define FLAG(name, value)                                                      \
  { name, [](PyObject* self, void*) { return PyBool_FromLong(value); },        \
    [](PyObject* self, PyObject* on, void*) { return value = on == Py_True, 0; }, nullptr, nullptr }

PyMethodDef content_methods[] = {
    {"hold", method<content_hold>, METH_O, nullptr},
    {"lose", method<content_lose>, METH_O, nullptr},
    {"storage", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(content_storage)), METH_VARARGS | METH_KEYWORDS,
     nullptr},
    {},
};
PyGetSetDef content_fields[] = {
    NUMBER("op", PyContent::of(self)->op),
    NUMBER("out", PyContent::of(self)->out),
    NUMBER("stage", PyContent::of(self)->stage),
    NUMBER("nbytes", PyContent::of(self)->nbytes),
    {"held", getter<content_held>, content_set_held, nullptr, nullptr},
    COUNT("lent", PyContent::of(self)->lent),
    {},
};
PyMethodDef tape_methods[] = {
    {"know", method<tape_know>, METH_O, nullptr},
    {"begin", method<tape_begin>, METH_NOARGS, nullptr},
    {"end", method<tape_end>, METH_NOARGS, nullptr},
    {"enter", method<tape_enter>, METH_O, nullptr},
    {"content_of", method<tape_content_of>, METH_O, nullptr},
    {"content", method<tape_content>, METH_VARARGS, nullptr},
    {"pack", method<tape_pack>, METH_O, nullptr},
    {"unpack", method<tape_unpack>, METH_O, nullptr},
    {"make", method<tape_make>, METH_O, nullptr},
    {"fetch", method<tape_fetch>, METH_O, nullptr},
    {"fill", method<tape_fill>, METH_VARARGS, nullptr},
    {"owned", method<tape_owned>, METH_O, nullptr},
    {"empty", method<tape_empty>, METH_O, nullptr},
    {"let_go", method<tape_let_go>, METH_O, nullptr},
    {"saved_contents", method<tape_saved_contents>, METH_O, nullptr},
    {},
};
PyGetSetDef tape_fields[] = {
    NUMBER("stage", tape_in(self).stage),
    NUMBER("position", tape_in(self).position),
    COUNT("ahead", tape_in(self).ahead),
    {"begins", getter<tape_begins>, nullptr, nullptr, nullptr},
    NUMBER("key", tape_in(self).key),
    {"keep", getter<tape_keep>, tape_set_keep, nullptr, nullptr},
    FLAG("paused", tape_in(self).paused),
    FLAG("in_python", tape_in(self).in_python),
    NUMBER("noted", tape_in(self).operations.size()),
    NUMBER("replayed", tape_in(self).replayed),
    {},
};

void make_types(PyObject* module) {
  auto slot = [](int id, auto* what) { return PyType_Slot{id, reinterpret_cast<void*>(what)}; };
  PyContent::make_type(module, "rotoff.tape.Content",
                       {slot(Py_tp_methods, content_methods), slot(Py_tp_getset, content_fields),
                        slot(Py_tp_hash, content_hash), slot(Py_tp_richcompare, content_compare)});
  PySlot::make_type(module, "rotoff.tape.Slot", {});
  PyKnown::make_type(module, "rotoff.tape.Known", {slot(Py_tp_new, known_new)});
  PyTape::make_type(module, "rotoff.tape.Tape",
                    {slot(Py_tp_new, tape_new), slot(Py_tp_methods, tape_methods), slot(Py_tp_getset, tape_fields)},
                    Py_TPFLAGS_BASETYPE);
}

PyObject* checksum_in_python = nullptr;

// start(CHANGED, LOST, checksum): sees operations from now on, where a tape records. Returns whether
// the key is free, without which nothing is done.
PyObject* start(PyObject*, PyObject* args) {
  const char *changed, *lost;
  if (!PyArg_ParseTuple(args, "ssO", &changed, &lost, &checksum_in_python))
    return nullptr;
  auto& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(KEY) || dispatcher.hasBackendFallbackForDispatchKey(IN_PYTHON) ||
      !dispatcher.getAllOpNamesForDispatchKey(KEY).empty())
    return Py_NewRef(Py_False);
  Py_IncRef(checksum_in_python);
  CHANGED = changed;
  LOST = lost;
  // As long as the process: the dispatcher may be gone before this module is.
  new c10::RegistrationHandleRAII(dispatcher.addRegistrationListener(std::make_unique<Gone>()));
  new c10::RegistrationHandleRAII(dispatcher.registerFallback(
      KEY, c10::KernelFunction::makeFromBoxedFunction<&Tape::dispatched>(), "rotoff's tape"));
  return Py_NewRef(Py_True);
}

PyMethodDef functions[] = {{"start", method<start>, METH_VARARGS, nullptr}, {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", nullptr, -1, functions};

}  // namespace

int64_t rotoff::checksum(const Storage& storage) {
  WithPython python;
  auto argument = checked(wrapped(storage));
  auto sum = checked(PyObject_CallFunctionObjArgs(checksum_in_python, argument.get(), nullptr));
  return PyLong_AsLongLong(sum.get());
}

// The module's name has torch's version.
#define INIT_OF(major, minor) PyInit__kernel_torch##major##minor
#define INIT(major, minor) INIT_OF(major, minor)

PyMODINIT_FUNC INIT(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR)() try {
  auto module = checked(PyModule_Create(&definition));
  make_types(module.get());
  return module.release();
} catch (const InPython&) {
  return nullptr;
}
