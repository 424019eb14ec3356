"""`optckpt cache`, as installed: what it lists, clears and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optckpt.cli import main
from optckpt.costs import Cost, CostCache
from optckpt.frontends.synthetic import chain
from optckpt.plan_cache import Asked, PlanCache, StoredPlan, plan_folder
from optckpt.planner import make_plan
from tests.test_cli import refused, run


@pytest.fixture
def filled(tmp_path) -> Path:
    """A cache folder with two plans, one damaged file and three costs."""
    cache = PlanCache(plan_folder(tmp_path))
    for length, share in ((6, "70%"), (8, "80%")):
        graph = chain(length)
        plan = make_plan(graph, share, "sqrt_n")
        asked = Asked({"fingerprint": graph.fingerprint, "budget": share})
        seconds = tuple(op.seconds for op in graph.operations)
        workspace = tuple(op.workspace for op in graph.operations)
        made_at = time.time() - 7200
        cache.put(StoredPlan(asked, plan, seconds, workspace, graph.resident, made_at))
    (plan_folder(tmp_path) / f"{'0' * 64}.json").write_text("{")
    costs = CostCache(tmp_path)
    for name in "abc":
        costs.put(name, Cost(0.5, 0))
    costs.close()
    return tmp_path


@pytest.fixture
def call(monkeypatch, capsys):
    """The command within this process, which starts sooner."""

    def run_here(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["optckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(ended.value.code or 0), out, err)

    return run_here


def test_the_installed_command_lists_plans_and_costs(filled):
    result = run("cache", environment={"OPTCKPT_CACHE_DIR": str(filled)})
    assert result.returncode == 0, result.stderr
    assert chain(6).fingerprint[:12] in result.stdout
    assert chain(8).fingerprint[:12] in result.stdout
    assert "sqrt_n" in result.stdout
    assert "2 hours" in result.stdout
    assert "unreadable" in result.stdout
    assert "3 plans" in result.stdout
    assert "3 measured costs" in result.stdout


def test_the_installed_command_clears_when_told_to(filled):
    environment = {"OPTCKPT_CACHE_DIR": str(filled)}
    refused(run("cache", "clear", environment=environment), "give --yes")
    assert len(list(plan_folder(filled).iterdir())) == 3
    result = run("cache", "clear", "--yes", environment=environment)
    assert result.returncode == 0, result.stderr
    assert "deleted 3 plans and 3 measured costs" in result.stdout
    assert list(filled.iterdir()) == []


def test_json_holds_a_row_per_plan(call, filled):
    result = json.loads(call("cache", "--folder", filled, "--json").stdout)
    assert result["folder"] == str(filled)
    assert result["costs"]["entries"] == 3
    damaged = [row for row in result["plans"] if row["damaged"]]
    assert len(damaged) == 1
    assert damaged[0]["fingerprint"] is None
    rows = {row["fingerprint"]: row for row in result["plans"] if not row["damaged"]}
    plan = make_plan(chain(6), "70%", "sqrt_n")
    row = rows[plan.fingerprint]
    assert row["budget"] == plan.budget
    assert row["peak"] == plan.predicted_peak
    assert row["plain_peak"] == plan.plain_peak
    assert row["overhead"] == plan.overhead
    assert row["bytes"] == Path(row["path"]).stat().st_size
    assert time.time() - row["made_at"] == pytest.approx(7200, abs=60)


@pytest.mark.parametrize(("option", "plans", "costs"), [("--plans", 3, 0), ("--costs", 0, 3)])
def test_clear_one_of_both(call, filled, option, plans, costs):
    result = call("cache", "clear", option, "--yes", "--folder", filled, "--json")
    cleared = json.loads(result.stdout)
    assert (cleared["plans"], cleared["costs"]) == (plans, costs)
    left = json.loads(call("cache", "--folder", filled, "--json").stdout)
    assert (len(left["plans"]), left["costs"]["entries"]) == (3 - plans, 3 - costs)


def test_options_before_the_subcommand_count_as_well(call, filled):
    result = call("cache", "--folder", filled, "--json", "clear", "--yes")
    assert json.loads(result.stdout)["plans"] == 3


def test_json_never_asks(call, filled):
    result = call("cache", "clear", "--json", "--folder", filled)
    refused(result, "give --yes")
    assert json.loads(result.stdout)["kind"] == "OptckptError"
    assert len(list(plan_folder(filled).iterdir())) == 3


def test_an_empty_or_absent_folder_is_no_mistake(call, tmp_path):
    absent = tmp_path / "absent"
    result = json.loads(call("cache", "--folder", absent, "--json").stdout)
    assert (result["plans"], result["costs"]["entries"]) == ([], 0)
    assert "deleted 0 plans" in call("cache", "clear", "--yes", "--folder", absent).stdout
    assert not absent.exists()


def test_a_file_in_the_place_of_the_folder(call, tmp_path):
    (tmp_path / "plans").write_text("in the way")
    refused(call("cache", "--folder", tmp_path), "cannot use the cache")
    refused(call("cache", "clear", "--yes", "--folder", tmp_path), "cannot use the cache")
    refused(call("cache", "shrink", "--folder", tmp_path), "see optckpt cache --help")


def test_damaged_costs_are_listed_as_such_and_cleared(call, tmp_path):
    (tmp_path / "costs.sqlite3").write_text("no database" * 100)
    listed = json.loads(call("cache", "--folder", tmp_path, "--json").stdout)
    assert listed["costs"]["entries"] is None
    assert "a damaged file of measured costs" in call("cache", "--folder", tmp_path).stdout
    call("cache", "clear", "--costs", "--yes", "--folder", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(call, tmp_path):
    plan_folder(tmp_path).mkdir()
    mine = plan_folder(tmp_path) / "notes.json"
    mine.write_text("{}")
    call("cache", "clear", "--yes", "--folder", tmp_path)
    assert mine.read_text() == "{}"
