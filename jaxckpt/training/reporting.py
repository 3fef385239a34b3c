"""Compare policies on a target: rows from compile jobs, advice, and a memory gate."""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxckpt.models.presets import ConfigError
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job, run_job
from jaxckpt.units import format_bytes, format_milliseconds

_BYTES_PER_JOB = 5 * 2**30  # host memory that one compile for GPUs may take
_STRAIGHT = 4  # sizes tried along a line before halving
_FASTER = 0.03  # an estimate of a shorter step that is worth a word


def default_policies(config: TrainConfig) -> tuple[str, ...]:
    """A ladder from none to full, and one that offloads."""
    # All but the layer's input, kept anyway, and its last matmul, which none needs.
    model = config.architecture
    inner = [n for n in model.value_names[1:-1] if n not in model.always_kept]
    return (
        "none",
        "dots_saveable",
        f"save:{','.join(inner)}",
        "save:context,out_proj",
        "nothing_saveable",
        "offload:decoder_layer_input",
    )


def compile_rows(
    jobs: Sequence[Job], cache: Path, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Runs jobs side by side, as many as memory and cores allow; rows in order."""
    width = max(1, min(os.cpu_count() or 1, available_bytes() // _BYTES_PER_JOB))
    done = 0

    def run(job: Job) -> dict[str, Any]:
        nonlocal done
        row = run_job(job, cache)
        done += 1
        did = "failed to compile" if "error" in row else "compiled"
        progress(f"{did} {done} of {len(jobs)}: {job.policy}")
        return row

    programs = "program" if len(jobs) == 1 else f"programs, {width} at a time"
    progress(f"compiling {len(jobs)} {programs}")
    with ThreadPoolExecutor(width) as pool:
        rows = list(pool.map(run, jobs))
    return rows


def available_bytes() -> int:
    """Memory of this machine that is free or given back on demand."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return 1024 * int(found[1]) if found else 0


def add_savings(rows: list[dict[str, Any]]) -> None:
    """Fills `activation_saving`: temporary bytes saved against ``none``."""
    base = next((r for r in rows if r["policy"] == "none" and "error" not in r), None)
    for row in rows:
        if "error" not in row:
            row["activation_saving"] = None
            if base and base["temp_bytes"] and row["temp_bytes"]:
                saving = 1 - row["temp_bytes"] / base["temp_bytes"]
                row["activation_saving"] = saving


def advice(
    rows: Sequence[dict[str, Any]], config: TrainConfig | None, limit: int | None
) -> list[str]:
    """The verdict in plain words, one sentence per line.

    Standard training (no remat) where it uses at most 80 % of the device, 85 % below
    7 B parameters; else the cheapest policy that fits; else what dominates and what
    would help.

    Args:
      rows: of `compile_rows`, with `add_savings`.
      config: the run that the policies were tried on; None for a user's own step.
      limit: bytes of one device, None if they are not known.
    """
    good = [row for row in rows if row.get("device_total_bytes")]
    if not good:
        return []
    if not limit:
        return [
            "What fits is not known: the memory of this device is not. Give a "
            "--target such as h100:8; it need not be there."
        ]
    share = safe_share(config)
    fitting = [row for row in good if row["device_total_bytes"] <= limit]
    if not fitting:
        smallest = min(good, key=lambda row: row["device_total_bytes"])
        return [_what_would_help(smallest, good, config, limit)]
    none = next((row for row in good if row["policy"] == "none"), None)
    if none and none["device_total_bytes"] <= share * limit:
        return [
            f"Standard training fits: none uses {_used(none, limit)} (up to "
            f"{share:.0%} is safe). Checkpointing is not needed.",
            *_estimated_faster(none, fitting),
        ]
    best = min(fitting, key=_cost)
    if config is None:
        lines = [f"It fits: {_used(best, limit)}."]
    else:
        lines = [
            f"Cheapest policy that fits: {best['policy']}, {_used(best, limit)}, "
            f"{best['recompute_fraction']:.1%} more FLOPs."
        ]
    if best["device_total_bytes"] > share * limit:
        lines.append(
            f"It leaves less than {1 - share:.0%} for fragmentation and workspace."
        )
    return lines


def safe_share(config: TrainConfig | None) -> float:
    """Of a device's memory that a step may plan for, by the size of the model."""
    return 0.85 if config is None or config.architecture.num_params < 7e9 else 0.80


def _used(row: dict[str, Any], limit: int) -> str:
    return f"{row['device_total_bytes'] / limit:.0%} of {format_bytes(limit)}"


def _cost(row: dict[str, Any]) -> tuple[float, float]:
    seconds = row["estimated_step_seconds"] or 0.0
    return seconds, row["recompute_fraction"]


def _estimated_faster(
    none: dict[str, Any], fitting: Sequence[dict[str, Any]]
) -> list[str]:
    """Saving less writes less: where memory bounds a step, a policy can win."""
    best, seconds = min(fitting, key=_cost), none["estimated_step_seconds"]
    if not seconds or best["estimated_step_seconds"] > (1 - _FASTER) * seconds:
        return []
    return [
        f"By the estimate {best['policy']} is faster still, "
        f"{format_milliseconds(best['estimated_step_seconds'])} for "
        f"{format_milliseconds(seconds)}: it moves fewer bytes. Measure both."
    ]


def _what_would_help(
    row: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    config: TrainConfig | None,
    limit: int,
) -> str:
    over = row["device_total_bytes"] - limit
    largest = row["peak"][0]["what"] if row["peak"] else "unknown"
    if row["argument_bytes"] > limit:
        dominates = "weights and optimizer state alone exceed it: more devices on fsdp"
    elif row["argument_bytes"] > row["temp_bytes"]:
        dominates = "weights and optimizer state dominate: more devices on fsdp"
    else:
        ways = ["a smaller batch", "more micro-batches", "loss in more chunks"]
        if config:
            ways = ["a smaller --batch-size", "more --accumulate", "more --loss-chunks"]
            if "tensor" in config.mesh and not config.sequence_parallel:
                ways.append("--sequence-parallel")
        if not any(other["host_temp_bytes"] for other in rows):
            ways.append("offloading, as in offload:decoder_layer_input")
        dominates = f"activations dominate: {', '.join(ways)}"
    return (
        f"Nothing fits: {row['policy']} needs {format_bytes(over)} more than "
        f"{format_bytes(limit)}; largest at the peak: {largest}; {dominates}."
    )


def largest_batch(
    job: Job, unit: int, cache: Path, progress: Callable[[str], None]
) -> int:
    """The largest batch tried that fits, in multiples of a unit; 0 for none.

    Takes memory to grow with the batch: the answer fits, and the next size does not.
    Doubles the job's own until one does not fit. In between memory is about linear:
    each size tried is where the line through the last two reaches the limit, until one
    fits and the next does not. XLA fuses some sizes better than others, so that a size
    above that may fit again.
    """
    known: list[tuple[int, int]] = []  # units, bytes above the limit
    low = high = tries = 0  # the largest that fits, the smallest that does not
    while not high or high - low > 1:
        if not high:
            units = 2 * low or max(job.config.batch_size // unit, 1)
        elif tries < _STRAIGHT:
            units = max(low + 1, min(_at_the_limit(known, low, high), high - 1))
        else:
            units = (low + high) // 2
        tries += bool(high)
        config = replace(job.config, batch_size=units * unit)
        progress(f"{job.policy}: trying batch size {units * unit}")
        row = run_job(replace(job, config=config), cache)
        low, high = (units, high) if row.get("fits") else (low, units)
        if total := row.get("device_total_bytes"):
            known.append((units, total - row["memory_limit"]))
    return low * unit


def _at_the_limit(known: Sequence[tuple[int, int]], low: int, high: int) -> int:
    """Where the line through the last two sizes reaches the limit; else the middle."""
    if len(known) > 1:
        (units, before), (last, over) = known[-2:]
        slope = (over - before) / (last - units)
        if slope > 0:
            return int(last - over / slope)
    return (low + high) // 2


@dataclass(frozen=True)
class Growth:
    """A row whose memory grew past the tolerance, or that no longer compiles.

    Attributes:
      policy: the row.
      field: what grew.
      before, after: bytes.
      reason: why it does not compile.
    """

    policy: str
    field: str = ""
    before: int = 0
    after: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.policy}: compiled before and fails now: {self.reason}"
        share = f" by {self.after / self.before - 1:.2%}" if self.before else ""
        return (
            f"{self.policy}: {self.field} grew{share}, from "
            f"{format_bytes(self.before)} to {format_bytes(self.after)}"
        )


def grown(
    base: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], tolerance: float
) -> list[Growth]:
    """The rows that need more memory than they did, past a tolerance, or fail now.

    Rows that failed before are left out, and so is what a backend does not say.

    Raises:
      ConfigError: a row of the base is not among the new ones.
    """
    new = {row["policy"]: row for row in rows}
    found = []
    for old in base:
        policy = old["policy"]
        if "error" in old:
            continue
        if policy not in new:
            raise ConfigError(f"{policy} is in --compare and not in --policies")
        if "error" in new[policy]:
            found.append(Growth(policy, reason=new[policy]["error"]))
            continue
        for field in ("device_total_bytes", "temp_bytes", "host_temp_bytes"):
            before, after = old.get(field), new[policy][field]
            if before is None or after is None:
                continue
            if after > before * (1 + tolerance):
                found.append(Growth(policy, field, before, after))
    return found
