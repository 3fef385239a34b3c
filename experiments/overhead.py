"""Does jaxckpt cost anything over hand-written JAX with the same jax.checkpoint?

    python -m experiments.overhead

Takes about 2 minutes on 2 CPU cores (--fast: 1, a fifth of the rounds). One
training step of a small Llama (forward, backward, AdamW) is written twice: here by
hand on plain arrays, and by `jaxckpt.training.step`. Both take the same weights and
batches and reach the same loss. Steps of the two alternate in one process; the figure
is the median over rounds of ours / by hand.

Expected: a ratio of at most 1.02 under every policy.
"""

import statistics
import time
from pathlib import Path
from typing import Any

from experiments.common import finish, folder, options_of, write
from jaxckpt.command_line import choose_platform

choose_platform()

# ruff: noqa: E402  the platform is chosen before JAX is imported
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxckpt import pictures
from jaxckpt.compiler.memory import compile_step
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.optim import make_optimizer
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

POLICIES = {
    "none": None,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
}


def hand_written_step(config: TrainConfig, policy):
    """The same step as anyone would write it, without Flax or jaxckpt."""
    model, optimizer = config.architecture, make_optimizer(config)
    head = model.size_of_head

    def norm(x, scale):
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * lax.rsqrt(variance + model.norm_epsilon) * scale

    def rotary(x):
        half = head // 2
        frequencies = model.rope_theta ** (-jnp.arange(half) / half)
        angles = jnp.arange(x.shape[1])[:, None] * frequencies
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def block(x, w):
        y = norm(x, w["attention_norm"]["scale"])
        q, k, v = (
            jnp.einsum("btd,dhk->bthk", y, w[name]["kernel"])
            for name in ("query_proj", "key_proj", "value_proj")
        )
        logits = jnp.einsum("bthk,bshk->bhts", rotary(q), rotary(k)) / head**0.5
        mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        probabilities = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
        context = jnp.einsum("bhts,bshk->bthk", probabilities, v)
        x += context.reshape(*x.shape[:2], -1) @ w["out_proj"]["kernel"]
        y = norm(x, w["mlp_norm"]["scale"])
        gate, up = y @ w["mlpwi_0"]["kernel"], y @ w["mlpwi_1"]["kernel"]
        return x + (jax.nn.silu(gate) * up) @ w["mlpwo"]["kernel"], None

    layer = block
    if policy is not None:
        layer = jax.checkpoint(block, policy=policy, prevent_cse=False)

    def loss(params, batch):
        x = params["embedding"][batch["inputs"][0]]
        x, _ = lax.scan(layer, x, params["layers"]["run_0"])
        x = norm(x, params["final_norm"]["scale"])
        targets, weights = batch["targets"][0], batch["weights"][0]

        @jax.checkpoint
        def chunk_loss(total, chunk):
            x, targets, weights = chunk
            logits = x @ params["lm_head"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return total + jnp.sum(losses * weights), None

        def chunks(x):
            count = model.num_loss_chunks(config.sequence_length)
            return x.reshape(x.shape[0], count, -1, *x.shape[2:]).swapaxes(0, 1)

        total, _ = lax.scan(
            chunk_loss, 0.0, (chunks(x), chunks(targets), chunks(weights))
        )
        return total / jnp.sum(weights)

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = optimizer.update(
            grads, state["opt_state"], state["params"]
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, value

    return jax.jit(step, donate_argnums=0)


def measure(name: str, rounds: int) -> dict:
    """Medians of alternating steps under one policy."""
    model = model_config("tiny", num_layers=6, dim=192, mlp_dim=512, attention="xla")
    config = TrainConfig(policy=name, architecture=model, batch_size=8)
    program = make_program(config, make_placement({}, jax.devices()[:1]))
    ours, _ = compile_step(program.step, program.state, program.batch, platform="cpu")
    state = program.init()
    plain = {key: jax.tree.map(jnp.copy, state[key]) for key in ("params", "opt_state")}
    by_hand, _ = compile_step(
        hand_written_step(config, POLICIES[name]), plain, program.batch, platform="cpu"
    )
    random = np.random.default_rng(0)
    shape = program.batch["inputs"].shape
    losses, seconds = {"ours": [], "by hand": []}, {"ours": [], "by hand": []}

    def timed(label, function, state, batch):
        start = time.perf_counter()
        state, output = jax.block_until_ready(function(state, batch))
        seconds[label].append(time.perf_counter() - start)
        loss = output["loss"] if label == "ours" else output
        losses[label].append(float(loss))
        return state

    for round_number in range(rounds + 3):
        tokens = random.integers(0, model.vocab_size, (2, *shape), dtype=np.int32)
        batch = {
            "inputs": tokens[0],
            "targets": tokens[1],
            "weights": np.ones(shape, np.float32),
        }
        batch = jax.device_put(batch)
        if round_number % 2:  # neither of the two is always first
            state = timed("ours", ours, state, batch)
            plain = timed("by hand", by_hand, plain, batch)
        else:
            plain = timed("by hand", by_hand, plain, batch)
            state = timed("ours", ours, state, batch)

    np.testing.assert_allclose(losses["ours"], losses["by hand"], rtol=1e-4)
    ratios = [a / b for a, b in zip(*(seconds[k][3:] for k in seconds), strict=True)]
    return {
        "policy": name,
        "ours_ms": 1e3 * statistics.median(seconds["ours"][3:]),
        "by_hand_ms": 1e3 * statistics.median(seconds["by hand"][3:]),
        "median_ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    figure = pictures.new_figure(6, 3)
    axes = figure.subplots()
    for number, row in enumerate(result["rows"]):
        low, middle, high = row["quartiles"]
        axes.errorbar(
            middle, number, xerr=[[middle - low], [high - middle]], capsize=4,
            color=pictures.COLORS[number], fmt=pictures.MARKERS[number], markersize=8,
        )  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(1.02, color=pictures.LIMIT_COLOR, linestyle="--")
    axes.annotate("limit 1.02", (1.02, 2.35), (4, 0), textcoords="offset points")
    names = [row["policy"] for row in result["rows"]]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(2.6, -0.6)
    axes.set_xlabel("step time, jaxckpt / by hand (median and quartiles, measured)")
    axes.set_title(f"a small Llama on a {result['device']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    pictures.save(figure, path)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    out = folder(options)
    rounds = options.rounds // 5 if options.fast else options.rounds
    rows = []
    for name in POLICIES:
        rows.append(measure(name, rounds))
        row = rows[-1]
        print(
            f"{name:18} ours {row['ours_ms']:7.1f} ms  by hand "
            f"{row['by_hand_ms']:7.1f} ms  median ratio {row['median_ratio']:.3f}",
            flush=True,
        )
    result = {"device": jax.devices()[0].device_kind, "rounds": rounds, "rows": rows}
    write(out / "overhead.json", result)
    draw(result, out / "overhead.png")
    limit = 1.1 if options.fast else 1.02  # few rounds say little
    finish(
        [
            f"a median ratio of {row['median_ratio']:.3f} under {row['policy']}"
            for row in rows
            if row["median_ratio"] > limit
        ]
    )


if __name__ == "__main__":
    main()
