"""Blocks to plan for: random ones, the toy GPT block, and the slow exact answer."""

import itertools
import math
import random
from collections.abc import Iterator

from jaxckpt.planner.solve import Choice, Link, Operation, evaluate


def random_block(
    seed: int, size: int, *, cyclic: bool = False, shared: bool = True
) -> list[Operation]:
    """A block of ``size`` operations with small integer costs and bytes.

    Names are sometimes shared, some operations have none, and some are never read. A
    cyclic one also reads later results, as a loop's carry does.
    """
    draw = random.Random(seed)
    block = []
    for index in range(size):
        reach = range(size) if cyclic and draw.random() < 0.3 else range(index)
        reads = draw.sample(reach, min(len(reach), draw.choice((0, 1, 1, 2, 3))))
        other = draw.randrange(size) if shared and draw.random() < 0.3 else index
        block.append(
            Operation(
                cost=draw.choice((0, 1, 1, 2, 3, 5, 20)),
                reads=tuple(reads),
                name=f"value_{other}" if draw.random() < 0.85 else "",
                nbytes=draw.choice((0, 1, 1, 2, 4, 7)),
                needed=draw.random() < 0.5,
                flops=draw.randrange(5),
                keep_cost=draw.choice((0, 0, 1)),
            )
        )
    return block


def all_choices(block: list[Operation], link: Link | None = None) -> Iterator[Choice]:
    """Every way to keep its names: 2^n of them, 3^n with a link."""
    names = sorted({one.name for one in block} - {""})
    for places in itertools.product(range(3 if link else 2), repeat=len(names)):
        at = list(zip(places, names, strict=True))
        save, offload = ([name for place, name in at if place == p] for p in (1, 2))
        yield evaluate(block, save, offload, link)


def best_of(
    choices: list[Choice],
    budget: float,
    copies: int = 1,
    host_budget: float = math.inf,
) -> Choice | None:
    """What `solve` promises: least cost, fewest names, fewest offloaded, least memory.

    None where nothing fits.
    """
    fits = [
        one
        for one in choices
        if one.memory(copies) <= budget and copies * one.offloaded_bytes <= host_budget
    ]
    least = min((one.cost for one in fits), default=0)
    return min(
        (one for one in fits if one.cost <= least * (1 + 1e-9)),
        key=lambda one: rank(one, copies),
        default=None,
    )


def rank(choice: Choice, copies: int = 1) -> tuple[int, int, int]:
    """What decides between equally cheap choices."""
    return (
        len(choice.save) + len(choice.offload),
        len(choice.offload),
        choice.memory(copies),
    )


def toy_block() -> list[Operation]:
    """A pre-norm GPT block with flash attention: sizes in units of batch x sequence x
    hidden, costs about those of a GPU. The backward pass reads all but ``out``.
    """
    values = {  # bytes, cost
        "ln1": (2, 2),
        "qkv": (6, 300),
        "attn": (2, 100),
        "out": (2, 100),
        "x2": (2, 1),
        "ln2": (2, 2),
        "u": (8, 400),
        "g": (8, 5),
    }
    return [
        Operation(
            cost=cost,
            reads=(index - 1,) if index else (),
            name=name,
            nbytes=nbytes,
            needed=name != "out",
        )
        for index, (name, (nbytes, cost)) in enumerate(values.items())
    ]


def large_block(size: int = 250, num_names: int = 120, seed: int = 0):
    """As large as a traced transformer layer: a chain with skips, odd costs, big bytes.
    Half of its operations cost nothing, as reshapes do.
    """
    draw = random.Random(seed)
    named = set(draw.sample(range(size), num_names))
    return [
        Operation(
            cost=draw.choice((0.0, 10 ** draw.uniform(-6, -3))),
            reads=tuple({max(0, index - draw.choice((1, 1, 2, 9))) for _ in range(2)})
            if index
            else (),
            name=f"value_{index}" if index in named else "",
            nbytes=draw.choice((1, 2, 3, 4, 8, 11)) * 2**21 if index in named else 0,
            needed=draw.random() < 0.5 if index in named else False,
            flops=draw.randrange(10**12),
        )
        for index in range(size)
    ]
