"""Where time and memory go."""

from __future__ import annotations

import pytest

from optckpt.frontends import synthetic
from optckpt.profile import profile


def test_every_operation_is_in_each_of_the_three():
    graph = synthetic.residual_chain(6)
    found = profile(graph)
    for shares in (found.by_kind, found.by_layer, found.single):
        assert sum(s.operations for s in shares) == len(graph.operations) == found.operations
        assert sum(s.seconds for s in shares) == pytest.approx(graph.seconds) == found.seconds
        assert sum(s.fraction for s in shares) == pytest.approx(1)
        assert [s.seconds for s in shares] == sorted((s.seconds for s in shares), reverse=True)
        assert len({s.name for s in shares}) == len(shares)
    needed = sum(
        b.size
        for i, b in enumerate(graph.buffers)
        if graph.operations[graph.producer[i]].forward
        and any(not graph.operations[r].forward for r in graph.readers[i])
    )
    assert sum(s.activations for s in found.by_kind) == needed > 0
