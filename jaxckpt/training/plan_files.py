"""Plan files that a run is given: read, and refused where they are for another run."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from jaxckpt.compiler.gpu_kinds import KINDS
from jaxckpt.models.presets import ConfigError
from jaxckpt.planner.plan import Plan
from jaxckpt.schedules.pipeline import PipelineSchedule
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.mesh_sizes import parse_mesh
from jaxckpt.training.policy_schedule import is_plan_file, split_entry
from jaxckpt.units import format_bytes


def read_plan(config: TrainConfig) -> TrainConfig:
    """The run under the plan in the file ``config.plan``, which must be of its model.

    In a pipeline with as many micro-batches as the plan has.
    """
    plan = Plan.load(config.plan)
    if (plan.model, plan.num_layers) != (config.model, config.planned_layers):
        of_stage = " in a stage" if config.pipeline else ""
        raise ConfigError(
            f"--plan={config.plan} is for {plan.num_layers} layers of {plan.model}, "
            f"and this is {config.model} with {config.planned_layers}{of_stage}"
        )
    if config.pipeline and plan.microbatches and not config.pipeline_microbatches:
        config = dataclasses.replace(config, pipeline_microbatches=plan.microbatches)
    sizes = {
        "--batch-size": (plan.batch_size, config.batch_size),
        "--seq-len": (plan.sequence_length, config.sequence_length),
        **_pipeline_sizes(plan, config.pipeline),
    }
    for flag, (planned, here) in sizes.items():
        if planned is not None and planned != here:
            raise ConfigError(
                f"--plan={config.plan} is for {flag}={planned}, and this is {here}: "
                "its budget would not hold; plan again"
            )
    return dataclasses.replace(config, plan="", policy=plan.layer_plan)


def _pipeline_sizes(plan: Plan, here: PipelineSchedule | None) -> dict[str, Any]:
    if here is None:
        return {}
    return {
        "--pipeline-microbatches": (plan.microbatches, here.microbatches),
        "--pipeline-repeats": (plan.repeats, here.repeats),
    }


def planned_elsewhere(path: str, mesh: Mesh) -> tuple[str, ...]:
    """A note where the plan of a run was compiled for other devices or another mesh."""
    if not path:
        return ()
    plan, kind = Plan.load(path), mesh.devices.flat[0].device_kind
    word = plan.target.partition(":")[0]
    planned_kind = KINDS[word].name if word in KINDS else {"cpu": word}.get(word, kind)
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    planned = {axis: n for axis, n in parse_mesh(plan.mesh).items() if n > 1}
    if kind == planned_kind and sizes == planned:
        return ()
    return (
        f"{path} was compiled for {plan.target}, mesh {plan.mesh}; its budget of "
        f"{format_bytes(plan.budget_bytes)} was not checked for these devices",
    )


def read_plans(config: TrainConfig) -> str:
    """The schedule with the layer plans that its plan files hold."""

    def read(entry: str) -> str:
        path, length = split_entry(entry)
        if not is_plan_file(path):
            return entry
        seq_len = length or config.seq_len
        run = dataclasses.replace(
            config, plan=path, policy_schedule="", seq_len=seq_len
        )
        try:
            layers = read_plan(run).policy
        except ConfigError as error:
            told = str(error).removeprefix("--plan=")
            raise ConfigError(f"--policy-schedule: {told}") from error
        return f"{length}={layers}" if length else layers

    schedule = config.schedule
    entries = tuple(map(read, schedule.entries))
    return str(dataclasses.replace(schedule, entries=entries))
