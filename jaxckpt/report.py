"""``python -m jaxckpt.report``: compare policies on any target, GPUs absent or not.

Example: ``python -m jaxckpt.report --model=llama-7b --target=h100:8 --batch-size=8``
"""

import json
import sys
from pathlib import Path
from typing import Any

from jaxckpt import command_line
from jaxckpt.compiler.targets import Target, check_installed, parse_target
from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.report_config import ReportConfig
from jaxckpt.training.config import check_divisible, resolve_mesh

PROG = "python -m jaxckpt.report"


def main() -> None:
    args = sys.argv[1:]
    preset = command_line.value_of("--model", args, ReportConfig.model)
    default = ReportConfig(model=preset, architecture=model_config(preset))
    config = command_line.parse(default, prog=PROG)
    target = parse_target(config.target)
    if target.is_absent:
        check_installed()
        if not config.function:
            sizes = resolve_mesh(config.mesh, target.num_devices)
            check_divisible(config.train_config("none"), sizes)
    base = _read_base(config.compare) if config.compare else None
    command_line.choose_platform()
    _report(config, target, base)


def _report(config: ReportConfig, target: Target, base: list[dict] | None) -> None:
    from rich.console import Console

    from jaxckpt.training import reporting
    from jaxckpt.training.job import Job
    from jaxckpt.training.report_table import draw_frontier, print_rows

    console = Console()
    cache = Path(config.cache)
    none = config.train_config("none")
    if config.function:
        jobs = [Job(none, config.target, config.function)]
    else:
        policies = config.policies or reporting.default_policies(none)
        jobs = [Job(config.train_config(policy), config.target) for policy in policies]
    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False, soft_wrap=True)

        rows = reporting.compile_rows(jobs, cache, progress)
        reporting.add_savings(rows)
        if config.max_batch and target.memory_limit and not config.function:
            unit = _batch_unit(config, target)
            for job, row in zip(jobs, rows, strict=True):
                if "error" not in row:
                    row["max_batch"] = reporting.largest_batch(
                        job, unit, cache, progress
                    )
    report = {
        "model": config.function or config.model,
        "target": config.target,
        "mesh": config.mesh,
        "batch_size": config.batch_size,
        "sequence_length": none.sequence_length,
        "rows": rows,
        "advice": reporting.advice(rows, none, target),
    }
    print_rows(report, target, console)
    for path in filter(None, (config.json, config.save)):
        Path(path).write_text(json.dumps(report, indent=2) + "\n")
    if config.plot:
        draw_frontier(report, target, Path(config.plot))
    if all("error" in row for row in rows):
        command_line.fail(PROG, "no program compiled; the reasons are above", code=1)
    if base is not None:
        _gate(reporting.grown(base, rows, config.tolerance_share), console)


def _gate(growth: list[Any], console: Any) -> None:
    for line in growth:
        console.print(str(line), style="bold red", highlight=False)
    if growth:
        command_line.fail(PROG, "memory grew past the tolerance", code=1)
    console.print("memory did not grow past the tolerance")


def _read_base(path: str) -> list[dict[str, Any]]:
    try:
        return json.loads(Path(path).read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--compare={path} is no saved report: {error}") from error


def _batch_unit(config: ReportConfig, target: Target) -> int:
    sizes = resolve_mesh(config.mesh, target.num_devices)
    return sizes.get("data", 1) * sizes.get("fsdp", 1) * config.accumulate


if __name__ == "__main__":
    command_line.run(main, prog=PROG)
