"""The cheapest choice of what one block keeps, exactly.

A JAX checkpoint policy picks values that are kept; everything else that the backward
pass reads is run again, once, from those and the block's inputs. So the best choice
under a byte budget is a small 0-1 program, solved to proven optimality by HiGHS::

    minimise    sum_v cost_v r_v + exposed transfer
    subject to  z_v + o_v + r_v >= 1        for each v that the backward pass reads
                z_u + o_u + r_u >= r_v      for each v that reads u
                copies * sum_v bytes_v z_v + working bytes <= budget
    z, o, r in {0, 1}: v is saved, offloaded, run again.

Working bytes are what one copy of the block holds while its backward pass runs beside
what is saved: the values read there that were run again or fetched from the host.

No JAX here. Source: Jain et al. 2020 (Checkmate, arXiv 1910.02653), reduced to one
recomputation per value, which is what `jax.checkpoint` does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse


@dataclass(frozen=True)
class Operation:
    """One operation of a block: an equation, or the naming of a value.

    Attributes:
      cost: seconds to run it once more, on one device.
      reads: the operations whose results it reads, by index; a loop's carry reads
        a later one. What it reads of the block's inputs is always there.
      name: the name under which a policy can keep its result; "" for none. Several
        operations may share one.
      nbytes: bytes of its result on one device.
      needed: whether the backward pass reads its result.
      flops: matmul FLOPs of one run, over all devices.
    """

    cost: float
    reads: tuple[int, ...] = ()
    name: str = ""
    nbytes: int = 0
    needed: bool = False
    flops: int = 0


@dataclass(frozen=True)
class Link:
    """The way to host memory.

    Attributes:
      bandwidth: bytes per second, each way.
      window: seconds of the forward pass (and at least as many of the backward pass)
        that one copy's transfers hide under.
    """

    bandwidth: float
    window: float


@dataclass(frozen=True)
class Choice:
    """What one block keeps, and what that costs. Everything is per copy of the block.

    Attributes:
      save, offload: names, sorted.
      cost: seconds of recomputation and of transfers that do not hide.
      flops: matmul FLOPs that run again, over all devices.
      saved_bytes: kept on the device until the backward pass.
      offloaded_bytes: kept in host memory.
      working_bytes: values recomputed or fetched that the backward pass reads.
      exposed_seconds: the part of ``cost`` that is transfer.
      gap: the solver's proven relative distance from the optimum.
    """

    save: tuple[str, ...]
    offload: tuple[str, ...]
    cost: float
    flops: int
    saved_bytes: int
    offloaded_bytes: int
    working_bytes: int
    exposed_seconds: float = 0.0
    gap: float = 0.0

    def memory(self, copies: int = 1) -> int:
        """Device bytes of ``copies`` of the block, one of them running backward."""
        return copies * self.saved_bytes + self.working_bytes


class Infeasible(ValueError):
    """No choice fits the budget."""


def evaluate(
    operations: Sequence[Operation],
    save: Iterable[str],
    offload: Iterable[str] = (),
    link: Link | None = None,
    gap: float = 0.0,
) -> Choice:
    """What keeping these names costs: what JAX then runs again, exactly.

    Example:
      >>> dot = Operation(cost=2.0, nbytes=8, name="hidden", flops=64)
      >>> tanh = Operation(cost=0.5, reads=(0,), nbytes=8, needed=True)
      >>> evaluate([dot, tanh], save=["hidden"]).cost, evaluate([dot, tanh], []).cost
      (0.5, 2.5)
    """
    save, offload = frozenset(save), frozenset(offload)
    kept: set[int] = set()
    again: set[int] = set()
    pending = [index for index, one in enumerate(operations) if one.needed]
    while pending:
        index = pending.pop()
        if index in kept or index in again:
            continue
        if operations[index].name in save or operations[index].name in offload:
            kept.add(index)
        else:
            again.add(index)
            pending.extend(operations[index].reads)
    used = {operations[index].name for index in kept}
    on_host = [index for index in kept if operations[index].name in offload]
    offloaded = sum(operations[index].nbytes for index in on_host)
    exposed = 0.0
    if link is not None and offloaded:
        exposed = 2 * max(0.0, offloaded / link.bandwidth - link.window)
    return Choice(
        save=tuple(sorted(save & used)),
        offload=tuple(sorted(offload & used)),
        cost=sum(operations[index].cost for index in again) + exposed,
        flops=sum(operations[index].flops for index in again),
        saved_bytes=sum(operations[index].nbytes for index in kept) - offloaded,
        offloaded_bytes=offloaded,
        working_bytes=offloaded
        + sum(operations[index].nbytes for index in again if operations[index].needed),
        exposed_seconds=exposed,
        gap=gap,
    )


def solve(
    operations: Sequence[Operation],
    budget: float,
    *,
    copies: int = 1,
    link: Link | None = None,
    host_budget: float = float("inf"),
) -> Choice:
    """The cheapest choice whose memory stays within a budget; fewest values on a tie.

    Args:
      operations: the block, as `jaxckpt.planner.graph.block_operations` makes it.
      budget: device bytes for ``copies`` blocks' saved values and one block's
        working bytes.
      copies: how many layers keep their values at once.
      link: where given, values may move to host memory.
      host_budget: host bytes for all copies.

    Raises:
      Infeasible: even keeping nothing needs more.
    """
    model = _Model(operations, budget, copies, link, host_budget)
    first = model.optimum(model.costs)
    if first is None:
        least = min(
            evaluate(operations, ()).memory(copies),
            evaluate(operations, model.names).memory(copies),
        )
        raise Infeasible(f"a budget of {budget:.0f} bytes; {least} are needed")
    # Among the cheapest, the fewest names, and of those the fewest bytes.
    second = model.optimum(model.sizes, at_most=first.fun) or first
    names = model.chosen(second.x)
    gap = getattr(first, "mip_gap", 0.0) or 0.0
    best = evaluate(operations, *names, link=link, gap=float(gap))
    rough = evaluate(operations, *model.chosen(first.x), link=link, gap=float(gap))
    return best if best.cost <= rough.cost * (1 + 1e-9) else rough


class _Model:
    """The 0-1 program. Columns: r per operation, z per name, o per name, exposed."""

    def __init__(self, operations, budget, copies, link, host_budget):
        live = _reachable(operations)
        self.names = sorted(
            {operations[index].name for index in live if operations[index].name}
        )
        row_of = {index: place for place, index in enumerate(live)}
        count, names = len(live), {name: i for i, name in enumerate(self.names)}
        self.saves = slice(count, count + len(names))
        self.offloads = slice(self.saves.stop, self.saves.stop + len(names))
        width = self.offloads.stop + 1
        scale = max((operations[index].cost for index in live), default=0.0) or 1.0
        self.costs = np.zeros(width)
        self.costs[:count] = [operations[index].cost / scale for index in live]
        self.costs[-1] = 2 / scale if link else 0.0

        entries: list[tuple[int, int, float]] = []
        lower: list[float] = []
        upper: list[float] = []

        def add(coefficients: dict[int, float], low: float, high: float) -> None:
            entries.extend(
                (len(lower), at, value) for at, value in coefficients.items()
            )
            lower.append(low)
            upper.append(high)

        def available(index: int) -> dict[int, float]:
            found = {row_of[index]: 1.0}
            name = operations[index].name
            if name:
                found[self.saves.start + names[name]] = 1.0
                found[self.offloads.start + names[name]] = 1.0
            return found

        for index in live:
            if operations[index].needed:
                add(available(index), 1, np.inf)
            for read in set(operations[index].reads):
                if read != index:
                    row = available(read)
                    row[row_of[index]] = row.get(row_of[index], 0.0) - 1.0
                    add(row, 0, np.inf)
        for name in range(len(names)):
            add({self.saves.start + name: 1, self.offloads.start + name: 1}, 0, 1)

        size_of = dict.fromkeys(self.names, 0)
        needed_of = dict.fromkeys(self.names, 0)
        for index in live:
            if operations[index].name:
                size_of[operations[index].name] += operations[index].nbytes
                if operations[index].needed:
                    needed_of[operations[index].name] += operations[index].nbytes
        unit = max(1, *size_of.values()) if size_of else 1
        memory: dict[int, float] = {}
        for index in live:
            if operations[index].needed and operations[index].nbytes:
                memory[row_of[index]] = operations[index].nbytes / unit
        for name, at in names.items():
            memory[self.saves.start + at] = copies * size_of[name] / unit
            memory[self.offloads.start + at] = size_of[name] / unit
        add(memory, -np.inf, budget / unit)
        host = {
            self.offloads.start + at: size_of[name] / unit for name, at in names.items()
        }
        add(host, -np.inf, host_budget / copies / unit)
        if link:  # exposed >= bytes / bandwidth - window
            late = {at: -value * unit / link.bandwidth for at, value in host.items()}
            add(late | {width - 1: 1.0}, -link.window, np.inf)

        # A name costs 1 and its bytes break what ties then remain.
        total = 2.0 * (sum(size_of.values()) or 1)
        self.sizes = np.zeros(width)
        for name, at in names.items():
            self.sizes[self.saves.start + at] = 1 + size_of[name] / total
            self.sizes[self.offloads.start + at] = 1 + size_of[name] / total
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        self.matrix = sparse.csc_array(
            (values, (rows, columns)), shape=(len(lower), width)
        )
        self.lower, self.upper = np.array(lower), np.array(upper)
        # Where z and o are integers, the least r that satisfies the rows is, too.
        self.integrality = np.zeros(width)
        self.integrality[count : self.offloads.stop] = 1
        highest = np.ones(width)
        highest[-1] = np.inf
        if link is None:
            highest[self.offloads] = 0
        self.bounds = optimize.Bounds(np.zeros(width), highest)

    def optimum(self, objective: np.ndarray, at_most: float | None = None):
        constraints = [optimize.LinearConstraint(self.matrix, self.lower, self.upper)]
        if at_most is not None:
            most = at_most + 1e-9 * max(1.0, abs(at_most))
            constraints.append(
                optimize.LinearConstraint(self.costs[None], -np.inf, most)
            )
        found = optimize.milp(
            objective,
            constraints=constraints,
            integrality=self.integrality,
            bounds=self.bounds,
            options={"mip_rel_gap": 0.0},
        )
        return found if found.x is not None else None

    def chosen(self, values: np.ndarray) -> tuple[list[str], list[str]]:
        return tuple(
            [name for name, x in zip(self.names, values[part], strict=True) if x > 0.5]
            for part in (self.saves, self.offloads)
        )


def _reachable(operations: Sequence[Operation]) -> list[int]:
    """Operations that the backward pass reads, or that those read, in order."""
    found: set[int] = set()
    pending = [index for index, one in enumerate(operations) if one.needed]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            pending.extend(operations[index].reads)
    return sorted(found)
