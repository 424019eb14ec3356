"""New cuts: where a sequence exceeds the budget, never where there is one already."""

from __future__ import annotations

from optckpt.frontends.synthetic import residual_chain
from optckpt.solvers.cut_choice import NEW_CUTS, behind_the_peak, tighten
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.sequence import profile


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
