"""Batches of which each process loads its part, as arrays over all devices."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt.models.presets import ConfigError
from jaxckpt.training.data import Batch


def batch_share(like: jax.ShapeDtypeStruct) -> tuple[int, int]:
    """The part of every micro-batch that the devices of this process hold.

    Processes that hold the same rows, as those along a tensor axis do, load the same.

    Args:
      like: (accumulate, rows, time), with its sharding.

    Returns:
      Which one of how many equal parts of the rows: ``process_index`` and
      ``process_count`` of `jaxckpt.training.data.batches`.

    Raises:
      ConfigError: the rows of this process are no such part.
    """
    rows = like.shape[1]
    assert like.sharding is not None
    places = like.sharding.addressable_devices_indices_map(like.shape)
    spans = [place[1].indices(rows)[:2] for place in places.values() if place]
    part = equal_part(spans, rows)
    if part is None:
        raise ConfigError(
            f"--mesh gives the devices of process {jax.process_index()} rows "
            f"{sorted(set(spans))} of {rows}, which are no equal part; choose sizes "
            "that divide the devices of a process, or that a process's divide"
        )
    return part


def equal_part(spans: Sequence[tuple[int, int]], rows: int) -> tuple[int, int] | None:
    """Which of how many equal parts of some rows spans make up; None if none.

    Example:
      >>> equal_part([(4, 6), (6, 8), (4, 6)], 16)
      (1, 4)
      >>> equal_part([(2, 4), (4, 6)], 8)
    """
    start, stop = min(first for first, _ in spans), max(last for _, last in spans)
    held = {row for span in spans for row in range(*span)}
    size = stop - start
    if len(held) < size or start % size or rows % size:
        return None
    return start // size, rows // size


def to_devices(
    batch: Batch, like: Mapping[str, jax.ShapeDtypeStruct], parts: int
) -> dict[str, jax.Array]:
    """The batch of all processes, of each one's part.

    Args:
      batch: this process's part, (accumulate, rows / parts, time).
      like: the shardings, by name.
      parts: see `batch_share`.
    """

    def whole(name: str, array: Any) -> jax.Array:
        shape = (array.shape[0], array.shape[1] * parts, array.shape[2])
        sharding: Any = like[name].sharding
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return {name: whole(name, np.asarray(array)) for name, array in batch.items()}
