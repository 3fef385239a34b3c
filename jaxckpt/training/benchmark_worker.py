"""The process that runs the steps of one policy for a benchmark, one when told.

``python -m jaxckpt.training.benchmark_worker CACHE`` reads a job as one line of JSON,
compiles its step, makes a state of random weights and a batch of random tokens, and
answers with what is known of it. Then each line on standard input is one step, and
its answer a line: seconds, and the peak of device memory so far. A failure is an
answer too, the last one. When its standard input ends, so does the process, whatever
it is doing.

CACHE keeps compiled programs for a second process of the same policy; on the CPU,
where one process does it all, nothing is kept.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt.compiler.flops import PHASES, count_flops
from jaxckpt.compiler.gpu_kinds import KINDS, GpuKind
from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.schedule import estimate_step_seconds
from jaxckpt.compiler.schedule import matmul_peak as peak_flops
from jaxckpt.compiler.targets import Target
from jaxckpt.training.job import Job
from jaxckpt.training.offload_check import check_offload
from jaxckpt.training.prepare import prepare
from jaxckpt.training.step import Program, make_program

_REASON = 300  # characters of a failure that are told
_EDITIONS = (" Server Edition", " Workstation Edition")  # of one chip, by its cooling
_DTYPES = {"float32": "f32", "bfloat16": "bf16"}


def kind_of(device_kind: str) -> GpuKind | None:
    """The known GPU that a driver's name stands for; None for any other device.

    A driver may leave out the memory that the full name ends with.

    Example:
      >>> kind_of("NVIDIA H200").matmul_flops
      989000000000000.0
      >>> kind_of("NVIDIA GeForce RTX 4090 Laptop GPU")
    """
    for edition in _EDITIONS:
        device_kind = device_kind.removesuffix(edition)
    found = [
        kind for kind in KINDS.values() if f"{kind.name} ".startswith(f"{device_kind} ")
    ]
    return found[0] if len(found) == 1 else None


def make_runner(job: Job, cache: str) -> tuple[dict[str, Any], Callable[[], float]]:
    """Compiles a job's step: (what is known of it, a function that times one step)."""
    prepared = prepare(job.config, Target("attached"))
    config, devices = prepared.config, list(prepared.placement.mesh.devices.flat)
    if prepared.platform == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        jax.config.update("jax_compilation_cache_dir", cache)
    check_offload(config, devices[0])
    program = make_program(config, prepared.placement)
    kind = kind_of(devices[0].device_kind)
    compiled, seconds = compile_step(
        program.step,
        program.state,
        program.batch,
        platform=prepared.platform,
        estimate_time=kind is not None,
    )
    flops = count_flops(program.step, program.state, program.batch)
    state, batch = jax.block_until_ready((program.init(), random_batch(program)))

    def step() -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    sizes = prepared.placement.mesh.shape.items()
    known = {
        "applied": str(program.plan),
        "attention": prepared.attention,
        "platform": prepared.platform,
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "mesh": ",".join(f"{axis}:{size}" for axis, size in sizes if size > 1),
        "memory": memory_bytes(compiled, program.host_bytes).as_dict(),
        "flops": {phase: getattr(flops, phase) for phase in PHASES},
        "recompute_fraction": flops.recompute_fraction,
        "compile_seconds": round(seconds, 3),
        "memory_limit": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "peak_before_steps": peak_in_use(devices),
        "peak_flops": None,
        "predicted_step_seconds": None,
    }
    if kind:
        hlo = parse_hlo(compiled.as_text() or "")
        estimate = estimate_step_seconds(hlo, kind, 1, len(devices))
        known["predicted_step_seconds"] = estimate.seconds
        dtype = _DTYPES[config.architecture.compute_dtype]
        known["peak_flops"] = peak_flops(kind, dtype)
    return known, step


def random_batch(program: Program) -> dict[str, jax.Array]:
    """Tokens of no meaning, where the step wants them; all of them count."""
    random = np.random.default_rng(0)
    shape = program.batch["inputs"].shape
    size = program.model.config.vocab_size
    arrays = {
        "inputs": random.integers(0, size, shape, np.int32),
        "targets": random.integers(0, size, shape, np.int32),
        "weights": np.ones(shape, np.float32),
    }
    return {
        name: jax.device_put(array, program.batch[name].sharding)
        for name, array in arrays.items()
    }


def peak_in_use(devices: Sequence[Any]) -> int | None:
    """The largest of the devices' peaks since this process started; None: not told."""
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return max(peaks) if len(peaks) == len(devices) else None


def failure(error: Exception) -> dict[str, Any]:
    """An answer that says in one line why there are no more."""
    ours = type(error).__module__.startswith("jaxckpt")
    told = (str(error).strip().splitlines() or [""])[0][:_REASON]
    return {
        "error": told if ours else f"{type(error).__name__}: {told}",
        "bad_input": ours and isinstance(error, ValueError),
        "out_of_memory": "RESOURCE_EXHAUSTED" in str(error)
        or isinstance(error, MemoryError),
    }


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    lines: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # in the middle of a compile, too

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        known, step = make_runner(Job.from_json(lines.get()), sys.argv[1])
        print(json.dumps(known), file=answers)
        while lines.get():
            seconds = step()
            peak = peak_in_use(jax.local_devices())
            answer = {"seconds": seconds, "peak_bytes_in_use": peak}
            print(json.dumps(answer), file=answers)
    except Exception as error:
        print(json.dumps(failure(error)), file=answers)
        listener.join()


if __name__ == "__main__":
    _main()
