"""Budgets of the planner on the attached device: compiled, and in use.

Each plan is searched for with the device's own compiler (`plan_run` for "attached") and
then run, in a process, for its peak.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.gpu.process import Row, failed_row, failure, row
from experiments.gpu.sizes import Ask
from experiments.gpu.steps import policy_rows
from jaxckpt.training.job import Job, run_job
from jaxckpt.training.planning import plan_run
from jaxckpt.units import format_bytes

_ENDS = ("nothing_saveable", "none")


def budgets(ask: Ask) -> Iterator[Row]:
    """Do the planner's budgets hold on the device itself?"""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        low, high = (_total(ask, policy, Path(cache)) for policy in _ENDS)
        for share in ask.sizes.budgets:
            budget = round(low + share * (high - low))
            left = ask.seconds - (time.monotonic() - begin)
            try:
                yield from _planned_rows(ask, budget, left, Path(cache))
            except Exception as error:
                yield failed_row(_of_budget(budget), failure(error), "plans")


def _planned_rows(ask: Ask, budget: int, seconds: float, cache: Path) -> Iterator[Row]:
    config, start = ask.sizes.config("none"), time.monotonic()
    planned = plan_run(config, "attached", str(budget), cache=cache, compare=False)
    plan, seconds = planned.plan, seconds - (time.monotonic() - start)
    (ran, *_) = policy_rows(ask, plan.layer_plan, seconds, profiled=0)
    measured = ran if "peak_bytes_in_use" in ran else {}
    yield budget_row(
        budget, plan.compiled["device_total_bytes"], measured,
        layer_plan=plan.layer_plan,
        predicted_bytes=plan.predicted["device_total_bytes"],
        recompute_fraction=plan.recompute_fraction,
        compiles=plan.compiles,
        seconds=round(time.monotonic() - start, 1),
    )  # fmt: skip
    if not measured:
        yield ran


def _of_budget(budget: int) -> str:
    return f"budget {format_bytes(budget)}"


def _total(ask: Ask, policy: str, cache: Path) -> int:
    """A policy's compiled bytes: from `targets`, or `steps`, or compiled once more."""
    known = [one.get("attached", {}) | one for one in ask.found.get("targets", ())]
    for one in [*known, *ask.found.get("steps", ())]:
        total = one.get("device_total_bytes")
        if one.get("policy") == policy and isinstance(total, int):
            return total
    compiled = run_job(Job(ask.sizes.config(policy), "attached"), cache)
    if "error" in compiled:
        raise RuntimeError(f"{policy} does not compile: {compiled['error']}")
    return compiled["device_total_bytes"]


def budget_row(
    budget: int, compiled: int, measured: Mapping[str, Any], **figures: Any
) -> Row:
    """A plan's bytes, compiled and in use, against its budget."""
    peak = measured.get("peak_bytes_in_use")
    told = f"compiled {format_bytes(compiled)}, {compiled / budget:.1%} of it"
    if peak is None:
        told += "; peak in use unknown"
    else:
        told += f"; peak in use {format_bytes(peak)}"
    checks = {
        "compiled within": compiled <= budget,
        "in use within": None if peak is None else peak <= budget,
    }
    return row(
        _of_budget(budget), told, checks, budget_bytes=budget, compiled_bytes=compiled,
        peak_bytes_in_use=peak, **figures,
    )  # fmt: skip
