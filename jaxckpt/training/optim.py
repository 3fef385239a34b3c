"""AdamW with linear warm-up, cosine decay and global-norm clipping; loss scaling."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxckpt.training.config import TrainConfig

_MATRICES = ("kernel", "embedding", "position_embedding", "lm_head")

# Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the start is
# that of flax.training.dynamic_scale and of PyTorch's GradScaler.
_FIRST_SCALE, _GOOD_STEPS = 2.0**16, 2000
SMALLEST_SCALE = 2.0**-14


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear up to the peak, then a cosine down to a tenth of it."""
    warmup = min(config.warmup_steps, config.steps - 1)
    peak = config.peak_learning_rate
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),  # the first step moves already
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=peak / 10,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer; its state mirrors the parameters twice (float32 moments).

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    return optax.chain(make_clip(config), make_rule(config))


def make_clip(config: TrainConfig) -> optax.GradientTransformation:
    """The part that needs all gradients at once."""
    return optax.clip_by_global_norm(config.clip_norm)


def make_rule(config: TrainConfig) -> optax.GradientTransformation:
    """The part that acts on each parameter by itself, entry by entry."""
    return optax.adamw(
        learning_rate_schedule(config),
        b1=0.9,
        b2=0.95,
        weight_decay=config.weight_decay,
        mask=_decay_mask,
    )


def clip(gradient: Any, norm: jax.Array, most: float) -> Any:
    """A part of the gradient as `make_clip` leaves it.

    Args:
      gradient: of some parameters, or all.
      norm: the global norm, over all of them.
      most: the largest that there may be.
    """
    small = norm < most
    return jax.tree.map(lambda g: jnp.where(small, g, g / norm * most), gradient)


def is_matrix(path: tuple[Any, ...]) -> bool:
    """By name, at its place in a tree: stacked layers give every vector two axes."""
    return path[-1].key in _MATRICES


def _decay_mask(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: is_matrix(path), params)


def needs_loss_scale(config: TrainConfig) -> bool:
    """Whether gradients may fall below the smallest number of the compute dtype."""
    return jnp.dtype(config.architecture.compute_dtype) == jnp.float16


def first_loss_scale() -> dict[str, jax.Array]:
    """What a run with loss scaling keeps in its state, of no parameter's shape.

    ``scale`` multiplies the mean loss of a step, ``good_steps`` were done since it
    last changed, and ``skipped_steps`` had a gradient that was not finite.
    """
    return {
        "scale": jnp.float32(_FIRST_SCALE),
        "good_steps": jnp.int32(0),
        "skipped_steps": jnp.int32(0),
    }


def next_loss_scale(
    loss_scale: dict[str, jax.Array], finite: jax.Array
) -> dict[str, jax.Array]:
    """Doubles the scale after enough good steps, halves it after a skipped one."""
    scale, good = loss_scale["scale"], loss_scale["good_steps"] + 1
    grown = good >= _GOOD_STEPS
    larger = jnp.where(grown, 2 * scale, scale)
    smaller = jnp.maximum(scale / 2, SMALLEST_SCALE)
    return {
        "scale": jnp.where(finite, larger, smaller),
        "good_steps": jnp.where(finite & ~grown, good, 0),
        "skipped_steps": loss_scale["skipped_steps"] + ~finite,
    }
