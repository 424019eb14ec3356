"""New cuts: where a sequence exceeds the budget, never where there is one already."""

from __future__ import annotations

import numpy as np
import pytest

from optckpt.frontends.synthetic import random_graph, residual_chain
from optckpt.solvers.cut_choice import (
    NEW_CUTS,
    behind_the_peak,
    fractional_cuts,
    fractional_use,
    peak_of,
    tighten,
)
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.sequence import profile
from optckpt.solvers.stage_cuts import build


def problem() -> Problem:
    return preprocess(residual_chain(6))


def test_the_worst_violations_come_first() -> None:
    p = problem()
    base = range(p.n)
    use = profile(p, base)
    budget = max(use) - 1
    found = tighten(p, base, budget, set(), set(), spread=False)
    assert 1 <= len(found.cuts) <= NEW_CUTS
    assert use[found.cuts[0]] == max(use)
    assert all(use[c] > budget for c in found.cuts)
    assert found.moments == ()


def test_spread_cuts_keep_a_distance() -> None:
    p = preprocess(residual_chain(40))
    found = tighten(p, range(p.n), max(profile(p, range(p.n))) // 2, set(), set(), spread=True)
    assert len(found.cuts) == NEW_CUTS
    apart = [abs(a - b) for a in found.cuts for b in found.cuts if a != b]
    assert min(apart) > p.n // 40


def test_re_executions_lead_to_neighbours_then_to_moments() -> None:
    p = problem()
    again = next(o for o in range(2, p.n) if p.repeatable[o] and p.size[p.writes[o][0]])
    last = p.n - 2
    sequence = [*range(last + 1), again, *range(last + 1, p.n)]
    # Nothing reads the result, so that step is the only one to hold it; look at it alone.
    budget = profile(p, sequence)[last + 1] - 1
    others = {o for o in range(p.n) if o not in (last, last + 1)}
    next_one = tighten(p, sequence, budget, others | {last}, set(), spread=False)
    assert next_one.cuts == (last + 1,)
    both = others | {last, last + 1}
    moment = tighten(p, sequence, budget, both, set(), spread=False)
    assert (last, again) in moment.moments
    assert moment.cuts == ()


def test_what_fits_is_cut_where_it_is_widest_until_nothing_is_left() -> None:
    p = problem()
    base = range(p.n)
    use = profile(p, base)
    found = tighten(p, base, max(use), set(), set(), spread=False)
    assert use[found.cuts[0]] == max(use)
    done = tighten(p, base, max(use), set(base), set(), spread=False)
    assert (done.cuts, done.moments) == ((), ())


def test_behind_the_peak() -> None:
    p = problem()
    use = profile(p, range(p.n))
    peak = use.index(max(use))
    cuts = behind_the_peak(p)
    assert {peak, peak + 1, peak + 4} <= cuts
    assert min(cuts) == peak
    assert max(cuts) < p.n


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_throughout_uses_what_the_plain_step_does(seed: int) -> None:
    p = preprocess(random_graph(seed, 40))
    relaxation = build(p, [p.n // 3, p.n // 2, 3 * p.n // 4], 10**9)
    values = [0.0] * len(relaxation.model.cost)
    for i, cut in enumerate(relaxation.cuts):
        for t, column in relaxation.keep[i].items():
            values[column] = float(p.last_reader(t) >= cut)
    use = fractional_use(p, relaxation, values)
    plain = np.array(profile(p, range(p.n)))
    gifts = np.array([p.size[p.writes[o][0]] if p.takes[o] else 0 for o in range(p.n)])
    # Which outputs take over an input is not looked at, and the cuts are judged already.
    between = [o for o in range(p.n) if o not in relaxation.cuts]
    assert np.all((use <= plain + 1e-6)[between])
    assert np.all((use >= plain - gifts - 1e-6)[between])


def test_half_of_a_buffer_is_half_its_size() -> None:
    p = preprocess(residual_chain(12))
    first, second = p.n // 2, p.n // 2 + 8
    relaxation = build(p, [first, second], 10**9)
    t, column = next(
        (t, c)
        for t, c in relaxation.keep[0].items()
        if t in relaxation.keep[1] and not any(first < r < second for r in p.base_readers[t])
    )
    values = [0.0] * len(relaxation.model.cost)
    nothing = fractional_use(p, relaxation, values)
    values[column] = values[relaxation.keep[1][t]] = 0.5
    half = fractional_use(p, relaxation, values) - nothing
    assert np.allclose(half[first + 1 : second], 0.5 * p.size[t])
    assert not half[: p.producer[t] + 1].any()


def test_fractional_cuts_are_new_and_apart() -> None:
    p = preprocess(residual_chain(40))
    peak = peak_of(p)
    relaxation = build(p, [peak], 10**9)
    values = [1.0] * len(relaxation.model.cost)
    use = fractional_use(p, relaxation, values)
    found = fractional_cuts(p, relaxation, values, int(use.max()) // 2)
    assert len(found) == NEW_CUTS
    assert peak not in found
    assert min(abs(a - b) for a in found for b in found if a != b) > p.n // 40
    assert fractional_cuts(p, relaxation, values, int(use.max()) + 1) == []
