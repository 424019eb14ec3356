import json
from dataclasses import replace

import pytest

from optckpt.errors import PlanError
from optckpt.frontends import synthetic
from optckpt.planner import make_plan
from optckpt.schedule import Certificate, Plan, Schedule

GRAPH = synthetic.chain(6)


@pytest.fixture
def plan():
    return make_plan(GRAPH, "60%", "sqrt_n")


def test_steps_count_earlier_executions():
    assert list(Schedule((0, 1, 0, 2, 0)).steps()) == [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2)]


def test_base_schedule():
    base = Schedule.base(GRAPH)
    assert base.executions == tuple(range(len(GRAPH.operations)))
    assert len(base) == len(GRAPH.operations)


def test_gap():
    certificate = Certificate("x", "feasible", 0.5, 0.2, 1.0)
    assert certificate.gap == pytest.approx(0.3)
    assert replace(certificate, bound=0.6).gap == 0
    assert replace(certificate, cost=None).gap is None


def test_json_round_trip(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    unlimited = make_plan(GRAPH, None, "store_all")
    assert unlimited.budget is None
    assert Plan.from_json(json.loads(json.dumps(unlimited.to_json()))) == unlimited


def test_save_and_load(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


def damaged(plan, **change):
    data = plan.to_json()
    for key, value in change.items():
        if value is ...:
            del data[key]
        else:
            data[key] = value
    return data


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": "optckpt.training-graph"}, "not a plan"),
        ({"format": ...}, "not a plan"),
        ({"version": 0}, "version 0"),
        ({"schedule": ...}, "'schedule'"),
        ({"certificate": ...}, "'certificate'"),
        ({"certificate": {}}, "'solver' of the certificate"),
        ({"certificate": []}, "'certificate' of the plan must be an object"),
        ({"version": True}, "version True"),
        ({"schedule": [0, 1.5]}, "entry 1 of 'schedule' of the plan must be a whole number"),
        ({"plain_peak": "7"}, "'plain_peak' of the plan must be a whole number, it is '7'"),
        ({"floor": True}, "'floor'"),
        ({"fingerprint": None}, "'fingerprint'"),
        ({"overhead": float("nan")}, "'overhead' of the plan must be a finite number"),
        ({"schedule": ["x"]}, "malformed"),
        ({"budget": "much"}, "malformed"),
        ({"budget": float("inf")}, "malformed"),
        ({"overhead": None}, "malformed"),
    ],
)
def test_damaged_plans_are_refused(plan, change, word):
    with pytest.raises(PlanError, match=word):
        Plan.from_json(damaged(plan, **change))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("status", "guessed", "'status' of the certificate must be one of optimal, .*'guessed'"),
        ("status", ..., "lacks the field 'status'"),
        ("colour", 1, "the certificate has no 'colour'"),
        ("cost", "0", "'cost' of the certificate must be a finite number or null"),
        ("bound", None, "'bound' of the certificate must be a finite number"),
        ("seconds", float("inf"), "'seconds' of the certificate"),
        ("valid_for", 3, "'valid_for' of the certificate"),
        ("repeats", "some", "'repeats' of the certificate must be one of forward, all"),
    ],
)
def test_damaged_certificates_are_refused(plan, key, value, words):
    data = plan.to_json()
    if value is ...:
        del data["certificate"][key]
    else:
        data["certificate"][key] = value
    with pytest.raises(PlanError, match=words):
        Plan.from_json(data)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "x"}', "[" * 100_000, '{"format": ' + "9" * 5000 + "}"]
)
def test_load_names_the_file(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"bad\.json"):
        Plan.load(path)


def test_a_plan_fits_its_own_graph_only(plan):
    plan.check_graph(GRAPH)
    plan.check_graph(GRAPH.with_costs([2.0] * len(GRAPH.operations)))
    with pytest.raises(PlanError, match="another graph"):
        plan.check_graph(synthetic.chain(7))
    with pytest.raises(PlanError, match="make a new plan"):
        plan.check_graph(synthetic.chain(6, size=1 << 19))


def test_certificates_of_older_plans_cover_whatever_their_graph_allows(plan):
    data = plan.to_json()
    assert data["certificate"].pop("repeats") == "all"
    assert Plan.from_json(data) == plan
    data["certificate"]["repeats"] = "forward"
    assert Plan.from_json(data).certificate.repeats == "forward"
