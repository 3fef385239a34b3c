"""The transformer block of Korthikanti et al. 2022 (arXiv 2205.05198), and its bytes.

LayerNorm, attention and MLP with 16-bit values, dropout with 1-byte masks. Every value
of the paper's list has a name, and each is kept as it is cut over the tensor axis.
`counted` says what one layer keeps under a policy, `compiled_memory` what XLA:GPU
allocates for a stack of them. The table is made by `experiments.korthikanti`.
"""

import dataclasses
import functools
import re
from typing import Any

from jaxckpt.command_line import choose_platform

choose_platform()

# ruff: noqa: E402  the platform is chosen before JAX is imported
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.residuals import Residual, block_residuals
from jaxckpt.policies import parse_policy
from jaxckpt.remat import checkpoint
from jaxckpt.stack import stack
from jaxckpt.training.sharding import Placement

DROPOUT = 0.1
# XLA of jax 0.10.2 finds no tiles for a Triton matmul of 20480 x 20480, and fails.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes in the paper's letters: heads a, hidden h, sequence s, microbatch b."""

    a: int
    h: int
    s: int
    b: int

    @property
    def sbh(self) -> int:
        return self.s * self.b * self.h

    @property
    def as2b(self) -> int:
        return self.a * self.s**2 * self.b


MODELS = {
    "22B": Model(a=64, h=6144, s=2048, b=4),
    "175B": Model(a=96, h=12288, s=2048, b=1),
    "530B": Model(a=128, h=20480, s=2048, b=1),
    "1T": Model(a=160, h=25600, s=2048, b=1),
}
PARALLEL = {"one": (1, False), "TP": (8, False), "TP+SP": (8, True)}

# Section 4 of the paper. Bytes: of sbh, of as^2b. Where: "stream" values lie between
# the tensor-parallel regions, whole on every device unless sequence-parallel.
PAPER: dict[str, tuple[int, int, str]] = {
    "layer_input": (2, 0, "stream"),  # of the first LayerNorm
    "qkv_input": (2, 0, "stream"),
    "query": (2, 0, "parallel"),
    "key": (2, 0, "parallel"),
    "value": (2, 0, "parallel"),
    "softmax": (0, 2, "parallel"),
    "softmax_mask": (0, 1, "parallel"),
    "softmax_dropped": (0, 2, "parallel"),
    "context": (2, 0, "parallel"),  # what the output projection takes
    "attention_mask": (1, 0, "stream"),
    "mlp_norm_input": (2, 0, "stream"),  # of the second LayerNorm
    "mlp_input": (2, 0, "stream"),
    "gelu_input": (8, 0, "parallel"),
    "gelu_output": (8, 0, "parallel"),
    "mlp_mask": (1, 0, "stream"),
}
NAMES = [name for name in PAPER if name != "layer_input"]  # the carry, kept anyway
KEEPS = {
    "naive": list(PAPER),
    "paper": list(PAPER),
    "selective": [name for name, (_, scores, _) in PAPER.items() if not scores],
    "full": ["layer_input"],
}


def policy_text(policy: str) -> str:
    """The policy in jaxckpt's language."""
    if policy in ("naive", "full"):
        return "none" if policy == "naive" else policy
    return "save:" + ",".join(name for name in KEEPS[policy] if name in NAMES)


def paper_bytes(model: Model, policy: str, t: int, sequence: bool) -> dict[str, int]:
    """Bytes per layer and device of every value the paper's list keeps."""
    return {
        name: (of_sbh * model.sbh + of_as2b * model.as2b)
        // (t if where == "parallel" or sequence else 1)
        for name in KEEPS[policy]
        for of_sbh, of_as2b, where in [PAPER[name]]
    }


# The block


def weight_shapes(model: Model) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and logical axes of every weight of a layer."""
    h, a, d, f = model.h, model.a, model.h // model.a, 4 * model.h
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "out_kernel": ((a, d, h), ("heads", "head_dim", "residual")),
        "out_bias": ((h,), ("norm",)),
        "fc1_kernel": ((h, f), ("embed", "mlp")),
        "fc1_bias": ((f,), ("mlp",)),
        "fc2_kernel": ((f, h), ("mlp", "residual")),
        "fc2_bias": ((h,), ("norm",)),
    }
    for name in ("query", "key", "value"):
        shapes[f"{name}_kernel"] = ((h, a, d), ("embed", "heads", "head_dim"))
        shapes[f"{name}_bias"] = ((a, d), ("heads", "head_dim"))
    for norm in ("attention_norm", "mlp_norm"):
        shapes[f"{norm}_scale"] = shapes[f"{norm}_bias"] = ((h,), ("norm",))
    return shapes


STREAM = ("batch", "residual_time", "residual")
FULL_TIME = ("batch", "time", "residual")
HEADS = ("batch", "time", "heads", "head_dim")
SCORES = ("batch", "heads", "time", "lookup_time")  # keys are whole
MLP = ("batch", "time", "mlp")


def block(weights, x, key, *, placement: Placement, naive: bool = False):
    """One layer: (b, s, h) to (b, s, h), every value of the paper's list named."""
    place = placement.constrain

    def gather(y, name):
        """Names a value as it is cut: the backward pass gathers it again.

        Cut on both sides of the name; else XLA keeps what it gathers.
        """
        y = checkpoint_name(place(y, STREAM), name)
        return place(place(y, STREAM), FULL_TIME)

    keys = jax.random.split(key, 3)
    x = place(x, STREAM)
    normed = layer_norm(
        x, weights["attention_norm_scale"], weights["attention_norm_bias"]
    )
    normed = gather(normed, "qkv_input")

    def heads(name):
        out = jnp.einsum("bth,had->btad", normed, weights[f"{name}_kernel"])
        return checkpoint_name(place(out + weights[f"{name}_bias"], HEADS), name)

    scores = jnp.einsum("btad,bsad->bats", heads("query"), heads("key"))
    scores *= weights["query_kernel"].shape[-1] ** -0.5
    softmax = naive_softmax if naive else causal_softmax
    y = softmax(place(scores, SCORES))
    y = dropout(y, keys[0], "softmax_mask", functools.partial(place, axes=SCORES))
    y = checkpoint_name(y, "softmax_dropped")
    y = jnp.einsum("bats,bsad->btad", y, heads("value"))
    y = checkpoint_name(place(y, HEADS), "context")
    y = jnp.einsum("btad,adh->bth", y, weights["out_kernel"])
    y = place(y, STREAM) + weights["out_bias"]
    in_stream = functools.partial(place, axes=STREAM)
    x = place(x + dropout(y, keys[1], "attention_mask", in_stream), STREAM)
    x = checkpoint_name(x, "mlp_norm_input")

    y = layer_norm(x, weights["mlp_norm_scale"], weights["mlp_norm_bias"])
    y = gather(y, "mlp_input")
    y = jnp.einsum("bth,hf->btf", y, weights["fc1_kernel"]) + weights["fc1_bias"]
    y = checkpoint_name(place(y, MLP), "gelu_input")
    y = checkpoint_name(jax.nn.gelu(y), "gelu_output")
    y = jnp.einsum("btf,fh->bth", y, weights["fc2_kernel"])
    y = place(y, STREAM) + weights["fc2_bias"]
    return place(x + dropout(y, keys[2], "mlp_mask", in_stream), STREAM)


def layer_norm(x, scale, bias):
    """In float32, rounded to 16 bits: recomputed from x, which alone is kept."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x32 - mean), axis=-1, keepdims=True)
    normed = (x32 - mean) * jax.lax.rsqrt(variance + 1e-5)
    return normed.astype(x.dtype) * scale + bias


def dropout(x, key, name: str, place):
    """Keeps a mask of one byte per value, not a float that is multiplied by."""
    mask = place(jax.random.bernoulli(key, 1 - DROPOUT, x.shape))
    mask = checkpoint_name(mask, name)
    return jax.lax.select(mask, x / (1 - DROPOUT), jnp.zeros_like(x))  # as Flax


def naive_softmax(scores):
    """As anyone would write it; its gradient keeps the float32 probabilities."""
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
    return checkpoint_name(jax.nn.softmax(scores).astype(jnp.bfloat16), "softmax")


@jax.custom_vjp
def causal_softmax(scores):
    """Computed in float32 from and to 16 bits; its gradient needs the output alone."""
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    masked = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
    return jax.nn.softmax(masked).astype(scores.dtype)


def _softmax_forward(scores):
    # A name given outside would be of a copy that the gradient does not use.
    probabilities = checkpoint_name(causal_softmax(scores), "softmax")
    return probabilities, probabilities


def _softmax_backward(probabilities, gradient):
    p, g = probabilities.astype(jnp.float32), gradient.astype(jnp.float32)
    scores = p * (g - jnp.sum(p * g, axis=-1, keepdims=True))
    return (scores.astype(probabilities.dtype),)


causal_softmax.defvjp(_softmax_forward, _softmax_backward)


# Counted and compiled


def counted(model: Model, policy: str, placement: Placement) -> list[Residual]:
    """What one layer keeps under a policy, besides its weights."""
    fn = functools.partial(block, placement=placement, naive=policy == "naive")
    shapes = weight_shapes(model)
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for name, (shape, _) in shapes.items()
    }
    shardings = None
    if placement.mesh.size > 1:
        cut = {name: placement.sharding(axes) for name, (_, axes) in shapes.items()}
        shardings = (cut, placement.sharding(STREAM), placement.replicated)
    kept = block_residuals(
        checkpoint(fn, parse_policy(policy_text(policy)), in_loop=True),
        weights,
        jax.ShapeDtypeStruct((model.b, model.s, model.h), jnp.bfloat16),
        jax.eval_shape(lambda: jax.random.key(0)),
        input_names=["layer_input", "dropout_key"],
        shardings=shardings,
    )
    return [residual for residual in kept if residual.name != "dropout_key"]


def compiled_memory(
    model: Model, policy: str, placement: Placement, num_layers: int
) -> dict[str, Any]:
    """Temporary and output bytes per device of a stack's forward and backward pass."""
    fn = functools.partial(block, placement=placement, naive=policy == "naive")

    def layer(x, values):
        weights, key = values
        return fn(weights, x, key), None

    layers = stack(layer, policy_text(policy), num_layers)

    def step(weights, x, keys, gradient):
        def forward(weights, x):
            return layers(x, {"run_0": (weights, keys)})[0]

        return jax.vjp(forward, weights, x)[1](gradient)

    def struct(shape, axes, dtype: Any = jnp.bfloat16):
        sharding = placement.sharding(axes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights = {
        name: struct((num_layers, *shape), (None, *axes))
        for name, (shape, axes) in weight_shapes(model).items()
    }
    x = struct((model.b, model.s, model.h), STREAM)
    keys = struct((num_layers,), (None,), jax.eval_shape(jax.random.key, 0).dtype)
    placed = jax.tree.map(lambda leaf: leaf.sharding, (weights, x))
    jitted = jax.jit(step, out_shardings=placed, compiler_options=COMPILER_OPTIONS)
    compiled, _ = compile_step(jitted, weights, x, keys, x, platform="gpu")
    memory = memory_bytes(compiled)
    return {
        "temp": memory.temp_bytes or 0,
        "output": memory.output_bytes or 0,
        "copies": stack_copies(compiled.as_text(), num_layers),
    }


def stack_copies(text: str, num_layers: int) -> list[str]:
    """Copies of a value of all layers, made between the two loops, largest first."""
    found = [
        (shape.nbytes, f"{instruction.name} {shape.dtype}{list(shape.dims)}")
        for running in parse_hlo(text).instructions
        for instruction in [running.instruction]
        for shape in instruction.shapes
        if running.times == 1
        and num_layers in shape.dims
        and re.search("transpose|copy|all-gather", instruction.name)
    ]
    return [description for _, description in sorted(found, reverse=True)]
