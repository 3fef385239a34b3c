"""A schedule of a chain of stages, as a tree: what is kept, what runs again.

Nested `jax.checkpoint` and the "persistent" schedules of the literature are the same
thing. A stage either runs storing what its backward step reads, or lies in a segment
of which only the input is kept, and which is run again, as a schedule of its own, when
its turn in the backward pass comes. In text a segment stands in brackets::

    [0 1] 2:1 3     stages 0 and 1 are run again; stage 2 stores what its option 1 keeps

Source: Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains"
(arXiv 1911.13214): F_all is `Stage`, F_ck and F_empty are what `Checkpointed` runs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """Stage ``index`` of the chain, from 0, storing what one of its options keeps."""

    index: int
    option: int = 0

    def __str__(self) -> str:
        return f"{self.index}:{self.option}" if self.option else str(self.index)


@dataclass(frozen=True)
class Checkpointed:
    """A segment of which only the input is kept until it is run again."""

    items: "tuple[Item, ...]"

    def __post_init__(self):
        if not self.items:
            raise ValueError("a checkpointed segment has at least one stage")


Item = Stage | Checkpointed


@dataclass(frozen=True)
class Schedule:
    """Every stage of a chain once, first stage first.

    Trees may be as deep as a chain is long. The methods here do not recurse; ``==``
    and ``hash`` do, so compare the text of trees of some hundred levels.

    Example:
      >>> schedule = Schedule((Checkpointed((Stage(0), Stage(1))), Stage(2, option=1)))
      >>> schedule
      Schedule('[0 1] 2:1')
      >>> schedule.depth, [stage.index for stage in schedule.stages()]
      (1, [0, 1, 2])
    """

    items: tuple[Item, ...]

    def stages(self) -> Iterator[Stage]:
        """Yields the stages in the order of the forward pass."""
        return stages_of(self.items)

    @property
    def depth(self) -> int:
        """Checkpointed segments around the innermost stage."""
        depth = deepest = 0
        for character in str(self):
            depth += (character == "[") - (character == "]")
            deepest = max(deepest, depth)
        return deepest

    def __str__(self) -> str:
        words: list[str] = []
        todo: list[Item | str] = [*reversed(self.items)]
        while todo:
            part = todo.pop()
            if isinstance(part, Checkpointed):
                todo += ["]", *reversed(part.items), "["]
            else:
                words.append(str(part))
        return " ".join(words).replace("[ ", "[").replace(" ]", "]")

    def __repr__(self) -> str:
        return f"Schedule({str(self)!r})"


def stages_of(items: Iterable[Item]) -> Iterator[Stage]:
    """Yields the stages inside items at any depth, first stage first."""
    todo = [*items][::-1]
    while todo:
        item = todo.pop()
        if isinstance(item, Stage):
            yield item
        else:
            todo.extend(reversed(item.items))


@dataclass(frozen=True)
class Once:
    """A part of the chain still to be scheduled, in the segment at hand."""

    state: Any


@dataclass(frozen=True)
class Again:
    """A part of the chain still to be scheduled, as a checkpointed segment."""

    state: Any


def unfold(
    state: Any, expand: Callable[[Any], Sequence[Stage | Once | Again]]
) -> Schedule:
    """Builds a tree from the decisions of a dynamic program, without recursion.

    Args:
      state: the whole problem.
      expand: splits a problem into stages and smaller problems, first stage first.

    Example:
      >>> def halves(part):
      ...     start, end = part
      ...     if end - start == 1:
      ...         return [Stage(start)]
      ...     middle = (start + end) // 2
      ...     return [Again((start, middle)), Once((middle, end))]
      >>> unfold((0, 4), halves)
      Schedule('[[0] 1] [2] 3')
    """
    segments: list[list[Item]] = [[]]  # those begun, the innermost last
    todo: list[Stage | Once | Again | None] = [Once(state)]  # None ends a segment
    while todo:
        match todo.pop():
            case Stage() as stage:
                segments[-1].append(stage)
            case Once(state):
                todo.extend(reversed(expand(state)))
            case Again(state):
                segments.append([])
                todo += [None, Once(state)]
            case None:
                segment = Checkpointed(tuple(segments.pop()))
                segments[-1].append(segment)
    return Schedule(tuple(segments[0]))
