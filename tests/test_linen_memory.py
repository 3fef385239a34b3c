"""What XLA allocates for a Linen stack under a plan."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import Stack

# XLA:CPU expands the barriers of prevent_cse away, and then merges a recomputation of
# straight-line code with its first run; without that pass it stays in the program.
UNMERGED = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def temp_bytes(plan, num_layers, width, batch, scan=True):
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    model = Stack(functools.partial(TwoDense, width), num_layers, plan, scan=scan)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(variables, x):
        return (model.apply(variables, x) ** 2).sum()

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = grad.lower(variables, x).compile(compiler_options=UNMERGED)
    return compiled.memory_analysis().temp_size_in_bytes


class TwoDense(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        h = checkpoint_name(nn.Dense(self.width, use_bias=False)(x), "h")
        return x + jnp.sin(nn.Dense(self.width, use_bias=False)(jnp.tanh(h)))


@pytest.mark.parametrize("scan", [True, False])
def test_compiled_memory_falls_none_save_full(scan):
    none, save, full = (
        temp_bytes(plan, 12, 32, 256, scan) for plan in ("none", "save:h", "full")
    )
    layer_input = 256 * 32 * 4
    assert none - save > 8 * layer_input
    assert save - full > 8 * layer_input


def test_h1_no_weight_is_copied_at_a_prime_depth():
    """Weights outweigh activations 8 times; a copy of them would be 74 more."""
    weight = 128 * 128 * 4
    even, prime = (temp_bytes("every:6", depth, 128, 16) for depth in (36, 37))
    assert prime - even < 2 * weight
