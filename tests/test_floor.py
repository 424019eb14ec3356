import heapq
import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.floor import Floor, any_order_floor, static_floor
from optckpt.solvers.registry import SolveOptions, solve

common = settings(derandomize=True, deadline=None, max_examples=300)


def smallest_peak(graph):
    """The lowest peak of all schedules in base order, by exhaustive search.

    States are (next base operation, buffers held); a step executes the next base operation or
    an earlier repeatable one and then drops any of what is held.
    """
    ops, sizes = graph.operations, [b.size for b in graph.buffers]
    start = (0, frozenset())
    peaks = {start: graph.resident}
    queue = [(graph.resident, 0, *start)]
    serial = 0
    while queue:
        peak, _, position, held = heapq.heappop(queue)
        if peak > peaks[position, held]:
            continue
        if position == len(ops) and held >= set(graph.outputs):
            return peak
        again = [o for o in range(position) if ops[o].repeatable]
        for o in [*([position] if position < len(ops) else []), *again]:
            op = ops[o]
            if not held >= set(op.reads) or held & set(op.writes):
                continue
            during = graph.resident + sum(sizes[b] for b in held) + op.workspace
            during += sum(sizes[b] for b in op.writes)
            after = held | set(op.writes)
            for n in range(len(after) + 1):
                for dropped in combinations(sorted(after), n):
                    free = 0
                    if op.writes:
                        size = sizes[op.writes[0]]
                        if any(b in dropped and sizes[b] == size for b in op.inplace):
                            free = size
                    state = (max(position, o + 1), after - set(dropped))
                    value = max(peak, during - free)
                    if value < peaks.get(state, float("inf")):
                        peaks[state] = value
                        serial += 1
                        heapq.heappush(queue, (value, serial, *state))
    raise AssertionError("the plain step is a schedule")


@common
@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.5, 1.0]))
def test_no_schedule_is_below_the_floor(seed, repeatable):
    rng = random.Random(seed)
    graph = synthetic.random_graph(
        rng, rng.randint(2, 7), repeatable=repeatable, repeatable_backward=repeatable
    )
    if len(graph.buffers) > 8:
        return
    floor = static_floor(graph)
    lowest = smallest_peak(graph)
    plain = simulate(graph, Schedule.base(graph)).peak
    assert floor.bytes <= lowest <= plain
    if not repeatable:
        assert floor.bytes == plain
    for name in ("sqrt_n", "chen_greedy", "speed"):
        schedule = solve(graph, None, name, SolveOptions()).schedule
        assert simulate(graph, schedule).peak >= lowest


@common
@given(st.integers(0, 10**9))
def test_floor_of_larger_graphs(seed):
    rng = random.Random(seed)
    n = rng.randint(2, 40)
    graph = synthetic.random_graph(rng, n, repeatable=rng.random(), repeatable_backward=0.3)
    base = list(range(n))
    for at in sorted(rng.choices(range(1, n + 1), k=n), reverse=True):
        before = [o for o in range(at) if graph.operations[o].repeatable]
        if before:
            base.insert(at, rng.choice(before))
    assert static_floor(graph).bytes <= simulate(graph, Schedule(tuple(base))).peak


def test_floor_names_the_operation():
    ops = (
        Operation("a", "x", 1.0, (), (0,), repeatable=False),
        Operation("b", "x", 1.0, (), (1,), workspace=10),
        Operation("c", "x", 1.0, (0, 1), (2,)),
    )
    graph = TrainingGraph(ops, (Buffer("a", 4), Buffer("b", 5), Buffer("c", 1)), resident=100)
    # As b runs: the resident bytes, a (not repeatable), b and b's workspace.
    assert static_floor(graph) == Floor(119, 1)


@pytest.mark.parametrize("resident", [0, 50])
def test_floor_without_operations(resident):
    assert static_floor(TrainingGraph((), (), resident=resident)) == Floor(resident, -1)


def test_floor_counts_repeatable_inputs_but_not_bystanders():
    ops = (
        Operation("a", "x", 1.0, (), (0,)),
        Operation("b", "x", 1.0, (), (1,)),
        Operation("c", "x", 1.0, (0,), (2,)),
        Operation("d", "x", 1.0, (1,), (3,)),
    )
    graph = TrainingGraph(ops, tuple(Buffer(n, 10) for n in "abcd"))
    assert static_floor(graph).bytes == 20
    assert simulate(graph, Schedule.base(graph)).peak == 30
    assert smallest_peak(graph) == 20


def test_all_outputs_are_in_memory_at_the_end():
    operations = tuple(Operation(f"o{i}", "Op", 1.0, (), (i,)) for i in range(3))
    graph = TrainingGraph(operations, tuple(Buffer(f"b{i}", 1000) for i in range(3)), (0, 1, 2))
    for floor in (static_floor(graph), any_order_floor(graph)):
        assert floor == Floor(3000, 3)
        assert "end of the step" in floor.place(graph)
    for order in ("fixed", "free"):
        options = SolveOptions(time_limit=5, order=order)
        assert solve(graph, 2999, "optimal", options).certificate.status == "infeasible"
