"""`rotoff.Checkpointable` for a `device_limit`, with its steps on tapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import rotoff
from rotoff.core.sizes import parse_bytes
from rotoff.module_proxy import ModuleProxy
from rotoff.planning.options import Options
from rotoff.planning.request import Request, check_limits, check_options
from rotoff.planning.tape_placed_planner import compiled, read_optimizers
from rotoff.planning.tape_placed_runner import PlacedCourse, PlacedRunner
from rotoff.runtime.links.pool import LinkPool


class Placed(ModuleProxy):
    _own = frozenset({"_links", "runner", "_request"})

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model)
        self._check = options.get("check", False)
        self._options = Options(**{k: v for k, v in options.items() if k != "check"})
        self._begin()

    def record_step(self) -> Any:
        raise rotoff.OptionError("record_step needs a plan with a mem_limit")

    def _begin(self) -> None:
        self._links = LinkPool()
        self._request = None
        self.runner = PlacedRunner(self._model, (), None, self._options, self._links)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_links", "runner", "_request")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def measure(self, *sample: Any, repeats: Any = None, progress: Any = None, **kwargs: Any) -> Placed:
        state = torch.get_rng_state()
        buffers = [b.clone() for b in self._model.buffers()]
        grads = [(p, p.grad) for p in self._model.parameters()]
        for p, _ in grads:
            p.grad = None

        def backward(result: Any) -> None:
            tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            sum(t.float().mul(2).sum() for t in tensors if t.requires_grad).backward()

        with torch.enable_grad():
            self.runner.record(sample, kwargs, backward)
        for p, grad in grads:
            p.grad = grad
        with torch.no_grad():
            for b, old in zip(self._model.buffers(), buffers, strict=True):
                b.copy_(old)
        torch.set_rng_state(state)
        return self

    def compute_sequence(
        self, mem_limit: Any = None, mode: str = "joint", mem_slots: int = 50, policy: Any = None, *,
        device_limit: Any = None, optimizer: Any = None, **options: Any,
    ) -> Placed:  # fmt: skip
        check_limits(mem_limit, device_limit, optimizer, policy, None, 1, False, options.get("updates"))
        if self.runner.placement is not None:
            self.runner.placement.gradients.refuse_before_step("compute_sequence")
        if device_limit is None:
            self.runner.close()
            self._begin()
            return self
        check_options(mode, mem_slots, policy, options)
        if self._check:
            raise rotoff.OptionError("check=True needs a mem_limit; leave it out with a device_limit")
        optimizers = read_optimizers(optimizer, self._model)
        request = Request(parse_bytes(device_limit, "device_limit"), mode, mem_slots, options, here=True)
        runner = PlacedRunner(self._model, optimizers, request, self._options, self._links, before=self.runner)
        runner.prepare()
        self.runner = runner
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        frozen = not any(p.requires_grad for p in self._model.parameters())
        if self.runner.request is None:
            return self._model(*args, **kwargs)
        if torch.is_grad_enabled() and (self.training or frozen):
            return self.runner.forward(args, kwargs)
        return self.runner.unplanned(self._model, args, kwargs)

    def streamed(self) -> Any:
        return self.runner.streamed()

    @property
    def _plan(self) -> Any:
        return self.runner.plan

    @property
    def sequence(self) -> Any:
        return self._plan.sequence

    @property
    def keep_all_memory(self) -> Any:
        return self.runner.keep_all_bytes

    def get_expected_memory(self) -> Any:
        return self.runner.expected_bytes

    def close(self) -> None:
        self._links.close()
        self.runner.close(resident=False)


def runner_of(model: Any) -> PlacedRunner:
    """What runs the steps of `model`."""
    return vars(model).get("_placed") or model.runner  # type: ignore[no-any-return]


def force(model: Any, optimizers: Any, share: float, host: bool = False, updates: str = "after") -> None:
    """Place everything as in so little memory that a small model's generator states would not fit beside it."""
    model.compute_sequence(device_limit="1 TiB", optimizer=optimizers, refine=False, updates=updates)
    runner = runner_of(model)
    ways = runner._ways(runner.recordings[runner.latest])
    groups = next(one for one in ways if any(g.host_update_time is not None for g in one.chain.parameters) == host)
    low, high = (
        rotoff.min_mem_limit(groups.chain, "joint", updates),
        rotoff.simulate(groups.chain, rotoff.keep_all(groups.chain, updates), updates=updates).peak_bytes,
    )
    sequence = rotoff.solve(groups.chain, int(low + share * (high - low)), refine=False, updates=updates)
    runner.courses[runner.latest] = PlacedCourse(groups, compiled(groups, sequence, runner.request))
