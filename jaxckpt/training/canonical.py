"""The canonical layout of a state: a tree per layer, whatever the layer plan.

A layer plan stacks the layers of a run of equal policies into one array for `lax.scan`;
snapshots keep a tree per layer instead, so that any other plan can take them. Both ways
are compiled, so they also hold for arrays that no process has all of. They go tree by
tree, the parameters and then each moment, through host memory: beside the state, a
device never holds more than one more of its trees. A canonical array is cut over every
mesh axis that divides it, the replicas' too, so that no byte is copied twice.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxckpt.training.master import MASTER, without_copy
from jaxckpt.training.step import Program, State

_HOST, _DEVICE = "pinned_host", "device"


def to_canonical(program: Program, state: State) -> dict[str, Any]:
    """A copy of the state in host memory, its layers as a tree each.

    12 equal layers, stacked in ``state["params"]["layers"]["run_0"]``, become
    ``["layer_0"]`` to ``["layer_11"]``; the key becomes its data. Of master
    weights and a copy of them it is the master.
    """
    with _mesh_of(program):
        return _layout(program).split(state)


def from_canonical(program: Program, canonical: dict[str, Any]) -> State:
    """Undoes `to_canonical`, for any program of the same model, on its devices.

    Args:
      program: whose layout, mesh and memories the state is to have.
      canonical: arrays of any sharding, or numpy arrays, the same on every process.
    """
    with _mesh_of(program):
        return _layout(program).join(canonical)


def canonical_shapes(program: Program) -> dict[str, Any]:
    """What `to_canonical` gives, as `jax.ShapeDtypeStruct` with shardings."""
    return _layout(program).canonical


def _mesh_of(program: Program) -> Any:
    """Makes a program's mesh the active one, where a user may have set another."""
    return jax.set_mesh(jax.tree.leaves(program.state)[0].sharding.mesh)


class _Layout:
    """The compiled ways between a program's layout and the canonical one.

    Attributes:
      canonical: see `canonical_shapes`.
    """

    def __init__(self, program: Program):
        self._program, depth = program, program.model.config.num_layers

        def merge(params):
            layers = program.merge_layers(params["layers"])
            named = {f"layer_{index}": layer for index, layer in enumerate(layers)}
            return {**params, "layers": named}

        def join(params):
            params = lax.with_sharding_constraint(params, between)
            layers = [params["layers"][f"layer_{index}"] for index in range(depth)]
            return {**params, "layers": program.join_layers(layers)}

        def split(params):
            layers = lax.with_sharding_constraint(merge(params), between)
            # Copies: what went through as it is would be the state's own array still.
            return jax.tree.map(jnp.copy, layers)

        def shapes(tree):
            return jax.tree.map(_Slice.spread, merge(jax.tree.map(_Slice, tree)))

        key = program.state["key"]
        data = jax.eval_shape(jax.random.key_data, key)
        data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)
        self._state = without_copy({**program.state, "key": data})
        params = self._state["params"]
        parts, tree = _parts(self._state)
        on_devices = [shapes(part) if _is_tree(part) else part for part in parts]
        self.canonical = jax.tree.unflatten(
            tree, [jax.tree.map(_on_host, part) for part in on_devices]
        )
        # A stage's layer goes to all stages and is cut after that: asked for both at
        # once, XLA makes the array of all layers whole on every device.
        slices = merge(jax.tree.map(_Slice, params))
        between = jax.tree.map(
            lambda one: _device_sharding(one.spread(over_dropped=False)), slices
        )
        self._split = jax.jit(
            split, out_shardings=jax.tree.map(_device_sharding, shapes(params))
        )
        self._join = jax.jit(join, out_shardings=jax.tree.map(_device_sharding, params))

    def split(self, state: State) -> dict[str, Any]:
        state = {**state, "key": jax.random.key_data(state["key"])}
        parts, tree = _parts(without_copy(state))
        for index, part in enumerate(parts):
            if _is_tree(part):
                copy = self._split(_to_memory(part, _DEVICE))
            else:
                copy = jnp.copy(part)
            parts[index] = _to_memory(copy, _HOST)
        return jax.tree.unflatten(tree, parts)

    def join(self, canonical: dict[str, Any]) -> State:
        parts, tree = _parts(canonical)
        shapes, wanted = _parts(self.canonical)[0], _parts(self._state)[0]
        for index, part in enumerate(parts):
            part = _to_memory(jax.tree.map(_placed, part, shapes[index]), _DEVICE)
            part = self._join(part) if _is_tree(part) else part
            parts[index] = jax.tree.map(_placed, part, wanted[index])
        state = jax.tree.unflatten(tree, parts)
        state["key"] = jax.random.wrap_key_data(state["key"])
        return self._with_copy(state)

    def _with_copy(self, state: State) -> State:
        """Undoes `without_copy`; the cast is the devices'."""
        like = self._program.state
        if MASTER not in like:
            return state

        def cast(params):
            return jax.tree.map(lambda x, y: x.astype(y.dtype), params, like["params"])

        places = jax.tree.map(_device_sharding, like["params"])
        here = _to_memory(state["params"], _DEVICE)
        copy = jax.jit(cast, out_shardings=places)(here)
        return {**state, "params": copy, MASTER: state["params"]}


@functools.lru_cache(maxsize=4)  # else every snapshot would compile again
def _layout(program: Program) -> _Layout:
    return _Layout(program)


class _Slice:
    """The shape and the sharding of an array, or of its ``[i]`` or ``[i, j]``."""

    def __init__(self, leaf: jax.ShapeDtypeStruct, dropped: int = 0):
        self._leaf, self._dropped = leaf, dropped
        self.shape, self.dtype = leaf.shape[dropped:], leaf.dtype  # an array's

    def __getitem__(self, index: int | tuple[int, ...]) -> "_Slice":
        axes = len(index) if isinstance(index, tuple) else 1
        return _Slice(self._leaf, self._dropped + axes)

    def spread(self, over_dropped: bool = True) -> jax.ShapeDtypeStruct:
        """Cut also over the mesh axes that it was not cut over before.

        Args:
          over_dropped: also over those that the indices went along.
        """
        leaf, sharding = self._leaf, self._leaf.sharding
        assert isinstance(sharding, NamedSharding)
        shape, mesh = leaf.shape[self._dropped :], sharding.mesh
        spec = [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))]
        parts = [_axes(part) for part in spec[self._dropped :]]
        used = [*parts] if over_dropped else [*map(_axes, spec)]
        unused = [axis for axis in mesh.shape if not any(axis in p for p in used)]
        # Last those that are not cut over between: then what is left is a slice.
        dropped = [axis for part in spec[: self._dropped] for axis in _axes(part)]
        unused.sort(key=dropped.__contains__)
        for axis in unused:
            for dimension, (size, part) in enumerate(zip(shape, parts, strict=True)):
                pieces = mesh.shape[axis]
                for other in part:
                    pieces *= mesh.shape[other]
                if size % pieces == 0:
                    parts[dimension] = (*part, axis)
                    break
        spread = NamedSharding(mesh, PartitionSpec(*(part or None for part in parts)))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=spread)


def _axes(part: Any) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())


def _parts(state: Any) -> tuple[list[Any], Any]:
    """The trees built like the parameters and the other leaves; how they fit."""
    structure = jax.tree.structure(state["params"])
    return jax.tree.flatten(
        state, is_leaf=lambda part: jax.tree.structure(part) == structure
    )


def _is_tree(part: Any) -> bool:
    return isinstance(part, dict)


def _device_sharding(leaf: Any) -> NamedSharding:
    return leaf.sharding.with_memory_kind(_DEVICE)


def _on_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert isinstance(leaf.sharding, NamedSharding)
    sharding = leaf.sharding.with_memory_kind(_HOST)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(array: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """An array where it is wanted; only its memory changes, or it comes from afar."""
    assert isinstance(wanted.sharding, NamedSharding)
    if isinstance(array, jax.Array):
        there = wanted.sharding.with_memory_kind(array.sharding.memory_kind or _DEVICE)
        if array.sharding.is_equivalent_to(there, array.ndim):
            return _to_memory(array, wanted.sharding.memory_kind or _DEVICE)
    return jax.device_put(array, wanted.sharding)


def _to_memory(tree: Any, kind: str) -> Any:
    """Moves arrays to another memory of their own devices, shard by shard.

    In jax 0.7 `jax.device_put` cannot do so to arrays of several processes.
    """

    def move(array: jax.Array) -> jax.Array:
        shards = [
            jax.device_put(
                shard.data, SingleDeviceSharding(shard.device, memory_kind=kind)
            )
            for shard in array.addressable_shards
        ]
        sharding: Any = array.sharding
        return jax.make_array_from_single_device_arrays(
            array.shape, sharding.with_memory_kind(kind), shards
        )

    return jax.tree.map(move, tree)
