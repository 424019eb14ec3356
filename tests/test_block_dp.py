"""Chains of blocks: found where they are, and planned at every budget that the parts allow."""

from __future__ import annotations

import pytest

from optckpt.frontends.synthetic import chain, random_layered, resnet, unet
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.block_dp import block_program
from optckpt.solvers.blocks import MAX_OPTIONS, OptionFinder, find_chain
from optckpt.solvers.floor import static_floor
from optckpt.solvers.heuristics import griewank, sqrt_n
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.registry import SolveOptions
from optckpt.solvers.sequence import profile


def problem_of(graph: TrainingGraph) -> tuple[Problem, int]:
    problem = preprocess(graph)
    ops = graph.operations
    forward = [ops[members[0]].forward for members in problem.members]
    return problem, forward.index(False)


def test_residual_blocks_become_blocks() -> None:
    problem, forward_end = problem_of(resnet(2, 5))
    found = find_chain(problem, forward_end, 100)
    assert found is not None
    # Ten blocks of the network, its first convolution, and what stands between and behind.
    assert 10 <= len(found) <= 14
    assert found.ends[-1] == forward_end
    assert list(found.ends) == sorted(found.ends)
    # The phases share out the backward pass, last block first.
    assert found.phases[-1][0] == forward_end
    assert found.phases[0][1] == problem.n
    for earlier, later in zip(found.phases, found.phases[1:], strict=False):
        assert earlier[0] == later[1]
    for i, (begin, end) in enumerate(found.phases):
        for q in range(begin, end):
            for t in problem.reads[q]:
                if t in found.local and t != found.states[i]:
                    assert found.start(i) <= problem.producer[t] < found.ends[i]


def test_equal_blocks_have_equal_options() -> None:
    problem, forward_end = problem_of(resnet(1, 8))
    found = find_chain(problem, forward_end, 100)
    assert found is not None
    finder = OptionFinder(found)
    lists = [finder.options(i) for i in range(len(found))]
    figures = [
        [(o.held, o.run_peak, o.phase_peak, o.run_cost, o.phase_cost) for o in options]
        for options in lists
    ]
    assert figures[3] == figures[4] == figures[5]
    assert all(0 < len(options) <= 2 * MAX_OPTIONS for options in lists)
    for i, options in enumerate(lists):
        for option in options:
            for t in option.saved | option.retained:
                assert found.start(i) <= problem.producer[t] < found.ends[i]


def test_few_blocks_or_none_are_no_chain() -> None:
    for graph in (resnet(1, 1), random_layered(40, seed=2)):
        problem = preprocess(graph)
        assert find_chain(problem, problem.n // 2, 100) is None or len(graph.operations) < 40
    problem, forward_end = problem_of(unet(3))
    found = find_chain(problem, forward_end, 100)
    assert found is None or len(found) < 20


@pytest.mark.parametrize(
    "graph", [resnet(3, 4), resnet(1, 10, repeatable_backward=True), chain(40), unet(3)]
)
def test_sequences_are_schedules_and_nearly_fit(graph: TrainingGraph) -> None:
    problem, forward_end = problem_of(graph)
    program = block_program(problem, forward_end)
    if program is None:
        pytest.skip("no chain")
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    costs = []
    for share in (0.8, 0.6, 0.4, 0.3):
        budget = round(low + share * (high - low))
        sequences = program.sequences(budget)
        assert sequences, share
        result = simulate(graph, Schedule(problem.expand(sequences[-1])))
        assert result.peak == max(profile(problem, sequences[-1]))
        assert result.peak <= 1.01 * budget
        costs.append(result.overhead)
    assert costs == sorted(costs)


@pytest.mark.parametrize("graph", [resnet(1, 30), chain(100)])
def test_cheaper_than_the_rules_at_their_own_peaks(graph: TrainingGraph) -> None:
    problem, forward_end = problem_of(graph)
    program = block_program(problem, forward_end)
    assert program is not None
    for rule in (sqrt_n, griewank):
        solution = rule(graph, None, SolveOptions())
        assert solution.schedule is not None
        theirs = simulate(graph, solution.schedule)
        # A hundredth more: the program rounds sizes.
        sequences = program.sequences(round(1.01 * theirs.peak))
        ours = simulate(graph, Schedule(problem.expand(sequences[-1])))
        assert ours.peak <= 1.02 * theirs.peak
        assert ours.overhead <= theirs.overhead


def test_long_chains_are_grouped() -> None:
    problem, forward_end = problem_of(chain(1000))
    found = find_chain(problem, forward_end, 50)
    assert found is not None
    assert 40 <= len(found) <= 51


def test_hopeless_budgets_have_no_sequence() -> None:
    problem, forward_end = problem_of(resnet(1, 10))
    program = block_program(problem, forward_end)
    assert program is not None
    assert program.sequences(max(problem.size)) == []


def test_stops_when_told() -> None:
    problem, forward_end = problem_of(resnet(2, 6))
    assert block_program(problem, forward_end, lambda: True) is None
    program = block_program(problem, forward_end)
    assert program is not None
    budget = max(profile(problem, range(problem.n))) // 2
    assert program.sequences(budget)
    assert program.sequences(budget, lambda: True) == []
