"""A user's own training step, from ``package.module:make_step``."""

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxckpt.naming import is_array


class UserStepError(ValueError):
    """A function that cannot be used as a step. One line that says what it must be."""


def load_step(name: str, devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Imports and calls ``make_step``; gives the jitted step and its arguments.

    Args:
      name: ``package.module:make_step``, importable from the current folder.
        ``make_step()`` returns the step and a tuple of its arguments: arrays or
        `jax.ShapeDtypeStruct`, with shardings or for one device. A ``make_step``
        with one parameter gets the devices, to build its mesh of.
      devices: those to compile for.

    Raises:
      UserStepError: it is missing, or returns something else.
    """
    module_name, colon, function = name.partition(":")
    if not colon or not function:
        raise UserStepError(f"{name!r} is not package.module:make_step")
    sys.path.insert(0, os.getcwd())
    try:
        make_step = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise UserStepError(f"{name} cannot be imported: {error}") from error
    takes_devices = bool(inspect.signature(make_step).parameters)
    made = make_step(devices) if takes_devices else make_step()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise UserStepError(
            f"{name} must return (step, arguments), not {type(made).__name__}"
        )
    step, arguments = made
    if not isinstance(arguments, tuple):
        raise UserStepError(
            f"{name} must return its arguments as a tuple, not "
            f"{type(arguments).__name__}"
        )
    if not hasattr(step, "lower"):
        step = jax.jit(step)
    one_device = SingleDeviceSharding(devices[0])

    def place(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        given = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=given or one_device
        )

    return step, jax.tree.map(place, arguments)
