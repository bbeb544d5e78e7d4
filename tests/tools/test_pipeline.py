"""Pipelines: the orders of schedules and the simulator against closed forms, plans for several micro-batches in flight,
and steps of ``torch.distributed.pipelining`` in processes on the CPU."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from thoroughness import seeds

import rotoff
from rotoff.core.pipeline import StagePlan, Task, most_in_flight, orders, simulate_pipeline, stage_plan
from rotoff.solver.in_flight import least_in_flight, needed_bytes, resting_bytes, solve_in_flight, turn
from rotoff.solver.pipeline import Pipeline, cut, plan_pipeline


def stage(forward: float = 1.0, backward: float = 2.0, saved: int = 10) -> StagePlan:
    chain = rotoff.Chain((rotoff.Stage("s", forward, backward, 2, saved),), 1e9, 1e9)
    sequence = rotoff.keep_all(chain)
    return stage_plan(chain, rotoff.simulate(chain, sequence), turn(sequence.ops, 1))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "many"), [(1, 1), (2, 2), (4, 16), (7, 20), (64, 128)])
def test_bubbles_are_those_of_the_closed_form(schedule: str, ranks: int, many: int) -> None:
    order = orders(schedule, ranks, many)
    found = simulate_pipeline([stage()] * ranks, order)
    assert found.makespan == pytest.approx(3 * (many + ranks - 1))
    assert found.bubble == pytest.approx((ranks - 1) / (many + ranks - 1))
    in_flight = [many if schedule == "GPipe" else min(many, ranks - rank) for rank in range(ranks)]
    assert [most_in_flight(one) for one in order] == in_flight
    assert [rank.peak_bytes for rank in found.ranks] == [10 * k + 2 for k in in_flight]  # and one gradient


@pytest.mark.parametrize(("ranks", "many", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 16, 3)])
def test_interleaving_divides_the_bubble(ranks: int, many: int, chunks: int) -> None:
    stages = [stage(1 / chunks, 2 / chunks)] * (ranks * chunks)
    found = simulate_pipeline(stages, orders("Interleaved1F1B", ranks, many, chunks))
    assert found.makespan == pytest.approx(3 * many + 3 * (ranks - 1) / chunks)


def test_the_slowest_rank_decides() -> None:
    """By hand: the second of two stages is slow, so the first one waits."""
    stages, order = [stage(1, 1), stage(3, 5)], orders("1F1B", 2, 3)
    found = simulate_pipeline(stages, order)
    assert found.makespan == 1 + 3 * (3 + 5) + 1
    assert [rank.idle_time for rank in found.ranks] == [26 - 6, 26 - 24]


def test_an_order_that_cannot_run_is_refused() -> None:
    order = ((Task(0, True, 0), Task(0, False, 0)), (Task(1, False, 0), Task(1, True, 0)))
    with pytest.raises(rotoff.OptionError, match="waits forever"):
        simulate_pipeline([stage()] * 2, order)


def test_ranks_that_share_a_link_wait_for_each_other() -> None:
    """Each of four pipelines of one stage moves its first value out and in, hidden under three other stages."""
    cost = rotoff.Stage("s", 1.0, 1.0, 0, 10, grad_bytes=0)
    chain = rotoff.Chain((cost,) * 4, 5.0, 5.0)
    ops = ["F_all 1", "offload abar 1", *(f"F_all {i}" for i in (2, 3, 4)), "free abar 1", "B 4"]
    sequence = rotoff.Sequence.from_text([*ops, "prefetch abar 1", "B 3", "wait abar 1", "B 2", "B 1"])
    trace = rotoff.simulate(chain, sequence)
    assert trace.makespan == 9  # a second of waiting for the copy back, of two
    plan = stage_plan(chain, trace, turn(sequence.ops, 4))
    assert (plan.resting_bytes, plan.resting_host_bytes) == (30, 10)
    order = orders("1F1B", 2, 2)
    assert simulate_pipeline([plan] * 2, order).ranks[1].copy_time == 2
    together = simulate_pipeline([plan] * 2, order, ranks_per_link=2)
    assert together.makespan >= simulate_pipeline([plan] * 2, order).makespan
    # The first rank's second forward and the second rank's first one begin at once, and so do their copies.
    assert together.ranks[1].copy_time > 2


def drawn(rng: random.Random, forms: bool) -> rotoff.Chain:
    stages = []
    for _ in range(rng.randint(1, 6)):
        output = rng.randint(0, 20)
        smaller = (rotoff.Form(output, 3.0, 2, 2),) if forms else ()
        saved, transient = output + rng.randint(0, 40), rng.randint(0, 9)
        times = rng.uniform(0.5, 2), rng.uniform(0.5, 3)
        stages.append(rotoff.Stage("s", *times, output, saved, None, transient, None, transient, smaller))
    return rotoff.Chain(tuple(stages), rng.uniform(5, 60), rng.uniform(5, 60), input_bytes=rng.randint(0, 9))


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.grid
def test_micro_batches_in_flight_fit_together(mode: str) -> None:
    """What the plans hold, by a machine that runs them one after another, is within the limit; below the smallest
    limit nothing is found, and all of the bytes cost no time."""
    rng = random.Random(mode)
    for n in seeds(8):
        chain, k, beside = drawn(rng, n % 2 == 1), rng.randint(2, 5), rng.randint(0, 3)
        least = least_in_flight(chain, mode, k, beside)
        everything = needed_bytes(chain, rotoff.keep_all(chain).ops, k, beside)
        order = tuple(Task(0, backward, m) for backward in (False, True) for m in range(k))
        for share in (0.0, 0.3, 0.7, 1.0):
            limit = int(least + share * max(0, everything - least))
            plan = solve_in_flight(chain, limit, k, beside, mode, refine=0.02)
            trace = rotoff.simulate(chain, plan, plan.mem_limit)
            run = simulate_pipeline([stage_plan(chain, trace, turn(plan.ops, len(chain)), beside)], (order,))
            assert run.ranks[0].peak_bytes <= limit + beside  # of the one that works it is in the limit already
            assert needed_bytes(chain, plan.ops, k, beside) <= limit
            assert plan.meta["resting_bytes"] == resting_bytes(chain, plan.ops)
            assert run.makespan <= k * trace.makespan * (1 + 1e-9)
        assert plan.meta["makespan"] == pytest.approx(chain.compute_time)
        if least > 1:
            with pytest.raises(rotoff.InfeasibleError) as refused:
                solve_in_flight(chain, least - 1, k, beside, mode, refine=False)
            assert refused.value.min_mem_limit >= least


@pytest.mark.slow
def test_resting_bytes_are_traded_for_room() -> None:
    """Where little may rest, moving all of it out beats the plan of one step with that share of the limit."""
    cost = rotoff.Stage("s", 1.0, 2.0, 1, 100, 1, 0, 0, 50)
    chain = rotoff.Chain((cost,) * 12, 60.0, 60.0)
    full = needed_bytes(chain, rotoff.keep_all(chain).ops, 8)
    limit = full // 5
    found, alone = solve_in_flight(chain, limit, 8, refine=0.2), rotoff.solve(chain, limit // 8)
    assert found.meta["makespan"] < alone.meta["makespan"]
    assert found.meta["resting_bytes"] < limit // 8 < found.meta["peak_bytes"]


def transformer(blocks: int = 10) -> rotoff.Chain:
    block = rotoff.Stage("block", 1.0, 2.0, 4, 68, None, 8, None, 16, (rotoff.Form(40, 2.2, 8, 16),))
    ends = rotoff.Stage("embed", 0.1, 0.1, 4, 4), rotoff.Stage("head", 0.5, 1.0, 1, 30, 1, 0, 0, 30)
    return rotoff.Chain((ends[0], *[block] * blocks, ends[1]), 30.0, 30.0)


@pytest.mark.parametrize(("stages", "blocks"), [(1, 3), (2, 10), (4, 10), (12, 10)])
def test_a_cut_is_the_best_of_all(stages: int, blocks: int) -> None:
    chain = transformer(blocks)
    pieces = cut(chain, stages)
    assert [stage for piece in pieces for stage in piece.stages] == list(chain.stages)
    times = [stage.forward_time + stage.backward_time for stage in chain.stages]
    every = combinations(range(1, len(times)), stages - 1)
    slowest = min(max(sum(times[a:b]) for a, b in pairwise((0, *ends, len(times)))) for ends in every)
    assert max(piece.compute_time for piece in pieces) == pytest.approx(slowest)
    for before, after in pairwise(pieces):
        assert after.input_bytes == before.output_bytes(len(before))


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("1F1B", 1),
        pytest.param("GPipe", 1, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_every_rank_keeps_its_limit(schedule: str, chunks: int) -> None:
    pipeline = Pipeline(cut(transformer(8), 4 * chunks), orders(schedule, 4, 8, chunks), ranks_per_link=2, beside=3)
    everything = pipeline.keep_everything()
    most = max(rank.peak_bytes for rank in everything.ranks)
    for share in (0.8, 0.5):
        limits = [int(share * most) + 5 * rank for rank in range(4)]  # none like another
        found = plan_pipeline(pipeline, limits, refine=0.02)
        assert all(rank.peak_bytes <= limit for rank, limit in zip(found.trace.ranks, limits, strict=True))
        assert found.trace.makespan >= everything.makespan * (1 - 1e-9)
    with pytest.raises(rotoff.InfeasibleError, match="rank 0"):
        plan_pipeline(pipeline, [pipeline.least(0) - 1] * 4, refine=False)


@pytest.mark.slow
def test_an_equal_part_of_a_shared_link_is_not_all_that_plans_count_on() -> None:
    pipeline = Pipeline(cut(transformer(8), 2), orders("1F1B", 2, 4), ranks_per_link=2)
    limits = [int(0.4 * max(rank.peak_bytes for rank in pipeline.keep_everything().ranks))] * 2
    whole = plan_pipeline(replace(pipeline, ranks_per_link=1), limits, refine=0.02)
    found = plan_pipeline(pipeline, limits, refine=0.02)
    assert found.trace.makespan <= pipeline.run(whole.plans).makespan


torch = pytest.importorskip("torch")
from ranks import printed  # noqa: E402

from rotoff.solver import anneal  # noqa: E402

needs_processes = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def test_a_pipeline_is_planned_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anneal, "DEFAULT_SECONDS", 0.01)
    with torch.device("meta"):
        sizes = [256, 1024] * 4
        layers = [(torch.nn.Linear(a, b), torch.nn.GELU()) for a, b in pairwise(sizes)]
        model = torch.nn.Sequential(*[one for layer in layers for one in layer])
        batch = torch.zeros(4096, 256)
    plain = rotoff.plan(model, batch, device="A100", pipeline=2, microbatches=8, mem_limit="1 GiB")
    limit = int(0.6 * plain.rows[0].keep_all_bytes)
    found = rotoff.plan(model, batch, device="A100", pipeline=2, microbatches=8, mem_limit=limit)
    beyond = rotoff.plan(model, batch, device="A100", pipeline=2, microbatches=8, mem_limit="1 TiB")
    assert all(row.mem_limit < 80 * 2**30 for row in beyond)
    assert [row.in_flight for row in found] == [2, 1]
    assert all(row.min_mem_limit <= row.peak_bytes <= limit for row in found)
    assert found.keep_all_time == plain.step_time <= found.step_time
    parameters = sum(p.nbytes for p in model.parameters())
    assert sum(row.resident_bytes for row in found) == 4 * parameters  # with gradients and Adam's states
    assert "1F1B, 8 micro-batches on 2 x A100" in str(found)
    with pytest.raises(rotoff.InfeasibleError, match="rank 0 of the pipeline needs at least"):
        rotoff.plan(model, batch, device="A100", pipeline=2, microbatches=8, mem_limit=found.rows[0].min_mem_limit // 2)


LINE = re.compile(r"(\w+) (\d): equal=(\w+) (\d+) of (\d+) \((\d+)\), (\d+) in flight")
REFUSED = "2 pipeline_steps refused"
LINKS = "2 pipeline_steps together", "2 pipeline_steps late"
IN_FLIGHT = {
    "2 pipeline_steps gpipe": [8, 8],
}
FURTHER = {
    "2 pipeline_steps 1f1b": [2, 1],
    "2 pipeline_steps interleaved": [5, 3],
    "4 pipeline_steps 1f1b": [4, 3, 2, 1],
    "2 pipeline_steps told": [5, 3],
    "4 pipeline_steps interleaved": [11, 9, 7, 5],
}
SPLIT = {  # two processes run each stage together
    "4 pipeline_steps split": [2, 2, 1, 1],
    "4 pipeline_steps split_interleaved": [5, 5, 3, 3],
}


@needs_processes
@pytest.mark.early
@pytest.mark.parametrize(
    "cases",
    [IN_FLIGHT, *(pytest.param(cases, marks=pytest.mark.slow) for cases in (FURTHER, SPLIT))],
    ids=["few", "further", "split"],
)
def test_unequal_ranks_keep_their_limits_and_the_gradients(cases: dict[str, list[int]]) -> None:
    """Bit for bit those of the same schedule without rotoff; each process holds no more than its own limit."""
    found = printed(*cases, *([REFUSED, *LINKS] if cases is IN_FLIGHT else []))
    for case, in_flight in cases.items():
        said = LINE.findall("\n".join(found[case]))
        assert len(said) == len(in_flight) * (3 if case.endswith("gpipe") else 1)
        for mode, rank, equal, peak, limit, plain, many in said:
            assert equal == "True", (case, mode, rank)
            assert int(peak) <= int(limit) < int(plain), (case, mode, rank, peak, limit, plain)
            assert int(many) == in_flight[int(rank)]


@needs_processes
@pytest.mark.early
def test_what_does_not_work_is_refused() -> None:
    """Schedules that split the backward, in a sentence that names those which do not."""
    said = printed(*IN_FLIGHT, REFUSED, *LINKS)[REFUSED]
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
        found = [line for line in said if line.startswith(f"OptionError: {name} splits the backward (")]
        assert len(found) == 2
        assert all(line.endswith("ScheduleInterleaved1F1B and ScheduleLoopedBFS") for line in found)
    assert said.count("in flight: in_flight is 3; the schedule determines it, so leave it out") == 2
    told = [line for line in said if line.startswith("all ranks: ")]
    assert len(told) == 4  # as an argument and in a configuration
    assert set(told) == {
        f"all ranks: process_group has the ranks [{rank}] of other stages; give the group of the processes that run the"
        ' same stage together, such as mesh["tp"].get_group()'
        for rank in (0, 1)
    }
    assert said.count("bare: equal True") == 2, said


@needs_processes
@pytest.mark.early
def test_stages_of_a_process_are_attached_together_or_not_at_all() -> None:
    """They share host memory, and after `rotoff.detach` nothing is left."""
    said = printed(*IN_FLIGHT, REFUSED, *LINKS)[REFUSED]
    assert sum(line.startswith("raised: the model is attached already") for line in said) == 2
    assert said.count("one link: True") == said.count("hooks left: [0, 0]") == 2


@needs_processes
@pytest.mark.early
def test_ranks_of_a_host_share_its_link_and_memory() -> None:
    """The link is measured while all of them copy, and once; a rank that is missing or late keeps nobody waiting."""
    found = printed(*IN_FLIGHT, REFUSED, *LINKS)
    said = found[LINKS[0]]
    for rank in (0, 1):
        assert f"at once {rank}: [True]" in said
        assert f"link {rank}: 3e+09 2e+09" in said  # the slower of at once and alone, in each direction
        assert f"host {rank}: 500000000" in said
    assert "again 1: 2 measured" in said
    assert sorted(found[LINKS[1]]) == [f"late {rank}: (1500000000.0, 2000000000.0)" for rank in (0, 1)]
