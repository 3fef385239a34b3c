"""The shipped model keeps no float32 accumulator for nothing, under any policy."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import remat
from jaxckpt.linter import lint_step
from jaxckpt.training.inspect import lint_program

# Presets, all named values, groups, and outputs of matmuls without a name.
NAMES = "query_proj,key_proj,value_proj,context,out_proj"
POLICIES = [
    "none",
    "full",
    "dots_saveable",
    "minimal",
    "everything_saveable",
    f"save:decoder_layer_input,{NAMES},mlp",
    f"offload:{NAMES}",
    "every:2/save:context,mlp",
    "1xdots_saveable+2xminimal",
    "save:matmuls",
]


def accumulators(findings):
    return [finding for finding in findings if "accumulator" in finding]


def findings(make_config, programs, policy, dtype, gpt):
    policy = policy.replace("mlp", "mlpwi" if gpt else "mlpwi_0,mlpwi_1")
    # The others of a Llama have names of their own; a GPT's biases stand in between.
    unnamed = range(8) if gpt else (0, 1, 3, 4)
    policy = policy.replace("matmuls", ",".join(f"dot_general.{n}" for n in unnamed))
    architecture = dict(compute_dtype=dtype)
    program = programs(make_config(policy, gpt=gpt, architecture=architecture))
    return accumulators(lint_step(program.step, program.state, program.batch))


EVERY = [
    *((policy, "bfloat16", gpt) for policy in POLICIES for gpt in (False, True)),
    *((policy, "float16", False) for policy in ("full", "dots_saveable")),
]


@pytest.mark.parametrize("policy, dtype, gpt", EVERY[5::7])
def test_no_findings(make_config, programs, policy, dtype, gpt):
    assert findings(make_config, programs, policy, dtype, gpt) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy, dtype, gpt", EVERY)
def test_no_findings_under_any_policy(make_config, programs, policy, dtype, gpt):
    assert findings(make_config, programs, policy, dtype, gpt) == []


def test_a_run_warns_of_one(make_config, programs, place):
    def block(x, w):
        hidden = jnp.einsum("td,de->te", x, w, preferred_element_type=jnp.float32)
        hidden = checkpoint_name(hidden, "hidden").astype(x.dtype)
        return x + jnp.tanh(hidden) @ w

    def loss(w, x):
        layer = remat(block, "save:hidden")
        return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()

    w, x = jnp.ones((3, 8, 8), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16)
    program = programs(make_config("full"))
    program = dataclasses.replace(program, step=lambda *_: jax.grad(loss)(w, x))
    (line,) = accumulators(lint_program(make_config("full"), place(), program))
    assert line.startswith(
        "hidden is kept as a float32 accumulator, 128 B in each of 3"
    )
