from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import OptckptError
from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.heuristics import COSTLY_KINDS, sqrt_n_boundaries
from optckpt.solvers.registry import SolveOptions, solve
from optckpt.solvers.segments import articulation_points

SIZE = 1000
RULES = ("store_all", "sqrt_n", "chen_greedy", "speed", "griewank", "explicit")


def plain_peak(graph):
    return simulate(graph, Schedule.base(graph)).peak


def run(graph, name, budget=None, **options):
    solution = solve(graph, budget, name, SolveOptions(**options))
    return solution.certificate, simulate(graph, solution.schedule)


def graph_loss_bytes(graph):
    return graph.buffers[graph.outputs[0]].size


def forward_seconds(graph):
    return sum(op.seconds for op in graph.operations if op.forward)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 10**9), st.floats(0.3, 1.1))
def test_random_graphs_are_always_answered(seed, fraction):
    graph = synthetic.random_graph(seed, 1 + seed % 30)
    budget = max(1, int(fraction * plain_peak(graph)))
    for name in RULES:
        try:
            certificate, result = run(graph, name, budget, checkpoints=(0,))
        except OptckptError:
            assert name == "griewank"
            assert not articulation_points(graph)
            continue
        assert certificate.solver == name
        assert certificate.bound == 0.0
        assert certificate.status == ("feasible" if result.peak <= budget else "over-budget")
        if name in ("sqrt_n", "chen_greedy"):
            assert max(result.counts) <= 2


class TestStoreAll:
    def test_is_the_plain_step(self):
        graph = synthetic.unet(2)
        peak = plain_peak(graph)
        certificate, result = run(graph, "store_all", peak)
        assert (certificate.status, result.re_executions) == ("feasible", 0)
        certificate, result = run(graph, "store_all", peak - 1)
        assert (certificate.status, result.peak) == ("over-budget", peak)


class TestSqrtN:
    @pytest.mark.parametrize("n", [4, 9, 16, 50, 100, 400, 1600])
    @pytest.mark.parametrize("weights", [0, 1])
    def test_chains(self, n, weights):
        graph = synthetic.chain(n, size=SIZE, seconds=1.0, weights=weights)
        _, result = run(graph, "sqrt_n")
        assert result.peak <= (2 * sqrt(n) + 4) * SIZE + 2 * n
        assert result.extra_seconds <= forward_seconds(graph)
        assert max(result.counts) <= 2

    @pytest.mark.parametrize("blocks", [4, 16, 64])
    def test_residual_chains(self, blocks):
        graph = synthetic.residual_chain(blocks, size=SIZE, seconds=1.0)
        _, result = run(graph, "sqrt_n")
        layers = 7 * blocks
        weights = graph.buffers[graph.outputs[1]].size * 2 * (blocks + 1)
        assert result.peak <= (3 * sqrt(layers) + 6) * SIZE + weights
        assert result.extra_seconds <= forward_seconds(graph)

    def test_no_tensor_cuts_a_double_chain(self):
        n = 100
        graph = synthetic.double_chain(n, size=SIZE, seconds=1.0)
        _, result = run(graph, "sqrt_n")
        assert result.peak <= (2 * 2 * sqrt(2 * n) + 6) * SIZE
        assert result.extra_seconds <= forward_seconds(graph)

    @pytest.mark.parametrize("depth", [1, 2, 4, 6])
    def test_u_nets(self, depth):
        graph = synthetic.unet(depth)
        _, result = run(graph, "sqrt_n")
        assert result.peak < 0.8 * plain_peak(graph)
        assert result.extra_seconds <= forward_seconds(graph)

    def test_checkpoints_are_articulation_points_where_there_are_enough(self):
        graph = synthetic.resnet(3, 12)
        sums = {i for i, op in enumerate(graph.operations) if op.kind == "AddV2" and op.forward}
        boundaries = sqrt_n_boundaries(graph)
        assert 10 <= len(boundaries) <= 20
        assert len(sums.intersection(boundaries)) >= 0.8 * len(boundaries)

    def test_without_backward_operations_it_is_the_plain_step(self):
        _, result = run(synthetic.random_layered(50), "sqrt_n")
        assert result.re_executions == 0

    def test_a_single_operation(self):
        graph = TrainingGraph((Operation("a", "x", 1.0, (), (0,)),), (Buffer("a", 1),), (0,))
        for name in ("sqrt_n", "chen_greedy", "speed", "store_all"):
            assert run(graph, name)[1].re_executions == 0

    def test_what_must_not_be_repeated_is_not(self):
        graph = synthetic.residual_chain(12, size=SIZE)
        graph = replace(
            graph,
            operations=tuple(
                replace(op, repeatable=op.repeatable and op.kind != "FusedBatchNormV3")
                for op in graph.operations
            ),
        )
        _, result = run(graph, "sqrt_n")
        assert result.re_executions > 0
        assert all(
            n == 1 or op.repeatable for op, n in zip(graph.operations, result.counts, strict=True)
        )


class TestChenGreedy:
    def test_a_larger_budget_never_costs_more(self):
        graph = synthetic.resnet(3, 4)
        peak = plain_peak(graph)
        costs = [run(graph, "chen_greedy", int(f * peak))[1].overhead for f in (0.4, 0.6, 0.8, 1)]
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] == 0

    @pytest.mark.parametrize(
        "graph", [synthetic.chain(100), synthetic.resnet(2, 8), synthetic.unet(4)]
    )
    def test_without_a_budget_the_lowest_peak(self, graph):
        lowest = run(graph, "chen_greedy")[1].peak
        assert run(graph, "chen_greedy", lowest)[0].status == "feasible"
        certificate, result = run(graph, "chen_greedy", lowest - 1)
        assert (certificate.status, result.peak) == ("over-budget", lowest)

    def test_unequal_layers(self):
        # Two thirds of the bytes are in the first ten layers of a hundred.
        graph = synthetic.chain(100, size=[18 * SIZE] * 10 + [SIZE] * 90)
        assert run(graph, "chen_greedy")[1].peak < 0.4 * plain_peak(graph)


class TestSpeed:
    def test_nothing_costly_runs_twice(self):
        graph = synthetic.resnet(2, 4)
        _, result = run(graph, "speed")
        assert result.peak < 0.7 * plain_peak(graph)
        again = {op.kind for op, n in zip(graph.operations, result.counts, strict=True) if n > 1}
        assert again == {"FusedBatchNormV3", "Relu", "AddV2"}

    def test_units_count_by_their_parts(self):
        def renamed(kind):
            return {"Conv2D": "Pad+Conv2D+BiasAdd", "AddV2": "AddV2+Cast"}.get(kind, kind)

        graph = synthetic.residual_chain(3)
        units = replace(
            graph,
            operations=tuple(replace(op, kind=renamed(op.kind)) for op in graph.operations),
        )
        assert solve(units, None, "speed").schedule == solve(graph, None, "speed").schedule
        assert "Conv2D" in COSTLY_KINDS

    def test_without_costly_kinds_everything_is_recomputed(self):
        graph = synthetic.chain(10, seconds=1.0)
        assert run(graph, "speed")[1].extra_seconds == 10


class TestGriewank:
    @pytest.mark.parametrize("n", [10, 100, 1000])
    def test_logarithmic_memory_on_chains(self, n):
        graph = synthetic.chain(n, size=SIZE, seconds=1.0)
        _, result = run(graph, "griewank")
        assert result.peak <= (1.5 * n**0.25 + 8) * SIZE
        assert max(result.counts) <= 8

    def test_slots_are_swept_within_the_budget(self):
        graph = synthetic.residual_chain(20)
        peak = plain_peak(graph)
        costs = []
        for fraction in (0.15, 0.25, 0.5):
            certificate, result = run(graph, "griewank", int(fraction * peak))
            assert certificate.status == "feasible"
            assert result.peak <= int(fraction * peak)
            costs.append(result.overhead)
        assert costs == sorted(costs, reverse=True)

    def test_below_what_it_reaches(self):
        certificate, result = run(synthetic.chain(50, size=SIZE), "griewank", SIZE)
        assert certificate.status == "over-budget"
        assert result.peak < 8 * SIZE

    def test_it_needs_a_chain(self):
        ops = (
            Operation("a", "x", 1.0, (), (0, 1)),
            Operation("b", "x", 1.0, (0,), (2,)),
            Operation("c", "x", 1.0, (1, 2), (3,)),
            Operation("d", "x", 1.0, (0, 3), (4,), forward=False),
        )
        graph = TrainingGraph(ops, tuple(Buffer(f"b{i}", 1) for i in range(5)), (4,))
        with pytest.raises(OptckptError, match=r"'griewank' needs a chain.*'sqrt_n'"):
            run(graph, "griewank")


class TestExplicit:
    graph = synthetic.chain(20, size=SIZE, seconds=1.0)

    # A layer's gradient reads its output: what is not kept is computed once more.
    @pytest.mark.parametrize("kept", [(0,), (10,), (19,), (0, 10, 19), (), tuple(range(20))])
    def test_first_last_middle_all_none(self, kept):
        certificate, result = run(self.graph, "explicit", checkpoints=kept)
        assert certificate.status == "feasible"
        assert [n - 1 for n in result.counts[:20]] == [int(b not in kept) for b in range(20)]

    def test_one_in_the_middle_halves_the_memory(self):
        _, result = run(self.graph, "explicit", checkpoints=(10,))
        assert result.peak <= 0.6 * plain_peak(self.graph)

    def test_every_fifth(self):
        _, result = run(self.graph, "explicit", checkpoints=(4, 9, 14))
        assert result.peak <= 10 * SIZE + graph_loss_bytes(self.graph)

    def test_over_budget(self):
        assert run(self.graph, "explicit", 10, checkpoints=(3,))[0].status == "over-budget"

    @pytest.mark.parametrize(
        ("kept", "words"), [(None, "checkpoints"), ((99,), "99"), ((-1,), "-1")]
    )
    def test_mistakes(self, kept, words):
        with pytest.raises(OptckptError, match=words):
            run(self.graph, "explicit", checkpoints=kept)


@pytest.mark.parametrize("name", ["sqrt_n", "speed", "griewank"])
def test_large_graphs(name):
    graph = synthetic.resnet(3, 310, size=1 << 12)
    assert len(graph.operations) > 14_000
    _, result = run(graph, name)
    assert result.peak < plain_peak(graph)
