"""Bytes of a run's weights and gradients on one device, as the planner counts them."""

import math
from typing import Any

from jaxckpt.training.config import TrainConfig


def gradient_bytes(config: TrainConfig, program: Any) -> int:
    """All gradients, in the dtypes that they are taken or summed in."""
    import jax

    from jaxckpt.training.master import differentiable, without_copy

    params = without_copy(program.state)["params"]
    beside = _beside_gradients(config, params["layers"])
    added = config.accumulate > 1 or config.pipeline  # in float32
    if config.offload_optimizer == "all" and not added:
        taken = jax.eval_shape(differentiable, program.state["params"])
        params = jax.tree.map(
            lambda leaf, like: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=like.sharding
            ),
            taken,
            params,
        )
    return local_bytes(params) + beside


def layer_bytes(config: TrainConfig, program: Any) -> int:
    """Weights of one layer on one device."""
    repeats = config.pipeline.repeats if config.pipeline else 1
    layers = program.state["params"]["layers"]
    return local_bytes(layers) // (repeats * config.planned_layers)


def _beside_gradients(config: TrainConfig, layers: Any) -> int:
    """Of a pipeline: the layers' weights in the compute dtype, kept for the loop, and
    the gradients of one iteration before they are added."""
    if config.pipeline is None:
        return 0
    import jax.numpy as jnp

    schedule, layers = config.pipeline, local_bytes(layers)
    itemsize = jnp.dtype(config.architecture.compute_dtype).itemsize
    copied = itemsize == 4 or config.offload_optimizer == "all"  # not for the loop
    cast = 0 if copied else layers * itemsize // 4
    return cast + layers * itemsize // 4 // schedule.repeats


def local_bytes(tree: Any) -> int:
    """Bytes of a pytree of `jax.ShapeDtypeStruct` on one device."""
    import jax

    from jaxckpt.naming import aval_bytes

    total = 0
    for leaf in jax.tree.leaves(tree):
        size = math.prod(leaf.shape)
        local = math.prod(leaf.sharding.shard_shape(leaf.shape))
        total += aval_bytes(leaf) * local // size if size else 0
    return total
