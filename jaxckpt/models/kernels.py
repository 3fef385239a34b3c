"""Attention of one block of queries to one block of keys, forward and backward apart.

`block_attention` gives the output and the log-sum-exp of each row. `block_gradients`
takes them back: given those of *all* keys, it returns the block's part of the
gradients, so that attention to many keys is attention to its blocks, summed [1]_.

``"cudnn"`` is the flash kernel that ``jax.nn.dot_product_attention`` calls. JAX offers
no backward kernel to call, so both are taken out of the library's own derivative: its
jaxpr is cut at the one equation that is the forward kernel. ``"xla"`` is
plain matmuls, with the (queries, keys) scores of one block in memory at a time and
made again on the way back.

References:
    .. [1] Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691, section 3.1
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jaxtyping import Array, Float

Implementation = Literal["cudnn", "xla"]

_CUDNN_FORWARD = "dot_product_attention_fwd"  # part of the primitive's name


def block_attention(
    query: Float[Array, "batch rows heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    *,
    causal: bool,
    implementation: Implementation,
) -> tuple[Float[Array, "batch rows heads head_dim"], Float[Array, "batch heads rows"]]:
    """Attention of a block of queries to a block of keys, scaled by 1/sqrt(head_dim).

    Not differentiable: `block_gradients` is its derivative.

    Args:
        query: A block of rows.
        key: ``kv_heads`` divides ``heads``; consecutive groups of heads share one.
        value: Like ``key``.
        causal: Whether row i sees only the keys up to i; as many rows as keys.
        implementation: ``"cudnn"`` (GPU, 16 bits) or ``"xla"``.

    Returns:
        The output, in the dtype of ``query``, and the natural log of the sum of the
        exponentials of each row's scaled scores, float32.

    Example:
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> out, lse = block_attention(x, x, x, causal=True, implementation="xla")
        >>> out.shape, lse.shape
        ((1, 4, 2, 8), (1, 2, 4))
    """
    if implementation == "cudnn":
        arrays = (query, key, value)
        run, _ = split_forward(cudnn_attention(causal), is_cudnn_forward, arrays)
        output, lse = run(*arrays)
        return output, lse
    return _xla_forward(query, key, value, causal)


def block_gradients(
    query: Float[Array, "batch rows heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    output: Float[Array, "batch rows heads head_dim"],
    lse: Float[Array, "batch heads rows"],
    cotangent: Float[Array, "batch rows heads head_dim"],
    *,
    causal: bool,
    implementation: Implementation,
) -> tuple[Array, Array, Array]:
    """The part of the gradients that goes through one block of scores.

    Args:
        query, key, value, causal, implementation: As in `block_attention`.
        output: Attention of the rows to **all** their keys.
        lse: The rows' log-sum-exp over all their keys.
        cotangent: Of ``output``.

    Returns:
        Gradients of query, key and value. Summed over the blocks they are those of
        attention to all keys.
    """
    if implementation == "cudnn":
        d_query, d_key, d_value = pull_back(
            cudnn_attention(causal),
            is_cudnn_forward,
            (query, key, value),
            (output, lse),
            cotangent,
        )
        return d_query, d_key, d_value
    return _xla_backward(query, key, value, output, lse, cotangent, causal)


def cudnn_attention(causal: bool) -> Callable[..., Array]:
    """The library's flash attention: query, key, value to the output.

    Under `jax.vmap` too, along any axis; the library's own rule wants it in front.
    """

    def attend(query, key, value):
        query, key, value = map(_mapped_in_front, (query, key, value))
        output = jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation="cudnn"
        )
        return _mapped_in_front(output)  # and its cotangent

    return attend


def _mapped_in_front(x: Array) -> Array:
    """The same array, with the axis of a surrounding `jax.vmap` in front of the others,
    where JAX's rule for reshapes puts it. The compiler leaves nothing of it."""
    return jax.lax.reshape(jax.lax.reshape(x, (1, *x.shape)), x.shape)


def is_cudnn_forward(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation is the forward flash kernel."""
    return _CUDNN_FORWARD in equation.primitive.name


# A kernel with a derivative rule of its own, taken apart


def split_forward(function: Callable[..., Array], is_forward, args):
    """A differentiated function's forward pass in two: its kernel, and the rest.

    Args:
        function: Arrays to one array.
        is_forward: Recognizes the kernel's equation; exactly one must match.
        args: Arrays.

    Returns:
        Two functions: ``(*args)`` to what the kernel makes, and ``(*args, *made)`` to
        a list of the function's output.

    Raises:
        RuntimeError: When not exactly one equation matches, as when a new JAX calls
            its kernel differently.
    """
    traced = jax.make_jaxpr(lambda *args: jax.vjp(function, *args)[0])(*args)
    return _split_at(traced, is_forward)


def pull_back(
    function: Callable[..., Array], is_forward, args, kept, cotangent
) -> tuple[Array, ...]:
    """The function's derivative, given what its forward kernel made."""

    def gradients(cotangent, *args):
        return jax.vjp(function, *args)[1](cotangent)

    traced = jax.make_jaxpr(gradients)(cotangent, *args)
    _, run_rest = _split_at(traced, is_forward)
    return tuple(run_rest(cotangent, *args, *kept))


def _split_at(closed: jex_core.ClosedJaxpr, matches):
    """Two functions: arguments -> the matching equation's outputs, and arguments and
    those outputs -> the jaxpr's outputs without running that equation."""
    jaxpr = closed.jaxpr
    found = [i for i, equation in enumerate(jaxpr.eqns) if matches(equation)]
    if len(found) != 1:
        names = sorted({str(equation.primitive) for equation in jaxpr.eqns})
        raise RuntimeError(
            f"expected one forward equation, found {len(found)} among {names}"
        )
    (at,) = found
    kernel = jaxpr.eqns[at]
    before = jaxpr.replace(outvars=kernel.outvars, eqns=jaxpr.eqns[: at + 1])
    after = jaxpr.replace(
        invars=[*jaxpr.invars, *kernel.outvars],
        eqns=[*jaxpr.eqns[:at], *jaxpr.eqns[at + 1 :]],
    )
    return tuple(
        jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(part, closed.consts))
        for part in (before, after)
    )


# Plain matmuls. Axes: batch, time (rows), keys s, kv heads k, group g, head_dim d.


def _xla_forward(query, key, value, causal):
    rows = _by_group(query, key)
    scores = _scores(rows, key, causal)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(value.dtype)
    output = jnp.einsum("bktgs,bskd->btkgd", weights, value)
    return output.reshape(query.shape).astype(query.dtype), _to_heads(lse)


def _xla_backward(query, key, value, output, lse, cotangent, causal):
    rows, d_rows = _by_group(query, key), _by_group(cotangent, key)
    row_sums = jnp.sum(
        d_rows.astype(jnp.float32) * _by_group(output, key), axis=-1
    ).transpose(0, 2, 1, 3)
    scores = _scores(rows, key, causal)
    weights = jnp.exp(scores - _from_heads(lse, key)[..., None])
    d_weights = jnp.einsum(
        "btkgd,bskd->bktgs", d_rows, value, preferred_element_type=jnp.float32
    )
    d_scores = weights * (d_weights - row_sums[..., None])
    d_scores = (d_scores / math.sqrt(query.shape[-1])).astype(query.dtype)
    weights = weights.astype(value.dtype)
    d_query = jnp.einsum("bktgs,bskd->btkgd", d_scores, key)
    d_key = jnp.einsum("bktgs,btkgd->bskd", d_scores, rows)
    d_value = jnp.einsum("bktgs,btkgd->bskd", weights, d_rows)
    return d_query.reshape(query.shape), d_key, d_value


def _scores(rows, key, causal):
    scores = jnp.einsum(
        "btkgd,bskd->bktgs", rows, key, preferred_element_type=jnp.float32
    ) / math.sqrt(rows.shape[-1])
    if not causal:
        return scores
    seen = jnp.arange(rows.shape[1])[:, None] >= jnp.arange(key.shape[1])
    return jnp.where(seen[:, None], scores, -jnp.inf)  # the diagonal is never masked


def _by_group(x, key):
    """(batch, time, heads, d) to (batch, time, kv heads, group, d)."""
    batch, time, _, head_dim = x.shape
    return x.reshape(batch, time, key.shape[2], -1, head_dim)


def _to_heads(x):
    """(batch, kv heads, time, group) to (batch, heads, time)."""
    batch, _, time, _ = x.shape
    return x.swapaxes(2, 3).reshape(batch, -1, time)


def _from_heads(x, key):
    batch, _, time = x.shape
    return x.reshape(batch, key.shape[2], -1, time).swapaxes(2, 3)
