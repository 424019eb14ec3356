"""The commands that plan a model and tell about it: plan, explain, profile, frontier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optckpt.graph import TrainingGraph
from optckpt.schedule import Plan
from optckpt.simulate import simulate

TINY = """\
budget: 75%
costs: {model: flops}
memory: {margin: 0.0}
model: {name: unet, batch_size: 2, image_size: 32, width: 8, levels: 2}
"""
TRAIN = """
import keras

def net():
    inputs = keras.Input((32, 32, 3))
    x = inputs
    for i in range(4):
        x = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name=f"conv{i}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    model = keras.Model(inputs, keras.layers.Dense(10, name="out")(x), name="net")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


def optckpt(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "optckpt", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=300,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def planned(folder) -> subprocess.CompletedProcess[str]:
    return optckpt("plan", "tiny.yaml", cwd=folder)


def test_the_plan_that_is_written_fits_the_budget(planned, folder):
    assert planned.returncode == 0, planned.stderr
    plan = Plan.load(folder / "out/tiny/plan.json")
    graph = TrainingGraph.load(folder / "out/tiny/graph.json")
    plan.check_graph(graph)
    assert simulate(graph, plan.schedule).peak == plan.live_peak
    assert plan.predicted_peak <= plan.budget == round(0.75 * plan.plain_peak)
    assert f"{100 * plan.overhead:.2f} %" in planned.stdout
    assert "Proven: no schedule" in planned.stdout


def test_explained_by_layer(planned, folder):
    said = optckpt("explain", "out/tiny", cwd=folder)
    assert said.returncode == 0, said.stderr
    for word in ("down0", "up0", "resident", "No schedule needs less than"):
        assert word in said.stdout
    data = json.loads(optckpt("explain", "out/tiny/plan.json", "--json", cwd=folder).stdout)
    assert {"down0", "down1", "down2", "up0", "up1"} <= {row["layer"] for row in data["layers"]}
    assert sum(row["computed_again"] for row in data["layers"]) > 0


def test_explained_by_operation(planned, folder):
    said = optckpt("explain", "out/tiny", "--op", "down0/conv1", cwd=folder)
    assert said.returncode == 0, said.stderr
    assert "Conv2D" in said.stdout
    said = optckpt("explain", "out/tiny", "--op", "conv1", cwd=folder)
    assert said.returncode == 2
    assert "several operations" in said.stderr
    assert "Traceback" not in said.stderr


def test_a_plan_without_its_graph(planned, folder, tmp_path):
    (tmp_path / "plan.json").write_bytes((folder / "out/tiny/plan.json").read_bytes())
    said = optckpt("explain", "plan.json", cwd=tmp_path)
    assert said.returncode == 2
    assert "give the graph that plan.json was made for with --graph" in said.stderr


def test_a_budget_that_nothing_meets_leaves_nothing_behind(folder, tmp_path):
    out = tmp_path / "new"
    said = optckpt("plan", "tiny.yaml", "--budget", "1KiB", "--out", out, "--json", cwd=folder)
    assert said.returncode == 2
    assert json.loads(said.stdout)["kind"] == "InfeasibleBudgetError"
    assert not out.exists()


def test_a_function_of_the_users_own(folder):
    (folder / "optckpt.yaml").write_text("costs: {model: flops}\nmemory: {margin: 0.0}\n")
    try:
        said = optckpt("plan", "train.py:net", "--max-overhead", "0.1", "--json", cwd=folder)
        assert said.returncode == 0, said.stderr
        data = json.loads(said.stdout)
        assert 0 < data["overhead"] <= 0.1
        assert data["live_peak"] < data["plain_peak"]
        assert data["path"] == "out/net/plan.json"
        said = optckpt("profile", "train:net", "--by", "layer", "--json", cwd=folder)
        assert said.returncode == 0, said.stderr
        layers = {row["name"] for row in json.loads(said.stdout)["by_layer"]}
        assert {"conv0", "conv1", "conv2", "conv3"} <= layers
    finally:
        (folder / "optckpt.yaml").unlink()
    said = optckpt("plan", "train:nett", cwd=folder)
    assert said.returncode == 2
    assert "did you mean 'net'?" in said.stderr
    assert "Traceback" not in said.stderr


def test_the_dearest_operations(folder):
    said = optckpt("profile", "tiny.yaml", "--top", "3", cwd=folder)
    assert said.returncode == 0, said.stderr
    assert "Conv2D" in said.stdout
    assert "more: --top" in said.stdout
    said = optckpt("profile", "tiny.yaml", "--by", "colour", cwd=folder)
    assert said.returncode == 2
    assert "--by must be" in said.stderr


def test_the_frontier(folder):
    said = optckpt("frontier", "tiny.yaml", "--points", 4, "--time-limit", 20, cwd=folder)
    assert said.returncode == 0, said.stderr
    assert "knee" in said.stdout
    data = json.loads((folder / "out/tiny/frontier.json").read_text())
    points = data["points"]
    assert len(points) == 4
    assert [p["budget"] for p in points] == sorted(p["budget"] for p in points)
    costs = [p["overhead"] for p in points]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] == 0
    assert all(p["bound"] <= p["overhead"] + 1e-12 for p in points)
    assert data["floor"]["bound"] <= data["floor"]["peak"] == points[0]["peak"]
    assert (folder / "out/tiny/frontier.png").read_bytes().startswith(b"\x89PNG")
