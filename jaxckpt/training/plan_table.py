"""A plan for people: the layer plan, what it costs beside others, and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxckpt.pictures import COLORS, LIMIT_COLOR, byte_unit, new_figure, save, shorten
from jaxckpt.planner.frontier import hull
from jaxckpt.planner.solve import evaluate
from jaxckpt.policies import parse_policy
from jaxckpt.receipt import host_bytes
from jaxckpt.training.mesh_search import MeshEstimate
from jaxckpt.training.planning import PlannedRun
from jaxckpt.units import format_bytes, format_milliseconds

_MESHES = 8  # of a ranking, shown
_TIGHT: dict[str, Any] = {"padding": (0, 1, 0, 0), "pad_edge": False}


def print_plan(planned: PlannedRun, console: Console) -> None:
    """Prints a plan, predicted and compiled, and what it is compared with."""
    plan, found = planned.plan, planned.found
    row, budget = plan.compiled, plan.budget_bytes
    head = f"\n{plan.model} on {plan.target}, mesh {plan.mesh}, batch {plan.batch_size}"
    console.print(f"{head}, sequence {plan.sequence_length}", style="bold")
    console.print(f"plan  {plan.layer_plan}", style="bold green", soft_wrap=True)
    if planned.microbatches:
        console.print(_microbatches(planned))
    console.print(_numbers(planned))
    console.print(_values(planned))
    console.print(_comparison(planned))
    for failed in planned.failed:
        console.print(f"{failed['policy']} does not compile: {failed['error']}")
    used = row["device_total_bytes"] / budget
    console.print(
        f"{used:.1%} of the budget of {format_bytes(budget)} is used (compiled). "
        f"Candidates compiled: {plan.compiles}; solver gap {plan.solver['gap']:.1g}, "
        f"{plan.solver['seconds']:.1f} s."
    )
    cost, bound = found.best.proposal.cost, found.lower_bound
    if cost <= planned.problem.stack.cheapest * (1 + 1e-9):
        console.print("Nothing is left to gain by more memory.", style="bold")
    elif cost > 10 * bound:
        console.print("No useful lower bound is known for this budget.")
    else:
        console.print(
            f"At most {cost / bound - 1:.1%} above the lower bound of any plan "
            f"within this budget (estimated{_rates(planned)})."
        )


def _rates(planned: PlannedRun) -> str:
    """Whose rates the model's seconds are of, where they are not the target's own."""
    rates = planned.problem.rates
    return f" at {rates}'s rates" if rates else ""


def print_meshes(meshes: Sequence[MeshEstimate], console: Console) -> None:
    """Prints the fastest meshes of a ranking, with what their step time is made of."""
    table = Table(
        title=f"{min(len(meshes), _MESHES)} fastest of {len(meshes)} meshes that fit; "
        "GiB, and ms of a step, per device (estimated on paper)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        **_TIGHT,
    )
    table.add_column("mesh", overflow="fold", min_width=20)
    for column in ("M", "state", "saved", "compute", "again", "idle", "sends", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in meshes[:_MESHES]:
        sizes = (one.state_bytes, one.activation_bytes)
        times = (
            *(one.compute_seconds, one.recompute_seconds, one.bubble_seconds),
            *(one.exposed_seconds, one.seconds),
        )
        table.add_row(
            one.text,
            str(one.microbatches) if one.microbatches > 1 else "",
            *(f"{size / 2**30:.1f}" for size in sizes),
            *(f"{1e3 * seconds:,.0f}" for seconds in times),
        )
    console.print(table)
    console.print(
        "M: micro-batches of a pipeline; saved: activations and working memory; again: "
        "recomputation; sends: collectives in the open"
    )


def _microbatches(planned: PlannedRun) -> Table:
    """What other numbers of micro-batches would cost, by the model."""
    table = Table(
        title="micro-batches, each with the best plan that fits: estimated"
        f"{_rates(planned)}, of the layers",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        **_TIGHT,
    )
    columns = ["", "idle", "activations", "compute", "recompute", "sends", "time"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan of a stage", overflow="fold")
    for one in planned.microbatches:
        schedule = one.schedule
        chosen = schedule.microbatches == planned.plan.microbatches
        table.add_row(
            str(schedule.microbatches),
            f"{schedule.bubble:.1%}",
            format_bytes(one.activation_bytes),
            format_milliseconds(one.compute_seconds),
            format_milliseconds(one.recompute_seconds),
            format_milliseconds(one.send_seconds),
            format_milliseconds(one.seconds),
            shorten(one.layer_plan, 60) or "nothing fits",
            style="bold" if chosen else None,
        )
    return table


def _numbers(planned: PlannedRun) -> Table:
    plan, row = planned.plan, planned.plan.compiled
    best = planned.found.best
    table = Table(title_justify="left", box=box.SIMPLE_HEAD, **_TIGHT)
    table.add_column("per device")
    table.add_column("predicted", justify="right")
    table.add_column("compiled", justify="right")
    table.add_row(
        "total",
        format_bytes(best.predicted_bytes),
        format_bytes(row["device_total_bytes"]),
    )
    table.add_row("temporary", "", format_bytes(row["temp_bytes"]))
    table.add_row(
        "host",
        format_bytes(plan.predicted.get("offloaded_bytes", 0)),
        format_bytes(host_bytes(row)),
    )
    share = plan.predicted["recompute_flops"] / planned.problem.num_devices
    useful = sum(row["flops"].values()) - row["flops"]["recompute"]
    table.add_row(
        "recomputed FLOPs",
        f"{share / useful:.2%} of the step" if useful else "?",
        f"{row['recompute_fraction']:.2%} of the step",
    )
    exposed = plan.predicted.get("exposed_transfer_seconds", 0.0)
    if plan.predicted.get("offloaded_bytes"):
        table.add_row(
            f"transfer that does not hide (estimated{_rates(planned)})",
            format_milliseconds(exposed),
            "",
        )
    return table


def _values(planned: PlannedRun) -> Table:
    """What each kind of layer keeps, and where in the source it is made."""
    table = Table(
        title="kept per layer", title_justify="left", box=box.SIMPLE_HEAD, **_TIGHT
    )
    for column in ("layers", "value", "in", "bytes", "made at"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    known = {value["name"]: value for value in planned.plan.values}
    for policy, layers, _ in planned.plan.layers.leaves():
        label = str(layers)
        if not policy.names:
            table.add_row(label, str(policy), "", "", "")
        places = {"device": policy.save, "host": policy.offload}
        for place, names in places.items():
            for name in sorted(names, key=lambda one: -known[one]["nbytes"]):
                value = known[name]
                size = format_bytes(value["nbytes"])
                table.add_row(label, name, place, size, value["source"])
                label = ""
    return table


def _comparison(planned: PlannedRun) -> Table:
    table = Table(
        title="beside others: bytes compiled, recomputation counted, step estimated",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        **_TIGHT,
    )
    table.add_column("", overflow="fold", min_width=10)
    for column in ("total", "recompute", "step", "within budget"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [("this plan", planned.plan.compiled)]
    rows += [(row["policy"], row) for row in planned.rows]
    for label, row in rows:
        over = row["device_total_bytes"] - planned.plan.budget_bytes
        seconds = row["estimated_step_seconds"]
        table.add_row(
            label,
            format_bytes(row["device_total_bytes"]),
            f"{row['recompute_fraction']:.2%}",
            format_milliseconds(seconds) if seconds else "?",
            "yes" if over <= 0 else f"+{format_bytes(over)}",
        )
    return table


def draw_frontier(planned: PlannedRun, path: Path) -> None:
    """Draws recomputation cost against memory: the model's frontier, what was compiled
    on the way, the named policies, and the budget."""
    stack, found = planned.problem.stack, planned.found
    shift = found.best.compiled_bytes - found.best.proposal.memory
    size, unit = byte_unit(planned.plan.budget_bytes)
    points = hull([(one.memory, one.cost) for one in map(stack.uniform, stack.choices)])
    figure = new_figure(8, 5.6)
    axes = figure.subplots()
    axes.plot(
        [(x + shift) / size for x, _ in points],
        [1e3 * y for _, y in points],
        color=COLORS[0],
        label="frontier: least recomputation by the model (estimated)",
    )
    tried = [one for one in found.tried if one is not found.best]
    if tried:
        axes.plot(
            [one.compiled_bytes / size for one in tried],
            [1e3 * one.proposal.cost for one in tried],
            "o",
            color=COLORS[4],
            label="other candidates, compiled",
        )
    named = [row for row in planned.rows if row["policy"] != "none"]
    for row, marker in zip(named, "sDv^", strict=False):
        policy = parse_policy(row["policy"])
        if policy.rule not in ("names", "nothing_saveable"):
            continue
        axes.plot(
            row["device_total_bytes"] / size,
            1e3 * stack.num_layers * evaluate(stack.operations, policy.save).cost,
            marker,
            color=COLORS[3],
            label=f"{shorten(row['policy'], 48)}, compiled",
        )
    axes.plot(
        found.best.compiled_bytes / size,
        1e3 * found.best.proposal.cost,
        "*",
        markersize=16,
        color=COLORS[2],
        label="this plan, compiled",
    )
    axes.axvline(
        planned.plan.budget_bytes / size,
        color=LIMIT_COLOR,
        linestyle="--",
        label=f"budget {format_bytes(planned.plan.budget_bytes)}",
    )
    axes.set_xlabel(f"device memory, {unit}")
    axes.set_ylabel(
        f"recomputation and keeping, ms per step\n(estimated{_rates(planned)})"
    )
    axes.set_title(f"{planned.plan.model} on {planned.plan.target}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    save(figure, path)
