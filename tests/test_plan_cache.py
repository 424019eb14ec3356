"""Plans that are kept: storage, what finds them, how they are judged again."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import optckpt
from optckpt import plan_cache, reuse
from optckpt.allocator import Allocator
from optckpt.budget import Budget
from optckpt.config import Config
from optckpt.errors import InfeasibleBudgetError
from optckpt.frontends.synthetic import chain, residual_chain
from optckpt.graph import TrainingGraph
from optckpt.plan_cache import Asked, PlanCache, StoredPlan, cache_for, plan_folder
from optckpt.reuse import Problem, again, plan_once
from optckpt.schedule import Plan
from optckpt.simulate import simulate
from optckpt.solvers import registry
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.registry import SolveOptions


def problem(graph: TrainingGraph, budget: str | None = "70%", **changes: object) -> Problem:
    values = {
        "graph": graph,
        "budget": None if budget is None else Budget.parse(budget),
        "strategy": "optimal",
        "options": SolveOptions(time_limit=5.0, gap=0.02, threads=1),
        "margin": 0.0,
        "allocator": None,
        "plain_graph": graph,
        "max_overhead": None,
        "reorder": False,
        "repeat": "all",
        "surroundings": {"device": "CPU"},
        **changes,
    }
    return Problem(**values)


@pytest.fixture
def solves(monkeypatch) -> list[Problem]:
    """The problems that were really solved."""
    seen: list[Problem] = []
    solve = Problem.solve

    def counted(self, start=None):
        seen.append(self)
        return solve(self, start)

    monkeypatch.setattr(Problem, "solve", counted)
    return seen


@pytest.fixture
def cache(tmp_path) -> PlanCache:
    return PlanCache(plan_folder(tmp_path))


def files(cache: PlanCache) -> list[Path]:
    assert cache.folder is not None
    return sorted(cache.folder.iterdir())


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def restarted(cache: PlanCache) -> PlanCache:
    """The cache as another process finds it."""
    return PlanCache(cache.folder)


GRAPH = residual_chain(5)
QUICK = problem(GRAPH, None, strategy="sqrt_n")


# --- Found again ---------------------------------------------------------------------------------


def test_a_restart_does_not_solve_again(cache, solves):
    first = plan_once(problem(GRAPH), cache)
    second = plan_once(problem(GRAPH), restarted(cache))
    assert len(solves) == 1
    assert first.source == "solved"
    assert second == replace(first, source="cache")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"budget": "70%"}, "budget 70 % of the plain peak"),
        ({"budget": None, "max_overhead": 0.25}, "at most 25 % more time"),
    ],
)
def test_it_is_said_what_is_being_planned(cache, caplog, changes, text):
    graph = residual_chain(8)
    with caplog.at_level(logging.INFO, "optckpt"):
        for _ in range(2):
            plan_once(problem(graph, **changes), cache)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("planning")]
    assert len(said) == 1
    assert f"{len(graph.operations)} operations, {text}, time limit" in said[0]


def test_a_retrace_does_not_even_read_the_disk(cache, solves):
    plan_once(problem(GRAPH), cache)
    for path in files(cache):
        path.unlink()
    assert plan_once(problem(GRAPH), cache).source == "cache"
    assert len(solves) == 1


def test_names_and_resident_bytes_do_not_matter(cache, solves):
    plan_once(problem(GRAPH), cache)
    renamed = replace(
        GRAPH,
        operations=tuple(replace(op, name=f"replica_1/{op.name}") for op in GRAPH.operations),
        buffers=tuple(replace(b, name=f"replica_1/{b.name}") for b in GRAPH.buffers),
        name="again",
    )
    assert plan_once(problem(renamed), cache).source == "cache"
    # Of a share of the plain peak as much is left as before, within what is not worth a search.
    more = replace(GRAPH, resident=GRAPH.resident + 64)
    plan = plan_once(problem(more), cache)
    assert plan.source == "cache"
    assert plan.predicted_peak == simulate(more, plan.schedule).peak
    assert len(solves) == 1


def with_larger_buffer(graph: TrainingGraph) -> TrainingGraph:
    first = replace(graph.buffers[0], size=graph.buffers[0].size + 256)
    return replace(graph, buffers=(first, *graph.buffers[1:]))


@pytest.mark.parametrize(
    "other",
    [
        problem(residual_chain(6)),
        problem(with_larger_buffer(GRAPH)),
        problem(GRAPH, "71%"),
        problem(GRAPH, "700000000"),
        problem(GRAPH, strategy="sqrt_n"),
        problem(GRAPH, margin=0.01),
        problem(GRAPH, repeat="forward"),
        problem(GRAPH, reorder=True),
        problem(GRAPH, options=SolveOptions(time_limit=6.0, gap=0.02, threads=1)),
        problem(GRAPH, options=SolveOptions(time_limit=5.0, gap=0.02, threads=1, seed=1)),
        problem(GRAPH, None, max_overhead=0.1),
        problem(GRAPH, surroundings={"device": "GPU"}),
    ],
    ids=lambda p: "",
)
def test_what_changes_the_answer_is_looked_up_apart(other):
    asked, mine = other.asked, problem(GRAPH).asked
    assert asked is not None
    assert mine is not None
    assert asked.key != mine.key


def test_another_version_solves_again(cache, solves, monkeypatch):
    plan_once(problem(GRAPH), cache)
    monkeypatch.setattr(optckpt, "__version__", "0.0.0")
    plan_once(problem(GRAPH), cache)
    assert len(solves) == 2


def test_strategies_of_others_are_not_kept(cache, solves):
    def mine(graph, budget, options):
        return registry.get("sqrt_n")(graph, budget, options)

    registry.register("mine", mine)
    for strategy in ("mine", mine, "mine"):
        plan_once(problem(GRAPH, None, strategy=strategy), cache)
    assert len(solves) == 3
    assert not cache.folder.exists()


def test_what_cannot_be_met_is_not_kept(cache):
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError):
            plan_once(problem(GRAPH, "1 B"), cache)
    over = plan_once(problem(chain(12), "1 B", strategy="sqrt_n"), cache)
    assert over.certificate.status == "over-budget"
    assert not cache.folder.exists()


def test_least_memory_for_a_price_is_kept(cache, solves):
    quick = SolveOptions(time_limit=1.0, gap=0.05, threads=1)
    ask = problem(GRAPH, None, max_overhead=0.2, options=quick)
    first = plan_once(ask, cache)
    assert plan_once(ask, restarted(cache)) == replace(first, source="cache")
    dear = GRAPH.with_costs(
        [op.seconds * (5 if op.forward else 1) for op in GRAPH.operations],
        [op.workspace for op in GRAPH.operations],
    )
    dearer = plan_once(replace(ask, graph=dear, plain_graph=dear), cache)
    assert dearer.source == "solved"
    assert dearer.overhead <= 0.2
    assert len(solves) == 2


# --- Judged again --------------------------------------------------------------------------------


def bytes_of(graph: TrainingGraph, share: float) -> str:
    return str(round(share * simulate(graph, optckpt.Schedule.base(graph)).peak))


def test_more_resident_bytes_than_the_budget_leaves_are_solved_again(cache, solves):
    budget = bytes_of(GRAPH, 0.7)
    first = plan_once(problem(GRAPH, budget), cache)
    fuller = replace(GRAPH, resident=GRAPH.resident + first.budget // 10)
    plan = plan_once(problem(fuller, budget), cache)
    assert plan.source == "solved"
    assert plan.live_peak <= plan.budget
    assert first.schedule != plan.schedule
    assert len(solves) == 2
    # A restart finds the plan for either state of the process.
    for graph, schedule in ((fuller, plan.schedule), (GRAPH, first.schedule)):
        found = plan_once(problem(graph, budget), restarted(cache))
        assert (found.source, found.schedule) == ("cache", schedule)
    assert len(solves) == 2


def test_the_latest_few_plans_of_a_step_are_kept(cache, monkeypatch):
    monkeypatch.setattr(plan_cache, "ALTERNATIVES", 2)
    budget = bytes_of(GRAPH, 0.7)
    schedules = []
    for share in (0.0, 0.1, 0.2):
        fuller = replace(GRAPH, resident=GRAPH.resident + int(share * int(budget)))
        schedules.append(plan_once(problem(fuller, budget), cache).schedule)
    assert len(set(schedules)) == 3
    kept = restarted(cache).get(problem(GRAPH, budget).asked)
    assert [stored.plan.schedule for stored in kept] == schedules[:0:-1]


def test_the_search_starts_from_the_plan_that_does_not_fit(cache, monkeypatch):
    starts = []
    solve = Problem.solve
    monkeypatch.setattr(
        Problem, "solve", lambda self, start=None: starts.append(start) or solve(self, start)
    )
    budget = bytes_of(GRAPH, 0.7)
    first = plan_once(problem(GRAPH, budget), cache)
    fuller = replace(GRAPH, resident=GRAPH.resident + first.budget // 10)
    plan_once(problem(fuller, budget), cache)
    assert starts == [None, first.schedule]


def test_much_more_room_is_used(cache, solves):
    budget = bytes_of(GRAPH, 0.8)
    full = replace(GRAPH, resident=GRAPH.resident + int(budget) // 8)
    tight = plan_once(problem(full, budget), cache)
    roomy = plan_once(problem(GRAPH, budget), cache)
    assert roomy.overhead < tight.overhead
    assert len(solves) == 2


def test_the_allocator_is_asked_again(cache, solves):
    graph = residual_chain(8, size=3 << 20)
    ask = problem(graph, "75%", allocator=Allocator(), margin=0.03)
    first = plan_once(ask, cache)
    known = replace(ask, allocator=Allocator(held=(1 << 20,)))
    second = plan_once(known, cache)
    assert len(solves) == 1
    assert second.predicted_peak == max(
        second.live_peak, known.allocator.peak(graph, first.schedule)
    )


def measured_again(graph: TrainingGraph, seed: int, spread: float) -> TrainingGraph:
    rng = random.Random(seed)
    return graph.with_costs(
        [op.seconds * rng.uniform(1, 1 + spread) for op in graph.operations],
        [max(0, op.workspace + rng.choice((-32, 0, 32))) for op in graph.operations],
    )


def test_other_costs_keep_the_plan_and_weaken_the_bound(cache, solves):
    exact = SolveOptions(time_limit=5.0, threads=1)
    first = plan_once(problem(GRAPH, options=exact), cache)
    graph = measured_again(GRAPH, 0, 0.1)
    second = plan_once(problem(graph, options=exact), cache)
    assert len(solves) == 1
    assert second.source == "cache, other costs"
    assert second.schedule == first.schedule
    assert second.overhead == simulate(graph, second.schedule).overhead
    assert second.certificate.cost == second.overhead
    assert 0 < second.certificate.bound < first.certificate.bound
    assert second.certificate.gap > exact.gap
    assert second.certificate.status == "feasible"


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    length=st.integers(2, 4),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.6, 0.7, 0.8]),
    more=st.integers(-64, 64),
)
def test_the_bound_that_is_left_holds_for_the_new_costs(length, seed, share, more):
    graph = measured_again(chain(length), seed, 3.0)
    try:
        plan = problem(graph, f"{100 * share}%").solve()
    except optckpt.BudgetError:
        return
    stored = StoredPlan(
        asked=Asked({}),
        plan=plan,
        seconds=tuple(op.seconds for op in graph.operations),
        workspace=tuple(op.workspace for op in graph.operations),
        resident=graph.resident,
        made_at=0.0,
    )
    now = replace(measured_again(graph, seed + 1, 3.0), resident=max(0, graph.resident + more))
    judged = reuse.judge(now, plan.schedule, None)
    certificate, target, _ = reuse._certificate(stored, judged, problem(now))
    best = cheapest(now, target)
    assert certificate.bound <= certificate.cost
    if best is not None:
        assert certificate.bound * now.seconds <= best[0] + 1e-9


def test_plans_say_where_they_are_from(cache, tmp_path):
    plan_once(problem(GRAPH), cache)
    plan = plan_once(problem(GRAPH), cache)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").source == "cache"
    data = plan.to_json()
    del data["source"]
    assert Plan.from_json(data).source == "solved"
    with pytest.raises(optckpt.OptckptError, match="'source' of the plan must be one of"):
        Plan.from_json({**data, "source": "heaven"})


def test_a_plan_of_another_graph_is_no_answer():
    plan = problem(GRAPH).solve()
    other = residual_chain(6)
    stored = StoredPlan(Asked({}), plan, (1.0,) * len(other.operations), (0,) * 3, 0, 0.0)
    assert again(stored, problem(other))[0] is None


# --- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "\x00" * len(text),
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: '{"format": "of somebody else"}',
        lambda text: text.replace('"version":1', '"version":99', 1),
        lambda text: text.replace('"overhead":', '"overhead":1', 1),
        lambda text: json.dumps({**json.loads(text), "content": {}}),
    ],
)
def test_damaged_files_are_replaced_with_one_warning(cache, solves, caplog, damage):
    first = plan_once(QUICK, cache)
    (path,) = files(cache)
    good = path.read_text()
    path.write_text(damage(good))
    other = restarted(cache)
    assert plan_once(QUICK, other).schedule == first.schedule
    assert len(solves) == 2
    assert len(warnings(caplog)) == 1
    assert str(path) in warnings(caplog)[0]
    assert files(cache) == [path]
    assert plan_once(QUICK, restarted(cache)).source == "cache"


def test_a_file_under_another_name_is_not_taken(cache, solves, caplog):
    plan_once(problem(GRAPH), cache)
    other = problem(residual_chain(6))
    (path,) = files(cache)
    path.rename(path.with_stem(other.asked.key))
    plan_once(other, restarted(cache))
    assert len(solves) == 2
    assert "another key" in warnings(caplog)[0]


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path, solves, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = PlanCache(tmp_path / "file" / "plans")
    for length in (5, 6, 5, 6):
        plan_once(problem(residual_chain(length)), cache)
    assert len(solves) == 2
    assert len(warnings(caplog)) == 1
    assert "OPTCKPT_CACHE_DIR" in warnings(caplog)[0]


def test_a_folder_in_the_place_of_a_file(cache, solves, caplog):
    (cache.folder / f"{problem(GRAPH).asked.key}.json").mkdir(parents=True)
    plan_once(problem(GRAPH), cache)
    plan_once(problem(GRAPH), cache)
    assert len(solves) == 1
    assert len(warnings(caplog)) == 1


def test_a_full_disk_costs_one_warning_and_leaves_nothing_behind(
    cache, solves, caplog, monkeypatch
):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plan_cache.Path, "replace", full)
    folder = cache.folder
    for length in (5, 6, 5, 6):
        plan_once(problem(residual_chain(length)), cache)
    assert len(solves) == 2
    assert len(warnings(caplog)) == 1
    assert "No space left" in warnings(caplog)[0]
    assert list(folder.iterdir()) == []


def test_the_oldest_go_where_there_are_too_many(cache, monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 3)
    problems = [problem(residual_chain(n), None, strategy="sqrt_n") for n in range(4, 8)]
    for age, p in enumerate(reversed(problems[:3])):
        plan_once(p, cache)
        os.utime(cache.folder / f"{p.asked.key}.json", (0, 1000 - age))
    # Used last, it stays.
    assert len(restarted(cache).get(problems[0].asked)) == 1
    plan_once(problems[3], cache)
    kept = {path.stem for path in files(cache)}
    assert kept == {problems[k].asked.key for k in (0, 2, 3)}


def test_bytes_are_bounded_and_unfinished_files_go(cache, monkeypatch):
    plan_once(problem(GRAPH), cache)
    old, young = cache.folder / ".a.partial", cache.folder / ".b.partial"
    for path in (old, young):
        path.write_text("unfinished")
    os.utime(old, (0, 0))
    monkeypatch.setattr(plan_cache, "MOST_BYTES", 1)
    other = problem(residual_chain(6))
    plan_once(other, cache)
    assert files(cache) == [young, cache.folder / f"{other.asked.key}.json"]


def test_threads_that_ask_at_once_solve_once(cache, solves):
    plans: list[Plan] = []
    barrier = threading.Barrier(4)

    def ask():
        barrier.wait()
        plans.append(plan_once(problem(GRAPH), cache))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(solves) == 1
    assert len({plan.schedule for plan in plans}) == 1
    assert sorted(plan.source for plan in plans) == ["cache"] * 3 + ["solved"]


_PROCESS = """
import logging, sys, time
logging.basicConfig(level=logging.WARNING)
from pathlib import Path
from optckpt.frontends.synthetic import chain
from optckpt.plan_cache import Asked, PlanCache, StoredPlan
from optckpt.planner import make_plan
folder, start = Path(sys.argv[1]), float(sys.argv[2])
graph = chain(30)
plan = make_plan(graph, None, "sqrt_n")
seconds = tuple(op.seconds for op in graph.operations)
time.sleep(max(0.0, start - time.time()))
for i in range(60):
    asked = Asked({"number": i % 7})
    PlanCache(folder).put(StoredPlan(asked, plan, seconds, (0,) * len(seconds), 0, 1.0))
    found = PlanCache(folder).get(asked)
    assert len(found) == 1 and found[0].plan.schedule == plan.schedule
"""


def test_two_processes_at_once(tmp_path):
    start = time.time() + 2.0
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(tmp_path), str(start)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=50)
        assert writer.returncode == 0, errors
        assert errors == ""
    assert len(list(tmp_path.iterdir())) == 7


def test_folders_and_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTCKPT_CACHE_DIR", str(tmp_path / "one"))
    assert cache_for(True).folder == tmp_path / "one" / "plans"
    assert cache_for(True) is cache_for(True)
    monkeypatch.setenv("OPTCKPT_CACHE_DIR", str(tmp_path / "two"))
    assert cache_for(True).folder == tmp_path / "two" / "plans"
    assert cache_for(str(tmp_path / "three")).folder == tmp_path / "three" / "plans"
    assert cache_for(False).folder is None


# --- The call ------------------------------------------------------------------------------------


def traced(folder: Path, layers: int = 8) -> optckpt.Plan:
    """Trace a step anew; its plan."""
    config = Config.model_validate(
        {"costs": {"model": "flops"}, "plans": {"cache": str(folder)}, "strategy": "chen_greedy"}
    )
    rng = np.random.default_rng(0)
    ws = [tf.Variable(rng.normal(size=(64, 64)).astype(np.float32)) for _ in range(layers)]

    @tf.function
    def step(x):
        y = x
        for w in ws:
            y = tf.tanh(y @ w)
        return optckpt.gradients(tf.reduce_sum(y), ws, budget="75%", config=config)

    step.get_concrete_function(tf.TensorSpec([8192, 64]))
    return optckpt.last_plan()


@pytest.mark.fresh_process
def test_a_step_that_is_traced_again_is_not_solved_again(tmp_path, solves, caplog):
    caplog.set_level(logging.INFO, "optckpt")
    first = traced(tmp_path)
    assert first.source == "solved"
    second = traced(tmp_path)
    assert second.source == "cache"
    assert second.schedule == first.schedule
    assert any("used again: costs are as they were" in r.getMessage() for r in caplog.records)
    assert len(solves) == 1
    assert traced(tmp_path, layers=9).source == "solved"
    cache_for(str(tmp_path)).forget()
    assert traced(tmp_path).source == "cache"
    assert len(solves) == 2
