"""Offloading gives the right gradients and really moves memory: the self-test's checks.

What is compared is in `jaxckpt.checks.layer_stack` and `jaxckpt.training.model_checks`,
as ``python -m jaxckpt.selftest`` does it; here are the plans that matter most on a GPU,
and rows.
"""

from collections.abc import Iterator

import jax

from experiments.gpu.process import FAILED, PASSED, UNKNOWN, Row
from experiments.gpu.sizes import Sizes
from jaxckpt.checks.check import Check
from jaxckpt.checks.layer_stack import Case, MakeStack, check_plans
from jaxckpt.stack import stack
from jaxckpt.training.model_checks import ModelCase, check_model

_VERDICTS = {"ok": PASSED, "FAILED": FAILED}


def check(sizes: Sizes, make_stack: MakeStack = stack) -> Iterator[Row]:
    """A row per check of the plain stack, then of the shipped model.

    Args:
      sizes: how large.
      make_stack: what is under test, as `jaxckpt.stack.stack`.
    """
    devices = jax.devices()[:1]
    case = Case(sizes.stack, devices, make_stack=make_stack)
    for one in check_plans(case, sizes.stack_plans):
        yield as_row(one, "stack")
    model = ModelCase(devices, sizes.gradient_model)
    for one in check_model(model, sizes.gradient_policies):
        yield as_row(one, "model")


def as_row(check: Check, of: str) -> Row:
    """A check as a row of the file."""
    told = ", ".join(filter(None, (check.found, check.reason)))
    verdict = _VERDICTS.get(check.verdict, UNKNOWN)
    name = f"{of} {check.name}"
    return {"name": name, "told": told, "checks": {check.compared: verdict}} | (
        check.figures
    )
