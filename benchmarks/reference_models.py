"""The reference networks under tight budgets: predicted and measured, in one table.

    python benchmarks/reference_models.py [--out docs/benchmarks] [MODEL ...]

For each network: the budget is 60 % of the plain peak, or 1.1 x the floor where that is higher. For
the ResNet also a quarter of the plain peak, and the peak that `sqrt_n` reaches (as measured).
Ratios are of steps run in turns in one run; see `optckpt compare`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

from optckpt.compare import Comparison, compare

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = ("resnet_cifar10", "unet", "gpt", "vgg16", "mobilenetv2")


def tight_budget(config: Path) -> int:
    """60 % of the plain peak, or 1.1 x the floor, in bytes."""
    seen = compare(config, "100%", ["store_all"], measure=False)
    return max(round(0.6 * seen.plain_peak), round(1.1 * seen.floor))


def cases(model: str) -> list[tuple[str, Comparison]]:
    """(what the budget is, comparison) of each case."""
    config = CONFIGS / f"{model}.yaml"
    budget = tight_budget(config)
    found = [("60 % of plain or 1.1 x floor", compare(config, budget, ["sqrt_n", "optimal"]))]
    if model == "resnet_cifar10":
        found.append(("25 % of plain", compare(config, "25%", ["sqrt_n", "optimal"])))
        sqrt_n = next(r for r in found[-1][1].rows if r.strategy == "sqrt_n")
        assert sqrt_n.measured_peak is not None
        at_peak = compare(config, sqrt_n.measured_peak, ["sqrt_n", "optimal"])
        found.append(("measured peak of sqrt_n", at_peak))
    return found


def row_text(case: str, comparison: Comparison, strategy: str) -> str:
    """One line of the Markdown table."""
    row = next(r for r in comparison.rows if r.strategy == strategy)

    def mib(count: int | None) -> str:
        return "-" if count is None else f"{count / 2**20:.1f}"

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f}"

    cells = [
        comparison.model["name"], case, strategy, mib(comparison.budget), mib(row.predicted_peak),
        mib(row.measured_peak), "yes" if row.budget_met else "no",
        percent(row.predicted_overhead),
        "-" if row.time_ratio is None else f"{row.time_ratio:.3f}",
        percent(row.gap), "-" if row.plan_seconds is None else f"{row.plan_seconds:.1f}",
        "yes" if row.gradients_equal else "no",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEAD = """\
| network | budget | strategy | budget, MiB | predicted, MiB | measured, MiB | met | \
predicted extra time, % | measured time ratio | gap, % | planning, s | gradients equal |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    """Run the cases one after the other and write results as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = [HEAD]
    print(HEAD)
    records = []
    for model in arguments.models or MODELS:
        for case, comparison in cases(model):
            records.append({"case": case, **comparison.to_json()})
            for strategy in ("sqrt_n", "optimal"):
                lines.append(row_text(case, comparison, strategy))
                print(lines[-1], flush=True)
            text = "\n".join(lines)
            machine = f"{platform.machine()}, {os.cpu_count()} cores"
            (arguments.out / "reference_models.md").write_text(
                f"# Reference networks\n\nMeasured on {machine}, TensorFlow on the CPU, by "
                f"`python benchmarks/reference_models.py`.\n\n{text}\n",
                encoding="utf-8",
            )
            (arguments.out / "reference_models.json").write_text(
                json.dumps(records, indent=1), encoding="utf-8"
            )


if __name__ == "__main__":
    main()
