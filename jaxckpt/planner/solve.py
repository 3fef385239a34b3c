"""The cheapest choice of what one block keeps, exactly.

A JAX checkpoint policy picks values that are kept; everything else that the backward
pass reads is run again, once, from those and the block's inputs. So the best choice
under a byte budget is a small 0-1 program, solved to proven optimality by HiGHS::

    minimise    sum_v cost_v r_v + keep_cost_v (z_v + o_v) + exposed transfer
    subject to  z_v + o_v + r_v >= 1        for each v that the backward pass reads
                z_u + o_u + r_u >= r_v      for each v that reads u
                copies * sum_v bytes_v z_v + working bytes <= budget
    z, o, r in {0, 1}: v is saved, offloaded, run again.

Working bytes are what one copy of the block holds while its backward pass runs beside
what is saved: the values read there that were run again or fetched from the host.

HiGHS works to tolerances, a budget does not: its answers are evaluated in integers, and
one that is over the budget is cut off.

No JAX here. Source: Jain et al. 2020 (Checkmate, arXiv 1910.02653), reduced to one
recomputation per value, which is what `jax.checkpoint` does.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, sparse

from jaxckpt.units import format_bytes

# HiGHS's tolerances are absolute, 1e-6: the dearest operation costs 1e7, and a name
# 0.1 on top, which decides ties.
_DEAREST, _TIE = 1e7, 0.1


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
      keep_cost: seconds to keep its result: to write it where it stays.
    """

    cost: float
    reads: tuple[int, ...] = ()
    name: str = ""
    nbytes: int = 0
    needed: bool = False
    flops: int = 0
    keep_cost: float = 0.0


@dataclass(frozen=True)
class Link:
    """The way to host memory.

    Attributes:
      bandwidth: bytes per second, each way.
      window: seconds of the forward pass (and at least as many of the backward pass)
        that one copy's transfers hide under.
      free: choose as if all transfers hid; what does not is still told.
    """

    bandwidth: float
    window: float
    free: bool = False


@dataclass(frozen=True)
class Choice:
    """What one block keeps, and what that costs. Everything is per copy of the block.

    Attributes:
      save, offload: names, sorted.
      cost: seconds of recomputation, of keeping, and of transfers that do not hide.
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
    """No choice fits the budget. One line.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxckpt import plan
      >>> x = jnp.ones(1000)
      >>> try:
      ...     plan(lambda x: jnp.tanh(x).sum(), x, budget=100, target="cpu")
      ... except Infeasible as error:
      ...     print(str(error)[:28])
      100 B per device do not hold
    """


def evaluate(
    operations: Sequence[Operation],
    save: Iterable[str],
    offload: Iterable[str] = (),
    link: Link | None = None,
) -> Choice:
    """What keeping these names costs: what JAX then runs again, exactly.

    A name whose values nothing asks for is left out; one in both lists is offloaded.

    Example:
      >>> dot = Operation(cost=2.0, nbytes=8, name="hidden", flops=64)
      >>> tanh = Operation(cost=0.5, reads=(0,), nbytes=8, needed=True)
      >>> evaluate([dot, tanh], save=["hidden"]).cost, evaluate([dot, tanh], []).cost
      (0.5, 2.5)
    """
    offload = frozenset(offload)
    save = frozenset(save) - offload
    asked = [operations[index] for index in _asked_for(operations, save | offload)]
    on_device = [one for one in asked if one.name in save]
    on_host = [one for one in asked if one.name in offload]
    again = [one for one in asked if one.name not in save | offload]
    offloaded = sum(one.nbytes for one in on_host)
    exposed = 0.0
    if link is not None:
        exposed = 2 * max(0.0, offloaded / link.bandwidth - link.window)
    return Choice(
        save=tuple(sorted({one.name for one in on_device})),
        offload=tuple(sorted({one.name for one in on_host})),
        cost=math.fsum(one.cost for one in again)
        + math.fsum(one.keep_cost for one in (*on_device, *on_host))
        + (0.0 if link is not None and link.free else exposed),
        flops=sum(one.flops for one in again),
        saved_bytes=sum(one.nbytes for one in on_device),
        offloaded_bytes=offloaded,
        working_bytes=offloaded + sum(one.nbytes for one in again if one.needed),
        exposed_seconds=exposed,
    )


def solve(
    operations: Sequence[Operation],
    budget: float,
    *,
    copies: int = 1,
    link: Link | None = None,
    host_budget: float = math.inf,
) -> Choice:
    """The cheapest choice whose memory stays within a budget.

    Of equally cheap ones it has the fewest names, then the fewest of them offloaded,
    then the least memory. A name is worth 1e-8 of the dearest operation's cost; costs
    closer than that are equal.

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
    return Program(operations, copies, link, host_budget).solve(budget)


def lower_bound(
    operations: Sequence[Operation],
    budget: float,
    *,
    copies: int = 1,
    link: Link | None = None,
    host_budget: float = math.inf,
) -> float:
    """Seconds per copy that no choice within the budget can beat.

    The linear relaxation's value, proven by its dual prices. At a fixed price of memory
    the rest is a min-cut, which is integral; so where no name is shared and nothing
    offloaded, the bound over all budgets is the lower convex hull of the exact
    frontier. For layers that may differ see `jaxckpt.planner.frontier.stack_bound`.

    Arguments and errors are those of `solve`.
    """
    return Program(operations, copies, link, host_budget).lower_bound(budget)


class Program:
    """The 0-1 program of one block, for any number of budgets.

    Memory is linear in what is kept. With nothing kept it is the bytes of all needed
    values, and no choice has less. Saving a value adds ``copies`` times its bytes and
    takes it from the working ones, if it was there.

    Columns: per operation r, and its result kept on the device, and on the host; per
    name whether it is saved, and offloaded; the exposed transfer. A name is saved for
    all operations that share it, but those that nothing asks for keep nothing.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        copies: int = 1,
        link: Link | None = None,
        host_budget: float = math.inf,
    ):
        self.operations, self.copies = operations, copies
        self.link, self.host_budget = link, host_budget
        live = _asked_for(operations)
        self.least = sum(operations[i].nbytes for i in live if operations[i].needed)
        columns = itertools.count()
        places = 2 if link else 1  # the device, the host
        run = {i: next(columns) for i in live}
        kept = {
            i: tuple(itertools.islice(columns, places))
            for i in live
            if operations[i].name
        }
        self.keep = {
            name: tuple(itertools.islice(columns, places))
            for name in sorted({operations[i].name for i in kept})
        }
        late = next(columns)

        rows: list[dict[int, float]] = []  # each row's sum is at most its limit
        limits: list[float] = []
        readers = {i: set[int]() for i in live}
        for i in live:
            for read in operations[i].reads:
                readers[read].add(i)
        for i in live:
            there = dict.fromkeys((run[i], *kept.get(i, ())), -1.0)
            if operations[i].needed:
                rows.append(there)
                limits.append(-1)
            for reader in readers[i] - {i}:
                rows.append(there | {run[reader]: 1})
                limits.append(0)
        for i, parts in kept.items():
            keep = self.keep[operations[i].name]
            for part, whole in zip(parts, keep, strict=True):
                rows.append({part: 1, whole: -1})
                limits.append(0)
            rows.append(dict.fromkeys((run[i], *keep), 1))
            limits.append(1)

        dearest = max((operations[i].cost for i in live), default=0)
        self.scale = dearest / _DEAREST or 1.0
        self.costs = np.zeros(late + 1)
        self.costs[: len(live)] = [operations[i].cost / self.scale for i in live]
        self.highest = np.ones(late + 1)
        self.device = np.zeros(late + 1, np.int64)  # what each column adds to `least`
        self.host = np.zeros(late + 1, np.int64)
        for i, (saved, *offloaded) in kept.items():
            one = operations[i]
            self.device[saved] = one.nbytes * (copies - one.needed)
            self.device[offloaded] = one.nbytes * (not one.needed)
            self.costs[[saved, *offloaded]] = one.keep_cost / self.scale
            self.host[offloaded] = one.nbytes * copies
        if link:
            transfer = self.host * (2 / copies / link.bandwidth / self.scale)
            on_host = np.flatnonzero(transfer).tolist()
            rows.append({column: transfer[column] for column in on_host} | {late: -1.0})
            limits.append(2 * link.window / self.scale)
            self.costs[late], self.highest[late] = not link.free, transfer.sum()
        # Names count; then those offloaded, then bytes, together less than one name.
        step = _TIE / (2 * len(self.keep) + 1)
        self.ties = self.device * (step / (self.device.sum() + 1))
        for saved, *offloaded in self.keep.values():
            self.ties[saved] = _TIE
            self.ties[offloaded] = _TIE + step
        self.integrality = np.ones(late + 1)
        self.integrality[late] = 0

        entries = [
            (value, row, column)
            for row, one in enumerate(rows)
            for column, value in one.items()
        ]
        values, at_rows, at_columns = (
            zip(*entries, strict=True) if entries else ((),) * 3
        )
        self.matrix = sparse.csr_array(
            (values, (at_rows, at_columns)), shape=(len(rows), late + 1)
        )
        self.limits = np.array(limits)

    def solve(self, budget: float) -> Choice:
        """`solve` for this budget."""
        self._check(budget)
        if not self.keep:
            return evaluate(self.operations, ())
        # Integer bytes leave half a step of room for tolerances.
        matrix, limits = self._within(budget, room=0.5)
        while True:
            found = optimize.milp(
                self.costs + self.ties,
                constraints=(matrix, -np.inf, limits),
                integrality=self.integrality,
                bounds=(0, self.highest),
                options={"mip_rel_gap": 0.0},
            )
            if found.x is None:
                raise RuntimeError(f"HiGHS gave up: {found.message}")
            best = self._choice(found.x > 0.5)
            if (
                best.memory(self.copies) <= budget
                and best.offloaded_bytes * self.copies <= self.host_budget
            ):
                return replace(best, gap=max(0.0, found.mip_gap or 0.0))
            # Not quite within the budget: not this one, then.
            cut = np.zeros_like(self.costs)
            for column in itertools.chain(*self.keep.values()):
                cut[column] = 1 if found.x[column] > 0.5 else -1
            matrix = sparse.vstack([matrix, sparse.csr_array(cut[None])], "csr")
            limits = np.append(limits, (cut > 0).sum() - 1)

    def lower_bound(self, budget: float) -> float:
        """`lower_bound` for this budget."""
        self._check(budget)
        if not self.keep:
            return evaluate(self.operations, ()).cost
        matrix, limits = self._within(budget)
        found = optimize.linprog(
            self.costs,
            A_ub=matrix,
            b_ub=limits,
            bounds=np.stack([np.zeros_like(self.highest), self.highest], 1),
        )
        # Any prices prove a bound, so tolerances cannot make it lie: every column at
        # its better end, and the limits paid for.
        prices = np.maximum(0, -found.ineqlin.marginals)
        reduced = self.costs + matrix.T @ prices
        bound = np.minimum(0, reduced) @ self.highest - prices @ limits
        return max(0.0, float(bound) * self.scale)

    def _check(self, budget: float) -> None:
        if budget < self.least:
            short = self.least - math.floor(budget)
            raise Infeasible(
                f"a budget of {format_bytes(math.floor(budget))} is "
                f"{format_bytes(short)} short: with nothing kept the block needs "
                f"{format_bytes(self.least)}"
            )

    def _within(self, budget: float, room: float | None = None):
        """Matrix and limits of all rows; with ``room``, of whole steps of bytes."""
        rows, limits = [self.matrix], list(self.limits)
        for row, limit in (
            (self.device, budget - self.least),
            (self.host, self.host_budget),
        ):
            if limit < row.sum():
                step, largest = int(np.gcd.reduce(row)), int(row.max())
                if room is not None:
                    limit = (limit // step + room) * step
                rows.append(sparse.csr_array(row[None] / largest))
                limits.append(limit / largest)
        return sparse.vstack(rows, "csr"), np.array(limits)

    def _choice(self, chosen: np.ndarray) -> Choice:
        places = ([], [])
        for name, columns in self.keep.items():
            for place, column in zip(places, columns, strict=False):
                if chosen[column]:
                    place.append(name)
        return evaluate(self.operations, *places, link=self.link)


def _asked_for(
    operations: Sequence[Operation], keep: Collection[str] = ()
) -> list[int]:
    """What the backward pass reads, and what that is made from up to values kept."""
    found: set[int] = set()
    pending = [index for index, one in enumerate(operations) if one.needed]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            if operations[index].name not in keep:
                pending.extend(operations[index].reads)
    return sorted(found)
