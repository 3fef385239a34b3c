"""A report for people: one table, the verdict, what is at the peak, and a picture."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxckpt.pictures import COLORS, LIMIT_COLOR, byte_unit, new_figure, save, wrap
from jaxckpt.receipt import host_bytes
from jaxckpt.training.collective_table import collective_table
from jaxckpt.units import format_bytes, format_milliseconds

_PEAK_SHOWN = 8
_WIDE = 120  # columns from which each number has a column of its own
_TIGHT: dict[str, Any] = {"padding": (0, 1, 0, 0), "pad_edge": False}


def print_rows(report: dict[str, Any], console: Console) -> None:
    """Prints a report; failed rows keep their place with the reason."""
    rows = report["rows"]
    good = [row for row in rows if "error" not in row]
    head = f"\n{report['model']} on {report['target']}"
    if report["mesh"]:
        head += f", mesh {report['mesh']}"
    if report["batch_size"]:
        head += f", batch {report['batch_size']}, sequence {report['sequence_length']}"
    console.print(head, style="bold")
    for attention in sorted({row["attention"] for row in good if row["attention"]}):
        console.print(attention)
    console.print(_table(rows, report["memory_limit"], console.width >= _WIDE))
    if any("max_batch" in row for row in rows):
        console.print(
            "max batch: the largest tried that fits, if memory grows with the batch"
        )
    for note in dict.fromkeys(note for row in good for note in row.get("notes", [])):
        console.print(note)
    for row in rows:
        if "error" in row:
            console.print(f"{row['policy']} failed: {row['error']}", style="red")
    for row in good:
        for finding in row.get("lint", []):
            console.print(f"{row['policy']}: {finding}", style="yellow")
    if collectives := collective_table(good):
        console.print(collectives)
    _print_peak(good, console)
    for line in report["advice"]:
        console.print(line, style="bold")


def _table(rows: list[dict[str, Any]], limit: int | None, wide: bool) -> Table:
    totals = [row.get("device_total_bytes") or 0 for row in rows]
    unit, size = ("GiB", 2**30) if max(totals) >= 2**30 else ("MiB", 2**20)
    title = (
        f"{unit} per device as compiled; recomputed FLOPs of one device as counted; "
        "collectives as counted: forward/recompute/backward; step: estimated"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, **_TIGHT)
    table.add_column("policy", overflow="fold", min_width=16)
    columns = ["total", "temp", "host", "saved", "recom-\npute", "collec-\ntives"]
    columns += ["step", "bound by"] if wide else ["step"]
    columns.append("fits")
    if any("max_batch" in row for row in rows):
        columns.append("max\nbatch")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if "error" in row:
            table.add_row(row["policy"], "failed")
        else:
            table.add_row(row["policy"], *_cells(row, limit, size, wide))
    return table


def _cells(row: dict[str, Any], limit: int | None, size: int, wide: bool) -> list[str]:
    def shown(value: int | None) -> str:
        return "?" if value is None else f"{value / size:.2f}"

    fits = "?"
    if limit and row["device_total_bytes"]:
        over = row["device_total_bytes"] - limit
        fits = "yes" if over <= 0 else f"+{shown(over)}"
    saving, seconds = row["activation_saving"], row["estimated_step_seconds"]
    moved = [row["collective_bytes"][p] for p in ("forward", "recompute", "backward")]
    sent = ("/" if wide else "\n").join(map(shown, moved)) if any(moved) else "0"
    time = [format_milliseconds(seconds) if seconds else "?", row["bound"] or "?"]
    return [
        shown(row["device_total_bytes"]),
        shown(row["temp_bytes"]),
        shown(host_bytes(row)),
        "?" if saving is None else f"{saving:.1%}",
        f"{row['recompute_fraction']:.1%}",
        "?" if None in moved else sent,
        *(time if wide else ["\n".join(time)]),
        fits,
        *([str(row["max_batch"])] if "max_batch" in row else []),
    ]


def _print_peak(rows: list[dict[str, Any]], console: Console) -> None:
    """What is live at the worst moment of the largest program."""
    if not rows:
        return
    row = max(rows, key=lambda row: row["device_total_bytes"] or 0)
    if not row["peak"]:
        return
    table = Table(
        title=f"largest at the peak of {row['policy']}, as compiled",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        **_TIGHT,
    )
    table.add_column("bytes", justify="right", no_wrap=True)
    for column in ("what", "phase", "source"):
        table.add_column(column, overflow="fold")
    for value in row["peak"][:_PEAK_SHOWN]:
        source = "/".join(value["source"].split("/")[-2:])
        table.add_row(
            format_bytes(value["bytes"]), value["what"], value["phase"], source
        )
    console.print(table)


def draw_frontier(report: dict[str, Any], path: Path) -> None:
    """Draws recomputation against device memory, with the device's limit."""
    rows = [row for row in report["rows"] if row.get("device_total_bytes")]
    names = [wrap(row["policy"], 72) for row in rows]
    totals = [row["device_total_bytes"] for row in rows]
    size, unit = byte_unit(max(*totals, report["memory_limit"] or 0))
    key_height = 0.25 * sum(name.count("\n") + 1 for name in names)
    figure = new_figure(8, 4.6 + key_height)
    axes = figure.subplots()
    for number, (row, name) in enumerate(zip(rows, names, strict=True), 1):
        x, y = row["device_total_bytes"] / size, 100 * row["recompute_fraction"]
        color = COLORS[(number - 1) % len(COLORS)]
        marker = "X" if row["fits"] is False else "o"
        axes.plot(x, y, marker, color=color, markersize=9, label=f"{number}  {name}")
        # Numbers of points that may be close: above and below in turn.
        offset, align = ((0, 7), "bottom") if number % 2 else ((0, -7), "top")
        axes.annotate(
            str(number), (x, y), offset, textcoords="offset points",
            ha="center", va=align, size=9, color=color,
        )  # fmt: skip
    if limit := report["memory_limit"]:
        axes.axvline(
            limit / size, color=LIMIT_COLOR, linestyle="--",
            label=f"limit of {report['device']}: {format_bytes(limit)}",
        )  # fmt: skip
    axes.set_xlabel(f"device memory, {unit} (compiled)")
    axes.set_ylabel("recomputed matmul FLOPs,\n% of the step without remat (counted)")
    axes.margins(x=0.1, y=0.12)
    axes.set_xlim(left=0)
    axes.set_title(f"{report['model']} on {report['target']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    save(figure, path)
