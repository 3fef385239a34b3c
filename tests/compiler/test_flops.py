"""FLOPs by phase against numbers computed by hand, and the papers' percentages."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxckpt import Stack
from jaxckpt.compiler.flops import (
    BACKWARD_SCOPE,
    FlopCount,
    count_flops,
    equation_flops,
    phase,
)
from jaxckpt.models.presets import model_config
from jaxckpt.models.transformer import Block, Transformer


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def total(fn, *args):
    count = count_flops(fn, *args)
    assert count.total == count.other  # nothing here is differentiated
    return count.total


# One equation


def test_dot_general_counts_two_flops_per_multiply_add():
    assert total(jnp.matmul, shape(3, 5), shape(5, 7)) == 2 * 3 * 5 * 7


def test_dot_general_with_batch_dims_and_two_contracted():
    def fn(a, b):
        return jnp.einsum("bhtde,bhsde->bhts", a, b)

    args = shape(2, 3, 4, 5, 6), shape(2, 3, 7, 5, 6)
    assert total(fn, *args) == 2 * (2 * 3) * 4 * 7 * (5 * 6)


def test_vector_product_is_a_dot_too():
    assert total(jnp.dot, shape(9), shape(9)) == 2 * 9


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(groups):
    def fn(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    count = total(fn, shape(2, 8, 9, 4), shape(3, 3, 4 // groups, 6))
    assert count == 2 * (2 * 6 * 7 * 6) * (3 * 3 * 4 // groups)


def test_elementwise_operations_do_not_count():
    assert total(lambda x: jnp.sum(jnp.tanh(x) * x), shape(8, 8)) == 0


def attention_equation(name, query, key, **params):
    """A kernel's equation, as cuDNN's primitives carry their operands."""
    primitive = jex_core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda query, *_, **__: [query])
    jaxpr = jax.make_jaxpr(lambda *args: primitive.bind(*args, **params))
    return jaxpr(shape(*query), shape(*key), shape(*key)).jaxpr.eqns[0]


@pytest.mark.parametrize("direction, matmuls", [("fwd", 2), ("bwd", 5)])
def test_flash_attention(direction, matmuls):
    name = f"dot_product_attention_{direction}"
    batch, time, heads, size, kv_time = 2, 16, 4, 8, 32
    equation = attention_equation(
        name + "_wrapper", (batch, time, heads, size), (batch, kv_time, 2, size)
    )
    dense = matmuls * 2 * batch * heads * time * kv_time * size
    assert equation_flops(equation) == dense
    causal = attention_equation(
        name, (batch, time, heads, size), (batch, kv_time, 2, size), mask_type="CAUSAL"
    )
    assert equation_flops(causal) == dense // 2


# Control flow

DOT = 2 * 4 * 8 * 8
X, W = shape(4, 8), shape(8, 8)


def test_j1_scan_multiplies_by_its_length():
    def fn(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, length=11)[0]

    assert total(fn, X, W) == 11 * DOT


def test_j1_scan_counts_alike_when_unrolled():
    def fn(x, w, unroll):
        return lax.scan(lambda x, _: (x @ w, None), x, length=12, unroll=unroll)[0]

    for unroll in (1, 4, 12):
        counted = functools.partial(fn, unroll=unroll)
        assert total(counted, X, W) == 12 * DOT


def test_j1_nested_scans_multiply():
    def inner(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]

    def fn(x, w):
        def body(x, _):
            return inner(x, w) @ w, None

        return lax.scan(body, x, length=5)[0]

    assert total(fn, X, W) == 5 * (3 + 1) * DOT


def test_shard_map_counts_all_devices():
    """Each of 4 has half of the rows and half of the columns."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    matmul = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=(P("x"), P(None, "y")), out_specs=P("x", "y")
    )
    assert count_flops(matmul, X, W).total == DOT
    twice = jax.shard_map(  # the same on both devices of y
        jnp.matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")
    )
    assert count_flops(twice, X, W).total == 2 * DOT


def test_fori_loop_of_known_length_is_a_scan():
    def fn(x, w):
        return lax.fori_loop(0, 6, lambda _, x: x @ w, x)

    count = count_flops(fn, X, W)
    assert (count.total, count.unbounded_loops) == (6 * DOT, 0)


def test_while_counts_once_and_says_so():
    def fn(x, w):
        loop = functools.partial(lax.while_loop, lambda x: jnp.sum(x) < 1)
        return loop(lambda x: x @ w, loop(lambda x: x @ w @ w, x))

    count = count_flops(fn, X, W)
    assert (count.total, count.unbounded_loops) == (3 * DOT, 2)


def test_cond_counts_the_costliest_branch():
    def fn(pick, x, w):
        branches = (lambda x: x, lambda x: x @ w @ w, lambda x: x @ w)
        return lax.switch(pick, branches, x)

    assert total(fn, shape(dtype=jnp.int32), X, W) == 2 * DOT


def test_jit_custom_vjp_and_custom_jvp_are_seen_through():
    @jax.custom_vjp
    def double(x, w):
        return x @ w

    double.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[1]))

    def fn(x, w):
        return jax.jit(lambda x: jax.nn.relu(x @ w))(double(x, w))

    assert total(fn, X, W) == 2 * DOT


def test_custom_vjp_by_phase():
    @jax.custom_vjp
    def kernel(x, w):
        return x @ w

    def backward(residuals, g):
        x, w = residuals
        return g @ w.T, x.T @ g

    kernel.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    count = count_flops(jax.grad(lambda x, w: jnp.sum(kernel(x, w)), (0, 1)), X, W)
    assert count == FlopCount(forward=DOT, backward=2 * DOT)


# Phases


@pytest.mark.parametrize(
    "stack, expected",
    [
        ("jit(step)/jvp(Model)/layer", "forward"),
        ("jit(step)/transpose(jvp(Model))/layer", "backward"),
        ("transpose(jvp(checkpoint))/rematted_computation/layer", "recompute"),
        (f"jvp(Model)/while/body/{BACKWARD_SCOPE}", "backward"),
        ("jit(step)/adam", "other"),
        ("", "other"),
    ],
)
def test_phase_of_a_name_stack(stack, expected):
    assert phase(stack) == expected


def chain(x, w):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))


def test_phases_of_a_gradient():
    count = count_flops(jax.grad(chain, (0, 1)), X, W)
    assert count == FlopCount(forward=2 * DOT, backward=4 * DOT)
    assert count.recompute_fraction == 0


def test_phases_of_a_checkpointed_gradient_and_an_update():
    def step(x, w):
        grads = jax.grad(jax.checkpoint(chain), 1)(x, w)
        return w - grads @ grads

    count = count_flops(step, X, W)
    update = 2 * 8 * 8 * 8
    # The gradient of x is not asked for: its last matmul is not run.
    assert count == FlopCount(2 * DOT, 2 * DOT, 3 * DOT, update)
    assert count.total == 7 * DOT + update
    assert count.recompute_fraction == 2 * DOT / (5 * DOT + update)


def test_phases_inside_scan_of_checkpoints():
    def loss(x, ws):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None))
        return jnp.sum(lax.scan(body, x, ws)[0])

    count = count_flops(jax.grad(loss, (0, 1)), X, shape(6, 8, 8))
    assert count == FlopCount(12 * DOT, 12 * DOT, 24 * DOT)


def test_of_nothing_the_fraction_is_zero():
    assert FlopCount().recompute_fraction == 0.0


# Forward a layer takes 24 B s h^2 + 4 B s^2 h (Korthikanti et al. 2022, arXiv
# 2205.05198, appendix A); of those its last matmul, 8 B s h^2, is not recomputed: no
# gradient reads its result.


def gpt(dim, seq, layers=3):
    return model_config(
        "gpt2-124m",
        num_layers=layers,
        dim=dim,
        num_heads=4,
        mlp_dim=4 * dim,
        vocab_size=64,
        max_seq_len=seq,
        dropout=0.0,
        attention="xla",
        compute_dtype="float32",
    )


def blocks(plan, dim, seq, batch=2, layers=3):
    """FLOPs of a step of GPT blocks alone, no embedding and no loss."""
    config = gpt(dim, seq, layers)
    model = Stack(functools.partial(Block, config), layers, plan)
    x = shape(batch, seq, dim)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = nn.unbox(variables)

    def loss(variables, x):
        return jnp.sum(model.apply(variables, x))

    # The first block's input gets a gradient too, as below an embedding.
    return count_flops(jax.grad(loss, (0, 1)), variables, x)


@pytest.mark.parametrize("dim, seq", [(64, 32), (256, 8), (512, 4), (64, 64)])
def test_full_recompute_of_a_gpt_block_is_the_formula(dim, seq, batch=2, layers=3):
    count = blocks("full", dim, seq)
    square, long = batch * seq * dim**2, batch * seq**2 * dim
    assert count.forward == layers * (24 * square + 4 * long)
    assert count.backward == 2 * count.forward
    assert count.recompute == layers * (16 * square + 4 * long)
    expected = (16 * square + 4 * long) / (72 * square + 12 * long)
    assert count.recompute_fraction == expected


def test_full_recompute_is_22_2_percent_at_short_sequences():
    assert abs(100 * blocks("full", 1024, 4).recompute_fraction - 22.2) < 0.1


def test_full_recompute_is_23_08_percent_at_half():
    assert round(100 * blocks("full", 64, 32).recompute_fraction, 2) == 23.08


def test_minimal_recomputes_2_564_percent_at_half():
    count = blocks("dots_with_no_batch_dims_saveable", 64, 32)
    assert round(100 * count.recompute_fraction, 3) == 2.564
    assert count.recompute == 3 * 4 * 2 * 32**2 * 64


def test_the_whole_model_less_its_loss_is_its_blocks():
    config = gpt(dim=64, seq=32)
    model = Transformer(config, "full")
    ids, weights = shape(2, 32, dtype=jnp.int32), shape(2, 32)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids, weights))
    step = jax.grad(lambda params, *batch: model.apply(params, *batch))
    count, inside = count_flops(step, params, ids, ids, weights), blocks("full", 64, 32)
    logits = 2 * 2 * 32 * 64 * 64
    assert count.forward - logits == inside.forward
    assert count.backward - 2 * logits == inside.backward
    assert count.recompute == inside.recompute
