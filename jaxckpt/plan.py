"""``python -m jaxckpt.plan``: what to keep, recompute and offload, within a budget.

Example: ``python -m jaxckpt.plan --model=llama3-8b --target=h100:8 --batch-size=8
--memory-budget=40GiB --out=plan.json``
"""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

from jaxckpt import command_line
from jaxckpt.compiler.targets import Target, check_installed, parse_target
from jaxckpt.extras import install
from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.plan_config import AUTO_MESH, PlanConfig
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.mesh_sizes import parse_mesh

PROG = "python -m jaxckpt.plan"


def main() -> None:
    args = sys.argv[1:]
    preset = command_line.value_of("--model", args, PlanConfig.model)
    default = PlanConfig(model=preset, architecture=model_config(preset))
    config = command_line.parse(default, prog=PROG)
    target = parse_target(config.target)
    if config.mesh == AUTO_MESH:
        _check_auto_mesh(config, target)
    elif target.text != "attached":
        _check_mesh(config, target.num_devices if target.is_absent else 0)
    _check_files(config)
    if target.is_absent:
        check_installed()
    command_line.choose_platform()
    _plan(config)


def _check_auto_mesh(config: PlanConfig, target: Target) -> None:
    if not target.kind or not target.is_absent:
        raise ConfigError(
            "--mesh=auto needs the GPUs and their links: a target such as "
            f"--target=h100:128x8, not {config.target}"
        )


def _check_mesh(config: PlanConfig, num_devices: int) -> None:
    mesh = parse_mesh(config.mesh)
    needed = math.prod(mesh.values())
    if num_devices and mesh and needed != num_devices:
        raise ConfigError(
            f"--mesh={config.mesh} is of {needed} devices and --target={config.target} "
            f"has {num_devices}"
        )
    sizes = mesh or {"fsdp": max(num_devices, 1)}
    check_divisible(config.train_config("none"), sizes)


def _check_files(config: PlanConfig) -> None:
    cache = Path(config.cache).absolute()
    if any(one.exists() and not one.is_dir() for one in (cache, *cache.parents)):
        raise ConfigError(f"--cache={config.cache} is no folder")
    for flag in ("out", "frontier"):
        path = getattr(config, flag)
        if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigError(f"--{flag}={path} is no file in a folder that exists")
    if config.frontier and not importlib.util.find_spec("matplotlib"):
        raise ConfigError(f"--frontier needs matplotlib: {install('plot')}")
    if config.frontier and Path(config.frontier).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(
            f"--frontier={config.frontier} must end in .png, .svg or .pdf"
        )


def _plan(config: PlanConfig) -> None:
    from jaxckpt.planner.solve import Infeasible
    from jaxckpt.training.mesh_search import plan_first, rank_meshes
    from jaxckpt.training.plan_table import draw_frontier, print_meshes, print_plan
    from jaxckpt.training.planning import plan_run

    console = command_line.make_console(markup=False, emoji=False, highlight=False)
    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, soft_wrap=True)

        def plan(run: TrainConfig) -> Any:
            return plan_run(
                run,
                config.target,
                config.memory_budget,
                offload=config.offload,
                host_budget=config.host_budget,
                cache=Path(config.cache),
                progress=progress,
            )

        run = config.train_config("none")
        try:
            if config.mesh == AUTO_MESH:
                meshes = rank_meshes(run, config.target, config.memory_budget)
                print_meshes(meshes, console)
                planned = plan_first(run, meshes, plan, progress)
            else:
                planned = plan(run)
        except Infeasible as error:
            command_line.fail(PROG, str(error), code=3)
    print_plan(planned, console)
    if config.out:
        planned.plan.save(config.out)
        console.print(f"\nwritten to {config.out}: train with --plan={config.out}")
    if config.frontier:
        draw_frontier(planned, Path(config.frontier))


if __name__ == "__main__":
    command_line.run(main, prog=PROG)
