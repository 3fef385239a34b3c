"""``python -m jaxckpt.train``: train a transformer under a checkpoint policy.

Example: ``python -m jaxckpt.train --policy=dots_saveable``
"""

import dataclasses
import importlib.util
import os
import sys
import time
from pathlib import Path

from jaxckpt import command_line
from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.processes import Group, join, leaving_together, process_numbers

PROG = "python -m jaxckpt.train"


def main() -> None:
    args = sys.argv[1:]
    preset = command_line.value_of("--model", args, TrainConfig.model)
    default = TrainConfig(model=preset, architecture=model_config(preset))
    config = command_line.parse(default, prog=PROG)
    if not config.workdir:
        if process_numbers(config, os.environ):
            raise ConfigError(
                "several processes need --workdir, a folder that all of them share"
            )
        folder = f"runs/{config.model}-{time.strftime('%Y%m%d-%H%M%S')}"
        config = dataclasses.replace(config, workdir=folder)
    _check_workdir(config)
    command_line.choose_platform()
    group = join(config, PROG)
    with group.watched():
        _train(_planned(config, group), group, config)


def _planned(config: TrainConfig, group: Group) -> TrainConfig:
    """The run with the policy of its plan; ``auto`` is planned now, by process 0."""
    from jaxckpt.compiler.targets import Target
    from jaxckpt.planner.solve import Infeasible
    from jaxckpt.training.group_target import group_target
    from jaxckpt.training.planning import resolve_policy
    from jaxckpt.training.prepare import prepare

    if not config.plan and not config.is_planned:
        return config
    console = command_line.make_console(markup=False, emoji=False, highlight=False)
    run, target, found = config, "attached", {}
    if group.count > 1 and not config.plan and not config.policy_schedule:
        # Every process asks for the devices: they are found together.
        devices = prepare(config, Target("attached")).placement.mesh.devices
        kind = devices.flat[0].device_kind
        run, target = group_target(config, group.count, kind, devices.size)
    if group.is_main:
        try:
            with console.status("planning") as status:
                cache = Path(config.workdir) / "plan-cache"
                planned = resolve_policy(run, target, cache, status.update)
        except Infeasible as error:
            command_line.fail(PROG, str(error), code=3)
        names = ("policy", "policy_schedule", "pipeline_microbatches")
        found = {name: getattr(planned, name) for name in names}
        console.print(
            f"plan: {planned.policy_schedule or planned.policy}", soft_wrap=True
        )
    found = group.agree("plan", found)
    return dataclasses.replace(config, plan="", memory_budget="", **found)


def _train(config: TrainConfig, group: Group, asked: TrainConfig) -> None:
    from jaxckpt.compiler.targets import Target
    from jaxckpt.training.loop import train
    from jaxckpt.training.offload_check import check_offload
    from jaxckpt.training.plan_files import planned_elsewhere
    from jaxckpt.training.prepare import prepare

    console = command_line.make_console(quiet=not group.is_main)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    prepared = prepare(config, Target("attached"))
    config, mesh = prepared.config, prepared.placement.mesh
    with console.status("checking that what offloads works here"):
        check_offload(config, mesh.local_devices[0])
    kind = mesh.devices.flat[0].device_kind
    where = f"1 {kind} device"
    policy = config.policy_schedule or config.policy
    if mesh.size > 1:
        sizes = ", ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1)
        where = f"{mesh.size} {kind} devices ({sizes})"
    if group.count > 1:
        where += f" of {group.count} processes"
    say(
        f"{config.model}: {config.architecture.num_params / 1e6:,.2f} M parameters on "
        f"{where}, policy {policy}, in {config.workdir}"
    )
    notes = [prepared.attention, *prepared.notes, *planned_elsewhere(asked.plan, mesh)]
    result = train(
        config,
        prepared.placement,
        notes,
        console,
        asked="" if config.policy_schedule else asked.plan or asked.policy,
    )
    parts = []
    if result.first_loss is None:
        parts.append("nothing was left to do; a larger --steps goes on")
    else:
        parts.append(f"loss {result.first_loss:.3f} -> {result.last_loss:.3f}")
    parts += [
        f"validation {value:.3f} {unit.replace('_', ' ')}"
        for unit, value in result.validation.items()
    ]
    say(f"\nstep {result.steps}: {', '.join(parts)}")
    if result.receipt and group.is_main and importlib.util.find_spec("matplotlib"):
        from jaxckpt.pictures import draw_receipt

        draw_receipt(result.receipt, Path(config.workdir) / "receipt.png")
    say(f"receipt, metrics and snapshots are in {config.workdir}")


def _check_workdir(config: TrainConfig) -> None:
    """Resuming needs a complete snapshot, and starting needs that there is none."""
    folder = Path(config.workdir) / "snapshots"
    # While it is being written, a snapshot has another name than its step.
    complete = folder.is_dir() and any(
        entry.name.isdecimal() for entry in folder.iterdir()
    )
    if config.resume and not complete:
        raise ConfigError(
            f"--resume: no complete snapshot in {folder}; without --resume the run "
            "starts anew there"
        )
    if complete and not config.resume:
        raise ConfigError(
            f"{config.workdir} holds a run already; add --resume, or choose another "
            "--workdir"
        )


if __name__ == "__main__":
    with leaving_together():
        command_line.run(main, prog=PROG)
