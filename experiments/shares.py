"""Three ways to say what recomputation costs, beside each other, for five policies.

    python -m experiments.shares --json=experiments/results/shares.json

Takes about 3 minutes on 2 CPU cores. For every policy, of the training step of the
shipped model `tiny` at 4 and at 12 layers:

* FLOPs: recomputed matmul FLOPs over all matmul FLOPs of the step, counted;
* profile: time of recomputation over the step's, by the monitor, median of the profiled
  steps, and the medians of every other one of them (two runs);
* overhead: (step time - step time of everything_saveable) / step time, measured. Saving
  everything removes the recomputation, and costs time of its own, since everything is
  written and read again; so this is smaller than the profile's share by that;
* yardstick (full only): the same layers alone, forward and backward, against a twin
  that is handed one layer's residuals from outside, so that it neither recomputes nor
  saves: (step time - twin's) / step time, and the profile's share of that very step.

Steps of all programs alternate in one process, so that load from outside meets all of
them; times are medians, differences medians over rounds. On Linux the process starts
itself again with an allocator that keeps its pages: else a step of many megabytes gets
fresh ones from the kernel every time, which took more time than the step (measured:
160 ms for 62 ms), and more the more is saved.

Expected: the profile's two runs within 1 point and the yardstick within 3, on a quiet
machine. The yardstick tends to be the larger one: its twin reads the same residuals in
every layer, which stay in the processor's cache. Overhead is far below the profile's
share, at times below 0: on a CPU saving costs as much as recomputing.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

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
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.profile import PhaseTimes
from jaxckpt.models.presets import model_config
from jaxckpt.monitor import Monitor
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.inspect import one_layer
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

BASE = "everything_saveable"
POLICIES = ("none", BASE, "nothing_saveable", "dots_saveable", "save:context")
WARM_UP = 2


class Runner:
    """A compiled step, its times and its profiles."""

    def __init__(self, compiled: Any, carry: Any, *constants: Any, advances: bool):
        self.compiled, self.carry, self.constants = compiled, carry, constants
        self.advances = advances  # whether it gives (new carry, ...)
        self.seconds: list[float] = []
        self.times: list[PhaseTimes] = []
        self.monitor = Monitor(compiled, every=1, budget=None, say=lambda line: None)
        with self.monitor.step(0):
            pass

    def run(self) -> float:
        start = time.perf_counter()
        output = jax.block_until_ready(self.compiled(self.carry, *self.constants))
        self.carry = output[0] if self.advances else self.carry
        return time.perf_counter() - start

    def round(self, number: int, profile: bool = True) -> None:
        """One timed and one profiled step."""
        seconds = self.run()
        if profile:
            with self.monitor.step(number + 1) as seen:
                self.run()
            if number >= WARM_UP and seen.times:
                self.times.append(seen.times)
        if number >= WARM_UP:
            self.seconds.append(seconds)

    def share(self, part: slice = slice(None)) -> float:
        return statistics.median(t.recompute_share_of_step for t in self.times[part])

    def milliseconds(self, field: str) -> float:
        return 1e3 * statistics.median(getattr(one, field) for one in self.times)


def paired(longer: Runner, shorter: Runner) -> float:
    """Median over rounds of (longer - shorter) / longer."""
    both = zip(longer.seconds, shorter.seconds, strict=True)
    return statistics.median((a - b) / a for a, b in both)


def alternate(runners: list[Runner], rounds: int, profiled: list[Runner]) -> None:
    for number in range(rounds + WARM_UP):
        order = runners if number % 2 else runners[::-1]  # nobody is always first
        for runner in order:
            runner.round(number, runner in profiled)


def training_steps(layers: int, batch_size: int, rounds: int) -> list[dict]:
    """A row for each policy."""
    model = model_config("tiny", num_layers=layers, attention="xla")
    platform = jax.default_backend()
    runners, rows = {}, []
    for name in POLICIES:
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
        runners[name] = Runner(compiled, program.init(), batch, advances=True)
        flops = count_flops(program.step, *arguments)
        memory = memory_bytes(compiled)
        rows.append(
            {
                "policy": name,
                "temp_bytes": memory.temp_bytes,
                "flop_share_of_step": flops.recompute / flops.total,
            }
        )
    alternate(list(runners.values()), rounds, list(runners.values()))
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
    return rows


def yardstick(layers: int, batch_size: int, rounds: int) -> dict:
    """The model's layers under full remat, against a twin without recomputation."""
    model = model_config("tiny", num_layers=layers, attention="xla")
    config = TrainConfig(policy="full", architecture=model, batch_size=batch_size)
    layer = one_layer(config, make_placement({}, jax.devices()[:1]))
    key = jax.random.key(0)

    def fill(leaf):
        return jax.random.normal(key, leaf.shape, leaf.dtype) / 16

    one, x = jax.tree.map(fill, layer.arguments[:2])
    weights = jax.tree.map(lambda leaf: jnp.stack([leaf] * layers), one)

    def apply(weights, x):
        return layer.apply(weights, x, key)

    residuals, tree = jax.tree.flatten(jax.vjp(apply, one, x)[1])

    @jax.custom_vjp
    def twin(weights, x, residuals):
        return apply(weights, x)

    def twin_backward(residuals, cotangent):
        gradients = jax.tree.unflatten(tree, residuals)(cotangent)
        return *gradients, jax.tree.map(jnp.zeros_like, residuals)

    twin.defvjp(lambda w, x, given: (apply(w, x), given), twin_backward)
    recomputing = jax.checkpoint(apply, prevent_cse=False)

    def step(layer, weights, x, residuals):
        def loss(weights):
            def body(x, w):
                return layer(w, x, residuals), None

            return jnp.mean(jnp.square(lax.scan(body, x, weights)[0]))

        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)

    arguments = (weights, x, residuals)
    runners = []
    for one_of_two in (lambda w, x, given: recomputing(w, x)), twin:
        jitted = jax.jit(functools.partial(step, one_of_two))
        compiled, _ = compile_step(jitted, *arguments, platform=jax.default_backend())
        runners.append(Runner(compiled, *arguments, advances=False))
    full, without = runners
    alternate(runners, rounds, [full])
    return {
        "batch_size": batch_size,
        "direct_share_of_step": paired(full, without),
        "profile_share_of_step": full.share(),
        "profile_share_of_two_runs": [full.share(slice(i, None, 2)) for i in (0, 1)],
        "step_ms": 1e3 * statistics.median(full.seconds),
        "twin_ms": 1e3 * statistics.median(without.seconds),
    }


def print_rows(result: dict, console: Console) -> None:
    table = Table(title=f"{result['layers']} layers", title_justify="left")
    for column in (
        "policy",
        "step ms",
        "FLOPs",
        "profile",
        "two runs",
        "of backward",
        "overhead",
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
            f"{row['joined_share']:.1%}",
        )
    console.print(table)
    yard = result["yardstick"]
    runs = " ".join(f"{share:.1%}" for share in yard["profile_share_of_two_runs"])
    console.print(
        f"yardstick, layers alone, full: measured {yard['direct_share_of_step']:.1%}, "
        f"profile {yard['profile_share_of_step']:.1%} (two runs {runs})",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, results = Console(width=100), []
    for layers in options.layers:
        sizes = (layers, options.batch_size, options.rounds)
        results.append(
            {
                "layers": layers,
                "batch_size": options.batch_size,
                "policies": training_steps(*sizes),
                "yardstick": yardstick(layers, options.batch_size, options.rounds),
            }
        )
        print_rows(results[-1], console)
        if options.json:
            facts = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
            text = json.dumps({**facts, "models": results}, indent=2)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
