"""The order of the house: who may import whom, and what must not be in the repository."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("optckpt", "solvers", "frontends", "tests", "configs", "benchmarks", "docs", ".ci")
SOLVERS = sorted(p.stem for p in (ROOT / "solvers").glob("*.py"))

# Run in a fresh interpreter in which any import of TensorFlow fails.
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "keras"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
WITHOUT_TENSORFLOW = [
    "optckpt",
    "optckpt.budget",
    "optckpt.cli",
    "optckpt.config",
    "optckpt.frontends.nodelink",
    "optckpt.frontends.synthetic",
    "optckpt.graph",
    "optckpt.planner",
    "optckpt.schedule",
    "optckpt.simulate",
    *(f"optckpt.solvers.{name}" for name in SOLVERS if name != "__init__"),
]


def python_files():
    found = []
    for folder in ("optckpt", "solvers", "frontends", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # optckpt/solvers and optckpt/frontends are links to folders seen anyway.
            if path.relative_to(ROOT).parts[:2] not in (
                ("optckpt", "solvers"),
                ("optckpt", "frontends"),
            ):
                found.append(path)
    return found


def imports(path):
    """Modules that a file imports, relative ones left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importing(path, *packages):
    return [m for m in imports(path) if any(m == p or m.startswith(p + ".") for p in packages)]


def test_planning_never_imports_tensorflow():
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED, *WITHOUT_TENSORFLOW],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_links_are_relative_and_whole():
    for name in ("solvers", "frontends"):
        link = ROOT / "optckpt" / name
        assert link.resolve() == ROOT / name
        if link.is_symlink():
            assert not link.readlink().is_absolute()


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_through_the_package(path):
    assert not importing(path, "solvers", "frontends")


def test_the_package_is_light():
    """It is imported before anything can answer Ctrl-C; all of its names are there nevertheless."""
    code = """
import sys
import optckpt
heavy = {"numpy", "tensorflow", "networkx", "pydantic", "optckpt.solvers"} & sys.modules.keys()
assert not heavy, heavy
from optckpt import make_plan
import optckpt.simulate
assert callable(optckpt.simulate) and callable(make_plan) and optckpt.make_plan is make_plan
assert {*optckpt._LATE, *optckpt._MODULES} < set(optckpt.__all__)
assert callable(optckpt.sizes.at) and callable(optckpt.keras.apply)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_referee_knows_no_solver():
    assert not importing(ROOT / "optckpt" / "simulate.py", "optckpt.solvers")
    assert not importing(ROOT / "optckpt" / "graph.py", "optckpt.solvers", "optckpt.simulate")


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_know_only_the_core(name):
    path = ROOT / "solvers" / f"{name}.py"
    floors = ("frontends", "backends", "costs", "models", "report", "cli", "gradients", "planner")
    assert not importing(path, "tensorflow", "keras", *(f"optckpt.{f}" for f in floors))


@pytest.mark.parametrize("path", sorted((ROOT / "frontends").glob("*.py")), ids=lambda p: p.stem)
def test_frontends_know_no_solver(path):
    assert not importing(path, "optckpt.solvers", "optckpt.backends", "optckpt.planner")


def text_files():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            hidden = {"__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache"} & set(
                path.parts
            )
            if path.is_file() and not hidden and path.suffix not in (".pyc", ".png"):
                yield path
    yield from (p for p in sorted(ROOT.glob("*")) if p.is_file() and p.suffix != ".png")


def test_the_set_up_compiles_the_solvers():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    plan = re.search(r"^FIRST_PLANS := (.*)$", makefile, re.MULTILINE)
    assert plan
    assert "-c '$(FIRST_PLANS)'" in makefile
    code = (
        f"{plan[1]}; from optckpt.solvers import local_search, order_sequence; "
        "print(all(m._anneal.signatures for m in (local_search, order_sequence)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"


def test_no_path_of_a_machine():
    # Split, so that this file does not hold them.
    wrong = re.compile(
        "|".join(["/wor" + "k/", "/ro" + "ot/", "/tm" + "p/w/", r"shared/desi" + "gn"])
    )
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in text_files()
        if (match := wrong.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert not found


def test_every_test_file_has_the_name_of_a_module():
    modules = {"house"}
    for path in python_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "tests":
            modules.update("_".join(parts[k:]) for k in range(len(parts)))
            modules.update(parts[:-1])
    named = {p.stem.removeprefix("test_") for p in (ROOT / "tests").glob("test_*.py")}
    assert named <= modules
