"""Cross entropy over a large vocabulary, a piece of the sequence at a time.

Logits (batch x sequence x vocabulary, float32) are often the largest activation of
a whole training step. Here they exist for one chunk only, and nothing of them is
kept or recomputed: the gradients with respect to the hidden states and the output
matrix are computed in the forward pass, while the chunk's logits are there, and
scaled by the incoming cotangent in the backward pass.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxckpt.compiler.flops import BACKWARD_SCOPE


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def chunked_cross_entropy(
    hidden: Float[Array, "batch time dim"],
    kernel: Float[Array, "dim vocab"],
    targets: Int[Array, "batch time"],
    weights: Float[Array, "batch time"],
    num_chunks: int,
    shards: int = 1,
) -> Float[Array, ""]:
    """Sum over tokens of weight x negative log-likelihood, in nats (float32).

    Args:
      hidden: final hidden states, in the compute dtype.
      kernel: output matrix, in the compute dtype; accumulation is float32.
      targets: token ids to predict.
      weights: weight of each token; 0 leaves a token out.
      num_chunks: pieces of the sequence; divides ``time / shards``.
      shards: parts of the time axis on devices of their own. A chunk then is a piece of
        each part, so that no device waits while another's part is worked off, and
        nothing but the chunk moves.

    Example:
      >>> import jax.numpy as jnp
      >>> hidden, kernel = jnp.zeros((2, 6, 4)), jnp.zeros((4, 8))
      >>> targets, weights = jnp.zeros((2, 6), int), jnp.ones((2, 6))
      >>> float(chunked_cross_entropy(hidden, kernel, targets, weights, 3) / 12)
      2.0794415...
    """

    def chunk_loss(total, chunk):
        hidden, targets, weights = chunk
        _, losses = _losses(hidden, kernel, targets)
        return total + jnp.sum(losses * weights), None

    chunks = jax.tree.map(
        lambda x: _to_chunks(x, num_chunks, shards), (hidden, targets, weights)
    )
    return lax.scan(chunk_loss, jnp.zeros((), jnp.float32), chunks)[0]


def _forward(hidden, kernel, targets, weights, num_chunks, shards):
    def chunk_gradients(carry, chunk):
        total, kernel_gradient = carry
        hidden, targets, weights = chunk
        logits, losses = _losses(hidden, kernel, targets)
        with jax.named_scope(BACKWARD_SCOPE):
            excess = jax.nn.softmax(logits) - _one_hot(targets, logits)
            excess = (excess * weights[..., None]).astype(hidden.dtype)
            hidden_gradient = jnp.einsum("btv,dv->btd", excess, kernel)
            # In the compute dtype, as every other kernel's: float32 would make the
            # largest array of the step twice as large before it is reduced.
            kernel_gradient += jnp.einsum("btd,btv->dv", hidden, excess)
        total += jnp.sum(losses * weights)
        return (total, kernel_gradient), (hidden_gradient, losses)

    chunks = jax.tree.map(
        lambda x: _to_chunks(x, num_chunks, shards), (hidden, targets, weights)
    )
    start = (jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32))
    (total, kernel_gradient), (hidden_gradient, losses) = lax.scan(
        chunk_gradients, start, chunks
    )
    return total, (
        _from_chunks(hidden_gradient, shards),
        kernel_gradient.astype(kernel.dtype),
        _from_chunks(losses, shards),
    )


def _backward(num_chunks, shards, residuals, cotangent):
    hidden_gradient, kernel_gradient, losses = residuals
    return (
        (cotangent * hidden_gradient).astype(hidden_gradient.dtype),
        (cotangent * kernel_gradient).astype(kernel_gradient.dtype),
        None,
        cotangent * losses,
    )


chunked_cross_entropy.defvjp(_forward, _backward)


def _losses(hidden, kernel, targets):
    """Logits and losses of one chunk, both float32."""
    logits = jnp.einsum(
        "btd,dv->btv", hidden, kernel, preferred_element_type=jnp.float32
    )
    target_logits = jnp.sum(logits * _one_hot(targets, logits), axis=-1)
    return logits, jax.nn.logsumexp(logits, axis=-1) - target_logits


def _one_hot(targets, logits):
    """A comparison instead of a gather: it stays local when vocab is sharded."""
    return targets[..., None] == jnp.arange(logits.shape[-1])


def _to_chunks(x: Array, num_chunks: int, shards: int) -> Array:
    """(batch, time, ...) to (chunks, batch, time / chunks, ...)."""
    batch, time = x.shape[:2]
    x = x.reshape(batch, shards, num_chunks, -1, *x.shape[2:])
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(num_chunks, batch, time // num_chunks, *x.shape[4:])


def _from_chunks(x: Array, shards: int) -> Array:
    chunks, batch, piece = x.shape[:3]
    x = x.reshape(chunks, batch, shards, -1, *x.shape[3:])
    return jnp.moveaxis(x, 0, 2).reshape(batch, chunks * piece, *x.shape[4:])
