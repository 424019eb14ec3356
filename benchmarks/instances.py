"""Instances for `solvers.py`: training graphs, each named by a short text.

- `gpt`, `gpt:blocks=12,batch_size=4`: a reference network, traced and costed on this machine by a
  process of its own, and kept as JSON so that TensorFlow is loaded for it once;
- `graph.json`, `graph.json.gz`: a file, ours or node-link;
- `chain:1000`, `random_layered:500:7`, `resnet:3:12:size=4096`: a generator of
  `optckpt.frontends.synthetic` and its arguments. At least one is given by position, which is what
  tells `unet:4` from the reference network `unet`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from optckpt.budget import Budget
from optckpt.config import parse_config
from optckpt.errors import BudgetError, OptckptError
from optckpt.frontends import synthetic
from optckpt.frontends.nodelink import load_any
from optckpt.graph import TrainingGraph
from optckpt.models.params import Gpt, MobilenetV2, ResnetCifar10, Unet, Vgg16
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.floor import static_floor
from optckpt.step_process import StepProcess

NETWORKS = tuple(
    str(c.model_fields["name"].default) for c in (ResnetCifar10, Vgg16, Unet, Gpt, MobilenetV2)
)
GENERATORS: dict[str, Callable[..., TrainingGraph]] = {
    "chain": synthetic.chain,
    "double_chain": synthetic.double_chain,
    "residual_chain": synthetic.residual_chain,
    "resnet": synthetic.resnet,
    "unet": synthetic.unet,
    "random_layered": synthetic.random_layered,
    "random_graph": synthetic.random_graph,
}


@dataclass(frozen=True)
class Instance:
    """A graph to solve, and what it is called in the tables. Sizes are bytes."""

    name: str
    graph: TrainingGraph

    @cached_property
    def key(self) -> str:
        """SHA-256 (hex) of all that a solver sees: the graph's fingerprint and its costs."""
        costs = [[op.seconds, op.workspace] for op in self.graph.operations]
        text = json.dumps([self.graph.fingerprint, self.graph.resident, costs])
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def peak(self) -> int:
        """Peak of the plain step, resident included."""
        return simulate(self.graph, Schedule.base(self.graph)).peak

    @cached_property
    def floor(self) -> int:
        """The static floor, resident included: a lower bound that depends on no solver."""
        return static_floor(self.graph).bytes

    def budget(self, text: str) -> int:
        """Bytes of "+25%" (floor + 25 % of peak - floor), or of what `Budget.parse` reads.

        Raises:
            BudgetError: if the text is neither.
        """
        if not text.startswith("+"):
            return Budget.parse(text).resolve(self.peak)
        share = Budget.parse(text[1:])
        if share.fraction is None:
            raise BudgetError(f"cannot read the budget {text!r}: after + comes a share, as in +25%")
        return self.floor + round(share.fraction * (self.peak - self.floor))


def load(text: str, cache: Path) -> Instance:
    """The instance that `text` names; traced networks are kept in the folder `cache`.

    Raises:
        OptckptError: if there is none, or it cannot be made; names it.
    """
    if text.endswith((".json", ".json.gz")):
        return Instance(Path(text).name.removesuffix(".gz").removesuffix(".json"), load_any(text))
    name, *arguments = text.split(":")
    by_position = any("=" not in a for a in arguments)
    if name in NETWORKS and not by_position:
        return Instance(text, _network(name, ",".join(arguments), cache))
    if name in GENERATORS and by_position:
        return Instance(text, _generated(text, GENERATORS[name], arguments))
    raise OptckptError(
        f"{text!r} names no instance: give a reference network ({', '.join(NETWORKS)}), a .json or "
        f".json.gz file, or a generator with its arguments ({', '.join(GENERATORS)}; chain:1000)"
    )


def _value(text: str) -> Any:
    """A number, true, false or a list as JSON has it; anything else is a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _generated(
    text: str, generator: Callable[..., TrainingGraph], arguments: list[str]
) -> TrainingGraph:
    named = dict(a.split("=", 1) for a in arguments if "=" in a)
    try:
        bound = inspect.signature(generator).bind(
            *(_value(a) for a in arguments if "=" not in a),
            **{k: _value(v) for k, v in named.items()},
        )
        return generator(*bound.args, **bound.kwargs)
    except (TypeError, OverflowError) as e:
        raise OptckptError(f"instance {text!r}: {e}") from None


def _network(name: str, parameters: str, cache: Path) -> TrainingGraph:
    """A reference network with its measured costs, from the cache if it is there.

    Forward operations alone may be executed again, as `solver.repeat: auto` plans it first.
    """
    given = dict(p.partition("=")[::2] for p in parameters.split(",") if p)
    settings = parse_config({"model": {"name": name, **{k: _value(v) for k, v in given.items()}}})
    sent = settings.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(sent["model"], sort_keys=True).encode()).hexdigest()[:12]
    file = cache / f"{name}-{digest}.json"
    if not file.exists():
        plain = cache / f"{name}-{digest}-plain.json.tmp"
        try:
            with StepProcess() as process:
                process.ask("load", config=sent)
                process.ask("capture", path=str(file), plain_path=str(plain))
        finally:
            plain.unlink(missing_ok=True)
    return TrainingGraph.load(file).only_forward_repeats
