"""Waiting for calls: what comes after a call in a schedule waits for what it returns.

TensorFlow puts the body of a function in the place of its call before it runs a graph. A control
edge from the call then waits for the body's side effects alone, and what it computes may run at any
later time. So whatever is ordered after such a call waits for its results, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tensorflow as tf

from optckpt.backends.identity import identity
from optckpt.frontends import tf_ops
from optckpt.frontends.tf_capture import Capture
from optckpt.frontends.tf_traced import changes

_INLINED = tf_ops.words("PartitionedCall StatefulPartitionedCall")


def wait_for_calls(
    capture: Capture,
    edges: Iterable[tuple[tf.Operation, tf.Operation]],
    originals: Mapping[tf.Operation, tf.Operation],
) -> int:
    """Let operations wait for the results of the calls that they are ordered after.

    `edges`: (before, after) of each control edge of a rewrite; `originals`: clone -> what it is a
    clone of. Returns the number of operations that were added for it.
    """
    graph = capture.tf_graph
    known = changes(graph)
    bodies = next((inside.bodies for inside in capture.inside.values()), None)
    gates: dict[int, tf.Operation] = {}
    for call, after in edges:
        if bodies is None or not is_inlined(call):
            continue
        read = {id(t) for t in after.inputs}
        waits = []
        for o in sorted(bodies.live(originals.get(call, call))):
            result = call.outputs[o]
            if id(result) not in read:
                if id(result) not in gates:
                    # It ends when the result is there, and holds it no longer.
                    gates[id(result)] = identity(result, call, f"{call.name}/returned").op
                waits.append(gates[id(result)])
        waits = [gate for gate in waits if gate not in after.control_inputs]
        after._add_control_inputs(waits)
        known.controls.update((gate, after) for gate in waits)
    return len(gates)


def is_inlined(op: tf.Operation) -> bool:
    """Whether TensorFlow will put the body of a function in the place of this call of it."""
    if op.type not in _INLINED:
        return False
    definition = tf_ops.function_def(op.graph, op.get_attr("f").name)
    return definition is None or not definition.attr["_noinline"].b
