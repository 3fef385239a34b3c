"""The receipt: what was asked, what was applied, what it saves and what it costs.

A receipt sets the compiled training step beside the same step without remat. Bytes
are compiled (XLA's own, per device), kept values and FLOPs are counted (from the
jaxpr), and whatever does nothing or cannot be known is said.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxckpt.compiler.flops import FlopCount
from jaxckpt.compiler.memory import MemoryBytes
from jaxckpt.compiler.residuals import Residual
from jaxckpt.layers import LayerPlan
from jaxckpt.policies import FULL, Policy
from jaxckpt.units import format_bytes, format_flops

# Below this saving of temporary memory a policy's recomputation buys nothing.
_NOTHING_SAVED = 0.02
_SAVED_SHOWN = 12  # rows printed; receipt.json has them all


@dataclass(frozen=True)
class CompiledStep:
    """One compiled training step and what was counted in it.

    Attributes:
      policy: as it was asked for.
      plan: the layer plan that it became.
      memory: compiled bytes per device.
      flops: FLOPs of one step over all devices.
      residuals: ``policy -> what one layer keeps under it``.
      compile_seconds: tracing and compiling.
      iterations: how often a device runs the plan's layers, keeping the values of all
        runs: in a pipeline.
    """

    policy: str
    plan: LayerPlan
    memory: MemoryBytes
    flops: FlopCount
    residuals: Callable[[Policy], Sequence[Residual]]
    compile_seconds: float
    iterations: int = 1


def saved_rows(
    plan: LayerPlan,
    residuals: Callable[[Policy], Sequence[Residual]],
    iterations: int = 1,
) -> list[dict[str, Any]]:
    """What a plan keeps, a row per name, place and number of layers.

    ``layers`` counts the copies alive at once: all layers of a run, and of a group
    the layers of the one group that is being recomputed, beside every group's input.
    In a pipeline that is one group of one iteration, beside what all iterations keep.
    """
    copies: Counter[tuple[str, str, int]] = Counter()

    def walk(runs, times, around=frozenset()):
        for run in runs:
            kept: Counter[tuple[str, str]] = Counter()
            always: set[str] = set()  # names that a group keeps, of all its layers
            for residual in residuals(run.policy):
                if run.group and residual.named:
                    always.add(residual.name)
                name = "group_input" if run.group else residual.name
                name = residual.name if residual.name in always else name
                kept[name, residual.location] += residual.nbytes
            for (name, location), nbytes in kept.items():
                layers = run.layers_per_iteration if name in always else 1
                if name not in around:
                    copies[name, location, nbytes] += run.count * times * layers
            walk(run.group, 1, around | always)

    walk(plan.runs, iterations)
    rows = [
        {
            "name": name,
            "location": location,
            "bytes_per_layer": nbytes,
            "layers": layers,
        }
        for (name, location, nbytes), layers in copies.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes_per_layer"] * row["layers"])


def step_row(step: CompiledStep, baseline: MemoryBytes, limit: int | None) -> dict:
    """The fields of one compiled step, as `report` gives a row.

    Args:
      step: the compiled step.
      baseline: memory of the same step without remat.
      limit: bytes a device can hold, None when the backend does not say.
    """
    flops, memory = step.flops, step.memory
    temp, base = memory.temp_bytes, baseline.temp_bytes
    total = memory.device_total_bytes
    return {
        "policy": step.policy,
        "applied": str(step.plan),
        **memory.as_dict(),
        "activation_saving": 1 - temp / base if temp and base else None,
        "flops": {
            "forward": flops.forward,
            "recompute": flops.recompute,
            "backward": flops.backward,
            "other": flops.other,
        },
        "flops_scope": "all devices",
        "recompute_fraction": flops.recompute_fraction,
        "attention_forward_runs": (
            flops.attention_forward_runs / (step.plan.num_layers * step.iterations)
            or None
        ),
        "saved": saved_rows(step.plan, step.residuals, step.iterations),
        "compile_seconds": round(step.compile_seconds, 3),
        "fits": total <= limit if total is not None and limit else None,
    }


def make_receipt(
    step: CompiledStep,
    without_remat: CompiledStep,
    *,
    platform: str,
    limit: int | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Compares a step with the same step without remat.

    Args:
      step: the step under the policy asked for.
      without_remat: the same step under ``none``.
      platform: what both were compiled for: "cpu", "gpu", ...
      limit: bytes a device can hold, when known.
      notes: further facts to state, such as the attention kernel.

    Returns:
      JSON data: ``requested, applied, platform, step, without_remat, warnings,
      notes``.
    """
    row = step_row(step, without_remat.memory, limit)
    base = step_row(without_remat, without_remat.memory, limit)
    return {
        "requested": step.policy,
        "applied": str(step.plan),
        "platform": platform,
        "step": row,
        "without_remat": base,
        "warnings": _warnings(step, row, base, platform),
        "notes": list(notes),
    }


def _warnings(step: CompiledStep, row: dict, base: dict, platform: str) -> list[str]:
    found = []
    policies = step.plan.policies()
    checkpointed = str(step.plan) != base["applied"]
    saving = row["activation_saving"]
    if checkpointed and saving is not None and saving < _NOTHING_SAVED:
        found.append(
            f"{row['policy']} saves nothing against none: temporaries "
            f"{format_bytes(row['temp_bytes'])} with it, "
            f"{format_bytes(base['temp_bytes'])} without; "
            f"it costs {row['recompute_fraction']:.1%} more matmul FLOPs"
        )
    full = _kept(step.residuals(FULL))
    for policy in policies:
        if policy.rule in ("none", "nothing_saveable"):
            continue
        kept = step.residuals(policy)
        if _kept(kept) == full:
            found.append(f"{policy} equals nothing_saveable: it keeps nothing more")
        unkept = set(policy.names) - {residual.name for residual in kept}
        for name in sorted(unkept):
            found.append(f"{name} is in the policy but no gradient needs it: not kept")
    offloads = any(policy.offload for policy in policies)
    if offloads and platform == "cpu":
        found.append(
            "offload is not modelled on CPU: offloaded values are counted as device "
            "temporaries, and host bytes read 0"
        )
    elif offloads and not row["host_temp_bytes"]:
        found.append("offload moved no bytes: the compiled step uses no host memory")
    if step.flops.unbounded_loops:
        found.append(
            f"{step.flops.unbounded_loops} loops of unknown length count once in FLOPs"
        )
    unknown = [key for key in MEMORY_FIELDS if row[key] is None]
    if unknown:
        found.append(f"unknown on this backend: {', '.join(unknown)}")
    return list(dict.fromkeys(found))  # policies of one plan share names


def host_bytes(row: dict[str, Any]) -> int | None:
    """Host memory of a compiled step per device: offloaded values and state."""
    temporary = row["host_temp_bytes"]
    if temporary is None:
        return None
    return temporary + (row.get("host_argument_bytes") or 0)


def _kept(residuals: Sequence[Residual]) -> list[tuple[str, int]]:
    return sorted((residual.location, residual.nbytes) for residual in residuals)


MEMORY_FIELDS = (
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "host_temp_bytes",
    "device_total_bytes",
)
_MEMORY_TITLES = (
    "arguments",
    "outputs",
    "aliased (outputs in arguments' place)",
    "temporary",
    "host temporary",
    "total on the device",
)


def print_receipt(receipt: dict[str, Any], console: Console) -> None:
    """Prints a receipt as tables a person can read."""
    step, base = receipt["step"], receipt["without_remat"]
    memory = Table(title="per device, compiled by XLA", title_justify="left")
    memory.add_column("memory")
    memory.add_column("with this policy", justify="right")
    memory.add_column("without remat", justify="right")
    for key, title in zip(MEMORY_FIELDS, _MEMORY_TITLES, strict=True):
        memory.add_row(title, format_bytes(step[key]), format_bytes(base[key]))
    if step.get("host_argument_bytes"):
        totals = (format_bytes(host_bytes(row)) for row in (step, base))
        memory.add_row("total in host memory, with its state", *totals)

    flops = Table(title="matmul FLOPs, all devices, counted", title_justify="left")
    flops.add_column("phase")
    flops.add_column("with this policy", justify="right")
    flops.add_column("without remat", justify="right")
    for phase in step["flops"]:
        flops.add_row(
            phase,
            format_flops(step["flops"][phase]),
            format_flops(base["flops"][phase]),
        )

    saved = Table(title="kept for the backward pass, counted", title_justify="left")
    for column in ("value", "in", "per layer", "layers", "all"):
        saved.add_column(
            column, justify="left" if column in ("value", "in") else "right"
        )
    for row in step["saved"][:_SAVED_SHOWN]:
        total = row["bytes_per_layer"] * row["layers"]
        saved.add_row(
            row["name"],
            row["location"],
            format_bytes(row["bytes_per_layer"]),
            str(row["layers"]),
            format_bytes(total),
        )
    rest = step["saved"][_SAVED_SHOWN:]
    if rest:
        total = sum(row["bytes_per_layer"] * row["layers"] for row in rest)
        saved.add_row(f"{len(rest)} more, smaller", "", "", "", format_bytes(total))

    verdict = Text()
    verdict.append(f"asked    {receipt['requested']}\n")
    verdict.append(f"applied  {receipt['applied']}\n")
    saving = step["activation_saving"]
    saves = "unknown" if saving is None else f"{saving:.1%} of temporary memory"
    good = saving is not None and saving >= _NOTHING_SAVED
    verdict.append(f"saves    {saves}\n", style="bold green" if good else "")
    verdict.append(
        f"costs    {step['recompute_fraction']:.1%} more matmul FLOPs", style="bold"
    )
    runs = step["attention_forward_runs"]
    if runs:
        verdict.append(f"; attention forward runs {runs:g}x per layer")
    console.print()
    console.print(Text("Receipt", style="bold underline"))
    console.print(verdict, soft_wrap=True)
    console.print(memory, flops, saved)
    for note in receipt["notes"]:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    print_warnings(receipt, console)


def print_warnings(receipt: dict[str, Any], console: Console) -> None:
    """Prints only what a receipt has to warn of."""
    for warning in receipt["warnings"]:
        console.print(
            f"WARNING: {warning}", style="bold red", highlight=False, soft_wrap=True
        )


def write_receipt(receipt: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(receipt, indent=2) + "\n")
