"""Compile a run's training step, beside the same step without remat: its receipt."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.residuals import Residual, block_residuals
from jaxckpt.layers import layer_plan
from jaxckpt.linter import lint_plan, lint_step
from jaxckpt.models.transformer import Block
from jaxckpt.policies import NONE, Policy
from jaxckpt.receipt import CompiledStep, make_receipt
from jaxckpt.remat import checkpoint
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.sharding import Placement
from jaxckpt.training.step import Program, make_program, uses_dropout


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A program, compiled, with its receipt.

    Attributes:
      program: the program under the policy asked for.
      compiled_step: its training step, ready to run.
      receipt: see `jaxckpt.receipt.make_receipt`.
    """

    program: Program
    compiled_step: jax.stages.Compiled
    receipt: dict[str, Any]


def inspect_run(
    config: TrainConfig,
    placement: Placement,
    program: Program,
    *,
    notes: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Inspected:
    """Compiles the step with and without remat, and compares the two.

    Args:
      config, placement, program: the run.
      notes: facts for the receipt to state.
      progress: told what is being done before each part that takes long.
    """
    platform = placement.mesh.devices.flat[0].platform
    residuals = layer_residuals(config, placement)
    progress(f"compiling the step under {config.policy}")
    compiled, step = _compile(config.policy, program, residuals, platform)
    bare_plan = layer_plan(NONE, config.architecture.num_layers)
    without = dataclasses.replace(step, policy="none")
    if program.plan != bare_plan:
        progress("compiling the same step without remat")
        bare = make_program(config, placement, bare_plan)
        without = _compile("none", bare, residuals, platform)[1]
    progress("reading the receipt")
    receipt = make_receipt(
        step,
        without,
        platform=platform,
        limit=_device_limit(placement),
        notes=notes,
    )
    receipt["warnings"] += lint_program(config, placement, program)
    return Inspected(program, compiled, receipt)


def lint_program(
    config: TrainConfig, placement: Placement, program: Program
) -> list[str]:
    """What the linter finds in a program's step and its layer plan."""
    model = config.architecture
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    shards = placement.mesh.shape
    tokens = config.micro_batch_size * config.sequence_length
    input_bytes = tokens * model.dim * itemsize // (shards["data"] * shards["fsdp"])
    layers = jax.tree.leaves(program.state["params"]["layers"])
    weights = sum(leaf.size for leaf in layers) * itemsize // model.num_layers
    return [
        *lint_step(program.step, program.state, program.batch),
        *lint_plan(program.plan, weights // shards["tensor"], input_bytes),
    ]


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """One layer of a model as a function, with the shapes to call it with.

    Attributes:
      apply: ``(params, x, dropout_key) -> x``.
      arguments: params, x and key, as `jax.ShapeDtypeStruct`.
      shardings: theirs; None on one device.
    """

    apply: Callable[..., Any]
    arguments: tuple[Any, Any, Any]
    shardings: tuple[Any, Any, Any] | None


def one_layer(config: TrainConfig, placement: Placement) -> OneLayer:
    """The layer of a run's model, at the size of one micro-batch."""
    architecture = config.architecture
    block = Block(architecture, placement.constrain)
    size = (config.micro_batch_size, config.sequence_length, architecture.dim)
    x = jax.ShapeDtypeStruct(size, architecture.compute_dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    bare = Block(architecture)
    boxed = jax.eval_shape(
        lambda: bare.init(jax.random.key(0), jnp.zeros((1, *x.shape[1:]), x.dtype))
    )["params"]
    shardings = None
    if placement.mesh.size > 1:
        stream = placement.sharding(("batch", "residual_time", "residual"))
        shardings = (placement.of_boxed(boxed), stream, placement.replicated)

    def apply(params, x, key):
        rngs = {"dropout": key} if uses_dropout(architecture) else {}
        return block.apply({"params": params}, x, deterministic=not rngs, rngs=rngs)

    return OneLayer(apply, (nn.unbox(boxed), x, key), shardings)


def layer_residuals(
    config: TrainConfig, placement: Placement
) -> Callable[[Policy], list[Residual]]:
    """What one layer of the model keeps under a policy, in bytes per device."""
    layer = one_layer(config, placement)

    @functools.cache
    def residuals(policy: Policy) -> list[Residual]:
        return block_residuals(
            checkpoint(layer.apply, policy, in_loop=True),
            *layer.arguments,
            input_names=["decoder_layer_input", "dropout_key"],
            shardings=layer.shardings,
        )

    return residuals


def _compile(policy: str, program: Program, residuals, platform: str):
    arguments = (program.state, program.batch)
    compiled, seconds = compile_step(program.step, *arguments, platform=platform)
    step = CompiledStep(
        policy=policy,
        plan=program.plan,
        memory=memory_bytes(compiled),
        flops=count_flops(program.step, *arguments),
        residuals=residuals,
        compile_seconds=seconds,
    )
    return compiled, step


def _device_limit(placement: Placement) -> int | None:
    stats = placement.mesh.devices.flat[0].memory_stats() or {}
    return stats.get("bytes_limit")
