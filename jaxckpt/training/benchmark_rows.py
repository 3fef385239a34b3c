"""What was measured of each policy, set beside what was compiled and predicted."""

import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from typing import Any

from jaxckpt.training.benchmark import WARMUP, Measured, Measurement
from jaxckpt.training.config import TrainConfig

_PACKAGES = ("jaxckpt", "jax", "jaxlib", "flax")


def summarize(measurement: Measurement, config: TrainConfig) -> dict[str, Any]:
    """JSON data of a benchmark: its facts, and a row per policy in the order asked.

    Args:
      measurement: what ran.
      config: the run, under any policy.

    Returns:
      ``versions, device, ..., baseline, baseline_reason, rows``. A row has ``policy``
      and either what `_row` gives or ``error, bad_input, out_of_memory``. What is not
      known is None.
    """
    good = [one for one in measurement.policies if not one.error]
    known = good[0].known if good else {}
    base, reason = baseline(measurement.policies)
    tokens = config.batch_size * config.sequence_length
    facts = ("device", "platform", "num_devices", "mesh", "attention")
    return {
        "versions": _versions(),
        **{name: known.get(name) for name in facts},
        "memory_limit": known.get("memory_limit"),
        "peak_flops": known.get("peak_flops"),
        "model": config.model,
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "steps": measurement.steps,
        "warmup_steps": WARMUP,
        "order": measurement.order,
        "baseline": base.policy if base else None,
        "baseline_reason": reason,
        "rows": [
            {"policy": one.policy, **one.error}
            if one.error
            else _row(one, base or one, tokens)
            for one in measurement.policies
        ],
    }


def baseline(policies: Sequence[Measured]) -> tuple[Measured | None, str]:
    """What overhead is against, and why it is not ``none`` where it is not."""
    good = [one for one in policies if not one.error]
    none = next((one for one in policies if one.policy == "none"), None)
    if none and not none.error:
        return none, ""
    if not good:
        return None, ""
    largest = max(good, key=lambda one: one.known["memory"]["device_total_bytes"] or 0)
    reason = "none was not measured"
    if none and none.error:
        reason = "none does not fit" if none.error["out_of_memory"] else "none failed"
    return largest, reason


def _row(one: Measured, base: Measured, tokens: int) -> dict[str, Any]:
    known, memory = one.known, one.known["memory"]
    seconds = statistics.median(one.seconds)
    ratios = [
        mine / other for mine, other in zip(one.seconds, base.seconds, strict=True)
    ]
    flops = known["flops"]
    done = sum(flops.values())
    predicted = known["predicted_step_seconds"]
    return {
        "policy": one.policy,
        "applied": known["applied"],
        "step_ms": {
            "median": 1e3 * seconds,
            "quartiles": [1e3 * value for value in _quartiles(one.seconds)],
            "all": [1e3 * value for value in one.seconds],
        },
        "tokens_per_second": tokens / seconds,
        "compile_seconds": known["compile_seconds"],
        "predicted_step_ms": None if predicted is None else 1e3 * predicted,
        "device_total_bytes": memory["device_total_bytes"],
        "temp_bytes": memory["temp_bytes"],
        "host_temp_bytes": memory["host_temp_bytes"],
        "peak_bytes_in_use": one.peak_bytes_in_use,
        "peak_before_steps": known["peak_before_steps"],
        "overhead": statistics.median(ratios) - 1,
        "overhead_quartiles": [value - 1 for value in _quartiles(ratios)],
        "flops": flops,
        "recompute_fraction": known["recompute_fraction"],
        "mfu": _utilization(done - flops["recompute"], seconds, known),
        "hfu": _utilization(done, seconds, known),
    }


def _utilization(flops: int, seconds: float, known: dict[str, Any]) -> float | None:
    """FLOPs per second over the peak of all devices; None: it is not known."""
    if known["peak_flops"] is None:
        return None
    return flops / seconds / (known["peak_flops"] * known["num_devices"])


def _quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from its source
            found[package] = None
    return found
