"""Do the sayings of checkpointing guides hold?

    python -m experiments.claims

Takes about 12 minutes on 2 CPU cores and needs the `gpu-compiler` extra (--fast: 1.5,
on smaller models). Programs are compiled for absent H100s of 80 GB, each once; what is
recomputed is counted in them, a step's time is estimated, the speed of light.
Each saying gets a verdict: held, partly or not, with its numbers.

Expected:

* "70-90 % of memory saved for 10-20 % of time": partly. Of llama3-8b's temporary memory
  on 8 H100s full remat saves 91 % for 23.5 % more FLOPs, keeping attention 86 %
  for 17.4 %, keeping all matmuls 69 % for 4 %. In estimated time none costs any:
  what is not kept is not written and read.
* "Attention dominates activation memory": partly. With flash attention it is 6 % of
  what a layer of llama3-8b keeps, and the MLP 53 %; without (`tiny`, 512 tokens) 58 %.
* "Groups of sqrt(n) layers are best": partly. For llama3-8b they take 2 % less than
  per-layer checkpoints, groups of 2 the least, for 54 % more FLOPs instead of 23.5 %: a
  group keeps its weights' gradients, and runs forward twice more. (They are for a stack
  of small weights: `experiments.depth`.)
* "Checkpointing trains a larger model on one GPU": partly. Llama layers of width 4096
  with AdamW in float32 and one sequence of 4096 tokens: 1.46 times the parameters, 5.12
  for 3.50 billion. Most of the 80 GB is state.
* "Do not use it below 7B": not. Bytes beside the device's count: gpt2-1.5b with
  32 sequences of 1024 tokens does not fit without, llama-7b on 8 GPUs does.

What policies of other frameworks cost beside plans of equal memory is in
`experiments.budgets`.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.common import (
    CACHE,
    check_compiler,
    finish,
    folder,
    options_of,
    write,
)
from jaxckpt import pictures
from jaxckpt.compiler.targets import parse_target
from jaxckpt.models.presets import ModelConfig, model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job, run_job
from jaxckpt.units import format_bytes

HELD, PARTLY, NOT = "held", "partly", "not"
LIMIT = parse_target("h100:1").memory_limit


class Compiler:
    """Rows of training steps, each compiled once."""

    def __init__(self, cache: Path):
        self.cache = cache
        self.rows: list[dict] = []

    def row(self, architecture: ModelConfig, policy: str, **fields: Any) -> dict:
        target = fields.pop("target", "cpu")
        config = TrainConfig(policy=policy, architecture=architecture, **fields)
        row = run_job(Job(config, target), self.cache)
        if "error" in row:
            raise SystemExit(f"{policy} on {target}: {row['error']}")
        self.rows.append(row)
        total = row["device_total_bytes"]
        print(f"  {target} {policy}: {format_bytes(total)}", flush=True)
        return row


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A saying, and what became of it.

    Attributes:
      saying: of the guides.
      verdict: held, partly or not.
      numbers: what says so, and how each number was obtained.
      data: the same for machines.
    """

    saying: str
    verdict: str
    numbers: str
    data: dict[str, Any]


def memory_for_time(compiler: Compiler, fast: bool) -> Verdict:
    """Saved temporary memory and added time of policies that recompute something."""
    model, fields = large(fast)
    policies = ("none", "nothing_saveable", "save:context,out_proj", "dots_saveable")
    rows = [compiler.row(model, policy, **fields) for policy in policies]
    none, found = rows[0], []
    for row in rows[1:]:
        seconds = row["estimated_step_seconds"], none["estimated_step_seconds"]
        found.append(
            {
                "policy": row["policy"],
                "saved": 1 - row["temp_bytes"] / none["temp_bytes"],
                "flops": row["recompute_fraction"],
                "time": seconds[0] / seconds[1] - 1 if all(seconds) else None,
            }
        )
    inside = [
        one
        for one in found
        if 0.7 <= one["saved"] <= 0.9 and 0.1 <= one["flops"] <= 0.2
    ]
    verdict = NOT if not inside else HELD if len(inside) == len(found) else PARTLY
    numbers = "; ".join(
        f"{one['policy']}: {one['saved']:.0%} of temporary memory saved (compiled), "
        f"{one['flops']:.1%} more matmul FLOPs (counted)"
        + ("" if one["time"] is None else f", {one['time']:+.0%} time (estimated)")
        for one in found
    )
    saying = "70-90 % of memory saved for 10-20 % of time"
    return Verdict(saying, verdict, numbers, {"rows": found})


def large(fast: bool) -> tuple[ModelConfig, dict[str, Any]]:
    if fast:
        sizes = {"num_layers": 8, "dim": 256, "mlp_dim": 704, "num_heads": 4}
        return model_config("tiny", attention="xla", **sizes), {"batch_size": 16}
    model = model_config("llama3-8b")
    return model, {"batch_size": 8, "mesh": "fsdp:8", "target": "h100:8"}


def attention_or_mlp(compiler: Compiler, fast: bool) -> Verdict:
    """What a layer keeps without checkpointing, by where it is used."""
    model, fields = large(fast)
    plain = model_config("tiny", attention="xla", max_seq_len=512)
    cases = {
        "the large model" if fast else "llama3-8b, flash attention": (model, fields),
        "tiny at 512 tokens, no flash attention": (plain, {"batch_size": 4}),
    }
    shares = {}
    for name, (one, sizes) in cases.items():
        row = compiler.row(one, "none", **sizes)
        kept = Counter()
        for value in row["saved"]:
            kept[part_of(value["name"], one)] += value["bytes_per_layer"]
        shares[name] = {part: kept[part] / kept.total() for part in kept}
    first, second = shares.values()
    wins = [
        share.get("attention", 0) > share.get("MLP", 0) for share in (first, second)
    ]
    verdict = HELD if all(wins) else PARTLY if any(wins) else NOT
    numbers = "; ".join(
        f"{name}: " + ", ".join(f"{part} {share:.0%}" for part, share in parts.items())
        for name, parts in shares.items()
    )
    saying = "attention dominates activation memory"
    return Verdict(saying, verdict, f"{numbers} (counted)", {"shares": shares})


def part_of(name: str, model: ModelConfig) -> str:
    """Where in a layer a kept value is used, from its name or its shape."""
    sizes = name.partition("[")[2].rstrip("]").split(",")
    if name.startswith("convert_element_type"):
        return "cast weights"
    if name.startswith("mlpwi") or f",{model.mlp_dim}]" in name:
        return "MLP"
    attention = ("query_proj", "key_proj", "value_proj", "context")
    heads = str(model.num_heads), str(model.size_of_head)
    scores = len(sizes) >= 4 and (heads[0] in sizes[1:3] or sizes[-1] == heads[1])
    if name in attention or scores:
        return "attention"
    return "norms and residual stream"


def sqrt_is_best(compiler: Compiler, fast: bool) -> Verdict:
    """Compiled memory and counted recomputation of group sizes."""
    model, fields = large(fast)
    layers = model.num_layers
    policies = ["nothing_saveable", "every:2", "sqrt", "every:8"]
    rows = [compiler.row(model, policy, **fields) for policy in policies]
    found = {
        row["policy"]: (row["device_total_bytes"], row["recompute_fraction"])
        for row in rows
    }
    full, sqrt = found["nothing_saveable"], found["sqrt"]
    best = min(found, key=lambda policy: found[policy][0])
    gain = 1 - sqrt[0] / full[0]
    verdict = HELD if best == "sqrt" and gain > 0.2 else PARTLY if gain > 0 else NOT
    numbers = "; ".join(
        f"{policy}: {format_bytes(total)} (compiled), {again:.0%} more FLOPs (counted)"
        for policy, (total, again) in found.items()
    )
    saying = f"groups of sqrt(n) layers are best ({layers} layers)"
    return Verdict(saying, verdict, numbers, {"rows": found})


def largest_model(compiler: Compiler, fast: bool) -> Verdict:
    """Llama layers of width 4096 that fit one H100, with and without checkpointing."""
    sizes = {"dim": 4096, "num_heads": 32, "mlp_dim": 11008, "vocab_size": 32000}
    fields = {"batch_size": 1, "seq_len": 4096, "target": "h100:1"}

    def total(layers: int, policy: str) -> int:
        model = model_config("llama-7b", num_layers=layers, **sizes)
        return compiler.row(model, policy, **fields)["device_total_bytes"]

    found: dict[str, Any] = {}
    for policy in ("none", "nothing_saveable"):
        few, more = 4, 8
        small, large = total(few, policy), total(more, policy)
        per_layer = (large - small) / (more - few)
        layers = int(few + (LIMIT - small) // per_layer)
        fits = total(layers, policy)
        while fits > LIMIT:
            layers -= 1
            fits = total(layers, policy)
        above = None if fast else total(layers + 1, policy)
        params = model_config("llama-7b", num_layers=layers, **sizes).num_params
        found[policy] = {
            "layers": layers, "params": params, "bytes": fits, "one_more": above,
        }  # fmt: skip
    gain = found["nothing_saveable"]["params"] / found["none"]["params"]
    numbers = "; ".join(
        f"{policy}: {one['layers']} layers, {one['params'] / 1e9:.2f} B parameters, "
        f"{format_bytes(one['bytes'])}"
        + (
            f", one layer more {format_bytes(one['one_more'])}"
            if one["one_more"]
            else ""
        )
        for policy, one in found.items()
    )
    verdict = HELD if gain > 1.5 else PARTLY if gain > 1.05 else NOT
    return Verdict(
        "checkpointing trains a larger model on one 80 GB GPU",
        verdict,
        f"{gain:.2f} times the parameters. {numbers} (compiled: float32 weights and "
        "AdamW, one sequence of 4096 tokens)",
        found | {"gain": gain},
    )


def below_7b(compiler: Compiler, fast: bool) -> Verdict:
    """A smaller model that needs it, and a larger one that does not."""
    small, batch = ("gpt2-124m", 64) if fast else ("gpt2-1.5b", 32)
    fields = {"batch_size": batch, "target": "h100:1"}
    model = model_config(small)
    needs = {
        policy: compiler.row(model, policy, **fields)["device_total_bytes"]
        for policy in ("none", "nothing_saveable")
    }
    found: dict[str, Any] = {"model": small, "batch": batch, **needs}
    numbers = (
        f"{small}, batch {batch} on one H100: none {format_bytes(needs['none'])}, full "
        f"remat {format_bytes(needs['nothing_saveable'])} of {format_bytes(LIMIT)}"
    )
    is_needed = needs["nothing_saveable"] <= LIMIT < needs["none"]
    if not fast:
        fields = {
            "batch_size": 8,
            "seq_len": 4096,
            "mesh": "fsdp:8",
            "target": "h100:8",
        }
        row = compiler.row(model_config("llama-7b"), "none", **fields)
        found["llama-7b"] = row["device_total_bytes"]
        numbers += (
            f"; llama-7b on 8 of them, one sequence of 4096 tokens each: none "
            f"{format_bytes(found['llama-7b'])}"
        )
        is_needed = is_needed and found["llama-7b"] <= LIMIT
    verdict = NOT if is_needed else PARTLY
    return Verdict("do not use it below 7B", verdict, f"{numbers} (compiled)", found)


SAYINGS = (memory_for_time, attention_or_mlp, sqrt_is_best, largest_model, below_7b)
EXPECTED = (PARTLY, PARTLY, PARTLY, PARTLY, NOT)


def draw(verdicts: list[Verdict], path: Path) -> None:
    """Saved memory against added FLOPs, with the guides' box; what a layer keeps."""
    from matplotlib.patches import Rectangle

    figure = pictures.new_figure(8, 4.4)
    trade, parts = figure.subplots(1, 2, width_ratios=(1.2, 1))
    trade.add_patch(Rectangle((70, 10), 20, 10, facecolor="#EEEEEE", edgecolor="black"))
    trade.annotate("as said", (71, 10.5))
    for number, row in enumerate(verdicts[0].data["rows"]):
        trade.plot(
            100 * row["saved"], 100 * row["flops"], pictures.MARKERS[number],
            color=pictures.COLORS[number], markersize=9, label=row["policy"],
        )  # fmt: skip
    trade.set_xlim(0, 100)
    trade.set_ylim(0, 30)
    trade.set_xlabel("temporary memory saved, % (compiled)")
    trade.set_ylabel("more matmul FLOPs, % (counted)")
    trade.legend(loc="upper left", fontsize=9, frameon=False)
    left = [0.0, 0.0]
    shares = verdicts[1].data["shares"]
    hatches = ("", "//", "..", "xx")
    names = ("attention", "MLP", "norms and residual stream", "cast weights")
    for number, part in enumerate(names):
        widths = [100 * one.get(part, 0) for one in shares.values()]
        parts.bar(
            range(2), widths, bottom=left, width=0.6, hatch=hatches[number],
            color=pictures.COLORS[number], edgecolor="white", label=part,
        )  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    parts.set_xticks(
        range(2), [name.replace(", ", "\n") for name in shares], fontsize=9
    )
    parts.set_ylabel("% of what a layer keeps (counted)")
    handles, _ = parts.get_legend_handles_labels()
    figure.legend(
        handles=handles, loc="outside lower right", ncols=4, fontsize=9, frameon=False
    )
    for axes in (trade, parts):
        axes.spines[["top", "right"]].set_visible(False)
    pictures.save(figure, path)


def draw_steps(rows: list[dict[str, Any]], out: Path, title: str) -> None:
    """What is live in the course of a step under three policies; what four keep."""
    named = {row["policy"]: row for row in rows}
    shown = [named[p] for p in ("none", "save:context,out_proj", "nothing_saveable")]
    pictures.draw_timelines(shown, out / "claims_timeline.png", title=title)
    kept = {policy: row["saved"] for policy, row in named.items()}
    pictures.draw_kept(kept, out / "claims_kept.png", title=title)


def main() -> None:
    options = options_of(__doc__).parse_args()
    out = folder(options)
    check_compiler("h100:1")
    verdicts = []
    compiler = Compiler(CACHE)
    for saying in SAYINGS:
        verdicts.append(saying(compiler, options.fast))
        last = verdicts[-1]
        print(f"{last.verdict.upper()}: {last.saying}\n  {last.numbers}", flush=True)
    wrong = [
        f"{found.saying}: {found.verdict}, not {expected}"
        for found, expected in zip(verdicts, EXPECTED, strict=True)
        if found.verdict != expected and not options.fast
    ]
    rows = [dataclasses.asdict(one) for one in verdicts]
    write(out / "claims.json", {"sayings": rows, "findings": wrong})
    draw(verdicts, out / "claims.png")
    title = "tiny on cpu" if options.fast else "llama3-8b on h100:8, batch 8"
    draw_steps(compiler.rows[:4], out, title)  # the rows of the first saying
    finish(wrong)


if __name__ == "__main__":
    main()
