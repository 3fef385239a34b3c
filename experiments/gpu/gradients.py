"""Offloading gives the right gradients and really moves memory: a self-test.

A loop that offloads has been compiled with its iterations mixed up before. Equal
weights in all layers hide that, so here every layer has its own. The reference is
`jax.grad` of a plain `lax.scan` without any checkpoint; everything is float32 with
float32 matmuls (an H200 would take TF32 by itself).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from experiments.gpu.process import Row, failed_row, failure, row
from experiments.gpu.sizes import Sizes
from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.layers import LayerPlan, layer_plan
from jaxckpt.stack import join_layers, merge_layers, split_layers, stack
from jaxckpt.training.benchmark_worker import random_batch
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program
from jaxckpt.units import format_bytes

STACK_TOLERANCE = 1e-6  # of each gradient's largest entry
MODEL_TOLERANCE = 1e-5  # GPUs add up an embedding's gradient in any order
_RUNS = 3  # a copy that comes too late may come in time once

MakeStack = Callable[[Callable, Any, int], Callable]


def check(sizes: Sizes, make_stack: MakeStack = stack) -> Iterator[Row]:
    """A row per plan of the plain stack, then per policy of the shipped model.

    Args:
      sizes: how large.
      make_stack: what is under test, as `jaxckpt.stack.stack`.
    """
    with jax.default_matmul_precision("highest"):
        yield from _plain_stack(sizes, make_stack)
        yield from _shipped_model(sizes)


# ---------------------------------------------------------------- a plain stack


def _layer(x, weights):  # (rows, width), both matrices (width, width)
    x = checkpoint_name(x, "layer_input")
    hidden = checkpoint_name(x @ weights["up"], "hidden")
    return x + jnp.tanh(hidden) @ weights["down"], None


def _plain_stack(sizes: Sizes, make_stack: MakeStack) -> Iterator[Row]:
    layers, width, rows = sizes.stack
    random = np.random.default_rng(0)
    shape = (layers, width, width)
    weights = {
        name: random.normal(size=shape).astype(np.float32) / np.float32(width**0.5)
        for name in ("up", "down")
    }
    x = random.normal(size=(rows, width)).astype(np.float32)

    def loss(run, weights, x):
        return jnp.mean(jnp.square(run(x, weights)[0]))

    plain = jax.jit(
        jax.grad(functools.partial(loss, lambda x, w: lax.scan(_layer, x, w)), (0, 1))
    )
    want = jax.device_get(plain(weights, x))
    temp_bytes: dict[str, int | None] = {}
    for text in sizes.stack_plans:
        try:
            plan = layer_plan(text, layers)
            run = make_stack(_layer, plan, layers)
            split = jax.device_put(split_layers(weights, plan, layers))
            jitted = jax.jit(jax.grad(functools.partial(loss, run), (0, 1)))
            compiled, _ = compile_step(jitted, split, x, platform=jax.default_backend())
            differences = []
            for _ in range(_RUNS):
                of_layers, of_x = jax.device_get(compiled(split, x))
                in_order = merge_layers(of_layers, plan, layers)
                stacked = jax.tree.map(lambda *one: np.stack(one), *in_order)
                differences.append(largest_difference((stacked, of_x), want))
            temp_bytes[text] = memory_bytes(compiled).temp_bytes
            twin = temp_bytes.get(text.replace("offload", "save"))
            yield _row(
                f"stack {text}", differences, STACK_TOLERANCE,
                moved(compiled, plan, x.nbytes, twin),
            )  # fmt: skip
        except Exception as error:
            yield failed_row(f"stack {text}", failure(error), "gradients")


def moved(
    compiled: Any, plan: LayerPlan, nbytes: int | None, twin: int | None
) -> dict[str, Any]:
    """What a program keeps in host memory, and what it should.

    Args:
      compiled: the gradient.
      plan: of its layers.
      nbytes: of one named value, all of which are alike; None: they are not.
      twin: temporary bytes of the same plan with ``save`` for ``offload``, if known.

    Returns:
      Figures. The least it keeps at once are the values of the largest run of layers
      (a group's go when it is done); it moves those of all layers out and back.
    """
    memory = memory_bytes(compiled)
    found: dict[str, Any] = {
        "temp_bytes": memory.temp_bytes,
        "host_temp_bytes": memory.host_temp_bytes,
        "offloads": any(policy.offload for policy in plan.policies()),
    }
    if not found["offloads"]:
        return found
    found["temp_bytes_when_saved"] = twin
    found["host_transfer_bytes"] = _transfer_bytes(compiled)
    at_once = everywhere = 0
    for policy, layers, around in plan.leaves():
        at_once = max(at_once, layers * len(policy.offload))
        everywhere += layers * len(policy.offload) * int(np.prod(around, dtype=int))
    found["least_host_bytes"] = at_once * nbytes if nbytes else 1
    found["least_transfer_bytes"] = 2 * everywhere * nbytes if nbytes else 1
    return found


def _transfer_bytes(compiled: Any) -> int | None:
    """To and from the host; None where the program cannot be read."""
    try:
        program = parse_hlo(compiled.as_text() or "")
    except Exception:  # whatever it cannot read: gradients are still to be compared
        return None
    return sum(program.host_transfer_bytes.values())


def _row(
    name: str, differences: list[float], tolerance: float, found: dict[str, Any]
) -> Row:
    worst = max(differences)
    checks: dict[str, bool | None] = {"gradients": worst <= tolerance}
    told = f"largest difference {worst:.1e}, allowed {tolerance:.0e}"
    if found["offloads"]:
        checks["moved to host"], told_of_host = on_host(found)
        told += f"; {told_of_host}"
    return row(
        name, told, checks, largest_differences=differences, tolerance=tolerance,
        **found,
    )  # fmt: skip


def on_host(found: dict[str, Any]) -> tuple[bool | None, str]:
    """Whether the figures of `moved` show values in host memory, and what they are."""
    if jax.default_backend() == "cpu":
        return None, "a CPU has one memory: moved to host unknown"
    host, transfers = found["host_temp_bytes"], found["host_transfer_bytes"]
    if host is None or transfers is None:
        return None, "host memory or transfers unknown: the backend does not tell"
    twin = found["temp_bytes_when_saved"]
    holds = (
        host >= found["least_host_bytes"]
        and transfers >= found["least_transfer_bytes"]
        and (twin is None or found["temp_bytes"] < twin)
    )
    told = f"host {format_bytes(host)}, transfers {format_bytes(transfers)}"
    if twin is not None:
        temp = format_bytes(found["temp_bytes"])
        told += f", device {temp} for {format_bytes(twin)} when saved"
    return holds, told


# ---------------------------------------------------------------- the shipped model


def _shipped_model(sizes: Sizes) -> Iterator[Row]:
    architecture = sizes.gradient_model
    layers = architecture.num_layers
    placement = make_placement({}, jax.devices()[:1])

    def program_of(policy):
        config = TrainConfig(policy=policy, architecture=architecture, batch_size=4)
        return make_program(config, placement)

    bare = program_of("none")
    params = _all_different(bare.state["params"])
    in_order = merge_layers(params["layers"], bare.plan, layers)
    batch = {name: leaf[0] for name, leaf in jax.device_get(random_batch(bare)).items()}

    def gradient(program):
        """Of the mean loss, by layer; and the compiled program."""

        def loss(params):
            total = program.model.apply(
                {"params": params}, batch["inputs"], batch["targets"], batch["weights"]
            )
            return total / batch["weights"].size

        split = join_layers(in_order, program.plan, layers)
        arguments = jax.device_put({**params, "layers": split})
        jitted = jax.jit(jax.grad(loss))
        compiled, _ = compile_step(jitted, arguments, platform=jax.default_backend())

        def run():
            found = jax.device_get(compiled(arguments))
            merged = merge_layers(found["layers"], program.plan, layers)
            return {**found, "layers": merged}

        return run, compiled

    want = gradient(bare)[0]()
    for policy in sizes.gradient_policies:
        try:
            program = program_of(policy)
            run, compiled = gradient(program)
            differences = [largest_difference(run(), want) for _ in range(_RUNS)]
            yield _row(
                f"model {policy}", differences, MODEL_TOLERANCE,
                moved(compiled, program.plan, None, None),
            )  # fmt: skip
        except Exception as error:
            yield failed_row(f"model {policy}", failure(error), "gradients")


def _all_different(shapes: Any) -> Any:
    """Weights for a pytree of shapes: no two alike, also where all begin as ones."""
    random = np.random.default_rng(1)

    def draw(leaf):
        if leaf.ndim == 1:  # scales of norms, of one or of all layers
            return 1 + random.normal(size=leaf.shape).astype(leaf.dtype) / 10
        return random.normal(size=leaf.shape).astype(leaf.dtype) / 10

    return jax.tree.map(draw, shapes)


def largest_difference(got: Any, want: Any) -> float:
    """Of two pytrees' entries, relative to the largest entry of each array.

    Example:
      >>> got, want = {"a": np.array([2.0, 4.0])}, {"a": np.array([2.0, 5.0])}
      >>> largest_difference(got, want)
      0.2
    """
    worst = 0.0
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for left, right in pairs:
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        scale = max(np.abs(right).max(initial=0), np.finfo(np.float32).tiny)
        difference = float(np.abs(left - right).max(initial=0) / scale)
        if not np.isfinite(difference):  # memory that was read too early
            return float("inf")
        worst = max(worst, difference)
    return worst
