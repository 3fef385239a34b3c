"""Does the policy change what is learned?

    python -m experiments.same_training

Takes about 4 minutes on 2 CPU cores (--fast: half a minute). The shipped model `tiny`,
with dropout, trains on real text (the source of Python's standard library) for 60 steps
under each of 12 policies: the same initial weights, batches and dropout masks, float32,
compiled as `train` compiles. Every policy's loss is set beside that of ``none`` at
every step.

Expected: losses of all policies within 1e-4 of ``none`` at every step, relatively:
recomputation gives the same numbers but for the order in which XLA adds, and 60 steps
of training make rounding larger. At the first step within 1e-6.
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.common import finish, folder, options_of, write
from jaxckpt.command_line import choose_platform

choose_platform()

# ruff: noqa: E402  the platform is chosen before JAX is imported
import jax

from jaxckpt import pictures
from jaxckpt.compiler.memory import compile_step
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.corpus import Corpus, load_corpus
from jaxckpt.training.data import batches
from jaxckpt.training.feeding import to_devices
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

POLICIES = (
    "none",
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "save:context,out_proj",
    "save:query_proj/offload:mlpwi_0",
    "sqrt",
    "every:2/none",
    "revolve:2",
    "2xnone+2xsave:context",
    "megatron:selective",
)
FEW = ("none", "nothing_saveable", "dots_saveable", "sqrt", "2xnone+2xsave:context")
FIRST, LATER = 1e-6, 1e-4  # relative differences of a loss
_ZERO = 1e-8  # where a difference of 0 is drawn on the logarithmic axis


def losses(config: TrainConfig, corpus: Corpus) -> list[float]:
    """Losses of a run, step by step, without anything but the steps."""
    placement = make_placement({}, jax.devices()[:1])
    program = make_program(config, placement)
    arguments = (program.state, program.batch)
    step, _ = compile_step(program.step, *arguments, platform=jax.default_backend())
    state, found = program.init(), []
    stream = batches(
        corpus.train,
        seq_len=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    with stream:
        for _ in range(config.steps):
            batch = to_devices(next(stream), program.batch, 1)
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
    return found


def compare(runs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Of every policy, how far its losses are from those of none, relatively."""
    rows = []
    for policy, found in runs.items():
        away = [abs(a / b - 1) for a, b in zip(found, runs["none"], strict=True)]
        rows.append(
            {
                "policy": policy,
                "first": away[0],
                "largest": max(away),
                "at_step": away.index(max(away)) + 1,
            }
        )
    return rows


def findings(rows: list[dict[str, Any]], curve: list[float]) -> list[str]:
    wrong = [
        f"{row['policy']} differs by {row['largest']:.1e}"
        for row in rows
        if row["first"] > FIRST or row["largest"] > LATER
    ]
    if curve[-1] > 0.9 * curve[0]:
        wrong.append("nothing was learned")
    return wrong


def draw(runs: dict[str, list[float]], path: Path) -> None:
    figure = pictures.new_figure(8, 6.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1))
    steps = range(1, len(runs["none"]) + 1)
    for number, (policy, found) in enumerate(runs.items()):
        style = {
            "color": pictures.COLORS[number % 7], "marker": pictures.MARKERS[number],
            "linestyle": "none", "markersize": 7,
            "fillstyle": "none" if number % 2 else "full",
        }  # fmt: skip
        above.plot(steps, found, label=policy, markevery=(number, len(runs)), **style)
    above.plot(steps, runs["none"], color="#888888", linewidth=0.8, zorder=0)
    away = {
        step: max(abs(found[step - 1] / none - 1) for found in runs.values())
        for step, none in zip(steps, runs["none"], strict=True)
    }
    apart = [step for step in steps if away[step]]
    equal = [step for step in steps if not away[step]]
    below.plot(apart, [away[step] for step in apart], "o", color="black", markersize=4)
    below.plot(
        equal, [_ZERO] * len(equal), "o", color="black", markersize=4, fillstyle="none"
    )
    above.set_ylabel("loss, nats per byte")
    below.set_yscale("log")
    below.axhline(LATER, color=pictures.LIMIT_COLOR, linestyle="--")
    below.annotate(
        f"limit {LATER:.0e}", (1, LATER), (0, -11), textcoords="offset points",
        fontsize=9, color=pictures.LIMIT_COLOR,
    )  # fmt: skip
    powers = range(-7, -3)
    below.set_yticks(
        [_ZERO, *(10.0**power for power in powers)],
        ["0, to the bit", *(f"$10^{{{power}}}$" for power in powers)],
    )
    below.minorticks_off()
    below.set_ylabel("largest relative difference\nto none, of all policies")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    largest = max(row["largest"] for row in compare(runs))
    above.set_title(
        f"{len(runs)} policies, one curve: they differ by at most {largest:.0e}",
        fontsize=11,
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    pictures.save(figure, path)


def main() -> None:
    options = options_of(__doc__).parse_args()
    out = folder(options)
    model = model_config("tiny", dropout=0.1, attention="xla", max_seq_len=64)
    config = TrainConfig(architecture=model, batch_size=8, steps=60, warmup_steps=5)
    if options.fast:
        config = dataclasses.replace(config, steps=30)
    corpus = load_corpus((), vocab_size=256, seq_len=config.sequence_length)
    runs = {}
    for policy in FEW if options.fast else POLICIES:
        runs[policy] = losses(dataclasses.replace(config, policy=policy), corpus)
        (row,) = [row for row in compare(runs) if row["policy"] == policy]
        print(
            f"{policy:34} loss {runs[policy][0]:.4f} -> {runs[policy][-1]:.4f}, from "
            f"none by {row['first']:.1e} at first, {row['largest']:.1e} at most",
            flush=True,
        )
    rows = compare(runs)
    wrong = findings(rows, runs["none"])
    result = {
        "model": "tiny, dropout 0.1, sequence 64, batch 8, float32",
        "data": corpus.description,
        "device": jax.devices()[0].device_kind,
        "rows": rows,
        "losses": runs,
        "findings": wrong,
    }
    write(out / "same_training.json", result)
    draw(runs, out / "same_training.png")
    finish(wrong)


if __name__ == "__main__":
    main()
