"""Run a stack of equal layers under a layer plan, on plain functions.

Each run of a plan is one `lax.scan` over checkpointed layers; a group is a
checkpointed function that scans again. Weights live in the *split layout*, in
which every run owns an array of its own: slicing one stacked array inside a
training step would copy the weights and their gradients.

Split layout of a pytree of per-layer values (weights, keys, ...):
  ``{"run_0": tree, "run_1": {"run_0": tree}, ...}`` with leaves of shape
  (count, ...) for a run of layers and (count, inner count, ...) inside a group;
  unrolled (``scan=False``) it is ``{"layer_0": tree, "layer_1": tree, ...}``.

The canonical layout, which does not depend on the plan, is the list of per-layer
trees: `join_layers` and `merge_layers` go between the two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from jaxckpt.automatic_names import name_values
from jaxckpt.layers import LayerPlan, Layers, Run, layer_plan
from jaxckpt.naming import list_names
from jaxckpt.policies import PolicyError
from jaxckpt.remat import checkpoint, split_static

Tree = Any
Body = Callable[[Any, Any], tuple[Any, Any]]


def stack(
    body: Body, plan: str | Layers, num_layers: int, *, scan: bool = True
) -> Callable[[Any, Tree], tuple[Any, Tree]]:
    """Stacks a layer function under a policy, a grouping or a layer plan.

    The contract is that of `jax.lax.scan`, with per-layer values in split layout.

    Args:
      body: one layer, ``(carry, layer_values) -> (carry, layer_output)``. The
        carry keeps its shape and dtype; the output may be None.
      plan: text of the policy language (``"sqrt"``, ``"4xnone+8xsave:context"``)
        or its object.
      num_layers: depth of the stack.
      scan: False unrolls the layers into straight-line code. That compiles slower
        and on GPU can keep all layers' activations alive.

    Nothing runs to find out whether the device gets loops that offload right:
    ``jaxckpt.testing.assert_offload_works(plan, num_layers=...)`` does.

    Returns:
      ``(carry, values) -> (carry, outputs)``, values and outputs in split layout.

    Raises:
      PolicyError: a bad plan, values that are not in the plan's layout, and, when
        called, a name that the layer has not.

    Example:
      >>> import jax.numpy as jnp
      >>> def layer(x, w):
      ...     return jnp.tanh(x @ w), None
      >>> weights = jnp.full((7, 8, 8), 0.1)
      >>> split = split_layers(weights, "every:3", num_layers=7)
      >>> {name: jax.tree.map(jnp.shape, run) for name, run in split.items()}
      {'run_0': {'run_0': (2, 3, 8, 8)}, 'run_1': (1, 8, 8)}
      >>> y, _ = stack(layer, "every:3", num_layers=7)(jnp.ones((2, 8)), split)
      >>> y.shape
      (2, 8)

    Source: Chen et al. 2016, arXiv 1604.06174, sections 4.1 to 4.3.
    """
    check_values = getattr(plan, "check_values", None)  # of a Plan
    plan = layer_plan(plan, num_layers)

    def run_stack(carry, values):
        expected = layout_keys(plan, scan=scan)
        if not isinstance(values, dict) or set(values) != set(expected):
            found = list(values) if isinstance(values, dict) else type(values).__name__
            raise PolicyError(
                f"values are not in the layout of {plan}: expected "
                f"{{{', '.join(expected[:3])}, ...}}, got {found}; use split_layers"
            )
        if check_values:
            check_values(_values_of_a_layer(body, plan, scan, carry, values))
        if scan:
            return _scan_runs(body, plan.runs, carry, values)
        return _unroll(body, plan, carry, values)

    return run_stack


def _values_of_a_layer(body: Body, plan: LayerPlan, scan: bool, carry, values):
    """Every value that a policy could keep in the first layer; nothing runs."""
    first = jax.eval_shape(
        lambda values: merge_layers(values, plan, plan.num_layers, scan=scan)[0], values
    )
    arrays, rebuild = split_static((carry, first))

    def layer(*arrays):
        return split_static(body(*rebuild(list(arrays))))[0]

    closed = name_values(jax.make_jaxpr(layer)(*arrays))
    return list_names(jex_core.jaxpr_as_fun(closed), *closed.in_avals)


def split_layers(
    values: Tree, plan: str | Layers, num_layers: int, *, scan: bool = True
) -> dict[str, Tree]:
    """Brings per-layer values into the layout that a plan runs on.

    Call it where the weights are made, not inside the training step: it copies.

    Args:
      values: a pytree whose leaves are stacked, (num_layers, ...).
      plan, num_layers, scan: as given to `stack`.
    """
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(values)}
    if sizes - {(num_layers,)}:
        raise PolicyError(
            f"per-layer values need a leading axis of {num_layers}, not "
            f"{sorted(sizes - {(num_layers,)})[0]}; join_layers takes a list of layers"
        )
    layers = [
        jax.tree.map(lambda leaf, i=i: leaf[i], values) for i in range(num_layers)
    ]
    return join_layers(layers, plan, num_layers, scan=scan)


def join_layers(
    layers: Sequence[Tree], plan: str | Layers, num_layers: int, *, scan: bool = True
) -> dict[str, Tree]:
    """Brings a list of per-layer trees (the canonical layout) into a plan's layout.

    As `split_layers`, for layers that are not stacked; undoes `merge_layers`.
    """
    plan = layer_plan(plan, num_layers)
    if len(layers) != num_layers:
        raise PolicyError(f"{len(layers)} layers for a stack of {num_layers}")
    if not scan:
        return {f"layer_{index}": layer for index, layer in enumerate(layers)}
    return _split_runs(plan.runs, list(layers))


def merge_layers(
    split: dict[str, Tree], plan: str | Layers, num_layers: int, *, scan: bool = True
) -> list[Tree]:
    """The list of per-layer trees of values in split layout; undoes `join_layers`."""
    plan = layer_plan(plan, num_layers)
    if not scan:
        return [split[f"layer_{index}"] for index in range(num_layers)]
    return _merge_runs(plan.runs, split)


def layout_keys(plan: LayerPlan, *, scan: bool) -> list[str]:
    """The top-level keys of the split layout, in order."""
    if scan:
        return [f"run_{index}" for index in range(len(plan.runs))]
    return [f"layer_{index}" for index in range(plan.num_layers)]


def in_loop(run: Run) -> bool:
    """Whether a scanned run is a loop that XLA keeps: more than one iteration."""
    return run.count > 1


def _scan_runs(body: Body, runs: Sequence[Run], carry, values):
    outputs = {}
    for index, run in enumerate(runs):
        key = f"run_{index}"
        carry, outputs[key] = lax.scan(_iteration(body, run), carry, values[key])
    return carry, outputs


def _iteration(body: Body, run: Run) -> Body:
    """One iteration of a run: a layer or a group, checkpointed."""

    def group(carry, values):
        return _scan_runs(body, run.group, carry, values)

    once = group if run.group else body
    return checkpoint(once, run.policy, in_loop=in_loop(run))


def _unroll(body: Body, plan: LayerPlan, carry, values):
    def layers(runs: Sequence[Run], start: int, carry):
        """Straight-line code for some runs; returns the outputs of its layers."""
        found = []
        for run in runs:
            for _ in range(run.count):

                def once(carry, run=run, start=start):
                    if run.group:
                        return layers(run.group, start, carry)
                    carry, output = body(carry, values[f"layer_{start}"])
                    return carry, [output]

                carry, outputs = checkpoint(once, run.policy, in_loop=False)(carry)
                found += outputs
                start += run.layers_per_iteration
        return carry, found

    carry, found = layers(plan.runs, 0, carry)
    outputs = {f"layer_{index}": output for index, output in enumerate(found)}
    return carry, outputs


def _split_runs(runs: Sequence[Run], layers: list[Tree]) -> dict[str, Tree]:
    split, start = {}, 0
    for index, run in enumerate(runs):
        iterations = []
        for _ in range(run.count):
            chunk = layers[start : start + run.layers_per_iteration]
            iterations.append(_split_runs(run.group, chunk) if run.group else chunk[0])
            start += run.layers_per_iteration
        split[f"run_{index}"] = jax.tree.map(_stack_leaves, *iterations)
    return split


def _merge_runs(runs: Sequence[Run], split: dict[str, Tree]) -> list[Tree]:
    layers = []
    for index, run in enumerate(runs):
        tree = split[f"run_{index}"]
        for i in range(run.count):
            iteration = jax.tree.map(lambda leaf, i=i: leaf[i], tree)
            layers += _merge_runs(run.group, iteration) if run.group else [iteration]
    return layers


def _stack_leaves(*leaves):
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return np.stack(leaves) if on_host else jnp.stack(leaves)
