"""The model of a run on its mesh, and the gradient of its loss over a batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt.layers import LayerPlan
from jaxckpt.models.experts import ROUTER
from jaxckpt.models.transformer import Transformer
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.master import differentiable
from jaxckpt.training.optim import needs_loss_scale
from jaxckpt.training.router import router_loss, router_sums
from jaxckpt.training.sharding import Placement

Tree = Any


def make_model(config: TrainConfig, placement: Placement, plan: LayerPlan):
    """The transformer of a run, its activations placed on the mesh."""
    return Transformer(
        config.architecture,
        plan,
        placement.constrain,
        ring=placement.ring,
        pipeline=config.pipeline,
        gather_outputs=placement.gathers_outputs,
        shards=placement.shards,
    )


def make_gradients(
    config: TrainConfig, placement: Placement, plan: LayerPlan, shardings: Tree
) -> Callable[[Tree, Tree, jax.Array, Any], tuple[dict[str, jax.Array], Tree]]:
    """The function ``(params, batch, key, factor) -> (sums, gradient)``.

    ``sums`` has the ``loss``, and of experts what `jaxckpt.training.router.router_sums`
    gives. All are sums over all tokens of all micro-batches, equal to those of the
    batch in one piece; the gradient is that of ``factor`` times the loss, or, where the
    factor is None, of the loss; the routers' losses are in it.

    Where the weights are used more than once in a step, by micro-batches one after the
    other or in a pipeline, every replica (``data``) adds up a gradient of its own, and
    the replicas add theirs once. Left to the compiler, they would after each use. (Not
    with dropout and without a pipeline: there masks do not depend on the mesh.)

    Sums of micro-batches and of replicas are float32, also where the parameters, and
    so the gradient of one use, are in the compute dtype.

    Args:
      config, placement, plan: the run.
      shardings: of the parameters.
    """
    one_use = config.pipeline is None and (
        config.accumulate == 1 or uses_dropout(config.architecture)
    )
    if placement.mesh.shape["data"] == 1 or one_use:
        model = make_model(config, placement, plan)
        return _accumulated(config, model, shardings)
    within = dataclasses.replace(placement, within_replica=True)
    one = _accumulated(config, make_model(config, within, plan), shardings)
    return _over_replicas(one, placement, shardings)


def _over_replicas(one: Callable, placement: Placement, shardings: Tree) -> Callable:
    """A replica's gradient function, on all of them and added up."""
    replicas, stages = (placement.mesh.shape[axis] for axis in ("data", "pipe"))
    mapped = jax.vmap(one, in_axes=(None, 0, 0, None), spmd_axis_name="data")

    def by_replica(leaf):
        """(steps, sequences, time) to (replicas, steps, sequences of one, time)."""
        steps, _, time = leaf.shape
        # As the sequences are cut over the devices: stages first, then replicas.
        split = leaf.reshape(steps, stages, replicas, -1, time)
        return jnp.moveaxis(split, 2, 0).reshape(replicas, steps, -1, time)

    def gradients(params, batch, key, factor):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(replicas))
        sums, found = mapped(params, jax.tree.map(by_replica, batch), keys, factor)
        found = jax.tree.map(lambda leaf: jnp.sum(leaf, 0, jnp.float32), found)
        sums = jax.tree.map(lambda of_each: jnp.sum(of_each, 0), sums)
        return sums, lax.with_sharding_constraint(found, shardings)

    return gradients


def _accumulated(config: TrainConfig, model: Transformer, shardings: Tree) -> Callable:
    """The gradient on one replica, or on all of them as one."""
    architecture = config.architecture

    def loss_sums(params, micro_batch, key) -> Any:
        """What is differentiated, and what is told of it."""
        rngs = {"dropout": key} if uses_dropout(architecture) else {}
        arguments = [micro_batch[name] for name in ("inputs", "targets", "weights")]
        options = {"deterministic": not rngs, "rngs": rngs}
        if not architecture.moe_experts:
            loss = model.apply({"params": params}, *arguments, **options)
            return loss, {"loss": loss}
        loss, said = model.apply(
            {"params": params}, *arguments, **options, mutable=[ROUTER]
        )
        sums = router_sums(said[ROUTER], micro_batch["weights"])
        return loss + router_loss(sums, architecture), {"loss": loss, **sums}

    def loss_and_gradient(params, micro_batch, key, factor):
        params = differentiable(params, summed=config.pipeline is not None)
        if not needs_loss_scale(config):
            found = jax.value_and_grad(loss_sums, has_aux=True)
            (_, sums), gradient = found(params, micro_batch, key)
            return sums, gradient
        _, pull_back, sums = jax.vjp(
            lambda p: loss_sums(p, micro_batch, key), params, has_aux=True
        )
        return sums, pull_back(factor)[0]

    def gradients(params, batch, key, factor):
        def accumulate(carry, inputs):
            micro_batch, index = inputs
            gradient = loss_and_gradient(
                params, micro_batch, jax.random.fold_in(key, index), factor
            )
            return jax.tree.map(jnp.add, carry, gradient), None

        if config.accumulate == 1:
            micro_batch = jax.tree.map(lambda x: x[0], batch)
            key = jax.random.fold_in(key, 0)
            return loss_and_gradient(params, micro_batch, key, factor)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        zeros = lax.with_sharding_constraint(zeros, shardings)
        first = jax.tree.map(lambda x: x[0], batch)
        sums, _ = jax.eval_shape(loss_and_gradient, params, first, key, factor)
        start = (jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums), zeros)
        indices = jnp.arange(config.accumulate)
        return lax.scan(accumulate, start, (batch, indices))[0]

    return gradients


def uses_dropout(architecture: Any) -> bool:
    return bool(architecture.dropout or architecture.attention_dropout)
