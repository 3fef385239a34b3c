"""Compare policies on a target: rows from compile jobs, advice, and a memory gate."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxckpt.compiler.targets import Target
from jaxckpt.models.presets import ConfigError
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job, run_job
from jaxckpt.units import format_bytes

_BYTES_PER_JOB = 5 * 2**30  # host memory that one compile for GPUs may take


def default_policies(config: TrainConfig) -> tuple[str, ...]:
    """A ladder from none to full, and one that offloads."""
    # All but the layer's input, kept anyway, and its last matmul, which none needs.
    inner = config.architecture.value_names[1:-1]
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
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    width = min(os.cpu_count() or 1, int(available // _BYTES_PER_JOB))
    done = 0

    def run(job: Job) -> dict[str, Any]:
        nonlocal done
        row = run_job(job, cache)
        done += 1
        progress(f"compiled {done} of {len(jobs)}: {job.policy}")
        return row

    progress(f"compiling {len(jobs)} programs, {max(width, 1)} at a time")
    with ThreadPoolExecutor(max(width, 1)) as pool:
        rows = list(pool.map(run, jobs))
    return rows


def add_savings(rows: list[dict[str, Any]]) -> None:
    """Fills `activation_saving`: temporary bytes saved against ``none``."""
    base = next((r for r in rows if r["policy"] == "none" and "error" not in r), None)
    for row in rows:
        if "error" not in row:
            known = base and base["temp_bytes"] and row["temp_bytes"]
            saving = 1 - row["temp_bytes"] / base["temp_bytes"] if known else None
            row["activation_saving"] = saving


def advice(
    rows: Sequence[dict[str, Any]], config: TrainConfig, target: Target
) -> list[str]:
    """The verdict in plain words, one sentence per line.

    Standard training (no remat) where it uses at most 80 % of the device, 85 % below
    7 B parameters; else the cheapest policy that fits; else what dominates and what
    would help.
    """
    limit = target.memory_limit
    good = [row for row in rows if "error" not in row]
    if not limit or not good:
        return []
    share = 0.85 if config.architecture.num_params < 7e9 else 0.80
    none = next((row for row in good if row["policy"] == "none"), None)
    if none:
        used = none["device_total_bytes"] / limit
        if used <= share:
            return [
                f"Standard training fits: none uses {used:.0%} of "
                f"{format_bytes(limit)} (up to {share:.0%} is safe). Checkpointing "
                "would only cost time."
            ]
    fitting = [row for row in good if row["fits"]]
    if fitting:
        best = min(fitting, key=_cost)
        used = best["device_total_bytes"] / limit
        lines = [
            f"Cheapest policy that fits: {best['policy']}, {used:.0%} of "
            f"{format_bytes(limit)}, {best['recompute_fraction']:.1%} more FLOPs."
        ]
        if used > share:
            lines.append(
                f"It leaves less than {1 - share:.0%} for fragmentation and workspace."
            )
        return lines
    return [_what_would_help(min(good, key=lambda r: r["device_total_bytes"]), limit)]


def _cost(row: dict[str, Any]) -> tuple[float, float]:
    seconds = row["estimated_step_seconds"] or 0.0
    return seconds, row["recompute_fraction"]


def _what_would_help(row: dict[str, Any], limit: int) -> str:
    over = row["device_total_bytes"] - limit
    largest = row["peak"][0]["what"] if row["peak"] else "unknown"
    if row["argument_bytes"] > limit:
        help_ = "weights and optimizer state alone exceed it: shard them over more fsdp"
    elif row["argument_bytes"] > row["temp_bytes"]:
        help_ = "weights and optimizer state dominate: more fsdp, or a smaller model"
    else:
        help_ = (
            "activations dominate: a smaller --batch-size, more --accumulate, "
            "--sequence-parallel with tensor, or more --loss-chunks"
        )
    return (
        f"Nothing fits: {row['policy']} needs {format_bytes(over)} more than "
        f"{format_bytes(limit)}; largest at the peak: {largest}; {help_}."
    )


def largest_batch(
    job: Job, unit: int, cache: Path, progress: Callable[[str], None]
) -> int:
    """The largest batch of a policy that fits, in multiples of a unit; 0 for none.

    Doubles until a program does not fit, then bisects; every compile is cached.
    """

    def fits(units: int) -> bool:
        config = replace(job.config, batch_size=units * unit)
        progress(f"{job.policy}: trying batch size {units * unit}")
        return bool(run_job(replace(job, config=config), cache).get("fits"))

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


@dataclass(frozen=True)
class Growth:
    """A row whose memory grew past the tolerance.

    Attributes:
      policy: the row.
      field: what grew.
      before, after: bytes.
    """

    policy: str
    field: str
    before: int
    after: int

    def __str__(self) -> str:
        share = self.after / self.before - 1
        return (
            f"{self.policy}: {self.field} grew by {share:.2%}, from "
            f"{format_bytes(self.before)} to {format_bytes(self.after)}"
        )


def grown(
    base: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], tolerance: float
) -> list[Growth]:
    """The rows that need more memory than they did, past a tolerance.

    Raises:
      ConfigError: a row of the base is not among the new ones, or failed.
    """
    new = {row["policy"]: row for row in rows}
    found = []
    for old in base:
        row = new.get(old["policy"], {"error": "not compiled"})
        if "error" in row:
            raise ConfigError(f"{old['policy']}: {row['error']}")
        for field in ("device_total_bytes", "temp_bytes", "host_temp_bytes"):
            if row[field] > old[field] * (1 + tolerance):
                found.append(Growth(old["policy"], field, old[field], row[field]))
    return found
