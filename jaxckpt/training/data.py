"""From tokens to batches: an endless shuffled stream that can start anywhere.

The stream is defined example by example. Example n (n = 0, 1, 2, ... for ever) is one
window of `seq_len + 1` tokens, and which one depends on the tokens, `seq_len`, the seed
and n alone: epoch after epoch, Grain permutes the windows. A position in the stream is
therefore a single integer, the number of sequences consumed, and a run can go on from
it with another batch size, another accumulation or another number of processes.

Windows start every `seq_len` tokens and overlap by one token, so every token but the
first is a target once; the last, incomplete window is left out of training and padded
in validation.
"""

from collections.abc import Iterator
from typing import TypedDict

import grain
import numpy as np


class Batch(TypedDict):
    inputs: np.ndarray  # int32[accumulate, sequences, seq_len]
    targets: np.ndarray  # int32[accumulate, sequences, seq_len]: the next tokens
    weights: np.ndarray  # float32[accumulate, sequences, seq_len]: 0 on padding


class Batches(Iterator[Batch]):
    """The iterator `batches` returns; threads read ahead until it is closed.

    Use it in a `with` block or call `close`; a forgotten one ends with the program.
    """

    def __init__(self, dataset: grain.MapDataset, *, position: int, batch_size: int):
        # Two batches ahead hide the reading; more would only hold memory.
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
        self._iterator = iter(dataset.to_iter_dataset(options))
        self._batch_size = batch_size
        self.position = position
        """Sequences consumed by all processes so far, to go on from after a restart."""

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self.position += self._batch_size
        return batch

    def close(self) -> None:
        self._iterator.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def batches(
    tokens: np.ndarray,
    *,
    seq_len: int,
    batch_size: int,
    accumulate: int = 1,
    seed: int,
    position: int = 0,
    num_sequences: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Batches:
    """Shuffled training batches, from any position in the stream.

    Every batch holds the next `batch_size` examples, cut into `accumulate`
    micro-batches of consecutive examples, and every micro-batch into one contiguous
    block per process. With `rows = batch_size // accumulate // process_count`, row r of
    micro-batch m on process k is example

        position + (m * process_count + k) * rows + r

    This is what `jax.make_array_from_process_local_data` expects for a global array of
    shape [accumulate, batch_size // accumulate, seq_len] sharded along its second axis,
    on a mesh whose devices are in the order of their processes.

    Args:
      tokens: integers [num_tokens], in memory or memory-mapped.
      batch_size: sequences per batch, over all micro-batches and processes.
      seed: any integer from 0 on.
      position: sequences consumed before, whatever the batch size was then.
      num_sequences: stop after so many further sequences; None never stops.

    Raises:
      ValueError: if `batch_size` is not a multiple of `accumulate * process_count`,
        `num_sequences` not one of `batch_size`, `tokens` shorter than one window, or
        a number out of range.

    Example:
      >>> stream = batches(np.arange(9), seq_len=2, batch_size=4, accumulate=2, seed=0)
      >>> with stream:
      ...     batch = next(stream)
      >>> batch["inputs"].shape, stream.position
      ((2, 2, 2), 4)
    """
    rows = rows_per_process(batch_size, accumulate, process_index, process_count)
    num_windows = (len(tokens) - 1) // seq_len
    if num_windows < 1:
        raise ValueError(
            f"{len(tokens)} tokens hold no window of seq_len + 1 = {seq_len + 1}"
        )
    if seed < 0 or position < 0:
        raise ValueError(f"seed and position start at 0, got {seed=} and {position=}")
    stop = None
    if num_sequences is not None:
        if num_sequences % batch_size:
            raise ValueError(f"{num_sequences=} is not a multiple of {batch_size=}")
        stop = position + num_sequences

    def read(windows: np.ndarray) -> Batch:  # windows: int[batch_size]
        mine = windows.reshape(accumulate, process_count, rows)[:, process_index]
        sequences = np.stack(
            [tokens[i * seq_len : (i + 1) * seq_len + 1] for i in mine.flat]
        )
        sequences = sequences.astype(np.int32).reshape(accumulate, rows, seq_len + 1)
        inputs, targets = sequences[..., :-1].copy(), sequences[..., 1:].copy()
        weights = np.ones(targets.shape, np.float32)
        return Batch(inputs=inputs, targets=targets, weights=weights)

    # Window numbers are shuffled and batched, so a process reads its own windows only.
    stream = grain.MapDataset.range(num_windows).seed(seed).shuffle().repeat()
    dataset = stream[position:stop].batch(batch_size, drop_remainder=True).map(read)
    return Batches(dataset, position=position, batch_size=batch_size)


def validation_batches(
    tokens: np.ndarray,
    *,
    seq_len: int,
    batch_size: int,
    max_batches: int | None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """The windows of `tokens` in order, once, in batches of one shape.

    Of each batch, [1, batch_size, seq_len] over all processes, a process gets its
    contiguous block of rows. What fills up the last window, and the last batch, has
    weight 0. All processes get the same number of batches, at most `max_batches`.

    Raises:
      ValueError: if `batch_size` is not a multiple of `process_count`, or there are
        fewer than two tokens, so none to predict.
    """
    rows = rows_per_process(batch_size, 1, process_index, process_count)
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} tokens hold none to predict; at least 2 do")
    num_batches = -(-(len(tokens) - 1) // (seq_len * batch_size))
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)

    def read(number: int) -> Batch:
        inputs = np.zeros((rows, seq_len), np.int32)
        targets, weights = np.zeros_like(inputs), np.zeros(inputs.shape, np.float32)
        first = number * batch_size + process_index * rows
        for row in range(rows):
            start = (first + row) * seq_len
            window = tokens[start : start + seq_len + 1]
            if (count := len(window) - 1) > 0:
                inputs[row, :count], targets[row, :count] = window[:-1], window[1:]
                weights[row, :count] = 1
        return Batch(inputs=inputs[None], targets=targets[None], weights=weights[None])

    return map(read, range(num_batches))


def rows_per_process(
    batch_size: int, accumulate: int, process_index: int, process_count: int
) -> int:
    """Sequences per micro-batch and process."""
    if not 0 <= process_index < process_count:
        raise ValueError(f"{process_index=} is not below {process_count=}")
    if batch_size < 1 or accumulate < 1:
        raise ValueError(f"{batch_size=} and {accumulate=} must be at least 1")
    if batch_size % (accumulate * process_count):
        raise ValueError(
            f"{batch_size=} is not a multiple of accumulate * process_count = "
            f"{accumulate} * {process_count}"
        )
    return batch_size // (accumulate * process_count)
