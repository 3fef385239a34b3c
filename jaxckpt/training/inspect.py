"""Compile a run's training step, beside the same step without remat: its receipt."""

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.residuals import Residual, block_residuals
from jaxckpt.layers import LayerPlan, layer_plan
from jaxckpt.linter import lint_plan, lint_step
from jaxckpt.models.presets import GATHERED, ConfigError
from jaxckpt.models.transformer import BETWEEN_LAYERS, Block
from jaxckpt.policies import NONE, Policy
from jaxckpt.receipt import CompiledStep, host_bytes, make_receipt
from jaxckpt.remat import checkpoint
from jaxckpt.schedules.pipeline import PipelineSchedule
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.gradients import uses_dropout
from jaxckpt.training.host_memory import (
    PINNED,
    check_pinned,
    host_memory,
    state_note,
)
from jaxckpt.training.master import MASTER, compute_copy
from jaxckpt.training.pipeline import describe
from jaxckpt.training.policy_schedule import split_entry
from jaxckpt.training.sharding import Placement
from jaxckpt.training.step import (
    Program,
    State,
    compile_layout_change,
    make_program,
    same_layout,
)
from jaxckpt.units import format_bytes


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


Compiled = dict[LayerPlan, tuple[jax.stages.Compiled, CompiledStep]]
"""Steps of one run by their layer plan: the executable, and what was counted in it."""


def inspect_run(
    config: TrainConfig,
    placement: Placement,
    program: Program,
    *,
    notes: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
    compiled: Compiled | None = None,
    asked: str = "",
) -> Inspected:
    """Compiles the step with and without remat, and compares the two.

    Args:
      config, placement, program: the run.
      notes: facts for the receipt to state.
      progress: told what is being done before each part that takes long.
      compiled: steps of this run that were compiled before; this one's are added.
      asked: what the policy was found for, such as ``auto``; the policy itself
        when left out.

    Raises:
      ConfigError: it offloads more than XLA's pinned host memory holds.
    """
    compiled = {} if compiled is None else compiled
    platform = placement.mesh.devices.flat[0].platform
    residuals = layer_residuals(config, placement)
    if program.plan not in compiled:
        progress(f"compiling the step under {config.policy}")
        compiled[program.plan] = _compile(program, residuals, platform)
    executable, step = compiled[program.plan]
    step = dataclasses.replace(step, policy=asked or config.policy)
    bare_plan = layer_plan(NONE, config.planned_layers)
    if bare_plan not in compiled:
        progress("compiling the same step without remat")
        bare = make_program(config, placement, bare_plan)
        compiled[bare_plan] = _compile(bare, residuals, platform)
    without = dataclasses.replace(compiled[bare_plan][1], policy="none")
    progress("reading the receipt")
    receipt = make_receipt(
        step,
        without,
        platform=platform,
        limit=_device_limit(placement),
        notes=[
            *notes,
            *describe(config.pipeline),
            *offload_notes(config, placement, program),
        ],
    )
    devices = len(placement.mesh.local_devices)
    check_pinned(host_bytes(receipt["step"]), devices, platform)
    receipt["warnings"] += lint_program(config, placement, program)
    return Inspected(program, executable, receipt)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Every program that a run goes through, compiled before its first step.

    Attributes:
      inspected: by policy.
      changes: from one policy to another, the state's way to the other's layout.
    """

    inspected: dict[str, Inspected]
    changes: dict[tuple[str, str], Callable[[State], State]]


def inspect_schedule(
    config: TrainConfig,
    placement: Placement,
    programs: dict[str, Program],
    *,
    notes: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
    asked: str = "",
) -> Programs:
    """`inspect_run` for each policy of a run, and what lies between them.

    Raises:
      ConfigError: in a schedule, a policy does not compile or not fit the device.
    """
    if config.schedule.rule == "length":
        _check_layouts(programs)
    compiled: defaultdict[int, Compiled] = defaultdict(dict)  # by sequence length
    inspected: dict[str, Inspected] = {}
    for policy, program in programs.items():
        run = config_of(config, policy)
        length = split_entry(policy)[1]
        of_length = [f"batches of documents of up to {length:,} tokens"] * bool(length)
        try:
            found = inspect_run(
                *(run, placement, program),
                notes=[*notes, *of_length],
                progress=progress,
                compiled=compiled[run.sequence_length],
                asked=asked,
            )
        except jax.errors.JaxRuntimeError as error:
            if not config.policy_schedule:
                raise
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"--policy-schedule: {policy} does not compile: {reason}"
            ) from error
        if config.policy_schedule:
            _check_fits(policy, found.receipt["step"], _device_limit(placement))
        inspected[policy] = found
    if len(programs) > 1 and config.eval_every:
        progress("compiling validation")
        inspected = _share_evaluation(inspected)
    changes = {
        (old, new): compile_layout_change(programs[old], programs[new])
        for old, new in config.schedule.switches
        if old in programs and new in programs
    }
    return Programs(inspected, changes)


def config_of(config: TrainConfig, entry: str) -> TrainConfig:
    """The run as if it had one entry of its schedule only."""
    policy, length = split_entry(entry)
    return dataclasses.replace(
        config, policy=policy, policy_schedule="", seq_len=length or config.seq_len
    )


def _check_layouts(programs: dict[str, Program]) -> None:
    """By length, programs alternate: the state must not move at every step."""
    (first, one), *others = programs.items()
    for entry, other in others:
        if not same_layout(one, other):
            raise ConfigError(
                f"--policy-schedule: {first} and {entry} group the layers' weights "
                "otherwise, and the state would move at every change of length; use "
                "policies of one grouping, or --no-scan-layers"
            )


def _check_fits(policy: str, row: dict[str, Any], limit: int | None) -> None:
    if limit and row["fits"] is False:
        raise ConfigError(
            f"--policy-schedule: {policy} does not fit: it needs "
            f"{format_bytes(row['device_total_bytes'])} and the device has "
            f"{format_bytes(limit)}"
        )


def _share_evaluation(inspected: dict[str, Inspected]) -> dict[str, Inspected]:
    """Compiles validation once per layout: policies do not change what it computes."""
    shared: list[Program] = []
    found = {}
    # Validation has the longest sequences of the run.
    for policy, one in sorted(inspected.items(), key=_negative_length):
        program = next((p for p in shared if same_layout(p, one.program)), None)
        if program is None:
            batch = {
                name: jax.ShapeDtypeStruct(
                    (1, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding
                )
                for name, leaf in one.program.batch.items()
            }
            jitted: Any = one.program.evaluate
            evaluate = jitted.lower(one.program.state["params"], batch).compile()
            program = dataclasses.replace(one.program, evaluate=evaluate)
            shared.append(program)
        same = dataclasses.replace(one.program, evaluate=program.evaluate)
        found[policy] = dataclasses.replace(one, program=same)
    return {policy: found[policy] for policy in inspected}


def _negative_length(item: tuple[str, Inspected]) -> int:
    return -item[1].program.batch["inputs"].shape[-1]


def device_room(placement: Placement, state: State | None = None) -> int | None:
    """Bytes that a step may take, its state among them, on the fullest local device.

    Returns:
      The limit less what others hold; None where the backend does not tell.
    """
    mine: Counter[Any] = Counter()
    names = ("params", "opt_state", MASTER)
    trees = [state[name] for name in names if name in state] if state else []
    for leaf in jax.tree.leaves(trees):
        if leaf.sharding.memory_kind == PINNED:
            continue
        for shard in leaf.addressable_shards:
            mine[shard.device] += shard.data.nbytes
    rooms = []
    for device in placement.mesh.local_devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats or "bytes_in_use" not in stats:
            return None
        rooms.append(stats["bytes_limit"] - stats["bytes_in_use"] + mine[device])
    return min(rooms)


def offload_notes(
    config: TrainConfig, placement: Placement, program: Program
) -> tuple[str, ...]:
    """What a receipt or a row says of state in host memory."""
    if config.offload_optimizer == "none":
        return ()
    device = placement.mesh.devices.flat[0]
    host = host_memory(device)
    what, notes = "optimizer moments", ()
    if config.offload_optimizer == "all":
        what = "master weights and optimizer moments"
        if jnp.dtype(config.architecture.compute_dtype) == jnp.float32:
            notes = (
                "--offload-optimizer=all: the model computes in float32, so its copy "
                "of the weights is as large as they are; =state spares as much",
            )
    return (state_note(host, what, program.host_bytes, device.platform), *notes)


def lint_program(
    config: TrainConfig, placement: Placement, program: Program
) -> list[str]:
    """What the linter finds in a program's step and its layer plan."""
    model = config.architecture
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    shards = placement.mesh.shape
    stream = placement.sharding(BETWEEN_LAYERS)
    size = (config.layer_batch_size, config.sequence_length, model.dim)
    input_bytes = itemsize * math.prod(stream.shard_shape(size))
    input_bytes *= iterations_of(config.pipeline)  # which keep all of theirs
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


def one_layer(
    config: TrainConfig, placement: Placement, gathered: bool = False
) -> OneLayer:
    """The layer of a run's model, at the size of one micro-batch.

    Args:
      config, placement: the run.
      gathered: whether its gathered weights have a name; see `jaxckpt.models.gathered`.
    """
    architecture = config.architecture
    outputs = "outputs" if placement.gathers_outputs else "compiler"
    gather = "kept" if gathered else outputs
    block = Block(
        *(architecture, placement.constrain, placement.ring, gather, placement.shards)
    )
    size = (config.layer_batch_size, config.sequence_length, architecture.dim)
    x = jax.ShapeDtypeStruct(size, architecture.compute_dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    bare = Block(architecture)
    boxed = jax.eval_shape(
        lambda: bare.init(jax.random.key(0), jnp.zeros((1, *x.shape[1:]), x.dtype))
    )["params"]
    shardings = None
    if placement.mesh.size > 1:
        stream = placement.sharding(BETWEEN_LAYERS)
        shardings = (placement.of_boxed(boxed), stream, placement.replicated)

    def apply(params, x, key):
        rngs = {"dropout": key} if uses_dropout(architecture) else {}
        return block.apply({"params": params}, x, deterministic=not rngs, rngs=rngs)

    params = nn.unbox(boxed)
    if config.pipeline or config.offload_optimizer == "all":  # cast before the layers
        cast = functools.partial(compute_copy, dtype=architecture.compute_dtype)
        params = jax.eval_shape(cast, params)
    return OneLayer(apply, (params, x, key), shardings)


def layer_residuals(
    config: TrainConfig, placement: Placement
) -> Callable[[Policy], list[Residual]]:
    """What one layer of the model keeps under a policy, in bytes per device."""

    keep = config.architecture.always_kept

    @functools.cache
    def residuals(policy: Policy) -> list[Residual]:
        layer = one_layer(config, placement, GATHERED in policy.names)
        return block_residuals(
            checkpoint(layer.apply, policy, in_loop=True, keep=keep),
            *layer.arguments,
            input_names=["decoder_layer_input", "dropout_key"],
            shardings=layer.shardings,
        )

    return residuals


def _compile(
    program: Program, residuals: Callable[[Policy], list[Residual]], platform: str
) -> tuple[jax.stages.Compiled, CompiledStep]:
    arguments = (program.state, program.batch)
    executable, seconds = compile_step(program.step, *arguments, platform=platform)
    step = CompiledStep(
        policy=str(program.plan),
        plan=program.plan,
        memory=memory_bytes(executable, program.host_bytes),
        flops=count_flops(program.step, *arguments),
        residuals=residuals,
        compile_seconds=seconds,
        iterations=iterations_of(program.model.pipeline),
    )
    return executable, step


def iterations_of(schedule: PipelineSchedule | None) -> int:
    """How often a device runs its layers in one pass."""
    return schedule.iterations if schedule else 1


def _device_limit(placement: Placement) -> int | None:
    stats = placement.mesh.local_devices[0].memory_stats() or {}
    return stats.get("bytes_limit")
