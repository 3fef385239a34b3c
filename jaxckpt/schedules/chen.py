"""Sublinear memory: segments of which the inputs are kept, one more forward pass.

Segments that end where the stored sizes add up to a limit keep about limit + inputs
bytes: ``sqrt(n)`` segments of a chain of n equal layers hold ``2 sqrt(n)`` of them.
Cheap and near enough for a first plan; `rotor_schedule` also weighs times, and nests.
The recursive form of the paper, log2(n) memory, is not here: for equal steps
`revolve_schedule` is never worse.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"
(arXiv 1604.06174), section 4.3 and algorithm 3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from jaxckpt.layers import sqrt_group
from jaxckpt.schedules.tree import Checkpointed, Schedule, Stage


@dataclass(frozen=True)
class Segments:
    """Where a chain is cut, and what that holds in memory.

    Attributes:
      starts: the first stage of each segment; the first one is 0.
      checkpoints: sizes of the kept inputs of segments, the chain's own left out [x].
      largest: the stored sizes of the largest segment [y].
    """

    starts: tuple[int, ...]
    checkpoints: int
    largest: int

    @property
    def memory(self) -> int:
        return self.checkpoints + self.largest


def checkpoints_and_live(num_layers: int) -> int:
    """The least of k + ceil(n/k): inputs of k segments and the layers of a live one.

    Example:
      >>> checkpoints_and_live(100)
      20
    """
    size = sqrt_group(num_layers)
    return -(-num_layers // size) + size


def sqrt_schedule(num_layers: int) -> Schedule:
    """Segments of `jaxckpt.layers.sqrt_group` layers.

    Raises:
      ValueError: there is no layer.

    Example:
      >>> sqrt_schedule(8)
      Schedule('[0 1] [2 3] [4 5] 6 7')
    """
    if num_layers < 1:
        raise ValueError(f"a chain has at least one layer, not {num_layers}")
    return segmented(range(0, num_layers, sqrt_group(num_layers)), num_layers)


def segmented(starts: Iterable[int], num_stages: int) -> Schedule:
    """Checkpoints every segment but the last, whose turn comes at once.

    Args:
      starts: the first stage of each segment, ascending from 0.
      num_stages: length of the chain.

    Example:
      >>> segmented([0, 3], num_stages=5)
      Schedule('[0 1 2] 3 4')
    """
    bounds = [*starts, num_stages]
    *before, last = (
        tuple(map(Stage, range(start, end)))
        for start, end in zip(bounds, bounds[1:], strict=False)
    )
    return Schedule((*map(Checkpointed, before), *last))


def greedy_segments(
    outputs: Sequence[int], limit: int, kept: Sequence[int] | None = None
) -> Segments:
    """Algorithm 3: a segment ends with the stage that takes it over the limit.

    Args:
      outputs: size of each stage's output.
      limit: stored sizes per segment; the paper's B.
      kept: size of what each stage stores while its segment is live; None for that of
        its output, as in the paper.

    Example:
      >>> greedy_segments([1, 4, 2, 3, 1, 2], limit=4)
      Segments(starts=(0, 2, 4), checkpoints=7, largest=5)
    """
    kept = _stored(outputs, kept)
    starts, checkpoints, largest, live = [0], 0, 0, 0
    for index, size in enumerate(kept):
        live += size
        largest = max(largest, live)
        if live > limit and index + 1 < len(kept):
            starts.append(index + 1)
            checkpoints += outputs[index]
            live = 0
    return Segments(tuple(starts), checkpoints, largest)


def best_segments(
    outputs: Sequence[int], kept: Sequence[int] | None = None
) -> Segments:
    """The least memory that algorithm 3 reaches under any limit; fewest cuts of a tie.

    The outcome changes only where the limit passes the stored sizes of consecutive
    stages, so all limits are tried: n^2/2 of them at most, n when stages are equal.

    Raises:
      ValueError: there is no stage, or the two sequences differ in length.

    Example:
      >>> best_segments([1, 1, 1, 1, 9, 1, 1, 1, 1])
      Segments(starts=(0, 6), checkpoints=1, largest=14)
      >>> best_segments([1] * 16).memory + 1 == checkpoints_and_live(16)
      True
    """
    kept = _stored(outputs, kept)
    limits = {total for start in range(len(kept)) for total in accumulate(kept[start:])}
    tried = (greedy_segments(outputs, limit, kept) for limit in {0, *limits})
    return min(tried, key=lambda cut: (cut.memory, len(cut.starts), cut.starts))


def _stored(outputs: Sequence[int], kept: Sequence[int] | None) -> Sequence[int]:
    if not outputs:
        raise ValueError("a chain has at least one stage")
    if kept is not None and len(kept) != len(outputs):
        raise ValueError(f"{len(outputs)} outputs and {len(kept)} stored sizes")
    return outputs if kept is None else kept
