"""A user's own training step, from ``package.module:make_step``."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt.naming import is_array


class UserStepError(ValueError):
    """A function that cannot be used as a step. One line that says what it must be."""


def load_step(name: str, devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Imports and calls ``make_step``; gives the jitted step and its arguments.

    Args:
      name: ``package.module:make_step``, importable from the current folder.
        ``make_step()`` returns the step and a tuple of its arguments; see `ready_step`.
        A ``make_step`` with one required parameter, or one called ``devices``, gets the
        devices, to build its mesh of.
      devices: those to compile for.

    Raises:
      UserStepError: it is missing, fails, or returns something else.
    """
    make_step = _import(name)
    try:
        parameters = inspect.signature(make_step).parameters
    except (TypeError, ValueError) as error:
        raise UserStepError(f"{name} is no function: {error}") from error
    required = [p for p in parameters.values() if p.default is p.empty]
    takes_devices = "devices" in parameters or len(required) == 1
    try:
        made = make_step(devices) if takes_devices else make_step()
    except Exception as error:
        raise UserStepError(f"{name} failed: {reason(error)}") from error
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
    try:
        return ready_step(step, arguments, devices)
    except Exception as error:
        raise UserStepError(f"{name}: {reason(error)}") from error


def ready_step(
    step: Callable[..., Any], arguments: tuple[Any, ...], devices: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments as `jax.stages` lowers them, for given devices.

    Args:
      step: jitted by JAX, NNX or Equinox, or not jitted. Donation and shardings are
        those of its jit.
      arguments: arrays, taken for their shapes, or `jax.ShapeDtypeStruct`. Those
        without a sharding are copied to every device of the mesh that others are on,
        or else go to the first device.
      devices: those to compile for.
    """
    # Equinox takes only concrete arrays for arrays, and its lowered steps no options.
    if type(step).__module__.partition(".")[0] == "equinox":
        step, arguments = _without_statics(step, arguments)
    if not hasattr(step, "lower"):
        step = jax.jit(step)
    found = _find_jit(step, arguments)
    shardings = found[1].params["in_shardings"] if found else ()
    if any(isinstance(given, Sharding) for given in shardings):
        return step, _placed(arguments, None)
    given = [leaf.sharding for leaf in jax.tree.leaves(arguments) if _is_abstract(leaf)]
    meshes = [s.mesh for s in given if isinstance(s, NamedSharding)]
    otherwise = (
        NamedSharding(meshes[0], PartitionSpec())
        if meshes
        else SingleDeviceSharding(devices[0])
    )
    return step, _placed(arguments, otherwise)


def reason(error: Exception) -> str:
    """An error's kind and the first line of what it says."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"


def _import(name: str) -> Callable[..., Any]:
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        raise UserStepError(f"{name!r} is not package.module:make_step")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), function)
    except Exception as error:
        raise UserStepError(f"{name} cannot be imported: {error}") from error


def _without_statics(
    step: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """The same step, of arrays alone, by name; donates what the step's own jit does."""
    leaves, tree = jax.tree.flatten_with_path(arguments)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    arrays = {name: leaf for name, leaf in named if is_array(leaf)}

    def of_arrays(donated: dict[str, Any], kept: dict[str, Any]) -> list[Any]:
        given = donated | kept
        rebuilt = [given.get(name, leaf) for name, leaf in named]
        out = step(*jax.tree.unflatten(tree, rebuilt))
        return [leaf for leaf in jax.tree.leaves(out) if is_array(leaf)]

    of_arrays.__name__ = getattr(step, "__name__", "step")
    donated = set()
    if found := _find_jit(of_arrays, ({}, arrays)):
        jaxpr, call = found
        name_of = dict(zip(map(id, jaxpr.invars), sorted(arrays), strict=True))
        flags = zip(call.invars, call.params["donated_invars"], strict=True)
        donated = {name_of.get(id(value)) for value, is_donated in flags if is_donated}
    split = (
        {name: leaf for name, leaf in arrays.items() if name in donated},
        {name: leaf for name, leaf in arrays.items() if name not in donated},
    )
    return jax.jit(of_arrays, donate_argnums=0), split


def _find_jit(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, Any] | None:
    """A function's jaxpr and the only jit in it; None if there is another number."""
    try:
        jaxpr = jax.make_jaxpr(function)(*_placed(arguments, None)).jaxpr
    except (
        Exception
    ):  # NNX modules trace only under NNX; errors come when it is lowered
        return None
    calls = [call for call in jaxpr.eqns if "donated_invars" in call.params]
    return (jaxpr, calls[0]) if len(calls) == 1 else None


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _placed(arguments: Any, otherwise: Sharding | None) -> Any:
    """Arguments as shapes with the shardings given, and another where none is."""

    def place(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        given = leaf.sharding if _is_abstract(leaf) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given or otherwise)

    return jax.tree.map(place, arguments)
