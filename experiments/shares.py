"""Three ways to say what recomputation costs, beside each other, for five policies.

    python -m experiments.shares

Takes about 4 minutes on 2 CPU cores (--fast: 1, the first model, few rounds).
For every policy, of the training step of the shipped model `tiny` at 4 and at 12
layers, and of a wider one:

* FLOPs: recomputed matmul FLOPs over all matmul FLOPs of the step, counted;
* profile: time of recomputation over the step's, by the monitor, median of the profiled
  steps, and the medians of every other one of them (two runs);
* overhead: (step time - step time of everything_saveable) / step time, measured: saving
  everything removes the recomputation;
* saving: what everything_saveable takes longer in forward and backward passes, by the
  profiles. It writes and reads what others recompute, and that takes time of its own,
  so that overhead + saving is to be compared with the profile's share.

Layers are unrolled here. In a scan saved values are copied into stacks of all layers
and back, and on a CPU those copies take as long as recomputing (measured, `tiny` in a
scan: 1.9 % overhead where 14.8 % of the step recomputes).

Steps of all programs alternate in one process, so that load from outside meets all of
them; times are medians, differences medians over rounds. On Linux the process starts
itself again with an allocator that keeps its pages: else a step of many megabytes gets
fresh ones from the kernel every time, which took more time than the step (measured:
160 ms for 62 ms), and more the more is saved.

Expected, on a quiet machine: the profile within 3 points of step time of overhead +
saving in most rows and within 5 in all (with --fast 10), and near the overhead alone
where little is recomputed; its two runs within 1.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import finish, folder, options_of, write
from jaxckpt.command_line import choose_platform

_KEEP_PAGES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**28),
}
if __name__ == "__main__" and sys.platform == "linux":
    if any(key not in os.environ for key in _KEEP_PAGES):  # read when a process starts
        command = [sys.executable, "-m", "experiments.shares", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | _KEEP_PAGES)

choose_platform()

# ruff: noqa: E402  the platform is chosen before JAX is imported
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxckpt import pictures
from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.profile import PhaseTimes
from jaxckpt.models.presets import model_config
from jaxckpt.monitor import Monitor
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

BASE = "everything_saveable"
POLICIES = (
    BASE,
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "save:context",
)
MODELS = {
    "tiny": {},
    "tiny, 12 layers": {"num_layers": 12},
    "tiny, dim 512": {"dim": 512, "num_heads": 8, "mlp_dim": 1408, "max_seq_len": 64},
}
WARM_UP = 2


class Runner:
    """A compiled step, its times and its profiles."""

    def __init__(self, compiled: Any, state: Any, batch: Any):
        self.compiled, self.state, self.batch = compiled, state, batch
        self.seconds: list[float] = []
        self.times: list[PhaseTimes] = []
        self.monitor = Monitor(compiled, every=1, budget=None, say=lambda line: None)
        with self.monitor.step(0):
            pass

    def run(self) -> float:
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.compiled(self.state, self.batch))
        return time.perf_counter() - start

    def round(self, number: int) -> None:
        """One timed and one profiled step, both behind another of the same program."""
        self.run()
        seconds = self.run()
        with self.monitor.step(number + 1) as seen:
            self.run()
        if number >= WARM_UP:
            self.seconds.append(seconds)
            if seen.times:
                self.times.append(seen.times)

    def share(self, part: slice = slice(None)) -> float:
        return statistics.median(t.recompute_share_of_step for t in self.times[part])

    def milliseconds(self, field: str) -> float:
        return 1e3 * statistics.median(getattr(one, field) for one in self.times)


def paired(longer: Runner, shorter: Runner) -> float:
    """Median over rounds of (longer - shorter) / longer."""
    both = zip(longer.seconds, shorter.seconds, strict=True)
    return statistics.median((a - b) / a for a, b in both)


def alternate(runners: list[Runner], rounds: int) -> None:
    for number in range(rounds + WARM_UP):
        order = runners if number % 2 else runners[::-1]  # nobody is always first
        for runner in order:
            runner.round(number)


def training_steps(
    sizes: dict[str, int], policies: Sequence[str], batch_size: int, rounds: int
) -> list[dict]:
    """A row for each policy."""
    model = model_config("tiny", attention="xla", scan_layers=False, **sizes)
    platform = jax.default_backend()
    runners, rows = {}, []
    for name in policies:
        config = TrainConfig(policy=name, architecture=model, batch_size=batch_size)
        program = make_program(config, make_placement({}, jax.devices()[:1]))
        arguments = (program.state, program.batch)
        compiled, _ = compile_step(program.step, *arguments, platform=platform)
        random = np.random.default_rng(0)
        shape = program.batch["inputs"].shape
        tokens = random.integers(0, model.vocab_size, (2, *shape), dtype=np.int32)
        weights = np.ones(shape, np.float32)
        batch = {"inputs": tokens[0], "targets": tokens[1], "weights": weights}
        batch = jax.device_put(batch)
        runners[name] = Runner(compiled, program.init(), batch)
        flops = count_flops(program.step, *arguments)
        memory = memory_bytes(compiled)
        rows.append(
            {
                "policy": name,
                "temp_bytes": memory.temp_bytes,
                "flop_share_of_step": flops.recompute / flops.total,
            }
        )
    alternate(list(runners.values()), rounds)
    for row in rows:
        runner = runners[row["policy"]]
        times = runner.times
        row |= {
            "profile_share_of_step": runner.share(),
            "profile_share_of_two_runs": [
                runner.share(slice(i, None, 2)) for i in (0, 1)
            ],
            "profile_share_of_backward": statistics.median(
                one.recompute_share_of_backward for one in times
            ),
            "joined_share": min(one.joined for one in times),
            "overhead_share_of_step": paired(runner, runners[BASE]),
            "step_ms": 1e3 * statistics.median(runner.seconds),
            "profiled_ms": {
                field: runner.milliseconds(field)
                for field in "wall forward recompute backward other idle".split()
            },
        }
    for row in rows:
        row["saving_share_of_step"] = saving(row, rows[0])
    return rows


def saving(row: dict, base: dict) -> float:
    """What saving everything costs in place of a policy, by the profiles of both."""

    def spent(one):
        return one["profiled_ms"]["forward"] + one["profiled_ms"]["backward"]

    return (spent(base) - spent(row)) / row["profiled_ms"]["wall"]


def print_rows(result: dict, console: Console) -> None:
    table = Table(title=result["model"], title_justify="left")
    for column in (
        "policy",
        "step ms",
        "FLOPs",
        "profile",
        "two runs",
        "of backward",
        "overhead",
        "saving",
        "joined",
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in result["policies"]:
        table.add_row(
            row["policy"],
            f"{row['step_ms']:.1f}",
            f"{row['flop_share_of_step']:.1%}",
            f"{row['profile_share_of_step']:.1%}",
            " ".join(f"{share:.1%}" for share in row["profile_share_of_two_runs"]),
            f"{row['profile_share_of_backward']:.1%}",
            f"{row['overhead_share_of_step']:+.1%}",
            f"{row['saving_share_of_step']:+.1%}",
            f"{row['joined_share']:.1%}",
        )
    console.print(table)


def by_time(row: dict[str, Any]) -> float:
    """What recomputation takes by step times: overhead, and what saving takes."""
    return row["overhead_share_of_step"] + row["saving_share_of_step"]


def findings(result: dict[str, Any], points: float) -> list[str]:
    """Policies whose profile and overhead + saving are further apart than points."""
    apart = {
        row["policy"]: 100 * (row["profile_share_of_step"] - by_time(row))
        for row in result["policies"]
    }
    return [
        f"{result['model']}, {policy}: the profile is {off:+.1f} points off"
        for policy, off in apart.items()
        if abs(off) > points
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """The three shares of every policy that recomputes, a panel for each model."""
    figure = pictures.new_figure(8, 1 + 2.2 * len(result["models"]))
    grid = figure.subplots(len(result["models"]), 1, squeeze=False, sharex=True)
    fields = {
        "FLOPs (counted)": ("flop_share_of_step",),
        "profile (measured)": ("profile_share_of_step",),
        "overhead (measured)": ("overhead_share_of_step",),
        "overhead + saving": ("overhead_share_of_step", "saving_share_of_step"),
    }
    for (axes,), model in zip(grid, result["models"], strict=True):
        rows = model["policies"][1:]
        for number, (label, summed) in enumerate(fields.items()):
            axes.bar(
                [place + 0.2 * (number - 1.5) for place in range(len(rows))],
                [100 * sum(row[field] for field in summed) for row in rows],
                width=0.19, color=pictures.COLORS[number], edgecolor="white",
                hatch=("", "////", "....", "xx")[number], label=label,
            )  # fmt: skip
        names = [row["policy"].replace("_batch_", "_\nbatch_") for row in rows]
        axes.set_xticks(range(len(rows)), names, fontsize=9)
        axes.tick_params(labelbottom=True)
        axes.set_ylabel("% of the step")
        axes.set_title(model["model"], fontsize=10)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    handles, _ = grid[0][0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    pictures.save(figure, path)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args()
    out = folder(options)
    console, results, wrong = Console(width=100), [], []
    rounds = 6 if options.fast else options.rounds
    for name, sizes in list(MODELS.items())[: 1 if options.fast else None]:
        rows = training_steps(sizes, POLICIES, options.batch_size, rounds)
        results.append(
            {
                "model": name,
                "sizes": sizes,
                "batch_size": options.batch_size,
                "policies": rows,
            }
        )
        print_rows(results[-1], console)
        wrong += findings(results[-1], points=10 if options.fast else 5)
    result = {"device": jax.devices()[0].device_kind, "models": results}
    write(out / "shares.json", result)
    draw(result, out / "shares.png")
    finish(wrong)


if __name__ == "__main__":
    main()
