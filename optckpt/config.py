"""The configuration: a YAML file checked against documented fields.

Every key has a default, so a file holds only what differs. Unknown keys, keys given twice and
values of the wrong type are refused with file, line and key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from optckpt.budget import Budget, parse_budget
from optckpt.config_errors import explain
from optckpt.errors import ConfigError
from optckpt.models.params import AnyModelParams, ResnetCifar10
from optckpt.registry import suggest
from optckpt.solvers import registry
from optckpt.yaml_lines import KeyPath, dotted, read_yaml

ENVIRONMENT_VARIABLE = "OPTCKPT_CONFIG"
"""Names the configuration file to use where none is given."""
LOCAL_FILE = "optckpt.yaml"
"""Read from the working directory if neither an argument nor the environment names a file."""

DEFAULT_STRATEGIES = ("store_all", "speed", "chen_greedy", "sqrt_n", "optimal")


def _check_budget(value: Any) -> Any:
    if value is not None:
        parse_budget(value)
    return value


def _check_strategy(value: Any) -> Any:
    known = registry.names()
    if not isinstance(value, str):
        raise ValueError(f"expected the name of a strategy, got {value!r}")
    if value not in known:
        raise ValueError(f"unknown strategy {value!r}; {suggest(value, known)}")
    return value


def _check_some(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError(f"names no strategy; give one or more of {', '.join(registry.names())}")
    return value


def _check_checkpoints(value: Any) -> Any:
    modes = get_args(CheckpointMode)
    if isinstance(value, str) and value not in modes:
        raise ValueError(
            f"unknown mode {value!r}; {suggest(value, modes)} (a list names tensors to keep)"
        )
    if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"expected a mode or a list of tensor names, got {value!r}")
    return value


def _check_cache(value: Any) -> Any:
    if not isinstance(value, bool | str) or value == "":
        raise ValueError(f"expected true, false or a folder, got {value!r}")
    return value


def _check_calibrate(value: Any) -> Any:
    if not isinstance(value, bool) and value != "seen":
        raise ValueError(f"expected true, false or seen, got {value!r}")
    return value


def _check_size(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        size = Budget.parse(value).bytes
        if size is not None:
            return size
    raise ValueError(f'expected a number of bytes or a size such as "64KiB", got {value!r}')


def _check_inputs(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected names of inputs with a shape each, got {value!r}")
    for name, shape in value.items():
        fits = isinstance(name, str) and isinstance(shape, list | tuple)
        if not fits or not all(
            n is None or (isinstance(n, int) and not isinstance(n, bool) and n >= 0) for n in shape
        ):
            raise ValueError(
                f"the shape of {name!r} is to be a list of sizes (null: not declared) such as "
                f"[64, 224, 224, 3], got {shape!r}"
            )
    return {name: tuple(shape) for name, shape in value.items()}


CheckpointMode = Literal["memory", "speed", "collection"]
Calibrate = bool | Literal["seen"]
# Validated by hand, because a plain union reports one error per alternative.
BudgetValue = Annotated[
    Any,
    BeforeValidator(_check_budget),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "number"},
                {"type": "null"},
                {
                    "type": "object",
                    "additionalProperties": {"type": ["string", "number", "null"]},
                    "minProperties": 1,
                },
            ]
        }
    ),
]
StrategyName = Annotated[str, BeforeValidator(_check_strategy)]
Checkpoints = Annotated[
    Any,
    BeforeValidator(_check_checkpoints),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(get_args(CheckpointMode))},
                {"type": "array", "items": {"type": "string"}},
                {"type": "null"},
            ]
        }
    ),
]
Cache = Annotated[
    Any,
    BeforeValidator(_check_cache),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string"}]}),
]
CalibrateValue = Annotated[
    Any,
    BeforeValidator(_check_calibrate),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "seen"}]}),
]
InputShapes = Annotated[
    Any,
    BeforeValidator(_check_inputs),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {
                "type": "array",
                "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
            },
        }
    ),
]
Size = Annotated[
    Any,
    BeforeValidator(_check_size),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}, {"type": "null"}]}
    ),
]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SolverConfig(Section):
    """How long and how exactly to solve."""

    time_limit: float = Field(
        default=30.0,
        gt=0,
        le=registry.LONGEST_TIME_LIMIT,
        description="Seconds of wall time for one solve; the best found counts.",
    )
    gap: float = Field(
        default=0.001,
        ge=0,
        description=(
            "Stop as soon as the extra time is proven to be within this share of the plain step's "
            "time of the best possible."
        ),
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=registry.LARGEST_SEED,
        description="Seed of the randomised parts of the search.",
    )
    threads: int = Field(
        default=0, ge=0, description="Solver threads; 0: as many as the machine has, at most 8."
    )
    order: Literal["auto", "fixed", "free"] = Field(
        default="auto",
        description=(
            "fixed: keep the order of the operations as TensorFlow made it; free: change it where "
            "dependencies allow and memory gains; auto: keep it unless that costs time, or more "
            "bytes than there are. For the strategy optimal."
        ),
    )
    repeat: Literal["auto", "forward", "all"] = Field(
        default="auto",
        description=(
            "Which operations may be executed again. forward: those of the forward pass; all: "
            "backward ones as well; auto: backward ones only where the budget cannot be met "
            "otherwise."
        ),
    )


class CostsConfig(Section):
    """Where the seconds and workspace bytes of an operation come from."""

    model: Literal["measured", "flops", "unit"] = Field(
        default="measured",
        description=(
            "measured: time each operation once on this device; flops: estimate from the number "
            "of floating-point operations and bytes; unit: every operation costs the same."
        ),
    )
    cache: Cache = Field(
        default=True,
        description=(
            "Keep measured costs between runs: true: in the user's cache folder; false: not at "
            "all; or the folder to use."
        ),
    )
    repeats: int = Field(
        default=3,
        ge=1,
        description="Timed runs of an operation after its warm-up; the least counts.",
    )


class PlansConfig(Section):
    """Whether plans that were solved once are used again."""

    cache: Cache = Field(
        default=True,
        description=(
            "Keep plans between runs: true: in the user's cache folder; false: not at all; or the "
            "folder to use. Within a process the same step is solved once in any case."
        ),
    )


class MemoryConfig(Section):
    """What the memory model charges, and what is held back for what it cannot know."""

    margin: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        description=(
            "Share of the budget held back for what the model of the device's allocator cannot "
            "know (what the process did before): 0.03 plans for 97 % of it. Given up "
            "where the budget would not be met otherwise."
        ),
    )
    calibrate: CalibrateValue = Field(
        default="seen",
        description=(
            "true: measure the first training steps and plan again, at most a few times, if the "
            "device reports more than the budget. seen: only once a step is seen above it in the "
            "device's statistics as they are. false: only warn then. Where the way in can: "
            "value_and_gradients and optckpt.keras."
        ),
    )
    count_from: Size = Field(
        default=None,
        description=(
            "Buffers smaller than this are not charged (bytes, or a size such as 16KiB). null: "
            "what the device's allocator does not count (on a CPU, blocks under 256KiB), unless "
            "that is more than half of the plain step: then all are charged."
        ),
    )
    chain_from: Size = Field(
        default=None,
        description=(
            "Operations that read or write a buffer at least this large are put in a fixed order "
            "(bytes, or a size). Smaller values gain nothing, much larger ones let the peak vary. "
            "null: 64KiB, or less where all buffers are small."
        ),
    )
    updates: Literal["early", "last"] = Field(
        default="early",
        description=(
            "When variables are updated in a step that is planned with its updates. early: each as "
            "soon as its gradient is there, so that the gradients need not all be in memory at "
            "the end (unless something reads them all, such as a global norm); last: after all "
            "gradients. The results are the same."
        ),
    )


class SizesConfig(Section):
    """Sizes to plan for where a function is traced for any."""

    batch: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Size of the first dimension of all inputs in which it is unknown: the largest batch "
            "that will be used. null: that of the call for which the function is traced."
        ),
    )
    inputs: InputShapes = Field(
        default_factory=dict,
        description=(
            "Shapes of inputs by the name of the argument, such as {images: [64, 224, 224, 3]}; "
            "what the function knows itself is left as it is, and null leaves a dimension open."
        ),
    )


class CompareConfig(Section):
    """What `optckpt compare` runs and how long it times."""

    strategies: Annotated[
        tuple[StrategyName, ...], Field(strict=False), AfterValidator(_check_some)
    ] = Field(
        default=DEFAULT_STRATEGIES,
        description="Strategies to compare, in the order of the table's rows.",
        json_schema_extra={"minItems": 1},
    )
    warmup: int = Field(
        default=2, ge=1, description="Steps of each strategy before peaks and times are taken."
    )
    repeats: int = Field(
        default=11,
        ge=1,
        description=(
            "Rounds of timing; in each, every strategy takes its turn, and the median over the "
            "rounds of its time divided by the plain step's counts."
        ),
    )
    steps: int = Field(default=1, ge=1, description="Steps in one turn.")


class Config(Section):
    """A memory budget, how to meet it, and the reference network to try it on."""

    budget: BudgetValue = Field(
        default=None,
        description=(
            'Peak bytes on the device during the step, resident included: bytes, "6GiB", "500MB", '
            'or a share of the plain step\'s peak, "60%" or 0.6. null: the memory of the device. '
            "For a step on several devices the budget of each, or a section with one per device "
            '("GPU:0").'
        ),
    )
    strategy: StrategyName = Field(
        default="optimal", description="How to choose what is computed again."
    )
    checkpoints: Checkpoints = Field(
        default=None,
        description=(
            "null: the strategy decides. Otherwise what gradient-checkpointing calls checkpoints: "
            "memory, speed, collection, or a list of names of tensors to keep."
        ),
    )
    solver: SolverConfig = Field(default_factory=SolverConfig, description="The solver's limits.")
    costs: CostsConfig = Field(default_factory=CostsConfig, description="Times of operations.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="The memory model.")
    sizes: SizesConfig = Field(
        default_factory=SizesConfig, description="Sizes where a function is traced for any."
    )
    plans: PlansConfig = Field(default_factory=PlansConfig, description="Plans that are kept.")
    model: AnyModelParams = Field(
        default_factory=ResnetCifar10,
        description=(
            "What the command line trains: a reference network, by its name and parameters, or a "
            "function of your own, module:function, that returns a compiled keras.Model or a step."
        ),
    )
    compare: CompareConfig = Field(
        default_factory=CompareConfig, description="The comparison of strategies."
    )

    def solve_options(self) -> registry.SolveOptions:
        """The solver section as options of a strategy."""
        return registry.SolveOptions(
            time_limit=self.solver.time_limit,
            gap=self.solver.gap,
            seed=self.solver.seed,
            threads=self.solver.threads,
            order="free" if self.solver.order == "free" else "fixed",
        )


def load_config(path: str | Path) -> Config:
    """Read a YAML file; an empty one gives the defaults.

    Raises:
        ConfigError: with one line "file:line: key: what is wrong" per mistake.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from None
    data, lines = read_yaml(text, str(path))
    return _validate(data, str(path), lines)


def parse_config(data: Mapping[str, Any]) -> Config:
    """Check a mapping of the same form as a file. Raises ConfigError naming the key."""
    return _validate(dict(data), "configuration", {})


def find_config(argument: Config | Mapping[str, Any] | str | Path | None = None) -> Config:
    """The configuration that holds here.

    The first of: `argument` (a Config, a mapping or a path), the file named by the environment
    variable OPTCKPT_CONFIG, ./optckpt.yaml if there is one, the defaults.

    Raises:
        ConfigError: if a named file is missing, or any of them has a mistake.
    """
    if isinstance(argument, Config):
        return argument
    if isinstance(argument, Mapping):
        return parse_config(argument)
    if isinstance(argument, str | os.PathLike):
        return load_config(argument)
    if argument is not None:
        raise ConfigError(
            "config= takes a Config, a mapping of sections or the path of a YAML file, got "
            f"{type(argument).__name__}"
        )
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        try:
            return load_config(named)
        except ConfigError as e:
            if Path(named).exists():
                raise
            raise ConfigError(f"{e} (named by {ENVIRONMENT_VARIABLE})") from None
    local = Path(LOCAL_FILE)
    return load_config(local) if local.exists() else Config()


def json_schema() -> dict[str, Any]:
    """JSON schema of the configuration, for editors that complete and check YAML."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
        "title": "optckpt configuration",
    }


def _validate(data: dict[str, Any], source: str, lines: Mapping[KeyPath, int]) -> Config:
    # A section that is there but empty reads as null; it means the defaults.
    data = {
        k: v
        for k, v in data.items()
        if v is not None or k not in Config.model_fields or k in _NULLABLE
    }
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        messages = []
        for error in e.errors(include_url=False):
            path, message = explain(error, data, Config)
            line = next(
                (lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None
            )
            where = source if line is None else f"{source}:{line}"
            key = dotted(path)
            messages.append(
                (line or 0, f"{where}: {key}: {message}" if key else f"{where}: {message}")
            )
        raise ConfigError("\n".join(m for _, m in sorted(messages, key=lambda m: m[0]))) from None


_NULLABLE = ("budget", "checkpoints")
