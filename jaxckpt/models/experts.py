"""The mixture of experts of the shipped model: a router, and MLPs that share a layer.

Every token goes to the experts with the largest of its router logits, and gets the sum
of their MLPs' outputs, weighted. Router, weights and losses are float32.

**Choices are kept.** Recomputation need not give the forward pass's bits (bfloat16, and
fusions that keep extra precision), and of two experts that are nearly even it could
choose the other one: gradients of another function. So the router's logits and the
chosen experts, named `ROUTING`, are kept under every policy, also in groups of layers;
`Transformer` tells its stack. That is 4 (experts + choices) bytes per token. All that
follows from them (rows, counts, weights) is made again from the same bits.

Names, as MaxText's: ``moe_mlpwi_0``, ``moe_mlpwi_1`` (gelu: ``moe_mlpwi``), one row per
choice, and ``moe_mlpwo``, the layer's output. The matmuls are plain ones in loops over
blocks of rows (`jaxckpt.models.grouped`), so both dots policies keep their outputs. Not
under ``JAX_REMAT3=1`` (jax 0.12.0.1), where those do not reach into the loops and the
names do.

Sources: Shazeer et al. 2017, arXiv 1701.06538; Fedus et al., "Switch Transformers",
2021, arXiv 2101.03961, section 2.2 (balance loss); Zoph et al., "ST-MoE", 2022, arXiv
2202.08906, section 3 (router z-loss); Jiang et al., "Mixtral of Experts", 2024, arXiv
2401.04088, section 2.1 (softmax over the chosen logits).
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxckpt.models.grouped import Shards, capacity, into_experts, out_of_experts, route
from jaxckpt.models.presets import ROUTING, ModelConfig

ROUTER = "router"
"""Collection of what a layer's router says of each sequence, for losses and metrics:
see `router_statistics`."""

_LOGITS, _CHOSEN = ROUTING


class Experts(nn.Module):
    """Experts in place of a block's MLP.

    Attributes:
      config: sizes and kinds; ``config.moe_experts`` is above 0.
      constrain: places an activation, given its logical axes.
      shards: how the mesh cuts tokens and kernels; None is one device.

    Example:
      >>> from jaxckpt.models.presets import model_config
      >>> experts = Experts(model_config("tiny-moe"))
      >>> x = jnp.ones((2, 16, 128))
      >>> variables = experts.init(jax.random.key(0), x)
      >>> y, said = experts.apply(variables, x, mutable=["router"])
      >>> y.shape, float(said["router"]["counts"].sum())
      ((2, 16, 128), 64.0)
    """

    config: ModelConfig
    constrain: Callable[[Array, Sequence[str]], Array] = lambda x, axes: x
    shards: Shards | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "batch time dim"]):
        config = self.config
        experts = config.moe_experts
        per_sequence = None
        if config.moe_capacity_factor:
            per_sequence = capacity(
                config.moe_capacity_factor, x.shape[1], config.moe_top_k, experts
            )
        logits, chosen = self._choose(x)
        if not self.is_initializing():
            said = router_statistics(logits, chosen, per_sequence)
            for name, value in said.items():
                self.sow(ROUTER, name, value, lambda _, new: new, lambda: jnp.zeros(()))
        routes = route(chosen, experts, per_sequence, self.shards)
        gated = config.activation == "swiglu"
        names = ("moe_mlpwi_0", "moe_mlpwi_1") if gated else ("moe_mlpwi",)
        kernels = tuple(self._kernel(name, fan_in_axis=1) for name in names)
        inside: Any = into_experts(x, kernels, routes, experts, self.shards)
        inside = [
            checkpoint_name(one, name) for one, name in zip(inside, names, strict=True)
        ]
        hidden = nn.silu(inside[0]) * inside[1] if gated else nn.gelu(inside[0])
        kernel = self._kernel("moe_mlpwo", fan_in_axis=2)
        weights = choice_weights(logits, chosen)
        y: Any = out_of_experts(hidden, weights, kernel, routes, experts, self.shards)
        y = self.constrain(y, ("batch", "time", "residual"))
        return checkpoint_name(y, "moe_mlpwo")

    def _choose(self, x):
        """The router's logits, float32, and the experts of each token."""
        config = self.config
        kernel: Any = self.param(
            "router",
            nn.with_logical_partitioning(
                nn.initializers.lecun_normal(), ("norm", "norm")
            ),
            (config.dim, config.moe_experts),
        )
        logits = lax.dot_general(
            x.astype(jnp.float32),
            kernel.astype(jnp.float32),
            (((2,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        logits = checkpoint_name(logits, _LOGITS)
        _, chosen = lax.top_k(lax.stop_gradient(logits), config.moe_top_k)
        return logits, checkpoint_name(chosen, _CHOSEN)

    def _kernel(self, name: str, fan_in_axis: int):
        """Of all experts, (experts x dim, hidden), in the compute dtype."""
        config = self.config
        kernel: Any = _Kernel(config, fan_in_axis, name=name)()
        return kernel.astype(config.compute_dtype)


class _Kernel(nn.Module):
    """One projection of all experts: its parameter is ``kernel``, as a Dense's is."""

    config: ModelConfig
    fan_in_axis: int

    @nn.compact
    def __call__(self):
        config = self.config
        experts, dim, hidden = config.moe_experts, config.dim, config.mlp_dim
        init = nn.initializers.variance_scaling(
            *(1.0, "fan_in", "truncated_normal"),
            in_axis=self.fan_in_axis,
            out_axis=3 - self.fan_in_axis,
            batch_axis=0,
        )

        def flat(key, shape):
            return init(key, (experts, dim, hidden)).reshape(shape)

        axes = ("experts_embed", "mlp")
        init_flat: Any = nn.with_logical_partitioning(flat, axes)
        return self.param("kernel", init_flat, (experts * dim, hidden))


def choice_weights(
    logits: Float[Array, "batch time experts"],
    chosen: Int[Array, "batch time choices"],
) -> Float[Array, "batch time choices"]:
    """What each choice's output is multiplied by.

    The softmax over the chosen experts' logits (Mixtral); of a single choice, which
    would always be 1, its probability among all experts (Switch).
    """
    is_of = chosen[..., None] == jnp.arange(logits.shape[-1])
    if chosen.shape[-1] == 1:
        logits = jax.nn.log_softmax(logits)
        return jnp.exp(jnp.sum(logits[:, :, None] * is_of, axis=-1))
    return jax.nn.softmax(jnp.sum(logits[:, :, None] * is_of, axis=-1))


def router_statistics(
    logits: Float[Array, "batch time experts"],
    chosen: Int[Array, "batch time choices"],
    per_sequence: int | None = None,
) -> dict[str, Array]:
    """Of each sequence, so that a batch's losses are sums over its sequences.

    Args:
      logits: of the router.
      chosen: the experts of each token.
      per_sequence: choices that an expert takes of one sequence; None is all.

    Returns:
      counts: (batch, experts), choices of each expert.
      balance: (batch,), experts x sum over experts of (share of choices x mean
        probability): 1 when either is even. Switch, eq. 4, with a sequence as batch.
      z: (batch,), mean of the squared log-sum-exp of the logits. ST-MoE, eq. 5.
      dropped: (batch,), choices beyond what their expert takes.
    """
    experts = logits.shape[-1]
    is_of = chosen[..., None] == jnp.arange(experts)
    counts = jnp.sum(is_of, axis=(1, 2), dtype=jnp.float32)
    share = counts / (chosen.shape[1] * chosen.shape[2])
    probability = jnp.mean(jax.nn.softmax(logits), axis=1)
    beyond = counts - (chosen.shape[1] if per_sequence is None else per_sequence)
    return {
        "counts": counts,
        "dropped": jnp.sum(jnp.maximum(beyond, 0.0), axis=-1),
        "balance": experts * jnp.sum(share * probability, axis=-1),
        "z": jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2, axis=1),
    }
