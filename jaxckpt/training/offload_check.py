"""A check of host-resident state on the attached device, before a run relies on it.

Loops over offloaded arrays have been compiled wrongly (slices taken in the wrong
order), and equal layers hide it. So some steps of the streamed update are run on
numbers that differ in every entry and that float32 holds exactly, whatever XLA fuses;
they must come out equal to the bit, and lie where they should.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt.layers import LayerPlan, layer_plan
from jaxckpt.models.presets import ConfigError
from jaxckpt.training.host_memory import PINNED, HostMemory, host_memory
from jaxckpt.training.update import Update, split_moments, streamed_update

_LAYERS, _STEPS, _DECAY = 5, 3, 0.5


def check_offload(device: Any) -> None:
    """Runs a small streamed update on one attached device.

    Raises:
      ConfigError: its numbers are wrong, or the state did not stay in host memory.
    """
    host = host_memory(device)
    plan = layer_plan("3xnone+1x2xnone", _LAYERS)
    fault = find_fault(device, host, plan, make_update(plan, host))
    if fault:
        raise ConfigError(
            f"--offload-optimizer does not work on this {device.device_kind} with jax "
            f"{jax.__version__}: {fault}; leave it out, or add "
            "--no-check-offload to go on all the same"
        )


def make_update(plan: LayerPlan, host: HostMemory) -> Update:
    """Momentum, streamed: with whole numbers and halves it is exact in float32."""
    return streamed_update(optax.identity(), optax.trace(_DECAY), plan, host)


def find_fault(
    device: Any, host: HostMemory, plan: LayerPlan, update: Update
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
    step = jax.jit(
        lambda gradient, state, params: update(gradient, state, params, None),
        donate_argnums=(1, 2),
        out_shardings=(here, places),
    )
    got, moved = jax.device_put(params, here), jax.device_put(state, places)
    want, velocity = params, jax.tree.map(np.zeros_like, params)
    for _ in range(_STEPS):
        got, moved = step(jax.device_put(gradient, here), moved, got)
        velocity = jax.tree.map(lambda v, g: g + _DECAY * v, velocity, gradient)
        want = jax.tree.map(np.add, want, velocity)
    ((found,), *_) = split_moments(moved[1], params)
    for name, ours, right in ("state", found, velocity), ("weights", got, want):
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True)
        if not all(np.array_equal(np.asarray(one), other) for one, other in pairs):
            return f"the {name} of a small example came out wrong"
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found)}
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
