"""Bytes read from compiled programs: what is known, and that they move with remat."""

import dataclasses
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxckpt import split_layers, stack
from jaxckpt.compiler.memory import MemoryBytes, compile_step, memory_bytes
from jaxckpt.models.presets import model_config
from jaxckpt.models.transformer import Transformer


def test_total_is_arguments_outputs_and_temporaries_less_aliased():
    memory = MemoryBytes(100, 60, 50, 7, 1000)
    assert memory.device_total_bytes == 100 + 60 + 7 - 50  # host memory is apart
    assert memory.as_dict() == {
        "argument_bytes": 100,
        "output_bytes": 60,
        "alias_bytes": 50,
        "temp_bytes": 7,
        "host_temp_bytes": 1000,
        "host_argument_bytes": 0,
        "device_total_bytes": 117,
    }


FIELDS = [field.name for field in dataclasses.fields(MemoryBytes)]


@pytest.mark.parametrize("field", FIELDS)
def test_total_is_unknown_when_a_part_of_it_is(field):
    memory = dataclasses.replace(MemoryBytes(1, 1, 1, 1, 1), **{field: None})
    assert memory.device_total_bytes == (2 if field.startswith("host_") else None)


def compiled(**sizes):
    """A stand-in for a compiled program; fields left out do not exist."""
    analysis = types.SimpleNamespace(
        **{f"{name}_size_in_bytes": size for name, size in sizes.items()}
    )
    return types.SimpleNamespace(memory_analysis=lambda: analysis)


PARTS = ("argument", "output", "alias", "temp", "host_temp")


@pytest.mark.parametrize("unknown", [-1, None])
@pytest.mark.parametrize("part", PARTS)
def test_i1_minus_one_and_none_are_unknown(part, unknown):
    known = dict.fromkeys(PARTS, 8)
    memory = memory_bytes(compiled(**(known | {part: unknown})))
    assert getattr(memory, f"{part}_bytes") is None
    others = {getattr(memory, f"{name}_bytes") for name in PARTS if name != part}
    assert others == {8}


def test_a_backend_without_the_analysis_knows_nothing():
    nothing = MemoryBytes(None, None, None, None, None)
    assert memory_bytes(compiled()) == nothing
    assert memory_bytes(compiled(**dict.fromkeys(PARTS, 0))) == nothing
    assert memory_bytes(types.SimpleNamespace(memory_analysis=lambda: None)) == nothing


def test_arguments_outputs_and_donation_of_a_real_program():
    step = jax.jit(lambda x, y: (x + y.sum(), y[:3]), donate_argnums=0)
    args = (
        jax.ShapeDtypeStruct((256, 256), "float32"),
        jax.ShapeDtypeStruct((1000,), "float32"),
    )
    program, seconds = compile_step(step, *args, platform="cpu")
    memory = memory_bytes(program)
    assert memory.argument_bytes == 4 * (256 * 256 + 1000)
    assert memory.alias_bytes == 4 * 256 * 256
    # The outputs, and the table of pointers of a tuple.
    assert 0 <= memory.output_bytes - 4 * (256 * 256 + 3) <= 64
    assert seconds > 0


# Layers: a wide hidden value, so that what is kept dominates

LAYERS, WIDTH, BATCH = 6, 64, 512
HIDDEN = 4 * BATCH * 4 * WIDTH  # bytes of the hidden value of a layer


def layer(x, weights):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None


def shapes():
    return {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), "float32"),
        "down": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), "float32"),
    }


def stack_temp(plan, scan, platform="cpu"):
    run = stack(layer, plan, LAYERS, scan=scan)
    values = jax.eval_shape(
        lambda values: split_layers(values, plan, LAYERS, scan=scan), shapes()
    )
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    step = jax.jit(jax.grad(lambda values, x: jnp.sum(run(x, values)[0] ** 2)))
    return memory_bytes(compile_step(step, values, x, platform=platform)[0]).temp_bytes


def test_a4_unrolled_remat_saves_on_cpu_only_with_its_option():
    none, full = stack_temp("none", scan=False), stack_temp("full", scan=False)
    assert none - full > (LAYERS - 3) * HIDDEN
    # Without the option, the CPU compiler merges the recomputation away; that of
    # JAX 0.12.0.1 no longer does.
    without_option = stack_temp("full", scan=False, platform="other")
    if jax.__version_info__ < (0, 11):
        assert without_option > none - HIDDEN
    else:
        assert none - without_option > (LAYERS - 3) * HIDDEN


def test_a_scan_needs_no_option():
    assert stack_temp("full", True) == stack_temp("full", True, platform="other")
    assert stack_temp("none", True) - stack_temp("full", True) > (LAYERS - 2) * HIDDEN


def model_temp(plan, scan=True):
    config = model_config(
        "tiny",
        num_layers=6,
        dim=32,
        num_heads=4,
        mlp_dim=128,
        vocab_size=64,
        max_seq_len=64,
        attention="xla",
        scan_layers=scan,
    )
    model = Transformer(config, plan)
    ids = jax.ShapeDtypeStruct((16, 64), "int32")
    weights = jax.ShapeDtypeStruct((16, 64), "float32")
    variables = jax.eval_shape(model.init, jax.random.key(0), ids, ids, weights)
    step = jax.jit(jax.grad(lambda v, *batch: model.apply(v, *batch)))
    args = nn.unbox(variables), ids, ids, weights
    return memory_bytes(compile_step(step, *args, platform="cpu")[0]).temp_bytes


def test_a2_the_model_needs_less_the_less_it_keeps():
    none, dots, full = map(model_temp, ("none", "dots_saveable", "full"))
    hidden = 4 * 16 * 64 * 128
    assert none > 1.5 * dots
    assert dots - full > 5 * 2 * hidden  # both MLP inputs of all layers but one


def test_a1_remat_of_the_whole_model_saves_nothing():
    run = stack(layer, "none", LAYERS)
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    values = {"run_0": shapes()}

    def loss(values, x):
        return jnp.sum(run(x, values)[0] ** 2)

    def temp(loss):
        step = jax.jit(jax.grad(loss))
        return memory_bytes(compile_step(step, values, x, platform="cpu")[0]).temp_bytes

    assert temp(jax.checkpoint(loss)) > 0.98 * temp(loss)
    assert stack_temp("full", scan=True) < temp(loss) / 2


def test_a_checkpoint_in_a_small_loop_compiles_on_cpu():
    def layer(x, w):
        y = jax.checkpoint(lambda x, w: jnp.arctan2(w, 2 + x * x))(x, w)
        return jnp.arctan2(x, 2 + y * y), x

    def loss(x, ws):
        return sum(part.sum() for part in jax.lax.scan(layer, x, ws))

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 4), (3, 4, 4))]
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    assert memory_bytes(compile_step(step, *shapes, platform="cpu")[0]).temp_bytes
