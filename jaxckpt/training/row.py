"""The row of one compiled training step, made in the process that compiles it."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxckpt.compiler.flops import PHASES, FlopCount, count_flops
from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.hlo_text import HOST_SPACE
from jaxckpt.compiler.memory import MemoryBytes, compile_step, memory_bytes
from jaxckpt.compiler.peak import find_peak_files, peak_values
from jaxckpt.compiler.schedule import estimate_step_seconds
from jaxckpt.compiler.targets import Target, TargetError, parse_target
from jaxckpt.compiler.timeline import memory_timeline
from jaxckpt.compiler.user_step import UserStepError, load_step, reason
from jaxckpt.layers import LayerPlan, Run
from jaxckpt.linter import lint_step
from jaxckpt.policies import NONE
from jaxckpt.receipt import CompiledStep, step_row
from jaxckpt.schedules.pipeline import PipelineSchedule
from jaxckpt.training.host_memory import pinned_limit, pinned_shortage
from jaxckpt.training.inspect import (
    iterations_of,
    layer_residuals,
    lint_program,
    offload_notes,
)
from jaxckpt.training.job import Job
from jaxckpt.training.pipeline import describe
from jaxckpt.training.prepare import prepare
from jaxckpt.training.step import make_program

_PEAK_SHOWN = 24
_MOMENTS = 600  # of a timeline, a few to a millimeter of paper
_TPU_NOTE = (
    "TPU: bytes are compiled by XLA:TPU; FLOPs are counted in the jaxpr, divided by "
    "the devices; collectives and step time are not known, since the compiled program "
    "does not say how often its loops run"
)


def compile_row(job: Job, dump: Path) -> dict[str, Any]:
    """Compiles a job's step in this process; its row, but for `activation_saving`."""
    target = parse_target(job.target)
    try:
        built = _user_step(job, target) if job.function else _model_step(job, target)
    except jax.errors.JaxRuntimeError as error:
        if target.is_absent and "ptxas too old" in str(error):
            raise TargetError(
                f"the installed CUDA cannot compile for {target.text}, compute "
                f"capability {target.compute_capability}"
            ) from error
        raise
    memory = memory_bytes(built.compiled, built.host_bytes)
    text = built.compiled.as_text()
    hlo = parse_hlo(text)
    devices = target.devices()
    flops = _over(built.count_flops(), len(devices)) if target.tpu else hlo.flops
    collectives = {p: sum(kinds.values()) for p, kinds in hlo.collective_bytes.items()}
    host_transfers = hlo.host_transfer_bytes
    if target.tpu:
        collectives, host_transfers = dict.fromkeys(PHASES), dict.fromkeys(PHASES)
    limit = target.memory_limit or _attached_limit(devices[0])
    step = CompiledStep(
        policy=job.policy,
        plan=built.plan,
        memory=memory,
        flops=flops,
        residuals=built.residuals,
        compile_seconds=built.seconds,
        iterations=iterations_of(built.pipeline),
    )
    return step_row(step, memory, limit) | {
        "activation_saving": None,  # known beside the row of none
        "applied": "as written" if job.function else str(built.plan),
        "flops_scope": "per device",
        "memory_limit": limit,
        "device": target.kind.name if target.kind else devices[0].device_kind,
        "num_devices": len(devices),
        "attention": built.attention,
        "collective_bytes": collectives,
        "collective_kinds": None if target.tpu else hlo.collective_bytes,
        "host_transfer_bytes": host_transfers,
        "lint": built.lint,
        "notes": [
            *([_TPU_NOTE] if target.tpu else []),
            *describe(built.pipeline),
            *built.notes,
            *_short_of_host_memory(memory, target),
        ],
        "bubble": built.pipeline.bubble if built.pipeline else 0.0,
        **_live(dump, text, hlo, target),
        **_estimates(hlo, target),
    }


@dataclass(frozen=True)
class _Built:
    """A compiled step and what is known of it."""

    compiled: Any
    seconds: float
    attention: str
    plan: LayerPlan
    residuals: Any
    lint: list[str]
    count_flops: Callable[[], FlopCount]  # of its jaxpr, over all devices
    pipeline: PipelineSchedule | None = None
    host_bytes: int = 0  # of its arguments
    notes: tuple[str, ...] = ()


def _over(flops: FlopCount, devices: int) -> FlopCount:
    """The share of one device."""
    shares = {phase: getattr(flops, phase) // devices for phase in PHASES}
    return dataclasses.replace(flops, **shares)


def _model_step(job: Job, target: Target) -> _Built:
    prepared = prepare(job.config, target)
    config, placement = prepared.config, prepared.placement
    program = make_program(config, placement)
    compiled, seconds = compile_step(
        program.step,
        program.state,
        program.batch,
        platform=prepared.platform,
        estimate_time=target.is_absent,
    )
    return _Built(
        compiled,
        seconds,
        attention=prepared.attention,
        plan=program.plan,
        residuals=layer_residuals(config, placement),
        lint=lint_program(config, placement, program),
        count_flops=lambda: count_flops(program.step, program.state, program.batch),
        pipeline=config.pipeline,
        host_bytes=program.host_bytes,
        notes=(*prepared.notes, *offload_notes(config, placement, program)),
    )


def _user_step(job: Job, target: Target) -> _Built:
    devices = target.devices()
    step, arguments = load_step(job.function, devices)
    platform = "gpu" if target.is_absent else devices[0].platform
    try:
        compiled, seconds = compile_step(
            step, *arguments, platform=platform, estimate_time=target.is_absent
        )
    except jax.errors.JaxRuntimeError:  # the compiler's
        raise
    except Exception as error:
        raise UserStepError(
            f"{job.function} does not trace: {reason(error)}"
        ) from error
    return _Built(
        compiled,
        seconds,
        attention="",
        plan=LayerPlan((Run(1, NONE),)),
        residuals=lambda policy: [],
        lint=lint_step(step, *arguments),
        count_flops=lambda: count_flops(step, *arguments),
    )


def _short_of_host_memory(memory: MemoryBytes, target: Target) -> list[str]:
    """Of GPUs that are not there, whose machine may allow more."""
    needed = (memory.host_temp_bytes or 0) + (memory.host_argument_bytes or 0)
    short = pinned_shortage(needed, target.gpus, pinned_limit({}))
    return [short] if short else []


def _attached_limit(device: Any) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


def _live(dump: Path, text: str, hlo: Any, target: Target) -> dict[str, Any]:
    """What is live at the peak, and in all of the schedule."""
    module = text.removeprefix("HloModule ").split(",", 1)[0].strip()
    try:
        ranges, assignment = (f.read_text() for f in find_peak_files(dump, module))
    except FileNotFoundError:  # XLA of jax 0.7 writes no live ranges
        return {"peak": [], "timeline": None}
    if target.tpu:  # memories on the chip are as little in its HBM as the host's
        elsewhere = f"color {HOST_SPACE},"
        assignment = re.sub(r"\bcolor [1-9]\d*,", elsewhere, assignment)
    values = peak_values(ranges, assignment, hlo)[:_PEAK_SHOWN]
    timeline = memory_timeline(ranges, assignment, hlo).shortened(_MOMENTS)
    return {
        "peak": [dataclasses.asdict(value) for value in values],
        "timeline": timeline.as_dict(),
    }


def _estimates(hlo: Any, target: Target) -> dict[str, Any]:
    if not target.kind:
        return {"estimated_step_seconds": None, "bound": None}
    estimate = estimate_step_seconds(hlo, target.kind, target.hosts, target.gpus)
    return {
        "estimated_step_seconds": estimate.seconds,
        "estimated_phase_seconds": {
            phase: time.seconds for phase, time in estimate.phases.items()
        },
        "bound": estimate.bound,
    }
