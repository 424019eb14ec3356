"""Where to cut first: rounds of linear relaxations, a hundred times quicker than integer ones.

Each raises the bound, shows where the next cut is wanted, and leaves facts about cheaper schedules.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from optckpt.solvers import engine
from optckpt.solvers.cut_choice import behind_the_peak, fractional_cuts, peak_of
from optckpt.solvers.decode import decode
from optckpt.solvers.incumbent import WORTH
from optckpt.solvers.search_state import SearchState
from optckpt.solvers.stage_cuts import STEP, read_choice

logger = logging.getLogger("optckpt.solvers.linear_rounds")

LINEAR_GAIN = 1e-4
"""What new cuts have to add to the linear relaxation's value (of the step) to count as progress."""
LINEAR_EFFORT = 20_000
"""Moves of the annealings meanwhile, at most."""
LINEAR_MOVES = 8
"""Moves a column, as small relaxations are soon solved."""
SURELY = 0.9
"""A buffer is surely kept if this share of it is."""
LINEAR_PATIENCE = 2
"""Rounds without progress after which another way to cut takes over."""
LINEAR_COLUMNS = 12_000
"""Open columns beyond which another linear relaxation takes too long."""
PATH_ROUNDS = 3
"""How often path rows are added to one linear relaxation at most."""


@dataclass(frozen=True)
class Linear:
    """What a linear relaxation came to."""

    value: float
    """Its bound, as a fraction of the plain step."""
    sequence: list[int]
    """Its solution, rounded and decoded."""
    cuts: set[int]
    slack: set[int]
    """Cuts without which the value would be the same."""
    exceeded: list[int]
    """Where it exceeds the budget most, fractions of buffers being in memory."""
    columns: int
    """Columns that no fact decided."""


def linear_rounds(search: SearchState) -> list[int]:
    """Choose the first cuts by linear relaxations, which take a hundredth of the time.

    First where the linear solution itself exceeds the budget, then where its decoded sequence
    does. Returns the decoded solution of the highest value, whose cuts remain as far as they
    bear on it.
    """
    best = Linear(0.0, search.incumbent.base, set(), set(), [], 0)
    search.cuts = {peak_of(search.problem)}
    dropped: set[int] = set()
    for fractional in (True, False):
        stalled = 0
        while not search.closed():
            found = solve_linear(search)
            if found is None:
                return best.sequence
            stalled += 1
            if found.value > best.value + LINEAR_GAIN:
                best, stalled = found, 0
            if stalled == LINEAR_PATIENCE or found.columns > LINEAR_COLUMNS:
                break
            # A smaller relaxation of the same value. Cuts that come back have a reason.
            loose = found.slack - dropped
            dropped |= loose
            search.cuts -= loose
            if fractional:
                search.cuts.update(found.exceeded)
                if not found.exceeded:
                    break
            elif not search.add_cuts(found.sequence):
                break
        search.cuts = set(best.cuts)
        if fractional and not search.closed() and not search.add_cuts(best.sequence):
            break
    search.moments.clear()
    if not search.closed():
        # On chains of blocks no violation shows that the stretch behind the peak matters.
        search.cuts = behind_the_peak(search.problem)
        found = solve_linear(search)
        if found is not None and found.value > best.value:
            best = found
    if best.slack and not search.closed():
        search.cuts = best.cuts - best.slack
        found = solve_linear(search)
        if found is not None and found.value > best.value - LINEAR_GAIN:
            best = found
    search.cuts = set(best.cuts)
    search.incumbent.improve(best.sequence, search.effort, hot=1.0)
    return best.sequence


def solve_linear(search: SearchState) -> Linear | None:
    """Solve the linear relaxation for the current cuts, annealing meanwhile; raises the bound.

    Path rows that its solution violates are put in, as long as there are some. Returns None
    if it is infeasible, or if the time is over.
    """
    value = -1.0
    values: list[float] | None
    for k in range(PATH_ROUNDS + 1):
        if search.incumbent.remaining() <= 0:
            return None
        strengthened = search.strengthening.build(search.cuts)
        model = strengthened.relaxation.model
        effort = min(LINEAR_EFFORT, LINEAR_MOVES * len(model.cost))
        if search.incumbent.remaining() <= 0:
            return None
        run = engine.Solve(model, time_limit=max(0.1, search.incumbent.remaining()), relax=True)
        try:
            if not k:
                warm = search.incumbent.best or search.incumbent.base
                search.incumbent.improve(warm, effort, hot=1.0)
            result = run.result()
        finally:
            run.cancel()
        logger.debug(
            "%d cuts, linear: %s, %d of %d columns, %d path rows, bound %.5f, "
            "incumbent %.5f, %.1f s",
            len(search.cuts), result.status, strengthened.open, len(model.cost),
            len(strengthened.rows), result.bound / STEP, search.incumbent.cost,
            search.incumbent.elapsed(),
        )  # fmt: skip
        if result.status == "infeasible" or result.values is not None:
            search.raise_bound(min(result.bound / STEP, strengthened.cutoff))
        values = result.values
        if values is None:
            return None
        # A relaxation without columns comes back without them.
        duals = result.duals or [0.0] * len(model.row_lower)
        gain = result.bound / STEP - value
        value = result.bound / STEP
        if search.closed() or k == PATH_ROUNDS or gain < LINEAR_GAIN:
            break
        if not search.strengthening.separate(strengthened, values):
            break
    assert values is not None
    sequence = decode(search.problem, read_choice(strengthened.relaxation, values))
    if not search.closed():
        search.incumbent.offer(sequence)
        # What little is surely kept fits well; nearby lie schedules that annealing from
        # elsewhere does not find.
        surely = decode(search.problem, read_choice(strengthened.relaxation, values, SURELY))
        search.incumbent.improve(surely, effort, hot=0.3)
        search.incumbent.improve(sequence, effort, hot=0.1)
    if search.incumbent.found:
        # Closer than the cutoff, so that `refine` may look for what is slightly cheaper.
        limit = search.incumbent.cost - min(search.tolerance, WORTH) / 4
        search.strengthening.facts.learn(strengthened.relaxation, duals, limit)
    slack = strengthened.slack_cuts(duals)
    exceeded = fractional_cuts(search.problem, strengthened.relaxation, values, search.budget)
    return Linear(value, sequence, set(search.cuts), slack, exceeded, strengthened.open)
