"""``python -m jaxckpt.bench``: time and memory of policies, measured on this device.

Example: ``python -m jaxckpt.bench --policies none dots_saveable full --plot=bench.png``
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

from jaxckpt import command_line
from jaxckpt.bench_config import BenchConfig
from jaxckpt.extras import install
from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.mesh_sizes import resolve_mesh

PROG = "python -m jaxckpt.bench"
_QUIET = 5.0  # seconds between two lines of progress that is not shown live


def main() -> None:
    args = sys.argv[1:]
    preset = command_line.value_of("--model", args, BenchConfig.model)
    default = BenchConfig(model=preset, architecture=model_config(preset))
    config = command_line.parse(default, prog=PROG)
    if config.virtual_devices:
        sizes = resolve_mesh(config.mesh, config.virtual_devices)
        check_divisible(config.train_config("none"), sizes)
    _check_files(config)
    command_line.choose_platform()
    _bench(config)


def _check_files(config: BenchConfig) -> None:
    """Before minutes of measuring, not after."""
    for flag in ("json", "plot"):
        path = getattr(config, flag)
        if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigError(f"--{flag}={path} is no file in a folder that exists")
    if config.plot and not importlib.util.find_spec("matplotlib"):
        raise ConfigError(f"--plot needs matplotlib: {install('plot')}")
    if config.plot and Path(config.plot).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot={config.plot} must end in .png, .svg or .pdf")


def _bench(config: BenchConfig) -> None:
    from jaxckpt.training.benchmark import measure
    from jaxckpt.training.benchmark_rows import summarize
    from jaxckpt.training.benchmark_table import draw_bench, print_bench
    from jaxckpt.training.job import Job
    from jaxckpt.training.reporting import default_policies

    console = command_line.make_console(markup=False, emoji=False, highlight=False)
    none = config.train_config("none")
    policies = config.policies or default_policies(none)
    jobs = {
        policy: Job(config.train_config(policy), "attached")
        for policy in dict.fromkeys(policies)
    }
    said = 0.0
    with console.status("") as status:

        def progress(text: str, is_stage: bool) -> None:
            nonlocal said
            status.update(text)
            now = time.monotonic()
            if not console.is_terminal and (is_stage or now - said > _QUIET):
                console.print(text, soft_wrap=True)
                said = now

        measured = measure(jobs, config.steps, progress)
    result = summarize(measured, none)
    good = [row for row in result["rows"] if "error" not in row]
    if not good and result["rows"][0]["bad_input"]:
        raise ConfigError(result["rows"][0]["error"])
    print_bench(result, console)
    if config.json:
        Path(config.json).write_text(json.dumps(result, indent=2) + "\n")
    if not good:
        command_line.fail(PROG, "no policy ran; the reasons are above", code=1)
    if config.plot:
        draw_bench(result, Path(config.plot))


if __name__ == "__main__":
    command_line.run(main, prog=PROG)
