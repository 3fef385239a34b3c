"""A stack of equal Flax Linen blocks under a layer plan, with `nn.remat` and `nn.scan`.

What `nn.scan` and `nn.remat_scan` leave to the user is settled here:

* parameters, dropout masks and every other random number of a layer depend on its
  place in the whole stack only, so any plan trains the same model;
* every variable collection is kept, per layer (sown values and statistics too);
* extra arguments, flags and keyword arguments go to every layer;
* any depth, and groups nested at any depth, without a copy of the weights.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxckpt.automatic_names import with_automatic_names
from jaxckpt.layers import Layers, Run, layer_plan
from jaxckpt.naming import check_names
from jaxckpt.policies import NONE, Policy, is_automatic
from jaxckpt.remat import jax_policy, split_static
from jaxckpt.stack import in_loop, split_layers

LAYER_AXIS = "layers"  # logical name of the stacked axis in partitioned parameters


class Stack(nn.Module):
    """``num_layers`` blocks one after the other, checkpointed as a plan says.

    Attributes:
      make_block: the block's class, or ``functools.partial(Block, config)``. Its
        ``__call__(x, *args, **kwargs)`` returns the next ``x``, of the same shape
        and dtype. It may use dropout, sow, and keep statistics.
      num_layers: depth of the stack.
      plan: a policy, grouping or layer plan of the policy language, text or object.
      scan: False unrolls the layers; see `jaxckpt.stack`.

    Parameters are in the split layout of `jaxckpt.stack`: ``run_0``, ``run_1``, ...
    `jaxckpt.merge_layers` gives the canonical per-layer trees.

    Example:
      >>> import flax.linen as nn, functools, jax, jax.numpy as jnp
      >>> class Block(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, deterministic=True):
      ...         y = nn.gelu(nn.Dense(x.shape[-1])(x))
      ...         return x + nn.Dropout(0.1)(y, deterministic=deterministic)
      >>> model = Stack(Block, num_layers=7, plan="2xnone+5xdots_saveable")
      >>> x = jnp.ones((2, 16))
      >>> variables = model.init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, variables)["params"]["run_1"]["Dense_0"]["kernel"]
      (5, 16, 16)
      >>> model.apply(variables, x, deterministic=False,
      ...             rngs={"dropout": jax.random.key(1)}).shape
      (2, 16)
    """

    make_block: Callable[..., nn.Module]
    num_layers: int
    plan: str | Layers = "none"
    scan: bool = True

    @nn.compact
    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        plan = layer_plan(self.plan, self.num_layers)
        arrays, rebuild = split_static((args, kwargs))
        keys = layer_keys(self, self.num_layers)
        keys = split_layers(keys, plan, self.num_layers, scan=self.scan)
        call = _BlockCall(self.make_block, rebuild)
        if self.scan:
            return _scan_runs(call, plan.runs, x, keys, arrays)
        return _unroll(self, call, plan.runs, 0, x, keys, arrays)


def layer_keys(module: nn.Module, num_layers: int) -> dict[str, jax.Array]:
    """Per random stream the keys of all layers of a module: (layers,)."""
    layers = jnp.arange(num_layers)
    assert module.scope is not None  # it is, inside a call
    keys = {stream: module.make_rng(stream) for stream in module.scope.rngs}
    return {
        stream: jax.vmap(functools.partial(jax.random.fold_in, key))(layers)
        for stream, key in keys.items()
    }


@dataclass(frozen=True, eq=False)
class _BlockCall:
    """How every layer's block is made and called: its class and its arguments."""

    make_block: Callable[..., nn.Module]
    rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class _Layer(nn.Module):
    """One block, run as a function of its own variables and random keys."""

    call: _BlockCall
    policy: Policy

    def __call__(self, x, keys, arrays):
        block = self.call.make_block(parent=None)
        assert self.scope is not None  # it is, inside a call
        mutable = self.scope.mutable or ()
        initializing = self.is_initializing()

        def run(variables, x, keys, arrays):
            args, kwargs = self.call.rebuild(arrays)
            if initializing:
                return block.init_with_output(keys, x, *args, **kwargs)
            return block.apply(
                variables, x, *args, rngs=keys, mutable=mutable, **kwargs
            )

        variables = {} if initializing else self.variables
        names = self.policy.names
        if initializing:  # another program, whose automatic names are others
            names = [name for name in names if not is_automatic(name)]
        run = with_automatic_names(run, names)
        check_names(names, run, variables, x, keys, arrays)
        y, updates = run(variables, x, keys, arrays)
        for collection, values in updates.items():
            for name, value in values.items():
                self.put_variable(collection, name, value)
        return y, None


class _Group(nn.Module):
    """The runs inside one group of a plan."""

    call: _BlockCall
    runs: tuple[Run, ...]

    @nn.compact
    def __call__(self, x, keys, arrays):
        return _scan_runs(self.call, self.runs, x, keys, arrays), None


def _scan_runs(call: _BlockCall, runs: tuple[Run, ...], x, keys, arrays):
    """Scans over each run, in the compact method of the module that owns them."""
    for index, run in enumerate(runs):
        if run.group:
            target, fields = _Group, {"runs": run.group}
        else:
            target, fields = _Layer, {"policy": run.policy}
        target = _rematted(target, run.policy, in_loop(run))
        scanned = nn.scan(
            target,
            variable_axes={True: 0},
            split_rngs={},
            in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]
            length=run.count,
            metadata_params={nn.PARTITION_NAME: LAYER_AXIS},
        )
        key = f"run_{index}"
        x, _ = scanned(call=call, **fields, name=key)(x, keys[key], arrays)
    return x


def _unroll(module: nn.Module, call: _BlockCall, runs, start: int, x, keys, arrays):
    """Straight-line layers, all direct children of the module."""
    for run in runs:
        for _ in range(run.count):
            if run.group:

                def group(module, x, keys, arrays, runs=run.group, start=start):
                    return _unroll(module, call, runs, start, x, keys, arrays)

                rematted = nn.remat(group, policy=jax_policy(run.policy))
                x = rematted(module, x, keys, arrays)
            else:
                layer = _rematted(_Layer, run.policy, False)
                key = f"layer_{start}"
                x, _ = layer(call, run.policy, name=key)(x, keys[key], arrays)
            start += run.layers_per_iteration
    return x


def _rematted(cls: type[nn.Module], policy: Policy, in_loop: bool) -> type[nn.Module]:
    if policy == NONE:
        return cls
    return nn.remat(cls, policy=jax_policy(policy), prevent_cse=not in_loop)
