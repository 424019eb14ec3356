"""Plans of parts: what a part keeps in between counts, and what is said if it is too much."""

from __future__ import annotations

import logging

import pytest

from optckpt import part_plan
from optckpt.budget import Budget
from optckpt.errors import InfeasibleBudgetError, OverBudgetError
from optckpt.frontends.synthetic import residual_chain
from optckpt.judge import plain_peak
from optckpt.part_plan import PartProblem, kept_longer
from optckpt.planner import make_plan
from optckpt.simulate import simulate
from optckpt.solvers.floor import proven_floor
from optckpt.solvers.registry import SolveOptions

GRAPH = residual_chain(24)
BACKWARD = frozenset(i for i, op in enumerate(GRAPH.operations) if not op.forward)
PLAIN = plain_peak(GRAPH)
FLOOR = proven_floor(GRAPH, "fixed").bytes


def problem(budget: int, **changes) -> PartProblem:
    settings = {
        "name": "block",
        "graph": GRAPH,
        "backward": BACKWARD,
        "plain_graph": GRAPH,
        "budget": Budget(bytes=budget),
        "strategy": "optimal",
        "options": SolveOptions(time_limit=2.0, gap=0.05),
        "margin": 0.0,
        "allocator": None,
        "max_overhead": None,
        "repeat": "auto",
    }
    return PartProblem(**{**settings, **changes})


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4, 0.8])
def test_what_fits_is_found_with_what_is_kept(share):
    budget = int(FLOOR + share * (PLAIN - FLOOR))
    plan = problem(budget).solve()
    assert plan.budget == budget >= plan.predicted_peak
    assert plan.live_peak == simulate(GRAPH, plan.schedule).peak + kept_longer(
        GRAPH, plan.schedule, BACKWARD
    )
    # The bound for a lower aim would be no bound for the budget.
    first = make_plan(
        GRAPH, Budget(bytes=budget), options=SolveOptions(time_limit=2.0, gap=0.05), repeat="auto"
    )
    assert plan.certificate.bound <= first.overhead <= plan.overhead + 0.05


def test_no_fitting_rule_is_passed_over():
    """A search that finds nothing, or too much, leaves the word to rules that need none."""
    budget = FLOOR + (PLAIN - FLOOR) // 4
    rule = problem(budget, strategy="griewank").solve()
    assert problem(budget).solve().overhead <= rule.overhead + 1e-9


def test_more_than_is_kept_is_not_promised(monkeypatch):
    budget = FLOOR + (PLAIN - FLOOR) // 2
    monkeypatch.setattr(part_plan, "kept_longer", lambda *_: PLAIN)
    with pytest.raises(OverBudgetError) as caught:
        problem(budget).solve()
    text = str(caught.value)
    assert "'block': no schedule within its budget of" in text
    assert f"({budget} bytes) was found: " in text
    assert f"({caught.value.peak} bytes); raise the budget to that or reduce the batch" in text
    assert "order" not in text
    with pytest.raises(OverBudgetError, match=r"strategy 'sqrt_n'.*use strategy 'optimal'"):
        problem(budget, strategy="sqrt_n").solve()


def test_what_no_schedule_meets_is_refused_in_terms_of_the_budget():
    with pytest.raises(InfeasibleBudgetError) as caught:
        problem(FLOOR - 1).solve()
    assert caught.value.floor == FLOOR
    assert "'block': no schedule fits its budget of" in str(caught.value)
    assert f"({FLOOR - 1} bytes): " in str(caught.value)
    # Another order might have results wait for slopes, and is no way out for a part.
    assert "order" not in str(caught.value)
    with pytest.raises(InfeasibleBudgetError, match='write "50%" if a share'):
        problem(50).solve()


def test_it_is_said_what_is_being_planned(caplog):
    with caplog.at_level(logging.INFO, "optckpt"):
        problem(PLAIN).solve()
    assert f"planning 'block': {len(GRAPH.operations)} operations, budget" in caplog.text
    assert "time limit 2 s" in caplog.text
