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
# # Fit a bigger model
#
# A model that runs out of memory on this GPU trains on it under a plan. The planner gets
# a number of bytes and finds what to keep and what to compute again, so that as little as
# possible is computed twice and the compiled step stays within the bytes.
#
# Without a GPU the notebook takes a small model, and a budget of bytes that you see below
# stands for the GPU's memory: the same steps, but nothing really runs out.
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
# ## What is there?
# The model and batch are chosen so that standard training does not fit into this GPU.
# (JAX is not started here: it would take the memory that the next cells need.)

# %% tags=["parameters"]
SIZE = ""  # for example --model=gpt2-355m --batch-size=8; chosen below if empty
BUDGET = ""  # for example 12GiB; chosen below if empty
STEPS = 10

# %%
import shutil

CHOICES = {  # GiB of the GPU, at least: what needs more than that without a plan
    60: "--model=gpt2-1.5b --batch-size=32",
    30: "--model=gpt2-1.5b --batch-size=8",
    20: "--model=gpt2-774m --batch-size=8",
    10: "--model=gpt2-355m --batch-size=8",
    0: "--model=gpt2-124m --batch-size=16",
}
gpu = ""
if shutil.which("nvidia-smi"):
    query = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits"
    told = subprocess.run(query.split(), capture_output=True, text=True)
    gpu = told.stdout.split("\n")[0]
if gpu:
    name, mebibytes = gpu.split(", ")
    gibibytes = int(mebibytes) / 1024
    SIZE = SIZE or next(flags for least, flags in CHOICES.items() if gibibytes > least)
    if "T4" in name:
        SIZE += " --compute-dtype=float16"  # it has no bfloat16
    BUDGET = BUDGET or "85%"
    print(f"{name}, {gibibytes:.1f} GiB: {SIZE}, budget {BUDGET}")
else:
    SIZE = SIZE or "--model=tiny"
    print(f"no GPU: {SIZE}")

# %% [markdown]
# ## Without a plan
# `none` keeps everything, `full` only the inputs of layers. The bytes are compiled: the
# step has not run.

# %%
import tempfile

folder = tempfile.mkdtemp(prefix="jaxckpt-")
# !{python} -m jaxckpt.report {SIZE} --policies none full --json={folder}/report.json
assert not _exit_code, "the report ended with the error above"

# %% [markdown]
# On a GPU, see it fail: one line says what was needed and what there is. Without one, a
# budget between the two stands for its memory, nearer to `full`.

# %%
import json

rows = json.loads(pathlib.Path(folder, "report.json").read_text())["rows"]
totals = {row["policy"]: row["device_total_bytes"] for row in rows}
if not gpu and not BUDGET:
    BUDGET = f"{(totals['none'] + 3 * totals['full']) / 4 / 2**20:.0f}MiB"
flags = f"{SIZE} --policy=none --steps=2 --workdir={folder}/none"
attempt = f"{python} -m jaxckpt.train {flags}" if gpu else f"echo budget: {BUDGET}"
# !{attempt}

# %% [markdown]
# ## Plan
# The planner compiles a few candidates, and gives none that is over the budget. In the
# picture, the line is what the model predicts for every budget.

# %%
from IPython.display import Image

files = f"--out={folder}/plan.json --frontier={folder}/frontier.png"
# !{python} -m jaxckpt.plan {SIZE} --memory-budget={BUDGET} {files}
assert not _exit_code, "the planner ended with the error above"
Image(f"{folder}/frontier.png", width=640)

# %% [markdown]
# ## Train under the plan

# %%
run = f"{folder}/planned"
flags = f"--plan={folder}/plan.json --steps={STEPS} --workdir={run}"
# !{python} -m jaxckpt.train {SIZE} {flags}
assert not _exit_code, "training ended with the error above"

# %% [markdown]
# ## Did it hold?
# The receipt is of the program that ran. Bytes are compiled.

# %%
import matplotlib.pyplot as plt

plan = json.loads(pathlib.Path(folder, "plan.json").read_text())
receipt = json.loads(pathlib.Path(run, "receipt.json").read_text())
totals["the plan"] = receipt["step"]["device_total_bytes"]
budget = plan["budget_bytes"]
assert totals["the plan"] <= budget < totals["none"]

figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
axes.barh(list(totals), [total / 2**20 for total in totals.values()], color="#0072B2")
axes.axvline(budget / 2**20, color="#D55E00", linestyle="--", label="budget")
axes.set_xlabel("MiB on the device (compiled)")
axes.legend(loc="upper right")
plt.show()
again = receipt["step"]["recompute_fraction"]
print(f"The plan computes {again:.1%} of the FLOPs again (counted).")
