"""Every kind of checkpointing that does nothing is found, and good code is not."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import compat, remat, split_layers, stack
from jaxckpt.layers import layer_plan
from jaxckpt.linter import lint_plan, lint_step

SAVEABLE = jax.checkpoint_policies
# A checkpoint's part of a gradient is only its recomputation there.
unseen_under_remat3 = pytest.mark.xfail(
    compat.remat3(),
    reason="gradients under JAX_REMAT3 have neither names nor inner checkpoints",
    strict=True,
)
W = jnp.ones((6, 16, 16))
X = jnp.ones((8, 16))


def block(x, w):
    hidden = checkpoint_name(x @ w, "hidden")
    return x + jnp.tanh(hidden) @ w.T


def scanned(layer):
    def loss(weights, x):
        return lax.scan(lambda c, w: (layer(c, w), None), x, weights)[0].sum()

    return jax.grad(loss)


def unrolled(layer):
    def loss(weights, x):
        for w in weights:
            x = layer(x, w)
        return x.sum()

    return jax.grad(loss)


@pytest.mark.parametrize("policy", ["none", "full", "save:hidden", "dots_saveable"])
def test_blocks_in_a_loop_have_no_findings(policy):
    assert lint_step(scanned(remat(block, policy)), W, X) == []


def test_groups_have_no_findings():
    layers = stack(lambda x, w: (block(x, w), None), "2x3xfull", num_layers=6)

    def loss(weights, x):
        return layers(x, weights)[0].sum()

    split = split_layers(W, "2x3xfull", num_layers=6)
    assert lint_step(jax.grad(loss), split, X) == []


def only(findings, words):
    assert [words in finding for finding in findings] == [True], findings


def test_a1_one_checkpoint_around_the_model():
    def model(weights, x):
        return lax.scan(lambda c, w: (block(c, w), None), x, weights)[0].sum()

    only(lint_step(jax.grad(jax.checkpoint(model)), W, X), "of the forward pass")


@unseen_under_remat3
@pytest.mark.parametrize(
    "wrapped, freed, kept",
    [
        (lambda wrap: lambda x, w: x + jnp.tanh(wrap(jnp.matmul)(x, w)), "0 B", "0 B"),
        (lambda wrap: lambda x, w: x + wrap(jax.nn.relu)(x @ w), "128 B", "512 B"),
    ],
)
def test_a2_a_checkpoint_of_one_matmul_or_of_cheap_operations(wrapped, freed, kept):
    layer = wrapped(functools.partial(jax.checkpoint, prevent_cse=False))
    only(lint_step(scanned(layer), W, X), f"frees {freed} and keeps {kept} for it")


def test_a2_cheap_operations_that_free_more_than_they_keep_are_no_finding():
    wrapped = jax.checkpoint(jax.nn.gelu, prevent_cse=False)
    assert lint_step(scanned(lambda x, w: x + wrapped(x @ w)), W, X) == []


def test_a5_unrolled_layers():
    only(lint_step(unrolled(remat(block, "full")), W, X), "6 equal checkpointed layers")


@unseen_under_remat3
def test_double_wrapping():
    twice = remat(remat(block, "full"), "full")
    only(lint_step(scanned(twice), W, X), "directly inside another")


def test_b11_a_policy_of_ones_own():
    own = jax.checkpoint(block, policy=lambda *_, **__: True, prevent_cse=False)
    only(lint_step(scanned(own), W, X), "JAX_REMAT3")


@unseen_under_remat3
@pytest.mark.parametrize("operation", [jnp.tanh, jax.nn.gelu, jax.nn.silu, jnp.sin])
def test_b8_a_name_after_the_nonlinearity(operation):
    def late(x, w):
        return x + checkpoint_name(operation(x @ w), "late") @ w.T

    policy = SAVEABLE.save_only_these_names("late")
    layer = jax.checkpoint(late, policy=policy, prevent_cse=False)
    only(lint_step(scanned(layer), W, X), "late is named after")


def test_a_name_after_the_nonlinearity_that_no_policy_wants_is_no_finding():
    def late(x, w):
        return x + checkpoint_name(jnp.tanh(x @ w), "late") @ w.T

    assert lint_step(scanned(remat(late, "full")), W, X) == []


def test_dots_policy_that_misses_batched_matmuls():
    def attention(x, w):
        y = (x @ w).reshape(2, 4, 16)
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", y, y))
        return x + jnp.einsum("bqk,bkd->bqd", scores, y).reshape(8, 16)

    layer = remat(attention, "dots_with_no_batch_dims_saveable")
    findings = lint_step(scanned(layer), W, X)
    only(findings, "does not keep every matmul of a block: 1 dot_general")
    assert lint_step(scanned(remat(attention, "dots_saveable")), W, X) == []


def test_i4_logits_that_dominate():
    head = jnp.ones((16, 4096))

    def loss(weights, x, head):
        y, _ = lax.scan(lambda c, w: (remat(block)(c, w), None), x, weights)
        return jax.nn.logsumexp(y @ head, axis=-1).sum()

    only(lint_step(jax.grad(loss, argnums=(0, 2)), W, X, head), "8x4096 (128.00 KiB)")


def test_h2_groups_whose_weights_outweigh_their_inputs():
    plan = layer_plan("every:2", 6)
    (finding,) = lint_plan(plan, weight_bytes=2048, input_bytes=1024)
    assert "weights (2.00 KiB) outweigh their inputs (1.00 KiB)" in finding
    assert lint_plan(plan, weight_bytes=1024, input_bytes=1024) == []
    assert lint_plan(layer_plan("full", 6), weight_bytes=2048, input_bytes=1) == []


# ---------------------------------------------------------------- names in policies


def under(*names):
    return jax.checkpoint(
        block, policy=SAVEABLE.save_only_these_names(*names), prevent_cse=False
    )


def named_in_the_loss(layer):
    def loss(weights, x):
        y, _ = lax.scan(lambda c, w: (layer(c, w), None), x, weights)
        return checkpoint_name(jnp.tanh(y), "final").sum()

    return jax.grad(loss)


def test_names_outside_the_checkpointed_function():
    (finding,) = lint_step(named_in_the_loss(under("hidden", "final")), W, X)
    assert finding.startswith("final is named outside the checkpointed function, at ")
    assert "test_linter.py:" in finding and "cannot reach it" in finding
    assert lint_step(named_in_the_loss(under("hidden")), W, X) == []


def test_a_name_beside_the_checkpoint_or_without_use_keeps_nothing():
    def beside(x, w):
        return checkpoint_name(under("hidden", "out")(x, w), "out")

    words = "out is named, at "
    only(lint_step(unrolled(beside), W[:2], X), words)

    def without_use(x, w):
        return x + checkpoint_name(jnp.tanh(x @ w) @ w.T, "out")

    layer = jax.checkpoint(
        without_use, policy=SAVEABLE.save_only_these_names("out"), prevent_cse=False
    )
    only(lint_step(scanned(layer), W, X), words)


def test_names_that_match_nothing():
    (finding,) = lint_step(scanned(under("hiden")), W, X)
    assert finding.startswith("no value of the step is named 'hiden'")
    assert finding.endswith("Did you mean 'hidden'?")
    offload = SAVEABLE.save_and_offload_only_these_names(
        names_which_can_be_saved=["hidden"], names_which_can_be_offloaded=["typo"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    layer = jax.checkpoint(block, policy=offload, prevent_cse=False)
    only(lint_step(scanned(layer), W, X), "named 'typo'")


def test_offloaded_names_and_names_behind_jit_have_no_findings():
    assert lint_step(scanned(remat(block, "offload:hidden")), W, X) == []
    layer = jax.checkpoint(
        jax.jit(block), policy=SAVEABLE.save_only_these_names("hidden")
    )
    assert lint_step(unrolled(layer), W[:2], X) == []
    assert lint_step(scanned(jax.jit(under("hidden"))), W, X) == []


@pytest.mark.parametrize(
    "policy",
    [
        SAVEABLE.save_anything_except_these_names("final"),
        SAVEABLE.save_any_names_but_these("final"),
        lambda primitive, *_, wanted=frozenset(["final"]), **params: False,
    ],
)
def test_names_that_a_policy_does_not_keep_have_no_findings(policy):
    layer = jax.checkpoint(block, policy=policy, prevent_cse=False)
    findings = lint_step(named_in_the_loss(layer), W, X)
    assert [finding for finding in findings if "final" in finding] == []


def test_names_of_a_policy_made_of_policies():
    both = SAVEABLE.save_from_both_policies(
        SAVEABLE.save_only_these_names("hidden", "final"),
        SAVEABLE.nothing_saveable,
    )
    layer = jax.checkpoint(block, policy=both, prevent_cse=False)
    only(lint_step(named_in_the_loss(layer), W, X), "final is named outside")
