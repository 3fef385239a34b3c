"""A report for people: one table, the verdict, what is at the peak, and a picture."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxckpt.compiler.targets import Target
from jaxckpt.models.presets import ConfigError
from jaxckpt.units import format_bytes

_PEAK_SHOWN = 8


def print_rows(report: dict[str, Any], target: Target, console: Console) -> None:
    """Prints a report; failed rows keep their place with the reason."""
    rows = report["rows"]
    limit = target.memory_limit
    mesh = f", mesh {report['mesh']}" if report["mesh"] else ""
    console.print(
        f"\n{report['model']} on {report['target']}{mesh}: batch "
        f"{report['batch_size']}, sequence {report['sequence_length']}",
        style="bold",
        highlight=False,
    )
    for attention in sorted({r["attention"] for r in rows if r.get("attention")}):
        console.print(attention, highlight=False)
    table = Table(title="GiB per device, compiled", title_justify="left")
    table.add_column("policy", overflow="fold")
    for column in (
        "total",
        "temp",
        "host",
        "saved",
        "recompute",
        "collectives\nfwd/re/bwd",
        "step ms\nestimated",
        "bound",
        "fits",
    ):
        table.add_column(column, justify="right")
    if any("max_batch" in row for row in rows):
        table.add_column("max\nbatch", justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["policy"], "failed")
        else:
            table.add_row(row["policy"], *_cells(row, limit))
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['policy']} failed: {row['error']}", style="red")
    seconds = [row["compile_seconds"] for row in rows if "error" not in row]
    if seconds:
        console.print(f"compiled in {sum(seconds):.0f} s of one process each")
    for row in rows:
        for finding in row.get("lint", []):
            console.print(f"{row['policy']}: {finding}", style="yellow")
    _print_peak(rows, console)
    for line in report["advice"]:
        console.print(line, style="bold", highlight=False)


def _cells(row: dict[str, Any], limit: int | None) -> list[str]:
    moved = row["collective_bytes"]
    fits = "unknown"
    if limit and row["device_total_bytes"]:
        over = row["device_total_bytes"] - limit
        fits = "yes" if over <= 0 else f"no: +{_gib(over)}"
    seconds = row["estimated_step_seconds"]
    cells = [
        _gib(row["device_total_bytes"]),
        _gib(row["temp_bytes"]),
        _gib(row["host_temp_bytes"]),
        "?" if row["activation_saving"] is None else f"{row['activation_saving']:.1%}",
        f"{row['recompute_fraction']:.1%}",
        "/".join(_gib(moved[phase]) for phase in ("forward", "recompute", "backward")),
        "?" if seconds is None else f"{1000 * seconds:.0f}",
        row["bound"] or "?",
        fits,
    ]
    return cells + ([str(row["max_batch"])] if "max_batch" in row else [])


def _gib(value: int | None) -> str:
    return "?" if value is None else f"{value / 2**30:.2f}"


def _print_peak(rows: list[dict[str, Any]], console: Console) -> None:
    """What is live at the worst moment of the largest program."""
    good = [row for row in rows if row.get("peak")]
    if not good:
        return
    row = max(good, key=lambda row: row["device_total_bytes"] or 0)
    table = Table(title=f"at the peak of {row['policy']}", title_justify="left")
    for column in ("bytes", "what", "phase", "source"):
        table.add_column(column, overflow="fold")
    for value in row["peak"][:_PEAK_SHOWN]:
        source = "/".join(value["source"].split("/")[-2:])
        table.add_row(
            format_bytes(value["bytes"]), value["what"], value["phase"], source
        )
    console.print(table)


def draw_frontier(report: dict[str, Any], target: Target, path: Path) -> None:
    """Draws device memory against recomputation, with the device's limit."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs pip install 'jaxckpt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    rows = [row for row in report["rows"] if "error" not in row]
    for row in rows:
        x = 100 * row["recompute_fraction"]
        y = row["device_total_bytes"] / 2**30
        marker = "o" if row["fits"] in (True, None) else "x"
        axes.plot(x, y, marker, color="#0072B2", markersize=8)
        axes.annotate(
            row["policy"], (x, y), xytext=(6, 6), textcoords="offset points", size=8
        )
    if target.memory_limit:
        limit = target.memory_limit / 2**30
        axes.axhline(limit, color="#D55E00", linestyle="--")
        axes.annotate(
            f"{target.kind.name if target.kind else ''}: {limit:.1f} GiB",
            (0, limit),
            xytext=(4, 4),
            textcoords="offset points",
            color="#D55E00",
            size=8,
        )
    axes.set_xlabel("recomputed matmul FLOPs, % of the step without remat (counted)")
    axes.set_ylabel("device memory, GiB per device (compiled)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.set_title(f"{report['model']} on {report['target']}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
