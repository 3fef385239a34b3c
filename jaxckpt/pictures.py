"""Pictures: one style for all of them, and those that are not a command's own.

Colors are those of Okabe and Ito, which people who see no red or no green tell apart;
hatches and markers stand beside them, for print in gray. matplotlib is imported when
something is drawn: the extra `plot`.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxckpt.compiler.timeline import KINDS, Kind, Timeline
from jaxckpt.units import format_bytes

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#B8A800")
MARKERS = "os^DvPX<>*hp"
LIMIT_COLOR = "#D55E00"

_KIND_STYLE: dict[Kind, tuple[str, str]] = {
    "arguments": ("#D9D9D9", ""),
    "forward": ("#56B4E9", ""),
    "recompute": ("#E69F00", "////"),
    "backward": ("#009E73", "...."),
    "other": ("#CC79A7", "xxxx"),
}
_KIND_LABEL: dict[Kind, str] = {
    "arguments": "arguments: state and batch",
    "forward": "made by the forward pass",
    "recompute": "recomputed",
    "backward": "made by the backward pass",
    "other": "optimizer and other",
}
_PEAK_SHOWN = 5
_COLUMNS = 3
_NAMES_SHOWN = 11
_MEMORY = "on one device, compiled: arguments (gray), temporary (hatched)"
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "oo", "----", "||||")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, drawn without a screen."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["hatch.linewidth"] = 0.6
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path | str) -> None:
    """Writes a figure; a .png with 150 dots per inch and 128 colors, half as large."""
    figure.savefig(path, dpi=150)
    if Path(path).suffix == ".png":
        from PIL import Image

        with Image.open(path) as image:
            small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        small.save(path, optimize=True, dpi=(150, 150))


def shorten(text: str, width: int) -> str:
    """A text cut to a width, with dots where it was cut."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def wrap(policy: str, width: int) -> str:
    """A policy over lines of at most a width, cut behind commas, slashes and plusses.

    Example:
      >>> print(wrap("save:query_proj,context/offload:mlpwi_0", 26))
      save:query_proj,context/
      offload:mlpwi_0
    """
    spaced = re.sub(r"([,/+])", r"\1 ", policy)
    lines = textwrap.wrap(spaced, width, break_on_hyphens=False)
    return "\n".join(line.replace(" ", "") for line in lines)


def byte_unit(largest: int) -> tuple[int, str]:
    """What to divide bytes by for an axis, and what to call it."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= size:
            return size, unit
    return 1, "bytes"


def draw_timelines(
    rows: Sequence[dict[str, Any]], path: Path | str, *, title: str
) -> None:
    """Draws what is live when in a step's schedule, a panel for each policy.

    Each panel is filled to a third at least: those of much smaller programs have a
    smaller scale, and say so.

    Args:
      rows: with ``policy``; ``timeline``, of
        `jaxckpt.compiler.timeline.Timeline.as_dict`; ``peak``, a list of
        `jaxckpt.compiler.peak.PeakValue` as dicts; ``device_total_bytes``.
      path: a .png, .svg or .pdf.
      title: what was compiled, and for which devices.
    """
    lines = [Timeline.from_dict(row["timeline"]) for row in rows]
    peaks = [max(line.total) for line in lines]
    size, unit = byte_unit(max(peaks))
    columns = _COLUMNS if len(rows) != 4 else 2
    columns = min(columns, len(rows))
    blocks = math.ceil(len(rows) / columns)
    figure = new_figure(8, 1.2 + 3.75 * blocks)
    grid = figure.subplots(
        2 * blocks, columns, squeeze=False, height_ratios=(2.3, 1) * blocks
    )
    for axes in grid.flat:
        axes.set_axis_off()
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        block, column = divmod(number, columns)
        axes, below = grid[2 * block][column], grid[2 * block + 1][column]
        axes.set_axis_on()
        scale = max(peak for peak in peaks if peak <= 3 * peaks[number])
        axes.set_ylim(0, 1.18 * scale / size)
        _draw_areas(axes, line, size)
        _draw_running(axes, line)
        _mark_peak(axes, line, size)
        _list_peak(below, row, peaks[number])
        larger = "" if scale == max(peaks) else f" (scale x {max(peaks) / scale:.2g})"
        axes.set_title(
            wrap(row["policy"], 84 // columns) + larger, loc="left", fontsize=9
        )
        axes.set_xlabel("instructions in scheduled order", fontsize=8)
        axes.tick_params(labelsize=8)
        if not column:
            axes.set_ylabel(f"{unit}, per device", fontsize=9)
    used: list[Kind] = [
        kind for kind in KINDS if any(any(line.live[kind]) for line in lines)
    ]
    figure.legend(
        handles=[_patch(*_KIND_STYLE[kind], _KIND_LABEL[kind]) for kind in used],
        loc="outside lower center", ncols=3, fontsize=9, frameon=False,
    )  # fmt: skip
    figure.suptitle(
        f"{title}\nbytes live on one device, as compiled by XLA, a loop's body once; "
        "strip and background: the phase that runs",
        fontsize=10,
    )
    save(figure, path)


def _draw_areas(axes: Any, line: Timeline, size: int) -> None:
    bottom = [0.0] * len(line.position)
    for kind in KINDS:
        color, hatch = _KIND_STYLE[kind]
        top = [b + v / size for b, v in zip(bottom, line.live[kind], strict=True)]
        if any(line.live[kind]):
            axes.fill_between(
                line.position, bottom, top, step="post", facecolor=color,
                hatch=hatch, edgecolor="white", linewidth=0,
            )  # fmt: skip
            axes.step(line.position, top, where="post", color="#444444", linewidth=0.5)
        bottom = top
    axes.set_xlim(line.position[0], line.position[-1])
    axes.spines[["top", "right"]].set_visible(False)


def _draw_running(axes: Any, line: Timeline) -> None:
    """A strip under the axis, and the background: the phase that runs."""
    strip = axes.inset_axes((0, -0.1, 1, 0.07), sharex=axes)
    strip.set_axis_off()
    start = 0
    for index in range(1, len(line.position) + 1):
        if index < len(line.position) and line.running[index] == line.running[start]:
            continue
        end = line.position[min(index, len(line.position) - 1)]
        kind: Kind = line.running[start]
        color, hatch = _KIND_STYLE[kind]
        strip.axvspan(
            line.position[start], end, facecolor=color, hatch=hatch,
            edgecolor="white", linewidth=0,
        )  # fmt: skip
        axes.axvspan(
            line.position[start], end, facecolor=color, alpha=0.25, linewidth=0,
            zorder=0,
        )  # fmt: skip
        start = index
    axes.tick_params(axis="x", pad=16)


def _mark_peak(axes: Any, line: Timeline, size: int) -> None:
    x, y = line.position[line.peak], max(line.total) / size
    axes.plot(x, y, "v", color="black", markersize=7, clip_on=False)
    axes.axvline(x, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"peak {format_bytes(max(line.total))}", (x, y), (0, 6),
        textcoords="offset points", fontsize=8,
        ha="left" if x < line.position[-1] / 2 else "right",
    )  # fmt: skip


def _list_peak(axes: Any, row: dict[str, Any], total: int) -> None:
    """Under a panel: the largest values at the peak."""
    axes.set_xlim(0, 1)
    lines = ["live at the peak"]
    largest = row["peak"][:_PEAK_SHOWN]
    for value in largest:
        what = value["what"]
        what = what if len(what) <= 25 else f"...{what[-22:]}"  # its end says most
        lines.append(f"{format_bytes(value['bytes']):>10}  {what}")
    rest = total - sum(value["bytes"] for value in largest)
    lines.append(f"{format_bytes(max(rest, 0)):>10}  all others")
    lines.append(f"{format_bytes(row['device_total_bytes']):>10}  XLA allocates in all")
    axes.text(
        0, 1, "\n".join(lines), va="top", fontsize=7, family="monospace",
        transform=axes.transAxes,
    )  # fmt: skip


def draw_kept(
    bars: Mapping[str, Sequence[dict[str, Any]]], path: Path | str, *, title: str
) -> None:
    """Draws what each policy keeps for the backward pass, stacked by value name.

    Args:
      bars: by policy, rows of `jaxckpt.receipt.saved_rows`: bytes per device.
      path: a .png, .svg or .pdf.
      title: of which model and devices.
    """
    policies = [wrap(policy, 40) for policy in bars]
    lines = sum(policy.count("\n") + 1 for policy in policies)
    figure = new_figure(9, 2.4 + 0.32 * len(bars) + 0.14 * lines)
    axes = figure.subplots()
    draw_kept_bars(axes, bars)
    axes.set_yticks(range(len(bars)), policies, fontsize=9)
    _name_values(figure, axes)
    axes.set_title(f"{title}\nkept for the backward pass, counted", fontsize=11)
    save(figure, path)


def draw_receipt(receipt: dict[str, Any], path: Path | str) -> None:
    """Draws a receipt: memory and kept values, with the policy and without remat.

    Args:
      receipt: of `jaxckpt.receipt.make_receipt`.
      path: a .png, .svg or .pdf.
    """
    rows = {
        "with this policy": receipt["step"],
        "without remat": receipt["without_remat"],
    }
    figure = new_figure(8, 4.6)
    memory, kept = figure.subplots(2, 1, height_ratios=(1, 1.4))
    _draw_memory(memory, list(rows.values()))
    draw_kept_bars(kept, {label: row["saved"] for label, row in rows.items()})
    for axes, title in ((memory, _MEMORY), (kept, "kept, counted")):
        axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
        axes.set_title(title, loc="left", fontsize=10)
    _name_values(figure, kept)
    saving, costs = (
        receipt["step"][key] for key in ("activation_saving", "recompute_fraction")
    )
    saves = "unknown" if saving is None else f"{saving:.1%} of temporary memory"
    figure.suptitle(
        f"{shorten(receipt['applied'], 80)}\n"
        f"saves {saves}, costs {costs:.1%} more matmul FLOPs",
        fontsize=11,
    )
    save(figure, path)


def _draw_memory(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    parts = ("argument_bytes", "temp_bytes")
    size, unit = byte_unit(max(row["device_total_bytes"] or 1 for row in rows))
    left = [0.0] * len(rows)
    styles = (("#D9D9D9", ""), (COLORS[4], "//"))
    for part, (color, hatch) in zip(parts, styles, strict=True):
        widths = [(row[part] or 0) / size for row in rows]
        axes.barh(
            range(len(rows)), widths, left=left, height=0.62, color=color,
            edgecolor="#444444", linewidth=0.8, hatch=hatch,
        )  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (row, end) in enumerate(zip(rows, left, strict=True)):
        axes.annotate(
            format_bytes(row["device_total_bytes"]), (end, place), (4, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)


def draw_kept_bars(axes: Any, bars: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Horizontal bars of kept bytes by value name, into axes; see `draw_kept`."""
    kept: dict[str, Counter[tuple[str, str]]] = {}
    shares: dict[tuple[str, str], float] = {}  # the largest in any policy
    for policy, rows in bars.items():
        kept[policy] = Counter()
        for row in rows:
            key = row["name"], row["location"]
            kept[policy][key] += row["bytes_per_layer"] * row["layers"]
        for key, nbytes in kept[policy].items():
            share = nbytes / kept[policy].total() if nbytes else 0.0
            shares[key] = max(share, shares.get(key, 0.0))
    named = sorted(shares, key=lambda key: -shares[key])[:_NAMES_SHOWN]
    size, unit = byte_unit(max(one.total() for one in kept.values()))
    places = range(len(kept))
    left = [0.0] * len(kept)
    for number, key in enumerate(named):
        widths = [one[key] / size for one in kept.values()]
        axes.barh(
            places, widths, left=left, height=0.62, linewidth=0.8,
            label=key[0] + (" (host)" if key[1] == "host" else ""),
            **_bar_style(number, key[1]),
        )  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rest = [one.total() / size - a for one, a in zip(kept.values(), left, strict=True)]
    if len(shares) > len(named):
        axes.barh(
            places, rest, left=left, height=0.62, linewidth=0.8, color="#D9D9D9",
            edgecolor="#444444", label=f"{len(shares) - len(named)} others, smaller",
        )  # fmt: skip
    for place, one in enumerate(kept.values()):
        axes.annotate(
            format_bytes(one.total()), (one.total() / size, place), (4, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} per device, all layers")
    axes.spines[["top", "right"]].set_visible(False)


def _name_values(figure: Any, axes: Any) -> None:
    """The legend of kept bars, with whose the shapes in it are."""
    handles, labels = axes.get_legend_handles_labels()
    shapes = any("[" in label for label in labels)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False,
        title="shapes: whole, of all devices together" if shapes else None,
        title_fontsize=9,
    )  # fmt: skip


def _bar_style(number: int, location: str) -> dict[str, Any]:
    color = (*COLORS[:5], COLORS[6])[number % 6]
    if location == "host":
        return {"facecolor": "white", "hatch": "\\\\\\\\", "edgecolor": color}
    hatch = _HATCHES[number % len(_HATCHES)]
    return {"facecolor": color, "hatch": hatch, "edgecolor": "white"}


def _patch(color: str, hatch: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=color, hatch=hatch, edgecolor="white", label=label)
