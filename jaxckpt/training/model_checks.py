"""Checks of the shipped model: its gradients with dropout, its flash kernel's runs."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.checks import host
from jaxckpt.checks.check import (
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    Check,
    broken,
    failure,
    in_turn,
    judged,
    largest_difference,
)
from jaxckpt.checks.layer_stack import AGAINST, ANY_ORDER, MOVED, TOLERANCE, Program
from jaxckpt.checks.sizes import round_up
from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.memory import compile_step
from jaxckpt.layout import split_layers
from jaxckpt.models.attention import attention, choose_attention
from jaxckpt.models.presets import ModelConfig, model_config
from jaxckpt.stack import stack
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

FLASH_RUNS = {"save:context": 1, "full": 2}  # of the forward kernel, per layer

_LAYERS, _RUNS = 4, 3
_HEADS, _HEAD_DIM, _TIME = 2, 64, 128  # of the flash kernel's check


def small_model(platform: str, devices: int, *, scan: bool = True) -> ModelConfig:
    """The preset ``tiny`` with dropout, smaller on a CPU, in float32."""
    width = round_up(32 if platform == "cpu" else 256, 8 * devices)
    return model_config(
        "tiny",
        num_layers=_LAYERS,
        dim=width,
        num_heads=4,
        mlp_dim=2 * width,
        max_seq_len=16 if platform == "cpu" else 128,
        dropout=0.1,
        attention="xla",
        scan_layers=scan,
    )


# ---------------------------------------------------------------- gradients


class ModelCase:
    """The shipped model, whose gradient is taken under many policies.

    Args:
      devices: that weights and batch are cut over.
      architecture: in float32, its attention decided; may have dropout.
    """

    def __init__(self, devices: Sequence[Any], architecture: ModelConfig):
        self.architecture = architecture
        self.platform = devices[0].platform
        self._placement = make_placement({"fsdp": len(devices)}, devices)
        self._batch_size = max(4, len(devices))
        bare = self._program("none")
        params = different_everywhere(bare.state["params"])
        self._params = {**params, "layers": bare.merge_layers(params["layers"])}
        random = np.random.default_rng(0)
        shape = bare.batch["inputs"].shape[1:]
        tokens = random.integers(0, architecture.vocab_size, (2, *shape), np.int32)
        self._tokens = tuple(tokens)

    def _program(self, policy: str):
        config = TrainConfig(
            policy=policy,
            architecture=self.architecture,
            batch_size=self._batch_size,
        )
        return make_program(config, self._placement)

    @functools.cached_property
    def want(self) -> Any:
        """The gradient without remat."""
        return self.compile("none").run()

    def compile(self, policy: str) -> Program:
        """The gradient of the mean loss, with the same dropout masks always."""
        program = self._program(policy)
        host.check_possible(program.plan, self._placement.mesh.devices.flat[0])
        weights = np.ones(self._tokens[0].shape, np.float32)
        batch = jax.tree.map(
            lambda leaf: jax.device_put(leaf, self._placement.sharding(("sequences",))),
            (*self._tokens, weights),
        )

        def loss(params, inputs, targets, weights) -> Any:
            total = program.model.apply(
                {"params": params},
                inputs,
                targets,
                weights,
                deterministic=not self.architecture.dropout,
                rngs={"dropout": jax.random.key(0)},
            )
            return total / weights.size

        places = jax.tree.map(lambda leaf: leaf.sharding, program.state["params"])
        joined = program.join_layers(self._params["layers"])
        params = jax.device_put({**self._params, "layers": joined}, places)
        with jax.default_matmul_precision("highest"):
            jitted = jax.jit(jax.grad(loss), out_shardings=places)
            compiled, _ = compile_step(jitted, params, *batch, platform=self.platform)

        def run():
            found = jax.device_get(compiled(params, *batch))
            return {**found, "layers": program.merge_layers(found["layers"])}

        return Program(program.plan, compiled, run, self.architecture.scan_layers)


def different_everywhere(shapes: Any) -> Any:
    """Weights for a pytree of shapes: no two alike, also where all begin as ones."""
    random = np.random.default_rng(1)

    def draw(leaf):
        values = random.normal(size=leaf.shape).astype(leaf.dtype) / 10
        return 1 + values if leaf.ndim == 1 else values  # scales of norms

    return jax.tree.map(draw, shapes)


def check_model(case: ModelCase, policies: Sequence[str]) -> Iterator[Check]:
    """A check of the gradient under each policy; where it offloads, of memory too."""
    # An embedding's gradient is added up in any order on a GPU.
    allowed = TOLERANCE if case.platform == "cpu" else ANY_ORDER
    form = "" if case.architecture.scan_layers else ", unrolled"
    form += ", with dropout" if case.architecture.dropout else ""
    jobs = [functools.partial(case.compile, policy) for policy in policies]
    for policy, wait in zip(policies, in_turn(jobs), strict=True):
        name = f"{policy}{form}"
        try:
            program = wait()
            found = [largest_difference(program.run(), case.want) for _ in range(_RUNS)]
            told = f"{max(found):.2g} of the largest entry, at most {allowed:.0g}"
            figures = {"largest_differences": found, "allowed": allowed}
            verdict = judged(max(found) <= allowed)
            yield Check(name, AGAINST, told, verdict, "", figures)
            if host.offloads(program.plan):
                there = program.moved({})
                holds, told, reason = there.verdict(case.platform)
                yield Check(name, MOVED, told, judged(holds), reason, vars(there))
        except host.NoOffloadError as error:
            yield Check(name, AGAINST, "", UNKNOWN, str(error))
        except Exception as error:
            yield broken(name, AGAINST, error)


# ---------------------------------------------------------------- the flash kernel


def check_flash(device: Any) -> Iterator[Check]:
    """How often the flash kernel runs forward, as traced and in the compiled program.

    Where the device cannot run it nothing is compiled, and it is traced only if JAX
    finds cuDNN, as it does with the CUDA plugin for absent GPUs.
    """
    capability = getattr(device, "compute_capability", None)
    kernel, obstacle = choose_attention(
        device.platform, capability, "bfloat16", _HEAD_DIM, 0.0
    )
    for policy, wanted in FLASH_RUNS.items():
        name = f"flash kernel under {policy}"
        compared = "forward runs per layer as traced"
        try:
            gradient, arguments = flash_gradient(policy)
            traced = count_flops(gradient, *arguments).attention_forward_runs
            yield _counted(name, compared, traced, wanted)
            compared = "forward runs per layer as compiled"
            if kernel == "cudnn":
                runs = compiled_runs(gradient, arguments, device)
                yield _counted(name, compared, runs, wanted)
            else:
                yield Check(name, compared, "", NOT_APPLICABLE, obstacle)
        except Exception as error:
            if kernel == "cudnn":
                yield broken(name, compared, error)
            else:
                reason = f"{obstacle}; {failure(error)}"
                yield Check(name, compared, "", NOT_APPLICABLE, reason)


def _counted(name: str, compared: str, runs: int, wanted: int) -> Check:
    found, told = runs / _LAYERS, f"{runs / _LAYERS:g} of {wanted} runs"
    verdict = OK if found == wanted else judged(False)
    return Check(name, compared, told, verdict, "", {"runs": found, "wanted": wanted})


def flash_gradient(policy: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of a stack of flash attention layers, and shapes for it."""

    def layer(x, weights):
        heads = (x @ weights).reshape(*x.shape[:2], _HEADS, _HEAD_DIM)
        context = attention(heads, heads, heads, implementation="cudnn")
        return x + context.reshape(x.shape), None

    run = stack(layer, policy, _LAYERS)

    def loss(weights, x):
        return jnp.sum(run(x, weights)[0].astype(jnp.float32))

    width = _HEADS * _HEAD_DIM
    weights = jax.ShapeDtypeStruct((_LAYERS, width, width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, _TIME, width), jnp.bfloat16)
    split = jax.eval_shape(lambda leaf: split_layers(leaf, policy, _LAYERS), weights)
    return jax.grad(loss), (split, x)


def compiled_runs(gradient: Callable[..., Any], arguments: Any, device: Any) -> int:
    """Runs of the forward kernel in the program for a device, which may be absent."""
    here = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        arguments,
    )
    compiled, _ = compile_step(jax.jit(gradient), *placed, platform="gpu")
    return parse_hlo(compiled.as_text() or "").attention_forward_runs
