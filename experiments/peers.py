"""Where is PyTorch's activation memory budget beside the exact frontier of one block?

    python -m experiments.peers

Takes about 5 seconds (--fast too) and needs cuDNN's package, which the `gpu-compiler`
extra brings; nothing is compiled. PyTorch's partitioner was asked for budgets from 1 to
0 on one Llama block (bf16, batch 2, sequence 4096, width 4096, 32 heads, MLP 11008),
and what it saves and recomputes was read from its graphs:
`tests/planner/torch_frontier.json`. Here the same block is traced, and for the bytes of
each of its points the least recomputation solved. Bytes and FLOPs of both are counted;
no time is measured.

Expected: at each point of PyTorch's the same FLOPs, at none more, and between its
points often fewer.
"""

import json
from pathlib import Path
from typing import Any

from experiments.common import check_compiler, finish, folder, options_of, write
from jaxckpt.command_line import choose_platform

choose_platform()

# ruff: noqa: E402  the platform is chosen before JAX is imported
import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxckpt import pictures
from jaxckpt.compiler.targets import KINDS
from jaxckpt.models.attention import attention
from jaxckpt.planner.graph import BlockGraph, block_graph
from jaxckpt.planner.solve import evaluate, solve

PEER = json.loads(
    (Path(__file__).parents[1] / "tests/planner/torch_frontier.json").read_text()
)
BATCH, TIME, DIM, HEADS, MLP = 2, 4096, 4096, 32, 11008
BETWEEN = 60  # sizes tried, from PyTorch's smallest to its largest
MANY = 10**6  # copies, beside which one copy's working bytes are nothing


def norm(x, scale):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def rotary(x, cos, sin):
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def block(x, w, cos, sin):
    """The block that PyTorch partitioned, in JAX."""
    y = norm(x, w["norm_1"])
    query, key, value = (
        (y @ w[name]).reshape(BATCH, TIME, HEADS, DIM // HEADS) for name in "qkv"
    )
    query, key = rotary(query, cos, sin), rotary(key, cos, sin)
    context = attention(query, key, value, implementation="cudnn")
    x = x + context.reshape(BATCH, TIME, DIM) @ w["out"]
    y = norm(x, w["norm_2"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def graph() -> BlockGraph:
    """The costed graph of the block, on an H100.

    Raises:
      RuntimeError: cuDNN is not installed.
    """

    def array(*shape, dtype=jnp.bfloat16):
        return ShapeDtypeStruct(shape, dtype)

    w = {name: array(DIM, DIM) for name in ("q", "k", "v", "out")}
    w |= {"gate": array(DIM, MLP), "up": array(DIM, MLP), "down": array(MLP, DIM)}
    w |= {name: array(DIM, dtype=jnp.float32) for name in ("norm_1", "norm_2")}
    table = array(TIME, 1, DIM // HEADS // 2, dtype=jnp.float32)
    x, kind = array(BATCH, TIME, DIM), KINDS["h100"]
    return block_graph(block, x, w, table, table, kind=kind)


def least(found: BlockGraph, saved: int) -> tuple[int, int]:
    """Bytes saved, and FLOPs run again, of the best choice within so many bytes."""
    working = evaluate(found.operations, ()).working_bytes
    ours = solve(found.operations, MANY * saved + working, copies=MANY)
    return ours.saved_bytes, ours.flops


def findings(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"at {row['saved_bytes']} bytes more FLOPs than PyTorch"
        for row in rows
        if row["ours_saved_bytes"] > row["saved_bytes"] or row["ours"] > row["theirs"]
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    figure = pictures.new_figure(8, 4.6)
    axes = figure.subplots()
    rows, forward = result["rows"], result["forward_flops"]
    points = {(row["ours_saved_bytes"], row["ours"]) for row in rows}
    ours = sorted(points | {tuple(stair) for stair in result["stairs"]})
    axes.step(
        [saved / 2**20 for saved, _ in ours], [100 * run / forward for _, run in ours],
        where="post", color="black", marker="*", markersize=11,
        label="jaxckpt: least recomputation, solved",
    )  # fmt: skip
    names = list(dict.fromkeys(row["decompositions"] for row in rows))
    for number, name in enumerate(names):
        points = sorted(
            (row["saved_bytes"] / 2**20, 100 * row["theirs"] / forward)
            for row in rows
            if row["decompositions"] == name
        )
        axes.plot(
            *zip(*points, strict=True), pictures.MARKERS[number], fillstyle="none",
            color=pictures.COLORS[number], markersize=9,
            label=f"PyTorch 2.13, decompositions: {name}",
        )  # fmt: skip
    axes.set_xlabel("MiB saved by one block (counted)")
    axes.set_ylabel("FLOPs run again, % of its forward pass (counted)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    pictures.save(figure, path)


def main() -> None:
    options = options_of(__doc__).parse_args()
    out = folder(options)
    check_compiler("h100:1")
    found, rows = graph(), []
    for group in PEER["points"]:
        for saved, flops in group["saved_bytes_and_recompute_flops"]:
            bytes_, ours = least(found, saved)
            rows.append(
                {
                    "decompositions": group["decompositions"],
                    "saved_bytes": saved,
                    "theirs": flops,
                    "ours_saved_bytes": bytes_,
                    "ours": ours,
                }
            )
            print(
                f"{saved / 2**20:8.1f} MiB: PyTorch {flops / 1e9:8.1f} GFLOP, here "
                f"{ours / 1e9:8.1f} for {bytes_ / 2**20:.1f} MiB",
                flush=True,
            )
    wrong = findings(rows)
    sizes = sorted({row["saved_bytes"] for row in rows})
    step = (sizes[-1] - sizes[0]) // BETWEEN
    tried = [sizes[0] + number * step for number in range(BETWEEN + 1)]
    stairs = [least(found, saved) for saved in tried]
    fewer = 0
    for saved, (_, flops) in zip(tried, stairs, strict=True):
        fewer += flops < min(
            row["theirs"] for row in rows if row["saved_bytes"] <= saved
        )
    print(f"fewer FLOPs than PyTorch's best that fits at {fewer} of {len(tried)} sizes")
    if not fewer:
        wrong.append("between PyTorch's points nothing is gained")
    result = {
        "source": PEER["source"], "forward_flops": found.forward_flops, "rows": rows,
        "stairs": stairs,
        "fewer_at": fewer, "findings": wrong,
    }  # fmt: skip
    write(out / "peers.json", result)
    draw(result, out / "peers.png")
    finish(wrong)


if __name__ == "__main__":
    main()
