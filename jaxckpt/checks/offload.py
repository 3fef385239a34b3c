"""Whether a device runs policies that offload: quick, before a run relies on it.

The cases are small and of the shapes that a plan has: a loop, groups of layers, layers
without a loop. See `jaxckpt.checks.layer_stack` for what is compared.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

from jaxckpt.checks.check import failure, largest_difference
from jaxckpt.checks.layer_stack import Case, plain_layer
from jaxckpt.checks.sizes import stack_sizes
from jaxckpt.layers import LayerPlan

Shape = Literal["loop", "groups", "unrolled"]

SHAPES: dict[Shape, tuple[str, bool]] = {  # (plan, scan)
    "loop": ("4xoffload:hidden,layer_input", True),
    "groups": ("2x2xoffload:hidden,layer_input", True),
    "unrolled": ("4xoffload:hidden,layer_input", False),
}
# Iterations mixed up make a difference of the gradient's own size, rounding none of
# this; a device is not to be refused for the order in which it sums.
_WRONG = 1e-3
_RUNS = 3  # a copy that comes too late may come in time once


def shapes_of(plan: LayerPlan, *, scan: bool = True) -> tuple[Shape, ...]:
    """The shapes of what a plan offloads; none where it offloads nothing.

    Example:
      >>> from jaxckpt.layers import layer_plan
      >>> shapes_of(layer_plan("4xoffload:a+2x2xoffload:a", 8))
      ('loop', 'groups')
      >>> shapes_of(layer_plan("full", 8))
      ()
    """
    found: list[Shape] = []
    for policy, _, around in plan.leaves():
        if policy.offload:
            found.append(("groups" if around else "loop") if scan else "unrolled")
    return tuple(dict.fromkeys(found))


def find_fault(device: Any, shapes: Sequence[Shape]) -> str | None:
    """What is wrong with offloading on an attached device, in words; None: nothing.

    Every shape is tried once per process and device. On a CPU, which has one memory,
    only the gradients are looked at.
    """
    return next(filter(None, (_fault(device, shape) for shape in shapes)), None)


@functools.cache
def _fault(device: Any, shape: Shape) -> str | None:
    case, (text, scan) = _case(device), SHAPES[shape]
    try:
        program = case.compile(text, scan=scan)
        worst = max(largest_difference(program.run(), case.want) for _ in range(_RUNS))
    except Exception as error:
        return f"a small example ({text}) does not run: {failure(error)}"
    if worst > _WRONG:
        return (
            f"the gradient of a small example ({text}) is wrong by {worst:.2g} of its "
            "largest entry"
        )
    holds, told, _ = program.moved(case.value_bytes).verdict(case.platform)
    if holds is False:
        return f"a small example ({text}) keeps too little in host memory: {told}"
    return None


@functools.cache
def _case(device: Any) -> Case:
    return Case(stack_sizes(device.platform, layers=4), [device], layer=plain_layer)
