"""Which library a module is of, without importing any library but Linen.

A class of NNX, Equinox or Haiku can only exist where its library is imported, so it is
looked up in `sys.modules`.
"""

import contextlib
import sys
from typing import Any

import flax.linen as nn
import jax


def is_linen(target: Any) -> bool:
    """Whether it is a Flax Linen module or a class of them."""
    return issubclass(_class_of(target), nn.Module)


def is_nnx_object(target: Any) -> bool:
    """Whether it is an object of Flax NNX, whose updates happen in place.

    A module, `nnx.Rngs`, an optimizer, a metric, or a bare `nnx.Variable`.
    """
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(target, nnx.Pytree | nnx.Variable)


def is_other_module(target: Any) -> bool:
    """Whether it is an NNX, Equinox or Haiku module, or a class of them.

    Equinox makes its bound methods modules too; those are functions here.
    """
    libraries = ("flax.nnx", "equinox", "haiku")
    bases = tuple(sys.modules[one].Module for one in libraries if one in sys.modules)
    return issubclass(_class_of(target), bases) and not hasattr(target, "__func__")


def is_haiku_transformed(target: Any) -> bool:
    """Whether it is the pair that `haiku.transform` makes of a function."""
    haiku = sys.modules.get("haiku")
    pairs = ("Transformed", "TransformedWithState")
    return haiku is not None and isinstance(
        target, tuple(getattr(haiku, pair) for pair in pairs)
    )


def refuse_nnx(arguments: Any) -> None:
    """Refuses Flax NNX objects where their updates would be lost without a word.

    Raises:
      TypeError: naming what works.
    """
    for leaf in jax.tree.leaves(arguments, is_leaf=_is_leaf):
        if is_nnx_object(leaf):
            raise TypeError(
                f"{type(leaf).__name__} is a Flax NNX object, whose updates would be "
                "lost: give the state of nnx.split(module), and nnx.merge it inside"
            )


def is_bound_linen(target: Any) -> bool:
    """Whether it is a Linen module inside a model that runs, with variables there."""
    return isinstance(target, nn.Module) and target.scope is not None


def refuse_closed_over(fn: Any) -> None:
    """Refuses a function that closes over a Linen module of the model around it.

    Its parameters would be made inside the trace of the checkpoint, and leave it as
    tracers.

    Raises:
      TypeError: naming what works.
    """
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            if is_bound_linen(cell.cell_contents):
                raise TypeError(
                    f"the function closes over {type(cell.cell_contents).__name__}, a "
                    "Linen module, whose variables would be lost: give it as an "
                    "argument of the function"
                )


def _is_leaf(node: Any) -> bool:
    """Stops at NNX objects, and at the state of nnx.split, which is data."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Pytree | nnx.Variable | nnx.State)


def _class_of(target: Any) -> type:
    return target if isinstance(target, type) else type(target)
