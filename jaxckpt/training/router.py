"""What routers add to a training step: their losses, and how even they are."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.models.presets import ModelConfig

Sums = dict[str, jax.Array]

_OF_A_SEQUENCE = ("balance", "z", "dropped")


def router_sums(said: Any, weights: jax.Array) -> Sums:
    """What the routers of all layers say of a micro-batch, as sums that add up.

    Args:
      said: the collection `jaxckpt.models.experts.ROUTER` of a model, where the layers
        of a run are stacked.
      weights: of the tokens, (batch, time).

    Returns:
      ``balance`` and ``z``: mean over layers, of each sequence times the sum of its
      tokens' weights, so that all of them over all weights is the mean over tokens;
      ``dropped``: choices, over all layers; ``counts``: (layers, experts), choices.
    """

    def of_layers(name, axes):
        leaves = jax.tree_util.tree_leaves_with_path(said)
        values = [leaf for path, leaf in leaves if path[-1].key == name]
        return jnp.concatenate([one.reshape(-1, *one.shape[-axes:]) for one in values])

    of_sequence = jnp.sum(weights, axis=-1)
    balance, z, dropped = (of_layers(name, 1) for name in _OF_A_SEQUENCE)
    return {
        "balance": jnp.sum(jnp.mean(balance, axis=0) * of_sequence),
        "z": jnp.sum(jnp.mean(z, axis=0) * of_sequence),
        "dropped": jnp.sum(dropped),
        "counts": jnp.sum(of_layers("counts", 2), axis=1),
    }


def router_loss(sums: Sums, model: ModelConfig) -> jax.Array:
    """What is added to the loss sum of a micro-batch."""
    return model.moe_balance_loss * sums["balance"] + model.moe_z_loss * sums["z"]


def router_metrics(sums: Sums, tokens: jax.Array) -> dict[str, jax.Array]:
    """Of a step, for the metrics.

    Args:
      sums: of `router_sums`, over all micro-batches.
      tokens: the sum of all weights.

    Returns:
      ``router_balance``: the balance loss, before its weight; 1 is even.
      ``expert_load``: choices of the busiest expert over the mean, mean over layers.
      ``dropped_choices``: share of choices beyond their expert's capacity.
    """
    counts = sums["counts"]
    load = jnp.max(counts, axis=-1) / jnp.mean(counts, axis=-1)
    return {
        "router_balance": sums["balance"] / tokens,
        "expert_load": jnp.mean(load),
        "dropped_choices": sums["dropped"] / jnp.sum(counts),
    }
