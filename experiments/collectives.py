"""What does keeping values after a collective spare, and what does it cost?

    python -m experiments.collectives

Takes about 3 minutes on 2 CPU cores and needs the `gpu-compiler` extra (--fast: 20
seconds, two layers, no --layers). Full remat runs
a layer's collectives again in the backward pass. A plan can keep what comes after them:
``out_proj`` after its all-reduce or reduce-scatter on a tensor axis (``mlpwo``'s is not
repeated: nothing in its layer needs it), ``gathered_weights`` after the all-gather on
fsdp. `deepspeed:partition` goes the other way: it keeps less and gathers more.

Each policy's training step of Llama-7B with 8 layers is compiled for 8 absent H100s
on fsdp:8, tensor:8, and tensor:8 with sequence parallelism. Bytes that one device sends
are counted in the compiled program, by phase and kind.

Expected: what is kept after its collective is sent no second time, so that `recompute`
of that kind is empty, and `spared` is its bytes.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.common import (
    CACHE,
    check_compiler,
    finish,
    folder,
    options_of,
    write,
)
from jaxckpt import pictures
from jaxckpt.models.presets import model_config
from jaxckpt.training.collective_table import collective_table, total_sent
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job
from jaxckpt.training.reporting import compile_rows
from jaxckpt.units import format_bytes

MODEL = "llama-7b"
FULL = "nothing_saveable"
INNER = "query_proj,key_proj,value_proj,context,out_proj,mlpwi_0,mlpwi_1"
ON_TENSOR = (FULL, "save:out_proj", f"save:{INNER}", "deepspeed:partition")
# What each, kept after its collective, need not send a second time.
SPARED = {
    "save:gathered_weights": ("all-gather",),
    "save:out_proj": ("all-reduce", "reduce-scatter"),
}
# Mesh, sequence parallelism, policies; full remat first, the reference.
CASES = (
    (
        "fsdp:8",
        False,
        (
            FULL,
            f"save:{INNER}",
            "save:gathered_weights",
            f"save:gathered_weights,{INNER}",
        ),
    ),
    ("tensor:8", False, ON_TENSOR),
    ("tensor:8", True, ON_TENSOR[:-1]),
)


def measure(
    mesh: str, sequence: bool, policies: tuple[str, ...], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Compiled rows of the policies on one mesh."""
    layers = options.layers
    architecture = dataclasses.replace(model_config(MODEL), num_layers=layers)
    jobs = [
        Job(
            TrainConfig(
                model=MODEL,
                policy=policy,
                architecture=architecture,
                mesh=mesh,
                sequence_parallel=sequence,
                batch_size=8,
            ),
            options.target,
        )
        for policy in policies
    ]
    return compile_rows(jobs, CACHE, print)


def summary(row: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """What the table of results keeps of a row."""
    return {
        "policy": row["policy"],
        "temp_bytes": row["temp_bytes"],
        "recompute_fraction": row["recompute_fraction"],
        "collective_bytes": row["collective_kinds"],
        "sent_bytes": total_sent(row),
        "spared_bytes": total_sent(full) - total_sent(row),
        "more_temp_bytes": row["temp_bytes"] - full["temp_bytes"],
    }


def findings(where: str, rows: list[dict[str, Any]]) -> list[str]:
    """What is kept after its collective and sent a second time all the same."""
    again = [
        f"{where}, {row['policy']}: {kind} in recompute"
        for row in rows
        for kind in SPARED.get(row["policy"], ())
        if row["collective_bytes"]["recompute"].get(kind)
    ]
    nothing = [
        f"{where}, {row['policy']} spares nothing"
        for row in rows
        if row["policy"] in SPARED and row["spared_bytes"] <= 0
    ]
    return again + nothing


def draw(result: dict[str, Any], path: Path) -> None:
    """What is sent under each policy, phase by phase."""
    figure = pictures.new_figure(8, 1.2 + 1.9 * len(result["meshes"]))
    grid = figure.subplots(len(result["meshes"]), 1, squeeze=False)
    phases = ("forward", "recompute", "backward", "other")
    hatches = ("", "////", "....", "xx")
    for (axes,), mesh in zip(grid, result["meshes"], strict=True):
        rows = mesh["rows"]
        left = [0.0] * len(rows)
        for number, phase in enumerate(phases):
            sent = [sum(row["collective_bytes"][phase].values()) for row in rows]
            widths = [nbytes / 2**30 for nbytes in sent]
            axes.barh(
                range(len(rows)), widths, left=left, height=0.65, edgecolor="white",
                color=pictures.COLORS[number], hatch=hatches[number], label=phase,
            )  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
        labels = [pictures.wrap(row["policy"], 40) for row in rows]
        axes.set_yticks(range(len(rows)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.04 * max(left))
        sequence = ", sequence parallel" if mesh["sequence_parallel"] else ""
        axes.set_title(mesh["mesh"] + sequence, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1][0].set_xlabel("GiB that one device sends in a step (counted)")
    handles, _ = grid[0][0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"{result['model']}, {result['layers']} layers, on {result['target']}"
    )
    pictures.save(figure, path)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    out = folder(options)
    check_compiler(options.target)
    options.layers = 2 if options.fast else options.layers
    console = Console(width=110)
    results, wrong = [], []
    for mesh, sequence, policies in CASES[:1] if options.fast else CASES:
        rows = measure(mesh, sequence, policies, options)
        where = f"{mesh}, sequence parallel" if sequence else mesh
        for row in rows:
            if "error" in row:
                raise SystemExit(f"{where}, {row['policy']}: {row['error']}")
        summaries = [summary(row, rows[0]) for row in rows]
        size = f"{MODEL}, {options.layers} layers"
        console.print(f"\n{size}, on {options.target}, mesh {where}")
        console.print(collective_table(rows))
        for one in summaries[1:]:
            console.print(
                f"{one['policy']}: spares {_signed(one['spared_bytes'])} sent for "
                f"{_signed(one['more_temp_bytes'])} of temporary memory"
            )
        wrong += findings(where, summaries)
        results.append({"mesh": mesh, "sequence_parallel": sequence, "rows": summaries})
    facts = {"model": MODEL, "layers": options.layers, "target": options.target}
    result = {**facts, "meshes": results}
    write(out / "collectives.json", result)
    draw(result, out / "collectives.png")
    finish(wrong)


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else ''}{format_bytes(abs(nbytes))}"


if __name__ == "__main__":
    main()
