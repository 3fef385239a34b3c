"""Checkmate's full program: any value may be recomputed any number of times.

Jain et al. 2020 (arXiv 1910.02653), equations 1 to 8, unit costs and bytes, frontier
advancing: in stage t node t runs for the first time. R[t, i]: node i runs in stage t;
S[t, i]: it is kept from stage t-1; F[t, i, k]: it is freed after node k ran in stage t;
U[t, k]: bytes in use as node k has run.
"""

import itertools

import numpy as np
from scipy import optimize, sparse


def linear_graph(num_layers: int) -> list[tuple[int, ...]]:
    """What each node reads: a chain of forward and backward nodes, 2 n + 1 of them,
    of which backward node 2 n - i also reads forward node i.
    """
    last = 2 * num_layers
    return [
        tuple({i for i in (node - 1, last - node) if 0 <= i < node})
        for node in range(last + 1)
    ]


def checkmate(reads: list[tuple[int, ...]], budget: int, most_runs: int = 0) -> int:
    """The least number of runs with at most ``budget`` values held at once.

    With ``most_runs`` no node runs more often than that.
    """
    count = itertools.count()
    nodes = range(len(reads))
    last = len(reads) - 1
    R = {(t, i): next(count) for t in nodes for i in range(t + 1)}
    S = {(t, i): next(count) for t in nodes for i in range(t)}
    F = {(t, i, k): next(count) for t, k in R for i in (*reads[k], k)}
    U = {(t, k): next(count) for t, k in R}
    rows, lower, upper = [], [], []

    def between(low, row, high):
        rows.append(row)
        lower.append(low)
        upper.append(high)

    for t, j in R:
        for i in reads[j]:
            row = {R[t, j]: 1, R[t, i]: -1}
            between(-np.inf, row | ({S[t, i]: -1} if i < t else {}), 0)
    for t, i in S:
        row = {S[t, i]: 1, R[t - 1, i]: -1}
        between(-np.inf, row | ({S[t - 1, i]: -1} if i < t - 1 else {}), 0)
    for t in nodes:
        between(1, {R[t, t]: 1}, 1)
        start = {U[t, 0]: 1, R[t, 0]: -1} | {S[t, i]: -1 for i in range(t)}
        between(0, start, 0)
        for k in range(t):
            row = {U[t, k + 1]: 1, U[t, k]: -1, R[t, k + 1]: -1}
            between(0, row | {F[t, i, k]: 1 for i in (*reads[k], k)}, 0)
    for (t, i, k), freed in F.items():
        users = [j for j in range(k + 1, t + 1) if i in reads[j]]
        row = {R[t, k]: -1} | {R[t, j]: 1 for j in users}
        if t < last:
            row[S[t + 1, i]] = 1
        most = len(users) + 2  # hazards are 1 + row
        between(0, row | {freed: 1}, np.inf)
        between(-np.inf, row | {freed: most}, most - 1)
    if most_runs:
        for i in nodes:
            between(1, {R[t, i]: 1 for t in range(i, last + 1)}, most_runs)

    width = next(count)
    entries = [(v, r, c) for r, row in enumerate(rows) for c, v in row.items()]
    values, at_rows, at_columns = zip(*entries, strict=True)
    matrix = sparse.csr_array((values, (at_rows, at_columns)), (len(rows), width))
    cost, highest, integral = np.zeros(width), np.ones(width), np.ones(width)
    cost[list(R.values())] = 1
    highest[list(U.values())] = budget
    integral[list(U.values())] = 0
    found = optimize.milp(
        cost,
        constraints=optimize.LinearConstraint(matrix, lower, upper),
        bounds=optimize.Bounds(0, highest),
        integrality=integral,
        # The cost is an integer: a bound above optimum - 1 proves it.
        options={"mip_rel_gap": 0.9 / 60},
    )
    assert found.x is not None, found.message
    return round(found.fun)
