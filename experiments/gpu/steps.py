"""One policy's steps in a process of its own: its peak, and where its time goes.

    python -m experiments.gpu.steps --steps=3 --profiled=5 < job.json

The peak that a backend tells of never goes back, so every policy has a process. It
takes a `jaxckpt.training.job.Job` as JSON and prints two rows: what the compiler said
the step needs beside what the allocator gave out, then the monitor's share of
recomputation beside the FLOPs'. ``--keep=FOLDER`` also leaves a profile of one step and
the compiled program there, to look at when the monitor cannot read the profile.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from experiments.gpu.process import (
    Row,
    failed_row,
    failure,
    print_rows,
    row,
    run_rows,
)
from experiments.gpu.sizes import Ask
from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.targets import Target
from jaxckpt.device_memory import device_memory
from jaxckpt.monitor import Monitor
from jaxckpt.training.benchmark_worker import peak_in_use, random_batch
from jaxckpt.training.job import Job
from jaxckpt.training.prepare import prepare
from jaxckpt.training.step import make_program
from jaxckpt.units import format_bytes

OVER, UNDER = 1.02, 0.9  # of the compiled total, what a peak may be
JOINED = 0.9  # of the instructions' time that the monitor has to know
NONE_SEEN = 0.01  # of a step, what may be taken for recomputation where none is

_OUTLINED = 12  # lines of a profile's plane that are described
_SAMPLES = 3  # events of each


def run_policy(job: Job, steps: int, profiled: int, keep: Path | None) -> Iterator[Row]:
    """Compiles and runs a job's step on the attached device; see the module."""
    prepared = prepare(job.config, Target("attached"))
    devices = list(prepared.placement.mesh.devices.flat)
    program = make_program(prepared.config, prepared.placement)
    arguments = (program.state, program.batch)
    compiled, seconds = compile_step(
        program.step, *arguments, platform=prepared.platform
    )
    flops = count_flops(program.step, *arguments)
    state, batch = jax.block_until_ready((program.init(), random_batch(program)))
    before = peak_in_use(devices)

    def step() -> None:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, batch))
        loss.append(float(metrics["loss"]))

    loss: list[float] = []
    for _ in range(steps):
        step()
    yield memory_row(
        job.policy,
        memory_bytes(compiled).as_dict(),
        before,
        peak_in_use(devices),
        attention=prepared.attention,
        applied=str(program.plan),
        compile_seconds=round(seconds, 1),
        allocator=device_memory(devices[0]).as_dict(),
        losses=loss,
    )
    if not profiled:
        return
    try:
        share = flops.recompute / flops.total
        yield monitor_row(job.policy, compiled, step, profiled, share)
    except Exception as error:
        yield failed_row(f"{job.policy} time", failure(error), "profiled")
    if keep:
        yield outline_row(job.policy, compiled, step, keep)


def memory_row(
    policy: str,
    memory: dict[str, int | None],
    before: int | None,
    peak: int | None,
    **figures: Any,
) -> Row:
    """What was compiled against what was in use.

    Args:
      policy: of the step.
      memory: its compiled bytes.
      before: the peak in use before the first step; None: the backend does not tell.
      peak: the same after the last.
      **figures: more for the file.

    Example:
      >>> memory = {"device_total_bytes": 2**30, "host_temp_bytes": 0}
      >>> memory_row("full", memory, 2**20, 2**30)["checks"]
      {'peak within the compiled total': 'passed', 'no less than 90% of it': 'passed'}
    """
    total = memory["device_total_bytes"]
    within = enough = None
    if total is None or peak is None:
        told = "peak in use unknown: this backend does not tell"
    elif peak == before:
        told = f"peak in use {format_bytes(peak)} is of the start: the step's is below"
        within = peak <= OVER * total or None
    else:
        within, enough = peak <= OVER * total, peak >= UNDER * total
        told = f"peak in use {format_bytes(peak)}, {peak / total:.1%} of it"
    compiled = "unknown" if total is None else format_bytes(total)
    checks = {
        "peak within the compiled total": within,
        f"no less than {UNDER:.0%} of it": enough,
    }
    if "offload" in policy:  # a backend that tells no peak has one memory
        host = memory["host_temp_bytes"]
        told += f"; host {'unknown' if host is None else format_bytes(host)}"
        checks["moved to host"] = None if peak is None or host is None else host > 0
    return row(
        f"{policy} memory",
        f"compiled {compiled}; {told}",
        checks,
        policy=policy,
        peak_before_steps=before,
        peak_bytes_in_use=peak,
        **memory,
        **figures,
    )


def monitor_row(
    policy: str,
    compiled: Any,
    step: Callable[[], None],
    profiled: int,
    flop_share: float,
) -> Row:
    """The monitor's share of recomputation, beside the share of the FLOPs."""
    said: list[str] = []
    monitor = Monitor(compiled, every=1, budget=None, say=said.append)
    with monitor.step(0):  # the first one is never profiled
        step()
    times, metrics = [], {}
    for number in range(1, profiled + 1):
        with monitor.step(number) as seen:
            step()
        if seen.times:
            times.append(seen.times)
            metrics = seen.metrics
    if not times:
        reason = (said or ["the monitor profiled no step"])[-1]
        return failed_row(f"{policy} time", reason, "profiled")
    share = statistics.median(one.recompute_share_of_step for one in times)
    joined = min(one.joined for one in times)
    checks: dict[str, bool | None] = {
        f"{JOINED:.0%} of the time is known": joined >= JOINED
    }
    if flop_share > 0:
        checks["recomputation is seen"] = share > 0
    elif policy == "none":
        checks["no recomputation is seen"] = share <= NONE_SEEN
    return row(
        f"{policy} time",
        f"recomputation {share:.1%} of the step, {flop_share:.1%} of its FLOPs; "
        f"{joined:.1%} joined",
        checks,
        policy=policy,
        profile_share_of_step=share,
        flop_share_of_step=flop_share,
        profile_share_of_backward=statistics.median(
            one.recompute_share_of_backward for one in times
        ),
        joined_share=joined,
        last_step=metrics,
        hidden_communication_ms=1e3 * times[-1].hidden_communication,
        said=said,
    )


def outline_row(
    policy: str, compiled: Any, step: Callable[[], None], folder: Path
) -> Row:
    """Leaves a profile and its program in a folder; what the profile holds."""
    name = f"{policy} profile"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "program.hlo.txt").write_text(compiled.as_text() or "")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        jax.profiler.start_trace(str(folder), profiler_options=options)
        step()
        jax.profiler.stop_trace()
        (file, *_) = folder.rglob("*.xplane.pb")
        planes = outline(jax.profiler.ProfileData.from_file(str(file)))
    except Exception as error:
        return failed_row(name, failure(error), "kept")
    names = ", ".join(plane["name"] for plane in planes)
    return row(name, f"planes {names}", {}, planes=planes)


def outline(profile: Any) -> list[dict[str, Any]]:
    """What a `jax.profiler.ProfileData` is made of, with a few events of each line."""
    planes = []
    for plane in profile.planes:
        lines = []
        for line in list(plane.lines)[:_OUTLINED]:
            events = list(line.events)
            middle = len(events) // 2
            samples = [
                {
                    "name": event.name[:120],
                    "stats": {key: str(value)[:80] for key, value in event.stats},
                }
                for event in events[middle : middle + _SAMPLES]
            ]
            lines.append({"name": line.name, "events": len(events), "some": samples})
        planes.append({"name": plane.name, "lines": lines})
    return planes


def policy_rows(
    ask: Ask, policy: str, seconds: float, profiled: int, keep: Path | None = None
) -> list[Row]:
    """`run_policy` in a process of its own; why it ended early is a row, too."""
    arguments = ["-m", "experiments.gpu.steps"]
    arguments += [f"--steps={ask.sizes.steps}", f"--profiled={profiled}"]
    if keep:
        arguments.append(f"--keep={keep}")
    given = Job(ask.sizes.config(policy), "attached").as_json()
    rows, reason = run_rows(arguments, seconds, given=given)
    return [*rows, failed_row(policy, reason)] if reason else rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--profiled", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    job = Job.from_json(sys.stdin.read())
    try:
        print_rows(run_policy(job, options.steps, options.profiled, options.keep))
    except Exception as error:
        print_rows([failed_row(job.policy, failure(error))])


if __name__ == "__main__":
    main()
