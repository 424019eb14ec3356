"""Tables, figures and progress."""

from __future__ import annotations

import io
import json

import matplotlib.image
import numpy as np
from rich.console import Console

from optckpt.compare import Comparison, Row
from optckpt.frontends.synthetic import residual_chain
from optckpt.planner import make_plan
from optckpt.report.figures import memory_figure
from optckpt.report.files import write_comparison
from optckpt.report.progress import describe, status_line
from optckpt.report.table import comparison_table, percent, remarks
from optckpt.schedule import Plan, Schedule
from optckpt.simulate import simulate
from optckpt.solvers.registry import Progress

MIB = 2**20


def example() -> Comparison:
    graph = residual_chain(6)
    peak = simulate(graph, Schedule.base(graph)).peak
    plan = make_plan(graph, None, "sqrt_n")
    return Comparison(
        model={"name": "toy", "depth": 6},
        device="/device:CPU:0",
        budget=8 * MIB,
        plain_peak=peak,
        floor=2 * MIB,
        operations=len(graph.operations),
        plain_seconds=0.25,
        trace_seconds=1.0,
        cost_seconds=2.0,
        rows=(
            Row("plain", "over-budget", predicted_peak=16 * MIB, measured_peak=17 * MIB,
                budget_met=False, predicted_overhead=0.0, time_ratio=1.0),
            Row("sqrt_n", "feasible", predicted_peak=4 * MIB, measured_peak=5 * MIB,
                budget_met=True, predicted_overhead=0.25, time_ratio=1.234,
                time_ratio_quartiles=(1.2, 1.3), gap=0.0125, plan_seconds=0.5,
                re_executions=7, gradients_equal=True, gradient_difference=0.0),
            Row("speed", "over-budget", predicted_peak=9 * MIB, budget_met=False,
                gradients_equal=False, gradient_difference=3e-7),
            Row("milp", "failed", reason="too many operations"),
        ),
        graph=graph,
        plans={"sqrt_n": plan},
    )  # fmt: skip


def printed(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(renderable)
    return out.getvalue()


def test_comparison_table_shows_every_column():
    text = printed(comparison_table(example()))
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert rows["sqrt_n"].split() == [
        "sqrt_n", "4.0", "5.0", "yes", "25.0", "%", "1.234", "1.25", "%", "0.5", "yes",
    ]  # fmt: skip
    assert rows["milp"].split() == ["milp"] + 8 * ["-"]
    assert "no (3e-07)" in rows["speed"]
    assert "budget 8.0 MiB" in text
    assert "plain step 250 ms" in text
    assert remarks(example()) == ["milp: too many operations"]


def test_percent():
    assert percent(0.1234) == "12.3 %"
    assert percent(None) == "-"


def test_written_files(tmp_path):
    comparison = example()
    report, figure = write_comparison(comparison, tmp_path)
    data = json.loads(report.read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(comparison.to_json()))
    assert data["rows"][1]["time_ratio"] == 1.234
    assert "graph" not in data
    assert Plan.load(tmp_path / "plan-sqrt_n.json") == comparison.plans["sqrt_n"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "comparison.json", "graph.json", "memory.png", "plan-sqrt_n.json",
    ]  # fmt: skip
    assert figure.name == "memory.png"


def test_figure_shows_each_line_in_its_colour(tmp_path):
    graph = residual_chain(8)
    base = Schedule.base(graph)
    plan = make_plan(graph, None, "sqrt_n")
    path = tmp_path / "memory.png"
    memory_figure(
        graph, {"plain": base, "optimal": plan.schedule}, path, budget=4 * MIB, title="toy"
    )
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    assert pixels.shape == (770, 1260, 3)

    def columns_with(colour: tuple[int, int, int]) -> int:
        return int((pixels[60:600] == colour).all(axis=2).any(axis=0).sum())

    assert columns_with((0x00, 0x72, 0xB2)) > 500  # optimal
    assert columns_with((0, 0, 0)) > 500  # plain
    assert columns_with((0x44, 0x44, 0x44)) > 500  # the budget
    assert (pixels[:, -5:] == 255).all(), "something is cut off at the right edge"


def test_figure_names_schedules_of_one_profile_together(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    labels: list[str] = []
    legend = Figure.legend

    def spy(self, *args, **kwargs):
        labels.extend(line.get_label() for line in self.axes[0].get_lines())
        return legend(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "legend", spy)
    graph = residual_chain(4)
    base = Schedule.base(graph)
    memory_figure(graph, {"plain": base, "store_all": base}, tmp_path / "m.png")
    peak = simulate(graph, base).peak / MIB
    assert labels == [f"plain, store_all: peak {peak:.0f} MiB, time 100 %"]


def test_figure_keeps_short_peaks(tmp_path):
    from optckpt.report.figures import _envelope

    profile = np.ones(10_000)
    profile[7777] = 5
    edges = np.linspace(0, 100, 10_001)
    x, y = _envelope(edges, profile, columns=100)
    assert y.max() == 5
    assert len(x) == len(y) == 101


def test_progress_says_what_is_known():
    assert describe(Progress(1.5, None, 0.1)) == (
        "1.5 s: nothing fits yet, extra time at least 10.00 %"
    )
    assert describe(Progress(2.0, 0.2, 0.1)) == "2.0 s: extra time 20.00 %, at least 10.00 %"


def test_status_line_is_silent_away_from_a_terminal():
    out = io.StringIO()
    with status_line(Console(file=out)) as show:
        show("working")
    assert out.getvalue() == ""


def test_status_line_on_a_terminal():
    out = io.StringIO()
    with status_line(Console(file=out, force_terminal=True)) as show:
        show("operation [3] of s0/b1")
        import time

        time.sleep(0.3)
    assert "operation [3] of s0/b1" in out.getvalue()
