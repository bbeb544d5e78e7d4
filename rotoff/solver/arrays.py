"""A chain as arrays for the kernels, and what its operations need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..core.chain import Chain
from ..core.sizes import format_bytes
from ..errors import ChainError


@dataclass(frozen=True)
class Arrays:
    """A chain as arrays for the kernels; row i is stage i, row 0 stands for a_0; exact bytes and seconds.

    saved, f_transient, b_transient, u_B: a column for each form; `n_forms` of them are valid. u_again: seconds of a
    forward that stops early (`core.simulator.early_stops`); no plan runs stage L again.
    """

    out: np.ndarray
    grad: np.ndarray
    u_F: np.ndarray
    u_again: np.ndarray
    ck_transient: np.ndarray
    n_forms: np.ndarray
    saved: np.ndarray
    f_transient: np.ndarray
    b_transient: np.ndarray
    u_B: np.ndarray

    @property
    def real(self) -> np.ndarray:
        """Mask of the valid columns of each stage."""
        return np.arange(self.u_B.shape[1]) < self.n_forms[:, None]

    @property
    def fastest(self) -> np.ndarray:
        """Seconds of each stage's backward in its fastest form."""
        return np.where(self.real, self.u_B, np.inf).min(axis=1)

    @property
    def entry(self) -> np.ndarray:
        """Bytes of the smallest value that holds the input of stage i + 1: a_i or a form of ā_i; 0 for a_0 and a_L,
        which the caller holds."""
        smallest = np.where(self.real, self.saved, np.iinfo(np.int64).max).min(axis=1)
        return np.concatenate([[0], np.minimum(self.out, smallest)[1:-1], [0]])

    # What an operation needs beside its input, in bytes: the M of the NeurIPS 2021 supplement. The caller has a_L once
    # it is made, so all needs after that of B L have it.

    @cached_property
    def delta(self) -> np.ndarray:
        """[j]: δ_j, and a_L; forwards of the backward phase need it beside their own."""
        return self.grad + self.out[-1] * (np.arange(len(self.out)) < len(self.out) - 1)

    @cached_property
    def M_all(self) -> np.ndarray:
        """[i, form]: F_all i, or F_sel i."""
        return self.saved + self.f_transient

    @cached_property
    def M_ck(self) -> np.ndarray:
        """[i, q]: F_ck i where q = i, F_∅ q with a_{q-1} where q > i, else 0; row 0 and column L are 0."""
        made = self.out + self.ck_transient
        dropped = np.concatenate([[0], self.out[:-1]])
        step = np.triu(np.tile(made + dropped, (len(made), 1)), 1) + np.diag(made)
        step[0], step[:, -1] = 0, 0
        return step

    @cached_property
    def M_sweep(self) -> np.ndarray:
        """[i, k]: F_ck i, F_∅ i+1..k."""
        return np.maximum.accumulate(self.M_ck, axis=1)

    @cached_property
    def M_B(self) -> np.ndarray:
        """[i, form]: B i, with δ_i and δ_{i-1}."""
        before = np.concatenate([[0], self.grad[:-1]])
        return self.saved + self.b_transient + (self.delta + before)[:, None]

    def apart(self, limit: int, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """[i, form]: 1 where that ā_i does not fit beside F i+1, 2 where not beside B i+1, 3 where beside neither.

        limit: at most `MOST_LIMIT`. forward, backward: least bytes that the operations of stages 1 to L need.
        """
        more, found = self.saved - self.entry[:, None], np.zeros(self.saved.shape, np.int8)
        beside_F, beside_B = (np.maximum(limit - needs, 0)[:, None] for needs in (forward, backward))
        found[:-1] = (more[:-1] > beside_F) + 2 * (more[:-1] > beside_B)
        return found


MOST_BYTES = 2**54  # most bytes of all values together; times 500 slots they still fit 64 bits
MOST_LIMIT = 4 * MOST_BYTES  # more than any sequence holds


@lru_cache(maxsize=32)
def arrays(chain: Chain) -> Arrays:
    """The costs of `chain` as arrays.

    Raises:
        ChainError: if its values come to more than `MOST_BYTES`.
    """
    total = _all_bytes(chain)
    if total > MOST_BYTES:
        raise ChainError(
            f"the chain's values come to {total} bytes ({format_bytes(total)}) in all, and planning takes at most"
            f" {MOST_BYTES} ({format_bytes(MOST_BYTES)}); give sizes in bytes, of one step"
        )
    L, K = len(chain), 1 + max(len(s.forms) for s in chain.stages)
    forms = [[stage.form(k) for k in range(1 + len(stage.forms))] for stage in chain.stages]

    def table(name: str, dtype: Any) -> np.ndarray:
        made = np.zeros((L + 1, K), dtype=dtype)
        for i, stage_forms in enumerate(forms, start=1):
            for k, form in enumerate(stage_forms):
                made[i, k] = getattr(form, name)
        return made

    return Arrays(
        out=np.array([chain.output_bytes(i) for i in range(L + 1)], np.int64),
        grad=np.array([chain.grad_bytes(i) for i in range(L + 1)], np.int64),
        u_F=np.array([0.0, *(s.forward_time for s in chain.stages)]),
        u_again=np.array(
            [0.0, *(s.forward_time - s.tail_time for s in chain.stages[:-1]), chain.stages[-1].forward_time]
        ),
        ck_transient=np.array([0, *(s.checkpoint_transient_bytes for s in chain.stages)], np.int64),
        n_forms=np.array([1, *map(len, forms)], np.int32),
        saved=table("saved_bytes", np.int64),
        f_transient=table("forward_transient_bytes", np.int64),
        b_transient=table("backward_transient_bytes", np.int64),
        u_B=table("backward_time", np.float64),
    )


def _all_bytes(chain: Chain) -> int:
    forms = [stage.form(k) for stage in chain.stages for k in range(1 + len(stage.forms))]
    values = sum(chain.output_bytes(i) + chain.grad_bytes(i) for i in range(len(chain) + 1))
    transients = sum(stage.checkpoint_transient_bytes or 0 for stage in chain.stages)
    made = sum(form.saved_bytes + form.forward_transient_bytes + form.backward_transient_bytes for form in forms)
    groups = sum(g.bytes + g.grad_bytes + g.state_bytes + g.update_transient_bytes for g in chain.parameters)
    return values + transients + made + groups


# -- what parameters, gradients and optimizer states need on the device, whatever the plan


def own_needs(chain: Chain, updates: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Bytes of parameters that every forward and every backward (by stage, entry 0 is 0) needs, and the largest need of
    a ``U``.

    A gradient that is not whole stays. ``U`` counts where no ``H`` is possible, at the best moment that `updates`
    allows.
    """
    L = len(chain)
    forward, backward = np.zeros(L + 1, dtype=np.int64), np.zeros(L + 1, dtype=np.int64)
    for group in chain.parameters:
        for i in group.stages:
            forward[i] += group.bytes
            backward[i] += group.bytes
        backward[min(group.stages) : max(group.stages) + 1] += group.grad_bytes
    held, update = _held_between(chain), 0
    for k, stage in update_moments(chain, updates).items():
        group = chain.group(k)
        if group.host_update_time is None:
            values = group.bytes + group.grad_bytes + group.state_bytes + group.update_transient_bytes
            update = max(update, chain.input_bytes + chain.output_bytes(L) + int(held[stage - 1]) + values)
    return forward, backward, update


def update_moments(chain: Chain, updates: str) -> dict[int, int]:
    """The stage after whose B each group is updated, by its number, so that least is held beside it."""
    held = _held_between(chain)
    return {
        k: 1 + min(range(1 if updates == "after" else min(group.stages)), key=lambda j: int(held[j]))
        for k, group in enumerate(chain.parameters, start=1)
        if group.grad_bytes
    }


def _held_between(chain: Chain) -> np.ndarray:
    """[j]: bytes of δ_j and of the gradients that are not whole between B j+1 and B j."""
    held = np.array([chain.grad_bytes(j) for j in range(len(chain) + 1)])
    for group in chain.parameters:
        held[min(group.stages) : max(group.stages)] += group.grad_bytes
    return held
