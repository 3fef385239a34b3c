"""Causal self-attention whose saved values a checkpoint policy can reach by name.

Two implementations, one meaning. ``"xla"`` is two einsums around a float32 softmax
and runs everywhere. ``"cudnn"`` is the flash kernel [1]_ that
``jax.nn.dot_product_attention`` calls; it never stores the (time, time) matrix.

The flash kernel's backward pass needs the forward pass's output and its log-sum-exp.
JAX's own call keeps that pair inside its derivative rule, where no name reaches it, so
under ``jax.checkpoint`` the forward kernel runs twice whatever the policy saves. Here
the pair is named. :func:`name_residuals` wraps a function in a ``custom_vjp`` that

* on the way forward runs the function's own forward equation and names its outputs,
* on the way back traces the function's own derivative, removes the forward equation
  from that jaxpr, and evaluates the rest with the named pair in its place.

``save_only_these_names("context")`` then runs the forward kernel once and
``nothing_saveable`` twice.

Limits: under ``JAX_REMAT3=1`` saving ``"context"`` does not help and the kernel runs
twice (JAX 0.10.2 and 0.12.0.1). cuDNN attention needs compute
capability 8.0 and bfloat16 or float16, and drops no attention probabilities here:
its dropout has a fixed seed and is not part of JAX's public interface.

References:
    .. [1] Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxckpt.models import kernels
from jaxckpt.models.ring_attention import CONTEXT, Ring, ring_attention

IMPLEMENTATIONS = ("cudnn", "xla")

_CUDNN_DTYPES = ("bfloat16", "float16")


def attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time kv_heads head_dim"],
    value: Float[Array, "batch time kv_heads head_dim"],
    *,
    implementation: Literal["cudnn", "xla"],
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    ring: Ring | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Causal self-attention with grouped queries, scaled by 1/sqrt(head_dim).

    Its output is named ``"context"``; with ``"cudnn"`` so is the log-sum-exp
    (float32, (batch, heads, time)) that the backward kernel needs beside it.
    Use :func:`choose_attention` to pick the implementation for a device.

    Args:
        query: One row per position and head.
        key: ``kv_heads`` divides ``heads``; consecutive groups of heads share one.
        value: Like ``key``.
        implementation: ``"cudnn"`` (flash, GPU only) or ``"xla"`` (anywhere, stores
            (batch, heads, time, time) probabilities).
        dropout_rate: Share of attention probabilities dropped; ``"xla"`` only.
        dropout_key: A JAX random key, needed when ``dropout_rate`` is above 0.
        ring: The devices that time is cut over, and then in the order of; see
            `jaxckpt.models.ring_attention`.

    Returns:
        The context, in the dtype of ``query``.

    Raises:
        ValueError: For an unknown implementation, head counts that do not divide,
            a dropout rate outside [0, 1), without a key, with ``"cudnn"`` or a ring.

    Example:
        >>> x = jnp.ones((1, 8, 4, 16))
        >>> attention(x, x[:, :, :2], x[:, :, :2], implementation="xla").shape
        (1, 8, 4, 16)
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}, expected one of {IMPLEMENTATIONS}"
        )
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly"
        )
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate is {dropout_rate}, expected 0 <= rate < 1")
    if dropout_rate > 0.0 and implementation == "cudnn":
        raise ValueError(
            f"attention dropout (rate {dropout_rate}) is not available with "
            "implementation='cudnn': use implementation='xla'"
        )
    if dropout_rate > 0.0 and dropout_key is None:
        raise ValueError(f"dropout_rate is {dropout_rate} but dropout_key is None")
    if dropout_rate > 0.0 and ring is not None:
        raise ValueError(
            f"attention dropout (rate {dropout_rate}) is not available on a ring"
        )
    if ring is not None:
        return ring_attention(query, key, value, ring, implementation)
    if implementation == "cudnn":
        return _cudnn_attention(query, key, value)
    return _xla_attention(query, key, value, dropout_rate, dropout_key)


def choose_attention(
    platform: str,
    compute_capability: str | float | None,
    dtype: DTypeLike,
    head_dim: int,
    dropout_rate: float,
) -> tuple[Literal["cudnn", "xla"], str]:
    """Pick the attention a device can run, with the reason in words.

    The limits are those JAX checks before it calls cuDNN, and cuDNN's own where they
    are tighter: head_dim above 128 has a backward kernel on Hopper, and on Blackwell
    only from cuDNN 9.23. Dense causal attention has no limit on sequence length.

    JAX looks at the *attached* device for the head_dim limit. Compiling for an absent
    Hopper in a process without one, head_dim above 128 is a ``NotImplementedError``
    although the device could run it.

    Args:
        platform: ``"gpu"`` or ``"cuda"`` for an NVIDIA GPU; anything else is XLA.
        compute_capability: As in ``"8.0"`` or ``9.0``; None is unknown.
        dtype: Of query, key and value.
        head_dim: Size of one head.
        dropout_rate: Share of attention probabilities dropped in training.

    Returns:
        The implementation, and a reason for people to read.

    Example:
        >>> choose_attention("gpu", "7.5", "float16", 64, 0.0)
        ('xla', 'XLA attention: compute capability 7.5 is below 8.0')
    """
    obstacle = _cudnn_obstacle(
        platform, compute_capability, dtype, head_dim, dropout_rate
    )
    if obstacle is None:
        return "cudnn", "cuDNN flash attention"
    return "xla", f"XLA attention: {obstacle}"


def _cudnn_obstacle(
    platform, compute_capability, dtype, head_dim, dropout_rate
) -> str | None:
    """Why a device cannot run the flash kernel, or None."""
    if platform not in ("gpu", "cuda"):
        return f"cuDNN's flash kernel needs a GPU, this is a {platform}"
    if compute_capability is None:
        return "compute capability is unknown"
    capability = tuple(int(part) for part in str(compute_capability).split("."))
    if capability < (8, 0):
        return f"compute capability {compute_capability} is below 8.0"
    if jnp.dtype(dtype).name not in _CUDNN_DTYPES:
        return f"{jnp.dtype(dtype).name} is neither bfloat16 nor float16"
    largest = 256 if capability[0] == 9 else 128
    if head_dim % 8 or head_dim > largest:
        return f"head_dim {head_dim} is not a multiple of 8 up to {largest}"
    if dropout_rate > 0.0:
        return f"attention dropout (rate {dropout_rate}) is not in the flash path"
    return None


def name_residuals(
    function: Callable[..., Array],
    is_forward: Callable[[jex_core.JaxprEqn], bool],
    name: str,
) -> Callable[..., Array]:
    """Give a name to what a differentiated function keeps for its backward pass.

    For a function with a derivative rule of its own, whose forward rule is one
    recognizable equation (a kernel) and whose backward rule reads that equation's
    outputs. Values and gradients stay those of ``function``.

    Not for functions JAX differentiates itself: ``checkpoint_name`` inside does it.

    Args:
        function: Arrays to one array, positional arguments only.
        is_forward: Recognizes the forward equation; exactly one must match.
        name: For every output of that equation, as ``checkpoint_name`` takes it.

    Returns:
        The function with the same values and gradients, as a ``custom_vjp``.

    Raises:
        RuntimeError: When differentiated and not exactly one equation matches, as when
            a new JAX calls its kernel differently.
    """

    @jax.custom_vjp
    def named(*args):
        return checkpoint_name(function(*args), name)

    def forward(*args):
        run_kernel, run_rest = kernels.split_forward(function, is_forward, args)
        kept = [checkpoint_name(value, name) for value in run_kernel(*args)]
        (output,) = run_rest(*args, *kept)
        return output, (args, kept)

    def backward(saved, cotangent):
        args, kept = saved
        return kernels.pull_back(function, is_forward, args, kept, cotangent)

    named.defvjp(forward, backward)
    return named


_cudnn_attention = name_residuals(
    kernels.cudnn_attention(causal=True), kernels.is_cudnn_forward, CONTEXT
)


def _xla_attention(query, key, value, dropout_rate, dropout_key):
    batch, time, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads

    # A row is one query of one head of the group that shares a key: two plain
    # matmuls per key head, with nothing of size (time, time) to transpose.
    def swap(x, outer, inner):
        return x.reshape(batch, time, outer, inner, head_dim).swapaxes(2, 3)

    rows = swap(query, kv_heads, group).reshape(batch, -1, kv_heads, head_dim)
    logits = jnp.einsum(
        "brkd,bskd->bkrs", rows, key, preferred_element_type=jnp.float32
    ) / math.sqrt(head_dim)
    causal = jnp.arange(time * group)[:, None] // group >= jnp.arange(time)
    logits = jnp.where(causal, logits, -jnp.inf)  # the diagonal is never masked
    probabilities = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    if dropout_rate > 0.0:
        kept = jax.random.bernoulli(
            dropout_key, 1.0 - dropout_rate, probabilities.shape
        )
        probabilities = jnp.where(kept, probabilities / (1.0 - dropout_rate), 0.0)
    context = jnp.einsum("bkrs,bskd->brkd", probabilities, value)
    context = swap(context, group, kv_heads).reshape(query.shape)
    return checkpoint_name(context.astype(query.dtype), CONTEXT)
