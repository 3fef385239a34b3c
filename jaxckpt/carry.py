"""What a layer of a stack returns: its carry, as it came, and an output.

`jax.lax.scan` asks the same, and says so in several lines that name no layer; without
a loop an array of two rows would even be taken for the pair.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

Body = Callable[[Any, Any], tuple[Any, Any]]


def returns_pair(layer: Body) -> Body:
    """A layer function that is refused when it returns anything but a pair.

    Raises:
      TypeError: when called, naming what it returned.

    Example:
      >>> returns_pair(lambda x, w: (x * w, None))(2.0, 3.0)
      (6.0, None)
    """

    @functools.wraps(layer)
    def checked(carry, values):
        found = layer(carry, values)
        if isinstance(found, tuple | list) and len(found) == 2:
            return found
        what = f"{len(found)} values" if isinstance(found, tuple) else _type_of(found)
        raise TypeError(
            f"a layer of a stack returns (carry, output), not {what}: end it with "
            "`return x, None` where it has no output"
        )

    return checked


def keeps_carry(iteration: Body) -> Body:
    """The body of a loop that is refused when its carry comes out otherwise.

    A carry whose dtype JAX would promote, such as a plain ``0.0``, is left to it.

    Raises:
      TypeError: when called, naming the value of the carry that changed.
    """

    @functools.wraps(iteration)
    def checked(carry, values):
        after, outputs = iteration(carry, values)
        _check(carry, after)
        return after, outputs

    return checked


def _check(before: Any, after: Any) -> None:
    trees = jax.tree.structure(before), jax.tree.structure(after)
    if trees[0] != trees[1]:
        raise TypeError(
            f"a layer of a stack returns its carry as it came: {trees[0]} goes in and "
            f"{trees[1]} comes out"
        )
    leaves = jax.tree.leaves(after)
    for (path, old), new in zip(jax.tree.leaves_with_path(before), leaves, strict=True):
        old, new = jax.typeof(old), jax.typeof(new)
        promoted = getattr(old, "weak_type", False)
        if old.shape != new.shape or (old.dtype != new.dtype and not promoted):
            changed = "shape" if old.shape != new.shape else "dtype"
            raise TypeError(
                f"a layer of a stack keeps the {changed} of its carry: "
                f"carry{jax.tree_util.keystr(path)} goes in as {_of(old)} and comes "
                f"out as {_of(new)}"
            )


def _of(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _type_of(found: Any) -> str:
    if isinstance(found, jax.Array):
        return f"an array {_of(jax.typeof(found))}"
    return type(found).__name__
