"""Which values are worth keeping, and which layers notice recomputation: measured.

For every named value of a layer: the bytes that keeping it takes, the time that it
saves (the layer's gradient under full remat less that under ``save:VALUE``, medians of
alternating runs on the attached device), and their ratio. For every layer: how far the
gradient under full remat is from that without, in the compute dtype, on the values
that really enter it. In float32 that is rounding; in bfloat16 a recomputed value may
round otherwise than the one of the forward pass.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.compiler.memory import compile_step
from jaxckpt.compiler.residuals import block_residuals
from jaxckpt.layers import LayerPlan, Run
from jaxckpt.layout import merge_layers
from jaxckpt.policies import FULL, NONE, Policy
from jaxckpt.remat import checkpoint
from jaxckpt.training.config import SELECTIVE, TrainConfig
from jaxckpt.training.inspect import one_layer
from jaxckpt.training.job import Job, ask
from jaxckpt.training.sharding import Placement
from jaxckpt.training.step import make_program
from jaxckpt.units import parse_share

_WARMUP, _ROUNDS = 2, 9
_RESULT = "jaxckpt-plan: "
# A layer whose gradient moves by more than this many roundings keeps everything.
_ROUNDINGS = 64


@dataclass(frozen=True)
class ValueSensitivity:
    """What keeping one value does for one layer.

    Attributes:
      name: its name.
      nbytes: bytes that keeping it takes, per device; counted.
      seconds: time that keeping it saves; measured, and 0 where it saves nothing.
    """

    name: str
    nbytes: int
    seconds: float

    @property
    def seconds_per_byte(self) -> float:
        return self.seconds / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True)
class Sensitivity:
    """What was measured.

    Attributes:
      values: best ratio first.
      effects: per layer, the relative distance of its gradient under full remat from
        that without.
      rounding: the compute dtype's rounding, to compare the effects with.
      full_seconds: gradient of one layer under full remat.
      none_seconds: the same without remat.
    """

    values: tuple[ValueSensitivity, ...]
    effects: tuple[float, ...]
    rounding: float
    full_seconds: float
    none_seconds: float

    @property
    def sensitive_layers(self) -> tuple[int, ...]:
        """Layers whose gradient moves by more than rounding explains."""
        limit = _ROUNDINGS * self.rounding
        return tuple(i for i, effect in enumerate(self.effects) if effect > limit)

    def plan(self, threshold: float) -> LayerPlan:
        """Keeps the best values while they take at most a share of all values' bytes.

        Sensitive layers keep everything.

        Args:
          threshold: the share, from 0 (full remat) to 1 (every named value).
        """
        allowed = threshold * sum(value.nbytes for value in self.values)
        kept: list[str] = []
        for value in self.values:
            if value.seconds > 0 and value.nbytes <= allowed:
                kept.append(value.name)
                allowed -= value.nbytes
        usual = Policy(save=tuple(kept)) if kept else FULL
        sensitive = set(self.sensitive_layers)
        runs: list[Run] = []
        for layer in range(len(self.effects)):
            policy = NONE if layer in sensitive else usual
            if runs and runs[-1].body == policy:
                runs[-1] = Run(runs[-1].count + 1, policy)
            else:
                runs.append(Run(1, policy))
        return LayerPlan(tuple(runs))


def measure(
    config: TrainConfig,
    placement: Placement,
    *,
    rounds: int = _ROUNDS,
    progress: Callable[[str], None] = lambda text: None,
) -> Sensitivity:
    """Measures a run's layers on the attached device.

    Args:
      config: the run; its attention kernel is decided.
      placement: the mesh.
      rounds: timed rounds; each runs every policy once.
      progress: told what is being done.
    """
    layer = one_layer(config, placement)
    params, inputs, key = _layer_inputs(config, placement, layer.apply)
    names = [
        name
        for name in config.architecture.value_names[1:]
        if _bytes_kept(layer, Policy(save=(name,))) > _bytes_kept(layer, FULL)
    ]
    platform = placement.mesh.devices.flat[0].platform
    policies = {"none": NONE, "full": FULL}
    policies |= {name: Policy(save=(name,)) for name in names}
    gradients = {}
    for label, policy in policies.items():
        progress(f"compiling one layer, {label}")
        gradients[label], _ = compile_step(
            _gradient(layer.apply, policy), params[0], inputs[0], key, platform=platform
        )
    progress("timing")
    seconds = _times(gradients, (params[0], inputs[0], key), rounds)
    kept = _bytes_kept(layer, FULL)
    values = [
        ValueSensitivity(
            name,
            _bytes_kept(layer, policies[name]) - kept,
            max(0.0, seconds["full"] - seconds[name]),
        )
        for name in names
    ]
    effects = []
    for index, (weights, x) in enumerate(zip(params, inputs, strict=True)):
        progress(f"comparing gradients of layer {index}")
        effects.append(
            _distance(
                gradients["full"](weights, x, key), gradients["none"](weights, x, key)
            )
        )
    return Sensitivity(
        values=tuple(sorted(values, key=lambda one: -one.seconds_per_byte)),
        effects=tuple(effects),
        rounding=float(jnp.finfo(config.architecture.compute_dtype).eps),
        full_seconds=seconds["full"],
        none_seconds=seconds["none"],
    )


def _layer_inputs(config: TrainConfig, placement: Placement, apply):
    """Initial weights of every layer, and what really enters it for random tokens."""
    model = config.architecture
    bare = LayerPlan((Run(model.num_layers, NONE),))
    program = make_program(config, placement, bare)
    state = program.init()
    params = merge_layers(
        state["params"]["layers"], bare, model.num_layers, scan=model.scan_layers
    )
    key = jax.random.key(config.seed)
    shape = (config.micro_batch_size, config.sequence_length)
    tokens = jax.random.randint(key, shape, 0, model.vocab_size)
    x = state["params"]["embedding"][tokens].astype(model.compute_dtype)
    if model.positions == "learned":
        positions = state["params"]["position_embedding"][: shape[1]]
        x += positions.astype(model.compute_dtype)
    inputs, forward = [], jax.jit(apply)
    for weights in params:
        inputs.append(x)
        x = forward(weights, x, key)
    return params, inputs, key


def _gradient(apply: Callable[..., Any], policy: Policy) -> Any:
    """The gradient of one layer by its weights and input, its barriers in place."""
    block = checkpoint(apply, policy, in_loop=False)

    def loss(params, x, key):
        return jnp.sum(jnp.square(block(params, x, key).astype(jnp.float32)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def _bytes_kept(layer: Any, policy: Policy) -> int:
    residuals = block_residuals(
        checkpoint(layer.apply, policy, in_loop=True),
        *layer.arguments,
        input_names=["decoder_layer_input", "dropout_key"],
        shardings=layer.shardings,
    )
    return sum(residual.nbytes for residual in residuals)


def _times(
    functions: dict[str, Any], arguments: Sequence[Any], rounds: int
) -> dict[str, float]:
    """Median seconds of each, run in turns so that drifts hit all alike."""
    seconds: dict[str, list[float]] = {label: [] for label in functions}
    for number in range(_WARMUP + rounds):
        for label, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            if number >= _WARMUP:
                seconds[label].append(time.perf_counter() - start)
    return {label: statistics.median(times) for label, times in seconds.items()}


def _distance(ours: Any, reference: Any) -> float:
    """Relative distance of two pytrees, in the 2-norm over everything."""
    difference = total = 0.0
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True)
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        difference += float(np.sum((a - b) ** 2))
        total += float(np.sum(b**2))
    return (difference / total) ** 0.5 if total else 0.0


def selective_plan(job: Job) -> str:
    """The layer plan of ``--policy=selective:THRESHOLD``, measured in a new process.

    Raises:
      SensitivityError: it cannot be measured, with the reason.
    """
    answer, reason = ask("jaxckpt.training.sensitivity", job, _RESULT)
    if answer is None:
        raise SensitivityError(f"{job.config.policy} cannot be measured: {reason}")
    return answer


class SensitivityError(RuntimeError):
    """A layer that cannot be measured. One line."""


def _main() -> None:
    from jaxckpt.compiler.targets import parse_target
    from jaxckpt.training.prepare import prepare

    job = Job.from_json(sys.stdin.read())
    threshold = parse_share(job.config.policy.removeprefix(SELECTIVE))
    bare = replace(job.config, policy="none")
    prepared = prepare(bare, parse_target(job.target))
    found = measure(prepared.config, prepared.placement)
    print(f"{_RESULT}{found.plan(threshold)}")


if __name__ == "__main__":
    _main()
