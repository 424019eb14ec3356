"""Operations that some cheapest schedule always executes again together.

Let buffer b be all that a repeatable operation o writes, q its only reader, repeatable as well, and
d what q writes, no larger than b in all. Then nothing is gained by keeping b after the first
execution of q, as far as the memory at first executions is concerned: take a schedule that
has b in memory as some base operation behind q first executes.

1. If an execution of q has read this copy before, keep d from there on instead of b, and do not
   execute q again.
2. Otherwise the copy comes from a re-execution of o. Of several re-executions of q that read it,
   all but the first can go likewise. What is left is one re-execution of o and one of q:
   a. if q reads nothing but b, execute q right behind o and keep d instead of b;
   b. if what o reads is no larger than b, execute o right before q and keep that instead.

None of it costs time or adds bytes as a base operation first executes (if an input that is now
held longer gave its memory to an output there, the output is as large as that input, so b's bytes
pay for it). Taken in base order of q, with the operations already joined to o or q moving along as
a block, and reading as o does what the block reads, the steps never undo one another. Hence o's
re-executions behind the first execution of q are those of q.

Memory during re-executions may rise, so moment rows of `stage_cuts` exclude it.
"""

from __future__ import annotations

from optckpt.solvers.preprocess import Problem


def joined(problem: Problem) -> dict[int, int]:
    """For each operation that is executed again only together with its reader: the reader.

    Sizes are compared in bytes, whatever a relaxation rounds them to: what is moved must be no
    larger, and then every row that is weaker than its bytes still holds. O(edges).
    """
    p = problem
    size = p.size
    inputs = [set(p.reads[o]) for o in range(p.n)]
    """What an operation reads together with those joined to it."""
    found: dict[int, int] = {}
    for q in range(p.n):
        if not p.repeatable[q]:
            continue
        written = sum(size[t] for t in p.writes[q])
        own = sorted(inputs[q])
        for b in own:
            o = p.producer[b]
            if (
                p.repeatable[o]
                and p.base_readers[b] == (q,)
                and size[b] >= written
                and p.writes[o] == (b,)
                and (len(own) == 1 or sum(size[t] for t in inputs[o]) <= size[b])
            ):
                found[o] = q
                inputs[q].discard(b)
                inputs[q] |= inputs[o]
    return found
