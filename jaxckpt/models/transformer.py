"""The shipped model: a decoder-only transformer of the GPT or the Llama kind.

Blocks run in a `jaxckpt.Stack`, so `nn.scan` and `nn.remat` follow the layer plan.
Values carry MaxText's names. Each is named where its gradient needs it: projections
before the non-linearity, after rotary and after the cast to the compute dtype.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxckpt.layers import Layers, layer_plan
from jaxckpt.linen import Stack
from jaxckpt.linen_pipeline import PipelinedStack, chunk_size
from jaxckpt.models.attention import attention
from jaxckpt.models.experts import Experts
from jaxckpt.models.gathered import Gather, gathered_dot_general
from jaxckpt.models.grouped import Shards
from jaxckpt.models.loss import chunked_cross_entropy
from jaxckpt.models.presets import GATHERED, ModelConfig
from jaxckpt.models.ring_attention import Ring
from jaxckpt.schedules.pipeline import PipelineSchedule

Constrain = Callable[[Array, Sequence[str]], Array]


def unconstrained(x: Array, axes: Sequence[str]) -> Array:
    """Leaves the placement of an activation to the compiler."""
    del axes
    return x


class Transformer(nn.Module):
    """A language model; its call is the training loss.

    Attributes:
      config: sizes and kinds; ``config.attention`` is "cudnn" or "xla" here.
      plan: the policy, grouping or layer plan of its blocks; in a pipeline, of the
        blocks of one chunk.
      constrain: places an activation, given its logical axes; see
        `jaxckpt.training.sharding`.
      ring: the devices that time is cut over, if it is. Inside, tokens are then in
        its zigzag order; what comes in and goes out is in the sequence's.
      pipeline: runs the blocks in the stages of a pipeline, along the mesh axis pipe.
      gather_outputs: gather the kernels of output projections by hand; see
        `jaxckpt.models.gathered`. All are where the plan names gathered weights.
      shards: how the mesh cuts tokens and experts; None is one device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxckpt.models.presets import model_config
      >>> config = model_config("tiny", num_layers=2, attention="xla")
      >>> model = Transformer(config, plan="dots_saveable")
      >>> tokens = jnp.zeros((1, 16), int)
      >>> params = model.init(jax.random.key(0), tokens, tokens, jnp.ones((1, 16)))
      >>> float(model.apply(params, tokens, tokens, jnp.ones((1, 16))) / 16) > 0
      True
    """

    config: ModelConfig
    plan: str | Layers = "none"
    constrain: Constrain = unconstrained
    ring: Ring | None = None
    pipeline: PipelineSchedule | None = None
    gather_outputs: bool = False
    shards: Shards | None = None

    def setup(self):
        config = self.config
        # Unit-variance logits at the start ask for 1/sqrt(dim) when it is tied.
        scale = config.dim**-0.5 if config.tied_embedding else 1.0
        self.embedding = self.param(
            "embedding",
            _partitioned(nn.initializers.normal(scale), "vocab", "embed"),
            (config.vocab_size, config.dim),
        )
        if config.positions == "learned":
            self.position_embedding = self.param(
                "position_embedding",
                _partitioned(nn.initializers.normal(0.02), "positions", "embed"),
                (config.max_seq_len, config.dim),
            )
        self.layers = self._make_layers()
        self.final_norm = _norm(config)
        if not config.tied_embedding:
            self.lm_head = self.param(
                "lm_head",
                _partitioned(nn.initializers.lecun_normal(), "embed", "vocab"),
                (config.dim, config.vocab_size),
            )
        self.embedding_dropout = nn.Dropout(config.dropout)

    def _make_layers(self) -> nn.Module:
        config = self.config
        depth = config.num_layers
        if self.pipeline:
            depth = chunk_size(depth, self.pipeline)
        policies = layer_plan(self.plan, depth).policies()
        gather: Gather = "outputs" if self.gather_outputs else "compiler"
        if any(GATHERED in policy.names for policy in policies):
            gather = "kept"
        block = functools.partial(
            Block, config, self.constrain, self.ring, gather, self.shards
        )
        if self.pipeline is None:
            return Stack(
                block, depth, self.plan, config.scan_layers, config.always_kept
            )

        def placed(*lead):
            return lambda x: self.constrain(x, (*lead, *BETWEEN_LAYERS))

        return PipelinedStack(
            block,
            config.num_layers,
            self.pipeline,
            self.plan,
            axis="pipe",
            cast=functools.partial(_cast_kernels, config.compute_dtype),
            constrain_state=placed("stages"),
            constrain_streams=placed("stages", "columns"),
            constrain=self.constrain,
        )

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        targets: Int[Array, "batch time"],
        weights: Float[Array, "batch time"],
        deterministic: bool = True,
    ) -> Float[Array, ""]:
        """Sum over tokens of weight x negative log-likelihood, in nats.

        Args:
          tokens: input ids.
          targets: the ids to predict, one per input.
          weights: weight of each prediction; divide the sum by theirs.
          deterministic: False applies dropout and needs a "dropout" random key.
        """
        shards = 1
        if self.ring:  # the loss is a sum over tokens, in any order
            tokens, targets, weights = map(
                self.ring.to_zigzag, (tokens, targets, weights)
            )
            shards = self.ring.size
        return chunked_cross_entropy(
            self.hidden(tokens, deterministic),
            self._output_kernel(),
            targets,
            weights,
            self.config.num_loss_chunks(tokens.shape[1] // shards),
            shards,
        )

    def hidden(
        self, tokens: Int[Array, "batch time"], deterministic: bool = True
    ) -> Float[Array, "batch time dim"]:
        """Final hidden states, normalized, in the compute dtype.

        With a ring, tokens are in its zigzag order.
        """
        dtype = self.config.compute_dtype
        # Looked up where the table's columns are, then sent to the sequences' devices.
        tokens = self.constrain(tokens, ("replicas", "lookup_time"))
        x = jnp.take(self.embedding, tokens, axis=0).astype(dtype)
        x = self.constrain(x, ("replicas", "lookup_time", "embed"))
        if self.config.positions == "learned":
            positions = self.position_embedding[: tokens.shape[1]].astype(dtype)
            x += self.ring.to_zigzag(positions[None]) if self.ring else positions
        x = self.embedding_dropout(x, deterministic=deterministic)
        # Outside the layers the stages of a pipeline share the sequences.
        x = self.constrain(x, ("sequences", "layer_time", "residual"))
        x = self.layers(x, deterministic=deterministic)
        return self.constrain(self.final_norm(x), ("sequences", "time", "residual"))

    def logits(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time v"]:
        """Next-token logits in float32, for sampling; training never makes them."""
        if self.ring:
            hidden = self.ring.from_zigzag(self.hidden(self.ring.to_zigzag(tokens)))
        else:
            hidden = self.hidden(tokens)
        return jnp.einsum(
            "btd,dv->btv",
            hidden,
            self._output_kernel(),
            preferred_element_type=jnp.float32,
        )

    def _output_kernel(self) -> Float[Array, "dim vocab"]:
        kernel = self.embedding.T if self.config.tied_embedding else self.lm_head
        kernel = kernel.astype(self.config.compute_dtype)
        # Cut in vocab over all weight shards: neither the kernel nor its gradient is
        # ever whole, only a chunk of the hidden states travels.
        return self.constrain(kernel, ("residual", "loss_vocab"))


class Block(nn.Module):
    """Norm, attention, norm, MLP, each half added to the residual stream."""

    config: ModelConfig
    constrain: Constrain = unconstrained
    ring: Ring | None = None
    gather: Gather = "compiler"
    shards: Shards | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "batch time dim"], deterministic: bool = True):
        config, constrain = self.config, self.constrain
        residual = ("batch", "residual_time", "residual")
        # Norms' results are cut before they are gathered: else float32 ones travel.
        dropout = functools.partial(nn.Dropout, config.dropout)
        # The carry of a scan is kept anyway; the name lets a policy offload it. Where
        # it is cut, then on both sides of the name: else what is gathered is kept.
        x = checkpoint_name(constrain(x, BETWEEN_LAYERS), "decoder_layer_input")
        x = constrain(constrain(x, BETWEEN_LAYERS), residual)

        y = constrain(_norm(config, name="attention_norm")(x), residual)
        y = constrain(y, _FULL_TIME)
        y = self._attention(y, deterministic)
        y = dropout(name="attention_dropout")(y, deterministic=deterministic)
        x = constrain(x + y, residual)

        y = constrain(_norm(config, name="mlp_norm")(x), residual)
        y = constrain(y, _FULL_TIME)
        if config.moe_experts:
            y = Experts(config, constrain, self.shards, name="moe")(y)
        else:
            y = self._mlp(y)
        y = dropout(name="mlp_dropout")(y, deterministic=deterministic)
        return constrain(x + y, BETWEEN_LAYERS)

    def _attention(self, y, deterministic):
        config = self.config
        head = config.size_of_head
        positions = self.ring.positions(y.shape[1]) if self.ring else None

        def heads(name, count, axis):
            out = self._dense(y, name, (count, head), ("embed", axis, "head_dim"))
            out = self.constrain(out, ("batch", "time", axis, "head_dim"))
            if config.positions == "rotary" and name != "value_proj":
                out = rotary(out, config.rope_theta, positions)
            return checkpoint_name(out, name)

        rate = 0.0 if deterministic else config.attention_dropout
        context = attention(
            heads("query_proj", config.num_heads, "heads"),
            heads("key_proj", config.kv_heads, "kv_heads"),
            heads("value_proj", config.kv_heads, "kv_heads"),
            implementation=config.attention,  # pyright: ignore[reportArgumentType]
            dropout_rate=rate,
            dropout_key=self.make_rng("dropout") if rate else None,
            ring=self.ring,
        )
        context = context.reshape(*context.shape[:2], -1)
        out = self._dense(context, "out_proj", (config.dim,), _OUTPUT_AXES)
        return checkpoint_name(out, "out_proj")

    def _mlp(self, y):
        config = self.config

        def up(name):
            out = self._dense(y, name, (config.mlp_dim,), ("embed", "mlp"))
            out = self.constrain(out, ("batch", "time", "mlp"))
            return checkpoint_name(out, name)

        if config.activation == "swiglu":
            y = nn.silu(up("mlpwi_0")) * up("mlpwi_1")
        else:
            y = nn.gelu(up("mlpwi"))
        y = self._dense(y, "mlpwo", (config.dim,), _OUTPUT_AXES)
        return checkpoint_name(y, "mlpwo")

    def _dense(self, x, name, features, axes):
        """A projection over the last axis, in the compute dtype."""
        dot_general = None
        if self.gather == "kept" or (self.gather == "outputs" and axes == _OUTPUT_AXES):
            named = self.gather == "kept"
            dot_general = gathered_dot_general(self.constrain, axes, named)
        return nn.DenseGeneral(
            features,
            use_bias=self.config.bias,
            dtype=self.config.compute_dtype,
            kernel_init=_partitioned(nn.initializers.lecun_normal(), *axes),
            bias_init=_partitioned(nn.initializers.zeros, *axes[1:]),
            dot_general=dot_general,
            name=name,
        )(x)


BETWEEN_LAYERS = ("batch", "layer_time", "residual")
"""Logical axes of what goes from layer to layer, as a checkpointed layer keeps it."""

_FULL_TIME = ("batch", "time", "residual")
_OUTPUT_AXES = ("joined", "residual")  # kernels back into the residual stream


def _cast_kernels(dtype: str, params: Any) -> Any:
    """Matmuls' weights in the compute dtype, as each of them casts its own."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.astype(dtype) if path[-1].key == "kernel" else leaf,
        params,
    )


def rotary(
    x: Float[Array, "batch time heads head_dim"],
    theta: float,
    positions: Int[Array, " time"] | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves rotated.

    Without positions, rows are those of 0, 1, ...
    """
    half = x.shape[-1] // 2
    if positions is None:
        positions = jnp.arange(x.shape[1])
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _norm(config: ModelConfig, name: str | None = None) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    extra: dict[str, Any] = {}
    if config.norm == "layernorm":
        extra["bias_init"] = _partitioned(nn.initializers.zeros, "norm")
    return kind(
        epsilon=config.norm_epsilon,
        dtype=config.compute_dtype,
        scale_init=_partitioned(nn.initializers.ones, "norm"),
        name=name,
        **extra,
    )


def _partitioned(init: jax.nn.initializers.Initializer, *axes: str) -> Any:
    return nn.with_logical_partitioning(init, axes)
