"""Matmuls whose kernel, cut over ``fsdp``, is gathered by hand.

Left to itself, the compiler gathers a kernel where it multiplies by it, in the forward
and again in the backward pass. Two things it does not do: keep the gathered kernel for
the backward pass (PyTorch FSDP's ``reshard_after_forward=False``), and, on a mesh of
``data``, ``fsdp`` and ``tensor``, gather an output projection's kernel over ``fsdp``
alone: where that is smaller than the activations it multiplies all of it on every
device (counted: twice the FLOPs on ``tensor:2``).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt.models.presets import GATHERED

Gather = Literal["compiler", "outputs", "kept"]
"""Which kernels are gathered by hand: none; those of the output projections; all, under
the name `GATHERED`, so that a policy may keep them."""

_WHOLE = {"embed": "residual", "joined": "mlp"}  # the same axes without fsdp


def gathered_dot_general(
    constrain: Callable[[jax.Array, Sequence[str]], jax.Array],
    axes: Sequence[str],
    named: bool,
) -> Callable[..., jax.Array]:
    """`jax.lax.dot_general` of activations and a kernel that is gathered first.

    Args:
      constrain: places an array, given its logical axes.
      axes: the kernel's.
      named: whether the backward pass takes the gathered kernel, under the name
        `GATHERED`: kept, or gathered again, as the policy of the block says. Without
        a checkpoint around it is kept. False: it is gathered again, always.

    Returns:
      A function with the arguments of `jax.lax.dot_general`, as Flax layers take it.
      The kernel's gradient is cut as the kernel is.
    """
    whole = [_WHOLE.get(axis, axis) for axis in axes]

    def gather(kernel):
        return constrain(kernel, whole)

    def dot_general(x, kernel, dimension_numbers, **options: Any):
        multiply = functools.partial(
            jax.lax.dot_general, dimension_numbers=dimension_numbers, **options
        )

        @jax.custom_vjp
        def dot(x, kernel):
            return multiply(x, gather(kernel))

        def forward(x, kernel):
            gathered = gather(kernel)
            if named:
                gathered = checkpoint_name(gathered, GATHERED)
            return multiply(x, gathered), (x, gathered if named else kernel)

        def backward(residuals, gradient):
            x, kernel = residuals
            kernel = kernel if named else gather(kernel)
            if "joined" in axes:  # once, for both products
                gradient = constrain(gradient, ("batch", "time", "residual"))
            # Transposed, not differentiated: the product itself is not made again.
            of_x = jax.linear_transpose(lambda x: multiply(x, kernel), x)
            of_kernel = jax.linear_transpose(lambda kernel: multiply(x, kernel), kernel)
            # A gather's own transpose would keep the gradient whole on each device.
            return *of_x(gradient), constrain(of_kernel(gradient)[0], axes)

        dot.defvjp(forward, backward)
        return dot(x, kernel)

    return dot_general
