"""A stack of Flax Linen blocks under a layer plan, with `nn.remat` and `nn.scan`.

What `nn.scan` and `nn.remat_scan` leave to the user is settled here:

* parameters, dropout masks and every other random number of a layer depend on its
  place in the whole stack only, so any plan trains the same model;
* every variable collection is kept, per layer (sown values and statistics too);
* extra arguments, flags and keyword arguments go to every layer;
* any depth, and groups nested at any depth, without a copy of the weights;
* blocks of several kinds in turn, in one scan over their period.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxckpt.automatic_names import with_automatic_names
from jaxckpt.jax_policies import jax_policy
from jaxckpt.layers import Layers, layer_plan
from jaxckpt.layout import split_layers
from jaxckpt.loops import Loop, Part, loops_of
from jaxckpt.modules import is_bound_linen
from jaxckpt.naming import list_names
from jaxckpt.policies import NONE, Policy, is_automatic, unknown_names
from jaxckpt.remat import split_static
from jaxckpt.stack import in_turn

LAYER_AXIS = "layers"  # logical name of the stacked axis in partitioned parameters


class Stack(nn.Module):
    """``num_layers`` blocks one after the other, checkpointed as a plan says.

    Attributes:
      make_block: the block's class, or ``functools.partial(Block, config)``. Its
        ``__call__(x, *args, **kwargs)`` returns the next ``x``, of the same shape
        and dtype. It may use dropout, sow, and keep statistics. Blocks that differ
        in turn are a tuple, ``(Local, Global)``: layer i is block ``i % 2``.
      num_layers: depth of the stack.
      plan: a policy, grouping or layer plan of the policy language, text or object.
      scan: False unrolls the layers; see `jaxckpt.stack`.
      keep: names of values that every checkpoint keeps beside what its policy says,
        that of a group of layers too: what must not come out otherwise in a second
        run, such as a choice that rounding can turn over.

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

    make_block: Callable[..., nn.Module] | Sequence[Callable[..., nn.Module]]
    num_layers: int
    plan: str | Layers = "none"
    scan: bool = True
    keep: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        plan = layer_plan(self.plan, self.num_layers)
        is_planned = hasattr(self.plan, "check_values")
        makers = in_turn(self.make_block, self.num_layers, is_planned=is_planned)
        kinds = len(makers)
        for maker in makers:
            refuse_shared(make_block(maker))
        arrays, rebuild = split_static((args, kwargs))
        keys = layer_keys(self, self.num_layers)
        keys = split_layers(keys, plan, self.num_layers, scan=self.scan, kinds=kinds)
        call = _BlockCall(makers, rebuild, {}, self.keep)
        if self.scan:
            x = _scan_loops(call, loops_of(plan.runs, kinds), x, keys, arrays)
        else:
            x = _unroll(self, call, plan.runs, 0, x, keys, arrays)
        for known in call.known.values():
            known.check()
        return x


def layer_keys(module: nn.Module, num_layers: int) -> dict[str, jax.Array]:
    """Per random stream the keys of all layers of a module: (layers,)."""
    layers = jnp.arange(num_layers)
    assert module.scope is not None  # it is, inside a call
    keys = {stream: module.make_rng(stream) for stream in module.scope.rngs}
    return {
        stream: jax.vmap(functools.partial(jax.random.fold_in, key))(layers)
        for stream, key in keys.items()
    }


def make_block(maker: Any) -> nn.Module:
    """A block of a stack, outside the model around it.

    Raises:
      TypeError: naming what works, when there is no Linen class to make it of.
    """
    make = maker
    while isinstance(make, functools.partial):
        make = make.func
    block = maker(parent=None) if _takes_parent(make) else None
    if isinstance(block, nn.Module):
        return block
    name = getattr(make, "__name__", type(make).__name__)
    raise TypeError(
        "Stack makes its blocks of a Linen class, or of functools.partial(Class, ...), "
        f"which {name} is not; jaxckpt.stack takes functions, "
        "(x, weights) -> (x, output)"
    )


def _takes_parent(make: Any) -> bool:
    """Whether it is a Linen class, or a function that makes a module like one."""
    if isinstance(make, type):
        return issubclass(make, nn.Module)
    with contextlib.suppress(TypeError, ValueError):
        return not isinstance(make, nn.Module) and bool(
            inspect.signature(make).bind_partial(parent=None)
        )
    return False


def refuse_shared(block: nn.Module) -> None:
    """Refuses a block with a module of the model around it: each layer would copy it.

    Raises:
      TypeError: naming what works.
    """
    for name, value in vars(block).items():
        if name not in ("parent", "scope") and is_bound_linen(value):
            raise TypeError(
                f"{type(block).__name__}.{name} is a module of the model around the "
                "stack, and each layer would have a copy: give its weights as an "
                "argument of the stack's call"
            )


@dataclass
class _Known:
    """The names that a policy speaks of, and those of the layers that run under it."""

    names: tuple[str, ...]
    found: set[str]

    def check(self) -> None:
        if missing := set(self.names) - self.found:
            raise unknown_names(missing, self.found)


@dataclass(frozen=True, eq=False)
class _BlockCall:
    """How every layer's block is made and called: its class and its arguments.

    ``known`` fills while the layers are traced: by policy, see `_Known`. ``keep`` are
    the names that every checkpoint keeps.
    """

    makers: tuple[Callable[..., nn.Module], ...]
    rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    known: dict[Policy, _Known]
    keep: tuple[str, ...]


class _Layer(nn.Module):
    """One block, run as a function of its own variables and random keys."""

    call: _BlockCall
    policy: Policy
    kind: int

    def __call__(self, x, keys, arrays):
        block = self.call.makers[self.kind](parent=None)
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
            names = tuple(name for name in names if not is_automatic(name))
        run = with_automatic_names(run, names)
        if names:
            known = self.call.known.setdefault(self.policy, _Known(names, set()))
            found = list_names(run, variables, x, keys, arrays)
            known.found.update(value.name for value in found)
        y, updates = run(variables, x, keys, arrays)
        for collection, values in updates.items():
            for name, value in values.items():
                self.put_variable(collection, name, value)
        return y, None


class _Group(nn.Module):
    """The loops inside one group of a plan."""

    call: _BlockCall
    loops: tuple[Loop, ...]

    @nn.compact
    def __call__(self, x, keys, arrays):
        return _scan_loops(self.call, self.loops, x, keys, arrays), None


class _Trip(nn.Module):
    """One iteration of a loop of several parts."""

    call: _BlockCall
    loop: Loop

    @nn.compact
    def __call__(self, x, keys, arrays):
        for key, part in self.loop.named_parts():
            target = _part(self.call, part, self.loop)
            x, _ = target(name=key)(x, keys[key], arrays)
        return x, None


def _scan_loops(call: _BlockCall, loops: tuple[Loop, ...], x, keys, arrays):
    """Runs each loop's scan, in the compact method of the module that owns them."""
    for index, loop in enumerate(loops):
        if len(loop.parts) == 1:
            target = _part(call, loop.parts[0], loop)
        else:
            target = functools.partial(_Trip, call=call, loop=loop)
        scanned = nn.scan(
            target.func,
            variable_axes={True: 0},
            split_rngs={},
            in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]
            length=loop.trips,
            metadata_params={nn.PARTITION_NAME: LAYER_AXIS},
        )
        key = f"run_{index}"
        x, _ = scanned(**target.keywords, name=key)(x, keys[key], arrays)
    return x


def _part(call: _BlockCall, part: Part, loop: Loop) -> functools.partial[nn.Module]:
    """A layer or a group of a loop, as its class, checkpointed, and its fields."""
    if part.loops:
        target, fields = _Group, {"loops": part.loops}
    else:
        target, fields = _Layer, {"policy": part.policy, "kind": part.kind}
    target = _rematted(target, part.policy, not loop.keeps_barriers, call.keep)
    return functools.partial(target, call=call, **fields)


def _unroll(module: nn.Module, call: _BlockCall, runs, start: int, x, keys, arrays):
    """Straight-line layers, all direct children of the module."""
    for run in runs:
        for _ in range(run.count):
            if run.group:

                def group(module, x, keys, arrays, runs=run.group, start=start):
                    return _unroll(module, call, runs, start, x, keys, arrays)

                policy = jax_policy(run.policy, call.keep)
                rematted = nn.remat(group, policy=policy)
                x = rematted(module, x, keys, arrays)
            else:
                layer = _rematted(_Layer, run.policy, False, call.keep)
                kind = start % len(call.makers)
                key = f"layer_{start}"
                x, _ = layer(call, run.policy, kind, name=key)(x, keys[key], arrays)
            start += run.layers_per_iteration
    return x


def _rematted(
    cls: type[nn.Module], policy: Policy, in_loop: bool, keep: tuple[str, ...]
) -> type[nn.Module]:
    if policy == NONE:
        return cls
    return nn.remat(cls, policy=jax_policy(policy, keep), prevent_cse=not in_loop)
