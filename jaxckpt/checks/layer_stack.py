"""Gradients of a small stack of layers under any plan, against no remat at all.

A loop that offloads has been compiled with its iterations mixed up before
(openxla/xla#46231), and equal weights in all layers hide that: here every layer has its
own. The reference is `jax.grad` of a plain `lax.scan`, without any of our code.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt.checks import host
from jaxckpt.checks.check import (
    UNKNOWN,
    Check,
    broken,
    in_turn,
    judged,
    largest_difference,
    largest_ulps,
)
from jaxckpt.checks.sizes import StackSizes
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.layers import LayerPlan, layer_plan
from jaxckpt.layout import merge_layers, split_layers
from jaxckpt.stack import stack

TOLERANCE = 1e-6  # of the largest entry: float32, where programs sum in one order
ANY_ORDER = 1e-5  # elsewhere: a GPU's matmuls are chosen by timing, program by program
ULPS = 4.0  # of bfloat16, which rounds anew in every layer

AGAINST = "gradient against no remat"
MOVED = "moved to host memory"
_RUNS = 3  # a copy that comes too late may come in time once

Layer = Callable[[Any, Any], tuple[Any, Any]]
MakeStack = Callable[..., Callable[[Any, Any], tuple[Any, Any]]]


def attention_layer(x, weights):
    """A layer with every kind of matmul: with weights, and of a batch."""
    x = checkpoint_name(x, "layer_input")  # (batch, time, width)
    scores = jnp.einsum("btd,bsd->bts", x, x) / (x.shape[1] * x.shape[2])
    mixed = jnp.einsum("bts,bsd->btd", scores, x)
    hidden = checkpoint_name(mixed @ weights["up"], "hidden")
    return x + jnp.tanh(hidden) @ weights["down"], None


def plain_layer(x, weights):
    """A layer that compiles fast."""
    x = checkpoint_name(x, "layer_input")  # (batch, time, width)
    hidden = checkpoint_name(x @ weights["up"], "hidden")
    return x + jnp.tanh(hidden) @ weights["down"], None


@dataclass(frozen=True)
class Program:
    """A compiled gradient: of the mean square of a stack's output.

    Attributes:
      plan: of its layers.
      compiled: the program.
      run: ``() -> (gradient of stacked weights, of x)``, on its devices.
      scan: whether its layers are loops.
    """

    plan: LayerPlan
    compiled: jax.stages.Compiled
    run: Callable[[], Any]
    scan: bool = True

    def moved(self, nbytes: Mapping[str, int], twin: int | None = None) -> host.Moved:
        """What it keeps in host memory; see `jaxckpt.checks.host.moved`."""
        return host.moved(self.compiled, self.plan, nbytes, twin, scan=self.scan)


class Case:
    """A stack whose gradient is taken under many plans.

    Args:
      sizes: how large.
      devices: that it is cut over, weights and batch, as fsdp does. They may be
        absent ones, for which programs are only compiled.
      dtype: of everything.
      layer: one layer, with the weights ``up`` and ``down``.
      make_stack: what is under test, as `jaxckpt.stack`.
    """

    def __init__(
        self,
        sizes: StackSizes,
        devices: Sequence[Any],
        *,
        dtype: str = "float32",
        layer: Layer = attention_layer,
        make_stack: MakeStack = stack,
    ):
        self.sizes, self.dtype = sizes, dtype
        self.layer, self.make_stack = layer, make_stack
        self.platform = _platform(devices[0])
        self.mesh = Mesh(np.asarray(devices), ("fsdp",))
        random = np.random.default_rng(0)
        shape = (sizes.layers, sizes.width, sizes.width)
        scale = np.sqrt(sizes.width)
        self.weights = {
            name: (random.normal(size=shape) / scale).astype(jnp.dtype(dtype))
            for name in ("up", "down")
        }
        shape = (sizes.batch, sizes.time, sizes.width)
        self.x = random.normal(size=shape).astype(jnp.dtype(dtype))

    @property
    def value_bytes(self) -> dict[str, int]:
        """Of each named value, on one device."""
        return dict.fromkeys(("layer_input", "hidden"), self.x.nbytes // self.mesh.size)

    @property
    def one_layer(self) -> dict[str, np.ndarray]:
        """The first layer's weights."""
        return jax.tree.map(lambda leaf: leaf[0], self.weights)

    @functools.cached_property
    def want(self) -> Any:
        """The gradient without remat."""
        plan = layer_plan("none", self.sizes.layers)
        run = functools.partial(lax.scan, self.layer)
        return self._compiled(plan, run, self.weights, lambda found: found).run()

    def compile(self, policy: Any, *, scan: bool = True) -> Program:
        """The gradient under a plan: text, a `LayerPlan` or a `Plan`."""
        layers = self.sizes.layers
        plan = layer_plan(policy, layers)
        host.check_possible(plan, self.mesh.devices.flat[0])
        run = self.make_stack(self.layer, policy, layers, scan=scan)
        split = split_layers(self.weights, plan, layers, scan=scan)

        def in_order(found):
            merged = merge_layers(found, plan, layers, scan=scan)
            return jax.tree.map(lambda *leaves: np.stack(leaves), *merged)

        program = self._compiled(plan, run, split, in_order)
        return dataclasses.replace(program, scan=scan)

    def _compiled(self, plan, run, weights, in_order) -> Program:
        def loss(weights, x):
            return jnp.mean(jnp.square(run(x, weights)[0].astype(jnp.float32)))

        places = (jax.tree.map(self._place, weights), self._place(self.x, axis=0))
        jitted = jax.jit(jax.grad(loss, (0, 1)), out_shardings=places)
        shapes = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=place
            ),
            (weights, self.x),
            places,
        )
        with jax.default_matmul_precision("highest"):  # a GPU would take TF32 by itself
            compiled, _ = compile_step(jitted, *shapes, platform=self.platform)

        def call():
            of_weights, of_x = jax.device_get(
                compiled(*jax.device_put((weights, self.x), places))
            )
            return in_order(of_weights), of_x

        return Program(plan, compiled, call)

    def _place(self, leaf: Any, axis: int = -1) -> NamedSharding:
        axes: list[str | None] = [None] * leaf.ndim
        axes[axis] = "fsdp"
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def difference(self, got: Any) -> tuple[float, float, str]:
        """(how far from no remat, what is allowed, the unit)."""
        if self.dtype != "float32":
            return largest_ulps(got, self.want, self.dtype), ULPS, f"{self.dtype} ulp"
        allowed = TOLERANCE if self.platform == "cpu" else ANY_ORDER
        return largest_difference(got, self.want), allowed, "of the largest entry"


def _platform(device: Any) -> str:
    return "gpu" if device.platform == "cuda" else device.platform


def check_plans(
    case: Case, texts: Iterable[str], *, scan: bool = True
) -> Iterator[Check]:
    """A check of the gradient under each plan; where it offloads, of the memory too."""
    texts = list(texts)
    temp: dict[str, int | None] = {}
    jobs = [functools.partial(case.compile, text, scan=scan) for text in texts]
    for text, wait in zip(texts, in_turn(jobs), strict=True):
        name = text if scan else f"{text}, unrolled"
        try:
            program = wait()
            yield check_gradient(case, name, program.run)
            temp[text] = memory_bytes(program.compiled).temp_bytes
            if host.offloads(program.plan):
                twin = temp.get(text.replace("offload", "save"))
                yield check_moved(case, name, program, twin)
        except host.NoOffloadError as error:
            yield Check(name, AGAINST, "", UNKNOWN, str(error))
        except Exception as error:
            yield broken(name, AGAINST, error)


def check_gradient(case: Case, name: str, run: Callable[[], Any]) -> Check:
    """The largest difference of some runs."""
    found = [case.difference(run()) for _ in range(_RUNS)]
    worst, allowed, unit = max(found)
    told = f"{worst:.2g} {unit}, at most {allowed:.0g}"
    figures = {"largest_differences": [one for one, *_ in found], "allowed": allowed}
    return Check(name, AGAINST, told, judged(worst <= allowed), "", figures)


def check_moved(case: Case, name: str, program: Program, twin: int | None) -> Check:
    """Whether a plan's values are in host memory."""
    found = program.moved(case.value_bytes, twin)
    holds, told, reason = found.verdict(case.platform)
    return Check(name, MOVED, told, judged(holds), reason, vars(found))
