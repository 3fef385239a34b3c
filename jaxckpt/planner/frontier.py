"""Cost against memory: every choice worth having for one block, and for a stack of it.

`frontier` sweeps the budget of one block. `mix` gives each of L equal layers one of
those choices. With one memory row at most two differ (a basic solution of the linear
program has two), so a stack runs as two scans: first the layers that recompute more,
then those that keep more. In that order the layers that keep least run their backward
pass when the others have freed what they kept.

No JAX here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt.planner.solve import Choice, Infeasible, Link, Operation, evaluate, solve


def frontier(
    operations: Sequence[Operation],
    *,
    copies: int = 1,
    budgets: int = 64,
    link: Link | None = None,
    host_budget: float = float("inf"),
) -> list[Choice]:
    """The Pareto-best choices of one block over a range of budgets, cheapest last.

    Args:
      operations: the block.
      copies: how many layers keep their values at once.
      budgets: how many budgets to try, evenly from the least memory to all of it.
      link, host_budget: as for `jaxckpt.planner.solve.solve`.

    Returns:
      Choices with memory rising and cost falling, each optimal for its own memory.
    """
    largest = solve(operations, float("inf"), copies=copies)
    smallest = _smallest(operations, copies, link, host_budget)
    found = {largest.memory(copies): largest, smallest.memory(copies): smallest}
    low, high = smallest.memory(copies), largest.memory(copies)
    needed = high
    for budget in np.linspace(high, low, budgets)[1:-1]:
        if budget >= needed:
            continue  # the last optimum fits here too
        best = solve(
            operations, budget, copies=copies, link=link, host_budget=host_budget
        )
        needed = best.memory(copies)
        found.setdefault(needed, best)
        if best.cost < found[needed].cost:
            found[needed] = best
    if link:
        free = solve(operations, float("inf"), copies=copies, link=link)
        found.setdefault(free.memory(copies), free)
    return pareto(list(found.values()), copies)


def _smallest(operations, copies, link, host_budget) -> Choice:
    """The choice of least memory (and of those the cheapest)."""
    low, high = 0, evaluate(operations, ()).memory(copies)
    best = solve(operations, high, copies=copies, link=link, host_budget=host_budget)
    high = best.memory(copies)
    while high - low > max(1, high // 4096):
        middle = (low + high) // 2
        try:
            best = solve(
                operations, middle, copies=copies, link=link, host_budget=host_budget
            )
            high = best.memory(copies)
        except Infeasible:
            low = middle
    return best


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
      cost: seconds of all layers.
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


def stack_memory(first, last, n_first, n_last, gradient_bytes=0.0):
    """Peak bytes of a two-choice stack: as its last layers start their backward pass,
    or as its first ones do, when the last have freed theirs.

    Works on numbers and arrays alike; each argument ``(saved, working)`` in bytes.
    """
    late = n_first * first[0] + n_last * last[0] + (n_last > 0) * last[1]
    early = (n_first > 0) * (n_first * first[0] + first[1])
    return np.maximum(
        late + n_last * gradient_bytes, early + (n_first + n_last) * gradient_bytes
    )


def mix(
    choices: Sequence[Choice],
    num_layers: int,
    budget: float,
    *,
    gradient_bytes: float = 0.0,
    host_budget: float = float("inf"),
) -> Mix:
    """The cheapest two-choice stack within a budget; tries every pair and count.

    Args:
      choices: the block's frontier.
      num_layers: depth of the stack.
      budget: device bytes for what `stack_memory` counts.
      gradient_bytes: gradient of one layer's weights, on one device.
      host_budget: host bytes of all layers.

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
    memory = stack_memory(first, last, n_first, n_last, gradient_bytes)
    total = cost[:, None, None] * n_first + cost[None, :, None] * n_last
    on_host = hosted[:, None, None] * n_first + hosted[None, :, None] * n_last
    fits = (memory <= budget) & (on_host <= host_budget)
    if not fits.any():
        least = memory.min()
        raise Infeasible(f"a budget of {budget:.0f} bytes; {least:.0f} are needed")
    total = np.where(fits, total, np.inf)
    # Of equal costs the one that needs least, and of those one choice, not two.
    ties = total <= total.min() * (1 + 1e-12)
    memory_of_ties = np.where(ties, memory, np.inf)
    best = np.argwhere(memory_of_ties <= memory_of_ties.min())
    at = min(map(tuple, best), key=lambda ijk: (ijk[2] not in (0, num_layers), ijk))
    i, j, k = (int(x) for x in at)
    return Mix(
        first=choices[i],
        last=choices[j],
        counts=(num_layers - k, k),
        cost=float(total[i, j, k]),
        memory=float(memory[i, j, k]),
    )
