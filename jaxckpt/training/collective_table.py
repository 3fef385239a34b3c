"""The table of what devices send one another: bytes by policy, phase and kind.

Recomputation repeats collectives too. A value that is kept after one (``out_proj``
after its all-reduce, ``gathered_weights`` after the all-gather) spares it: the last
column is what a policy sends less than the reference, full remat where it is among
the rows. XLA may turn kinds into one another, so the kinds are those of the compiled
program.
"""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from jaxckpt.compiler.flops import PHASES
from jaxckpt.units import format_bytes

_FULL = "nothing_saveable"


def collective_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """Bytes that one device sends per step, as counted in the compiled programs.

    Args:
      rows: of `jaxckpt.training.reporting.compile_rows`, those that compiled.

    Returns:
      The table; None where no device sends anything, or what is sent is not known.
    """
    rows = [row for row in rows if row.get("collective_kinds")]
    kinds = sorted({kind for row in rows for kind in _totals(row)})
    if not kinds:
        return None
    reference = next((row for row in rows if row["applied"].endswith(_FULL)), None)
    table = Table(
        title="sent by one device in a step, as counted in the compiled program",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("policy", overflow="fold", min_width=16)
    table.add_column("kind", no_wrap=True)
    for phase in PHASES:
        table.add_column(phase, justify="right", no_wrap=True)
    table.add_column("spared", justify="right", no_wrap=True)
    for row in rows:
        sent = row["collective_kinds"]
        used = [kind for kind in kinds if any(kind in sent[phase] for phase in PHASES)]
        for number, kind in enumerate(used):
            cells = [_shown(sent[phase].get(kind, 0)) for phase in PHASES]
            policy = "" if number else row["policy"]
            table.add_row(policy, kind, *cells, "")
        sums = [_shown(sum(sent[phase].values())) for phase in PHASES]
        table.add_row("", "all", *sums, _spared(row, reference), end_section=True)
    return table


def total_sent(row: dict[str, Any]) -> int:
    """Bytes that one device sends in a step of a row, in all phases."""
    return sum(_totals(row).values())


def _totals(row: dict[str, Any]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for kinds in row["collective_kinds"].values():
        for kind, nbytes in kinds.items():
            totals[kind] = totals.get(kind, 0) + nbytes
    return totals


def _spared(row: dict[str, Any], reference: dict[str, Any] | None) -> str:
    if reference is None or row is reference:
        return ""
    spared = total_sent(reference) - total_sent(row)
    return format_bytes(spared) if spared >= 0 else f"-{format_bytes(-spared)}"


def _shown(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else ""
