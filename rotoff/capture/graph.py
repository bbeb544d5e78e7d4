"""Stages of a model that ``torch.fx`` can trace: its graph, cut where few bytes cross.

The traced graph is a list of operations in order. A cut after one of them is crossed by all values made before and used
after it; what crosses becomes the tuple that flows from stage to stage, skip connections included (they are handed on by
every stage in between, and charged in each, as the chain's contract says). Cuts are placed greedily: after about one n-th of
all bytes that the operations make, where the fewest bytes cross. A block's end, where only its output is alive, wins over
its middle, where the skip connection is alive too.

A cut never separates an operation that overwrites a tensor from the one that made it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..errors import MeasureError
from .stage import StageModule, flatten, storage_key

STAGES = 40  # of a model, unless asked otherwise; the solver answers for 100 while a person waits


class Segment(nn.Module):
    """A run of operations: takes the tuple that crosses the cut before them, returns the one that crosses the cut after.

    The last one returns what the model does.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, values: tuple[Any, ...]) -> Any:
        return self.graph(*values)


def stages(model: nn.Module, values: tuple[Any, ...], count: int = STAGES) -> list[StageModule]:
    """About `count` stages of `model`, cut by what its graph makes of the sample `values` (all of forward's arguments).

    The sample is run once without gradients.

    Raises:
        MeasureError: where the model's forward cannot be traced; the sentence says what stopped it.
    """
    graph = trace(model, values)
    tally = _Tally(graph)
    with torch.no_grad():
        tally.run(*values)
    cuts = _cuts(tally.costs(), count)
    return [
        StageModule(_name(nodes), (Segment(_segment(graph, nodes, enters, leaves)),))
        for nodes, enters, leaves in _pieces(graph, cuts)
    ]


def trace(model: nn.Module, values: tuple[Any, ...]) -> fx.GraphModule:
    """The graph of `model` in its present mode, for tensors in place of those in `values` and the very other arguments.

    Raises:
        MeasureError: where it cannot be traced.
    """
    try:
        names = list(inspect.signature(model.forward).parameters)
        constants = {name: v for name, v in zip(names, values, strict=True) if not flatten(v)[0]}
        return fx.symbolic_trace(model, constants)
    except Exception as error:  # a forward may fail in any way on the proxies that it is traced with
        reason = str(error).strip().splitlines()
        raise MeasureError(
            f"torch.fx cannot trace {type(model).__name__} ({reason[0] if reason else type(error).__name__})"
        ) from error


@dataclass(frozen=True)
class _Cost:
    """made: bytes of the storages that an operation adds. crossing: bytes alive after it; None where no cut may be."""

    made: int
    crossing: int | None


class _Tally(fx.Interpreter):
    """Runs the graph and notes which storages each operation makes, returns and overwrites."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._order = {node: n for n, node in enumerate(graph.graph.nodes)}
        self._resident = {storage_key(t) for t in (*graph.parameters(), *graph.buffers())}
        self._known: dict[fx.Node, list[tuple[int, int]]] = {}  # node -> (number of a storage, its bytes)
        self._birth: dict[int, int] = {}  # storage -> position of the operation that made it
        self._welded: list[tuple[int, int]] = []  # positions between which no cut may be
        self._keys: dict[fx.Node, list[tuple[int, int]]] = {}  # of live nodes: (key, number)

    def run_node(self, n: fx.Node) -> Any:
        position = self._order[n]
        inputs = [t for node in n.all_input_nodes if node in self.env for t in flatten(self.env[node])[0]]
        versions = [t._version for t in inputs]
        result = super().run_node(n)
        live = {key: number for node, pairs in self._keys.items() if node in self.env for key, number in pairs}
        for tensor, version in zip(inputs, versions, strict=True):
            number = live.get(storage_key(tensor))
            if tensor._version != version and number is not None:
                self._welded.append((self._birth[number], position))
        self._known[n], self._keys[n] = [], []
        if n.op != "output":
            for tensor in flatten(result)[0]:
                key = storage_key(tensor)
                if key in self._resident:
                    continue
                if key not in live:
                    live[key] = len(self._birth)
                    self._birth[live[key]] = position
                self._known[n].append((live[key], tensor.untyped_storage().nbytes()))
                self._keys[n].append((key, live[key]))
        return result

    def costs(self) -> list[_Cost]:
        """One for each node of the graph, in order."""
        last_use = {node: max((self._order[user] for user in node.users), default=-1) for node in self._order}
        costs = []
        for node, position in self._order.items():
            made = sum(size for number, size in dict(self._known[node]).items() if self._birth[number] == position)
            alive = [other for other, at in self._order.items() if at <= position < last_use[other]]
            welded = any(birth <= position < end for birth, end in self._welded)
            early = node.op == "placeholder" or node.op == "output"
            storages = {number: size for other in alive for number, size in self._known[other]}
            costs.append(_Cost(made, None if welded or early or not storages else sum(storages.values())))
        return costs


def _cuts(costs: list[_Cost], count: int) -> list[int]:
    """Positions after which to cut: around every n-th part of all bytes made, where the fewest cross."""
    share = sum(cost.made for cost in costs) / max(count, 1)
    cuts: list[int] = []
    made, best = 0.0, None
    for position, cost in enumerate(costs[:-1]):
        made += cost.made
        crossing = cost.crossing
        if crossing is not None and made >= share / 2 and (best is None or crossing <= (costs[best].crossing or 0)):
            best = position
        if made >= 1.5 * share and best is not None:
            cuts.append(best)
            made = float(sum(c.made for c in costs[best + 1 : position + 1]))
            best = None
    if best is not None:
        cuts.append(best)
    # A last stage without an operation of its own is none.
    return [cut for cut in cuts if cut < len(costs) - 2]


def _pieces(graph: fx.GraphModule, cuts: list[int]) -> Iterator[tuple[list[fx.Node], list[fx.Node], list[fx.Node]]]:
    """(operations, what enters, what leaves) of each stage; the output node belongs to the last."""
    nodes = list(graph.graph.nodes)
    order = {node: n for n, node in enumerate(nodes)}
    enters = [node for node in nodes if node.op == "placeholder"]
    start = 0
    for cut in [*cuts, len(nodes) - 1]:
        piece = [node for node in nodes[start : cut + 1] if node.op not in ("placeholder", "get_attr")]
        known = [*enters, *(node for node in piece if node not in enters)]
        leaves = [node for node in known if any(order[user] > cut for user in node.users)]
        yield piece, enters, leaves
        enters, start = leaves, cut + 1


def _segment(graph: fx.GraphModule, nodes: list[fx.Node], enters: list[fx.Node], leaves: list[fx.Node]) -> fx.GraphModule:
    """The operations `nodes` as a module of their own, over the model's own submodules and parameters."""
    piece = fx.Graph()
    copies = {node: piece.placeholder(node.name) for node in enters}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # parameters and buffers are fetched where they are used
            copies[node] = piece.node_copy(node)
        return copies[node]

    for node in nodes:
        if node.op == "output":
            piece.output(fx.map_arg(node.args[0], copied))
            break
        copies[node] = piece.node_copy(node, copied)
    else:
        piece.output(tuple(copies[node] for node in leaves))
    return fx.GraphModule(graph, piece)


def _name(nodes: list[fx.Node]) -> str:
    """The modules that a stage's operations begin and end in."""
    named = [str(node.target) for node in nodes if node.op == "call_module"]
    if not named:
        named = [getattr(node.target, "__name__", str(node.target)) for node in nodes if node.op != "output"] or ["output"]
    return named[0] if named[0] == named[-1] else f"{named[0]}..{named[-1]}"
