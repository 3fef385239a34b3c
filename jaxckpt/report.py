"""``python -m jaxckpt.report``: compare policies on any target, GPUs absent or not.

Example: ``python -m jaxckpt.report --model=llama-7b --target=h100:8 --batch-size=8``
"""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

from jaxckpt import command_line
from jaxckpt.compiler.targets import Target, check_installed, parse_target
from jaxckpt.extras import install
from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.report_config import ReportConfig
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.mesh_sizes import parse_mesh, resolve_mesh

PROG = "python -m jaxckpt.report"


def main() -> None:
    args = sys.argv[1:]
    preset = command_line.value_of("--model", args, ReportConfig.model)
    default = ReportConfig(model=preset, architecture=model_config(preset))
    config = command_line.parse(default, prog=PROG)
    target = parse_target(config.target)
    if not config.function and target.text != "attached":
        _check_sizes(config, target)
    _check_files(config)
    base = _read_base(config) if config.compare else None
    check_installed(target)
    command_line.choose_platform()
    _report(config, target, base)


def _check_sizes(config: ReportConfig, target: Target) -> None:
    mesh = parse_mesh(config.mesh)
    needed = math.prod(mesh.values())
    if target.num_devices and mesh and needed != target.num_devices:
        raise ConfigError(
            f"--mesh={config.mesh} is of {needed} devices and --target={target.text} "
            f"has {target.num_devices}"
        )
    sizes = mesh or {"fsdp": max(target.num_devices, 1)}
    check_divisible(config.train_config("none"), sizes)
    if config.max_batch and not target.memory_limit:
        raise ConfigError(_NO_LIMIT)


_NO_LIMIT = "--max-batch needs a target whose memory is known, such as --target=h100:8"


_PICTURES = ("plot", "timeline", "kept")


def _check_files(config: ReportConfig) -> None:
    """Before minutes of compiling, not after."""
    cache = Path(config.cache).absolute()
    if any(one.exists() and not one.is_dir() for one in (cache, *cache.parents)):
        raise ConfigError(f"--cache={config.cache} is no folder")
    for flag in ("json", "save", *_PICTURES):
        path = getattr(config, flag)
        if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigError(f"--{flag}={path} is no file in a folder that exists")
    for flag in _PICTURES:
        path = getattr(config, flag)
        if path and not importlib.util.find_spec("matplotlib"):
            raise ConfigError(f"--{flag} needs matplotlib: {install('plot')}")
        if path and Path(path).suffix not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"--{flag}={path} must end in .png, .svg or .pdf")


def _report(
    config: ReportConfig, target: Target, base: list[dict[str, Any]] | None
) -> None:
    from jaxckpt.training import reporting
    from jaxckpt.training.job import Job
    from jaxckpt.training.report_table import print_rows

    console = command_line.make_console(markup=False, emoji=False, highlight=False)
    cache = Path(config.cache)
    none = config.train_config("none")
    if config.function:
        jobs = [Job(none, config.target, config.function)]
    else:
        policies = config.policies or reporting.default_policies(none)
        jobs = [
            Job(config.train_config(policy), config.target)
            for policy in dict.fromkeys(policies)
        ]
    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, soft_wrap=True)

        rows = reporting.compile_rows(jobs, cache, progress)
        good = [row for row in rows if "error" not in row]
        if not good and rows[0]["bad_input"]:
            raise ConfigError(rows[0]["error"])
        limit = good[0]["memory_limit"] if good else target.memory_limit
        if config.max_batch and not limit:
            raise ConfigError(_NO_LIMIT)
        reporting.add_savings(rows)
        for job, row in zip(jobs, rows, strict=True):
            if config.max_batch and "error" not in row:
                unit = _batch_unit(config, row["num_devices"])
                row["max_batch"] = reporting.largest_batch(job, unit, cache, progress)
    of_model = not config.function
    report = {
        "model": config.model if of_model else config.function,
        "target": config.target,
        "device": good[0]["device"] if good else "",
        "memory_limit": limit,
        "mesh": _mesh_text(config, good[0]["num_devices"]) if good and of_model else "",
        "batch_size": config.batch_size if of_model else None,
        "sequence_length": none.sequence_length if of_model else None,
        "rows": rows,
        "advice": reporting.advice(rows, none if of_model else None, limit),
    }
    print_rows(report, console)
    lines = [row.pop("timeline", None) for row in rows]  # drawn, and not in the files
    for path in filter(None, (config.json, config.save)):
        Path(path).write_text(json.dumps(report, indent=2) + "\n")
    if not good:
        command_line.fail(PROG, "no program compiled; the reasons are above", code=1)
    _draw(config, report, lines)
    if base is not None:
        _gate(reporting.grown(base, rows, config.tolerance_share), config, console)


def _draw(config: ReportConfig, report: dict[str, Any], lines: list[Any]) -> None:
    from jaxckpt import pictures
    from jaxckpt.training.report_table import draw_frontier

    title = f"{report['model']} on {report['target']}"
    if report["batch_size"]:
        title += f", batch {report['batch_size']}, sequence {report['sequence_length']}"
    if config.plot:
        draw_frontier(report, Path(config.plot))
    if config.timeline and not any(lines):
        print("no timeline: XLA of this JAX does not write when values are live")
    elif config.timeline:
        drawn = zip(report["rows"], lines, strict=True)
        pictures.draw_timelines(
            [row | {"timeline": line} for row, line in drawn if line],
            config.timeline,
            title=title,
        )
    if config.kept:
        good = [row for row in report["rows"] if "error" not in row]
        bars = {row["policy"]: row["saved"] for row in good}
        pictures.draw_kept(bars, config.kept, title=title)


def _gate(growth: list[Any], config: ReportConfig, console: Any) -> None:
    for line in growth:
        console.print(str(line), style="bold red")
    if growth:
        command_line.fail(
            PROG, f"memory grew more than {config.tolerance} over {config.compare}", 1
        )
    console.print(f"no memory grew more than {config.tolerance} over {config.compare}")


def _read_base(config: ReportConfig) -> list[dict[str, Any]]:
    try:
        base = json.loads(Path(config.compare).read_text())
        kept = {"model": base["model"], "target": base["target"]}
        rows = [row for row in base["rows"] if "error" not in row]
        _ = [(row["policy"], row["device_total_bytes"]) for row in rows]
    except OSError as error:
        raise ConfigError(f"--compare={config.compare}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--compare={config.compare} is no saved report") from error
    now = {"model": config.function or config.model, "target": config.target}
    for key, value in kept.items():
        if value != now[key]:
            raise ConfigError(
                f"--compare={config.compare} is of {key} {value}, this of {now[key]}"
            )
    return rows


def _batch_unit(config: ReportConfig, num_devices: int) -> int:
    sizes = resolve_mesh(config.mesh, num_devices)
    return sizes.get("data", 1) * sizes.get("fsdp", 1) * config.accumulate


def _mesh_text(config: ReportConfig, num_devices: int) -> str:
    sizes = resolve_mesh(config.mesh, num_devices)
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items())


if __name__ == "__main__":
    command_line.run(main, prog=PROG)
