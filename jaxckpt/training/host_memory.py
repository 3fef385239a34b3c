"""Pinned host memory as a place for state, and how each backend is told of it.

Three ways, by the devices:

* *placed*: attached devices that list it. Shardings name the memory kind; arrays are
  there between steps.
* *declared*: GPUs that are only compiled for list no memories. The program itself says
  which of its arguments are there, and XLA compiles the same transfers.
* *none*: nothing to name. The program streams all the same, within device memory.

XLA takes the pinned memory of all GPUs of a process from one pool, and the pool has a
limit: 64 GiB, unless ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`` says otherwise.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding

from jaxckpt import compat
from jaxckpt.models.presets import ConfigError
from jaxckpt.units import format_bytes

PINNED = "pinned_host"
_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_USED = 0.9  # of the pool; its free blocks are in pieces


@dataclass(frozen=True)
class HostMemory:
    """How host memory is used on some devices; see `host_memory`."""

    way: Literal["placed", "declared", "none"]

    @property
    def is_used(self) -> bool:
        return self.way != "none"

    def place(self, sharding: NamedSharding) -> NamedSharding:
        """The same sharding in host memory, where a sharding can say so."""
        if self.way != "placed":
            return sharding
        return sharding.with_memory_kind(PINNED)

    def arrive(self, arguments: Any) -> Any:
        """Arguments of the jitted function around, known to be in host memory."""
        if self.way != "declared":
            return arguments
        return jax.tree.map(compat.in_host_memory, arguments)

    def to_device(self, tree: Any) -> Any:
        return self._move(tree, "Device")

    def to_host(self, tree: Any) -> Any:
        return self._move(tree, "Host")

    def _move(self, tree: Any, space: str) -> Any:
        if not self.is_used:
            return tree
        return jax.device_put(tree, getattr(jax.memory.Space, space))


def state_note(host: HostMemory, what: str, host_bytes: int, platform: str) -> str:
    """Where offloaded state is, and how its bytes were counted, for a receipt."""
    if not host.is_used:
        return (
            f"--offload-optimizer: no pinned host memory can be named here, so {what} "
            "stay on the device; their update is streamed all the same"
        )
    size = f"{format_bytes(host_bytes)} of {what} per device in host memory"
    if platform == "cpu":
        return f"{size}: counted, and taken off XLA's arguments; a CPU has one memory"
    if host.way == "declared":
        return f"{size}: compiled; arguments are declared to be there"
    return f"{size}: compiled"


def host_memory(device: Any) -> HostMemory:
    """How host memory is used on a device, which stands for all of a mesh."""
    kinds = compat.memory_kinds(device)
    if kinds is None:
        return HostMemory("declared" if device.platform == "gpu" else "none")
    return HostMemory("placed" if PINNED in kinds else "none")


def pinned_limit(environ: Mapping[str, str] = os.environ) -> int:
    """Bytes of pinned host memory that XLA has for the GPUs of one process.

    Example:
      >>> pinned_limit({}) // 2**30, pinned_limit({_LIMIT: "200"}) // 2**30
      (64, 200)
    """
    told = environ.get(_LIMIT, "")
    return (int(told) if told.isdecimal() else 64) * 2**30


def pinned_shortage(needed: int | None, devices: int, limit: int) -> str | None:
    """What is short of pinned host memory and how to allow it, in a line.

    Args:
      needed: bytes of one device; None: not known.
      devices: GPUs of one process.
      limit: see `pinned_limit`.
    """
    total = (needed or 0) * devices
    if total <= _USED * limit:
        return None
    return (
        f"{format_bytes(needed)} in host memory for each of {devices} GPUs of a "
        f"process do not fit into XLA's {format_bytes(limit)} of pinned memory: set "
        f"{_LIMIT}={math.ceil(total / _USED / 2**30)}, or offload less"
    )


def check_pinned(needed: int | None, devices: int, platform: str) -> None:
    """Refuses a run on attached GPUs that would run out of pinned host memory.

    Raises:
      ConfigError: see `pinned_shortage`.
    """
    shortage = pinned_shortage(needed, devices, pinned_limit())
    if platform == "gpu" and shortage:
        raise ConfigError(shortage)
