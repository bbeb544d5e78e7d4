"""A chain as text: its stages, its groups of parameters, and what keeping everything takes."""

from __future__ import annotations

from ..core.chain import Chain
from ..core.figures import table
from ..core.sizes import format_bytes, format_seconds
from .expected_step import keep_all_step
from .summary import ranges

_WIDE = 40  # most characters of a name


def chain_table(chain: Chain) -> str:
    """A chain as text: a line for each stage, the sums, and a line for each group of parameters."""
    head = ("stage", "module", "output", "saved", "transient", "forward", "backward", "or saved")
    rows = []
    for i, s in enumerate(chain.stages, start=1):
        transient = max(s.forward_transient_bytes, s.backward_transient_bytes)
        sizes = (format_bytes(n) for n in (s.output_bytes, s.saved_bytes, transient))
        forms = " / ".join(format_bytes(form.saved_bytes) for form in s.forms)
        rows.append(
            (str(i), _short(s.name), *sizes, format_seconds(s.forward_time), format_seconds(s.backward_time), forms)
        )
    link = f"{format_bytes(chain.d2h_bandwidth)}/s to the host, {format_bytes(chain.h2d_bandwidth)}/s back"
    way = "both at once" if chain.duplex else "one at a time"
    if min(chain.bidirectional_shares) < 1:
        way += " at {:.0%} and {:.0%} of that".format(*chain.bidirectional_shares)
    lines = [*table(head, rows, (1, 7)), "", f"{chain.name or 'chain'}: {len(chain)} stages; {keep_all_line(chain)}"]
    return "\n".join([*lines, f"link: {link}, {way}", *_groups(chain)])


def keep_all_line(chain: Chain) -> str:
    """What keeping everything takes, as text."""
    whole = keep_all_step(chain)
    size, before = format_bytes(whole.peak_bytes), format_bytes(chain.input_bytes)
    takes = f"keeping everything takes {whole.makespan:.4g} s and {size} as the solver charges it"
    return f"{takes}, {before} of it before the first stage"


def _groups(chain: Chain) -> list[str]:
    """Lines for the groups of parameters, and their sums; none if there are no groups."""
    if not chain.parameters:
        return []
    rows = []
    for k, group in enumerate(chain.parameters, start=1):
        sizes = map(format_bytes, (group.bytes, group.grad_bytes, group.state_bytes))
        update = format_seconds(group.update_time) if group.grad_bytes else "frozen"
        on_host = "" if group.host_update_time is None else format_seconds(group.host_update_time)
        rows.append((str(k), _short(group.name), ranges(group.stages), *sizes, update, on_host))
    head = ("group", "name", "stages", "parameters", "gradients", "states", "update", "on the host")
    sums = [sum(getattr(g, name) for g in chain.parameters) for name in ("bytes", "grad_bytes", "state_bytes")]
    told = ", ".join(f"{words} {format_bytes(n)}" for words, n in zip(head[3:6], sums, strict=True))
    return ["", *table(head, rows, (1,)), "", f"{told}: {format_bytes(sum(sums))} in all"]


def _short(name: str) -> str:
    return name if len(name) <= _WIDE else f"…{name[-_WIDE + 1 :]}"
