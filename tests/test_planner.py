import contextlib
from dataclasses import replace

import pytest

from optckpt.allocator import Allocator
from optckpt.budget import Budget
from optckpt.errors import BudgetError, InfeasibleBudgetError, OptckptError, OverBudgetError
from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.planner import check_fits, make_plan
from optckpt.schedule import Certificate, Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers.floor import static_floor
from optckpt.solvers.registry import SolveOptions, solve

MIB = 1 << 20
GRAPH = synthetic.chain(16, resident=1000)
PLAIN = simulate(GRAPH, Schedule.base(GRAPH))
FLOOR = static_floor(GRAPH)


def without_schedule(status):
    return lambda graph, budget, options: Solution(
        None, Certificate("mine", status, None, 0.0, 2.5)
    )


def test_the_plan_repeats_what_the_referee_says():
    plan = make_plan(GRAPH, "60%", "sqrt_n")
    result = simulate(GRAPH, plan.schedule)
    assert plan.fingerprint == GRAPH.fingerprint
    assert plan.strategy == plan.certificate.solver == "sqrt_n"
    assert plan.budget == plan.target == round(0.6 * PLAIN.peak)
    assert plan.plain_peak == PLAIN.peak
    assert plan.predicted_peak == result.peak <= plan.budget
    assert plan.overhead == plan.certificate.cost == result.overhead > 0
    assert plan.floor == FLOOR.bytes
    assert check_fits(plan) is plan


def test_a_plan_is_shown_in_short():
    plan = make_plan(GRAPH, "60%")
    assert "executions" not in repr(plan)
    line = str(plan)
    assert line.startswith(f"optimal ({plan.certificate.status}): budget ")
    assert f"{100 * plan.overhead:.2f} % more time" in line
    assert "\n" not in line
    assert "no budget" in str(make_plan(GRAPH, None, "sqrt_n"))


@pytest.mark.parametrize("budget", [PLAIN.peak, f"{PLAIN.peak}", 1.0, "100%", Budget(fraction=1.0)])
def test_budgets_in_every_form(budget):
    plan = make_plan(GRAPH, budget, "store_all")
    assert plan.budget == PLAIN.peak
    assert plan.certificate.status == "feasible"
    assert plan.overhead == 0


def test_no_budget():
    plan = make_plan(GRAPH, None, "sqrt_n")
    assert plan.budget is None
    assert plan.target is None
    assert check_fits(plan) is plan


def test_over_budget_names_both_peaks():
    plan = make_plan(GRAPH, FLOOR.bytes, "sqrt_n")
    assert plan.certificate.status == "over-budget"
    with pytest.raises(OverBudgetError) as error:
        check_fits(plan)
    assert error.value.peak == plan.predicted_peak
    for words in ("'sqrt_n'", str(FLOOR.bytes), str(plan.predicted_peak), "'optimal'"):
        assert words in str(error.value)


def test_below_the_floor_the_operation_is_named():
    with pytest.raises(InfeasibleBudgetError) as error:
        make_plan(GRAPH, FLOOR.bytes - 1, without_schedule("infeasible"))
    assert error.value.floor == FLOOR.bytes
    message = str(error.value)
    assert str(FLOOR.bytes) in message
    assert repr(GRAPH.operations[FLOOR.operation].name) in message
    assert "resident" in message
    assert "proven by the solver" not in message


def test_few_bytes_may_be_meant_as_a_share():
    for budget in (60, "60", "60 B"):
        with pytest.raises(InfeasibleBudgetError, match='write "60%" if a share'):
            make_plan(GRAPH, budget, "optimal")
    for share in (1e-6, "0.0001%", Budget(fraction=1e-6)):
        with pytest.raises(InfeasibleBudgetError) as error:
            make_plan(GRAPH, share, "optimal")
        assert "%" not in str(error.value)


def test_infeasible_above_the_static_floor():
    with pytest.raises(InfeasibleBudgetError, match=r"proven by the solver in \d"):
        make_plan(GRAPH, FLOOR.bytes, without_schedule("infeasible"))


def test_stopped_without_a_schedule():
    with pytest.raises(BudgetError, match=r"none was ruled out.*the budget or the time l") as error:
        make_plan(GRAPH, FLOOR.bytes, without_schedule("stopped"))
    assert not isinstance(error.value, InfeasibleBudgetError)


@pytest.mark.parametrize("late", [(0,), (0, 1, 3)])
def test_stopped_by_limits_on_repeats(late):
    """More time is no help where it is the graph's limits that are in the way."""
    n = len(GRAPH.operations)
    limited = {o: replace(GRAPH.operations[o], repeat_before=(n - 1,)) for o in late}
    operations = tuple(limited.get(o, op) for o, op in enumerate(GRAPH.operations))
    graph = replace(GRAPH, operations=operations)

    def repeats_late(graph, budget, options):
        again = [o for o in late if graph.operations[o].repeatable]
        if not again:
            return Solution(None, Certificate("late", "infeasible", None, 0.0, 0.0))
        schedule = Schedule((*range(n), *again))
        cost = simulate(graph, schedule).overhead
        return Solution(schedule, Certificate("late", "over-budget", cost, 0.0, 0.0))

    with pytest.raises(BudgetError, match="none was ruled out") as error:
        make_plan(graph, FLOOR.bytes, repeats_late)
    message = str(error.value)
    others = "" if len(late) == 1 else " and 2 more"
    name = GRAPH.operations[0].name
    assert "limits when operations may be executed again (repeat_before)" in message
    assert f"did without executing {name!r}{others} again: raise the budget" in message
    assert "time limit" not in message


def test_mistakes():
    with pytest.raises(BudgetError, match="'lots'"):
        make_plan(GRAPH, "lots", "sqrt_n")
    with pytest.raises(OptckptError, match="'magic'"):
        make_plan(GRAPH, None, "magic")


@pytest.mark.parametrize("margin", [-0.1, 1.0, 2, 10**400, float("nan"), "x", True, None])
def test_a_margin_is_a_share_of_the_budget(margin):
    with pytest.raises(BudgetError, match="margin is a share of the budget, from 0 to less than 1"):
        make_plan(GRAPH, "80%", "sqrt_n", margin=margin)


@pytest.mark.parametrize("repeat", ["none", None, 1, True])
def test_what_may_be_repeated_is_one_of_three(repeat):
    with pytest.raises(OptckptError, match="repeat must be 'auto', 'forward' or 'all', got"):
        make_plan(GRAPH, "80%", "sqrt_n", repeat=repeat)


@pytest.mark.parametrize("strategy", [5, None])
def test_a_strategy_is_a_name_or_a_function(strategy):
    for arguments in ({"budget": "80%"}, {"budget": None, "max_overhead": 0.1}):
        with pytest.raises(OptckptError, match="strategy= takes a name"):
            make_plan(GRAPH, strategy=strategy, **arguments)


def test_options_are_handed_on():
    plan = make_plan(GRAPH, None, "explicit", SolveOptions(checkpoints=(7,)))
    assert plan.overhead > 0


class TestMargin:
    def test_it_is_held_back(self):
        plan = make_plan(GRAPH, "80%", "chen_greedy", margin=0.1)
        assert plan.target == plan.budget - int(0.1 * plan.budget)
        assert plan.predicted_peak <= plan.target

    def test_not_where_the_plain_step_fits(self):
        plan = make_plan(GRAPH, PLAIN.peak, "store_all", margin=0.1)
        assert plan.target == plan.budget
        assert plan.overhead == 0

    @pytest.mark.parametrize("strategy", ["optimal", "chen_greedy"])
    def test_it_is_held_back_where_the_plain_step_only_just_fits(self, strategy):
        plan = make_plan(GRAPH, PLAIN.peak + 1, strategy, margin=0.1)
        assert plan.predicted_peak <= plan.budget - int(0.1 * plan.budget)
        assert plan.overhead > 0
        roomy = make_plan(GRAPH, round(PLAIN.peak / 0.9) + 1, strategy, margin=0.1)
        assert roomy.overhead == 0

    def test_a_plain_step_that_only_just_fits_is_better_than_none(self):
        plan = make_plan(GRAPH, PLAIN.peak + 1, "store_all", margin=0.1)
        assert plan.overhead == 0
        assert plan.predicted_peak == PLAIN.peak

    def test_given_up_below_the_floor(self):
        plan = make_plan(GRAPH, FLOOR.bytes, "sqrt_n", margin=0.1)
        assert plan.target == plan.budget

    def test_given_up_where_nothing_else_fits(self):
        peak = make_plan(GRAPH, None, "sqrt_n").predicted_peak
        plan = make_plan(GRAPH, peak, "sqrt_n", margin=0.01)
        assert plan.target == plan.budget == plan.predicted_peak
        assert plan.certificate.status == "feasible"


class TestAllocator:
    """Budgets are kept as the allocator reports them, not as live bytes."""

    # Odd sizes, so that chunks are larger than the tensors in them.
    SIZES = tuple(MIB * (3 + 5 * i % 7) for i in range(24))
    GRAPH = synthetic.chain(24, size=SIZES)
    ALLOCATOR = Allocator()

    def reported(self, plan):
        return self.ALLOCATOR.peak(self.GRAPH, plan.schedule)

    @pytest.mark.parametrize("share", [0.5, 0.65, 0.8])
    @pytest.mark.parametrize("strategy", ["optimal", "chen_greedy"])
    def test_reported_peak_is_within_the_budget(self, share, strategy):
        plan = make_plan(self.GRAPH, share, strategy, allocator=self.ALLOCATOR)
        assert plan.predicted_peak == self.reported(plan) <= plan.budget
        assert plan.live_peak == simulate(self.GRAPH, plan.schedule).peak <= plan.target
        base = Schedule.base(self.GRAPH)
        assert plan.plain_peak == self.ALLOCATOR.peak(self.GRAPH, base)
        assert plan.budget == round(share * plan.plain_peak)
        assert plan.plain_peak > simulate(self.GRAPH, base).peak

    def test_plain_reported_peak_needs_no_recomputation(self):
        peak = self.ALLOCATOR.peak(self.GRAPH, Schedule.base(self.GRAPH))
        plan = make_plan(self.GRAPH, peak, allocator=self.ALLOCATOR, margin=0.1)
        assert plan.schedule == Schedule.base(self.GRAPH)

    def test_near_the_floor_live_bytes_count_and_a_warning_is_given(self, caplog):
        budget = static_floor(self.GRAPH).bytes
        plan = None
        while plan is None:
            budget += MIB
            with contextlib.suppress(BudgetError):
                plan = make_plan(
                    self.GRAPH, budget, options=SolveOptions(time_limit=3), allocator=self.ALLOCATOR
                )
        assert plan.live_peak <= budget < plan.predicted_peak
        assert check_fits(plan) is plan
        assert "whole chunks" in caplog.text

    def test_the_next_smaller_peak_where_the_blocks_are_large(self):
        class Wasteful:
            is_slow = False

            def peak(self, graph, schedule):
                return simulate(graph, schedule).peak + 6 * MIB

        graph = synthetic.chain(24, size=8 * MIB)
        first = make_plan(graph, 0.8)
        # A little more than it needs, and a little less than is reported for it.
        budget = first.live_peak + 6 * MIB - MIB // 16
        assert make_plan(graph, budget).live_peak == first.live_peak
        plan = make_plan(graph, budget, allocator=Wasteful())
        assert first.live_peak - 8 * MIB <= plan.live_peak < first.live_peak
        assert plan.predicted_peak <= budget


def test_max_overhead_gives_the_least_memory_at_that_price():
    graph = synthetic.residual_chain(8)
    plain = simulate(graph, Schedule.base(graph)).peak
    dear = make_plan(graph, None, max_overhead=0.2)
    cheap = make_plan(graph, None, max_overhead=0.05)
    assert dear.overhead <= 0.2
    assert cheap.overhead <= 0.05
    assert dear.live_peak <= cheap.live_peak < plain
    assert dear.budget is None
    assert dear.target == dear.live_peak == simulate(graph, dear.schedule).peak
    assert dear.certificate.cost == pytest.approx(dear.overhead)
    # At the same bytes, no schedule costs much less.
    again = make_plan(graph, dear.live_peak)
    assert again.overhead >= dear.certificate.bound - 1e-9
    assert make_plan(graph, None, max_overhead=0.0).overhead == 0.0


def test_max_overhead_and_a_budget_exclude_each_other():
    graph = synthetic.chain(4)
    with pytest.raises(BudgetError, match="either a budget or max_overhead"):
        make_plan(graph, "50%", max_overhead=0.1)
    with pytest.raises(BudgetError, match="at least 0"):
        make_plan(graph, None, max_overhead=-1.0)


def two_branches() -> TrainingGraph:
    """Two large buffers, both made before either is used up."""
    sizes = (10 * MIB, 10 * MIB, MIB, MIB, MIB)
    operations = [
        Operation("make_a", "op", 1.0, (), (0,)),
        Operation("make_b", "op", 1.0, (), (1,)),
        Operation("use_a", "op", 1.0, (0,), (2,), forward=False, repeatable=False),
        Operation("use_b", "op", 1.0, (1,), (3,), forward=False, repeatable=False),
        Operation("end", "op", 1.0, (2, 3), (4,), forward=False, repeatable=False),
    ]
    buffers = tuple(Buffer(f"b{i}", size) for i, size in enumerate(sizes))
    return TrainingGraph(tuple(operations), buffers, (4,))


@pytest.mark.parametrize("allocator", [None, Allocator()])
def test_the_order_changes_where_that_saves_time_and_only_if_it_may(allocator):
    graph = two_branches()
    kept = make_plan(graph, 17 * MIB, allocator=allocator)
    assert kept.overhead == pytest.approx(0.4)
    assert kept.schedule.in_base_order
    assert kept.floor == static_floor(graph).bytes
    changed = make_plan(graph, 17 * MIB, allocator=allocator, reorder=True)
    assert changed.overhead == 0.0
    assert not changed.schedule.in_base_order
    assert changed.live_peak <= changed.budget
    assert changed.floor <= changed.live_peak
    assert changed.certificate.valid_for == "any order"
    plenty = make_plan(graph, 40 * MIB, allocator=allocator, reorder=True)
    assert plenty.schedule == Schedule.base(graph)


def test_a_budget_for_another_order_only_says_so():
    graph = two_branches()
    fixed = replace(
        graph, operations=tuple(replace(op, repeatable=False) for op in graph.operations)
    )
    with pytest.raises(InfeasibleBudgetError, match=r"try solver\.order: free"):
        make_plan(fixed, 15 * MIB)
    with pytest.raises(InfeasibleBudgetError) as error:
        make_plan(fixed, 5 * MIB)
    assert "order: free" not in str(error.value)


def two_gradients(forward_bytes: int = 1) -> TrainingGraph:
    """A small gradient is expanded twice before either of the large results is used up."""
    sizes = (forward_bytes, MIB, 10 * MIB, 10 * MIB, MIB, MIB)
    operations = [
        Operation("loss", "op", 1.0, (), (0,)),
        Operation("seed", "op", 1.0, (0,), (1,), forward=False, repeatable=False),
        Operation("expand_a", "op", 1.0, (1,), (2,), forward=False),
        Operation("expand_b", "op", 1.0, (1,), (3,), forward=False),
        Operation("use_b", "op", 1.0, (3,), (4,), forward=False, repeatable=False),
        Operation("use_a", "op", 1.0, (2,), (5,), forward=False, repeatable=False),
    ]
    buffers = tuple(Buffer(f"b{i}", size) for i, size in enumerate(sizes))
    return TrainingGraph(tuple(operations), buffers, (4, 5))


class TestRepeat:
    """Which operations may be executed again."""

    GRAPH = two_gradients()
    NARROW = static_floor(GRAPH.only_forward_repeats).bytes
    WIDE = static_floor(GRAPH).bytes

    @pytest.mark.parametrize("allocator", [None, Allocator()])
    def test_backward_operations_where_the_budget_is_not_met_otherwise(self, allocator):
        assert self.WIDE == 12 * MIB < self.NARROW == 21 * MIB
        plan = make_plan(self.GRAPH, 20 * MIB, allocator=allocator, repeat="auto")
        assert plan.live_peak <= plan.predicted_peak <= 20 * MIB
        assert plan.schedule.executions.count(2) == 2
        assert plan.certificate.repeats == "all"
        assert plan.certificate.status == "optimal"
        assert plan.floor == self.WIDE
        plan.check_graph(self.GRAPH)

    def test_forward_alone_says_what_else_could_be_done(self):
        with pytest.raises(InfeasibleBudgetError) as error:
            make_plan(self.GRAPH, 16 * MIB, repeat="forward")
        assert error.value.floor == self.NARROW
        message = str(error.value)
        assert "repeats forward operations alone needs at least 21.0 MiB" in message
        assert "try solver.repeat: all (with backward operations repeated" in message
        assert "12.0 MiB)" in message
        with pytest.raises(InfeasibleBudgetError) as error:
            make_plan(self.GRAPH, 6 * MIB, repeat="forward")
        assert "solver.repeat" not in str(error.value)

    @pytest.mark.parametrize("repeat", ["auto", "all"])
    def test_not_even_with_backward_operations(self, repeat):
        with pytest.raises(InfeasibleBudgetError, match="even if backward operations") as error:
            make_plan(self.GRAPH, 11 * MIB, repeat=repeat)
        assert error.value.floor == self.WIDE
        assert "solver.repeat" not in str(error.value)

    def test_a_graph_without_such_operations_is_not_spoken_of(self):
        for repeat in ("auto", "forward", "all"):
            with pytest.raises(InfeasibleBudgetError) as error:
                make_plan(GRAPH, FLOOR.bytes - 1, repeat=repeat)
            assert ": every schedule needs" in str(error.value)

    def test_nobody_else_pays(self):
        graph = synthetic.chain(16, repeatable_backward=True)
        seen = []

        def spy(graph, budget, options):
            seen.append(graph)
            return solve(graph, budget, "optimal", options)

        plan = make_plan(graph, "60%", spy, repeat="auto")
        assert plan.overhead > 0
        assert all(g is graph.only_forward_repeats for g in seen)
        assert plan.certificate.repeats == "forward"
        assert plan.floor == static_floor(graph).bytes
        assert plan.fingerprint == graph.fingerprint
        seen.clear()
        assert make_plan(graph, "60%", spy).certificate.repeats == "all"
        assert all(g is graph for g in seen)
        # That nothing costs less than nothing holds for all schedules.
        assert make_plan(graph, None, repeat="auto").certificate.repeats == "all"

    def test_a_price_that_leads_down_to_the_floor(self):
        def lowest(price, repeat):
            plan = make_plan(self.GRAPH, None, max_overhead=price, repeat=repeat)
            assert plan.overhead <= price
            return plan.live_peak

        assert lowest(0.5, "forward") == self.NARROW
        assert lowest(0.5, "auto") == lowest(0.5, "all") < self.NARROW
        assert lowest(0.0, "auto") == self.NARROW


@pytest.mark.parametrize(
    ("last", "options"),
    [(1, {"budget": "60%"}), (2, {"budget": "60%"}), (1, {"max_overhead": 9.0, "budget": None})],
)
def test_nothing_is_searched_after_ctrl_c(monkeypatch, last, options):
    found = solve(GRAPH, PLAIN.peak * 6 // 10)
    # A gap is left, for which there would be further rounds, and other orders.
    open_ = replace(found.certificate, status="feasible", bound=0.0)
    found = replace(found, certificate=open_)
    calls = []

    def interrupted(graph, budget, strategy="optimal", options=None):
        # The second of the rounds gives nothing better than the first.
        calls.append(budget)
        return replace(found, interrupted=len(calls) == last)

    monkeypatch.setattr("optckpt.planner.solve", interrupted)
    monkeypatch.setattr("optckpt.solvers.frontier.solve", interrupted)
    backward = replace(
        GRAPH, operations=tuple(replace(op, repeatable=True) for op in GRAPH.operations)
    )
    plan = make_plan(backward, reorder=True, repeat="auto", **options)
    assert len(calls) == last
    assert plan.schedule == found.schedule
