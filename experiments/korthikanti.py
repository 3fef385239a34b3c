"""Do activation bytes per layer reach the formulas of Korthikanti et al. 2022?

    python -m experiments.korthikanti --json=experiments/results/korthikanti.json

Takes about 10 minutes on 2 CPU cores and needs the `gpu-compiler` extra. A GPT block is
written as in "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198): LayerNorm, attention and MLP with 16-bit values, dropout with 1-byte masks.
For the paper's 22B and 175B models, on one absent H100, on 8 with tensor parallelism,
and with sequence parallelism too, each policy is

* counted: what one layer keeps, `jaxckpt.compiler.residuals.block_residuals`;
* compiled: stacks of 256 and 512 layers with their backward pass, by XLA:GPU; the
  difference of their temporary memory over 256. So deep, since a shallow stack fits
  in part into gaps of the workspace. Gradients are outputs, so they are in no
  temporary memory; the table shows that the outputs grow by just the weights' bytes.

Policies: ``naive`` is no checkpointing, with the softmax of JAX; ``paper`` keeps the
paper's list, ``selective`` that without what is as^2b, ``full`` the layer's input.

Expected: ``paper``, ``selective`` and ``full`` are counted exactly as sbh(34 + 5as/h)
and its parallel and selective forms, and compiled within 0.1 %; but for 175B on one
GPU (``paper`` 1.07, ``selective`` 1.24) and TP+SP (``paper`` 1.07), where XLA:GPU
copies ``gelu_input`` of all layers into another layout between the two loops, 8sbh/t.
``naive`` keeps 1.6 to 2.1 times as much. The tensors that differ are listed under its
rows: float32 exponentials where the paper has the 16-bit softmax, two float32 values
of each LayerNorm and its 16-bit output before the scale where the paper has the input,
and four more values inside the GELU.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
from collections import Counter
from pathlib import Path
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
from jaxckpt.compiler.targets import parse_target
from jaxckpt.policies import parse_policy
from jaxckpt.remat import checkpoint
from jaxckpt.stack import stack
from jaxckpt.training.sharding import Placement, make_placement

DEPTHS = (256, 512)
DROPOUT = 0.1
TOLERANCE = 0.05


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
SCORES = ("batch", "heads", "time", "time")
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
    jitted = jax.jit(step, out_shardings=placed)
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


# The table


def differences(kept: list[Residual], want: dict[str, int]) -> list[dict[str, Any]]:
    """Tensors whose counted bytes are off by more than the tolerance, largest first.

    By name and dtype: a float32 value is none of the paper's, whatever its name.
    """
    found: Counter[tuple[str, str]] = Counter()
    for residual in kept:
        found[residual.name.split()[0], residual.dtype] += residual.nbytes
    listed = {
        (name, "bool" if name.endswith("mask") else "bfloat16"): nbytes
        for name, nbytes in want.items()
    }
    rows = [
        {
            "name": name,
            "dtype": dtype,
            "counted": found[key],
            "paper": listed.get(key, 0),
        }
        for key in {**listed, **found}
        for name, dtype in [key]
        if abs(found[key] - listed.get(key, 0)) > TOLERANCE * listed.get(key, 0)
    ]
    return sorted(rows, key=lambda row: -abs(row["counted"] - row["paper"]))


def measure(name: str, parallel: str, policy: str) -> dict[str, Any]:
    """One configuration: bytes per layer and device by paper, count and compiler."""
    model, (t, sequence) = MODELS[name], PARALLEL[parallel]
    devices = parse_target(f"h100:{t}").devices()
    placement = make_placement({"tensor": t}, devices, sequence)
    want = paper_bytes(model, policy, t, sequence)
    kept = counted(model, policy, placement)
    shallow, deep = (compiled_memory(model, policy, placement, n) for n in DEPTHS)
    layers = DEPTHS[1] - DEPTHS[0]
    return {
        "model": name,
        "parallel": parallel,
        "policy": policy,
        "jaxckpt_policy": policy_text(policy),
        "paper": sum(want.values()),
        "counted": sum(residual.nbytes for residual in kept),
        "compiled": (deep["temp"] - shallow["temp"]) / layers,
        "temp_bytes": [shallow["temp"], deep["temp"]],
        "output_bytes_per_layer": (deep["output"] - shallow["output"]) / layers,
        "weight_bytes_per_layer": weight_bytes(model, placement),
        "differences": differences(kept, want),
        "stack_copies": deep["copies"],
    }


def weight_bytes(model: Model, placement: Placement) -> int:
    """Bytes per device of a layer's 16-bit weights, and of their gradients."""
    return sum(
        2 * math.prod(placement.sharding(axes).shard_shape(shape))
        for shape, axes in weight_shapes(model).values()
    )


def is_off(row: dict[str, Any]) -> bool:
    return any(
        abs(row[kind] / row["paper"] - 1) > TOLERANCE
        for kind in ("counted", "compiled")
    )


def print_row(row: dict[str, Any]) -> None:
    sbh, mib = MODELS[row["model"]].sbh, 2**20
    figures = "".join(
        f"{row[kind] / mib:9.1f} {row[kind] / sbh:8.3f}"
        for kind in ("paper", "counted", "compiled")
    )
    ratios = "".join(
        f"{row[kind] / row['paper']:9.3f}" for kind in ("counted", "compiled")
    )
    temps = "".join(f"{temp / 2**30:10.2f}" for temp in row["temp_bytes"])
    gradients = "".join(
        f"{row[kind] / mib:8.1f}"
        for kind in ("output_bytes_per_layer", "weight_bytes_per_layer")
    )
    label = f"{row['model']:5}{row['parallel']:6}{row['policy']:10}"
    print(f"{label}{figures}{ratios}{temps}{gradients}", flush=True)
    if is_off(row):
        for tensor in row["differences"]:
            sizes = (
                f"{tensor['counted'] / mib:10.2f}, paper {tensor['paper'] / mib:8.2f}"
            )
            print(f"{'':16}{tensor['name']:20}{tensor['dtype']:9}{sizes}", flush=True)
    if abs(row["compiled"] / row["counted"] - 1) > 0.01:
        for copy in row["stack_copies"]:
            print(f"{'':16}copied by XLA: {copy}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    header = "".join(f"{kind:>9}     /sbh" for kind in ("paper", "counted", "compiled"))
    temps = "".join(f"{f'temp({depth})':>10}" for depth in DEPTHS)
    print("MiB per layer and device; ratios to the paper; temp in GiB, all layers")
    print(f"{'':21}{header}  counted compiled{temps} outputs weights")
    rows = []
    for name in options.models:
        for parallel in PARALLEL:
            for policy in KEEPS:
                rows.append(measure(name, parallel, policy))
                print_row(rows[-1])
    if options.json:
        facts = {"jax": jax.__version__, "target": "h100", "depths": DEPTHS}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
    unexplained = [
        row
        for row in rows
        if row["policy"] != "naive"
        and (row["differences"] or (is_off(row) and not row["stack_copies"]))
    ]
    if unexplained:
        raise SystemExit(f"{len(unexplained)} rows are off, and no tensor says why")


if __name__ == "__main__":
    main()
