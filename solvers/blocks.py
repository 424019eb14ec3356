"""A chain of blocks: the forward pass cut where one buffer crosses, the backward pass in phases.

Deep residual networks and transformers are chains: between two blocks a single repeatable
buffer, the state, leads on. The backward pass goes through the blocks in reverse; the stretch in
which it needs a block's buffers is that block's phase. For each block this module lists the ways to
treat it (`Option`), for `block_dp` to choose from.

What is written by operations that are not executed again here (backward ones, random ones) is
called fixed: where it is in memory is the same in every schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from optckpt.solvers.preprocess import Problem
from optckpt.solvers.units import joined

MAX_GROUPS = 6
"""Buffers of a block are treated alike in at most so many groups: 3 ** MAX_GROUPS options."""
SEARCHED_OPERATIONS = 20_000
"""Longer blocks have fewer groups: the options of a shape go through so many executions in all."""
MAX_OPTIONS = 24
"""Options kept per block."""


@dataclass(frozen=True)
class Option:
    """A way to treat a block. Bytes do not count the state before it, nor what others hold.

    `open`: the block is run to go on to the next one, saving on the way what its phase, later, is
    to find in memory. `closed`: its phase follows at once.
    """

    saved: frozenset[int]
    """Buffers kept from the run to the phase."""
    retained: frozenset[int]
    """Buffers that, once computed again in the phase, stay to their last use in it."""
    prefetch: bool
    """Whether inputs are computed again one operation early where fixed bytes rise."""
    held: int
    """Bytes kept between run and phase, the state behind the block not counted."""
    run_peak: int
    """Bytes at the peak of the open run, the state behind the block included."""
    closed_peak: int
    phase_peak: int
    """Bytes at the peak of the phase, fixed ones included that it adds to those at its start."""
    run_cost: float
    closed_cost: float
    phase_cost: float
    """Costs are fractions of the plain step: of the run, and of re-executions in the phase."""


@dataclass(frozen=True)
class Chain:
    """A problem as a chain of blocks; position `forward_end` is the first backward operation."""

    problem: Problem
    forward_end: int
    ends: tuple[int, ...]
    """Per block: position behind its last forward operation."""
    states: tuple[int, ...]
    """Per block: the buffer that leads into it (-1 for the first)."""
    phases: tuple[tuple[int, int], ...]
    """Per block: first position of its phase, and the position behind the last one."""
    local: frozenset[int]
    """Buffers that may be computed again; all others are fixed."""
    fixed_before: tuple[int, ...]
    """Bytes of fixed buffers in memory as each position begins."""

    def __len__(self) -> int:
        return len(self.ends)

    def start(self, i: int) -> int:
        """First position of block i."""
        return self.ends[i - 1] if i else 0

    def missing(self, targets: Iterable[int], available: Collection[int]) -> list[int]:
        """Operations to execute for `targets`, in order, from what is `available`."""
        p = self.problem
        found: set[int] = set()
        stack = [t for t in targets if t not in available]
        while stack:
            t = stack.pop()
            o = p.producer[t]
            if t in self.local and o not in found:
                found.add(o)
                stack.extend(b for b in p.reads[o] if b not in available)
        return sorted(found)

    def phase(self, i: int, option: Option, available: Iterable[int]) -> list[int]:
        """The executions of the phase of block i, in which `available` is found in memory."""
        p = self.problem
        begin, end = self.phases[i]
        memory = set(available)
        keep = memory | option.retained
        sequence: list[int] = []
        fetched = begin
        for position in range(begin, end):
            ahead = position + 1
            if option.prefetch and ahead < end:
                rises = self.fixed_before[ahead] > self.fixed_before[position]
                ahead += rises
            for q in range(fetched, ahead):
                batch = self.missing(p.reads[q], memory)
                sequence += batch
                memory.update(t for o in batch for t in p.writes[o])
            fetched = max(fetched, ahead)
            sequence.append(position)
            if fetched == position + 1:
                memory &= keep
        return sequence


def find_chain(problem: Problem, forward_end: int, most: int) -> Chain | None:
    """The chain of at most `most` blocks that `problem` is; None if it is none of 4 or more."""
    p = problem
    outputs = set(p.reads[p.n])
    local = frozenset(
        t
        for t, o in enumerate(p.producer)
        if p.size[t] and o < forward_end and p.repeatable[o] and t not in outputs
    )
    last_forward = list(p.producer)
    for t in local:
        for r in p.base_readers[t]:
            if r < forward_end:
                last_forward[t] = r
    crossing: dict[int, int] = {}
    live: set[int] = set()
    dying: dict[int, list[int]] = {}
    for t in local:
        dying.setdefault(last_forward[t], []).append(t)
    held = [0]
    for position in range(forward_end):
        live.update(t for t in p.writes[position] if t in local and last_forward[t] > position)
        live.difference_update(dying.get(position, ()))
        if len(live) == 1:
            (state,) = live
            if state not in crossing.values():
                crossing[position + 1] = state
        held.append(
            held[-1] + sum(p.size[t] for t in p.writes[position] if p.last_reader(t) >= forward_end)
        )
    if len(crossing) > most:
        # Every so many bytes one, and there the smallest state.
        chosen: dict[int, int] = {}
        for position in crossing:
            slot = held[position] * most // max(1, held[-1])
            other = chosen.get(slot)
            if other is None or p.size[crossing[position]] < p.size[crossing[other]]:
                chosen[slot] = position
        crossing = {c: crossing[c] for c in sorted(chosen.values())}
    if len(crossing) < 3:
        return None
    ends = (*crossing, forward_end)
    states = (-1, *crossing.values())
    fixed = _fixed_before(p, local)
    phases = _phases(p, ends, states, local, fixed)
    return Chain(p, forward_end, ends, states, phases, local, fixed)


def _fixed_before(p: Problem, local: Collection[int]) -> tuple[int, ...]:
    change = [0] * (p.n + 2)
    for t, o in enumerate(p.producer):
        if t not in local and p.size[t]:
            last = p.last_reader(t)
            if last > o:
                change[o + 1] += p.size[t]
                change[last + 1] -= p.size[t]
    return tuple(itertools.accumulate(change))


def _phases(
    p: Problem,
    ends: Sequence[int],
    states: Sequence[int],
    local: Collection[int],
    fixed: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """The backward pass shared out: a phase ends behind the last use of what belongs to its block.

    That is what the block wrote, and the state before it. Between there and the first use of what
    belongs to an earlier block, it ends where the fewest fixed bytes are in memory.
    """
    forward_end = ends[-1]
    block: dict[int, int] = {}
    for i, end in enumerate(ends):
        for o in range(ends[i - 1] if i else 0, end):
            block.update(dict.fromkeys(p.writes[o], i))
    block.update({t: i for i, t in enumerate(states)})
    wanted = [[block[t] for t in p.reads[q] if t in local] for q in range(forward_end, p.n)]
    last_use = [forward_end] * len(ends)
    for q, blocks in enumerate(wanted, forward_end):
        for i in blocks:
            last_use[i] = max(last_use[i], q + 1)
    phases: list[tuple[int, int]] = []
    begin = forward_end
    for i in range(len(ends) - 1, -1, -1):
        end = begin
        if i == 0:
            end = p.n
        else:
            low = max(begin, last_use[i])
            high = low
            while high < p.n and not any(k < i for k in wanted[high - forward_end]):
                high += 1
            end = min(range(low, high + 1), key=lambda q: (fixed[q], q))
        phases.append((begin, end))
        begin = end
    phases.reverse()
    return tuple(phases)


class OptionFinder:
    """Lists the options of a chain's blocks, searching once per shape of block."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._joined = joined(chain.problem)
        self._known: dict[tuple[object, ...], tuple[list[int], list[Option]]] = {}

    def options(self, i: int) -> list[Option]:
        """The options of block i that none other is better than, by bytes held, peak and cost.

        Their `phase_peak` counts fixed bytes beyond those in memory as the phase begins.
        """
        written = self._written(i)
        key = self._shape(i, written)
        if key not in self._known:
            self._known[key] = (written, self._search(i, written))
        theirs, found = self._known[key]
        if theirs is written:
            return found
        same = dict(zip(theirs, written, strict=True))
        return [
            replace(
                option,
                saved=frozenset(same[t] for t in option.saved),
                retained=frozenset(same[t] for t in option.retained),
            )
            for option in found
        ]

    def _written(self, i: int) -> list[int]:
        p = self.chain.problem
        return [
            t
            for o in range(self.chain.start(i), self.chain.ends[i])
            for t in p.writes[o]
            if t in self.chain.local
        ]

    def _shape(self, i: int, written: Sequence[int]) -> tuple[object, ...]:
        """Equal for blocks with the same options but for the names of their buffers."""
        c, p = self.chain, self.chain.problem
        names = {t: k for k, t in enumerate(written)}
        names[c.states[i]] = -1

        def named(buffers: Iterable[int]) -> tuple[int, ...]:
            return tuple(names.get(t, -2) for t in buffers)

        begin, end = c.phases[i]
        return (
            names.get(c.states[i + 1], -2) if i + 1 < len(c) else -3,
            tuple(
                (named(p.reads[o]), named(p.writes[o]), named(p.takes[o]), p.workspace[o],
                 tuple(p.size[t] for t in p.writes[o]), round(p.cost[o], 9), p.repeatable[o])
                for o in range(c.start(i), c.ends[i])
            ),
            tuple(
                (named(p.reads[q]), named(p.takes[q]), p.workspace[q],
                 tuple(p.size[t] for t in p.writes[q]), c.fixed_before[q] - c.fixed_before[begin])
                for q in range(begin, end)
            ),
        )  # fmt: skip

    def _groups(self, i: int, written: Sequence[int]) -> list[list[int]]:
        """What the phase reads, in groups of neighbours of about the same size."""
        p = self.chain.problem
        begin, end = self.chain.phases[i]
        read = {t for q in range(begin, end) for t in p.reads[q]}
        following = self.chain.states[i + 1] if i + 1 < len(self.chain) else -1
        single = [
            t
            for t in written
            if t in read or (p.producer[t] not in self._joined and t != following)
        ]
        length = 2 * (self.chain.ends[i] - self.chain.start(i)) + end - begin
        most = int(math.log(max(9.0, SEARCHED_OPERATIONS / (2 * length)), 3))
        most = min(most, MAX_GROUPS)
        if len(single) > most:
            single = [t for t in written if t in read]
        if len(single) <= most:
            return [[t] for t in single]
        total = sum(p.size[t] for t in single)
        groups: dict[int, list[int]] = {}
        seen = 0
        for t in single:
            groups.setdefault(min(most - 1, seen * most // total), []).append(t)
            seen += p.size[t]
        return list(groups.values())

    def _search(self, i: int, written: Sequence[int]) -> list[Option]:
        found: list[Option] = []
        groups = self._groups(i, written)
        for states in itertools.product(range(3), repeat=len(groups)):
            saved, retained = (
                frozenset(t for g, s in zip(groups, states, strict=True) if s == k for t in g)
                for k in (1, 2)
            )
            found += (self._evaluate(i, saved, retained, ahead) for ahead in (False, True))
        return _undominated(found)

    def _evaluate(
        self, i: int, saved: frozenset[int], retained: frozenset[int], prefetch: bool
    ) -> Option:
        c, p = self.chain, self.chain.problem
        state, following = c.states[i], c.states[i + 1] if i + 1 < len(c) else -1
        before = {state}
        closed = c.missing(saved, before)
        run = c.missing({*saved, following} - {-1}, before)
        option = Option(saved, retained, prefetch, 0, 0, 0, 0, 0.0, 0.0, 0.0)
        phase = c.phase(i, option, {*saved, *before})
        base = c.fixed_before[c.phases[i][0]]
        return replace(
            option,
            held=sum(p.size[t] for t in saved if t != following),
            run_peak=self._peak(run, {*saved, following} - {-1}, state),
            closed_peak=self._peak(closed, saved, state),
            phase_peak=self._peak(phase, (), state) - base if phase else 0,
            run_cost=sum(p.cost[o] for o in run),
            closed_cost=sum(p.cost[o] for o in closed),
            phase_cost=sum(p.cost[o] for o in phase if o < c.forward_end),
        )

    def _peak(self, sequence: Sequence[int], kept: Collection[int], state: int) -> int:
        """Most bytes during `sequence`, after which `kept` is in memory; `state` not counted."""
        c, p = self.chain, self.chain.problem
        wanted = {*kept, state}
        live = sum(p.size[t] for t in kept if t != state)
        fixed = peak = 0
        for o in reversed(sequence):
            during = live + p.workspace[o]
            if o >= c.forward_end:
                fixed = c.fixed_before[o]
            for t in p.writes[o]:
                if t in wanted:
                    wanted.discard(t)
                    live -= p.size[t]
                else:
                    during += p.size[t]
            gift = 0
            for t in p.reads[o]:
                if t in c.local and t not in wanted:
                    wanted.add(t)
                    live += p.size[t]
                    during += p.size[t]
                    if t in p.takes[o]:
                        gift = p.size[t]
                elif t not in c.local and t in p.takes[o] and p.last_reader(t) == o:
                    gift = p.size[t]
            peak = max(peak, during + fixed - gift)
        return peak


def _undominated(options: Sequence[Option]) -> list[Option]:
    def measures(o: Option) -> tuple[float, ...]:
        open_cost, closed_cost = o.run_cost + o.phase_cost, o.closed_cost + o.phase_cost
        return (open_cost, o.held, o.phase_peak, closed_cost, o.run_peak, o.closed_peak)

    front: list[tuple[tuple[float, ...], Option]] = []
    for option in sorted(options, key=measures):
        mine = measures(option)
        if not any(all(a <= b for a, b in zip(m, mine, strict=True)) for m, _ in front):
            front.append((mine, option))
    if len(front) > MAX_OPTIONS:
        # Cheapest first; of those with much the same bytes one will do.
        most = [max(m[k] for m, _ in front) or 1 for k in (1, 2)]
        cells: dict[tuple[int, int], tuple[tuple[float, ...], Option]] = {}
        for m, option in front:
            cells.setdefault((int(5 * m[1] / most[0]), int(8 * m[2] / most[1])), (m, option))
        front = list(cells.values())
    return [option for _, option in front]
