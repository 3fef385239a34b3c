"""Flax NNX objects as arguments of a checkpointed function.

An NNX object changes in place: statistics, random counters, sown values. Inside a
checkpoint it is a copy made of traced arrays, and afterwards the object itself is
brought to the copy's state. `flax.nnx.remat` does the same, and sets every variable;
here only those that changed are touched, so a module of an outer trace, which may be
read but not written, works too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxckpt.modules import is_nnx_object


def thread_nnx(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a transformation of pure functions one of functions of NNX objects.

    Raises:
      TypeError: when called, if an attribute that is no `nnx.Variable` has changed.
    """

    def threaded(fn: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args, **kwargs):
            leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_nnx_object)
            objects = [leaf for leaf in leaves if is_nnx_object(leaf)]
            others = [leaf for leaf in leaves if not is_nnx_object(leaf)]
            graphdef, state = nnx.split(objects)

            def pure(state, others):
                copies = nnx.merge(graphdef, state)
                before = _arrays(copies)
                of_objects, of_others = iter(copies), iter(others)
                args, kwargs = jax.tree.unflatten(
                    treedef,
                    [
                        next(of_objects if is_nnx_object(leaf) else of_others)
                        for leaf in leaves
                    ],
                )
                outputs = _by_place(fn(*args, **kwargs), copies)
                return outputs, _changed(copies, before), nnx.graphdef(copies)

            outputs, changed, after = transform(pure)(state, others)
            nnx.update(objects, changed)
            if nnx.graphdef(objects) != after:
                names = ", ".join(type(one).__name__ for one in objects)
                raise TypeError(
                    f"an attribute of {names} that is no nnx.Variable changes inside "
                    "remat and would be lost: keep it in an nnx.Variable"
                )
            return _by_object(outputs, objects)

        return wrapped

    return threaded


def _changed(copies: list[Any], before: dict[Any, list[Any]]) -> Any:
    """The state of those variables whose arrays are others than before, or are new."""
    after = _arrays(copies)
    changed = {
        path
        for path, arrays in after.items()
        if [id(one) for one in before.get(path, ())] != [id(one) for one in arrays]
        or path not in before
    }
    return nnx.filter_state(nnx.state(copies), lambda path, _: path in changed)


def _arrays(copies: list[Any]) -> dict[Any, list[Any]]:
    flat = nnx.to_flat_state(nnx.state(copies))
    return {path: jax.tree.leaves(variable) for path, variable in flat}


@dataclass(frozen=True)
class _Place:
    """Stands in a function's outputs for an object that is among its inputs."""

    path: tuple[Any, ...]


def _by_place(outputs: Any, copies: list[Any]) -> Any:
    paths = {id(node): path for path, node in nnx.iter_graph(copies)}

    def is_input(leaf):
        return is_nnx_object(leaf) and id(leaf) in paths

    return jax.tree.map(
        lambda leaf: _Place(paths[id(leaf)]) if is_input(leaf) else leaf,
        outputs,
        is_leaf=is_input,
    )


def _by_object(outputs: Any, objects: list[Any]) -> Any:
    nodes = dict(nnx.iter_graph(objects))
    return jax.tree.map(
        lambda leaf: nodes[leaf.path] if isinstance(leaf, _Place) else leaf, outputs
    )
