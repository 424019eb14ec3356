"""The unit model: every operation takes one second. For tests and for counting executions."""

from __future__ import annotations

from collections.abc import Sequence

from optckpt.costs.cache import Cost
from optckpt.costs.registry import Captured, CostOptions


def unit(capture: Captured, options: CostOptions) -> Sequence[Cost]:
    """1.0 s and no workspace for each operation of the graph."""
    return [Cost(1.0, 0)] * len(capture.graph.operations)
