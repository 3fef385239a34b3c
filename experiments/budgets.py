"""Does a budget in bytes hold, and what does it buy over the named policies?

    python -m experiments.budgets

Plans llama3-8b on 8 absent H100s (fsdp:8, one sequence of 8192 tokens per GPU) for ten
budgets, from just above full remat's memory to just below that of no remat. Beside each
plan stands the named policy that recomputes least among those that fit the budget: of
ours and a mix of two by layer, JAX's own, MaxText's ladder, Megatron's and DeepSpeed's
(that one also with host memory). Takes about 18 minutes on 2 CPU cores and needs the
`gpu-compiler` extra; --fast takes 2 and does not need it: the model `tiny` on a CPU,
three budgets. Policies that come to the same are compiled once.

Expected: every compiled peak within its budget, and at least 95 % of it used or nothing
left to gain; cost that falls as the budget grows; at no budget more recomputed FLOPs
than the best named policy, and at least 20 % fewer on average over the budgets at which
that one recomputes anything. (Above the memory of all matmuls' results neither does.)
"""

import statistics
import time
from pathlib import Path
from typing import Any

from experiments.common import (
    CACHE,
    check_compiler,
    finish,
    folder,
    options_of,
    write,
)
from jaxckpt.command_line import choose_platform

choose_platform()

# ruff: noqa: E402  the platform is chosen before JAX is imported
from jaxckpt import pictures
from jaxckpt.models.presets import model_config
from jaxckpt.plan_config import PlanConfig
from jaxckpt.training.job import Job, run_job
from jaxckpt.training.planning import plan_run
from jaxckpt.training.reporting import default_policies

GIB = 2**30
JAX_POLICIES = (
    "none",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)
MAXTEXT = (
    "maxtext:minimal_with_context",
    "maxtext:minimal",
    "maxtext:save_dot_with_context_except_mlp",
    "maxtext:save_dot_except_mlpwi",
    "maxtext:save_dot_except_mlp",
    "maxtext:save_qkv_proj",
    "maxtext:save_out_proj",
    "maxtext:full",
)
FRAMEWORKS = (
    *MAXTEXT,
    "megatron:selective",
    "megatron:full:uniform:4",
    "megatron:full:block:4",
    "deepspeed:cpu",
)


def named_rows(config: PlanConfig, cache: Path) -> list[dict]:
    """Compiled rows of all named policies; one of them also offloads."""
    model = config.architecture
    depth, half = model.num_layers, model.num_layers // 2
    ours = [
        p for p in default_policies(config.train_config("none")) if "offload" not in p
    ]
    inner = ours[2]  # with which no matmul runs twice
    mix = f"{half}x{inner}+{depth - half}xfull"
    named = (*JAX_POLICIES, *ours, mix, "sqrt", "every:4", *FRAMEWORKS)
    rows, compiled = [], {}
    for policy in dict.fromkeys(named):
        run = config.train_config(policy)
        text = str(run.layers)
        if text not in compiled:
            compiled[text] = run_job(Job(run, config.target), cache)
        row = compiled[text] | {"policy": policy}
        if "error" in row:
            print(f"{policy} failed: {row['error']}")
            continue
        rows.append(row)
        print(
            f"{policy:45} {row['device_total_bytes'] / GIB:7.2f} GiB  recompute "
            f"{row['recompute_fraction']:7.2%}",
            flush=True,
        )
    return rows


def plan_row(config: PlanConfig, budget: int, named: list[dict], cache: Path) -> dict:
    """One budget: the plan, and the named policy that fits and recomputes least."""
    start = time.perf_counter()
    planned = plan_run(
        config.train_config("none"),
        config.target,
        str(budget),
        cache=cache,
        compare=False,
    )
    plan, found = planned.plan, planned.found
    best = min(
        (row for row in named if row["device_total_bytes"] <= budget),
        key=lambda row: row["recompute_fraction"],
    )
    cheapest = planned.problem.stack.cheapest
    return {
        "budget_bytes": budget,
        "compiled_bytes": plan.compiled["device_total_bytes"],
        "predicted_bytes": plan.predicted["device_total_bytes"],
        "layer_plan": plan.layer_plan,
        "cost_ms": 1e3 * found.best.proposal.cost,
        "lower_bound_ms": 1e3 * found.lower_bound,
        "recompute_fraction": plan.recompute_fraction,
        "predicted_flops_fraction": _predicted_fraction(planned),
        "estimated_step_ms": 1e3 * (plan.compiled["estimated_step_seconds"] or 0),
        "nothing_left_to_gain": found.best.proposal.cost <= cheapest * (1 + 1e-9),
        "best_named": best["policy"],
        "best_named_recompute": best["recompute_fraction"],
        "best_named_step_ms": 1e3 * (best["estimated_step_seconds"] or 0),
        "compiles": plan.compiles,
        "seconds": time.perf_counter() - start,
    }


def _predicted_fraction(planned) -> float:
    row = planned.plan.compiled
    useful = sum(row["flops"].values()) - row["flops"]["recompute"]
    share = planned.plan.predicted["recompute_flops"] / planned.problem.num_devices
    return share / useful


def is_over(row: dict) -> bool:
    return row["compiled_bytes"] > row["budget_bytes"]


def findings(rows: list[dict]) -> list[str]:
    """What did not come out as expected."""
    found = []
    for row in rows:
        budget = f"{row['budget_bytes'] / GIB:.2f} GiB"
        if is_over(row):
            found.append(f"{budget}: over budget")
        used = row["compiled_bytes"] / row["budget_bytes"]
        if used < 0.95 and not row["nothing_left_to_gain"]:
            found.append(f"{budget}: {used:.1%} used")
        if row["recompute_fraction"] > row["best_named_recompute"] + 1e-9:
            found.append(f"{budget}: recomputes more than {row['best_named']}")
    costs = [row["cost_ms"] for row in rows]
    if costs != sorted(costs, reverse=True):
        found.append(f"cost does not fall: {[round(cost, 1) for cost in costs]}")
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Memory against recomputation: plans, and named policies beside them."""
    figure = pictures.new_figure(8, 6.6)
    axes = figure.subplots()
    largest = max(row["device_total_bytes"] for row in result["named"])
    size, unit = pictures.byte_unit(largest)
    plans = sorted(
        {
            (row["compiled_bytes"] / size, 100 * row["recompute_fraction"])
            for row in result["rows"]
        }
    )
    axes.plot(
        *zip(*plans, strict=True), "*", color="black", markersize=13,
        label=f"plans for {len(result['rows'])} budgets: {len(plans)} different",
    )  # fmt: skip
    seen: dict[tuple[float, float], list[str]] = {}
    for row in result["named"]:
        place = row["device_total_bytes"] / size, 100 * row["recompute_fraction"]
        name = pictures.wrap(row["policy"], 44)
        moves = "offload" in row["policy"] or row["policy"].endswith(":cpu")
        seen.setdefault(place, []).append(name + " (and host memory)" * moves)
    for number, ((x, y), names) in enumerate(sorted(seen.items())):
        axes.plot(
            x, y, pictures.MARKERS[number % 12], markersize=9,
            color=pictures.COLORS[number % 7], label="\n".join(names),
            fillstyle="full" if number < 7 else "none",
            markeredgecolor="white" if number < 7 else None,
        )  # fmt: skip
    axes.set_xlabel(f"device memory, {unit} (compiled)")
    axes.set_ylabel("recomputed matmul FLOPs, % of the step (counted)")
    axes.set_title(f"{result['model']} on {result['target']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    pictures.save(figure, path)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--mesh", default="fsdp:8")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--budgets", type=int, default=10)
    parser.set_defaults(cache=CACHE)
    if parser.parse_known_args()[0].fast:
        small = {"model": "tiny", "target": "cpu", "mesh": "", "batch_size": 16}
        parser.set_defaults(**small, budgets=3)
    options = parser.parse_args()
    out = folder(options)
    check_compiler(options.target)
    config = PlanConfig(
        model=options.model,
        target=options.target,
        mesh=options.mesh,
        batch_size=options.batch_size,
        architecture=model_config(options.model),
    )
    cache = options.cache
    named = named_rows(config, cache)
    total = {row["policy"]: row["device_total_bytes"] for row in named}
    low, high = 1.005 * total["nothing_saveable"], 0.995 * total["none"]
    rows = []
    for number in range(options.budgets):
        budget = round(low * (high / low) ** (number / (options.budgets - 1)))
        row = plan_row(config, budget, named, cache)
        rows.append(row)
        print(
            f"budget {budget / GIB:6.2f}  compiled {row['compiled_bytes'] / GIB:6.2f} "
            f"({row['compiled_bytes'] / budget:6.1%})  recompute "
            f"{row['recompute_fraction']:7.2%}  best named "
            f"{row['best_named_recompute']:7.2%} {row['best_named']}  "
            f"step {row['estimated_step_ms']:.0f} ms ({row['best_named_step_ms']:.0f}) "
            f"{row['compiles']} compiles, {row['seconds']:.0f} s\n    "
            f"{row['layer_plan']}",
            flush=True,
        )
    less = [
        1 - row["recompute_fraction"] / row["best_named_recompute"]
        for row in rows
        if row["best_named_recompute"]
    ]
    average = statistics.mean(less) if less else 0.0
    print(
        f"on average {average:.1%} fewer recomputed FLOPs than the best named policy, "
        f"over the {len(less)} budgets at which that one recomputes anything"
    )
    wrong = findings(rows)
    if options.fast:  # of a CPU, whose costs are not those of FLOPs
        wrong = [f"{row['budget_bytes']}: over budget" for row in rows if is_over(row)]
    kept = ("policy", "device_total_bytes", "recompute_fraction")
    result = {
        "model": options.model,
        "target": options.target,
        "average_fewer_recomputed_flops": average,
        "averaged_over_budgets": len(less),
        "rows": rows,
        "named": [{key: row[key] for key in kept} for row in named],
    }
    write(out / "budgets.json", result)
    draw(result, out / "budgets.png")
    if average < 0.2 and not options.fast:
        wrong.append(f"{average:.1%} fewer recomputed FLOPs on average")
    finish(wrong)


if __name__ == "__main__":
    main()
