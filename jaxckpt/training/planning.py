"""Plan a run: its step as the planner's problem, compiled candidates, and the answer.

Tracing a step for absent GPUs needs JAX on the CPU, as compiling does (see
`jaxckpt.training.job`), so the problem comes as JSON from a process of its own.
"""

import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from jaxckpt.compiler.targets import Target, parse_target
from jaxckpt.planner.layer_stack import LayerStack
from jaxckpt.planner.plan import Plan
from jaxckpt.planner.search import (
    Candidate,
    Found,
    PlanError,
    Proposal,
    check_static,
    search,
)
from jaxckpt.planner.solve import Choice, Infeasible, Link, Operation, evaluate
from jaxckpt.policies import FULL, Policy, parse_policy
from jaxckpt.training.config import AUTO, SELECTIVE, TrainConfig
from jaxckpt.training.job import Job, ask, run_job
from jaxckpt.training.mesh_sizes import resolve_mesh
from jaxckpt.training.pipeline_planning import (
    Microbatches,
    candidates,
    in_order,
    weigh,
)
from jaxckpt.training.plan_files import read_plan, read_plans
from jaxckpt.training.plan_sizes import gradient_bytes, layer_bytes, local_bytes
from jaxckpt.training.reporting import default_policies, safe_share
from jaxckpt.units import parse_bytes

_RESULT = "jaxckpt-problem: "

Offload = Literal["auto", "prefer", "never"]


class BudgetError(ValueError):
    """A budget that cannot be read here. One line."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A run's step, ready to be planned.

    Attributes:
      stack: the planner's model of it.
      values: what a policy can keep: dicts of ``name, shape, dtype, nbytes, source``.
      num_devices: of the target.
      memory_limit: bytes of one device, None when it does not say.
      host_bandwidth: bytes per second to host memory, each way.
      rates: whose rates stand in for the target's, "an H100" or "a CPU"; "" where they
        are its own.
      host_bytes: of the state, per device, in host memory whatever the plan.
    """

    stack: LayerStack
    values: list[dict[str, Any]]
    num_devices: int
    memory_limit: int | None
    host_bandwidth: float
    rates: str = ""
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A plan, and what it is compared with.

    Attributes:
      plan: the answer.
      found: how it was found.
      problem: what was planned.
      rows: compiled rows of ``none``, full remat and the best named policy that fits,
        where they compile.
      microbatches: of a pipeline: what each number of micro-batches would cost, by the
        model, ascending.
      failed: rows that do not compile, with their ``error``.
    """

    plan: Plan
    found: Found
    problem: Problem
    rows: list[dict[str, Any]]
    microbatches: Sequence[Microbatches] = ()
    failed: Sequence[dict[str, Any]] = ()


def plan_run(
    config: TrainConfig,
    target: str,
    budget: str,
    *,
    offload: Offload = "never",
    host_budget: str = "",
    cache: Path,
    compare: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> PlannedRun:
    """Finds the cheapest layer plan of a run within a budget.

    Args:
      config: the run; its policy does not matter.
      target: as `jaxckpt.compiler.targets.parse_target` reads it.
      budget: ``60GiB``, ``80%``, or nothing for the standing rule: no remat while that
        fits in 80 % of the device (85 % below 7 B parameters), else a plan for that.
      offload: "auto" moves values to host memory where that costs less than running
        them again, "prefer" wherever memory is short, "never" not at all.
      host_budget: bytes of host memory per device, as text.
      cache: folder of finished compiles.
      compare: whether to compile what the plan is compared with.
      progress: told what is being done.

    Raises:
      Infeasible: nothing fits.
      BudgetError: a share of a device whose memory is not known.
      PlanError: the step does not compile.
    """
    progress("tracing the step")
    runs = candidates(config)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        problems = list(pool.map(lambda run: find_problem(Job(run, target)), runs))
    problem = problems[0]
    limit = problem.memory_limit
    if not limit and (not budget or budget.strip().endswith("%")):
        raise BudgetError(
            f"the memory of {target} is not known, so a budget needs bytes: "
            "--memory-budget=14GiB"
        )
    budget = budget or f"{100 * safe_share(config):.0f}%"
    bytes_allowed = parse_bytes(budget, whole=limit)
    check_static(problem.stack.static, bytes_allowed)
    plan_one = functools.partial(
        _plan_one,
        target=target,
        budget=bytes_allowed,
        offload=offload,
        host_budget=host_budget,
        cache=cache,
        compare=compare,
        progress=progress,
    )
    if config.pipeline is None:
        return plan_one(config, problem)
    return _plan_pipeline(runs, problems, parse_target(target), bytes_allowed, plan_one)


def _plan_pipeline(
    runs: Sequence[TrainConfig],
    problems: Sequence[Problem],
    target: Target,
    budget: int,
    plan_one: Callable[[TrainConfig, Problem], PlannedRun],
) -> PlannedRun:
    """The plan of the fastest number of micro-batches, by the model, that has one."""
    weighed = [
        weigh(run, problem.stack, target, budget)
        for run, problem in zip(runs, problems, strict=True)
    ]
    order = in_order(weighed)
    for index in order:
        try:
            planned = plan_one(runs[index], problems[index])
        except Infeasible:
            if index == order[-1]:
                raise
        else:
            return dataclasses.replace(planned, microbatches=weighed)
    raise AssertionError("a run has at least one number of micro-batches")


def _plan_one(
    config: TrainConfig,
    problem: Problem,
    *,
    target: str,
    budget: int,
    offload: Offload,
    host_budget: str,
    cache: Path,
    compare: bool,
    progress: Callable[[str], None],
) -> PlannedRun:
    """Finds the plan of a run whose sizes are all settled."""

    def compile(text: str) -> dict[str, Any]:
        return run_job(Job(dataclasses.replace(config, policy=text), target), cache)

    if offload != "never":
        progress("compiling nothing_saveable, to see what hides transfers")
        window = _forward_seconds(compile("nothing_saveable"), problem)
        stack = dataclasses.replace(
            problem.stack,
            link=Link(
                problem.host_bandwidth,
                window,
                free=offload == "prefer",
            ),
            host_budget=_host_allowance(host_budget, problem.host_bytes),
        )
        problem = dataclasses.replace(problem, stack=stack)
    found = search(problem.stack, budget, compile, progress=progress)
    rows, failed = [], []
    if compare:
        policies = [
            "none",
            "nothing_saveable",
            *best_named(problem, config, found, budget),
        ]
        for policy in dict.fromkeys(policies):
            progress(f"compiling {policy}, to compare with")
            row = compile(policy)
            (failed if "error" in row else rows).append(row)
        found = _adopt(found, rows, budget, problem)
    plan = _plan(config, target, problem, budget, found)
    return PlannedRun(plan, found, problem, rows, failed=failed)


def _adopt(
    found: Found, rows: list[dict[str, Any]], budget: int, problem: Problem
) -> Found:
    """A compiled named policy in place of the plan, where it is better all round.

    The model ranks by estimated seconds; a policy that fits, recomputes fewer FLOPs
    and is estimated no slower (where that is known) is better whatever it says.
    """
    best = found.best.row

    def beats(row: dict[str, Any]) -> bool:
        ours, theirs = best["estimated_step_seconds"], row["estimated_step_seconds"]
        return (
            row["device_total_bytes"] <= budget
            and row["recompute_fraction"] < best["recompute_fraction"]
            and (not ours or theirs <= ours)
        )

    better = [row for row in rows if beats(row)]
    if not better:
        return found
    row = min(better, key=lambda one: one["recompute_fraction"])
    stack, choice = problem.stack, _choice(problem.stack, parse_policy(row["policy"]))
    runs = stack.num_layers * stack.iterations
    proposal = Proposal(
        layer_plan=row["applied"],
        memory=row["device_total_bytes"] - stack.fixed_bytes,
        cost=runs * choice.cost if choice else 0.0,
        flops=row["flops"]["recompute"] * problem.num_devices,
    )
    adopted = Candidate(proposal, row["device_total_bytes"], row)
    return dataclasses.replace(found, best=adopted)


def resolve_policy(
    config: TrainConfig, target: str, cache: Path, progress: Callable[[str], None]
) -> TrainConfig:
    """The run with a plan's policy in place of ``--plan`` or ``--policy=auto``.

    Raises:
      ConfigError: a plan of another model.
      Infeasible: nothing fits.
    """
    if config.plan:
        return read_plan(config)
    if config.policy_schedule:
        return dataclasses.replace(config, policy_schedule=read_plans(config))
    if config.policy.startswith(SELECTIVE):
        from jaxckpt.training.sensitivity import selective_plan

        progress("measuring the layers")
        plan = selective_plan(Job(config, target))
        return dataclasses.replace(config, policy=plan)
    if config.policy != AUTO:
        return config
    bare = dataclasses.replace(config, policy="none", memory_budget="")
    if not config.memory_budget:
        row = run_job(Job(bare, target), cache)
        share, limit = safe_share(config), row.get("memory_limit")
        if limit and row["device_total_bytes"] <= share * limit:
            return bare
    planned = plan_run(
        bare,
        target,
        config.memory_budget,
        cache=cache,
        compare=False,
        progress=progress,
    )
    return dataclasses.replace(bare, policy=planned.plan.layer_plan)


def _forward_seconds(row: dict[str, Any], problem: Problem) -> float:
    """Of one layer: by the compiled step's estimate, else by the model's."""
    phases = row.get("estimated_phase_seconds")
    if not phases:
        return problem.stack.forward_seconds
    return phases["forward"] / (problem.stack.num_layers * problem.stack.iterations)


def _choice(stack: LayerStack, policy: Policy) -> Choice | None:
    """What a layer keeps under a named policy by the model, if it can say."""
    if policy.offload or policy.rule not in ("names", "dots_saveable", FULL.rule):
        return None
    names = set(policy.save)
    if policy.rule == "dots_saveable":
        names = {
            one.name
            for one in stack.operations
            if one.name and any(stack.operations[read].flops for read in one.reads)
        }
    return evaluate(stack.operations, names)


def best_named(
    problem: Problem, config: TrainConfig, found: Found, budget: int
) -> list[str]:
    """The named policies of the default ladder, the most promising one by the model.

    Returns:
      At most one: of those that the model, as it is or as corrected, says fit, the
      cheapest; one that runs fewer FLOPs again than the plan before all others.
    """
    stack, best = problem.stack, found.best.proposal
    allowed = max(best.memory, min(one.proposal.memory for one in found.tried))
    allowed = max(allowed, budget - stack.fixed_bytes)
    promising: list[tuple[bool, float, str]] = []
    for text in default_policies(config):
        policy = parse_policy(text)
        choice = _choice(stack, policy)
        if choice is None or policy == FULL:  # which is compiled anyway
            continue
        runs = stack.num_layers * stack.iterations
        memory = runs * stack.input_bytes + choice.memory(runs)
        if memory <= allowed:
            flops = runs * stack.stages * choice.flops
            promising.append((flops >= best.flops, choice.cost, text))
    return [min(promising)[-1]] if promising else []


def make_problem(job: Job) -> dict[str, Any]:
    """Traces a run's step for a target, in this process; JSON data of a `Problem`."""
    import jax

    from jaxckpt.layers import layer_plan
    from jaxckpt.planner.graph import block_graph
    from jaxckpt.planner.roofline import kind_name, kind_of
    from jaxckpt.training.inspect import one_layer
    from jaxckpt.training.master import MASTER
    from jaxckpt.training.prepare import prepare
    from jaxckpt.training.step import make_program

    target = parse_target(job.target)
    prepared = prepare(job.config, target)
    config, placement = prepared.config, prepared.placement
    num_layers = config.planned_layers
    program = make_program(config, placement, layer_plan("none", num_layers))
    state = {name: local_bytes(part) for name, part in program.state.items()}
    layer = one_layer(config, placement)
    devices = placement.mesh.devices
    kind = kind_of(target, devices.flat[0].platform)
    graph = block_graph(
        layer.apply,
        *layer.arguments,
        kind=kind,
        shardings=layer.shardings,
        gpus_per_host=target.gpus,
        keep=config.architecture.always_kept,
    )
    x = layer.arguments[1]
    shape = layer.shardings[1].shard_shape(x.shape) if layer.shardings else x.shape
    memory = (devices.flat[0].memory_stats() or {}) if not target.is_absent else {}
    stack = {
        "operations": [dataclasses.asdict(one) for one in graph.operations],
        "num_layers": num_layers,
        "static": {
            "weights": state["params"],
            "optimizer state": state["opt_state"]
            + state.get(MASTER, 0)
            - program.host_bytes,
            "batch": sum(map(local_bytes, jax.tree.leaves(program.batch))),
        },
        "gradient_bytes": gradient_bytes(config, program),
        "layer_bytes": layer_bytes(config, program),
        "iterations": config.pipeline.iterations if config.pipeline else 1,
        "stages": config.pipeline.stages if config.pipeline else 1,
        "input_bytes": math.prod(shape) * x.dtype.itemsize + graph.kept_bytes,
        "input_name": config.architecture.value_names[0],
        "forward_seconds": graph.forward_seconds,
        "forward_flops": graph.forward_flops,
    }
    return {
        "stack": stack,
        "values": [dataclasses.asdict(value) for value in graph.values.values()],
        "host_bandwidth": kind.host_bandwidth,
        "rates": "" if target.kind else kind_name(kind),
        "host_bytes": program.host_bytes,
        "num_devices": devices.size,
        "memory_limit": target.memory_limit or memory.get("bytes_limit"),
    }


def find_problem(job: Job) -> Problem:
    """`make_problem` in a new process.

    Raises:
      PlanError: the step does not trace, with the reason.
    """
    answer, reason = ask("jaxckpt.training.planning", job, _RESULT)
    if answer is None:
        raise PlanError(f"the step cannot be traced: {reason}")
    data = json.loads(answer)
    fields = data.pop("stack")
    fields["operations"] = [
        Operation(**one | {"reads": tuple(one["reads"])})
        for one in fields["operations"]
    ]
    return Problem(stack=LayerStack(**fields), **data)


def _plan(
    config: TrainConfig, target: str, problem: Problem, budget: int, found: Found
) -> Plan:
    best = found.best
    layers = dataclasses.replace(config, policy=best.proposal.layer_plan).layers
    kept = {name for policy in layers.policies() for name in policy.names}
    sizes = resolve_mesh(config.mesh, problem.num_devices)
    return Plan(
        layer_plan=best.proposal.layer_plan,
        num_layers=problem.stack.num_layers,
        budget_bytes=budget,
        target=target,
        mesh=",".join(f"{axis}:{size}" for axis, size in sizes.items()),
        model=config.model,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        microbatches=config.pipeline.microbatches if config.pipeline else None,
        repeats=config.pipeline.repeats if config.pipeline else None,
        predicted={
            "device_total_bytes": best.predicted_bytes,
            "recompute_flops": best.proposal.flops,
            "recompute_seconds": best.proposal.cost,
            "exposed_transfer_seconds": best.proposal.exposed_seconds,
            "offloaded_bytes": best.proposal.offloaded_bytes,
        },
        compiled=best.row,
        recompute_fraction=best.row["recompute_fraction"],
        lower_bound={"recompute_seconds": found.lower_bound},
        solver={"status": "optimal", "gap": found.gap, "seconds": found.seconds},
        compiles=len(found.tried),
        values=tuple(one for one in problem.values if one["name"] in kept),
    )


def _host_allowance(budget: str, taken: int) -> float:
    """Bytes of host memory for activations, beside the state that is there."""
    return max(parse_bytes(budget) - taken, 0) if budget else math.inf


def _main() -> None:
    print(_RESULT + json.dumps(make_problem(Job.from_json(sys.stdin.read()))))


if __name__ == "__main__":
    _main()
