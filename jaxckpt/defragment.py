"""Defragmentation of device memory: the state goes to host memory and comes back.

An allocator cannot move an array that is in use, so free memory between long-lived
arrays stays in pieces, and a large temporary can fail where there is enough in all.
Once the arrays are copied to the host, all are freed, and then they are put back, the
largest first, they lie next to each other and the free memory is in one piece. It costs
host memory for the state of this process's devices, and its way over the link twice.

JAX has a `defragment` on its clients too (`jax.extend.backend.get_backend`), which CPUs
answer with UNIMPLEMENTED (jax 0.7.2, 0.10.2 and 0.12.0); this needs no such support,
moves the given arrays only, and works with those of other processes around.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.device_memory import DeviceMemory, local_memory


@dataclass(frozen=True)
class Defragmentation:
    """What one defragmentation did.

    Attributes:
      seconds: that it took.
      before, after: memory of every device, in the same order.
    """

    seconds: float
    before: tuple[DeviceMemory, ...]
    after: tuple[DeviceMemory, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds; and the largest free block, in bytes, on the device where it is
        smallest, before and after, where the backend tells."""
        found: dict[str, float] = {"defragment_seconds": round(self.seconds, 6)}
        for when, devices in ("before", self.before), ("after", self.after):
            blocks = [m.largest_free_block for m in devices]
            known = [block for block in blocks if block is not None]
            if known:
                found[f"largest_free_block_{when}"] = min(known)
        return found


def why_not(devices: Sequence[Any]) -> str:
    """Why memory of these devices cannot be defragmented; empty when it can.

    Example:
      >>> import jax
      >>> why_not(jax.devices("cpu"))
      'arrays of a cpu are in host memory, which the operating system manages'
    """
    if any(device.platform == "cpu" for device in devices):
        return "arrays of a cpu are in host memory, which the operating system manages"
    return ""


def defragment(
    tree: Any, devices: Sequence[Any] | None = None
) -> tuple[Any, Defragmentation]:
    """Puts a tree's arrays next to each other in the memory of their devices.

    Not for: arrays that others refer to; the old ones are deleted, as if donated.

    Args:
      tree: of arrays, such as a whole training state: what else is on the devices is
        not moved. Arrays in host memory and what is no array stay as they are.
      devices: whose memory is told; those of this process when left out.

    Returns:
      The same tree, every array as it was: values, sharding, dtype; and what it did.

    Raises:
      MemoryError: the host has no room for the copies; nothing was moved.

    Example:
      >>> import jax.numpy as jnp
      >>> old = {"w": jnp.arange(3.0)}
      >>> new, done = defragment(old)
      >>> new["w"].tolist(), old["w"].is_deleted()
      ([0.0, 1.0, 2.0], True)
    """
    devices = jax.local_devices() if devices is None else devices
    clock = time.perf_counter()
    leaves, structure = jax.tree.flatten(tree)
    moved = [index for index, leaf in enumerate(leaves) if _is_on_device(leaf)]
    jax.block_until_ready([leaves[index] for index in moved])
    before = _memory(devices)
    copies = {index: _HostCopy(leaves[index]) for index in moved}
    for index in moved:
        leaves[index].delete()
    for index in sorted(moved, key=lambda index: -copies[index].nbytes):
        leaves[index] = copies.pop(index).put_back()
    jax.block_until_ready([leaves[index] for index in moved])
    seconds = time.perf_counter() - clock
    done = Defragmentation(seconds, before, _memory(devices))
    return jax.tree.unflatten(structure, leaves), done


class _HostCopy:
    """This process's part of an array, in host memory: each slice of it once."""

    def __init__(self, array: jax.Array):
        self._key_type = None
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            self._key_type = jax.random.key_impl(array)
            array = jax.random.key_data(array)
        self._shape, self._sharding = array.shape, array.sharding
        self._slices: dict[Any, np.ndarray] = {}
        self._places: list[tuple[Any, Any]] = []  # device and slice
        for shard in array.addressable_shards:
            place = tuple((part.start, part.stop) for part in shard.index)
            self._places.append((shard.device, place))
            if place not in self._slices:
                self._slices[place] = np.array(shard.data)  # never a view
        self.nbytes = max(part.nbytes for part in self._slices.values())

    def put_back(self) -> jax.Array:
        kind = self._sharding.memory_kind
        shards = [
            jax.device_put(
                self._slices[place],
                jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
            )
            for device, place in self._places
        ]
        array = jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, shards
        )
        if self._key_type is None:
            return array
        return jax.random.wrap_key_data(array, impl=self._key_type)


def _is_on_device(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or not leaf.addressable_shards:
        return False
    device = leaf.addressable_shards[0].device
    kind = leaf.sharding.memory_kind
    return kind is None or kind == device.default_memory().kind


def _memory(devices: Sequence[Any]) -> tuple[DeviceMemory, ...]:
    by_name = {memory.device: memory for memory in local_memory(devices)}
    return tuple(by_name[str(device)] for device in devices)
