"""The optimizer's part of a step: from summed gradients to new weights and moments.

Plain, it is Optax's chain over whole trees. *Streamed*, the moments are in pinned host
memory, and a loop over the layers brings one layer's to the device, updates it and
writes it back in its place: the device never holds more than one layer's moments, or
those of the largest parameter outside of the layers. The numbers are the same, since
all but the clipping by global norm acts on each parameter by itself.

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021;
there the update runs on the host's CPU, here on the device.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxckpt.layers import LayerPlan, Run
from jaxckpt.layout import layout_keys
from jaxckpt.schedules.pipeline import PipelineSchedule
from jaxckpt.training.host_memory import HostMemory


@dataclass(frozen=True)
class Gradients:
    """A step's gradients as they come.

    Attributes:
      sums: over the tokens, each in the dtype that it was taken in.
      divisor: what makes them means.
    """

    sums: Any
    divisor: jax.Array | float

    def mean(self, part: Any) -> Any:
        """A part of the sums, or all of them, as float32 means."""
        return jax.tree.map(lambda g: g.astype(jnp.float32) / self.divisor, part)

    @functools.cached_property
    def norm(self) -> jax.Array:
        """The global norm of the means."""
        return optax.tree.norm(self.mean(self.sums))


@dataclass(frozen=True)
class Weights:
    """The parameters, and the copy of them that the model computes with, if it does.

    Attributes:
      params: float32.
      copy: of `jaxckpt.training.master.compute_copy`.
    """

    params: Any
    copy: Any = None


Update = Callable[[Gradients, Any, Weights, jax.Array | None], tuple[Weights, Any]]
"""``(gradients, opt_state, weights, finite) -> (weights, opt_state)``; where ``finite``
is given and false, both stay as they were."""

Clip = Callable[[Any, jax.Array], Any]
"""``(gradient, norm) -> gradient`` of some parameters, given the global norm."""

Path = tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """Parameters that are updated together.

    Attributes:
      path: of the subtree.
      lead: sizes of the axes over layers, one entry of which goes at a time; none for
        what is not stacked.
      whole: axes before those, which go whole.
    """

    path: Path
    lead: tuple[int, ...] = ()
    whole: int = 0


def plain_update(
    clip: optax.GradientTransformation, rule: optax.GradientTransformation
) -> Update:
    """The update with everything on the device.

    Args:
      clip: the part of the optimizer that needs all gradients at once.
      rule: the part that acts on each parameter by itself, entry by entry.
    """
    optimizer = optax.chain(clip, rule)

    def update(gradients, opt_state, weights, finite):
        params, mean = weights.params, gradients.mean(gradients.sums)
        updates, new_state = optimizer.update(mean, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = _choose(finite, new, (params, opt_state))
        return Weights(params), opt_state

    return update


def streamed_update(
    clip: Clip,
    rule: optax.GradientTransformation,
    plan: LayerPlan,
    host: HostMemory,
    *,
    scan: bool = True,
    pipeline: PipelineSchedule | None = None,
) -> Update:
    """The update with the moments in host memory, and the parameters where a copy is.

    Gradients are made means, and clipped, as they are needed: there is no second tree
    of them. The state is that of `plain_update`.

    Args:
      clip: the part of the optimizer that needs the norm of all gradients.
      rule: the part that acts on each parameter by itself, entry by entry.
      plan: the layer plan, which says how the parameters of the layers are stacked.
      host: how host memory is used.
      scan: whether they are stacked at all.
      pipeline: of a pipelined model, whose layers have axes for stages and repeats
        before those of the plan. Stages are on devices of their own and go together.
    """

    def update(gradients, opt_state, weights, finite):
        clip_state, rule_state = opt_state
        params, copy, norm = weights.params, weights.copy, gradients.norm
        moments, counters, rebuild = split_moments(rule_state, params)
        # What is on the host, and what stays on the device: one tree.
        held, here = (moments, params) if copy is None else ([*moments, params], copy)
        held = host.arrive(held)

        def of_piece(sums, held, here):
            """What is held, and is here, of some parameters, on the device."""
            gradient = clip(gradients.mean(sums), norm)
            *moments, params = [*held, here] if copy is None else held
            updates, state = rule.update(gradient, rebuild(moments, counters), params)
            new = rebuild.parts(state)[0], optax.apply_updates(params, updates)
            moments, params = _choose(finite, new, (moments, params))
            if copy is None:
                return moments, params
            cast = jax.tree.map(lambda x, like: x.astype(like.dtype), params, here)
            return [*moments, params], cast

        for piece in pieces(plan, params, scan=scan, pipeline=pipeline):
            path = piece.path
            sums = _get(gradients.sums, path)
            old = [_get(tree, path) for tree in held]
            new, new_here = _stream(of_piece, sums, old, _get(here, path), piece, host)
            held = [_set(tree, path, one) for tree, one in zip(held, new, strict=True)]
            here = _set(here, path, new_here)
        # Counters do not depend on parameters: of none at all they are the same.
        nothing = rebuild([{} for _ in moments], counters)
        _, advanced = rule.update({}, nothing, {})
        counters = _choose(finite, rebuild.parts(advanced)[1], counters)
        *moments, params = [*held, here] if copy is None else held
        new_state = clip_state, rebuild(moments, counters)
        return Weights(params, None if copy is None else here), new_state

    return update


def _choose(finite: jax.Array | None, new: Any, old: Any) -> Any:
    """By choice, not by a branch: that would keep both."""
    if finite is None:
        return new
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


def _stream(
    of_piece: Callable[..., tuple[Any, Any]],
    sums: Any,
    held: Any,
    here: Any,
    piece: Piece,
    host: HostMemory,
) -> tuple[Any, Any]:
    """Updates one piece, entry by entry along its leading axes, in place."""

    def once(sums, held, here):
        held, here = of_piece(sums, host.to_device(held), here)
        return host.to_host(held), here

    whole, length = piece.whole, math.prod(piece.lead)
    if length == 1:
        return once(sums, held, here)

    def start(leaf, index):
        return [0] * whole + [*index] + [0] * (leaf.ndim - whole - len(index))

    def take(tree, index):
        def one(leaf):
            sizes = list(leaf.shape)
            sizes[whole : whole + len(index)] = [1] * len(index)
            return lax.dynamic_slice(leaf, start(leaf, index), sizes)

        return jax.tree.map(one, tree)

    def put(tree, entry, index):
        def one(leaf, new):
            return lax.dynamic_update_slice(leaf, new, start(leaf, index))

        return jax.tree.map(one, tree, entry)

    def body(carry, index):
        new = once(take(sums, index), *take(carry, index))
        return put(carry, new, index), None

    indices = np.unravel_index(np.arange(length), piece.lead)
    indices = tuple(one.astype(np.int32) for one in indices)
    return lax.scan(body, (held, here), indices)[0]


def pieces(
    plan: LayerPlan,
    params: dict[str, Any],
    *,
    scan: bool = True,
    pipeline: PipelineSchedule | None = None,
) -> Iterator[Piece]:
    """The parts of a parameter tree that are updated one after the other.

    Args:
      plan, scan, pipeline: as `streamed_update` takes them.
      params: the tree, of which only names are read.

    Example:
      >>> from jaxckpt.layers import layer_plan
      >>> params = {"embedding": ..., "layers": {"run_0": ..., "run_1": ...}}
      >>> plan = layer_plan("2x3xfull+1xnone", 7)
      >>> for piece in pieces(plan, params):
      ...     print("/".join(piece.path), piece.lead)
      embedding ()
      layers/run_0/run_0 (2, 3)
      layers/run_1 (1,)
    """
    for name in params:
        if name != "layers":
            yield Piece((name,))
        elif pipeline:
            yield from _stacks(plan.runs, Piece((name,), (pipeline.repeats,), whole=1))
        elif scan:
            yield from _stacks(plan.runs, Piece((name,)))
        else:
            yield from (Piece((name, key)) for key in layout_keys(plan, scan=False))


def _stacks(runs: Sequence[Run], outer: Piece) -> Iterator[Piece]:
    for index, run in enumerate(runs):
        path, lead = (*outer.path, f"run_{index}"), (*outer.lead, run.count)
        piece = Piece(path, lead, outer.whole)
        if run.group:
            yield from _stacks(run.group, piece)
        else:
            yield piece


class _Rebuild:
    """An optimizer's state from its moments and its counters, and back."""

    def __init__(self, structure: Any, is_moment: Sequence[bool]):
        self._structure, self._is_moment = structure, is_moment

    def __call__(self, moments: Sequence[Any], counters: Sequence[Any]) -> Any:
        left = {True: iter(moments), False: iter(counters)}
        parts = [next(left[is_moment]) for is_moment in self._is_moment]
        return jax.tree.unflatten(self._structure, parts)

    def parts(self, state: Any) -> tuple[list[Any], list[Any]]:
        parts = self._structure.flatten_up_to(state)
        pairs = list(zip(parts, self._is_moment, strict=True))
        moments = [part for part, is_one in pairs if is_one]
        return moments, [part for part, is_one in pairs if not is_one]


def split_moments(state: Any, params: Any) -> tuple[list[Any], list[Any], _Rebuild]:
    """Takes an optimizer's state apart.

    Returns:
      The trees that mirror the parameters (its moments), every other leaf (its
      counters), and ``rebuild(moments, counters)``, which makes a state of the same
      kind for any part of the parameters.
    """
    mirrored = jax.tree.structure(params)

    def mirrors(subtree):
        return jax.tree.structure(subtree) == mirrored

    parts, structure = jax.tree.flatten(state, is_leaf=mirrors)
    rebuild = _Rebuild(structure, [mirrors(part) for part in parts])
    return *rebuild.parts(state), rebuild


def _get(tree: Any, path: Path) -> dict[str, Any]:
    """A subtree under its own name: rules look at the names of parameters."""
    return {path[-1]: functools.reduce(lambda found, key: found[key], path, tree)}


def _set(tree: dict[str, Any], path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """The tree with another subtree, given as by `_get`; in place nothing changes."""
    name, *rest = path
    return {**tree, name: _set(tree[name], tuple(rest), value) if rest else value[name]}
