"""Training graphs made to order: chains, residual networks, U-nets, random graphs.

Framework-free and seeded: the same arguments give the same graph. Sizes are bytes, times are
seconds. The networks are differentiated as TensorFlow would: the gradient of an addition is
passed on unchanged (no operation), several gradients of one tensor are summed by `AddN`, the
weight gradients and the loss are outputs. Backward operations are not repeatable, unless asked.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optckpt.errors import GraphError
from optckpt.graph import Buffer, Operation, TrainingGraph

_LOSS_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Layer:
    """A forward operation with what its gradient needs."""

    operation: Operation
    differentiable: tuple[int, ...]
    saved: tuple[int, ...]
    weights: int
    gradient: str
    inplace_gradient: bool


class _Tape:
    """Records forward operations, then appends their gradients in reverse order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.buffers: list[Buffer] = []
        self.layers: list[_Layer] = []

    def _buffer(self, name: str, size: int) -> int:
        self.buffers.append(Buffer(name, size, "float32"))
        return len(self.buffers) - 1

    def op(
        self,
        kind: str,
        inputs: Sequence[int],
        size: int,
        seconds: float,
        *,
        save: str = "",
        weights: int = 0,
        statistics: int = 0,
        workspace: int = 0,
        inplace: bool = False,
        gradient: str = "",
    ) -> int:
        """Record an operation; returns its output buffer.

        `save` holds "i" if the gradient reads the inputs, "o" if it reads the output;
        `gradient` is the kind of the gradient operation, "pass" if there is none.
        `statistics` bytes are a second output that the gradient reads too.
        """
        name = f"{kind.lower()}_{len(self.layers)}"
        output = self._buffer(name, size)
        writes = [output]
        saved = [*(inputs if "i" in save else ()), *([output] if "o" in save else ())]
        if statistics:
            writes.append(self._buffer(f"{name}:1", statistics))
            saved.append(writes[1])
        operation = Operation(
            name=name,
            kind=kind,
            seconds=seconds,
            reads=tuple(inputs),
            writes=tuple(writes),
            workspace=workspace,
            inplace=tuple(inputs) if inplace else (),
        )
        self.layers.append(
            _Layer(operation, tuple(inputs), tuple(saved), weights, gradient, inplace)
        )
        return output

    def finish(self, last: int, resident: int, repeatable_backward: bool) -> TrainingGraph:
        """Close with a scalar loss over `last` and append the backward operations."""
        loss = self.op("Mean", [last], _LOSS_BYTES, self._mean_seconds(), gradient="Tile")
        operations = [layer.operation for layer in self.layers]
        outputs = [loss]
        incoming: dict[int, list[int]] = {}

        def backward(
            name: str, kind: str, seconds: float, reads: list[int], sizes: list[int], inplace: bool
        ) -> tuple[int, ...]:
            suffixes = ["", *(f":{k}" for k in range(1, len(sizes)))]
            writes = tuple(
                self._buffer(name + suffix, size)
                for suffix, size in zip(suffixes, sizes, strict=False)
            )
            operations.append(
                Operation(
                    name=name,
                    kind=kind,
                    seconds=seconds,
                    reads=tuple(dict.fromkeys(reads)),
                    writes=writes,
                    inplace=tuple(reads[:1]) if inplace else (),
                    forward=False,
                    repeatable=repeatable_backward,
                )
            )
            return writes

        for layer in reversed(self.layers):
            op = layer.operation
            received = incoming.pop(op.writes[0], [])
            if not received and op.writes[0] != loss:
                continue
            if len(received) > 1:
                size = self.buffers[op.writes[0]].size
                total = backward(
                    f"grad/{op.name}/sum", "AddN", op.seconds / 4, received, [size], True
                )
                received = list(total)
            if layer.gradient == "pass":
                for b in layer.differentiable:
                    incoming.setdefault(b, []).extend(received)
                continue
            reads = [*received, *layer.saved]
            if layer.weights:
                outputs += backward(
                    f"grad/{op.name}/weights",
                    f"{op.kind}BackpropFilter",
                    op.seconds,
                    reads,
                    [layer.weights],
                    False,
                )
            # The first layer's input is resident; its gradient is wanted if nothing else is.
            wanted = not layer.weights and not layer.differentiable
            if layer.differentiable or wanted:
                # A convolution's input gradient reads the weights, not the saved input.
                reads = received if layer.weights else reads
                written = backward(
                    f"grad/{op.name}",
                    layer.gradient or f"{op.kind}Grad",
                    op.seconds,
                    reads,
                    [self.buffers[b].size for b in layer.differentiable or op.writes[:1]],
                    layer.inplace_gradient and bool(received),
                )
                for b, g in zip(layer.differentiable, written, strict=False):
                    incoming.setdefault(b, []).append(g)
                if wanted:
                    outputs += written
        return TrainingGraph(
            tuple(operations), tuple(self.buffers), tuple(outputs), resident, self.name
        )

    def _mean_seconds(self) -> float:
        return min((layer.operation.seconds for layer in self.layers), default=0.0)


def _per_layer(value: float | Sequence[float], n: int, what: str) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [value] * n
    if len(values) != n:
        raise GraphError(f"{len(values)} {what} given for {n} layers")
    return values


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise GraphError(f"{name} must be at least 1, got {count}")


def chain(
    n: int,
    size: int | Sequence[int] = 1 << 20,
    seconds: float | Sequence[float] = 1e-3,
    *,
    weights: int = 0,
    resident: int = 0,
    repeatable_backward: bool = False,
) -> TrainingGraph:
    """A chain of `n` layers and a loss; 2 n + 2 operations (3 n + 1 with `weights`).

    The gradient of a layer reads its output (as tanh's does) and is as large and as slow as the
    layer; the gradient of the chain's input is an output. With `weights` bytes of parameters a
    layer, its gradient is two operations of the layer's time: one reads the layer's input and
    writes the weight gradient (an output), one writes the input gradient. `size` and `seconds`
    are per layer, or one number for all.
    """
    _positive(n=n)
    sizes, times = _per_layer(size, n, "sizes"), _per_layer(seconds, n, "times")
    tape = _Tape(f"chain_{n}")
    x: list[int] = []
    for s, t in zip(sizes, times, strict=True):
        if weights:
            x = [tape.op("MatMul", x, int(s), t, save="i", weights=weights)]
        else:
            x = [tape.op("Tanh", x, int(s), t, save="o")]
    return tape.finish(x[0], resident, repeatable_backward)


def double_chain(
    n: int, size: int = 1 << 20, seconds: float = 1e-3, *, repeatable_backward: bool = False
) -> TrainingGraph:
    """Two chains of `n` layers side by side from one input, added at the end, and a loss.

    Between the first layer and the addition no tensor cuts the forward graph.
    """
    _positive(n=n)
    tape = _Tape(f"double_chain_{n}")
    stem = tape.op("Tanh", [], size, seconds, save="o")
    left = right = stem
    for _ in range(n):
        left = tape.op("Tanh", [left], size, seconds, save="o")
        right = tape.op("Tanh", [right], size, seconds, save="o")
    x = tape.op("AddV2", [left, right], size, seconds / 4, gradient="pass")
    return tape.finish(x, 0, repeatable_backward)


def _conv(tape: _Tape, inputs: Sequence[int], size: int, seconds: float) -> int:
    return tape.op(
        "Conv2D",
        inputs,
        size,
        seconds,
        save="i",
        weights=max(1, size >> 6),
        workspace=size >> 3,
        gradient="Conv2DBackpropInput",
    )


def _norm_relu(tape: _Tape, x: int, size: int, seconds: float) -> int:
    x = tape.op("FusedBatchNormV3", [x], size, seconds, save="i", statistics=max(1, size >> 10))
    return tape.op("Relu", [x], size, seconds / 2, save="o", inplace=True)


def residual_chain(
    blocks: int,
    size: int = 1 << 20,
    seconds: float = 1e-3,
    *,
    resident: int = 0,
    repeatable_backward: bool = False,
) -> TrainingGraph:
    """A pre-activation residual network of `blocks` equal blocks: one stage of `resnet`."""
    return resnet(
        1, blocks, size, seconds, resident=resident, repeatable_backward=repeatable_backward
    )


def resnet(
    stages: int,
    blocks: int,
    size: int = 1 << 20,
    seconds: float = 1e-3,
    *,
    resident: int = 0,
    repeatable_backward: bool = False,
) -> TrainingGraph:
    """A pre-activation residual network: `stages` of `blocks` blocks, after He et al. 2016.

    A block is twice (batch norm, ReLU, convolution of `seconds`) and the addition to its input;
    each stage halves the activations (`size` bytes in the first) and starts with a convolution
    on the shortcut. Batch norms have two outputs, ReLUs may work in place.
    """
    _positive(stages=stages, blocks=blocks)
    tape = _Tape(f"resnet_{stages}x{blocks}")
    light = seconds / 8
    x = _conv(tape, [], size, seconds)
    for stage in range(stages):
        width = max(1, size >> stage)
        for block in range(blocks):
            shortcut = x
            y = _norm_relu(tape, x, tape.buffers[x].size, light)
            if stage and not block:
                shortcut = _conv(tape, [y], width, seconds / 4)
            y = _conv(tape, [y], width, seconds)
            y = _norm_relu(tape, y, width, light)
            y = _conv(tape, [y], width, seconds)
            x = tape.op("AddV2", [shortcut, y], width, light, inplace=True, gradient="pass")
    return tape.finish(x, resident, repeatable_backward)


def unet(
    depth: int,
    size: int = 1 << 20,
    seconds: float = 1e-3,
    *,
    resident: int = 0,
    repeatable_backward: bool = False,
) -> TrainingGraph:
    """A U-net of `depth` levels above the bottom one, after Ronneberger et al. 2015.

    Each level has two convolutions with ReLU on the way down and two on the way up, activations
    of half the bytes of the level above, and a skip connection into a concatenation. Inside the
    outermost skip connection no tensor cuts the forward graph.
    """
    _positive(depth=depth)
    tape = _Tape(f"unet_{depth}")
    light = seconds / 8

    def double_conv(inputs: Sequence[int], width: int) -> int:
        for _ in range(2):
            y = _conv(tape, inputs, width, seconds)
            inputs = [tape.op("Relu", [y], width, light, save="o", inplace=True)]
        return inputs[0]

    skips: list[int] = []
    x: list[int] = []
    for level in range(depth):
        skips.append(double_conv(x, max(1, size >> level)))
        pooled = max(1, size >> (level + 2))
        x = [tape.op("MaxPool", skips[-1:], pooled, light, save="io")]
    y = double_conv(x, max(1, size >> depth))
    for level in reversed(range(depth)):
        width = max(1, size >> level)
        y = tape.op("ResizeNearestNeighbor", [y], 2 * width, light)
        y = tape.op("ConcatV2", [skips[level], y], 3 * width, light, gradient="Slice")
        y = double_conv([y], width)
    return tape.finish(y, resident, repeatable_backward)


def random_layered(
    n: int,
    seed: int = 0,
    *,
    width: float = 0.27,
    variability: float = 0.75,
    edge_density: float = 0.2,
    skip_density: float = 0.14,
) -> TrainingGraph:
    """A random layered graph of `n` operations, after Appendix A of arXiv 2207.05899.

    Gagrani et al., "Neural topological ordering for computation graphs" (2022), whose graphs the
    RL instances of MOCCASIN (2023) are. One source and one sink enclose about sqrt(n / width)
    layers, `width` being the ratio of a layer's mean number of nodes to the number of layers;
    the nodes of a layer vary by +- `variability` of the mean. Every node has a predecessor in the
    layer above and a successor in the layer below; of the other pairs of nodes in neighbouring
    layers a share `edge_density` is joined; a share of about `skip_density` of all edges skips
    layers. Output sizes are drawn from a mixture of Gaussians, times uniformly from whole numbers
    of seconds below 1000; source and sink take no time. Every operation is repeatable and writes
    one buffer that lives until its last use; the base order is a random topological one that
    follows the layers loosely.
    """
    if n < 3:
        raise GraphError(f"a layered graph has at least 3 nodes, got {n}")
    rng = random.Random(seed)
    layers = _layers(n, width, variability, rng)
    layer_of = {v: k for k, layer in enumerate(layers) for v in layer}
    edges: set[tuple[int, int]] = set()
    for above, below in itertools.pairwise(layers):
        joined = {(rng.choice(above), b) for b in below}
        lonely = set(above) - {a for a, _ in joined}
        joined.update((a, rng.choice(below)) for a in sorted(lonely))
        rest = [(a, b) for a in above for b in below if (a, b) not in joined]
        edges.update(joined, rng.sample(rest, round(edge_density * len(rest))))
    inner = range(1, n - 1)
    for _ in range(round(skip_density / (1 - skip_density) * len(edges))):
        a, b = sorted((rng.choice(inner), rng.choice(inner)))
        if layer_of[a] + 1 < layer_of[b]:
            edges.add((a, b))
    parents: list[list[int]] = [[] for _ in range(n)]
    for a, b in edges:
        parents[b].append(a)
    # Nodes are numbered layer by layer, so a node comes after its parents here.
    priority: list[float] = []
    for v in range(n):
        own = layer_of[v] + rng.uniform(0, 2)
        priority.append(max([own, *(priority[a] + 1e-6 for a in parents[v])]))
    order = sorted(range(n), key=lambda v: (priority[v], v))
    index = {v: i for i, v in enumerate(order)}
    operations = []
    buffers = []
    for i, v in enumerate(order):
        time = 0 if v in (0, n - 1) else rng.randrange(1000)
        reads = tuple(sorted(index[a] for a in parents[v]))
        operations.append(Operation(str(v), "node", float(time), reads, (i,)))
        buffers.append(Buffer(str(v), _mixture_bytes(rng)))
    return TrainingGraph(tuple(operations), tuple(buffers), name=f"random_layered_{n}_seed{seed}")


def _layers(n: int, width: float, variability: float, rng: random.Random) -> list[list[int]]:
    """Nodes 0..n-1 by layer; the first and the last layer hold one node each."""
    inner = n - 2
    count = max(1, min(inner, round((n / width) ** 0.5)))
    weights = [rng.uniform(max(0.05, 1 - variability), 1 + variability) for _ in range(count)]
    sizes = [max(1, round(inner * w / sum(weights))) for w in weights]
    while sum(sizes) != inner:
        k = rng.randrange(count)
        step = 1 if sum(sizes) < inner else -1
        if sizes[k] + step >= 1:
            sizes[k] += step
    layers = [[0]]
    for size in [*sizes, 1]:
        start = layers[-1][-1] + 1
        layers.append(list(range(start, start + size)))
    return layers


def _mixture_bytes(rng: random.Random) -> int:
    mean, deviation = rng.choice([(500, 250), (1000, 500), (3000, 1000), (5000, 1000)])
    return max(10, 10 * round(rng.gauss(mean, deviation) / 10))


def with_random_limits(
    graph: TrainingGraph, seed: int | random.Random, share: float = 0.3
) -> TrainingGraph:
    """`graph` in which each operation is, with probability `share`, not to be repeated after one
    or two of the later ones (`Operation.repeat_before`)."""
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    n = len(graph.operations)
    operations = []
    for o, op in enumerate(graph.operations):
        if o + 1 < n and rng.random() < share:
            limits = sorted({rng.randrange(o + 1, n) for _ in range(rng.choice([1, 1, 2]))})
            op = replace(op, repeat_before=tuple(limits))
        operations.append(op)
    return replace(graph, operations=tuple(operations))


def random_graph(
    seed: int | random.Random,
    n_ops: int,
    *,
    max_size: int = 8,
    repeatable: float = 0.8,
    repeatable_backward: float = 0.0,
    plain: bool = False,
) -> TrainingGraph:
    """A small graph with every feature of the model, for property tests.

    About half of the `n_ops` operations are forward. Operations have up to three inputs and up
    to two outputs (now and then none), sizes up to `max_size` bytes and times up to 4 s, both
    sometimes zero; some have workspace, in-place candidates, or `after` edges; several buffers
    are outputs and some bytes resident. `repeatable` and `repeatable_backward` are the shares of
    repeatable forward and backward operations. Times are whole seconds, so that sums are exact,
    and not all are zero. With `plain`, no operation has workspace, in-place candidates, `after`
    edges or other than one output, and all sizes and times are positive.
    """
    _positive(n_ops=n_ops)
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    split = max(1, round(n_ops * rng.uniform(0.4, 0.7)))
    least = 1 if plain else 0
    operations: list[Operation] = []
    buffers: list[Buffer] = []
    for i in range(n_ops):
        forward = i < split
        available = range(len(buffers))
        recent = available[-4:]
        reads: list[int] = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            pool = recent if forward and rng.random() < 0.6 else available
            if pool:
                reads.append(rng.choice(pool))
        reads = list(dict.fromkeys(reads))
        n_writes = 1 if plain else rng.choice([1, 1, 1, 1, 1, 2, 2, 0 if i else 1])
        writes = []
        for k in range(n_writes):
            writes.append(len(buffers))
            buffers.append(Buffer(f"b{i}" + (f":{k}" if k else ""), rng.randint(least, max_size)))
        inplace: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        workspace = 0
        if not plain:
            if writes and reads and rng.random() < 0.4:
                inplace = tuple(rng.sample(reads, rng.randint(1, len(reads))))
                if rng.random() < 0.7:
                    size = buffers[inplace[0]].size
                    buffers[writes[0]] = replace(buffers[writes[0]], size=size)
            if i and rng.random() < 0.15:
                after = (rng.randrange(i),)
            if rng.random() < 0.25:
                workspace = rng.randint(1, max_size)
        operations.append(
            Operation(
                name=f"op{i}",
                kind=rng.choice(["Conv2D", "Relu", "MatMul", "AddV2", "Conv2D+BiasAdd"]),
                seconds=float(rng.randint(least, 4)),
                reads=tuple(reads),
                writes=tuple(writes),
                workspace=workspace,
                inplace=inplace,
                forward=forward,
                repeatable=rng.random() < (repeatable if forward else repeatable_backward),
                after=after,
            )
        )
    if not any(op.seconds for op in operations):
        operations[0] = replace(operations[0], seconds=1.0)
    outputs = rng.sample(range(len(buffers)), min(len(buffers), rng.randint(1, 3)))
    return TrainingGraph(
        tuple(operations),
        tuple(buffers),
        tuple(sorted(outputs)),
        resident=rng.choice([0, 0, 3, 10]),
        name="random_graph",
    )
