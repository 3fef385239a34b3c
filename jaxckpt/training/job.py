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

from jaxckpt.compiler.targets import parse_target
from jaxckpt.models.presets import ModelConfig
from jaxckpt.training.config import TrainConfig

_RESULT = "jaxckpt-row: "
_PACKAGES = (
    "jax", "jaxlib", "flax", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "libtpu",
)  # fmt: skip
_REASON = 300  # characters of a failure that are told
_TIMEOUT = 30 * 60  # seconds; the longest compile seen took under five minutes


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
      whether what was asked for is at fault. A compiler that hangs is stopped.
    """
    path = cache / f"{_digest(job)}.json"
    is_cached = not job.function and job.target != "attached"
    if is_cached and path.exists():
        return json.loads(path.read_text())
    with tempfile.TemporaryDirectory(prefix="jaxckpt-dump-") as dump:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "jaxckpt.training.job", dump],
                input=job.as_json(),
                capture_output=True,
                text=True,
                env=environment(job.target, f"--xla_dump_to={dump}"),
                timeout=_TIMEOUT,
            )
        except subprocess.TimeoutExpired as late:
            reason = f"the compiler was stopped after {late.timeout / 60:.3g} minutes"
            return {"policy": job.policy, "error": reason, "bad_input": False}
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


def ask(module: str, job: Job, marker: str) -> tuple[str | None, str]:
    """Runs a module on a job in a new process; what it printed behind a marker.

    Returns:
      The answer, None if there is none, and then the last line it said of why.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=job.as_json(),
        capture_output=True,
        text=True,
        env=environment(job.target),
    )
    for line in done.stdout.splitlines():
        if line.startswith(marker):
            return line.removeprefix(marker), ""
    return None, (done.stderr.strip().splitlines() or ["no message"])[-1]


def environment(target: str, flags: str = "") -> dict[str, str]:
    """Of a process that traces or compiles for a target, with more XLA flags."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    found = {
        **os.environ,
        "XLA_FLAGS": flags.strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if target != "attached":
        found["JAX_PLATFORMS"] = "cpu"
    if parse_target(target).tpu:  # there is none to ask about, or to have alone
        found["TPU_SKIP_MDS_QUERY"] = "1"
        found["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    return found


def _digest(job: Job) -> str:
    """Of everything that a row depends on."""
    content = hashlib.sha256(job.as_json().encode())
    content.update(parse_target(job.target).config.encode())
    for name in sorted(os.environ):
        if name.startswith(("JAX_", "XLA_", "LIBTPU_")):
            content.update(f"{name}={os.environ[name]}".encode())
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            content.update(importlib.metadata.version(package).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:32]


def _main() -> None:
    from jaxckpt.training.row import compile_row

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
