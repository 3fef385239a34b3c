"""The checkpoints in a traced training step, as their backward passes show them.

JAX runs a checkpoint's forward pass without a mark. In the backward pass it is an
equation with the policy and a body: recomputation, then gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.compiler.flops import phase, walk
from jaxckpt.naming import subjaxprs


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's backward pass.

    Attributes:
      policy: JAX's policy callable, None for full remat.
      body: what it runs: recomputation, then gradients.
      matmuls: FLOPs and kind of each that one run recomputes.
      loops: iterations of the loops around it.
      level: the jaxpr it stands in.
      outer: whether another checkpoint is around it and nothing else inside that.
      forward: whether it has no gradients: the forward pass of one inside another.
    """

    policy: Callable[..., Any] | None
    body: jex_core.Jaxpr
    matmuls: list[tuple[int, str]]
    loops: int
    level: int
    outer: bool
    forward: bool

    @property
    def recompute(self) -> int:
        """FLOPs recomputed in one run."""
        return sum(flops for flops, _ in self.matmuls)


def find_checkpoints(
    jaxpr: jex_core.Jaxpr,
    loops: int = 1,
    directly_inside: bool = False,
    stack: str = "",
) -> Iterator[Checkpoint]:
    """The checkpoints of a step with its gradient in it, outermost first."""
    for equation in jaxpr.eqns:
        params = compat.equation_params(equation)
        found = is_checkpoint(equation)
        alone = sum(map(is_checkpoint, jaxpr.eqns)) == 1
        length = params["length"] if equation.primitive.name == "scan" else 1
        here = f"{stack}/{equation.source_info.name_stack}"
        for body in subjaxprs(equation):
            if found:
                yield Checkpoint(
                    policy=params["policy"],
                    body=body,
                    matmuls=recomputed(equation, body),
                    loops=loops,
                    level=id(jaxpr),
                    outer=directly_inside and alone,
                    forward=phase(here) != "backward",
                )
            inside = found or (directly_inside and length == 1)
            yield from find_checkpoints(body, loops * length, inside, here)


@dataclass(frozen=True)
class Place:
    """Where an equation stands.

    Attributes:
      loops: iterations of the loops around it.
      name_stack: of all equations around it and its own.
    """

    loops: int = 1
    name_stack: str = ""


# The marks of an equation's outputs, from those of its inputs.
Step = Callable[[jex_core.JaxprEqn, list[set], Place], list[set]]


def hand_on(
    jaxpr: jex_core.Jaxpr,
    step: Step,
    given: dict[int, list[set]],
    known: dict[Any, set] | None = None,
    place: Place = Place(),
) -> list[set]:
    """Follows marked values to the checkpoints that get them, across loops and calls.

    Args:
      jaxpr: where to look.
      step: marks the outputs of an equation that has no body.
      given: filled with the marks of what each checkpoint's body is given, by the
        body's id and input.
      known: marks of the jaxpr's inputs.
      place: of the jaxpr's equations.

    Returns:
      The marks of each output.
    """
    known = dict(known or {})

    def of(value: Any) -> set:
        return set() if isinstance(value, jex_core.Literal) else known.get(value, set())

    for equation in jaxpr.eqns:
        inputs = [of(value) for value in equation.invars]
        bodies = list(subjaxprs(equation))
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        stack = f"{place.name_stack}/{equation.source_info.name_stack}"
        here = Place(place.loops * length, stack)
        if not bodies:
            for out, marks in zip(
                equation.outvars, step(equation, inputs, here), strict=True
            ):
                known[out] = marks
        for body in bodies:  # of a branch, the inputs after the index
            each = inputs[len(inputs) - len(body.invars) :]
            if len(each) != len(body.invars):
                continue
            if is_checkpoint(equation):
                before = given.get(id(body), [set()] * len(each))
                given[id(body)] = [a | b for a, b in zip(before, each, strict=True)]
            inside = dict(zip(body.invars, each, strict=True))
            results = hand_on(body, step, given, inside, here)
            if len(results) == len(equation.outvars) and not is_checkpoint(equation):
                for out, marks in zip(equation.outvars, results, strict=True):
                    known[out] = known.get(out, set()) | marks
    return [of(value) for value in jaxpr.outvars]


def is_checkpoint(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation is a checkpoint's."""
    return {"policy", "prevent_cse"} <= compat.equation_params(equation).keys()


def recomputed(
    equation: jex_core.JaxprEqn, body: jex_core.Jaxpr
) -> list[tuple[int, str]]:
    """FLOPs and kind of every matmul that a checkpoint's backward pass runs again.

    Under ``JAX_REMAT3=1`` the body has nothing else, and the equation says so.
    """
    found = []
    stack = f"/transpose(jvp())/{equation.source_info.name_stack}"
    for visit in walk(body, stack=stack):
        if visit.flops and "rematted_computation" in visit.name_stack:
            found.append((visit.flops, visit.equation.primitive.name))
    return found
