"""Memory of the attached devices: what is in use, what is left, and why it ran out.

The figures are the allocator's own, from `jax.Device.memory_stats`. What a backend does
not say (a CPU says nothing) is None, "unknown", and never 0.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jaxckpt.units import format_bytes, parse_bytes

# XLA's GPU allocator takes this part of a device, unless a setting says otherwise.
_DEFAULT_FRACTION = 0.75
_NEARLY_ALL = 0.95  # an allocator that holds this part of its limit has preallocated

_OUT_OF_MEMORY = re.compile(
    r"out of memory|out_of_memory|failed to allocate|exceeded \w+ capacity", re.I
)
_AMOUNT = r"([\d.]+ ?[KMGT]?i?B?)\b"
_REQUESTED = (
    re.compile(r"allocat\w+ request for [^(]*\((\d+)B\)"),
    re.compile(rf"allocat(?:e|ing) {_AMOUNT}", re.I),
)
_COMPILED_NEED = re.compile(rf"Used {_AMOUNT} of {_AMOUNT} hbm", re.I)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device in bytes; None where the backend does not say.

    Attributes:
      device: what JAX calls it.
      in_use: bytes of live arrays and of running programs.
      peak: the most that was in use since the process began; it never goes back.
      limit: what the allocator may use in all.
      reserved: set aside by the backend, for nobody's arrays.
      pool: what the allocator has taken from the device so far.
      largest_free_block: the largest array that fits without moving others.
    """

    device: str
    in_use: int | None = None
    peak: int | None = None
    limit: int | None = None
    reserved: int | None = None
    pool: int | None = None
    largest_free_block: int | None = None

    @property
    def headroom(self) -> int | None:
        """What was never used: a policy may keep this much more."""
        if self.limit is None or self.peak is None:
            return None
        return self.limit - max(self.peak, self.in_use or 0)

    @property
    def free(self) -> int | None:
        """What is not in use now, of what the allocator has (or may have) taken."""
        whole = self.limit if self.pool is None else self.pool
        if whole is None or self.in_use is None:
            return None
        return max(0, whole - self.in_use - (self.reserved or 0))

    @property
    def fragmentation(self) -> float | None:
        """The part of the free memory that is not in the largest block, 0 to 1."""
        if self.largest_free_block is None or not self.free:
            return None
        return max(0.0, 1 - self.largest_free_block / self.free)

    @property
    def preallocated(self) -> bool | None:
        """Whether the allocator holds all it may use, from the beginning."""
        if self.pool is None or not self.limit:
            return None
        return self.pool >= _NEARLY_ALL * self.limit

    def as_dict(self) -> dict[str, Any]:
        """JSON data, with what follows from it."""
        derived = ("headroom", "fragmentation", "preallocated")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def device_memory(device: Any) -> DeviceMemory:
    """Memory of a device of this process, as its allocator reports it now.

    Example:
      >>> import jax
      >>> print(device_memory(jax.devices("cpu")[0]).in_use)
      None
    """
    try:
        stats = device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        stats = {}  # absent devices, and backends that raise instead of saying None
    return memory_from_stats(str(device), stats)


def memory_from_stats(device: str, stats: Mapping[str, int]) -> DeviceMemory:
    """Reads `jax.Device.memory_stats`, in which -1 says unknown."""

    def known(*keys: str) -> int | None:
        values = [stats[key] for key in keys if stats.get(key) is not None]
        return next((int(value) for value in values if value >= 0), None)

    memory = DeviceMemory(
        device,
        in_use=known("bytes_in_use"),
        peak=known("peak_bytes_in_use"),
        limit=known("bytes_limit", "bytes_reservable_limit") or None,
        reserved=known("bytes_reserved"),
        pool=known("pool_bytes") or None,
        largest_free_block=known("largest_free_block_bytes"),
    )
    if memory.largest_free_block == 0 and memory.free:
        # XLA's GPU allocator leaves the field at 0: not measured, not full.
        return DeviceMemory(**{**asdict(memory), "largest_free_block": None})
    return memory


def local_memory(devices: Sequence[Any] | None = None) -> list[DeviceMemory]:
    """Memory of every device of this process, the one with least headroom first.

    Devices whose headroom is unknown come last.
    """
    devices = jax.local_devices() if devices is None else devices
    found = [device_memory(device) for device in devices]
    return sorted(found, key=lambda m: (m.headroom is None, m.headroom or 0))


@dataclass(frozen=True)
class Preallocation:
    """How JAX was told to take a GPU's memory.

    Attributes:
      whole: all at once, when JAX starts.
      fraction: of the device's memory, at most.
      allocator: "default" (BFC), "platform", "vmm", "cuda_async".
    """

    whole: bool
    fraction: float
    allocator: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ):
        """Reads XLA's settings; they count for GPUs only."""
        told = environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
        fraction = environ.get("XLA_CLIENT_MEM_FRACTION") or environ.get(
            "XLA_PYTHON_CLIENT_MEM_FRACTION", ""
        )
        allocator = environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
        try:
            part = float(fraction)
        except ValueError:
            part = _DEFAULT_FRACTION
        whole = told not in ("false", "0") and allocator in ("default", "bfc", "")
        return cls(whole, part, allocator or "default")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device's or the host's memory did not suffice.

    Other resources that run out (a kernel's shared memory, a message's size) do not
    count, though XLA gives them the same code.
    """
    text = str(error)
    if "shared memory" in text.lower():
        return False
    return isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY.search(text))


def explain_out_of_memory(
    error: BaseException,
    needed: int | None,
    memory: DeviceMemory,
    *,
    preallocation: Preallocation | None = None,
) -> str:
    """Says in one line why memory ran out, and what would avoid it.

    Args:
      error: see `is_out_of_memory`.
      needed: compiled bytes of the program on one device, as in
        ``compiler.memory.memory_bytes(compiled).device_total_bytes``.
      memory: the device's, as soon after the error as can be.
      preallocation: as set; from the environment when left out.
    """
    settings = preallocation or Preallocation.from_environment()
    text = str(error)
    at_compile_time = _COMPILED_NEED.search(text)
    limit = memory.limit
    if at_compile_time:
        needed = parse_bytes(_with_unit(at_compile_time[1]))
        limit = parse_bytes(_with_unit(at_compile_time[2]))
    if needed is not None and limit is not None and needed > limit:
        return _program_too_large(needed, limit, memory, settings)
    asked = _requested(text)
    what = f"{format_bytes(asked)} more" if asked else "more"
    if limit is None or memory.in_use is None:
        need = f"; the compiled step needs {format_bytes(needed)}" if needed else ""
        return (
            f"out of memory: {what} was asked for{need}; this backend does not say how "
            "much there is. A policy that keeps less (--policy=full, or jaxckpt.plan "
            "with a --memory-budget) or a smaller batch needs less"
        )
    asked = asked or 0
    used = f"{format_bytes(memory.in_use)} of {format_bytes(limit)} in use"
    if memory.in_use + asked > limit:
        return _others_in_this_process(what, used, needed, memory.in_use)
    block, pool = memory.largest_free_block, memory.pool
    blocked = block is not None and asked > block and asked <= (memory.free or 0)
    if pool is not None and asked > max(0, pool - memory.in_use) and not blocked:
        start = "set XLA_PYTHON_CLIENT_PREALLOCATE=true to fail at start instead"
        if settings.whole:
            lower = limit - pool
            start = f"it could not preallocate {format_bytes(lower)} of its limit"
        return (
            f"another process holds memory of {memory.device}: {what} was asked for "
            f"with {used}, and the device gave the allocator only "
            f"{format_bytes(pool)}; {start}; end the other process (nvidia-smi lists "
            "it), or lower XLA_PYTHON_CLIENT_MEM_FRACTION in both"
        )
    if blocked or memory.free is not None and asked <= memory.free:
        largest = "" if block is None else f", at most {format_bytes(block)} of it "
        largest += "" if block is None else "in one piece"
        avoid = (
            "preallocate (XLA_PYTHON_CLIENT_PREALLOCATE=true)"
            if memory.preallocated is False
            else "train with --defragment-every=100"
        )
        return (
            f"memory of {memory.device} is fragmented: {what} was asked for with "
            f"{format_bytes(memory.free)} free{largest}; {avoid}, set "
            "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async, or take a policy that keeps less"
        )
    return f"out of memory: {what} was asked for with {used}; a policy that keeps less"


def _program_too_large(
    needed: int, limit: int, memory: DeviceMemory, settings: Preallocation
) -> str:
    line = (
        f"the step does not fit: compiled, it needs {format_bytes(needed)} on each "
        f"device, and {memory.device} allows {format_bytes(limit)}; take a policy that "
        f"keeps less (jaxckpt.plan --memory-budget={format_bytes(limit)} "
        "finds the cheapest) or a smaller batch"
    ).replace(f"budget={format_bytes(limit)}", f"budget={_compact(limit)}")
    whole = limit / settings.fraction  # the device's own memory, on a GPU
    if memory.pool is not None and needed <= _NEARLY_ALL * whole > limit:
        fraction = f"{min(_NEARLY_ALL, needed / whole + 0.02):.2f}"
        line += f"; XLA_PYTHON_CLIENT_MEM_FRACTION={fraction} would allow it"
    return line


def _others_in_this_process(
    what: str, used: str, needed: int | None, in_use: int
) -> str:
    need = (
        "" if needed is None else f" (the compiled step needs {format_bytes(needed)})"
    )
    return (
        f"out of memory: {what} was asked for with {used}{need}; this process holds "
        "other arrays (jax.live_arrays() lists them): donate the state, delete what is "
        "done with, or take a policy that keeps less"
    )


def _requested(text: str) -> int | None:
    for pattern in _REQUESTED:
        found = pattern.search(text)
        if found:
            return parse_bytes(_with_unit(found[1]))
    return None


def _with_unit(text: str) -> str:
    """XLA writes ``20.00G`` for GiB, and bare bytes."""
    text = text.strip()
    if text[-1] in "KMGT":
        return f"{text}iB"
    return text if text[-1] == "B" else f"{text}B"


def _compact(value: int) -> str:
    return format_bytes(value).replace(" ", "")
