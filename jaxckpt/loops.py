"""The scans that run a layer plan over layers of one kind, or of several in turn.

Layers that differ in turn, such as local and global attention, repeat with a period.
A scan's body is the same in every trip, so it holds one period: of ``8xfull`` over two
kinds four trips of two layers, and of ``every:3`` trips of two groups, one of which
begins with the first kind and one with the second. What is left of a period at the end
of a run is a loop of one trip. With one kind of layer a run is a loop.

No JAX here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxckpt.layers import Run
from jaxckpt.policies import Policy, PolicyError


@dataclass(frozen=True)
class Part:
    """One layer, or one group of layers, in an iteration of a loop.

    Attributes:
      policy: what it is checkpointed under.
      kind: which of the repeating layers it is; 0 for a group.
      loops: the loops inside a group; none for a layer.
    """

    policy: Policy
    kind: int
    loops: "tuple[Loop, ...]" = ()

    @property
    def num_layers(self) -> int:
        return sum(loop.num_layers for loop in self.loops) or 1


@dataclass(frozen=True)
class Loop:
    """A scan: ``trips`` times its parts, one after the other."""

    trips: int
    parts: tuple[Part, ...]

    @property
    def num_layers(self) -> int:
        return self.trips * sum(part.num_layers for part in self.parts)

    @property
    def keeps_barriers(self) -> bool:
        """Whether checkpoints in it need ``prevent_cse``.

        A scan of more than one trip alone keeps the recomputation of its one part
        apart from the forward pass; several parts are straight-line code.
        """
        return self.trips == 1 or len(self.parts) > 1

    def named_parts(self) -> list[tuple[str, Part]]:
        return [(f"part_{index}", part) for index, part in enumerate(self.parts)]


def loops_of(runs: Sequence[Run], kinds: int = 1, start: int = 0) -> tuple[Loop, ...]:
    """The loops that run some runs of a layer plan.

    Args:
      runs: the runs of a `LayerPlan`, or of one of its groups.
      kinds: how many kinds of layers follow each other; layer i is of kind i % kinds.
      start: the place of the first layer.

    Raises:
      PolicyError: kinds that are no number from 1.

    Example:
      >>> from jaxckpt.layers import layer_plan
      >>> for loop in loops_of(layer_plan("7xfull", 7).runs, kinds=2):
      ...     print(loop.trips, [part.kind for part in loop.parts])
      3 [0, 1]
      1 [0]
    """
    if type(kinds) is not int or kinds < 1:
        raise PolicyError(f"kinds={kinds!r}: a number of layer functions, from 1")
    loops = []
    for run in runs:
        size = run.layers_per_iteration
        period = kinds // math.gcd(kinds, size)
        trips, rest = divmod(run.count, period)
        for trips, length in ((trips, period), (1, rest)):  # noqa: B020
            if trips and length:
                places = range(start, start + length * size, size)
                parts = tuple(_part(run, kinds, place) for place in places)
                loops.append(Loop(trips, parts))
                start += loops[-1].num_layers
    return tuple(loops)


def layer_parts(loops: Sequence[Loop]) -> Iterator[Part]:
    """The layers in some loops, at any depth, each once."""
    for loop in loops:
        for part in loop.parts:
            if part.loops:
                yield from layer_parts(part.loops)
            else:
                yield part


def _part(run: Run, kinds: int, place: int) -> Part:
    if run.group:
        return Part(run.policy, 0, loops_of(run.group, kinds, place))
    return Part(run.policy, place % kinds)
