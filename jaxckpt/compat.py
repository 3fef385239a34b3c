"""Every difference between JAX versions, and nothing else."""

from typing import Any

from jax.extend import core as jex_core


def equation_params(equation: jex_core.JaxprEqn) -> dict[str, Any]:
    """An equation's parameters.

    Under ``JAX_REMAT3=1`` (jax >= 0.12) checkpoints and names are equations
    ``call_hi_primitive`` whose own parameters sit one level down, in ``_prim``.
    """
    if equation.primitive.name == "call_hi_primitive":
        return equation.params["_prim"].params
    return equation.params


def checkpoint_name_of(equation: jex_core.JaxprEqn) -> str | None:
    """The name that a `checkpoint_name` equation gives, None for any other.

    It is the primitive ``name``, or under ``JAX_REMAT3=1`` one of the classes
    ``CheckpointName`` and ``CheckpointNameFwd`` (see `equation_params`).
    """
    if equation.primitive.name == "name":
        return equation.params["name"]
    if equation.primitive.name == "call_hi_primitive":
        hidden = equation.params["_prim"]
        if type(hidden).__name__.startswith("CheckpointName"):
            return hidden.params["name"]
    return None
