"""The layouts of per-layer values (weights, keys, ...) that a stack runs on.

Split layout of a pytree, which depends on the plan:
  ``{"run_0": tree, "run_1": {"run_0": tree}, ...}`` with leaves of shape
  (count, ...) for a run of layers and (count, inner count, ...) inside a group;
  unrolled (``scan=False``) it is ``{"layer_0": tree, "layer_1": tree, ...}``.
  Of layers of several kinds in turn a run is ``{"part_0": tree, "part_1": tree}``,
  and what it leaves of a period at its end is a run of its own: see `loops`.
  What is no array in a layer (a flag, a function) is the same in all of a run.

The canonical layout, which does not depend on the plan, is the list of per-layer
trees: `join_layers` and `merge_layers` go between the two.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.layers import LayerPlan, Layers, layer_plan
from jaxckpt.loops import Loop, Part, loops_of
from jaxckpt.modules import refuse_nnx
from jaxckpt.naming import is_array
from jaxckpt.policies import PolicyError

Tree = Any


def split_layers(
    values: Tree,
    plan: str | Layers,
    num_layers: int,
    *,
    scan: bool = True,
    kinds: int = 1,
) -> dict[str, Tree]:
    """Brings per-layer values into the layout that a plan runs on.

    Call it where the weights are made, not inside the training step: it copies.

    Args:
      values: a pytree whose leaves are stacked, (num_layers, ...).
      plan, num_layers, scan: as given to `stack`.
      kinds: how many layer functions `stack` was given.

    Example:
      >>> split = split_layers(jnp.ones((5, 2)), "2xnone+3xfull", num_layers=5)
      >>> {run: leaf.shape for run, leaf in split.items()}
      {'run_0': (2, 2), 'run_1': (3, 2)}
    """
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(values)}
    if sizes - {(num_layers,)}:
        raise PolicyError(
            f"per-layer values need a leading axis of {num_layers}, not "
            f"{sorted(sizes - {(num_layers,)})[0]}; join_layers takes a list of layers"
        )
    layers = [
        jax.tree.map(lambda leaf, i=i: leaf[i], values) for i in range(num_layers)
    ]
    return join_layers(layers, plan, num_layers, scan=scan, kinds=kinds)


def join_layers(
    layers: Sequence[Tree],
    plan: str | Layers,
    num_layers: int,
    *,
    scan: bool = True,
    kinds: int = 1,
) -> dict[str, Tree]:
    """Brings a list of per-layer trees (the canonical layout) into a plan's layout.

    As `split_layers`, for layers that are not stacked; undoes `merge_layers`. A tree
    may be an Equinox module: arrays are stacked, and what is no array stays.

    Example:
      >>> layers = [{"w": jnp.ones(2)}, {"b": jnp.zeros(3)}] * 2  # two kinds in turn
      >>> split = join_layers(layers, "full", num_layers=4, kinds=2)
      >>> jax.tree.map(jnp.shape, split)
      {'run_0': {'part_0': {'w': (2, 2)}, 'part_1': {'b': (2, 3)}}}

    Raises:
      PolicyError: layers of one kind whose trees, or what is no array in them, differ.
    """
    refuse_nnx(layers)
    plan = layer_plan(plan, num_layers)
    if not isinstance(layers, Sequence):
        raise PolicyError(f"layers are a list of trees, one per layer, not {layers!r}")
    if len(layers) != num_layers:
        raise PolicyError(f"{len(layers)} layers for a stack of {num_layers}")
    if not scan:
        return {f"layer_{index}": layer for index, layer in enumerate(layers)}
    loops = loops_of(plan.runs, kinds)
    _check_alike(layers, kinds)
    return _split_loops(loops, list(layers))


def merge_layers(
    split: dict[str, Tree],
    plan: str | Layers,
    num_layers: int,
    *,
    scan: bool = True,
    kinds: int = 1,
) -> list[Tree]:
    """The list of per-layer trees of values in split layout; undoes `join_layers`.

    Example:
      >>> split = split_layers(jnp.arange(5), "2xnone+3xfull", num_layers=5)
      >>> [int(layer) for layer in merge_layers(split, "2xnone+3xfull", num_layers=5)]
      [0, 1, 2, 3, 4]
    """
    plan = layer_plan(plan, num_layers)
    check_layout(split, plan, scan, kinds)
    if not scan:
        return [split[f"layer_{index}"] for index in range(num_layers)]
    return _merge_loops(loops_of(plan.runs, kinds), split)


def layout_keys(plan: LayerPlan, *, scan: bool, kinds: int = 1) -> list[str]:
    """The top-level keys of the split layout, in order."""
    if scan:
        return [f"run_{index}" for index in range(len(loops_of(plan.runs, kinds)))]
    return [f"layer_{index}" for index in range(plan.num_layers)]


def check_layout(values: Tree, plan: LayerPlan, scan: bool, kinds: int) -> None:
    """Refuses values that are not in a plan's split layout."""
    expected = layout_keys(plan, scan=scan, kinds=kinds)
    keys = list(values) if isinstance(values, dict) else type(values).__name__
    if set(keys) == set(expected):
        if not scan or _is_split(values, loops_of(plan.runs, kinds)):
            return
        keys = {
            key: [getattr(leaf, "shape", leaf) for leaf in jax.tree.leaves(tree)[:1]]
            for key, tree in list(values.items())[:3]
        }
    in_turn = f" over {kinds} kinds of layers" if kinds > 1 else ""
    raise PolicyError(
        f"values are not in the layout of {plan}{in_turn}: expected "
        f"{{{', '.join(expected[:3])}, ...}}, got {keys}; use split_layers"
    )


def _is_split(
    values: Tree, loops: Sequence[Loop], around: tuple[int, ...] = ()
) -> bool:
    """Whether values are in split layout, at any depth, and of its trip counts."""

    def has_keys(tree, keys):
        return isinstance(tree, dict) and set(tree) == set(keys)

    def of_part(part: Part, tree, trips: tuple[int, ...]) -> bool:
        if part.loops:
            return _is_split(tree, part.loops, trips)
        leaves = filter(is_array, jax.tree.leaves(tree))
        return all(tuple(leaf.shape[: len(trips)]) == trips for leaf in leaves)

    def of_loop(loop: Loop, tree) -> bool:
        trips = (*around, loop.trips)
        if len(loop.parts) == 1:
            return of_part(loop.parts[0], tree, trips)
        parts = dict(loop.named_parts())
        return has_keys(tree, parts) and all(
            of_part(part, tree[key], trips) for key, part in parts.items()
        )

    keyed = {f"run_{index}": loop for index, loop in enumerate(loops)}
    return has_keys(values, keyed) and all(
        of_loop(loop, values[key]) for key, loop in keyed.items()
    )


def _split_loops(loops: Sequence[Loop], layers: list[Tree]) -> dict[str, Tree]:
    split, rest = {}, iter(layers)
    for index, loop in enumerate(loops):
        trips = []
        for _ in range(loop.trips):
            parts = {}
            for key, part in loop.named_parts():
                chunk = [next(rest) for _ in range(part.num_layers)]
                parts[key] = _split_loops(part.loops, chunk) if part.loops else chunk[0]
            trips.append(parts if len(parts) > 1 else parts["part_0"])
        split[f"run_{index}"] = jax.tree.map(_stack_leaves, *trips)
    return split


def _merge_loops(loops: Sequence[Loop], split: dict[str, Tree]) -> list[Tree]:
    layers = []
    for index, loop in enumerate(loops):
        for i in range(loop.trips):
            trip = jax.tree.map(
                lambda leaf, i=i: leaf[i] if is_array(leaf) else leaf,
                split[f"run_{index}"],
            )
            for key, part in loop.named_parts():
                tree = trip[key] if len(loop.parts) > 1 else trip
                layers += _merge_loops(part.loops, tree) if part.loops else [tree]
    return layers


def _check_alike(layers: Sequence[Tree], kinds: int) -> None:
    """Layers of a kind have one structure, in which what is no array is equal."""
    for index in range(kinds, len(layers)):
        (arrays, static), (like, like_static) = (
            _structure(layers[place]) for place in (index, index % kinds)
        )
        if arrays != like or static != like_static:
            raise PolicyError(
                f"layer {index} is not built like layer {index % kinds}: layers that "
                "differ in turn are a list of layer functions, and kinds their number"
            )


def _structure(layer: Tree):
    leaves, treedef = jax.tree.flatten(layer)
    static = [tuple(x.shape) if is_array(x) else ("static", x) for x in leaves]
    return treedef, static


def _stack_leaves(*leaves):
    if not is_array(leaves[0]):
        return leaves[0]
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return np.stack(leaves) if on_host else jnp.stack(leaves)
