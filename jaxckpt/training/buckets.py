"""Documents in batches by length: each batch is of one bucket, padded to its length.

A document of n tokens is an example of n positions, the last of which predicts that the
document ends. It goes to the shortest bucket that holds it, and what fills it up has
weight 0; a document longer than the longest bucket is cut into pieces of that length.
No example holds two documents, unlike the windows of `jaxckpt.training.data`.

Batches of a bucket come as often as its share of the examples says, evenly spread: its
i-th of n batches in a cycle stands at (i + 1/2) / n. So every example is seen equally
often, whatever its length, and the bucket of any batch is known from the numbers of
examples alone: the same on every process, and after a restart. Within a bucket
examples are shuffled, epoch after epoch. Batch k starts at position k x batch_size;
another batch size makes another order.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from jaxckpt.training.data import Batch, Batches, rows_per_process
from jaxckpt.training.readers import SEPARATOR


class Order:
    """Which bucket each batch is of.

    Args:
      counts: examples in each bucket; some may be 0, not all.

    Example:
      >>> order = Order([4, 2])
      >>> [order[batch] for batch in range(7)]
      [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3), (0, 4)]
    """

    def __init__(self, counts: Sequence[int]):
        self._counts = tuple(counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        buckets = np.repeat(np.arange(len(counts)), counts)
        # Divisions round equally everywhere, and a stable sort breaks ties by bucket.
        order = np.argsort((numbers + 0.5) / np.take(counts, buckets), kind="stable")
        self._buckets, self._numbers = buckets[order], numbers[order]

    def __getitem__(self, batch: int) -> tuple[int, int]:
        """The bucket of a batch, and how many of this bucket came before."""
        cycle, index = divmod(batch, len(self._buckets))
        bucket = int(self._buckets[index])
        return bucket, cycle * self._counts[bucket] + int(self._numbers[index])


@dataclass(frozen=True)
class Buckets:
    """The examples of a text by length.

    Attributes:
      tokens: the text, a 0 byte between documents.
      lengths: positions of an example in each bucket, ascending.
      starts: for each bucket, where its examples start in ``tokens``.
      sizes: for each bucket, the positions that each example uses.
      order: which bucket each batch is of.
    """

    tokens: np.ndarray
    lengths: tuple[int, ...]
    starts: tuple[np.ndarray, ...]
    sizes: tuple[np.ndarray, ...]
    order: Order

    @property
    def counts(self) -> tuple[int, ...]:
        """Examples in each bucket."""
        return tuple(map(len, self.starts))

    @property
    def description(self) -> str:
        """For people: ``by length: 300 examples of up to 256 tokens, ...``."""
        pairs = zip(self.counts, self.lengths, strict=True)
        slots = sum(count * length for count, length in pairs)
        padding = 1 - sum(int(sizes.sum()) for sizes in self.sizes) / slots
        pairs = zip(self.counts, self.lengths, strict=True)
        each = [f"{count:,} of up to {length:,} tokens" for count, length in pairs]
        return f"examples by length: {', '.join(each)}; {padding:.0%} is padding"

    def example(self, bucket: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, each int[size]."""
        start, size = self.starts[bucket][number], self.sizes[bucket][number]
        window = self.tokens[start : start + size + 1]
        end = np.frombuffer(SEPARATOR, np.uint8)[: size + 1 - len(window)]
        return window[:size], np.concatenate([window[1:], end])


def make_buckets(tokens: np.ndarray, lengths: Sequence[int]) -> Buckets:
    """Sorts the documents of a text into buckets.

    Args:
      tokens: integers [num_tokens], 0 between documents and nowhere else.
      lengths: of the buckets, ascending.

    Example:
      >>> text = np.frombuffer(b"one\\0three\\0a longer one", np.uint8)
      >>> buckets = make_buckets(text, [4, 8])
      >>> buckets.counts, [sizes.tolist() for sizes in buckets.sizes]
      ((2, 2), [[3, 4], [5, 8]])
      >>> bytes(buckets.example(0, 0)[1])
      b'ne\\x00'
    """
    (ends,) = np.nonzero(tokens == 0)
    ends = np.append(ends, len(tokens))
    starts = np.concatenate([[0], ends[:-1] + 1])
    longest = lengths[-1]
    pieces = -((starts - ends) // longest)  # of each document; none of an empty one
    first = np.cumsum(pieces) - pieces
    within = np.arange(pieces.sum()) - np.repeat(first, pieces)
    begins = np.repeat(starts, pieces) + longest * within
    sizes = np.minimum(np.repeat(ends, pieces) - begins, longest)
    bucket = np.searchsorted(lengths, sizes)
    chosen = [bucket == index for index in range(len(lengths))]
    return Buckets(
        tokens=tokens,
        lengths=tuple(lengths),
        starts=tuple(begins[mask] for mask in chosen),
        sizes=tuple(sizes[mask] for mask in chosen),
        order=Order([int(mask.sum()) for mask in chosen]),
    )


def bucket_batches(
    buckets: Buckets,
    *,
    batch_size: int,
    accumulate: int = 1,
    seed: int,
    position: int = 0,
    num_sequences: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Batches:
    """Shuffled training batches, each as long as its bucket.

    Arguments and the places of a batch's examples are those of
    `jaxckpt.training.data.batches`. The streams of two batch sizes are different ones:
    a position belongs to its batch size.

    Raises:
      ValueError: if ``position`` or ``num_sequences`` is not a multiple of
        ``batch_size``, or ``batch_size`` not one of ``accumulate * process_count``.
    """
    rows = rows_per_process(batch_size, accumulate, process_index, process_count)
    stop = sys.maxsize // batch_size
    if position % batch_size or (num_sequences or 0) % batch_size:
        raise ValueError(
            f"{position=} and {num_sequences=} must be multiples of {batch_size=}"
        )
    first = position // batch_size
    if num_sequences is not None:
        stop = first + num_sequences // batch_size
    streams = [
        grain.MapDataset.range(max(count, 1)).seed(seed + index).shuffle().repeat()
        for index, count in enumerate(buckets.counts)  # an empty one is never asked
    ]

    def read(batch: int) -> Batch:
        bucket, number = buckets.order[batch]
        shape = (accumulate, rows, buckets.lengths[bucket])
        inputs = np.zeros(shape, np.int32)
        targets, weights = np.zeros_like(inputs), np.zeros(shape, np.float32)
        for part, row in itertools.product(range(accumulate), range(rows)):
            place = (part * process_count + process_index) * rows + row
            example: Any = streams[bucket][number * batch_size + place]
            source, target = buckets.example(bucket, int(example))
            inputs[part, row, : len(source)] = source
            targets[part, row, : len(source)] = target
            weights[part, row, : len(source)] = 1
        return Batch(inputs=inputs, targets=targets, weights=weights)

    dataset = grain.MapDataset.range(first, stop).map(read)
    return Batches(dataset, position=position, batch_size=batch_size)
