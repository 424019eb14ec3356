"""Configuration: defaults, files, and mistakes that name file, line and key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from optckpt import config as module
from optckpt.config import (
    Config,
    find_config,
    json_schema,
    load_config,
    parse_config,
)
from optckpt.errors import ConfigError
from optckpt.models import REGISTRY
from optckpt.models.params import Gpt, ResnetCifar10

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture
def write(tmp_path):
    def to_file(text: str) -> Path:
        path = tmp_path / "x.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def mistake(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value).replace(str(path), "x.yaml")


# --- Defaults --------------------------------------------------------------------------------


def keys(value: object) -> object:
    return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else None


def test_default_yaml_holds_every_key_with_its_default():
    path = CONFIGS / "default.yaml"
    assert load_config(path) == Config()
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert keys(written) == keys(Config().model_dump(mode="json"))


def test_default_yaml_explains_every_key():
    lines = (CONFIGS / "default.yaml").read_text(encoding="utf-8").splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        text = line.strip()
        if text and not text.startswith("#") and not text.endswith(":") and "name:" not in text:
            assert above.strip().startswith("#"), f"{line!r} has no comment above it"


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_there_is_a_configuration_for_each_model(name):
    found = load_config(CONFIGS / f"{name}.yaml")
    assert found.model.name == name
    assert found.budget is not None
    assert isinstance(found.model, REGISTRY[name])


def test_every_field_is_documented():
    def check(cls: type[BaseModel]) -> None:
        for name, field in cls.model_fields.items():
            assert field.description, f"{cls.__name__}.{name} has no description"
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                check(field.annotation)

    check(Config)
    for cls in REGISTRY.values():
        check(cls)


def test_empty_files_and_sections_give_the_defaults(write):
    assert load_config(write("")) == Config()
    assert load_config(write("# nothing but a comment\n")) == Config()
    assert load_config(write("solver:\ncosts:\n")) == Config()


def test_configuration_is_immutable():
    with pytest.raises(ValueError, match="frozen"):
        Config().budget = 3  # type: ignore[misc]


# --- Values ----------------------------------------------------------------------------------


def test_values_of_all_kinds(write):
    found = load_config(
        write(
            "budget: 25%\n"
            "strategy: sqrt_n\n"
            "checkpoints: [a, b]\n"
            "solver: {time_limit: 5, gap: 1e-2}\n"
            "costs: {cache: some/folder}\n"
            "memory: {chain_from: 16KiB}\n"
            "model: {name: gpt, blocks: 2, dropout: 0.1}\n"
            "compare: {strategies: [optimal, speed]}\n"
        )
    )
    assert found.budget == "25%"
    assert found.checkpoints == ("a", "b")
    assert found.solve_options().time_limit == 5.0
    assert found.solve_options().gap == 0.01
    assert found.costs.cache == "some/folder"
    assert found.memory.chain_from == 16384
    assert found.model == Gpt(blocks=2, dropout=0.1)
    assert found.compare.strategies == ("optimal", "speed")


@pytest.mark.parametrize("budget", ["6GiB", "60%", 0.6, 6442450944, None])
def test_budgets(budget):
    assert parse_config({"budget": budget}).budget == budget


def test_dumped_configuration_reads_back():
    config = parse_config({"budget": "3GiB", "model": {"name": "unet", "levels": 2}})
    assert parse_config(config.model_dump(mode="json")) == config


# --- Mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bugdet: 3\n", "x.yaml:1: bugdet: unknown key; did you mean 'budget'?"),
        (
            "\nsolver:\n  gap: 0.1\n  time_limt: 3\n",
            "x.yaml:4: solver.time_limt: unknown key; did you mean 'time_limit'?",
        ),
        (
            "memory: {calibrate: sometimes}\n",
            "x.yaml:1: memory.calibrate: expected true, false or seen, got 'sometimes'",
        ),
        (
            "solver: {zzz: 1}\n",
            "x.yaml:1: solver.zzz: unknown key; known: time_limit, gap, seed, threads",
        ),
        (
            "model:\n  name: resnet_cifar10\n  block_per_stage: 3\n",
            "x.yaml:3: model.block_per_stage: unknown key; did you mean 'blocks_per_stage'?",
        ),
        (
            "model:\n  name: resnet\n",
            "x.yaml:2: model.name: unknown model 'resnet'; did you mean 'resnet_cifar10'?",
        ),
        ("budget: many\n", "x.yaml:1: budget: cannot read the budget 'many'"),
        ("budget: true\n", "x.yaml:1: budget: cannot read the budget True"),
        (
            "strategy: optmal\n",
            "x.yaml:1: strategy: unknown strategy 'optmal'; did you mean 'optimal'?",
        ),
        (
            "compare:\n  strategies:\n  - optimal\n  - sqrtn\n",
            "x.yaml:4: compare.strategies[1]: unknown strategy 'sqrtn'; did you mean 'sqrt_n'?",
        ),
        (
            "costs:\n  model: mesured\n",
            "x.yaml:2: costs.model: unknown value 'mesured'; did you mean 'measured'?",
        ),
        ("checkpoints: memry\n", "x.yaml:1: checkpoints: unknown mode 'memry'; did you mean 'mem"),
        ("solver:\n  seed: 1.5\n", "x.yaml:2: solver.seed: expected a whole number, got 1.5"),
        (
            "solver:\n  gap: small\n",
            "x.yaml:2: solver.gap: expected a number, got the text 'small'",
        ),
        (
            "solver:\n  time_limit: true\n",
            "x.yaml:2: solver.time_limit: expected a number, got true",
        ),
        (
            "solver:\n  time_limit: -1\n",
            "x.yaml:2: solver.time_limit: should be greater than 0, got -1",
        ),
        ("solver: 3\n", "x.yaml:1: solver: expected a section with keys below it, got 3"),
        (
            "compare:\n  strategies: optimal\n",
            "x.yaml:2: compare.strategies: expected a list, got the text 'optimal'",
        ),
        (
            "model:\n  blocks: 3\n",
            "x.yaml:1: model: needs a function, or a name, one of resnet_cifar10, ",
        ),
        (
            "model:\n  name: unet\n  image_size: 60\n",
            "x.yaml:1: model: image_size 60 cannot be halved 4 times; choose a multiple of 16",
        ),
        (
            "memory:\n  chain_from: lots\n",
            "x.yaml:2: memory.chain_from: ",
        ),
        *(
            (f"solver:\n  {key}: {value}\n", f"x.yaml:2: solver.{key}: should be a finite number")
            for key in ("time_limit", "gap")
            for value in ("1e400", ".inf", "-.inf", ".nan")
        ),
        ("memory:\n  margin: .nan\n", "x.yaml:2: memory.margin: should be a finite number"),
        (
            "model:\n  name: mobilenetv2\n  width: .inf\n",
            "x.yaml:3: model.width: should be a finite number, got inf",
        ),
        ("solver:\n  time_limit: 1e300\n", "x.yaml:2: solver.time_limit: should be less than"),
        ("solver:\n  seed: 4294967296\n", "x.yaml:2: solver.seed: should be less than or equal"),
        ("budget: 1e400\n", "x.yaml:1: budget: cannot read the budget inf"),
        (f"budget: '{'9' * 400}GiB'\n", "x.yaml:1: budget: cannot read the budget '999"),
        (
            "compare:\n  strategies: []\n",
            "x.yaml:2: compare.strategies: names no strategy; give one or more of optimal, milp, ",
        ),
        (
            "compare:\n  strategies: [7]\n",
            "x.yaml:2: compare.strategies[0]: expected the name of a strategy, got 7",
        ),
        ("- budget\n", "x.yaml:1: expected keys such as 'budget: 60%', got a list"),
        ("budget: [\n", "x.yaml:2: not valid YAML: "),
        ("budget: 1GiB\n3: 4\n", "x.yaml:2: keys are words, this one is not"),
        ("solver:\n  seed: !!int x\n", "x.yaml:2: not valid YAML: 'x' is no int"),
        ("solver:\n  seed: !!bool 3\n", "x.yaml:2: not valid YAML: '3' is no bool"),
        ("budget: 3\nsolver: !mine {}\n", "x.yaml:2: not valid YAML: "),
        (f"solver:\n  seed: {'9' * 5000}\n", "x.yaml:2: not valid YAML: "),
        (f"solver:\n  seed: 0x{'f' * 5000}\n", "x.yaml:2: not valid YAML: the number is too long"),
        (f"solver: {'z' * 500}\n", "x.yaml:1: solver: expected a section with keys below it, got"),
        ("budget: 3\nstrategy: a\0b\n", "x.yaml:2: not valid YAML: character U+0000"),
        ("- " * 3000, "x.yaml: not valid YAML: nested too deeply"),
        ("budget: 3\n---\nbudget: 4\n", "x.yaml:2: not valid YAML: "),
    ],
)
def test_mistakes_name_line_and_key(write, text, message):
    found = mistake(write(text))
    assert found.startswith(message)
    assert "\n" not in found
    assert len(found) < 250


def test_a_key_given_twice_is_refused(write):
    assert mistake(write("solver:\n  gap: 0.1\n  seed: 1\n  gap: 0.2\n")) == (
        "x.yaml:4: solver.gap: given twice, first on line 2; keep one"
    )


def test_all_mistakes_are_listed_in_order(write):
    lines = mistake(write("strategee: x\nsolver:\n  seed: -1\nbudgett: 4\n")).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["x.yaml:1", "x.yaml:3", "x.yaml:4"]


def test_an_alias_within_itself_is_refused(write):
    assert "alias" in mistake(write("model: &a\n  name: *a\n"))


def test_aliases_of_aliases_are_refused(write):
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for above, name in zip("abcdefgh", "bcdefghi", strict=True):
        text += f"{name}: &{name} [{', '.join([f'*{above}'] * 10)}]\n"
    assert "aliases repeated" in mistake(write(text))


def test_missing_file_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path)
    for content in (b"\xff\xfe", b"budget: 60% # \xe9\n"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"x\.yaml: it is not UTF-8 text"):
            load_config(path)
    path.write_bytes(b"\xef\xbb\xbfbudget: 60%\r\n")
    assert load_config(path).budget == "60%"


# --- Where a configuration comes from --------------------------------------------------------


def test_find_config_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(module.ENVIRONMENT_VARIABLE, raising=False)
    assert find_config() == Config()
    (tmp_path / "optckpt.yaml").write_text("budget: 1GiB\n", encoding="utf-8")
    assert find_config().budget == "1GiB"
    (tmp_path / "other.yaml").write_text("budget: 2GiB\n", encoding="utf-8")
    monkeypatch.setenv(module.ENVIRONMENT_VARIABLE, "other.yaml")
    assert find_config().budget == "2GiB"
    (tmp_path / "third.yaml").write_text("budget: 3GiB\n", encoding="utf-8")
    assert find_config("third.yaml").budget == "3GiB"
    assert find_config(Config(budget="4GiB")).budget == "4GiB"
    assert find_config({"budget": "5GiB"}).budget == "5GiB"
    monkeypatch.setenv(module.ENVIRONMENT_VARIABLE, "gone.yaml")
    with pytest.raises(ConfigError, match=r"gone\.yaml.*OPTCKPT_CONFIG"):
        find_config()


def test_schema_describes_the_file():
    schema = json_schema()
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False
    assert ResnetCifar10.__name__ in schema["$defs"]


def test_reading_a_configuration_loads_no_tensorflow():
    code = (
        "import sys; from optckpt.config import load_config; load_config(sys.argv[1]);"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(CONFIGS / "default.yaml")], check=True)
