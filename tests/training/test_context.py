"""A sequence cut over devices: the whole model, its rules and what the planner sees."""

import functools
import json
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxckpt import layer_plan
from jaxckpt.compiler.flops import PHASES, count_flops
from jaxckpt.compiler.targets import KINDS
from jaxckpt.models.transformer import Transformer
from jaxckpt.planner.graph import block_graph
from jaxckpt.planner.solve import evaluate
from jaxckpt.policies import Policy
from jaxckpt.remat import checkpoint
from jaxckpt.training.inspect import layer_residuals, one_layer

pytestmark = pytest.mark.usefixtures("compile_fast")
GQA = dict(num_layers=2, num_heads=4, num_kv_heads=2, loss_chunks=2)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp:2,context:2,tensor:2", dict(policy="full", sequence_parallel=True)),
        pytest.param("context:4", dict(policy="save:context"), marks=pytest.mark.slow),
        pytest.param(
            "data:2,context:2", dict(policy="sqrt", gpt=True), marks=pytest.mark.slow
        ),
    ],
)
def test_a_context_axis_trains_like_one_device(
    make_config, programs, losses, mesh, options
):
    config = make_config(architecture=GQA, **options)
    one = losses(programs(config), steps=5)
    np.testing.assert_allclose(losses(programs(config, mesh), steps=5), one, rtol=1e-5)
    assert len(set(one)) == 5  # it moves


@pytest.mark.slow
def test_logits_come_in_the_order_of_the_sequence(make_config, place, assert_same):
    model = make_config(architecture=GQA).architecture
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 256)
    bare = Transformer(model)
    params = bare.init(jax.random.key(0), tokens, tokens, jnp.ones((2, 16)))
    params = nn.unbox(params)
    placement = place("context:4")
    ours = Transformer(model, "none", placement.constrain, placement.ring)

    @functools.partial(jax.jit, static_argnums=0)
    def logits(model, params):
        return model.apply(params, tokens, method="logits")

    assert_same(logits(ours, params), logits(bare, params), rtol=1e-5)


def test_tokens_and_weights_are_cut_over_context(place):
    placement = place("fsdp:2,context:2,tensor:2", sequence_parallel=True)
    assert placement.batch.spec == P(None, ("pipe", "data", "fsdp"), "context")
    stream = placement.sharding(("batch", "residual_time", "residual"))
    assert stream.spec == P(("data", "fsdp"), ("context", "tensor"), None)
    kernel = placement.sharding(("embed", "heads", "head_dim"))
    assert kernel.spec == P(("fsdp", "context"), "tensor", None)
    assert place("fsdp:2").ring is None


@pytest.mark.parametrize(
    "save",
    [("context",), ("query_proj", "key_proj", "value_proj", "mlpwi_0", "mlpwi_1")],
)
def test_the_planner_counts_a_ring_exactly(make_config, place, save):
    """FLOPs of all devices, bytes of one."""
    config = make_config(batch_size=4, architecture=GQA)
    placement = place("fsdp:2,context:2,tensor:2")
    layer = one_layer(config, placement)
    graph = block_graph(
        layer.apply, *layer.arguments, kind=KINDS["h100"], shardings=layer.shardings
    )
    policy = Policy(save=save)
    promised = evaluate(graph.operations, save)

    def loss(params, x):
        kept = checkpoint(layer.apply, policy, in_loop=True)
        return jnp.sum(jnp.sin(kept(params, x, layer.arguments[2])))

    count = count_flops(jax.grad(loss, argnums=(0, 1)), *layer.arguments[:2])
    assert promised.flops == count.recompute
    assert graph.forward_flops == count.forward
    kept = layer_residuals(config, placement)(policy)
    kept = [one for one in kept if one.name in save]
    assert {one.name for one in kept} == set(save)
    assert promised.saved_bytes == sum(one.nbytes for one in kept)
    if save == ("context",):
        # Of 4 x 16 tokens and 4 heads of 8: an eighth of the output and of the sums.
        assert promised.saved_bytes == 4 * (4 * 16 * 4 * 8 + 4 * 16 * 4) // 8


def test_a_plan_of_the_layers_is_independent_of_the_ring(make_config, programs):
    """Weights, names and shapes are those of a model without one."""
    config = make_config(architecture=GQA)
    one, many = programs(config), programs(config, "context:4")
    assert one.plan == many.plan == layer_plan("none", 2)
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), p.state["params"])
        for p in (one, many)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_saving_the_context_of_128k_tokens_spares_a_ring(tmp_path):
    """Two layers of llama3-8b on 8 H100: keys and values of 16 Ki tokens are 64 MiB per
    layer and device, and take seven steps."""
    pytest.importorskip("jax_plugins.xla_cuda13", exc_type=ImportError)
    saved = tmp_path / "report.json"
    arguments = [
        *("--model=llama3-8b", "--num-layers=2", "--target=h100:8"),
        *("--mesh=context:8", "--batch-size=1", "--seq-len=131072"),
        *("--policies", "save:context", "nothing_saveable", f"--save={saved}"),
    ]
    subprocess.run([sys.executable, "-m", "jaxckpt.report", *arguments], check=True)
    kept, recomputed = json.loads(saved.read_text())["rows"]
    assert kept["fits"] and recomputed["fits"]
    spared = {
        phase: recomputed["collective_bytes"][phase] - kept["collective_bytes"][phase]
        for phase in PHASES
    }
    step = 2 * 64 * 2**20
    # A ring that runs again has made its way's first step: XLA shares it with the way
    # back.
    again = {"forward": 0, "recompute": 7 * step, "backward": -step, "other": 0}
    assert spared == again
    runs = [row["attention_forward_runs"] for row in (kept, recomputed)]
    assert runs == [8, 16]  # kernels per layer and device: one per step
