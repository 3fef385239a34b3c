# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bring your own model: Flax NNX and Equinox
#
# jaxckpt works on any JAX function or module. For a model of your own: see what a policy
# can speak of, let the planner choose within a number of bytes, apply it, and check it
# with assertions that you can put into your test suite. It takes about a minute.
#
# Figures are labeled by where they come from: **compiled** (XLA's own bytes for the
# program), **counted** (in the program), **measured** (by a clock here) or **estimated**
# (by a formula).
#
# The outputs below are those of a computer with 2 CPU cores and no GPU, with the versions
# that Colab has (Python 3.13, jax 0.7.2). Yours replace them when you run the cells.

# %% [markdown]
# ## Install
# From the checkout that this notebook lies in, or from an address that you set; it takes
# the JAX that is there. On Colab bring a checkout first: clone it in a cell before this
# one, `!git clone https://...`, or upload a zip of it (the folder icon at the left) and
# unpack it, `!unzip -q jaxckpt.zip`. Or set `ADDRESS`, as in `git+https://...`.

# %%
ADDRESS = ""  # what pip installs jaxckpt from; it has no public address yet

import importlib.util
import pathlib
import subprocess
import sys

python, here = sys.executable, pathlib.Path.cwd()
near = [here, *here.parents, *here.glob("*/")]
found = [folder for folder in near if (folder / "jaxckpt/remat.py").exists()]
source = ADDRESS or (found[0].as_uri() if found else "")
spec = importlib.util.find_spec("jaxckpt")
if spec is None or spec.origin is None:
    if not source:
        raise SystemExit("Set ADDRESS above, or copy a checkout of jaxckpt to here.")
    subprocess.run([python, "-m", "pip", "install", "-q", source], check=True)
    importlib.invalidate_caches()

if not importlib.util.find_spec("equinox"):
    subprocess.run([python, "-m", "pip", "install", "-q", "equinox"], check=True)
    importlib.invalidate_caches()

# %% tags=["parameters"]
DEPTH, DIM, BATCH = 6, 256, 1024

# %% [markdown]
# ## A model in Flax NNX
# One line is not plain NNX: `checkpoint_name` gives a value a name. It computes nothing.

# %%
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxckpt


class Block(nnx.Module):
    def __init__(self, dim, rngs):
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):
        hidden = checkpoint_name(self.up(self.norm(x)), "hidden")
        return x + self.down(nnx.gelu(hidden))


x = jax.random.normal(jax.random.key(1), (BATCH, DIM))

# %% [markdown]
# ## Names
# What a policy can save or offload in a block, with its bytes (counted).

# %%
block = Block(DIM, nnx.Rngs(0))
for value in jaxckpt.list_names(block, x):
    print(f"{value.name}  {value.dtype}{list(value.shape)}  {value.nbytes:,} bytes")

# %% [markdown]
# A name that is not there is an error. JAX itself would compute everything again, silently.

# %%
try:
    jaxckpt.remat(block, "save:hiden")(x)
except jaxckpt.PolicyError as error:
    print(error)

# %% [markdown]
# ## Apply a policy
# `remat` takes the module, or its class, and gives back the same kind of thing with the
# same parameters. Wrap every block, not the whole model.


# %%
class Model(nnx.Module):
    def __init__(self, policy, rngs):
        blocks = [Block(DIM, rngs) for _ in range(DEPTH)]
        self.blocks = nnx.Sequential(*[jaxckpt.remat(one, policy) for one in blocks])

    def __call__(self, x):
        return self.blocks(x)


def loss_under(policy):
    """The loss as a function of arrays, and the arrays."""
    graph, weights = nnx.split(Model(policy, nnx.Rngs(0)))
    return lambda weights, x: jnp.mean(nnx.merge(graph, weights)(x) ** 2), weights


# %% [markdown]
# ## Verify
# The gradients are the same, and the compiled step takes less. These are assertions for
# your own tests: they fail with the numbers in the message.

# %%
from jaxckpt.testing import assert_peak_below, assert_same_gradients

plain, weights = loss_under("none")
memory = {}
for policy in ("none", "save:hidden", "full"):
    loss, _ = loss_under(policy)
    assert_same_gradients(loss, plain, weights, x, rtol=1e-5)
    compiled = assert_peak_below(jax.grad(loss), weights, x, limit="10GiB")
    memory[policy] = compiled.device_total_bytes
    print(f"{policy:12} {memory[policy] / 2**20:7.1f} MiB (compiled), same gradients")
assert memory["full"] < memory["save:hidden"] < memory["none"]

# %% [markdown]
# ## Plan
# Names are not needed: the planner names every value itself. It gets the plain loss and a
# budget, and the compiled program with its gradients stays within it.

# %%
whole = jaxckpt.plan(plain, weights, x, budget=100 * 2**30)
least, most = memory["full"], whole.compiled["device_total_bytes"]
budget = (4 * least + most) // 5
plan = jaxckpt.plan(plain, weights, x, budget=budget)
used = plan.compiled["device_total_bytes"]
print(f"budget {budget / 2**20:.1f} MiB; compiled {used / 2**20:.1f} MiB")
print(f"{plan.recompute_fraction:.1%} of the FLOPs are computed again (counted)")
assert used <= budget
planned = jaxckpt.remat(plain, plan)
assert_same_gradients(planned, plain, weights, x, rtol=1e-5)

# %% [markdown]
# The picture: what several budgets cost. Each point is a compiled plan.

# %%
import matplotlib.pyplot as plt

points = [(used / 2**20, 100 * plan.recompute_fraction)]
for share in (0.4, 0.7, 1.0):
    found = jaxckpt.plan(plain, weights, x, budget=int(least + share * (most - least)))
    total = found.compiled["device_total_bytes"] / 2**20
    points.append((total, 100 * found.recompute_fraction))
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(*zip(*points, strict=True), "o-", color="#0072B2")
axes.set_xlabel("MiB on the device (compiled)")
axes.set_ylabel("recomputed FLOPs, % (counted)")
plt.show()

# %% [markdown]
# ## The same in Equinox
# A module is a pytree, so it is the argument of the loss itself.

# %%
import equinox as eqx


class Layer(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(DIM, 4 * DIM, key=first)
        self.down = eqx.nn.Linear(4 * DIM, DIM, key=second)

    def __call__(self, x):
        hidden = checkpoint_name(jax.vmap(self.up)(x), "hidden")
        return x + jax.vmap(self.down)(jax.nn.gelu(hidden))


def mean_square(layers, x):
    for layer in layers:
        x = layer(x)
    return jnp.mean(x**2)


layers = [Layer(key) for key in jax.random.split(jax.random.key(0), DEPTH)]
kept = [jaxckpt.remat(layer, "save:hidden") for layer in layers]
gradient = eqx.filter_grad(mean_square)
for name, model in (("none", layers), ("save:hidden", kept)):
    compiled = assert_peak_below(gradient, model, x, limit="10GiB")
    print(f"{name:12} {compiled.device_total_bytes / 2**20:7.1f} MiB (compiled)")

# %% [markdown]
# The assertion takes functions of arrays, so the layers' arrays are taken out.

# %%
arrays, others = eqx.partition(layers, eqx.is_array)


def loss_of(policy):
    def loss(arrays, x):
        model = eqx.combine(arrays, others)
        return mean_square([jaxckpt.remat(layer, policy) for layer in model], x)

    return loss


assert_same_gradients(loss_of("save:hidden"), loss_of("none"), arrays, x, rtol=1e-5)
print("same gradients")
