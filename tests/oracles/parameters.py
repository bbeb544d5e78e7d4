"""The machine with parameters once more, straight from the contract, on the JSON objects of the files and on texts
alone.

Nothing of the product is used. A state is two dicts (device, host) of texts such as ``"abar 3"`` or ``"w 1"``; times
are kept per text. `judge` runs a sequence and returns what its operations hold and how long a steady step takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Illegal(Exception):
    """The operation, by its number, and why."""


class Verdict(NamedTuple):
    """makespan: seconds. memory, host_memory: bytes while each operation runs; parameter_memory: those of w, g and o
    among the first. rows: lane, start and end of each, last period."""

    makespan: float
    memory: list[int]
    host_memory: list[int]
    rows: list[tuple[str, float, float]]
    parameter_memory: list[int]


def judge(chain: dict[str, Any], sequence: dict[str, Any], limit: float = float("inf"), after: bool = False) -> Verdict:
    """What the contract says of `sequence`, or Illegal."""
    state, ends = State(chain, sequence, limit), [0.0]
    for _ in range(4 if state.groups else 1):
        state.begin()
        start = state.clock["compute"]
        for n, text in enumerate(sequence["ops"]):
            following = next((other for other in sequence["ops"][n + 1 :] if other[0] in "FBU"), "")
            try:
                state.run(text, following)
            except Illegal as why:
                raise Illegal(f"{n} {text}: {why}") from why
        state.end()
        ends.append(state.clock["compute"])
    if after:
        _check_after(sequence)
    makespan = (ends[4] - ends[2]) / 2 if state.groups else ends[1]
    rows = [(lane, a - start, b - start) for lane, a, b in state.rows]
    return Verdict(makespan, state.memory, state.host_memory, rows, state.parameter_memory)


def _check_after(sequence: dict[str, Any]) -> None:
    ops = sequence["ops"]
    for n, text in enumerate(ops):
        if text[0] in "UH" and n < ops.index("B 1"):
            raise Illegal(f"{n} {text}: before B 1")
    for value in sequence["resident"]:
        if value[0] == "o" and _in_flight(value, ops):
            raise Illegal(f"{value} in flight")


def _in_flight(value: str, ops: list[str]) -> bool:
    wait = ops.index(f"wait {value}") if f"wait {value}" in ops else len(ops)
    fetch = ops.index(f"prefetch {value}") if f"prefetch {value}" in ops else len(ops)
    return wait < fetch


class State:
    def __init__(self, chain: dict[str, Any], sequence: dict[str, Any], limit: float) -> None:
        self.chain, self.limit, self.L = chain, limit, len(chain["stages"])
        self.stages = dict(enumerate(chain["stages"], start=1))
        self.groups = dict(enumerate(chain.get("parameters", []), start=1))
        self.sizes = {"a 0": chain["input_bytes"]}
        for i, stage in self.stages.items():
            self.sizes[f"a {i}"] = stage["output_bytes"]
        for k, group in self.groups.items():
            sizes = {"w": group["bytes"], "g": group["grad_bytes"], "o": group["state_bytes"]}
            self.sizes.update({f"{name} {k}": size for name, size in sizes.items() if size})
        self.clock = {"compute": 0.0, "d2h": 0.0, "h2d": 0.0, "host": 0.0}
        self.copied: dict[str, float] = {}  # end of the last copy
        self.valid_at: dict[str, float] = {}  # when the host has it
        self.device: set[str] = {"a 0"}
        self.host: set[str] = set()
        self.arriving: set[str] = set()
        for value in self.sizes:
            if value[0] in "wo":
                self._rest(value, sequence["ops"], value in sequence["resident"])
        for value in sequence["resident"]:
            if self.sizes.get(value, 0) == 0 or value[0] not in "wo":
                raise Illegal(f"resident {value}")
        self.at_rest = (set(self.device), set(self.host), set(self.arriving))

    def _rest(self, value: str, ops: list[str], resident: bool) -> None:
        k = value.split()[1]
        if not resident:
            self.host.add(value)
            return
        self.device.add(value)
        frozen = not self.groups[int(k)]["grad_bytes"]
        about = [op for op in ops if op in (f"offload {value}", f"prefetch {value}", f"U {k}")]
        if (
            f"H {k}" in ops
            or (frozen and (f"drop {value}" in ops or f"free {value}" in ops))
            or (about and about[-1] != f"U {k}")
        ):
            self.host.add(value)
        if _in_flight(value, ops):
            self.arriving.add(value)

    def begin(self) -> None:
        self.todo, self.turned = self.L, False  # the next backward; whether the backward phase has begun
        self.whole: set[str] = set()
        self.issued: set[str] = set()
        self.updated: set[int] = set()
        self.forms: dict[int, int] = {}
        self.ran: set[int] = set()
        self.memory: list[int] = []
        self.host_memory: list[int] = []
        self.parameter_memory: list[int] = []
        self.rows: list[tuple[str, float, float]] = []

    def end(self) -> None:
        _need(self.todo == 0, "B 1 is missing")
        _need(self.updated == {k for k, group in self.groups.items() if group["grad_bytes"]}, "an update is missing")
        self.device.remove(f"a {self.L}")
        _need((self.device, self.host, self.arriving) == self.at_rest, "it ends in another state than it began in")

    # -- what is held

    def gradient(self, i: int) -> int:
        return self.chain["input_grad_bytes"] if i == 0 else self.stages[i]["grad_bytes"]

    def held(self) -> int:
        return sum(self.sizes[v] for v in self.device) + (self.gradient(self.todo) if self.turned else 0)

    def of_parameters(self) -> int:
        return sum(self.sizes[v] for v in self.device if v[0] in "wgo")

    def usable(self, value: str) -> bool:
        return (self.sizes.get(value) == 0 and value[0] in "wgo") or (
            value in self.device and value not in self.arriving
        )

    def charge(self, more: int) -> None:
        self.memory.append(self.held() + more)
        _need(self.memory[-1] <= self.limit, "too many bytes")

    def note(self, lane: str, start: float, end: float) -> None:
        self.rows.append((lane, start, end))

    # -- operations

    def run(self, text: str, following: str) -> None:
        """following: the next operation on the compute lane."""
        word, *rest = text.split()
        theirs = self.of_parameters()
        before = sum(self.sizes[v] for v in self.host)
        if word in ("U", "H"):
            self.update(word, int(rest[0]))
        elif word == "B" or word.startswith("F_"):
            i = int(rest[0])
            _need(1 <= i <= self.L and self.todo > 0, "no such stage, or all is done")
            _need(self._has_parameters(i), "parameters are missing")
            if word == "B":
                self.backward(i)
            else:
                again, saves = i in self.ran, word in ("F_all", "F_sel")
                self.ran.add(i)
                early = again and saves and following == f"B {i}"
                self.forward(word, i, int(rest[1]) if len(rest) > 1 else 0, early)
        else:
            self.move(word, " ".join(rest))
            before = sum(self.sizes[v] for v in self.host)
        self.host_memory.append(before)
        self.parameter_memory.append(max(theirs, self.of_parameters()))

    def _has_parameters(self, i: int) -> bool:
        return all(
            self.usable(f"w {k}") or not group["bytes"] for k, group in self.groups.items() if i in group["stages"]
        )

    def _form(self, i: int, k: int) -> dict[str, Any]:
        return self.stages[i] if k == 0 else self.stages[i]["forms"][k - 1]

    def forward(self, word: str, i: int, k: int, early: bool) -> None:
        stage, made = self.stages[i], f"a {i}" if word in ("F_ck", "F_none") else f"abar {i}"
        source = [f"a {i - 1}"] if word == "F_none" else [f"a {i - 1}", f"abar {i - 1}"]
        _need(any(map(self.usable, source)), "the input is missing")
        _need(made not in self.device and f"abar {i}" not in self.device, "it is there already")
        _need(not (made.startswith("abar") and made in self.host), "it is on the host")
        _need(k <= len(stage.get("forms", ())), "no such form")
        saves = made.startswith("abar")
        size = self._form(i, k)["saved_bytes"] if saves else stage["output_bytes"]
        self.charge(
            size + (self._form(i, k)["forward_transient_bytes"] if saves else stage["checkpoint_transient_bytes"])
        )
        seconds = stage["forward_time"] - (stage.get("tail_time", 0.0) if early else 0.0)
        self.compute(seconds, [f"a {i - 1}"] if word == "F_none" and i > 1 else [])
        self.sizes[made] = size
        self.device.add(made)
        self.forms.update({i: k} if saves else {})
        self.turned |= i == self.L

    def backward(self, i: int) -> None:
        _need(i == self.todo, "not the next backward")
        _need(self.usable(f"abar {i}"), "abar is missing")
        _need(self.usable(f"a {i - 1}") or self.usable(f"abar {i - 1}"), "the input is missing")
        form = self._form(i, self.forms[i])
        begun = [k for k, group in self.groups.items() if group["grad_bytes"] and max(group["stages"]) == i]
        grads = sum(self.groups[k]["grad_bytes"] for k in begun)
        self.charge(grads + self.gradient(i - 1) + form["backward_transient_bytes"])
        lost = [f"abar {i}", f"a {i}"] + ([f"a {i - 1}"] if i > 1 and f"a {i - 1}" in self.device else [])
        self.compute(form["backward_time"], lost)
        self.host -= set(lost)
        self.device |= {f"g {k}" for k in begun} | ({f"a {i}"} if i == self.L else set())
        self.whole |= {
            f"g {k}" for k, group in self.groups.items() if group["grad_bytes"] and min(group["stages"]) == i
        }
        self.todo = i - 1

    def update(self, word: str, k: int) -> None:
        _need(k in self.groups and self.groups[k]["grad_bytes"] > 0 and k not in self.updated, "nothing to update")
        group, grads = self.groups[k], f"g {k}"
        values = [v for v in (f"w {k}", grads, f"o {k}") if v in self.sizes]
        others = [v for v in values if v != grads]
        _need(grads in self.whole, "the gradient is not whole")
        if word == "U":
            _need(all(map(self.usable, values)), "a value is missing")
            self.charge(group["update_transient_bytes"])
            start = max([self.clock["compute"], *(self.copied.get(v, 0.0) for v in values)])
            self.clock["compute"] = start + group["update_time"]
            self.note("compute", start, self.clock["compute"])
            self.device.remove(grads)
            self.host -= set(values)
        else:
            _need(group.get("host_update_time") is not None and grads in self.host, "not on the host")
            _need(all(v in self.host and v not in self.device for v in others), "w or o is not on the host alone")
            self.charge(0)
            start = max(self.clock["compute"], self.clock["host"], self.valid_at[grads])
            self.clock["host"] = start + group["host_update_time"]
            self.note("host", start, self.clock["host"])
            self.valid_at.update(dict.fromkeys(others, self.clock["host"]))
            self.host.remove(grads)
        self.updated.add(k)

    def move(self, word: str, v: str) -> None:
        if v[0] in "wgo":
            _need(v in self.sizes, "it does not exist")
        else:
            _need(self.todo > 0 and v not in ("a 0", f"a {self.L}", f"abar {self.L}"), "never moved")
        getattr(self, word)(v)

    def offload(self, v: str) -> None:
        _need(self.usable(v) and v not in self.host and v not in self.issued, "not here, or there already")
        _need(v[0] != "g" or v in self.whole, "the gradient is not whole")
        self.charge(0)
        self.host.add(v)
        self.issued |= {v} if v[0] == "g" else set()
        self.valid_at[v] = self.copy("d2h", v, 0.0)

    def free(self, v: str) -> None:
        _need(self.usable(v) and (v in self.host or v in self.issued), "not here, or not there")
        self.charge(0)
        self.compute(0.0, [v])

    def drop(self, v: str) -> None:
        _need(self.usable(v) and v[0] != "g" and (v[0] not in "wo" or v in self.host), "not here, or the last copy")
        self.charge(0)
        self.compute(0.0, [v])

    def prefetch(self, v: str) -> None:
        _need(v in self.host and v not in self.device, "not there, or here already")
        self.charge(self.sizes[v])
        self.device.add(v)
        self.arriving.add(v)
        self.copy("h2d", v, self.valid_at.get(v, 0.0))

    def wait(self, v: str) -> None:
        _need(v in self.arriving, "not arriving")
        self.charge(0)
        start = self.clock["compute"]
        self.clock["compute"] = max(start, self.copied.get(v, 0.0))
        self.note("compute", start, self.clock["compute"])
        self.arriving.remove(v)

    # -- time

    def compute(self, lasts: float, lost: list[str]) -> None:
        start = self.clock["compute"]
        self.clock["compute"] = max([start + lasts, *(self.copied.pop(v, 0.0) for v in lost)])
        self.note("compute", start, start + lasts if lasts > 0 else self.clock["compute"])
        self.device -= set(lost)
        self.arriving -= set(lost)

    def copy(self, lane: str, v: str, earliest: float) -> float:
        lanes = [lane] if self.chain["duplex"] else ["d2h", "h2d"]
        start = max([self.clock["compute"], earliest, *(self.clock[name] for name in lanes)])
        end = start + self.sizes[v] / self.chain[f"{lane}_bandwidth"]
        self.clock.update(dict.fromkeys(lanes, end))
        self.copied[v] = max(end, self.copied.get(v, 0.0))
        self.note(lane, start, end)
        return end


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise Illegal(why)
