"""``python -m jaxckpt.train``: train a transformer under a checkpoint policy.

Example: ``python -m jaxckpt.train --policy=dots_saveable``
"""

import dataclasses
import sys
import time
from pathlib import Path

from jaxckpt import command_line
from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.training.config import TrainConfig, check_divisible, resolve_mesh

PROG = "python -m jaxckpt.train"


def main() -> None:
    args = sys.argv[1:]
    preset = command_line.value_of("--model", args, TrainConfig.model)
    default = TrainConfig(model=preset, architecture=model_config(preset))
    config = command_line.parse(default, prog=PROG)
    if not config.workdir:
        folder = f"runs/{config.model}-{time.strftime('%Y%m%d-%H%M%S')}"
        config = dataclasses.replace(config, workdir=folder)
    _check_workdir(config)
    command_line.choose_platform()
    _train(config)


def _train(config: TrainConfig) -> None:
    import jax

    if config.virtual_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.virtual_devices)

    from rich.console import Console

    from jaxckpt.models.attention import choose_attention
    from jaxckpt.training.loop import train
    from jaxckpt.training.sharding import make_placement

    console = Console()
    devices = jax.devices()
    sizes = resolve_mesh(config.mesh, len(devices))
    check_divisible(config, sizes)
    architecture = config.architecture
    chosen, reason = choose_attention(
        devices[0].platform,
        getattr(devices[0], "compute_capability", None),
        architecture.compute_dtype,
        architecture.size_of_head,
        architecture.attention_dropout,
    )
    if architecture.attention == "cudnn" and chosen != "cudnn":
        raise ConfigError(f"--attention=cudnn is not possible here: {reason}")
    if architecture.attention == "auto":
        config = dataclasses.replace(
            config, architecture=dataclasses.replace(architecture, attention=chosen)
        )

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    kind, count = devices[0].device_kind, len(devices)
    where = f"1 {kind} device"
    if count > 1:
        mesh = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        where = f"{count} {kind} devices ({mesh})"
    say(
        f"{config.model}: {architecture.num_params / 1e6:,.2f} M parameters on "
        f"{where}, policy {config.policy}, in {config.workdir}"
    )
    if chosen != config.architecture.attention:
        reason = "XLA attention, as asked"
    placement = make_placement(sizes, devices, config.sequence_parallel)
    result = train(config, placement, [reason], console)
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
    command_line.run(main, prog=PROG)
