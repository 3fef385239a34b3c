"""Does memory grow as the square root of depth, and when does nesting stop paying?

    python -m experiments.depth

Takes about 1.5 minutes on 2 CPU cores (--fast: 15 seconds). The gradient of a stack of
equal layers, ``x + tanh(x @ w1) @ w2``, is compiled for the CPU at 4 to 256 layers
under no checkpointing, per-layer checkpointing, ``sqrt``, ``revolve:4`` and the planner
(given what ``sqrt`` takes). Temporary memory is compiled, recomputed layers are
counted. Formulas beside them, in layer inputs x, less a constant of each policy, the
working memory of a layer, which is fitted at 4 layers (7 x for none, 10 x for full and
sqrt):

    none       L (x + 2 hidden)       tanh keeps y and 1 - y; no layer again
    full       L x                    L layers again, without their last matmul
    sqrt       (K + ceil(L/K)) x      Chen et al. 2016; L more than full
    revolve:S  S x                    t(L, S) layers again, Griewank & Walther 2000

Then, at 64 layers, the batch shrinks beside the weights: where does ``sqrt`` take as
much as ``full``? And which of all group sizes takes least?

Expected: beyond its constant, memory of none, full and sqrt is the formula within 0.9
of a layer input, and within 3 % in all, at every depth (none and full within 0.001; the
0.9 is sqrt at 128 layers, else 0.3), so that it grows with the depth to the power 1, 1
and 1/2; recomputed layers are the formulas'; a plan within the bytes of ``sqrt``
recomputes less; no group size takes 5 % less than that of ``sqrt``; ``sqrt`` stops
paying when a layer's weights are a few times its input. Not as its formula says:
``revolve:4`` grows with depth, to 30 x beyond a working memory of 10 at 64 layers, and
is then behind ``sqrt`` in memory and in recomputation: its groups are no loops, and XLA
orders straight-line code as it likes.
"""

import math
from typing import Any

from experiments.common import finish, folder, options_of, write
from jaxckpt.command_line import choose_platform

choose_platform()

# ruff: noqa: E402  the platform is chosen before JAX is imported
import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxckpt import pictures
from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.layers import layer_plan, sqrt_group
from jaxckpt.layout import split_layers
from jaxckpt.planner.functions import plan as make_plan
from jaxckpt.schedules.revolve import extra_forwards
from jaxckpt.stack import stack

DIM, HIDDEN, TOKENS = 16, 64, 16384
DEPTHS = (4, 8, 16, 32, 64, 128, 256)
SLOTS = 4
POLICIES = ("none", "full", "sqrt", f"revolve:{SLOTS}")
SHRUNK_LAYERS = 64
REVOLVED = 64  # layers; beyond, straight-line code takes minutes to compile
MANY_TOKENS, FEW_TOKENS = (16384, 4096, 1024, 256, 64, 16), (16384, 16)


def layer(x, w):
    """One layer; its derivative needs x, the hidden values and little else."""
    up, down = w
    return x + jnp.tanh(x @ up) @ down, None


def weights(num_layers: int) -> tuple[ShapeDtypeStruct, ShapeDtypeStruct]:
    shapes = ((num_layers, DIM, HIDDEN), (num_layers, HIDDEN, DIM))
    up, down = (ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return up, down


def compiled_stack(plan: Any, num_layers: int, tokens: int = 0) -> dict[str, Any]:
    """Temporary bytes and counted FLOPs of the gradient of a stack."""
    layers = stack(layer, plan, num_layers)
    split = jax.eval_shape(
        lambda values: split_layers(values, plan, num_layers), weights(num_layers)
    )
    x = ShapeDtypeStruct((tokens or TOKENS, DIM), jnp.float32)

    def loss(x, values):
        return jnp.sum(layers(x, values)[0])

    step = jax.jit(jax.grad(loss, argnums=1))
    compiled, _ = compile_step(step, x, split, platform="cpu")
    flops = count_flops(step, x, split)
    return {
        "applied": str(layer_plan(plan, num_layers)),
        "temp_bytes": memory_bytes(compiled).temp_bytes,
        "total_bytes": memory_bytes(compiled).device_total_bytes,
        "recomputed_layers": num_layers * flops.recompute / flops.forward,
    }


def inputs_held(policy: str, num_layers: int) -> float:
    """The formula: layer inputs kept, none's stored values counted in inputs too."""
    if policy == "none":
        return num_layers * (1 + 2 * HIDDEN / DIM)
    if policy == "sqrt":
        size = sqrt_group(num_layers)
        return size + math.ceil(num_layers / size)
    return num_layers if policy == "full" else SLOTS


def layers_again(policy: str, num_layers: int) -> float:
    """The formula: layers that run forward again, counted by matmuls.

    Of the run that records a layer its last matmul, one of two, is left out. Of
    Revolve, between this and half a layer less for each.
    """
    if policy == "none":
        return 0
    if policy.startswith("revolve"):
        return extra_forwards(num_layers, SLOTS)
    return num_layers * (1.5 if policy == "sqrt" else 0.5)


def planned(num_layers: int, budget: int) -> dict[str, Any]:
    x = ShapeDtypeStruct((TOKENS, DIM), jnp.float32)
    one = tuple(ShapeDtypeStruct(w.shape[1:], w.dtype) for w in weights(num_layers))
    plan = make_plan(layer, x, one, budget=budget, num_layers=num_layers, target="cpu")
    return compiled_stack(plan, num_layers) | {
        "budget": budget,
        "planned_total": plan.compiled["device_total_bytes"],
        "planned_recompute": plan.recompute_fraction,
    }


def depths(chosen: tuple[int, ...]) -> list[dict[str, Any]]:
    """Every policy at every depth, beside its formulas."""
    x = TOKENS * DIM * 4
    rows = []
    for num_layers in chosen:
        for policy in POLICIES:
            if policy.startswith("revolve") and num_layers > REVOLVED:
                continue
            found = compiled_stack(policy, num_layers)
            rows.append(
                {
                    "policy": policy,
                    "layers": num_layers,
                    **found,
                    "inputs": found["temp_bytes"] / x,
                    "formula_inputs": inputs_held(policy, num_layers),
                    "formula_layers_again": layers_again(policy, num_layers),
                }
            )
            print(
                f"{num_layers:4} layers {policy:10} {rows[-1]['inputs']:8.2f} x, "
                f"formula {rows[-1]['formula_inputs']:7.1f}; again "
                f"{found['recomputed_layers']:7.1f}, formula "
                f"{rows[-1]['formula_layers_again']:7.1f}",
                flush=True,
            )
    return rows


def plans(chosen: tuple[int, ...], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The planner's answer within what sqrt takes."""
    found = []
    for num_layers in chosen:
        sqrt = next(
            row
            for row in rows
            if (row["policy"], row["layers"]) == ("sqrt", num_layers)
        )
        # The planner's program has the gradient of x too, and x and the loss as well.
        budget = sqrt["total_bytes"] + 4 * TOKENS * DIM + 64
        row = {"layers": num_layers, **planned(num_layers, budget)}
        row["inputs"] = row["temp_bytes"] / (4 * TOKENS * DIM)
        row["sqrt_recomputed_layers"] = sqrt["recomputed_layers"]
        found.append(row)
        print(
            f"{num_layers:4} layers planned    {row['inputs']:8.2f} x; again "
            f"{row['recomputed_layers']:7.1f}, sqrt {sqrt['recomputed_layers']:7.1f}: "
            f"{row['applied']}",
            flush=True,
        )
    return found


def shrinking(tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """At 64 layers, full against sqrt as a layer's input shrinks beside its weights."""
    rows = []
    for count in tokens:
        temps = {
            policy: compiled_stack(policy, SHRUNK_LAYERS, count)["temp_bytes"]
            for policy in ("full", "sqrt")
        }
        ratio = 2 * HIDDEN / count  # bytes of weights over those of x
        rows.append({"tokens": count, "weights_over_input": ratio, **temps})
        print(
            f"weights / input {ratio:6.3f}: sqrt takes "
            f"{temps['sqrt'] / temps['full']:6.1%} of full",
            flush=True,
        )
    return rows


def group_sizes(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        found = compiled_stack(f"every:{size}", SHRUNK_LAYERS)
        inputs = found["temp_bytes"] / (TOKENS * DIM * 4)
        rows.append({"group": size, "inputs": inputs})
        print(f"groups of {size:3}: {inputs:7.2f} x", flush=True)
    return rows


def constants(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of each policy, layer inputs beyond its formula at the least depth."""
    found: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["layers"]):
        found.setdefault(row["policy"], row["inputs"] - row["formula_inputs"])
    return found


def findings(result: dict[str, Any]) -> list[str]:
    """What did not come out as expected."""
    wrong = []
    constant = constants(result["depths"])
    for row in result["depths"]:
        name = f"{row['policy']} at {row['layers']} layers"
        again, formula = row["recomputed_layers"], row["formula_layers_again"]
        if row["policy"].startswith("revolve"):
            if not formula - row["layers"] / 2 <= again <= formula:
                wrong.append(f"{name} recomputes {again} layers")
            continue
        want = row["formula_inputs"] + constant[row["policy"]]
        if abs(row["inputs"] - want) > min(0.9, 0.03 * want):
            wrong.append(f"{name} takes {row['inputs']:.1f} x, not {want:.1f}")
        if abs(again - formula) > 1e-6 * formula:
            wrong.append(f"{name} recomputes {again} layers, not {formula}")
    for row in result["plans"]:
        if row["planned_total"] > row["budget"]:
            wrong.append(f"the plan of {row['layers']} layers is over its budget")
        if row["recomputed_layers"] >= row["sqrt_recomputed_layers"]:
            wrong.append(
                f"the plan of {row['layers']} layers recomputes more than sqrt"
            )
    groups = {row["group"]: row["inputs"] for row in result["groups"]}
    if groups[sqrt_group(SHRUNK_LAYERS)] > 1.05 * min(groups.values()):
        wrong.append("sqrt is not the best group size")
    ratios = [row["sqrt"] / row["full"] for row in result["shrinking"]]
    if not ratios[0] < 1 < ratios[-1]:
        wrong.append("sqrt does not stop paying")
    return wrong


def draw(result: dict[str, Any], path: Any) -> None:
    figure = pictures.new_figure(8, 7.4)
    deep, again, shrunk, groups = figure.subplots(2, 2).flat
    x = TOKENS * DIM * 4 / 2**20
    _draw_depths(deep, again, result)
    depths = sorted({row["layers"] for row in result["depths"]})
    for axes in (deep, again):
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.set_xlabel("layers")
    deep.set_yscale("log")
    deep.set_ylabel("temporary memory, MiB (compiled)")
    deep.set_title("memory against depth", fontsize=10)
    again.set_ylabel("layers run again / layers (counted)")
    again.set_title("recomputation against depth", fontsize=10)
    rows = result["shrinking"]
    shrunk.plot(
        [row["weights_over_input"] for row in rows],
        [row["sqrt"] / row["full"] for row in rows],
        marker="o", color=pictures.COLORS[0],
    )  # fmt: skip
    shrunk.axhline(1, color=pictures.LIMIT_COLOR, linestyle="--")
    shrunk.annotate(
        "as much as full", (0.01, 1), (0, 4), textcoords="offset points", fontsize=9,
        color=pictures.LIMIT_COLOR,
    )  # fmt: skip
    shrunk.set_xscale("log")
    shrunk.set_xlabel("bytes of a layer's weights / of its input")
    shrunk.set_ylabel("memory of sqrt / of full")
    shrunk.set_title(f"where nesting stops paying, {SHRUNK_LAYERS} layers", fontsize=10)
    rows = result["groups"]
    groups.plot(
        [row["group"] for row in rows], [x * row["inputs"] for row in rows],
        marker="s", color=pictures.COLORS[2],
    )  # fmt: skip
    groups.set_xscale("log", base=2)
    sizes = [row["group"] for row in rows]
    groups.set_xticks(sizes, [str(size) for size in sizes])
    groups.set_xlabel("layers per group")
    groups.set_ylabel("temporary memory, MiB (compiled)")
    groups.set_title(f"group sizes, {SHRUNK_LAYERS} layers", fontsize=10)
    for axes in (deep, again, shrunk, groups):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    handles, _ = deep.get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("a stack of equal layers, compiled for the CPU", fontsize=11)
    pictures.save(figure, path)


def _draw_depths(deep: Any, again: Any, result: dict[str, Any]) -> None:
    """Markers of what was compiled and counted, dashed lines of the formulas."""
    x = TOKENS * DIM * 4 / 2**20
    constant = constants(result["depths"])
    for number, policy in enumerate(POLICIES):
        rows = [row for row in result["depths"] if row["policy"] == policy]
        layers = [row["layers"] for row in rows]
        style = {
            "marker": pictures.MARKERS[number], "linestyle": "none",
            "color": pictures.COLORS[number], "label": policy,
        }  # fmt: skip
        dashed = {"linestyle": "--", "linewidth": 1.2, "color": style["color"]}
        deep.plot(layers, [x * row["inputs"] for row in rows], **style)
        counted = [row["recomputed_layers"] / row["layers"] for row in rows]
        again.plot(layers, counted, **style)
        held = [x * (row["formula_inputs"] + constant[policy]) for row in rows]
        deep.plot(layers, held, **dashed)
        formula = [row["formula_layers_again"] / row["layers"] for row in rows]
        again.plot(layers, formula, **dashed)
        if policy.startswith("revolve"):  # between this and half a layer less of each
            again.plot(layers, [count - 0.5 for count in formula], **dashed)
    layers = [row["layers"] for row in result["plans"]]
    style = {"marker": "*", "color": "black", "linestyle": "none", "label": "planned"}
    deep.plot(layers, [x * row["inputs"] for row in result["plans"]], **style)
    counted = [row["recomputed_layers"] / row["layers"] for row in result["plans"]]
    again.plot(layers, counted, **style)
    label = "formula; of memory, beyond a constant fitted at 4 layers"
    deep.plot([], [], linestyle="--", color="#666666", label=label)


def main() -> None:
    options = options_of(__doc__).parse_args()
    out = folder(options)
    fast = options.fast
    rows = depths((4, 16, 64) if fast else DEPTHS)
    result = {
        "layer": f"x + tanh(x @ w1) @ w2, x {TOKENS} x {DIM}, hidden {HIDDEN}, float32",
        "depths": rows,
        "plans": plans((16,) if fast else (16, 64), rows),
        "shrinking": shrinking(
            (16384, 16) if fast else (16384, 4096, 1024, 256, 64, 16)
        ),
        "groups": group_sizes((1, 8, 64) if fast else (1, 2, 4, 8, 16, 32, 64)),
    }
    result["findings"] = findings(result)
    write(out / "depth.json", result)
    draw(result, out / "depth.png")
    finish(result["findings"])


if __name__ == "__main__":
    main()
