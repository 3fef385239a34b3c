"""Compile one training step for a target, in a process of its own, into a report row.

A compile for absent GPUs needs JAX to start on the CPU and XLA to write its buffer
assignment, and both are decided before JAX is imported; so each compile is a job in a
new process: JSON on standard input, JSON on standard output.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxckpt.compiler.targets import Target, TargetError, parse_target
from jaxckpt.layers import LayerPlan, Run
from jaxckpt.models.presets import ModelConfig
from jaxckpt.policies import NONE
from jaxckpt.training.config import TrainConfig

_RESULT = "jaxckpt-row: "
_PEAK_SHOWN = 24
_REASON = 300  # characters of a failure that are told


@dataclass(frozen=True)
class Job:
    """A step to compile.

    Attributes:
      config: its policy, model, mesh and sizes.
      target: as `jaxckpt.compiler.targets.parse_target` reads it.
      function: ``package.module:make_step`` of a user's own step, which is compiled
        instead of the model's; see `jaxckpt.compiler.user_step`.
    """

    config: TrainConfig
    target: str
    function: str = ""

    @property
    def policy(self) -> str:
        """What the row is called."""
        return self.function or self.config.policy

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        data = json.loads(text)
        config = data["config"]
        config["architecture"] = ModelConfig(**config["architecture"])
        config["data"] = tuple(config["data"])
        return cls(TrainConfig(**config), data["target"], data["function"])


def run_job(job: Job, cache: Path) -> dict[str, Any]:
    """Runs a job in a new process, or takes its row from the cache.

    Args:
      job: what to compile.
      cache: folder of rows by content: the job, its target, the version of JAX and our
        own code. Steps of a user and attached devices are compiled every time: what
        they depend on cannot be seen from here.

    Returns:
      The row, or ``{"policy", "error", "bad_input"}`` with the reason in one line, and
      whether what was asked for is at fault.
    """
    path = cache / f"{_digest(job)}.json"
    is_cached = not job.function and job.target != "attached"
    if is_cached and path.exists():
        return json.loads(path.read_text())
    with tempfile.TemporaryDirectory(prefix="jaxckpt-dump-") as dump:
        done = subprocess.run(
            [sys.executable, "-m", "jaxckpt.training.job", dump],
            input=job.as_json(),
            capture_output=True,
            text=True,
            env=_environment(job.target, dump),
        )
    found = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not found:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        reason = f"the compiler ended with code {done.returncode}: {reason}"
        return {"policy": job.policy, "error": reason, "bad_input": False}
    row = json.loads(found[0].removeprefix(_RESULT))
    if is_cached and "error" not in row:
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(row))
        partial.replace(path)
    return row


def compile_row(job: Job, dump: Path) -> dict[str, Any]:
    """Compiles a job's step in this process; its row, but for `activation_saving`."""
    import jax

    from jaxckpt.compiler.hlo import parse_hlo
    from jaxckpt.compiler.memory import memory_bytes
    from jaxckpt.receipt import CompiledStep, step_row

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
    memory = memory_bytes(built.compiled)
    text = built.compiled.as_text()
    hlo = parse_hlo(text)
    devices = target.devices()
    limit = target.memory_limit or _attached_limit(devices[0])
    step = CompiledStep(
        policy=job.policy,
        plan=built.plan,
        memory=memory,
        flops=hlo.flops,
        residuals=built.residuals,
        compile_seconds=built.seconds,
    )
    return step_row(step, memory, limit) | {
        "applied": "as written" if job.function else str(built.plan),
        "memory_limit": limit,
        "device": target.kind.name if target.kind else devices[0].device_kind,
        "num_devices": len(devices),
        "attention": built.attention,
        "collective_bytes": {
            phase: sum(kinds.values()) for phase, kinds in hlo.collective_bytes.items()
        },
        "host_transfer_bytes": hlo.host_transfer_bytes,
        "lint": built.lint,
        "peak": _peak(dump, text, hlo),
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


def _model_step(job: Job, target: Target) -> _Built:
    from jaxckpt.compiler.memory import compile_step
    from jaxckpt.training.inspect import layer_residuals, lint_program
    from jaxckpt.training.prepare import prepare
    from jaxckpt.training.step import make_program

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
    )


def _user_step(job: Job, target: Target) -> _Built:
    import jax

    from jaxckpt.compiler.memory import compile_step
    from jaxckpt.compiler.user_step import UserStepError, load_step, reason
    from jaxckpt.linter import lint_step

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
    )


def _attached_limit(device: Any) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


def _peak(dump: Path, text: str, hlo: Any) -> list[dict[str, Any]]:
    from jaxckpt.compiler.peak import find_peak_files, peak_values

    module = text.removeprefix("HloModule ").split(",", 1)[0].strip()
    files = find_peak_files(dump, module)
    values = peak_values(*(file.read_text() for file in files), hlo)
    return [dataclasses.asdict(value) for value in values[:_PEAK_SHOWN]]


def _estimates(hlo: Any, target: Target) -> dict[str, Any]:
    from jaxckpt.compiler.schedule import estimate_step_seconds

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


def _environment(target: str, dump: str) -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags.strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if target != "attached":
        environment["JAX_PLATFORMS"] = "cpu"
    return environment


def _digest(job: Job) -> str:
    """Of everything that a row depends on."""
    content = hashlib.sha256(job.as_json().encode())
    content.update(parse_target(job.target).config.encode())
    for name in sorted(os.environ):
        if name.startswith(("JAX_", "XLA_")):
            content.update(f"{name}={os.environ[name]}".encode())
    for package in ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "nvidia-cudnn-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            content.update(importlib.metadata.version(package).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:32]


def _main() -> None:
    job = Job.from_json(sys.stdin.read())
    try:
        row = compile_row(job, Path(sys.argv[1]))
    except Exception as error:
        ours = type(error).__module__.startswith("jaxckpt")
        told = (str(error).strip().splitlines() or [""])[0][:_REASON]
        row = {
            "policy": job.policy,
            "error": told if ours else f"{type(error).__name__}: {told}",
            "bad_input": ours and isinstance(error, ValueError),
        }
    print(_RESULT + json.dumps(row))


if __name__ == "__main__":
    _main()
