"""Cost against memory: every choice worth having for one block, and for a stack of it.

`frontier` sweeps the budget of one block. `mix` gives each of L equal layers one of
those choices. With one memory row at most two differ (a basic solution of the linear
program has two), so a stack runs as two scans. Usually the first layers recompute more
and the last keep more: the first run their backward pass when the last have freed what
they kept. `stack_bound` says how much a plan of any shape could still gain.

No JAX here.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt.planner.solve import Choice, Infeasible, Link, Operation, Program
from jaxckpt.units import format_bytes

_STEEPEST = 4  # falls of cost on the frontier that are looked at more closely


def frontier(
    operations: Sequence[Operation],
    *,
    copies: int = 1,
    budgets: int = 64,
    link: Link | None = None,
    host_budget: float = math.inf,
) -> list[Choice]:
    """The Pareto-best choices of one block over a range of budgets, cheapest last.

    Args:
      operations: the block.
      copies: how many layers keep their values at once.
      budgets: how many budgets to try, evenly from the least memory to the most that
        helps; the last few just below where the cost then falls most.
      link, host_budget: as for `jaxckpt.planner.solve.solve`.

    Returns:
      Choices with memory rising and cost falling, each optimal for its own memory.
    """
    program = Program(operations, copies, link, host_budget)
    found = [program.solve(math.inf)]
    highest = found[0].memory(copies)
    steps = max(2, budgets - _STEEPEST)
    for budget in np.linspace(highest, program.least, steps)[1:]:
        if budget < found[-1].memory(copies):  # else the last optimum fits here, too
            found.append(program.solve(float(budget)))
    falls = sorted(itertools.pairwise(found), key=lambda two: two[0].cost - two[1].cost)
    below = (highest - program.least) / steps / 16  # to a byte less HiGHS takes minutes
    for cheap, _ in falls[:_STEEPEST]:
        budget = cheap.memory(copies) - below
        if budget >= program.least:
            found.append(program.solve(budget))
    return pareto(found, copies)


def pareto(choices: Sequence[Choice], copies: int = 1) -> list[Choice]:
    """Those that no other beats in both memory and cost, memory rising."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one.memory(copies), one.cost)):
        if not kept or choice.cost < kept[-1].cost:
            kept.append(choice)
    return kept


def hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull of (memory, cost): what mixing choices can reach.

    Example:
      >>> hull([(0, 910), (2, 809), (4, 709), (18, 9), (30, 0)])
      [(0, 910), (2, 809), (18, 9), (30, 0)]
    """
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while len(kept) > 1:
            (x0, y0), (x1, y1) = kept[-2:]
            if (y1 - y0) * (x - x1) < (y - y1) * (x1 - x0):
                break
            kept.pop()
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


@dataclass(frozen=True)
class Mix:
    """Choices for a stack of equal layers: ``first`` in the first ones, then ``last``.

    Attributes:
      first, last: what a layer keeps.
      counts: how many layers of each; the sum is the depth.
      cost: seconds of all layers, in all iterations.
      memory: predicted device bytes of all layers, see `stack_memory`.
    """

    first: Choice
    last: Choice
    counts: tuple[int, int]
    cost: float
    memory: float

    @property
    def flops(self) -> int:
        return self.counts[0] * self.first.flops + self.counts[1] * self.last.flops

    @property
    def parts(self) -> list[tuple[Choice, int]]:
        """The choices in use and their layers, first layers first."""
        both = zip((self.first, self.last), self.counts, strict=True)
        return [(choice, count) for choice, count in both if count]


def stack_memory(first, last, n_first, n_last):
    """Peak bytes of a two-choice stack: as its last layers start their backward pass,
    or as its first ones do, when the last have freed theirs.

    Works on numbers and arrays alike; each argument ``(saved, working)`` in bytes.
    """
    late = n_first * first[0] + n_last * last[0] + (n_last > 0) * last[1]
    early = (n_first > 0) * (n_first * first[0] + first[1])
    return np.maximum(late, early)


def mix(
    choices: Sequence[Choice],
    num_layers: int,
    budget: float,
    *,
    host_budget: float = math.inf,
    iterations: int = 1,
) -> Mix:
    """The cheapest two-choice stack within a budget; tries every pair and count.

    Args:
      choices: the block's frontier.
      num_layers: depth of the stack.
      budget: device bytes for what `stack_memory` counts.
      host_budget: host bytes of all layers.
      iterations: how often the stack runs forward, as in a pipeline, before it first
        runs backward; all keep what they save.

    Raises:
      Infeasible: nothing fits.
    """
    saved = np.array([one.saved_bytes for one in choices], float)
    working = np.array([one.working_bytes for one in choices], float)
    hosted = np.array([one.offloaded_bytes for one in choices], float)
    cost = np.array([one.cost for one in choices], float)
    n_last = np.arange(num_layers + 1, dtype=float)
    n_first = num_layers - n_last
    first = (saved[:, None, None], working[:, None, None])
    last = (saved[None, :, None], working[None, :, None])
    memory = stack_memory(first, last, n_first, n_last)
    memory += (iterations - 1) * (n_first * first[0] + n_last * last[0])
    total = cost[:, None, None] * n_first + cost[None, :, None] * n_last
    on_host = hosted[:, None, None] * n_first + hosted[None, :, None] * n_last
    total, on_host = iterations * total, iterations * on_host
    one_run = np.isin(n_last, (0, num_layers))
    as_two = ~np.eye(len(choices), dtype=bool)[..., None]  # equal choices are one run
    possible = (one_run | as_two) & (on_host <= host_budget)
    fits = possible & (memory <= budget)
    if not fits.any():
        if not possible.any():
            raise Infeasible(
                f"a host budget of {format_bytes(math.floor(host_budget))}: "
                f"{format_bytes(math.ceil(on_host.min()))} are needed"
            )
        raise Infeasible(
            f"a budget of {format_bytes(math.floor(budget))} for {num_layers} layers: "
            f"{format_bytes(math.ceil(memory[possible].min()))} are needed"
        )
    # Of equal costs the one that needs least, and of those one choice, not two.
    ties = np.argwhere(fits & (total <= total[fits].min() * (1 + 1e-12)))
    i, j, last = min(
        ties.tolist(),
        key=lambda at: (memory[tuple(at)], at[2] not in (0, num_layers), at),
    )
    return Mix(
        first=choices[i if last < num_layers else j],
        last=choices[j if last else i],
        counts=(num_layers - last, last),
        cost=float(total[i, j, last]),
        memory=float(memory[i, j, last]),
    )


def stack_bound(
    operations: Sequence[Operation],
    num_layers: int,
    budget: float,
    *,
    link: Link | None = None,
    host_budget: float = math.inf,
) -> float:
    """Seconds that no plan of a stack can beat, whatever each of its layers keeps.

    As the last layer's backward pass starts, all layers hold what they saved and the
    last one its working bytes besides, which are no less than a block's least memory.
    So what the others save must fit beside that, and their costs are bounded by the
    linear relaxation, which is convex: differing layers cannot beat equal ones. What
    the last layer keeps may be free.

    Raises:
      Infeasible: the budget is below one block's least memory.
    """
    free = Program(operations).lower_bound(math.inf)
    if num_layers == 1:
        return Program(operations, 1, link, host_budget).lower_bound(budget)
    others = Program(operations, num_layers - 1, link, host_budget)
    return free + (num_layers - 1) * others.lower_bound(budget)
