"""The planner's plans for a small layer and a small function: gradients, and memory."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxckpt.checks.check import Check, broken, in_turn, judged
from jaxckpt.checks.layer_stack import AGAINST, Case, check_gradient
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.planner.functions import plan
from jaxckpt.remat import remat
from jaxckpt.units import format_bytes

LADDER: tuple[str, ...] = ("none", "dots_saveable", "full")  # each with less memory

Say = Callable[[str], None]


def check_memory(case: Case) -> Iterator[Check]:
    """Whether policies save memory: compiled temporaries fall along `LADDER`."""
    name, compared = " > ".join(LADDER), "compiled temporaries"
    try:
        jobs = [functools.partial(case.compile, text) for text in LADDER]
        compiled = [wait().compiled for wait in in_turn(jobs)]
        temp = [memory_bytes(one).temp_bytes for one in compiled]
    except Exception as error:
        yield broken(name, compared, error)
        return
    known = [one for one in temp if one is not None]
    holds, reason = None, "the backend does not tell"
    if len(known) == len(LADDER):
        holds, reason = known[0] > known[1] > known[2], ""
    told = ", ".join(map(format_bytes, temp)) if known else ""
    figures: dict[str, Any] = dict(zip(LADDER, temp, strict=True))
    yield Check(name, compared, told, judged(holds), reason, figures)


def check_planned(case: Case, say: Say = lambda text: None) -> Iterator[Check]:
    """`jaxckpt.plan` of a stack, with a budget between full remat and none."""
    name = "plan of a layer"
    try:
        budget = _between(*(case.compile(text).compiled for text in ("full", "none")))
        with jax.default_matmul_precision("highest"):  # as the case is compiled
            found = plan(
                case.layer, case.x, case.one_layer,
                budget=budget, num_layers=case.sizes.layers, progress=say,
            )  # fmt: skip
        name = f"{name} within {format_bytes(budget)}, {found.layer_plan}"
        yield check_gradient(case, name, case.compile(found).run)
    except Exception as error:
        yield broken(name, AGAINST, error)


def check_planned_function(case: Case, say: Say = lambda text: None) -> Iterator[Check]:
    """`jaxckpt.plan` of a function without a loop, cut into stages."""
    name = "plan of a function"
    try:
        bare, full = _Loop(case, case.layer), _Loop(case, remat(case.layer, "full"))
        budget = _between(full.compiled, bare.compiled)
        with jax.default_matmul_precision("highest"):
            found = plan(bare.loss, case.weights, case.x, budget=budget, progress=say)
        name = f"{name} within {format_bytes(budget)}, {found.layer_plan}"
        planned = _Loop(case, case.layer, lambda loss: remat(loss, cast(Any, found)))
        yield check_gradient(case, name, planned.run)
    except Exception as error:
        yield broken(name, AGAINST, error)


class _Loop:
    """A case's layers as straight-line Python, and the gradient of their loss."""

    def __init__(
        self, case: Case, layer: Any, wrap: Callable[..., Any] = lambda loss: loss
    ):
        self._case, self._layer = case, layer
        with jax.default_matmul_precision("highest"):
            jitted = jax.jit(jax.grad(wrap(self.loss), (0, 1)))
            self.compiled, _ = compile_step(
                jitted, case.weights, case.x, platform=case.platform
            )

    def loss(self, weights, x):
        for index in range(self._case.sizes.layers):
            one = jax.tree.map(lambda leaf, i=index: leaf[i], weights)
            x, _ = self._layer(x, one)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def run(self) -> Any:
        return jax.device_get(self.compiled(self._case.weights, self._case.x))


def _between(least: Any, most: Any) -> int:
    """Bytes halfway between what two programs need."""
    totals = [memory_bytes(one).device_total_bytes for one in (least, most)]
    known = [total for total in totals if total is not None]
    if len(known) < 2:
        raise RuntimeError("the backend does not tell the memory of a program")
    return sum(known) // 2
