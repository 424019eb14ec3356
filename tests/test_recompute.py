import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.recompute import (
    always_kept,
    best_of,
    missing_operations,
    schedule_from_kept,
)
from optckpt.solvers.registry import Interrupted, SolveOptions, solve


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.integers(0, 10**9),
    st.sampled_from(["segments", "retained", "transient"]),
    st.sets(st.integers(0, 30)),
    st.sets(st.integers(0, 20)),
)
def test_any_kept_set_gives_a_valid_schedule(seed, policy, kept, boundaries):
    graph = synthetic.random_graph(seed, 3 + seed % 25, repeatable_backward=0.5)
    kept = {b for b in kept if b < len(graph.buffers)}
    schedule = schedule_from_kept(graph, kept, policy, sorted(boundaries))
    counts = simulate(graph, schedule).counts
    first = [o for o, before in schedule.steps() if not before]
    assert first == list(range(len(graph.operations)))
    if policy != "transient":
        assert max(counts) <= 2
    for o, op in enumerate(graph.operations):
        if not op.forward or (op.writes and kept.issuperset(op.writes)):
            assert counts[o] == 1


def test_everything_kept_is_the_plain_step():
    graph = synthetic.resnet(2, 2)
    everything = range(len(graph.buffers))
    assert schedule_from_kept(graph, everything) == Schedule.base(graph)


def test_always_kept():
    ops = (
        Operation("a", "x", 1.0, (), (0,)),
        Operation("random", "x", 1.0, (0,), (1,), repeatable=False),
        Operation("loss", "x", 1.0, (1,), (2,)),
        Operation("grad", "x", 1.0, (0, 1), (3,), forward=False),
    )
    graph = TrainingGraph(ops, tuple(Buffer(o.name, 1) for o in ops), (2,))
    assert always_kept(graph) == {1, 2, 3}
    assert schedule_from_kept(graph, ()).executions == (0, 1, 2, 0, 3)


def test_missing_operations_stop_at_what_is_in_memory():
    graph = synthetic.chain(6)
    in_memory = [0] * len(graph.buffers)
    in_memory[2] = 1
    assert missing_operations(graph, [4], in_memory) == {3, 4}
    assert missing_operations(graph, [2], in_memory) == set()


def test_segments_come_back_whole_and_others_one_by_one():
    # Two branches from one input; the gradient of each reads its own branch.
    ops = (
        Operation("x", "x", 1.0, (), (0,)),
        Operation("l", "x", 1.0, (0,), (1,)),
        Operation("r", "x", 1.0, (0,), (2,)),
        Operation("y", "x", 1.0, (1, 2), (3,)),
        Operation("gr", "x", 1.0, (2, 3), (4,), forward=False),
        Operation("gl", "x", 1.0, (1, 4), (5,), forward=False),
    )
    graph = TrainingGraph(ops, tuple(Buffer(o.name, 1) for o in ops), (3, 5))
    assert schedule_from_kept(graph, {0}).executions == (0, 1, 2, 3, 1, 2, 4, 5)
    retained = schedule_from_kept(graph, (), "retained")
    assert retained.executions == (0, 1, 2, 3, 0, 2, 4, 1, 5)
    transient = schedule_from_kept(graph, (), "transient")
    assert transient.executions == (0, 1, 2, 3, 0, 2, 4, 0, 1, 5)


def test_transient_recomputation_is_bounded():
    # Every gradient reads a leaf that hangs on a long chain nobody else reads.
    n = 150
    ops, buffers = [], []
    for i in range(n):
        ops.append(Operation(f"t{i}", "x", 1.0, (2 * i - 2,) if i else (), (2 * i,)))
        ops.append(Operation(f"r{i}", "x", 1.0, (2 * i,), (2 * i + 1,)))
        buffers += [Buffer(f"t{i}", 1), Buffer(f"r{i}", 1)]
    for i in reversed(range(n)):
        ops.append(Operation(f"g{i}", "x", 1.0, (2 * i + 1,), (len(buffers),), forward=False))
        buffers.append(Buffer(f"g{i}", 1))
    graph = TrainingGraph(tuple(ops), tuple(buffers))
    schedule = schedule_from_kept(graph, (), "transient")
    assert max(simulate(graph, schedule).counts) > 2
    assert len(schedule) < 6 * len(ops)


class TestBestOf:
    graph = synthetic.chain(12, size=10)
    plain = Schedule.base(graph)
    small = schedule_from_kept(graph, {3, 7}, "segments", [3, 7])
    tiny = schedule_from_kept(graph, {2, 5, 8}, "segments", [2, 5, 8])

    def choose(self, budget, candidates=None, limit=10.0):
        return best_of("x", self.graph, budget, candidates or self.all(), limit)

    def all(self):
        return [self.tiny, self.plain, self.small]

    def test_the_cheapest_that_fits(self):
        peak = simulate(self.graph, self.plain).peak
        assert self.choose(peak).schedule == self.plain
        answer = self.choose(peak - 1)
        assert answer.schedule != self.plain
        assert answer.certificate.status == "feasible"
        assert answer.certificate.bound == 0.0
        assert answer.certificate.seconds_first is not None

    def test_the_lowest_peak_if_none_fits_or_no_budget(self):
        lowest = min(simulate(self.graph, s).peak for s in self.all())
        over = self.choose(1)
        assert over.certificate.status == "over-budget"
        assert over.certificate.seconds_first is None
        assert simulate(self.graph, over.schedule).peak == lowest
        assert self.choose(None).schedule == over.schedule
        assert self.choose(None).certificate.status == "feasible"

    def test_the_time_limit_leaves_one(self):
        def endless():
            while True:
                yield self.plain

        assert self.choose(None, endless(), 0.0).schedule == self.plain


@pytest.mark.parametrize("policy", ["segments", "retained", "transient"])
def test_large_graphs(policy):
    graph = synthetic.resnet(3, 310)
    assert len(graph.operations) > 14_000
    schedule = schedule_from_kept(graph, (), policy, list(range(100, 6000, 100)))
    simulate(graph, schedule)


def interrupted_after(*schedules):
    yield from schedules
    raise KeyboardInterrupt


def test_an_interrupt_keeps_the_best_that_fits():
    graph = synthetic.chain(6)
    base = Schedule.base(graph)
    peak = simulate(graph, base).peak

    def strategy(graph, budget, options):
        return best_of("mine", graph, budget, interrupted_after(base), options.time_limit)

    with pytest.raises(Interrupted) as caught:
        strategy(graph, peak, SolveOptions())
    assert caught.value.solution.schedule == base
    solution = solve(graph, peak, strategy)
    assert solution.schedule == base
    assert solution.certificate.status == "feasible"


@pytest.mark.parametrize("found", [0, 1])
def test_an_interrupt_without_a_schedule_that_fits_goes_on(found):
    graph = synthetic.chain(6)
    schedules = [Schedule.base(graph)] * found
    with pytest.raises(KeyboardInterrupt) as caught:
        best_of("mine", graph, 1, interrupted_after(*schedules), 30)
    assert not isinstance(caught.value, Interrupted)
