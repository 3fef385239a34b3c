"""Can 70 and 175 billion parameters on 1,024 GPUs be planned on two CPU cores?

    python -m experiments.thousand_gpus

Takes about 6 minutes on 2 CPU cores and needs the `gpu-compiler` extra (--fast: half a
minute, four layers of llama-7b on 16 GPUs). Runs the `plan` command for 128 hosts of 8
absent H100s: llama3-70b on data:16,fsdp:8,tensor:8, and gpt3-175b in a pipeline of 8
stages with tensor:16. Bytes per device are compiled; seconds and the largest process's
memory are of this machine.

Expected: both plans are below the H100's memory, in less than 10 minutes and 16 GiB of
this machine's memory.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.common import check_compiler, finish, folder, options_of, write
from jaxckpt import pictures
from jaxckpt.compiler.targets import parse_target

PLANS = {
    "llama3-70b": (
        "--model=llama3-70b", "--target=h100:128x8", "--mesh=data:16,fsdp:8,tensor:8",
        "--seq-len=8192", "--batch-size=128", "--sequence-parallel",
    ),
    "gpt3-175b": (
        "--model=gpt3-175b", "--target=h100:128x8", "--mesh=data:8,pipe:8,tensor:16",
        "--batch-size=1024", "--sequence-parallel",
    ),
}  # fmt: skip
FEW = {
    "llama-7b, 4 layers": (
        "--model=llama-7b", "--num-layers=4", "--target=h100:2x8",
        "--mesh=data:2,fsdp:2,tensor:4", "--seq-len=1024", "--batch-size=8",
    ),
}  # fmt: skip
SECONDS, BYTES = 600, 16 * 2**30


def run(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Runs a plan command from an empty cache."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "plan.json"
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "jaxckpt.plan", *arguments, f"--out={out}"],
            cwd=scratch,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr.strip().splitlines()[-1])
        plan = json.loads(out.read_text())
        seconds = time.perf_counter() - start
    used = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    kept = ("argument_bytes", "temp_bytes", "device_total_bytes", "recompute_fraction")
    return {
        "command": " ".join(arguments),
        "layer_plan": plan["layer_plan"],
        **{key: plan["compiled"][key] for key in kept},
        "compiles": plan["compiles"],
        "seconds": seconds,
        "largest_process_bytes": used,
    }


def findings(plans: dict[str, dict[str, Any]]) -> list[str]:
    wrong = []
    for name, plan in plans.items():
        limit = parse_target(plan["target"]).memory_limit
        if plan["device_total_bytes"] > limit:
            wrong.append(f"{name} does not fit")
        if plan["seconds"] > SECONDS:
            wrong.append(f"{name} took {plan['seconds']:.0f} seconds")
        if plan["largest_process_bytes"] > BYTES:
            wrong.append(f"{name} took {plan['largest_process_bytes'] / 2**30:.1f} GiB")
    return wrong


def draw(plans: dict[str, dict[str, Any]], path: Path) -> None:
    figure = pictures.new_figure(7, 1.8 + 0.7 * len(plans))
    axes = figure.subplots()
    size = 2**30
    for number, plan in enumerate(plans.values()):
        state, made = plan["argument_bytes"] / size, plan["temp_bytes"] / size
        axes.barh(number, state, color="#D9D9D9", edgecolor="#444444", height=0.55)
        axes.barh(
            number, made, left=state, color=pictures.COLORS[4], hatch="//",
            edgecolor="#444444", height=0.55,
        )  # fmt: skip
        said = f"{plan['device_total_bytes'] / size:.2f} GiB, {plan['seconds']:.0f} s"
        axes.annotate(
            said,
            (state + made, number),
            (4, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    limit = parse_target("h100:1").memory_limit / size
    axes.axvline(limit, color=pictures.LIMIT_COLOR, linestyle="--")
    axes.annotate(
        "H100", (limit, len(plans) - 0.55), (3, 0), textcoords="offset points"
    )
    axes.set_yticks(range(len(plans)), list(plans))
    axes.set_ylim(len(plans) - 0.4, -0.6)
    axes.set_xlim(0, 90)
    axes.set_xlabel("GiB per device (compiled): arguments (gray), temporary (hatched)")
    axes.spines[["top", "right"]].set_visible(False)
    pictures.save(figure, path)


def main() -> None:
    options = options_of(__doc__).parse_args()
    out = folder(options)
    check_compiler("h100:8")
    plans = {}
    for name, arguments in (FEW if options.fast else PLANS).items():
        (target,) = [a.partition("=")[2] for a in arguments if a.startswith("--target")]
        plans[name] = {"target": target, **run(arguments)}
        plan = plans[name]
        print(
            f"{name} on {target}: {plan['device_total_bytes'] / 2**30:.2f} GiB, "
            f"{plan['recompute_fraction']:.1%} recomputed, {plan['seconds']:.0f} s, "
            f"{plan['largest_process_bytes'] / 2**30:.1f} GiB here",
            flush=True,
        )
    wrong = findings(plans)
    write(out / "thousand_gpus.json", {"plans": plans, "findings": wrong})
    draw(plans, out / "thousand_gpus.png")
    finish(wrong)


if __name__ == "__main__":
    main()
