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
# # Plan a cluster from a free CPU runtime
#
# XLA compiles for GPUs that are not there, and its memory figures are those of the real
# program. So a CPU runtime answers: does this model fit on those 8 GPUs, and what should
# each layer keep? Nothing runs, and no GPU is needed or used.
#
# Figures are labeled by where they come from: **compiled** (XLA's own bytes for the
# program), **counted** (in the program), **measured** (by a clock here) or **estimated**
# (by a formula).
#
# The outputs below are those of a computer with 2 CPU cores and no GPU, where the compiler
# was installed, with jax 0.12. Yours replace them when you run the cells.

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
# A target is a kind of GPU and how many: `h100:8` is one machine of eight, `h100:16x8`
# sixteen of them.

# %% tags=["parameters"]
TARGET = "h100:8"
SIZE = "--model=llama-7b --mesh=fsdp:8 --batch-size=8"
COMPARED = "none dots_saveable save:context,out_proj full"
COMPILER = True  # fetch the GPU compiler, once (about 3 GB), where it is not installed

# %% [markdown]
# ## The compiler
# It comes with the newest JAX, in a folder that only the commands below use: the JAX that
# is installed stays as it is.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # no GPU is used, also where there is one
has_plugins = importlib.util.find_spec("jax_plugins")
if not (has_plugins and importlib.util.find_spec("jax_plugins.xla_cuda13")):
    if COMPILER and source:
        wanted = f"jaxckpt[gpu-compiler,plot] @ {source}"
        install = [python, "-m", "pip", "install", "-q", "--target=compiler", wanted]
        subprocess.run(install, check=True)
        os.environ["PYTHONPATH"] = str(here / "compiler")
    else:
        TARGET = "cpu"
        print(
            "No GPU compiler: the CPU's compiles instead. Its bytes only order policies."
        )

# %% [markdown]
# ## Does it fit?
# The step of each policy is compiled for the target; a minute or two on Colab's CPU.
# `fits` compares with the memory of that GPU, and the last line says what to do.

# %%
import tempfile

from IPython.display import Image

folder = tempfile.mkdtemp(prefix="jaxckpt-")
files = f"--json={folder}/report.json --timeline={folder}/timeline.png"
# !{python} -m jaxckpt.report {SIZE} --target={TARGET} --policies {COMPARED} {files}
assert not _exit_code, "the report ended with the error above"

# %% [markdown]
# What is live when in the step, as compiled: without checkpointing memory piles up until
# the backward pass begins.

# %%
timeline = pathlib.Path(folder, "timeline.png")
Image(str(timeline), width=720) if timeline.exists() else print("only newer JAX tells")

# %% [markdown]
# ## Plan within a budget
# Here it is half-way between keeping everything and keeping only inputs of layers. A
# smaller budget leaves room for a larger batch; the picture shows what others would cost.

# %%
import json

rows = json.loads(pathlib.Path(folder, "report.json").read_text())["rows"]
totals = {row["policy"]: row["device_total_bytes"] for row in rows}
budget = f"{(totals['none'] + totals['full']) / 2 / 2**20:.0f}MiB"
files = f"--out={folder}/plan.json --frontier={folder}/frontier.png"
# !{python} -m jaxckpt.plan {SIZE} --target={TARGET} --memory-budget={budget} {files}
assert not _exit_code, "the planner ended with the error above"
Image(f"{folder}/frontier.png", width=640)

# %% [markdown]
# ## What was promised?
# The plan is a file. On the cluster, `python -m jaxckpt.train --plan=plan.json` with the
# same flags runs it, and its receipt says whether the bytes held.

# %%
plan = json.loads(pathlib.Path(folder, "plan.json").read_text())
compiled, limit = plan["compiled"]["device_total_bytes"], plan["budget_bytes"]
assert compiled <= limit
print(plan["layer_plan"])
print(f"{compiled / 2**30:.2f} of {limit / 2**30:.2f} GiB per device (compiled)")
print(f"{plan['recompute_fraction']:.1%} of the FLOPs are computed again (counted)")
