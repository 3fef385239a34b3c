"""A chain of stages and what each costs: the input of every schedule.

A stage is a layer, a block or the loss. Running it *storing* takes one of its options,
which says what stays in memory until its backward step; running it *plainly* leaves
its output alone. Names of Beaumont et al. 2019 (arXiv 1911.13214) in brackets.

Sizes are whole numbers of one unit, bytes or slots; times are numbers of one unit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction


class NoSchedule(ValueError):
    """No schedule fits; the message says the least memory that would do."""


@dataclass(frozen=True)
class Option:
    """One way to run a stage so that its backward step can follow.

    Attributes:
      kept: size of all that stays until the backward step, the output included [abar].
      forward: time of the forward step that stores it [u_f].
      backward: time of the backward step, what it runs again included [u_b].
      forward_temporary: size of what lives only inside that forward step [o_f].
      backward_temporary: size of what lives only inside the backward step, the
        gradient that it returns included [o_b].
    """

    kept: int
    forward: float
    backward: float
    forward_temporary: int = 0
    backward_temporary: int = 0


@dataclass(frozen=True)
class StageCosts:
    """What one stage of a chain costs.

    Attributes:
      output: size of its output, the input of the next stage [a].
      forward: time to run it plainly.
      options: the ways to run it storing, at least one.
      temporary: size of what lives only inside a plain run.
      gradient: size of the gradient of its output [delta]; None for that of the
        output. That of the last stage counts from the first step on: end the chain
        with the loss, whose gradient has no size, where that is too much.
    """

    output: int
    forward: float
    options: tuple[Option, ...]
    temporary: int = 0
    gradient: int | None = None

    def __post_init__(self):
        if not self.options:
            raise ValueError("a stage has at least one option")
        for option in self.options:
            if option.kept < self.output:
                raise ValueError(
                    f"an option keeps {option.kept}, less than the stage's own output "
                    f"of {self.output}, which is part of it"
                )
        if min(self.sizes()) < 0:
            raise ValueError(f"a size is 0 or more: {self}")

    @property
    def gradient_size(self) -> int:
        return self.output if self.gradient is None else self.gradient

    def sizes(self) -> tuple[int, ...]:
        """Every size in it."""
        per_option = (
            size
            for option in self.options
            for size in (
                option.kept,
                option.forward_temporary,
                option.backward_temporary,
            )
        )
        return (self.output, self.temporary, self.gradient_size, *per_option)


@dataclass(frozen=True)
class Chain:
    """Stages in the order of the forward pass.

    Attributes:
      stages: one or more.
      input: size of the chain's own input, there from beginning to end; 0 where the
        budget does not count it.
    """

    stages: tuple[StageCosts, ...]
    input: int = 0

    def __post_init__(self):
        if not self.stages:
            raise ValueError("a chain has at least one stage")
        if self.input < 0:
            raise ValueError(f"a size is 0 or more, not {self.input}")


def uniform_chain(
    num_stages: int,
    output: int = 1,
    kept: int | Sequence[int] = 1,
    forward: float = 1,
    backward: float | Sequence[float] = 1,
) -> Chain:
    """A chain of equal stages without temporaries.

    Args:
      num_stages: its length.
      output: size of each stage's output, and of its gradient.
      kept: size of what each stage stores, or one size per option.
      forward: time of each forward step.
      backward: time of each backward step, or one time per option.

    Raises:
      ValueError: there is no stage, or not one time per option.

    Example:
      >>> chain = uniform_chain(3, kept=(4, 1), backward=(2, 3))
      >>> len(chain.stages), chain.stages[0].options[1].backward
      (3, 3)
    """
    sizes = kept if isinstance(kept, Sequence) else [kept]
    times = backward if isinstance(backward, Sequence) else [backward] * len(sizes)
    if len(sizes) != len(times):
        raise ValueError(f"{len(sizes)} sizes and {len(times)} times of options")
    options = tuple(
        Option(size, forward, time) for size, time in zip(sizes, times, strict=True)
    )
    return Chain((StageCosts(output, forward, options),) * num_stages)


def discretize(chain: Chain, budget: int, slots: int) -> tuple[Chain, int, Fraction]:
    """The chain in at most ``slots`` memory slots instead of bytes.

    Sizes are rounded up, so a schedule that fits the slots fits the budget. Nothing
    is rounded when the sizes' common divisor goes into the budget at most ``slots``
    times.

    Args:
      chain: sizes in bytes.
      budget: bytes.
      slots: the most that the budget is cut into.

    Returns:
      The chain in slots, the budget in slots, rounded down, and the bytes of a slot.

    Example:
      >>> chain = uniform_chain(2, output=10, kept=35)
      >>> rounded, budget, slot = discretize(chain, budget=100, slots=4)
      >>> rounded.stages[0].output, rounded.stages[0].options[0].kept
      (1, 2)
      >>> budget, slot
      (4, Fraction(25, 1))
    """
    if slots < 1:
        raise ValueError(f"a budget is cut into at least one slot, not {slots}")
    sizes = (size for stage in chain.stages for size in stage.sizes())
    unit = math.gcd(chain.input, *sizes) or 1
    whole = budget // unit
    top = min(whole, slots)

    def ceil(size: int) -> int:
        return -(-size // unit * top // whole) if whole else size // unit

    def stage_in_slots(stage: StageCosts) -> StageCosts:
        options = tuple(
            replace(
                option,
                kept=ceil(option.kept),
                forward_temporary=ceil(option.forward_temporary),
                backward_temporary=ceil(option.backward_temporary),
            )
            for option in stage.options
        )
        return StageCosts(
            ceil(stage.output),
            stage.forward,
            options,
            ceil(stage.temporary),
            ceil(stage.gradient_size),
        )

    stages = {stage: stage_in_slots(stage) for stage in set(chain.stages)}
    rounded = Chain(tuple(stages[s] for s in chain.stages), ceil(chain.input))
    return rounded, top, Fraction(unit * whole, top or 1)
