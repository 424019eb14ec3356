"""The unit model: every operation takes one second. For tests and for counting executions."""

from __future__ import annotations

from collections.abc import Sequence

from optckpt.costs.cache import Cost
from optckpt.costs.registry import Captured, CostOptions


def unit(capture: Captured, options: CostOptions) -> Sequence[Cost]:
    """1.0 s for each operation of the graph; the workspace stays what the capture found."""
    return [Cost(1.0, op.workspace) for op in capture.graph.operations]
