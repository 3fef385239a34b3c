"""The parity matrix: every policy trains the same model as no remat does.

Gradients of the whole transformer, seven layers of different weights, compared per
canonical layer. The default run holds a cut through the matrix that meets every
plan, scanned and unrolled, one device and eight, with and without dropout;
``pytest -m slow`` runs all of it.
"""

import functools
import itertools

import flax.linen as nn
import jax
import numpy as np
import pytest

from jaxckpt import join_layers, layer_plan, merge_layers
from jaxckpt.compiler.flops import count_flops
from jaxckpt.models.presets import model_config
from jaxckpt.models.transformer import Transformer
from jaxckpt.training.sharding import make_placement

LAYERS, DIM, HEADS, KV_HEADS, MLP, VOCAB = 7, 32, 4, 2, 48, 64
BATCH, TIME = 8, 16
HEAD = DIM // HEADS
TOKENS = BATCH * TIME

PLANS = (
    "none",
    "everything_saveable",
    "full",
    "dots_saveable",
    "minimal",
    "save:context,out_proj",
    "offload:decoder_layer_input",
    "save:mlpwi_0,mlpwi_1/offload:query_proj,key_proj,value_proj",
    "sqrt",
    "every:3",
    "every:2/none",
    "sqrt/save:context",
    "2xnone+3xsave:context+2xfull",
    "3xdots_saveable+4xevery:2",
    "1xfull+2x(1xnone+2xsave:mlpwi_0)",
    "1x7x1xdots_saveable",
)
OPTIONS = {
    "xla_backend_optimization_level": "0",  # compiles three times faster
    "xla_disable_hlo_passes": "cse_barrier_expander",  # unrolled: really recompute
}
MATRIX = list(itertools.product(PLANS, (True,), (8,), (0.25,)))
MATRIX += list(itertools.product(PLANS[::2], (True,), (1,), (0.25,)))  # others: CUT
MATRIX += list(itertools.product(PLANS[1::2], (True,), (1,), (0.0,)))
MATRIX += list(itertools.product(PLANS[::4], (False,), (8,), (0.25,)))
MATRIX += list(itertools.product(PLANS[2::4], (False,), (1,), (0.25,)))


def architecture(scan=True, dropout=0.0):
    return model_config(
        "tiny",
        num_layers=LAYERS,
        dim=DIM,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        mlp_dim=MLP,
        vocab_size=VOCAB,
        max_seq_len=TIME,
        attention="xla",
        loss_chunks=2,
        dropout=dropout,
        attention_dropout=dropout,
        scan_layers=scan,
    )


def batch():
    keys = jax.random.split(jax.random.key(1), 3)
    return (
        jax.random.randint(keys[0], (BATCH, TIME), 0, VOCAB),
        jax.random.randint(keys[1], (BATCH, TIME), 0, VOCAB),
        jax.random.uniform(keys[2], (BATCH, TIME)),
    )


@functools.cache
def canonical():
    """Parameters, ``layers`` as the list of per-layer trees."""
    init = jax.jit(Transformer(architecture()).init)
    params = jax.device_get(nn.unbox(init(jax.random.key(0), *batch())["params"]))
    # Scales and biases start equal in every layer: make every weight its own.
    random = np.random.default_rng(2)
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * random.standard_normal(leaf.shape, np.float32), params
    )
    return params | {"layers": merge_layers(params["layers"], "none", LAYERS)}


def loss_of(plan, scan, devices=1, dropout=0.0):
    """The loss as a function of parameters in the plan's layout."""
    place = {"data": 2, "fsdp": 2, "tensor": 2} if devices == 8 else {}
    placement = make_placement(place, jax.devices()[:devices])
    model = Transformer(architecture(scan, dropout), plan, placement.constrain)
    rngs = {"dropout": jax.random.key(3)} if dropout else {}

    def loss(params, *batch):
        return model.apply(
            {"params": params}, *batch, deterministic=not dropout, rngs=rngs
        )

    return loss, placement


def split(plan, scan):
    params = canonical()
    layers = join_layers(params["layers"], plan, LAYERS, scan=scan)
    return params | {"layers": layers}


def gradient(plan, scan, devices, dropout):
    loss, placement = loss_of(plan, scan, devices, dropout)
    boxed = jax.eval_shape(
        Transformer(architecture(scan), plan).init, jax.random.key(0), *batch()
    )["params"]
    params = jax.device_put(split(plan, scan), placement.of_boxed(boxed))
    given = jax.device_put(batch(), placement.sharding(("batch", "time")))
    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, *given)
    value, grads = lowered.compile(compiler_options=OPTIONS)(params, *given)
    value, grads = jax.device_get((value, grads))
    grads["layers"] = merge_layers(grads["layers"], plan, LAYERS, scan=scan)
    return value, grads


reference = functools.cache(functools.partial(gradient, "none"))


def check(plan, scan, devices, dropout, assert_same):
    want = reference(scan, devices, dropout)
    assert_same(gradient(plan, scan, devices, dropout), want, rtol=1e-6)


# Every other plan on one device with dropout, and other corners for a few of them.
CUT = [(plan, True, 1, 0.25) for plan in PLANS[1::2]]
CUT += [(plan, False, 1, 0.25) for plan in ("full", "every:3")]
CUT += [("2xnone+3xsave:context+2xfull", True, 8, 0.25)]
CUT += [("offload:decoder_layer_input", True, 8, 0.0)]


@pytest.mark.parametrize("plan, scan, devices, dropout", CUT)
def test_gradients_are_those_without_remat(plan, scan, devices, dropout, assert_same):
    check(plan, scan, devices, dropout, assert_same)


@pytest.mark.slow
@pytest.mark.parametrize("plan, scan, devices, dropout", MATRIX)
def test_gradients_everywhere(plan, scan, devices, dropout, assert_same):
    check(plan, scan, devices, dropout, assert_same)


@pytest.mark.slow
def test_the_matrix_is_whole():
    print(f"{len(MATRIX)} combinations")
    assert len(MATRIX) == len(set(MATRIX)) == 16 + 8 + 8 + 4 + 4


def test_references_agree_with_each_other(assert_same):
    for dropout in (0.0, 0.25):
        want = reference(True, 1, dropout)
        assert_same(reference(False, 1, dropout), want, rtol=2e-6)
    assert_same(reference(True, 8, 0.25), reference(True, 1, 0.25), rtol=5e-6)


def test_layers_and_dropout_matter_to_the_comparison():
    """The matrix can fail: layers differ, and so do the gradients under dropout."""
    _, grads = reference(True, 1, 0.0)
    _, dropped = reference(True, 1, 0.25)
    kernels = [layer["mlpwo"]["kernel"] for layer in grads["layers"]]
    for one, other in itertools.combinations(kernels, 2):
        assert np.abs(one - other).max() > 0.01 * np.abs(one).max()
    difference = np.abs(dropped["lm_head"] - grads["lm_head"]).max()
    assert difference > 0.01 * np.abs(grads["lm_head"]).max()


# Exact counts. A layer's matmuls, in FLOPs; the loss is outside the layers.

QUERY = OUT = 2 * TOKENS * DIM * DIM
KEY = VALUE = 2 * TOKENS * DIM * KV_HEADS * HEAD
SCORES = WEIGHTED = 2 * BATCH * HEADS * TIME * TIME * HEAD
UP = DOWN = 2 * TOKENS * DIM * MLP
LAYER = QUERY + KEY + VALUE + SCORES + WEIGHTED + OUT + 2 * UP + DOWN
ALL_BUT_DOWN = LAYER - DOWN  # the last matmul's output is no residual
LOGITS = 2 * TOKENS * DIM * VOCAB

RECOMPUTED = {  # FLOPs of recomputation in all layers
    "none": 0,
    "everything_saveable": 0,
    "dots_saveable": 0,
    "full": LAYERS * ALL_BUT_DOWN,
    "minimal": LAYERS * (SCORES + WEIGHTED),
    "save:context": LAYERS * (ALL_BUT_DOWN - WEIGHTED),
    "save:mlpwi_0": LAYERS * (ALL_BUT_DOWN - UP),
    "save:mlpwi_0,mlpwi_1": LAYERS * (ALL_BUT_DOWN - 2 * UP),
    "save:context,out_proj,mlpwi_0,mlpwi_1": LAYERS * (ALL_BUT_DOWN - WEIGHTED)
    - LAYERS * (OUT + 2 * UP),
    "offload:query_proj,key_proj,value_proj": LAYERS
    * (ALL_BUT_DOWN - QUERY - KEY - VALUE),
    "2xnone+5xfull": 5 * ALL_BUT_DOWN,
    "2xnone+3xsave:context+2xfull": 5 * ALL_BUT_DOWN - 3 * WEIGHTED,
}


@pytest.mark.parametrize("plan", RECOMPUTED)
def test_recomputed_flops_are_exact(plan):
    loss, _ = loss_of(plan, scan=True)
    count = count_flops(jax.value_and_grad(loss), split(plan, True), *batch())
    assert count.forward == LAYERS * LAYER + LOGITS
    assert count.backward == 2 * (LAYERS * LAYER + LOGITS)
    assert count.recompute == RECOMPUTED[plan]
    assert count.other == 0


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scan", [True, False])
def test_recompute_is_the_difference_to_no_remat(plan, scan):
    """By phase as by total, to the FLOP, grouped plans among them."""

    def count(plan):
        loss, _ = loss_of(plan, scan, dropout=0.25)
        return count_flops(jax.value_and_grad(loss), split(plan, scan), *batch())

    none, got = count("none"), count(plan)
    assert got.total - none.total == got.recompute
    assert (got.forward, got.backward) == (none.forward, none.backward)


DOTS = {  # dot_generals in the grad jaxpr, loops counted in
    # a layer has 9 forward and 18 backward, each of the loss's two chunks 3
    "none": 27 * LAYERS + 6,
    "dots_saveable": 27 * LAYERS + 6,
    "full": (27 + 8) * LAYERS + 6,
    "minimal": (27 + 2) * LAYERS + 6,
    "save:context": (27 + 7) * LAYERS + 6,
    "save:mlpwi_0,mlpwi_1": (27 + 6) * LAYERS + 6,
    # Two groups of three run forward once more, as loops whole.
    "every:3": (27 + 8) * LAYERS + 2 * 3 * 9 + 6,
    "2x3xnone+1xnone": 27 * LAYERS + 2 * 3 * 9 + 6,
}


@pytest.mark.parametrize("plan", DOTS)
def test_dot_generals_are_exact(plan, count_runs):
    loss, _ = loss_of(plan, scan=True)
    runs = count_runs(jax.grad(loss), split(plan, True), *batch())
    assert runs["dot_general"] == DOTS[plan]


# Bytes that the whole model keeps between forward and backward, all layers.

STREAM = TOKENS * DIM * 4
CONTEXT, MLP_IN = STREAM, TOKENS * MLP * 4
KEYS = TOKENS * KV_HEADS * HEAD * 4
SCORE = BATCH * HEADS * TIME * TIME * 4
KEPT = {  # per layer, beside its input
    "full": 0,
    "save:context": CONTEXT,
    "save:context,out_proj": 2 * CONTEXT,
    "save:query_proj,key_proj,value_proj": CONTEXT + 2 * KEYS,
    "save:mlpwi_0,mlpwi_1": 2 * MLP_IN,
    "offload:mlpwi_0,mlpwi_1": 2 * MLP_IN,
    "minimal": 2 * CONTEXT + 2 * KEYS + 2 * MLP_IN,
    "dots_saveable": 3 * CONTEXT + 2 * KEYS + 2 * MLP_IN + SCORE,
}


@pytest.mark.parametrize("plan", KEPT)
def test_bytes_kept_are_exact(plan, saved_bytes):
    def of_layers(plan):
        loss, _ = loss_of(plan, scan=True)
        return saved_bytes(loss, split(plan, True), *batch())

    assert of_layers(plan) - of_layers("full") == LAYERS * KEPT[plan]


def test_plans_resolve_to_the_depth():
    assert all(layer_plan(plan, LAYERS).num_layers == LAYERS for plan in PLANS)
