"""Compile a step and read its memory, in bytes per device, from the compiler itself."""

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import jax

# On CPU, XLA drops the barriers that keep straight-line recomputation apart from the
# forward pass, and then merges the two: without this no unrolled remat saves a byte.
# It also puts a small loop into one kernel, and ends the process where a barrier is in
# it (tried with jaxlib 0.10.2 and 0.12.0.1): a checkpoint in a layer of a small stack.
_CPU_OPTIONS = {
    "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"
}
_ESTIMATES = {"xla_gpu_collect_cost_model_stats": True}


@dataclass(frozen=True)
class MemoryBytes:
    """Memory of a compiled program, per device; None where the backend does not say.

    Attributes:
      argument_bytes: inputs, among them donated state.
      output_bytes: outputs.
      alias_bytes: outputs that reuse the memory of donated inputs.
      temp_bytes: everything else that is live at the worst moment: activations,
        gradients, workspace.
      host_temp_bytes: temporaries in host memory: offloaded values.
      host_argument_bytes: inputs in host memory: offloaded state, updated in place.
    """

    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    host_temp_bytes: int | None
    host_argument_bytes: int | None = 0

    @property
    def device_total_bytes(self) -> int | None:
        """Arguments + outputs + temporaries - aliased: what a device must hold.

        XLA's own ``peak_memory_in_bytes`` is not used: it is a constant on CPU and
        includes host memory on GPU.
        """
        total = 0
        for part in (self.argument_bytes, self.output_bytes, self.temp_bytes):
            if part is None or self.alias_bytes is None:
                return None
            total += part
        return total - (self.alias_bytes or 0)

    def as_dict(self) -> dict[str, int | None]:
        total = {"device_total_bytes": self.device_total_bytes}
        return dataclasses.asdict(self) | total


def compile_step(
    jitted: Any, *arguments: Any, platform: str, estimate_time: bool = False
) -> tuple[jax.stages.Compiled, float]:
    """Compiles a jitted function for arguments given as shapes; nothing runs.

    Args:
      jitted: a `jax.jit` function.
      *arguments: arrays, or `jax.ShapeDtypeStruct` with shardings.
      platform: "cpu", "gpu", ...: what it is compiled for.
      estimate_time: on GPU, have XLA write its own time estimates into the program,
        where it can: it fails on GPUs whose links it does not know (tried with jax
        0.10.2 and 0.12.0.1: of ours, all but Hopper and B200).

    Returns:
      The compiled program, and seconds of tracing and compiling.
    """
    start = time.perf_counter()
    options = _CPU_OPTIONS if platform == "cpu" else None
    lowered = jitted.lower(*arguments)
    compiled = None
    if estimate_time and platform == "gpu":
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            compiled = lowered.compile(compiler_options=_ESTIMATES)
    compiled = compiled or lowered.compile(compiler_options=options)
    return compiled, time.perf_counter() - start


def memory_bytes(compiled: jax.stages.Compiled, host_arguments: int = 0) -> MemoryBytes:
    """The memory of a compiled program, per device.

    Args:
      compiled: the program.
      host_arguments: bytes of donated arguments that are in host memory. A backend
        that counts them on the device (CPU does) has them taken off there.
    """
    analysis = compiled.memory_analysis()
    fields = {
        "argument_bytes": "argument_size_in_bytes",
        "output_bytes": "output_size_in_bytes",
        "alias_bytes": "alias_size_in_bytes",
        "temp_bytes": "temp_size_in_bytes",
        "host_temp_bytes": "host_temp_size_in_bytes",
        "host_argument_bytes": "host_argument_size_in_bytes",
    }
    found = {ours: getattr(analysis, theirs, None) for ours, theirs in fields.items()}
    known = {
        name: int(value) if value is not None and value >= 0 else None
        for name, value in found.items()
    }
    if not any(known.values()):  # no program takes and gives nothing: all 0 is no news
        known = dict.fromkeys(known)
    known["host_argument_bytes"] = known["host_argument_bytes"] or 0
    if host_arguments and not known["host_argument_bytes"] and any(known.values()):
        known["host_argument_bytes"] = host_arguments
        for name in ("argument_bytes", "output_bytes", "alias_bytes"):
            known[name] = (known[name] or 0) - host_arguments
    return MemoryBytes(**known)
