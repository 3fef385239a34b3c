"""A benchmark for people: one table, what it does not know, and a picture."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxckpt.pictures import COLORS, LIMIT_COLOR, byte_unit, new_figure, save, wrap
from jaxckpt.training.report_table import _TIGHT
from jaxckpt.units import format_bytes

_UNKNOWN = "unknown"


def print_bench(result: dict[str, Any], console: Console) -> None:
    """Prints a benchmark; failed rows keep their place with the reason."""
    rows = result["rows"]
    good = [row for row in rows if "error" not in row]
    if good:
        devices = f"{result['num_devices']} x {result['device']}"
        mesh = f", mesh {result['mesh']}" if result["mesh"] else ""
        console.print(
            f"\n{result['model']} on {devices}{mesh}, batch {result['batch_size']}, "
            f"sequence {result['sequence_length']}",
            style="bold",
        )
        console.print(result["attention"])
        console.print(
            f"{result['steps']} timed steps of each policy after "
            f"{result['warmup_steps']} to warm up, {result['order']}"
        )
    console.print(
        f"{_unit(rows)[1]} per device: total as compiled, in use as measured; "
        "recomputed FLOPs: counted; times: measured"
        + ("; predicted: estimated" if result["peak_flops"] else "")
    )
    console.print(_table(rows, bool(result["peak_flops"])))
    for row in rows:
        if "error" in row:
            console.print(f"{row['policy']} failed: {row['error']}", style="red")
    for row in good:
        asked = row["policy"]
        if row["applied"] != asked and not row["applied"].endswith(f"x{asked}"):
            console.print(f"{row['policy']} was applied as {row['applied']}")
    for line in _remarks(result, good):
        console.print(line)


def _table(rows: list[dict[str, Any]], has_peak: bool) -> Table:
    size, _ = _unit(rows)
    table = Table(box=box.SIMPLE_HEAD, **_TIGHT)
    table.add_column("policy", overflow="fold", min_width=16)
    columns = [
        "step ms\nquartiles",
        "predic-\nted ms",
        "tokens/s\n",
        "overhead\nrecomp.",
        "total\nin use",
        *(["MFU\nHFU"] if has_peak else []),
        "com-\npile s",
    ]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = ["failed"] if "error" in row else _cells(row, size, has_peak)
        table.add_row(row["policy"], *cells)
    return table


def _cells(row: dict[str, Any], size: int, has_peak: bool) -> list[str]:
    step, predicted = row["step_ms"], row["predicted_step_ms"]
    memory = [row["device_total_bytes"], row["peak_bytes_in_use"]]
    shown = [_UNKNOWN if value is None else f"{value / size:.2f}" for value in memory]
    return [
        f"{_digits(step['median'])}\n{'-'.join(map(_digits, step['quartiles']))}",
        _UNKNOWN if predicted is None else _digits(predicted),
        f"{row['tokens_per_second']:,.0f}",
        f"{row['overhead']:+.1%}\n{row['recompute_fraction']:.1%}",
        "\n".join(shown),
        *([f"{row['mfu']:.1%}\n{row['hfu']:.1%}"] if has_peak else []),
        f"{row['compile_seconds']:.1f}",
    ]


def _digits(milliseconds: float) -> str:
    if milliseconds >= 100:
        return f"{milliseconds:.0f}"
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def _unit(rows: list[dict[str, Any]]) -> tuple[int, str]:
    """What a memory is shown in: its bytes and its name."""
    sizes = [row.get(name) or 0 for row in rows for name in _MEMORY]
    return byte_unit(max(sizes))


_MEMORY = ("device_total_bytes", "peak_bytes_in_use")


def _remarks(result: dict[str, Any], good: list[dict[str, Any]]) -> list[str]:
    """How to read the table, and what is not in it."""
    if not good:
        return []
    base, reason = result["baseline"], result["baseline_reason"]
    if reason:
        base = f"{base}, the largest that ran: {reason}"
    lines = [
        f"overhead: of a step's time against {base}, median over the rounds; recomp.: "
        "recomputed matmul FLOPs over all others"
    ]
    noisy = [
        row["policy"]
        for row in good
        if row["overhead_quartiles"][0] < 0 < row["overhead_quartiles"][1]
    ]
    if noisy:
        lines.append(
            f"overhead within its spread, quartiles about 0: {' '.join(noisy)}"
        )
    if result["peak_flops"]:
        lines.append(
            "MFU, HFU: matmul FLOPs without and with recomputation, of "
            f"{result['peak_flops'] / 1e12:.4g} TFLOP/s per device; predicted: "
            "estimated by XLA's figures and the roofline, a lower bound"
        )
    else:
        lines.append(
            f"predicted time and FLOP utilization: unknown, since {result['device']} "
            "is no GPU whose peak is known"
        )
    if all(row["peak_bytes_in_use"] is None for row in good):
        lines.append(
            f"memory in use: unknown, since the {result['platform']} backend does not "
            "tell"
        )
    for row in good:
        peak = row["peak_bytes_in_use"]
        if peak is not None and peak == row["peak_before_steps"]:
            lines.append(
                f"{row['policy']}: its peak in use is of the start, before any step: "
                "steps stay below it"
            )
    return lines


def draw_bench(result: dict[str, Any], path: Path) -> None:
    """Draws step time, with quartiles, against device memory, with its limit."""
    rows = [row for row in result["rows"] if row.get("device_total_bytes")]
    size, unit = _unit(rows)
    names = [wrap(row["policy"], 72) for row in rows]
    key_height = 0.25 * (sum(name.count("\n") + 1 for name in names) + 2)
    figure = new_figure(8, 4.6 + key_height)
    axes = figure.subplots()
    for number, (row, name) in enumerate(zip(rows, names, strict=True), 1):
        x, y = row["device_total_bytes"] / size, row["step_ms"]["median"]
        low, high = row["step_ms"]["quartiles"]
        color = COLORS[(number - 1) % len(COLORS)]
        spread = [[y - low], [high - y]]
        axes.errorbar(x, y, yerr=spread, fmt="none", color=color, capsize=3)
        axes.plot(x, y, "o", color=color, markersize=9, label=f"{number}  {name}")
        if row["peak_bytes_in_use"] is not None:
            used = row["peak_bytes_in_use"] / size
            axes.plot(used, y, "o", color=color, markersize=9, fillstyle="none")
        # Numbers of points that may be close: right and left in turn.
        offset, align = ((7, 3), "left") if number % 2 else ((-7, 3), "right")
        axes.annotate(
            str(number), (x, y), offset, textcoords="offset points",
            ha=align, va="bottom", size=9, color=color,
        )  # fmt: skip
    if any(row["peak_bytes_in_use"] is not None for row in rows):
        axes.plot(
            [], [], "o", color="black", fillstyle="none", label="in use, measured"
        )
    limit = result["memory_limit"]
    largest = max(row["device_total_bytes"] for row in rows)
    if limit and limit < 4 * largest:  # else it would press all else to one side
        axes.axvline(
            limit / size, color=LIMIT_COLOR, linestyle="--",
            label=f"limit of {result['device']}: {format_bytes(limit)}",
        )  # fmt: skip
    axes.set_xlabel(f"device memory, {unit} (compiled)")
    axes.set_ylabel("step time, ms (measured: median and quartiles)")
    axes.margins(x=0.1, y=0.12)
    axes.set_xlim(left=0)
    axes.set_title(f"{result['model']} on {result['num_devices']} x {result['device']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    save(figure, path)
