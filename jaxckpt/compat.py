"""Every difference between JAX versions, and nothing else."""

import math
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


def scan_counts(equation: jex_core.JaxprEqn) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are its carry.

    ``num_consts`` and ``num_carry`` became one parameter, ``ft_in``, in jax 0.11+.
    """
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


def shard_map_devices(equation: jex_core.JaxprEqn) -> int:
    """How many devices each run a shard_map's body; 1 for any other equation.

    ``manual_axes`` became ``newly_manual_axes`` after jax 0.7.
    """
    if equation.primitive.name != "shard_map":
        return 1
    params = equation.params
    axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
    return math.prod(params["mesh"].shape[axis] for axis in axes)


def inner_jaxpr(value: Any) -> jex_core.Jaxpr:
    """A parameter's jaxpr, closed or open: jax 0.12 made a scan's and a jit's open."""
    return value.jaxpr if isinstance(value, jex_core.ClosedJaxpr) else value
