"""A check of host memory on the attached device, before a run relies on it.

Loops over offloaded arrays have been compiled wrongly (slices taken in the wrong
order), and equal layers hide it.

* Offloaded state: some steps of the streamed update are run on numbers that differ in
  every entry and that float32 holds exactly, whatever XLA fuses; they must come out
  equal to the bit, and lie where they should.
* Policies that offload: the gradient of a small stack, see `jaxckpt.checks.offload`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt.checks import offload
from jaxckpt.layers import LayerPlan, layer_plan
from jaxckpt.models.presets import ConfigError
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.host_memory import PINNED, HostMemory, host_memory
from jaxckpt.training.master import compute_copy
from jaxckpt.training.update import (
    Gradients,
    Update,
    Weights,
    split_moments,
    streamed_update,
)

_LAYERS, _STEPS, _DECAY = 5, 3, 0.5
_COPY = jnp.bfloat16


def check_offload(config: TrainConfig, device: Any) -> None:
    """Refuses a run that offloads what an attached device gets wrong.

    A run that offloads nothing, or was told not to look, costs nothing here.

    Args:
      config: the run; its policies are planned.
      device: one of its own, which stands for all.

    Raises:
      ConfigError: the small examples' numbers are wrong, or did not go to host memory.
    """
    if not config.check_offload:
        return
    if config.offload_optimizer != "none":
        copies = config.offload_optimizer == "all"
        host = host_memory(device)
        plan = layer_plan("3xnone+1x2xnone", _LAYERS)
        fault = find_fault(device, host, make_update(plan, host), copies=copies)
        if fault:
            raise _refusal("--offload-optimizer", device, fault, "leave it out")
    scan = config.architecture.scan_layers
    for policy in config.policies:
        shapes = offload.shapes_of(config.layers_of(policy), scan=scan)
        if fault := offload.find_fault(device, shapes):
            raise _refusal(policy, device, fault, "save instead of offload")


def _refusal(what: str, device: Any, fault: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{what} does not work on this {device.device_kind} with jax "
        f"{jax.__version__}: {fault}; {instead}, or add --no-check-offload to go on "
        "all the same"
    )


def make_update(plan: LayerPlan, host: HostMemory) -> Update:
    """Momentum, streamed: with whole numbers and halves it is exact in float32."""
    rule = optax.trace(_DECAY)
    return streamed_update(lambda gradient, norm: gradient, rule, plan, host)


def find_fault(
    device: Any, host: HostMemory, update: Update, *, copies: bool = False
) -> str | None:
    """What an update does wrong on a device, in words."""
    params = _example(_integers(np.random.default_rng(0)))
    gradient = _example(_integers(np.random.default_rng(1)))
    state = (optax.identity().init(params), optax.trace(_DECAY).init(params))
    mesh = Mesh(np.asarray([device]), ("device",))
    here = NamedSharding(mesh, PartitionSpec())
    (moment,), counters, rebuild = split_moments(state[1], params)
    places = rebuild([jax.tree.map(lambda _: host.place(here), moment)], counters)
    places = (state[0], places)
    homes = (host.place(here) if copies else here, here)  # of weights and their copy

    @functools.partial(jax.jit, donate_argnums=(1, 2), out_shardings=(homes, places))
    def step(gradient, state, weights):
        gradients = Gradients(gradient, 1.0)
        weights, state = update(gradients, state, Weights(*weights), None)
        return (weights.params, weights.copy), state

    copy = compute_copy(params, _COPY) if copies else None
    got = jax.device_put(params, homes[0]), jax.device_put(copy, here)
    moved = jax.device_put(state, places)
    want, velocity = params, jax.tree.map(np.zeros_like, params)
    for _ in range(_STEPS):
        got, moved = step(jax.device_put(gradient, here), moved, got)
        velocity = jax.tree.map(lambda v, g: g + _DECAY * v, velocity, gradient)
        want = jax.tree.map(np.add, want, velocity)
    ((found,), *_) = split_moments(moved[1], params)
    copy = compute_copy(want, _COPY) if copies else None
    for name, ours, right in (
        ("state", found, velocity),
        ("weights", got[0], want),
        ("copy of the weights", got[1], copy),
    ):
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True)
        if not all(np.array_equal(np.asarray(one), other) for one, other in pairs):
            return f"the {name} of a small example came out wrong"
    held = (found, got[0]) if copies else found
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(held)}
    if host.way == "placed" and kinds != {PINNED}:
        return f"the state is in {', '.join(map(str, kinds))} memory after a step"
    return None


def _integers(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    return lambda *shape: rng.integers(-99, 99, shape).astype(np.float32)


def _example(values: Callable[..., np.ndarray]) -> dict[str, Any]:
    """Parameters in the layout of the plan above."""
    layers: dict[str, Any] = {}
    layers["run_0"] = {"kernel": values(3, 16, 128), "scale": values(3, 128)}
    layers["run_1"] = {"run_0": {"kernel": values(1, 2, 16, 128)}}
    return {"embedding": values(64, 128), "layers": layers}
