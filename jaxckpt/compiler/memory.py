"""Compile a step and read its memory, in bytes per device, from the compiler itself."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import jax

# On CPU, XLA drops the barriers that keep straight-line recomputation apart from the
# forward pass, and then merges the two: without this no unrolled remat saves a byte.
_CPU_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


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
    """

    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    host_temp_bytes: int | None

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
    jitted: Any, *arguments: Any, platform: str
) -> tuple[jax.stages.Compiled, float]:
    """Compiles a jitted function for arguments given as shapes; nothing runs.

    Args:
      jitted: a `jax.jit` function.
      *arguments: arrays, or `jax.ShapeDtypeStruct` with shardings.
      platform: "cpu", "gpu", ...: what it is compiled for.

    Returns:
      The compiled program, and seconds of tracing and compiling.
    """
    start = time.perf_counter()
    options = _CPU_OPTIONS if platform == "cpu" else None
    compiled = jitted.lower(*arguments).compile(compiler_options=options)
    return compiled, time.perf_counter() - start


def memory_bytes(compiled: jax.stages.Compiled) -> MemoryBytes:
    """The memory of a compiled program, per device."""
    analysis = compiled.memory_analysis()

    def read(field: str, zero_is_known: bool) -> int | None:
        value = getattr(analysis, field, None)
        if value is None or value < 0 or (value == 0 and not zero_is_known):
            return None
        return int(value)

    # A step without inputs, outputs or temporaries does not exist: 0 means that the
    # backend does not know. Nothing aliased or nothing offloaded is possible.
    return MemoryBytes(
        argument_bytes=read("argument_size_in_bytes", False),
        output_bytes=read("output_size_in_bytes", False),
        alias_bytes=read("alias_size_in_bytes", True),
        temp_bytes=read("temp_size_in_bytes", False),
        host_temp_bytes=read("host_temp_size_in_bytes", True),
    )
