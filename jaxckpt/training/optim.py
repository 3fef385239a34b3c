"""AdamW with linear warm-up, cosine decay and global-norm clipping."""

from typing import Any

import jax
import optax

from jaxckpt.training.config import TrainConfig

_DECAYED = ("kernel", "embedding", "position_embedding", "lm_head")


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
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            b1=0.9,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=_decay_mask,
        ),
    )


def _decay_mask(params: Any) -> Any:
    """Decays matrices, by name: stacked layers give every vector two axes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in _DECAYED, params
    )
