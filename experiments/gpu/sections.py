"""The sections of `experiments.gpu_check`: each yields rows, and runs in a process.

A section's process asks the device nothing itself, but for the first two: the steps,
compiles and plans of the others are processes in turn, of which only one may hold the
device.
"""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.gpu.budgets import budgets
from experiments.gpu.process import Row, failed_row, row
from experiments.gpu.sizes import Ask
from experiments.gpu.steps import policy_rows
from jaxckpt.training.benchmark import measure
from jaxckpt.training.benchmark_rows import summarize
from jaxckpt.training.job import Job, run_job
from jaxckpt.units import format_bytes

FIELDS = {
    "arguments": "argument_bytes",
    "outputs": "output_bytes",
    "aliased": "alias_bytes",
    "temporary": "temp_bytes",
    "host temporary": "host_temp_bytes",
    "total": "device_total_bytes",
}
CLOSE = 0.05  # of the attached total, by which the absent one may differ
BOUND = 1.05  # times the measured step, what a lower bound of it may be

_ONE_POLICY = 45  # seconds that a policy may take in any case
_TWO_BLOCKS = 1.7  # processes' time of a benchmarked policy, in a policy's of `steps`


# ---------------------------------------------------------------- the device


def device(ask: Ask) -> Iterator[Row]:
    """What is attached, in versions and bytes."""
    import jax

    from jaxckpt.checks.environment import memory_kinds, versions
    from jaxckpt.device_memory import device_memory
    from jaxckpt.training.benchmark_worker import kind_of

    first = jax.devices()[0]
    memory = device_memory(first)
    kind = kind_of(first.device_kind)
    client: Any = getattr(first, "client", None)
    checks: dict[str, bool | None] = {}
    if not ask.small:
        checks["a GPU is attached"] = first.platform == "gpu"
    limit = "unknown" if memory.limit is None else format_bytes(memory.limit)
    yield row(
        first.device_kind,
        f"{jax.device_count()} attached, memory limit {limit}, jax {jax.__version__}",
        checks,
        platform=first.platform,
        target=target_like(first.platform, kind),
        known_as=kind.name if kind else None,
        compute_capability=getattr(first, "compute_capability", None),
        backend=str(getattr(client, "platform_version", "unknown")),
        memory_kinds=memory_kinds(first),
        memory_stats=memory.as_dict(),
        versions=versions(),
    )


def target_like(platform_name: str, kind: Any) -> str | None:
    """The absent target that is like the attached device."""
    from jaxckpt.compiler.targets import KINDS

    if platform_name == "cpu":
        return "cpu"
    return next((f"{key}:1" for key, one in KINDS.items() if one is kind), None)


# ---------------------------------------------------------------- gradients


def gradients(ask: Ask) -> Iterator[Row]:
    """Do offloading policies give the right gradients, from host memory?"""
    from experiments.gpu.gradients import check

    yield from check(ask.sizes)


# ---------------------------------------------------------------- targets


def targets(ask: Ask) -> Iterator[Row]:
    """Is a program compiled for an absent device the attached one's, byte for byte?"""
    (described, *_) = [*ask.found.get("device", ()), {}]
    target = described.get("target")
    unlike = {"error": f"no target is like {described.get('name', 'this device')}"}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as aside:

        def compile_for(target: str | None, policy: str) -> dict[str, Any]:
            if not target:
                return unlike
            return run_job(Job(ask.sizes.config(policy), target), Path(folder))

        # Compiles for absent devices need this machine's cores, not its device.
        absent = {
            policy: aside.submit(compile_for, target, policy)
            for policy in ask.sizes.targets
        }
        for policy, there in absent.items():
            here = compile_for("attached", policy)
            yield compared_row(policy, target, here, there.result())


def compared_row(
    policy: str, target: str | None, here: dict[str, Any], there: dict[str, Any]
) -> Row:
    """Two compiles of one program, field by field.

    Args:
      policy: of the step.
      target: the absent device.
      here: `run_job`'s row of the attached device.
      there: that of the absent one; its failure is no failed check, since the compiler
        for absent devices need not be installed.
    """
    name = f"{policy} on {target}"
    if "error" in here:
        return failed_row(name, f"attached: {here['error']}", "compiles")
    figures = {
        "policy": policy,
        "attached": {key: here[key] for key in FIELDS.values()},
        "attached_compile_seconds": here["compile_seconds"],
    }
    if "error" in there:
        reason = f"absent: {there['error']}"
        unknown = {"same arguments": None, "same total": None}
        return row(name, reason, unknown, reason=reason, **figures)
    figures |= {
        "absent": {key: there[key] for key in FIELDS.values()},
        "absent_compile_seconds": there["compile_seconds"],
        "absent_estimated_step_seconds": there["estimated_step_seconds"],
    }
    parts = []
    for label, key in FIELDS.items():
        one, other = here[key], there[key]
        if one is not None and other is not None and (one or other):
            same = "the same" if one == other else f"{other / max(one, 1) - 1:+.2%}"
            parts.append(f"{label} {same}")
    total, absent = here["device_total_bytes"], there["device_total_bytes"]
    checks: dict[str, bool | None] = {
        "same arguments": here["argument_bytes"] == there["argument_bytes"],
        "same total": None,
    }
    if total is not None and absent is not None:
        checks["same total"] = abs(absent - total) <= CLOSE * total
        parts.append(f"{format_bytes(absent)} absent, {format_bytes(total)} attached")
    return row(name, "; ".join(parts), checks, **figures)


# ---------------------------------------------------------------- steps


def steps(ask: Ask) -> Iterator[Row]:
    """Does a step use what was compiled, and what does the monitor see of it?"""
    begin, policies = time.monotonic(), ask.sizes.policies
    for index, policy in enumerate(policies):
        start = time.monotonic()
        keep = ask.keep if policy == "nothing_saveable" else None
        left = ask.seconds - (start - begin)
        # One that hangs leaves time for the others.
        most = min(left, max(_ONE_POLICY, 2 * left / (len(policies) - index)))
        for one in policy_rows(ask, policy, most, ask.sizes.profiled, keep):
            yield one | {"seconds": round(time.monotonic() - start, 1)}


# ---------------------------------------------------------------- bench


def bench(ask: Ask) -> Iterator[Row]:
    """How long do policies take, and is the prediction a lower bound?"""
    policies = ask.sizes.ladder[: _affordable(ask)]
    jobs = {policy: Job(ask.sizes.config(policy), "attached") for policy in policies}
    found = measure(jobs, ask.sizes.timed, lambda text, is_stage: None)
    result = summarize(found, ask.sizes.config("none"))
    for one in result.pop("rows"):
        yield timed_row(one)
    ladder = ", ".join(policies)
    yield row("ladder", f"{ladder}: {result['order']}", {}, **result)


def _affordable(ask: Ask) -> int:
    """Policies that fit, by what one took in `steps`; at least two."""
    each = [one["seconds"] for one in ask.found.get("steps", ()) if "seconds" in one]
    if not each:
        return 3
    return max(2, int(ask.seconds / (_TWO_BLOCKS * max(each))))


def timed_row(one: dict[str, Any]) -> Row:
    """A row of the benchmark; the prediction is of a speed that nothing exceeds."""
    if "error" in one:
        return failed_row(one["policy"], one["error"])
    figures = {key: value for key, value in one.items() if key != "policy"}
    median, predicted = one["step_ms"]["median"], one["predicted_step_ms"]
    told = f"{median:.1f} ms, {one['overhead']:+.1%} time for "
    told += f"{one['recompute_fraction']:+.1%} FLOPs"
    within = None
    if predicted is None:
        told += "; predicted unknown: the device's peak is"
    else:
        within = predicted <= BOUND * median
        told += f"; predicted {predicted:.1f} ms, {predicted / median:.0%} of it"
    if one["mfu"] is not None:
        told += f"; MFU {one['mfu']:.1%}"
    return row(one["policy"], told, {"predicted is a lower bound": within}, **figures)


SECTIONS = {
    "device": device,
    "gradients": gradients,
    "targets": targets,
    "steps": steps,
    "bench": bench,
    "budgets": budgets,
}
