"""A stack of equal Flax Linen blocks as a pipeline over devices.

The same blocks, parameters and initial weights as in `jaxckpt.linen.Stack`, cut into
the chunks of a schedule. A layer plan speaks of one chunk's layers: all stages run one
program, so every chunk runs under the same plan.

Layout of the parameters: the split layout of `jaxckpt.stack` for one chunk, with
leaves of shape (stages, repeats, ...); `join_chunks` and `merge_chunks` go between it
and the canonical list of per-layer trees.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxckpt.layers import Layers, Run, layer_plan
from jaxckpt.layout import join_layers, merge_layers, split_layers
from jaxckpt.linen import LAYER_AXIS, layer_keys, make_block
from jaxckpt.pipeline import pipeline
from jaxckpt.remat import split_static
from jaxckpt.schedules.pipeline import PipelineSchedule
from jaxckpt.stack import stack

STAGE_AXIS = "stages"  # logical names of the leading axes of parameters
REPEAT_AXIS = "repeats"

Tree = Any


class PipelinedStack(nn.Module):
    """``num_layers`` blocks one after the other, in the stages of a pipeline.

    Not for blocks with other variables than parameters (statistics, sown values), nor
    for further arguments that are arrays.

    Attributes:
      make_block, num_layers: as in `jaxckpt.linen.Stack`.
      schedule: stages, micro-batches and repeats; its chunks divide the layers.
      plan: the policy, grouping or layer plan of the layers of one chunk.
      axis, cast, constrain_state, constrain_streams: see `jaxckpt.pipeline.pipeline`;
        ``cast`` gets the parameters alone.
      constrain: places an array, given its logical axes: the gradients of parameters
        that are made with such axes.

    A random stream's keys depend on the layer and, other than in a `Stack`, on the
    micro-batch. Dropout masks do not change with the number of repeats or the plan, but
    do with those of stages and micro-batches, which say who shares a micro-batch.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jaxckpt.linen import Stack
      >>> class Block(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x + nn.gelu(nn.Dense(x.shape[-1])(x))
      >>> schedule = PipelineSchedule(stages=2, microbatches=4)
      >>> model = PipelinedStack(Block, 6, schedule, plan="every:3")
      >>> x = jnp.ones((8, 16))
      >>> variables = nn.unbox(model.init(jax.random.key(0), x))
      >>> params = variables["params"]
      >>> params["run_0"]["run_0"]["Dense_0"]["kernel"].shape
      (2, 1, 1, 3, 16, 16)
      >>> plain = join_layers(merge_chunks(params, "every:3", 6, schedule), "none", 6)
      >>> y = Stack(Block, 6).apply({"params": plain}, x)
      >>> bool(jnp.allclose(model.apply(variables, x), y, atol=1e-6))
      True
    """

    make_block: Callable[..., nn.Module]
    num_layers: int
    schedule: PipelineSchedule
    plan: str | Layers = "none"
    axis: str | None = None
    cast: Callable[[Tree], Tree] = lambda params: params
    constrain_state: Callable[[Tree], Tree] = lambda tree: tree
    constrain_streams: Callable[[Tree], Tree] = lambda tree: tree
    constrain: Callable[[jax.Array, Sequence[str]], jax.Array] = lambda x, axes: x

    @nn.compact
    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        arrays, _ = split_static((args, kwargs))
        if arrays:
            raise ValueError("a pipelined stack takes flags only beside its input")
        keys = layer_keys(self, self.num_layers)
        block = make_block(self.make_block)
        size = chunk_size(self.num_layers, self.schedule)
        plan = layer_plan(self.plan, size)

        def init(keys):
            return block.init(keys, x, *args, **kwargs)

        if self.is_initializing():
            self._init(init, keys)
            return x  # of any batch
        assert self.scope is not None  # it is, inside a call

        def layer(x, values):
            params, keys = values["params"], values["keys"]
            variables = {"params": params}
            return block.apply(variables, x, *args, rngs=keys, **kwargs), None

        def stage(values, x, micro_batch):
            keys = jax.tree.map(
                lambda keys: _fold_in(keys, micro_batch), values["keys"]
            )
            per_layer = _zip_runs(plan.runs, values["params"], keys)
            return stack(layer, plan, size)(x, per_layer)[0]

        def cast(values):
            return {**values, "params": self.cast(values["params"])}

        names = _names(jax.eval_shape(init, jax.random.key(0))["params"])

        def constrain_values(values):
            placed = self._map_named(self.constrain, plan.runs, values["params"], names)
            return {**values, "params": placed}

        keys = {stream: all for stream, all in keys.items() if stream != "params"}
        run = pipeline(
            stage,
            self.schedule,
            axis=self.axis,
            cast=cast,
            constrain_state=self.constrain_state,
            constrain_streams=self.constrain_streams,
            constrain_values=constrain_values,
        )
        params = nn.unbox(self.variables["params"])
        return run({"params": params, "keys": self._chunked(keys)}, x)

    def _init(self, init: Callable[[Any], Any], keys: dict[str, jax.Array]) -> None:
        """Makes the parameters of all layers, each from its own key."""
        layers = jax.vmap(init)(keys)
        other = set(layers) - {"params"}
        if other:
            raise ValueError(f"a pipelined stack keeps no collection {other.pop()!r}")
        names = _names(layers["params"])
        params = self._chunked(nn.unbox(layers["params"]))
        plan = layer_plan(self.plan, chunk_size(self.num_layers, self.schedule))
        boxed = self._map_named(nn.Partitioned, plan.runs, params, names)
        for key, tree in boxed.items():
            self.put_variable("params", key, tree)

    def _map_named(self, function, runs: Sequence[Run], params: Tree, names: Tree):
        """Maps ``(array, its logical axes)`` over parameters in a pipeline's layout."""

        def of_leaf(axes, leaf):
            if axes is None:
                return leaf
            inside = leaf.ndim - 2 - len(axes)
            lead = (STAGE_AXIS, REPEAT_AXIS, *(inside * (LAYER_AXIS,)))
            return function(leaf, (*lead, *axes))

        return {
            key: self._map_named(function, run.group, params[key], names)
            if run.group
            else jax.tree.map(of_leaf, names, params[key], is_leaf=_is_names)
            for key, run in _keyed(runs)
        }

    def _chunked(self, values: Tree) -> Tree:
        """Stacked values (layers, ...) as (stages, repeats, ...) in split layout."""
        schedule = self.schedule
        size = chunk_size(self.num_layers, schedule)

        def cut(leaf):
            lead = (schedule.repeats, schedule.stages, size)
            return leaf.reshape(*lead, *leaf.shape[1:]).swapaxes(0, 1)

        split = functools.partial(split_layers, plan=self.plan, num_layers=size)
        for axis_size in (schedule.repeats, schedule.stages):  # there may be no values
            split = jax.vmap(split, axis_size=axis_size)
        return split(jax.tree.map(cut, values))


def chunk_size(num_layers: int, schedule: PipelineSchedule) -> int:
    """Layers of one chunk.

    Raises:
      ValueError: the chunks do not divide the layers.
    """
    if num_layers % schedule.chunks:
        raise ValueError(
            f"{num_layers} layers do not divide over {schedule.stages} stages x "
            f"{schedule.repeats} repeats"
        )
    return num_layers // schedule.chunks


def join_chunks(
    layers: Sequence[Tree],
    plan: str | Layers,
    num_layers: int,
    schedule: PipelineSchedule,
) -> dict[str, Tree]:
    """Brings a list of per-layer trees into a pipeline's layout."""
    size = chunk_size(num_layers, schedule)
    chunks = [
        join_layers(layers[start : start + size], plan, size)
        for start in range(0, num_layers, size)
    ]
    stages, repeats = schedule.stages, schedule.repeats

    def gather(*leaves):
        stacked = _numpy_of(leaves).stack(leaves)
        return stacked.reshape(repeats, stages, *stacked.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(gather, *chunks)


def merge_chunks(
    split: dict[str, Tree],
    plan: str | Layers,
    num_layers: int,
    schedule: PipelineSchedule,
) -> list[Tree]:
    """The list of per-layer trees of a pipeline's layout; undoes `join_chunks`."""
    size = chunk_size(num_layers, schedule)
    layers = []
    for repeat in range(schedule.repeats):
        for stage in range(schedule.stages):
            chunk = jax.tree.map(lambda leaf, p=stage, r=repeat: leaf[p, r], split)
            layers += merge_layers(chunk, plan, size)
    return layers


def _zip_runs(runs: Sequence[Run], params: Tree, keys: dict[str, Tree]) -> Tree:
    """Parameters and keys, both in split layout, as one tree in split layout."""
    return {
        key: _zip_runs(run.group, params[key], keys[key])
        if run.group
        else {"params": params[key], "keys": keys[key]}
        for key, run in _keyed(runs)
    }


def _keyed(runs: Sequence[Run]):
    return [(f"run_{index}", run) for index, run in enumerate(runs)]


def _fold_in(keys: jax.Array, number: jax.Array) -> jax.Array:
    """Folds a number into an array of keys of any shape."""
    fold = functools.partial(jax.random.fold_in, data=number)
    for _ in keys.shape:
        fold = jax.vmap(fold)
    return fold(keys)


def _names(params: Tree) -> Tree:
    """The logical axes of each parameter of a block, None where it has none."""
    return jax.tree.map(
        lambda leaf: leaf.names if isinstance(leaf, nn.Partitioned) else None,
        params,
        is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned),
    )


def _is_names(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, tuple)


def _numpy_of(leaves: Sequence[Any]) -> Any:
    """numpy for arrays on the host, else jax.numpy."""
    import numpy as np

    return np if all(isinstance(leaf, np.ndarray) for leaf in leaves) else jnp
