"""``python -m jaxckpt.sensitivity``: what is worth keeping, measured on this device.

Example: ``python -m jaxckpt.sensitivity --model=gpt2-124m --batch-size=4
--threshold=50%``
"""

import json
import sys
from pathlib import Path
from typing import Any

from jaxckpt import command_line
from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.sensitivity_config import SensitivityConfig
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.mesh_sizes import resolve_mesh
from jaxckpt.units import format_bytes, parse_share

PROG = "python -m jaxckpt.sensitivity"


def main() -> None:
    args = sys.argv[1:]
    preset = command_line.value_of("--model", args, SensitivityConfig.model)
    default = SensitivityConfig(model=preset, architecture=model_config(preset))
    config = command_line.parse(default, prog=PROG)
    if config.virtual_devices:
        sizes = resolve_mesh(config.mesh, config.virtual_devices)
        check_divisible(config.train_config(), sizes)
    path = Path(config.json)
    if config.json and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--json={config.json} is no file in a folder that exists")
    command_line.choose_platform()
    _measure(config)


def _measure(config: SensitivityConfig) -> None:
    from jaxckpt.compiler.targets import Target
    from jaxckpt.training.prepare import prepare
    from jaxckpt.training.sensitivity import measure

    threshold = parse_share(config.threshold)
    console = command_line.make_console(markup=False, emoji=False, highlight=False)
    with console.status("") as status:
        prepared = prepare(config.train_config(), Target("attached"))
        found = measure(
            prepared.config,
            prepared.placement,
            rounds=config.rounds,
            progress=status.update,
        )
    device = prepared.placement.mesh.devices.flat[0].device_kind
    plan = found.plan(threshold)
    _print(config, found, plan, device, console)
    if config.json:
        data = {
            "model": config.model,
            "device": device,
            "threshold": threshold,
            "values": [
                {
                    "name": value.name,
                    "bytes_per_layer": value.nbytes,
                    "recompute_seconds": value.seconds,
                    "seconds_per_byte": value.seconds_per_byte,
                }
                for value in found.values
            ],
            "layer_effects": found.effects,
            "rounding": found.rounding,
            "full_seconds": found.full_seconds,
            "none_seconds": found.none_seconds,
            "layer_plan": str(plan),
        }
        Path(config.json).write_text(json.dumps(data, indent=2) + "\n")


def _print(config: Any, found: Any, plan: Any, device: str, console: Any) -> None:
    from rich import box
    from rich.table import Table

    console.print(f"\n{config.model} on {device}, one layer", style="bold")
    console.print(
        f"gradient {1e3 * found.full_seconds:.2f} ms under full remat, "
        f"{1e3 * found.none_seconds:.2f} ms without (measured)"
    )
    table = Table(
        title="keeping one value: bytes counted, time measured",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("value")
    for column in ("bytes", "saves", "ms per GiB"):
        table.add_column(column, justify="right")
    for value in found.values:
        table.add_row(
            value.name,
            format_bytes(value.nbytes),
            f"{1e3 * value.seconds:.2f} ms",
            f"{1e3 * 2**30 * value.seconds_per_byte:.0f}",
        )
    console.print(table)
    worst = max(range(len(found.effects)), key=found.effects.__getitem__)
    console.print(
        f"recomputing moves a layer's gradient by at most {found.effects[worst]:.1e} "
        f"(layer {worst}; one rounding is {found.rounding:.1e}, measured)"
    )
    if found.sensitive_layers:
        layers = ", ".join(map(str, found.sensitive_layers))
        console.print(f"sensitive layers keep everything: {layers}")
    console.print(
        f"plan for {config.threshold} of the named values' bytes: {plan}",
        style="bold green",
        soft_wrap=True,
    )


if __name__ == "__main__":
    command_line.run(main, prog=PROG)
