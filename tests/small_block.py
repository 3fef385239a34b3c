"""A block with a named value, and its gradient: what transformations are tried on."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

X = jnp.linspace(-1, 1, 12).reshape(4, 3)
W = jnp.linspace(-0.5, 1, 9).reshape(3, 3)
BOTH = jnp.stack([W, W.T])


def block(x, w):
    return jnp.tanh(checkpoint_name(jnp.sin(x) @ w, "h")) @ w.T


def loss(fn):
    return lambda *args: jnp.sum(fn(*args) ** 2)


def gradient(fn):
    return jax.value_and_grad(loss(fn), argnums=(0, 1))
