import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import ScheduleError
from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate

common = settings(derandomize=True, deadline=None, max_examples=300)


def slow_profile(graph, executions):
    """The memory model of `simulate`, looked up anew for every step and buffer."""
    end = len(executions)
    ops = graph.operations

    def computed(b, step):
        return b in ops[executions[step]].writes

    def dies_at(b, start):
        """The last step that needs the copy of b computed at step `start`."""
        last = start
        for step in range(start + 1, end):
            if computed(b, step):
                return last
            if b in ops[executions[step]].reads:
                last = step
        return end if b in graph.outputs else last

    profile = []
    for t in range(end):
        op = ops[executions[t]]
        memory = {
            (b, start)
            for start in range(t + 1)
            for b in ops[executions[start]].writes
            if start == t or dies_at(b, start) >= t
        }
        total = graph.resident + op.workspace + sum(graph.buffers[b].size for b, _ in memory)
        for b, start in memory:
            if (
                b in op.inplace
                and start < t
                and dies_at(b, start) == t
                and op.writes
                and graph.buffers[b].size == graph.buffers[op.writes[0]].size
            ):
                total -= graph.buffers[b].size
                break
        profile.append(total)
    return tuple(profile)


def slow_error(graph, executions):
    """(step, names that the message must hold) of the first fault, or None."""
    ops = graph.operations
    for step, o in enumerate(executions):
        before = executions[:step]
        if not 0 <= o < len(ops):
            return step, [str(o)]
        op = ops[o]
        if o in before and not op.repeatable:
            return step, [repr(op.name), "again"]
        for a in op.repeat_before:
            if o in before and a in before:
                return step, [repr(op.name), "again after", repr(ops[a].name)]
        for a in op.after:
            if a not in before:
                return step, [repr(op.name), repr(ops[a].name)]
        for b in op.reads:
            if graph.producer[b] not in before:
                return step, [repr(op.name), repr(graph.buffers[b].name), "not in memory"]
    for o, op in enumerate(ops):
        if o not in executions:
            return len(executions), [
                repr(op.name),
                *(repr(graph.buffers[b].name) for b in op.writes[:1]),
            ]
    return None


def random_schedule(graph, rng, length):
    """A valid schedule in any topological order with re-executions strewn in."""
    executions = []
    done = set()
    while len(done) < len(graph.operations):
        ready = [
            o
            for o, op in enumerate(graph.operations)
            if (o not in done or (op.repeatable and len(executions) < length))
            and not (o in done and done.intersection(op.repeat_before))
            and all(graph.producer[b] in done for b in op.reads)
            and all(a in done for a in op.after)
        ]
        o = rng.choice(ready)
        done.add(o)
        executions.append(o)
    return executions


@common
@given(st.integers(0, 10**9), st.booleans())
def test_agrees_with_the_slow_simulator(seed, plain):
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    graph = synthetic.random_graph(rng, n, repeatable_backward=0.5, plain=plain)
    graph = synthetic.with_random_limits(graph, rng, 0.0 if plain else 0.2)
    executions = random_schedule(graph, rng, 3 * n)
    result = simulate(graph, Schedule(tuple(executions)))
    expected = slow_profile(graph, executions)
    assert result.profile == expected
    assert result.peak == max(expected)
    assert result.peak_step == expected.index(max(expected))
    counts = tuple(executions.count(o) for o in range(n))
    assert result.counts == counts
    assert result.re_executions == len(executions) - n
    times = [op.seconds for op in graph.operations]
    assert result.seconds == sum(times[o] for o in executions)
    assert result.extra_seconds == result.seconds - sum(times)
    assert result.overhead == pytest.approx(result.extra_seconds / sum(times))


@common
@given(st.integers(0, 10**9))
def test_every_fault_is_named(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 8)
    graph = synthetic.random_graph(rng, n, repeatable=0.4)
    graph = synthetic.with_random_limits(graph, rng, rng.choice([0.0, 0.5]))
    executions = random_schedule(graph, rng, 2 * n)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(4)
        at = rng.randrange(len(executions) + 1)
        if kind == 0:
            executions.insert(at, rng.randrange(-1, n + 1))
        elif kind == 1 and executions:
            executions.pop(rng.randrange(len(executions)))
        elif kind == 2:
            rng.shuffle(executions)
        elif executions:
            executions.append(rng.choice(executions))
    schedule = Schedule(tuple(executions))
    fault = slow_error(graph, executions)
    if fault is None:
        assert simulate(graph, schedule).profile == slow_profile(graph, executions)
        return
    step, words = fault
    with pytest.raises(ScheduleError) as error:
        simulate(graph, schedule)
    assert str(error.value).startswith(f"step {step}")
    for word in words:
        assert word in str(error.value)


def test_no_operation():
    result = simulate(TrainingGraph((), (), resident=7), Schedule(()))
    assert (result.peak, result.peak_step, result.profile, result.overhead) == (7, -1, (), 0.0)


def test_free_steps_have_no_overhead():
    graph = TrainingGraph((Operation("a", "x", 0.0, (), (0,)),), (Buffer("a", 1),))
    assert simulate(graph, Schedule((0, 0))).overhead == 0.0


def in_place_graph(size, reader):
    ops = [
        Operation("a", "x", 1.0, (), (0,)),
        Operation("b", "x", 1.0, (0,), (1,), workspace=5, inplace=(0,)),
    ]
    buffers = [Buffer("a", 8), Buffer("b", size)]
    if reader:
        ops.append(Operation("c", "x", 1.0, (0,), (2,)))
        buffers.append(Buffer("c", 1))
    return TrainingGraph(tuple(ops), tuple(buffers), (1,))


@pytest.mark.parametrize(
    ("size", "reader", "expected"), [(8, False, 13), (7, False, 20), (8, True, 21)]
)
def test_in_place_needs_the_same_size_and_a_dying_input(size, reader, expected):
    graph = in_place_graph(size, reader)
    assert simulate(graph, Schedule.base(graph)).profile[1] == expected


def test_in_place_over_a_buffer_that_is_computed_again():
    graph = in_place_graph(8, True)
    result = simulate(graph, Schedule((0, 1, 0, 2)))
    # b takes over the first copy of a, the second copy serves c.
    assert result.profile == (8, 13, 16, 17)


def test_unread_outputs_count_while_written():
    ops = (
        Operation("two", "Split", 1.0, (), (0, 1)),
        Operation("next", "x", 1.0, (0,), (2,)),
    )
    graph = TrainingGraph(ops, (Buffer("a", 2), Buffer("b", 30), Buffer("c", 4)), (2,))
    assert simulate(graph, Schedule.base(graph)).profile == (32, 6)


def test_a_buffer_read_twice_is_there_once():
    ops = (
        Operation("a", "x", 1.0, (), (0,)),
        Operation("square", "x", 1.0, (0, 0), (1,), inplace=(0,)),
        Operation("next", "x", 1.0, (1,), (2,)),
    )
    graph = TrainingGraph(ops, (Buffer("a", 5), Buffer("b", 5), Buffer("c", 1)))
    assert simulate(graph, Schedule.base(graph)).profile == (5, 5, 6)


def test_outputs_live_to_the_end():
    ops = (Operation("a", "x", 1.0, (), (0,)), Operation("b", "x", 1.0, (), (1,)))
    buffers = (Buffer("a", 2), Buffer("b", 3))
    for outputs, profile in (((), (2, 3)), ((0,), (2, 5))):
        graph = TrainingGraph(ops, buffers, outputs)
        assert simulate(graph, Schedule.base(graph)).profile == profile


def test_a_long_schedule():
    n = 1000
    graph = synthetic.chain(n, size=1)
    first = tuple(range(n + 1))
    executions = first + tuple(range(n)) * 99 + tuple(range(n + 1, len(graph.operations)))
    result = simulate(graph, Schedule(executions))
    assert len(result.profile) == len(executions) >= 100_000
    assert result.counts[0] == 100
    assert result.peak == simulate(graph, Schedule.base(graph)).peak


def test_nothing_is_repeated_after_what_it_reads_was_overwritten():
    """A layer, its backward operation, the update of its weights, and another reader."""
    ops = (
        Operation("layer", "MatMul", 1.0, (), (0,), repeat_before=(2,)),
        Operation("gradient", "MatMul", 1.0, (0,), (1,), forward=False),
        Operation("update", "AssignSub", 1.0, (1,), (), forward=False, repeatable=False),
        Operation("other", "Sum", 1.0, (0,), (), forward=False),
    )
    graph = TrainingGraph(ops, (Buffer("h", 4), Buffer("g", 4)))
    assert simulate(graph, Schedule((0, 0, 1, 2, 3))).re_executions == 1
    assert simulate(graph, Schedule((0, 1, 0, 2, 3))).re_executions == 1
    with pytest.raises(ScheduleError, match=r"^step 3.*'layer'.*again after 'update', which over"):
        simulate(graph, Schedule((0, 1, 2, 0, 3)))
    assert simulate(graph.without_repeat_limits, Schedule((0, 1, 2, 0, 3))).re_executions == 1
