"""Master weights in host memory, and the copy of them that the model computes with.

The master is float32 and the optimizer's alone. On the device is a copy in the compute
dtype, made with the very cast that each use of a float32 weight makes, so that the
numbers are those of a run without:

* matrices (kernels, embeddings, the output matrix) are cast;
* norms' scales and all biases stay float32, in which the model uses them or sums their
  gradients; they are a share of 1 / dim.

Gradients of kernels come in the compute dtype, as they leave their matmul. Those of
tables that rows are looked up in are sums over tokens, and are made in float32, as are
all sums over micro-batches, in a pipeline or not.

Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.1; Ren et al.,
"ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021, where it is on the
host.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.training.optim import is_matrix

MASTER = "master"  # its name in a state, whose "params" are the copy then

_TABLES = ("embedding", "position_embedding")


def compute_copy(master: Any, dtype: Any) -> Any:
    """The parameters that a model computes with, of its float32 ones.

    Example:
      >>> block = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
      >>> copy = compute_copy({"out_proj": block}, "bfloat16")
      >>> {name: str(leaf.dtype) for name, leaf in copy["out_proj"].items()}
      {'bias': 'float32', 'kernel': 'bfloat16'}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.astype(dtype) if is_matrix(path) else leaf, master
    )


def differentiable(copy: Any, *, summed: bool = False) -> Any:
    """The copy with its tables as float32, so that their gradients are.

    Args:
      copy: of `compute_copy`.
      summed: whether the model itself adds up gradients of several uses, as a pipeline
        does, in the dtype of its parameters: then all are float32.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf.astype(jnp.float32) if summed or path[-1].key in _TABLES else leaf
        ),
        copy,
    )


def without_copy(state: dict[str, Any]) -> dict[str, Any]:
    """A state with its float32 parameters as ``params``, however it keeps them."""
    if MASTER not in state:
        return state
    rest = {name: part for name, part in state.items() if name != MASTER}
    return {**rest, "params": state[MASTER]}
