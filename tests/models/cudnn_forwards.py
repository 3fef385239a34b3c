"""Compile a scanned attention block for H100s that are not there; print JSON counts.

Runs in a process of its own, with ``JAX_PLATFORMS=cpu`` set before JAX is imported.
Usage: python cudnn_forwards.py [policies] [dtypes] [sharded] [ring]
"""

import collections
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.models.attention import attention
from jaxckpt.models.ring_attention import Ring

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
LAYERS, BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 256, 4, 2, 64

saveable = jax.checkpoint_policies
POLICIES = {
    "everything_saveable": saveable.everything_saveable,
    "save:context": saveable.save_only_these_names("context"),
    "nothing_saveable": saveable.nothing_saveable,
    "dots_saveable": saveable.dots_saveable,
}


def block(x, weights, ring=None):
    query = jnp.einsum("btm,mhd->bthd", x, weights["query"])
    key = jnp.einsum("btm,mhd->bthd", x, weights["key"])
    value = jnp.einsum("btm,mhd->bthd", x, weights["value"])
    context = attention(query, key, value, implementation="cudnn", ring=ring)
    return x + jnp.einsum("bthd,hdm->btm", context, weights["out"]), None


def step(policy_name, block=block):
    body = block
    if policy_name != "none":
        body = jax.checkpoint(block, prevent_cse=False, policy=POLICIES[policy_name])

    def loss(weights, x):
        y, _ = jax.lax.scan(body, x, weights)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss))


def compiled_hlo(function, mesh, dtype, batch_spec, weight_spec):
    width = HEADS * HEAD_DIM

    def abstract(shape, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def projection(heads):
        return abstract((LAYERS, width, heads, HEAD_DIM), weight_spec)

    weights = {
        "query": projection(HEADS),
        "key": projection(KV_HEADS),
        "value": projection(KV_HEADS),
        "out": abstract(
            (LAYERS, HEADS, HEAD_DIM, width),
            P(None, weight_spec[2] if len(weight_spec) else None, None, None),
        ),
    }
    x = abstract((BATCH, TIME, width), batch_spec)
    return function.lower(weights, x).compile().as_text()


def kernel_counts(hlo):
    targets = re.findall(r'custom_call_target="(__cudnn\$fmha[^"]*)"', hlo)
    return dict(collections.Counter(targets))


def forward_shapes(hlo):
    """Output shapes of the forward kernels, as in bf16[8,4,256,64]."""
    calls = [line for line in hlo.splitlines() if '"__cudnn$fmhaSoftmax"' in line]
    return [re.search(r"= \((\w+\[[\d,]+\])", line).group(1) for line in calls]


def collectives(hlo):
    pattern = r"\b(all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\("
    return dict(collections.Counter(re.findall(pattern, hlo)))


def main(parts):
    jax.devices()  # lets JAX discover the plugin
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x8"
    )
    devices = np.array(topology.devices)
    one = Mesh(devices[:1], ("data",))
    result = {"jax": jax.__version__}
    if "policies" in parts:
        result["policies"] = {
            name: kernel_counts(compiled_hlo(step(name), one, jnp.bfloat16, P(), P()))
            for name in ("none", *POLICIES)
        }
    if "dtypes" in parts:
        result["dtypes"] = {
            name: forward_shapes(
                compiled_hlo(step("save:context"), one, jnp.dtype(name), P(), P())
            )
            for name in ("bfloat16", "float16")
        }
    if "sharded" in parts:
        mesh = Mesh(devices.reshape(4, 2), ("data", "model"))
        by_batch_and_heads = P(None, None, "model", None)
        hlo = compiled_hlo(
            step("save:context"), mesh, jnp.bfloat16, P("data"), by_batch_and_heads
        )
        result["sharded"] = {
            "kernels": kernel_counts(hlo),
            "forward_shapes": forward_shapes(hlo),
            "collectives": collectives(hlo),
        }
    if "ring" in parts:
        mesh = Mesh(devices.reshape(2, 2, 2), ("data", "context", "model"))
        ring = Ring(mesh, "context", ("data",), ("model",))
        result["ring"] = {
            name: ring_counts(
                compiled_hlo(
                    step(name, functools.partial(block, ring=ring)),
                    mesh,
                    jnp.bfloat16,
                    P("data", "context"),
                    P(None, None, "model", None),
                )
            )
            for name in ("save:context", "nothing_saveable")
        }
    print(json.dumps(result))


def ring_counts(hlo):
    return {
        "kernels": kernel_counts(hlo),
        "forward_shapes": sorted(set(forward_shapes(hlo))),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
