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
# # Quickstart: train under a checkpoint policy and read the receipt
#
# A training step keeps activations from its forward pass for its backward pass.
# Checkpointing keeps fewer of them and computes the rest again. This notebook trains a
# small transformer that way and shows what it saved and what it cost. It runs on a GPU
# or a CPU; 2 CPU cores train for about four minutes and compile for two more.
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

# %% [markdown]
# ## Choose
# A policy says what each layer keeps; `dots_saveable` keeps the outputs of matrix
# multiplications.

# %% tags=["parameters"]
POLICY = "dots_saveable"
STEPS = 100
SIZE = "--model=tiny"  # other flags, too: --num-layers=8 --batch-size=32
COMPARED = "none dots_saveable save:context,out_proj full"

# %% [markdown]
# ## Train
# The data is the source of Python's standard library, so nothing is downloaded. The
# receipt at the end sets the step beside the same step without checkpointing.

# %%
import tempfile

run = tempfile.mkdtemp(prefix="jaxckpt-")
# !{python} -m jaxckpt.train {SIZE} --policy={POLICY} --steps={STEPS} --workdir={run}
assert not _exit_code, "training ended with the error above"

# %% [markdown]
# ## Look
# The receipt as a picture: bytes of the step as compiled, and what each name keeps
# (counted).

# %%
from IPython.display import Image

Image(f"{run}/receipt.png", width=720)

# %% [markdown]
# The loss of every step (measured) is in a file, a line per step.

# %%
import json

import matplotlib.pyplot as plt

lines = pathlib.Path(run, "metrics.jsonl").read_text().splitlines()
metrics = [json.loads(line) for line in lines]
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.plot([row["step"] for row in metrics], [row["loss"] for row in metrics])
axes.set(xlabel="step", ylabel="loss, nats per token (measured)")
plt.show()

# %% [markdown]
# ## Go on under another policy
# A policy changes memory and time, not the training: the same run goes on from its
# snapshot under `full`, which keeps only each layer's input.

# %%
flags = f"--policy=full --steps={STEPS + STEPS // 2} --workdir={run} --resume"
# !{python} -m jaxckpt.train {SIZE} {flags}
assert not _exit_code, "training ended with the error above"

# %% [markdown]
# ## Which policy?
# `report` compiles the step under each policy and runs none of them. Further down means
# less memory, further right means more computed twice.

# %%
picture = f"{run}/policies.png"
# !{python} -m jaxckpt.report {SIZE} --policies {COMPARED} --plot={picture}
assert not _exit_code, "the report ended with the error above"
Image(picture, width=640)

# %% [markdown]
# Next: `fit_a_bigger_model.ipynb` lets the planner choose within a number of bytes.
