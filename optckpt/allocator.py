"""What an allocator that hands out whole chunks makes of a schedule.

TensorFlow's allocators (BFC, "best fit with coalescing": one per GPU, and one on the CPU in builds
with oneDNN) serve a request from the smallest free chunk that is large enough, and split it only
if at least twice the request, or 128 MiB more, is there. What they report as in use are chunks:
several percent more than the tensors in them, depending on the order of sizes. Replayed here, so
that a plan can promise what the allocator will report. Follows tsl/framework/bfc_allocator.cc of
TensorFlow 2.21; no code of it is used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule

ROUNDING = 256
"""Chunk sizes are multiples of this many bytes."""
_MOST_UNUSED = 128 << 20
_FIRST_REGION = 2 << 20
_SMALL = _FIRST_REGION // 8
_MOST_SMALL = 8
"""So many small blocks of others are as large as the first region."""
_STEPS = 3
"""Steps replayed; from the second on, the chunks left by the one before are there. Twice as many
where variables change their place."""


class Reporter(Protocol):
    """What tells the peak that the device will report: a model of its allocator, or a compiler."""

    is_slow: ClassVar[bool]
    """Whether it takes long to tell, so that it is not asked for a small gain."""

    def peak(self, graph: TrainingGraph, schedule: Schedule) -> int:
        """Peak bytes in use during a step along `schedule`, resident bytes included."""
        ...


@dataclass(frozen=True, slots=True)
class Allocator:
    """An allocator at the beginning of a step. Sizes are bytes."""

    is_slow: ClassVar[bool] = False
    smallest: int = 0
    """Smaller blocks are not taken from it."""
    region: int = 0
    """Size of the one region that it has from the start; 0: it grows, doubling from 2 MiB."""
    held: tuple[int, ...] = ()
    """Blocks that are in use throughout (variables, inputs)."""
    free: tuple[int, ...] | None = None
    """Its free chunks, if known; of the last and largest perhaps only the beginning."""
    coming: tuple[int, ...] = ()
    """Blocks that will be taken from the free chunks before the first step, and kept."""
    in_use: int = 0
    """Bytes in use as the free chunks were found, if these are all that the step may take; else 0.
    """

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping that `from_json` reads back to an equal allocator."""
        free = None if self.free is None else list(self.free)
        return {**asdict(self), "held": list(self.held), "free": free, "coming": list(self.coming)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Allocator:
        """Read what `to_json` wrote."""
        free = data.get("free")
        return cls(
            int(data["smallest"]),
            int(data["region"]),
            tuple(map(int, data["held"])),
            None if free is None else tuple(map(int, free)),
            tuple(map(int, data.get("coming", ()))),
            int(data.get("in_use", 0)),
        )

    def peak(self, graph: TrainingGraph, schedule: Schedule) -> int:
        """Peak bytes in use that the allocator reports for a step, resident included.

        If the free chunks are known and suffice, they are what is replayed; also if all but the
        next region that it grows by do, where they were looked for up to the budget (`in_use`). (Of
        14 runs of Keras' `fit` planned like this, all peaked within 2 % of it in the first epoch.)
        Otherwise: how a growing allocator is cut into chunks depends on what the process did
        before, which nobody knows: the highest peak over a few plausible histories is returned. (Of
        32 schedules of five networks, each made and run as `optckpt compare` does it, 30 peaked as
        measured between 5 % below it and 0.3 % above, the others 0.7 and 3 % above. In a small
        step, one large block in a chunk of almost twice its size is much: a gated MLP peaked up to
        26 % below.) The resident bytes count as they stand in the graph.
        `schedule` must be valid.
        O(executions log chunks).
        """
        events, moving = _events(graph, schedule, self.smallest)
        peaks = []
        if self.free is not None:
            chunks = self._known(self.free)
            regions = chunks.regions
            unused = chunks.in_use - sum(_rounded(n) for n in self.coming if n >= self.smallest)
            peaks.append(unused + _replay(chunks, events, moving))
            foreseen = regions + len(moving) + (self.in_use > 0)
            if chunks.regions <= foreseen:
                return graph.resident + peaks[0]
        peaks += [_replay(chunks, events, moving) for chunks in self._histories()]
        return graph.resident + max(peaks)

    def _known(self, free: Sequence[int]) -> _Chunks:
        sizes = list(free)
        if sizes:
            # The largest is at the end of the latest region, or is all of it: regions double.
            region = in_all = _FIRST_REGION
            taken = self.in_use + sum(sizes) if self.in_use else 0
            while region < max(sizes) or in_all < taken:
                region *= 2
                in_all += region
            sizes[-1] = region
        chunks = _Chunks.of(sizes)
        for size in self.coming:
            if size >= self.smallest:
                chunks.allocate(size)
        return chunks

    def _histories(self) -> Iterator[_Chunks]:
        held = [size for size in self.held if size >= self.smallest]
        yield _Chunks.holding(held, self.region)
        if not self.region:
            # Variables in the order of the graph, made from temporaries of the same size or not;
            # perhaps something else came first, and something small has stayed.
            yield _Chunks.holding(sorted(held), 0)
            yield _Chunks.holding(held, 0, _copied)
            yield _Chunks.holding([_FIRST_REGION, *held, self.smallest], 0)
            yield _Chunks.holding(held, 0, _drawn)
            # The graph reads its input before the variables, which are usually made first.
            chunks = _Chunks.holding(held[1:], 0, _drawn)
            for size in held[:1]:
                _computed(chunks, size)
            yield chunks
            # Results and constants of other functions fill the small regions: the step's own small
            # blocks then go into a large one, which no longer holds as many large blocks.
            small = max(self.smallest, _SMALL)
            for n in range(1, _MOST_SMALL + 1):
                yield _Chunks.holding([*held, *(small,) * n], 0)


def _replay(chunks: _Chunks, events: Sequence[tuple[int, int]], moving: dict[int, int]) -> int:
    """Peak bytes that some steps use beyond what is in use before.

    `moving`: bytes of the variables that are given other memory, by what gives it to them.
    """
    variables = {update: chunks.hold(size) for update, size in moving.items()}
    before = chunks.in_use
    chunks.highest = before
    # Moving, the variables cut the free memory otherwise in each step.
    for _ in range(2 * _STEPS if moving else _STEPS):
        at: dict[int, int] = {}
        for block, size in events:
            if size > 0:
                at[block] = chunks.allocate(size)
            elif not size:
                chunks.free(at.pop(block))
            else:
                chunks.free(variables[~size])
                variables[~size] = at.pop(block)
    return chunks.highest - before


_MOVES_VARIABLE = "AssignVariableOp"
"""The variable takes over the memory of the value, if nothing else holds that, or gets a copy."""


def _events(
    graph: TrainingGraph, schedule: Schedule, smallest: int
) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """What a step asks of the allocator: (block, its size), or (block, 0) to free it, or (block,
    ~operation): the operation gives the block to a variable, whose old one is freed.

    Also returns the bytes of these variables, by operation.
    """
    sizes = [b.size for b in graph.buffers]
    copy = [-1] * len(sizes)
    last_use: list[int] = []
    reads: list[dict[int, int]] = []
    for step, o in enumerate(schedule.executions):
        op = graph.operations[o]
        used = {b: copy[b] for b in op.reads}
        for c in used.values():
            last_use[c] = step
        reads.append(used)
        for b in op.writes:
            copy[b] = len(last_use)
            last_use.append(step)
    for b in graph.outputs:
        last_use[copy[b]] = len(schedule.executions)

    events: list[tuple[int, int]] = []
    moving: dict[int, int] = {}
    # Copies are numbered from 0, workspaces from -1 down; an output in place has its input's block.
    block_of: dict[int, int] = {}
    created = 0
    for step, o in enumerate(schedule.executions):
        op = graph.operations[o]
        dying = {b: c for b, c in reads[step].items() if last_use[c] == step and c in block_of}
        for b in op.writes:
            heir = next(
                (
                    a
                    for a in op.inplace
                    if b == op.writes[0] and a in dying and sizes[a] == sizes[b]
                ),
                None,
            )
            if heir is not None:
                block_of[created] = block_of.pop(dying.pop(heir))
            elif sizes[b] and sizes[b] >= smallest:
                block_of[created] = created
                events.append((created, sizes[b]))
            created += 1
        if op.workspace and op.workspace >= smallest:
            events += [(-1 - step, op.workspace), (-1 - step, 0)]
        if op.kind == _MOVES_VARIABLE and len(reads[step]) == 1:
            (b,) = reads[step]
            if sizes[b] and sizes[b] >= smallest:
                moving[o] = sizes[b]
                block = block_of.pop(dying.pop(b)) if b in dying else -1 - step
                if block == -1 - step:
                    events.append((block, sizes[b]))
                events.append((block, ~o))
        unread = [c for c in range(created - len(op.writes), created) if last_use[c] == step]
        for c in (*dying.values(), *unread):
            if c in block_of:
                events.append((block_of.pop(c), 0))
    events += [(block, 0) for block in block_of.values()]
    return events, moving


class _Chunks:
    """The chunks of a best-fit allocator with coalescing, by address."""

    def __init__(self, region: int) -> None:
        self.in_use = 0
        self.highest = 0
        self._free: list[tuple[int, int]] = []
        """(size, address), ascending."""
        self._size: dict[int, int] = {}
        self._is_free: dict[int, bool] = {}
        self._before: dict[int, int | None] = {}
        self._after: dict[int, int | None] = {}
        self._regions = 0
        self._next_region = _FIRST_REGION
        if region:
            self._add_region(region)

    @classmethod
    def holding(
        cls,
        sizes: Iterable[int],
        region: int,
        make: Callable[[_Chunks, int], object] | None = None,
    ) -> _Chunks:
        """Chunks in which blocks of these sizes are in use, each put there by `make`."""
        chunks = cls(region)
        for size in sizes:
            (make or _Chunks.allocate)(chunks, size)
        return chunks

    @classmethod
    def of(cls, sizes: Iterable[int]) -> _Chunks:
        """Free chunks of these sizes, none next to another."""
        chunks = cls(0)
        for size in sizes:
            chunks._add_region(size)
            while chunks._next_region <= size:
                chunks._next_region *= 2
        return chunks

    @property
    def regions(self) -> int:
        """Number of regions."""
        return self._regions

    def _add_region(self, size: int) -> None:
        self._regions += 1
        # Large mappings are placed at descending addresses.
        address = -self._regions << 48
        self._size[address] = size
        self._is_free[address] = True
        self._before[address] = self._after[address] = None
        insort(self._free, (size, address))

    def hold(self, size: int) -> int:
        """Address of a chunk in use that has always been there, next to nothing."""
        size = _rounded(size)
        self._add_region(size)
        address = -self._regions << 48
        self._remove(address)
        self._is_free[address] = False
        self.in_use += size
        return address

    def _grow(self, size: int) -> None:
        if size <= self._next_region:
            self._add_region(self._next_region)
            self._next_region *= 2
            return
        while size > self._next_region:
            self._next_region *= 2
        self._add_region(self._next_region)

    def allocate(self, size: int) -> int:
        """Address of the chunk that serves `size` bytes."""
        size = _rounded(size)
        i = bisect_left(self._free, (size, -(1 << 62)))
        if i == len(self._free):
            self._grow(size)
            i = bisect_left(self._free, (size, -(1 << 62)))
        found, address = self._free.pop(i)
        if found >= 2 * size or found - size >= _MOST_UNUSED:
            self._split(address, size)
        self._is_free[address] = False
        self.in_use += self._size[address]
        self.highest = max(self.highest, self.in_use)
        return address

    def _split(self, address: int, size: int) -> None:
        rest = address + size
        after = self._after[address]
        self._size[rest] = self._size[address] - size
        self._is_free[rest] = True
        self._before[rest], self._after[rest] = address, after
        if after is not None:
            self._before[after] = rest
        self._after[address] = rest
        self._size[address] = size
        insort(self._free, (self._size[rest], rest))

    def free(self, address: int) -> None:
        """Give a chunk back, and join it with free neighbours."""
        self.in_use -= self._size[address]
        self._is_free[address] = True
        after = self._after[address]
        if after is not None and self._is_free[after]:
            self._remove(after)
            self._join(address, after)
        before = self._before[address]
        if before is not None and self._is_free[before]:
            self._remove(before)
            self._join(before, address)
            address = before
        insort(self._free, (self._size[address], address))

    def _remove(self, address: int) -> None:
        self._free.pop(bisect_left(self._free, (self._size[address], address)))

    def _join(self, first: int, second: int) -> None:
        after = self._after[second]
        self._size[first] += self._size.pop(second)
        self._after[first] = after
        if after is not None:
            self._before[after] = first
        del self._is_free[second], self._before[second], self._after[second]


def _rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def _copied(chunks: _Chunks, size: int) -> None:
    """A variable that is a copy of its initial value."""
    value = chunks.allocate(size)
    chunks.allocate(size)
    chunks.free(value)


def _drawn(chunks: _Chunks, size: int) -> None:
    """A variable that is a copy of random numbers, scaled and then shifted."""
    value = _computed(chunks, size)
    chunks.allocate(size)
    chunks.free(value)


def _computed(chunks: _Chunks, size: int) -> int:
    """Random numbers, scaled and then shifted: address of what stays."""
    numbers, scaled, shifted = (chunks.allocate(size) for _ in range(3))
    chunks.free(scaled)
    chunks.free(numbers)
    return shifted
