"""Run a stack of equal layers under a layer plan, on plain functions.

Each run of a plan is one `lax.scan` over checkpointed layers; a group is a
checkpointed function that scans again. Weights live in the *split layout*, in
which every run owns an array of its own: slicing one stacked array inside a
training step would copy the weights and their gradients.

Split layout of a pytree of per-layer values (weights, keys, ...):
  ``{"run_0": tree, "run_1": {"run_0": tree}, ...}`` with leaves of shape
  (count, ...) for a run of layers and (count, inner count, ...) inside a group;
  unrolled (``scan=False``) it is ``{"layer_0": tree, "layer_1": tree, ...}``.
  Of layers of several kinds in turn a run is ``{"part_0": tree, "part_1": tree}``,
  and what it leaves of a period at its end is a run of its own: see `loops`.
  What is no array in a layer (a flag, a function) is the same in all of a run.

The canonical layout, which does not depend on the plan, is the list of per-layer
trees: `join_layers` and `merge_layers` go between the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.automatic_names import name_values
from jaxckpt.carry import Body, keeps_carry, returns_pair
from jaxckpt.layers import LayerPlan, Layers, Run, layer_plan
from jaxckpt.loops import Loop, Part, layer_parts, loops_of
from jaxckpt.modules import refuse_closed_over, refuse_nnx
from jaxckpt.naming import NamedValue, is_array, list_names
from jaxckpt.policies import FULL, Policy, PolicyError, unknown_names
from jaxckpt.remat import checkpoint, split_static

Tree = Any


def stack(
    body: Body | Sequence[Body],
    plan: str | Layers,
    num_layers: int,
    *,
    scan: bool = True,
) -> Callable[[Any, Tree], tuple[Any, Tree]]:
    """Stacks a layer function under a policy, a grouping or a layer plan.

    The contract is that of `jax.lax.scan`, with per-layer values in split layout.

    Args:
      body: one layer, ``(carry, layer_values) -> (carry, layer_output)``. The
        carry, any pytree, keeps its shape and dtype; the output may be None. Layers
        that differ in turn are a list, ``[local, attend_all]``: layer i is body
        ``i % len(body)``, and their values and outputs may be of different trees.
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
        called, a name that no layer under the policy has.
      TypeError: a Flax NNX object among the values, of which the state is taken, as
        in the last example; a layer that closes over a Linen module, makes Haiku's
        parameters, or does not return (carry, output) with the carry as it came.

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

      Layers of two kinds, and the canonical list of their weights:

      >>> def scaled(x, values):
      ...     return x * values["scale"], None
      >>> layers = 3 * [weights[0], {"scale": jnp.ones(8)}] + [weights[0]]
      >>> joined = join_layers(layers, "every:3", num_layers=7, kinds=2)
      >>> run = stack([layer, scaled], "every:3", num_layers=7)
      >>> merge_layers(run(jnp.ones((2, 8)), joined)[1], "every:3", 7, kinds=2)
      [None, None, None, None, None, None, None]

      Equinox modules are values as they are. Of NNX modules the state is:

      >>> from flax import nnx
      >>> blocks = [nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(7)]
      >>> graphdef = nnx.graphdef(blocks[0])
      >>> def block(x, state):
      ...     one = nnx.merge(graphdef, state)
      ...     return jnp.tanh(one(x)), nnx.state(one)  # with its statistics, counters
      >>> states = join_layers([nnx.state(one) for one in blocks], "every:3", 7)
      >>> y, states = stack(block, "every:3", 7)(jnp.ones((2, 8)), states)
      >>> for one, state in zip(blocks, merge_layers(states, "every:3", 7)):
      ...     nnx.update(one, state)

    Source: Chen et al. 2016, arXiv 1604.06174, sections 4.1 to 4.3.
    """
    check_values = getattr(plan, "check_values", None)  # of a Plan
    plan = layer_plan(plan, num_layers)
    bodies = in_turn(body, num_layers, is_planned=bool(check_values))
    kinds = len(bodies)
    loops = loops_of(plan.runs, kinds)

    def run_stack(carry, values):
        refuse_nnx((carry, values))
        _check_layout(values, plan, scan, kinds)
        layers = _LayersInTurn(bodies)
        if check_values:
            check_values(_names(bodies, carry, values, plan, scan)[0])
        if kinds > 1 and any(part.policy.names for part in layer_parts(loops)):
            found = _names(bodies, carry, values, plan, scan)
            layers = _LayersInTurn(bodies, _fit(loops, found))
        for layer in bodies:
            refuse_closed_over(layer)
        haiku_state = compat.haiku_state()
        if scan:
            found = _scan_loops(layers, loops, carry, values)
        else:
            found = _unroll(layers, plan, carry, values)
        if compat.haiku_state() != haiku_state:
            raise TypeError(
                "Haiku's parameters, state and random numbers are lost in a stack: "
                "hk.transform the layer, and give its parameters and keys as values"
            )
        return found

    return run_stack


@dataclass(frozen=True)
class _LayersInTurn:
    """The layer functions, and by policy and kind the policies that differ by kind."""

    bodies: tuple[Body, ...]
    fitted: dict[tuple[Policy, int], Policy] = field(default_factory=dict)

    def checkpointed(self, policy: Policy, place: int, in_loop: bool) -> Body:
        kind = place % len(self.bodies)
        policy = self.fitted.get((policy, kind), policy)
        layer = returns_pair(self.bodies[kind])
        return checkpoint(layer, policy, in_loop=in_loop)


def _fit(loops: Sequence[Loop], found: Sequence[Sequence[NamedValue]]):
    """Each policy as a kind of layer can follow it: of the names those that it has.

    Raises:
      PolicyError: a name that no layer under the policy has.
    """
    parts = {(part.policy, part.kind) for part in layer_parts(loops)}
    known = [{value.name for value in values} for values in found]
    for policy in {policy for policy, _ in parts}:
        under = set().union(*(known[kind] for one, kind in parts if one == policy))
        if missing := set(policy.names) - under:
            raise unknown_names(missing, under)
    return {
        (policy, kind): _with_names(policy, known[kind])
        for policy, kind in parts
        if policy.names
    }


def _with_names(policy: Policy, known: set[str]) -> Policy:
    if not known & set(policy.names):
        return FULL
    save, offload = (
        tuple(name for name in names if name in known)
        for names in (policy.save, policy.offload)
    )
    return Policy(save=save, offload=offload)


def _names(bodies: Sequence[Body], carry, values, plan: LayerPlan, scan: bool):
    """Every value that a policy could keep in a layer of each kind; nothing runs."""
    kinds = len(bodies)
    arrays, rebuild = split_static(values)
    rebuild_layers = []

    def first_layers(arrays):
        layers = merge_layers(
            rebuild(arrays), plan, plan.num_layers, scan=scan, kinds=kinds
        )
        found, of_found = split_static(layers[:kinds])
        rebuild_layers.append(of_found)
        return found

    shapes = jax.eval_shape(first_layers, arrays)
    firsts = rebuild_layers[0](shapes)
    return [
        _names_of_a_layer(body, carry, first)
        for body, first in zip(bodies, firsts, strict=False)
    ]


def _names_of_a_layer(body: Body, carry, first) -> list[NamedValue]:
    arrays, rebuild = split_static((carry, first))

    def layer(*arrays):
        return split_static(body(*rebuild(list(arrays))))[0]

    closed = name_values(jax.make_jaxpr(layer)(*arrays))
    return list_names(jex_core.jaxpr_as_fun(closed), *closed.in_avals)


def in_turn(given: Any, num_layers: int, *, is_planned: bool) -> tuple[Any, ...]:
    """The layer functions, or blocks, that follow each other in a stack.

    Args:
      given: one, or a sequence.
      num_layers: depth of the stack.
      is_planned: whether it runs under a `Plan`.

    Raises:
      PolicyError: what cannot be called; more than layers; several under a `Plan`.
    """
    makers = tuple(given) if isinstance(given, Sequence) else (given,)
    if not makers or not all(map(callable, makers)):
        raise PolicyError(
            f"a stack takes a layer, or a sequence of some in turn, not {given!r}"
        )
    if len(makers) > num_layers:
        raise PolicyError(
            f"{len(makers)} layers in turn and a depth of {num_layers}: some would "
            "never run"
        )
    if is_planned and len(makers) > 1:
        raise PolicyError(
            f"a plan of jaxckpt.plan is of one kind of layer, not of {len(makers)} in "
            "turn: give a policy or a layer plan"
        )
    return makers


def split_layers(
    values: Tree,
    plan: str | Layers,
    num_layers: int,
    *,
    scan: bool = True,
    kinds: int = 1,
) -> dict[str, Tree]:
    """Brings per-layer values into the layout that a plan runs on.

    Call it where the weights are made, not inside the training step: it copies.

    Args:
      values: a pytree whose leaves are stacked, (num_layers, ...).
      plan, num_layers, scan: as given to `stack`.
      kinds: how many layer functions `stack` was given.
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
    return join_layers(layers, plan, num_layers, scan=scan, kinds=kinds)


def join_layers(
    layers: Sequence[Tree],
    plan: str | Layers,
    num_layers: int,
    *,
    scan: bool = True,
    kinds: int = 1,
) -> dict[str, Tree]:
    """Brings a list of per-layer trees (the canonical layout) into a plan's layout.

    As `split_layers`, for layers that are not stacked; undoes `merge_layers`. A tree
    may be an Equinox module: arrays are stacked, and what is no array stays.

    Raises:
      PolicyError: layers of one kind whose trees, or what is no array in them, differ.
    """
    refuse_nnx(layers)
    plan = layer_plan(plan, num_layers)
    if not isinstance(layers, Sequence):
        raise PolicyError(f"layers are a list of trees, one per layer, not {layers!r}")
    if len(layers) != num_layers:
        raise PolicyError(f"{len(layers)} layers for a stack of {num_layers}")
    if not scan:
        return {f"layer_{index}": layer for index, layer in enumerate(layers)}
    loops = loops_of(plan.runs, kinds)
    _check_alike(layers, kinds)
    return _split_loops(loops, list(layers))


def merge_layers(
    split: dict[str, Tree],
    plan: str | Layers,
    num_layers: int,
    *,
    scan: bool = True,
    kinds: int = 1,
) -> list[Tree]:
    """The list of per-layer trees of values in split layout; undoes `join_layers`."""
    plan = layer_plan(plan, num_layers)
    _check_layout(split, plan, scan, kinds)
    if not scan:
        return [split[f"layer_{index}"] for index in range(num_layers)]
    return _merge_loops(loops_of(plan.runs, kinds), split)


def layout_keys(plan: LayerPlan, *, scan: bool, kinds: int = 1) -> list[str]:
    """The top-level keys of the split layout, in order."""
    if scan:
        return [f"run_{index}" for index in range(len(loops_of(plan.runs, kinds)))]
    return [f"layer_{index}" for index in range(plan.num_layers)]


def _check_layout(values: Tree, plan: LayerPlan, scan: bool, kinds: int) -> None:
    """Refuses values that are not in a plan's split layout."""
    expected = layout_keys(plan, scan=scan, kinds=kinds)
    keys = list(values) if isinstance(values, dict) else type(values).__name__
    if set(keys) == set(expected):
        if not scan or _is_split(values, loops_of(plan.runs, kinds)):
            return
        keys = {
            key: [getattr(leaf, "shape", leaf) for leaf in jax.tree.leaves(tree)[:1]]
            for key, tree in list(values.items())[:3]
        }
    in_turn = f" over {kinds} kinds of layers" if kinds > 1 else ""
    raise PolicyError(
        f"values are not in the layout of {plan}{in_turn}: expected "
        f"{{{', '.join(expected[:3])}, ...}}, got {keys}; use split_layers"
    )


def _is_split(
    values: Tree, loops: Sequence[Loop], around: tuple[int, ...] = ()
) -> bool:
    """Whether values are in split layout, at any depth, and of its trip counts."""

    def has_keys(tree, keys):
        return isinstance(tree, dict) and set(tree) == set(keys)

    def of_part(part: Part, tree, trips: tuple[int, ...]) -> bool:
        if part.loops:
            return _is_split(tree, part.loops, trips)
        leaves = filter(is_array, jax.tree.leaves(tree))
        return all(tuple(leaf.shape[: len(trips)]) == trips for leaf in leaves)

    def of_loop(loop: Loop, tree) -> bool:
        trips = (*around, loop.trips)
        if len(loop.parts) == 1:
            return of_part(loop.parts[0], tree, trips)
        parts = dict(loop.named_parts())
        return has_keys(tree, parts) and all(
            of_part(part, tree[key], trips) for key, part in parts.items()
        )

    keyed = {f"run_{index}": loop for index, loop in enumerate(loops)}
    return has_keys(values, keyed) and all(
        of_loop(loop, values[key]) for key, loop in keyed.items()
    )


def _scan_loops(layers: _LayersInTurn, loops: Sequence[Loop], carry, values):
    outputs = {}
    for index, loop in enumerate(loops):
        key = f"run_{index}"
        arrays, rebuild = split_static(values[key])
        once = keeps_carry(_iteration(layers, loop))

        def iteration(carry, arrays, once=once, rebuild=rebuild):
            return once(carry, rebuild(arrays))

        carry, outputs[key] = lax.scan(iteration, carry, arrays, length=loop.trips)
    return carry, outputs


def _iteration(layers: _LayersInTurn, loop: Loop) -> Body:
    """One trip of a loop: its layers or groups, each checkpointed."""

    def of_part(part: Part) -> Body:
        in_loop = not loop.keeps_barriers
        if not part.loops:
            return layers.checkpointed(part.policy, part.kind, in_loop)

        def group(carry, values):
            return _scan_loops(layers, part.loops, carry, values)

        return checkpoint(group, part.policy, in_loop=in_loop)

    if len(loop.parts) == 1:
        return of_part(loop.parts[0])

    def in_turn(carry, values):
        outputs = {}
        for key, part in loop.named_parts():
            carry, outputs[key] = of_part(part)(carry, values[key])
        return carry, outputs

    return in_turn


def _unroll(layers: _LayersInTurn, plan: LayerPlan, carry, values):
    def run_layers(runs: Sequence[Run], start: int, carry):
        """Straight-line code for some runs; returns the outputs of its layers."""
        found = []
        for run in runs:
            for _ in range(run.count):
                if run.group:

                    def group(carry, run=run, start=start):
                        return run_layers(run.group, start, carry)

                    carry, outputs = checkpoint(group, run.policy, in_loop=False)(carry)
                    found += outputs
                else:
                    once = layers.checkpointed(run.policy, start, in_loop=False)
                    carry, output = once(carry, values[f"layer_{start}"])
                    found.append(output)
                start += run.layers_per_iteration
        return carry, found

    carry, found = run_layers(plan.runs, 0, carry)
    outputs = {f"layer_{index}": output for index, output in enumerate(found)}
    return carry, outputs


def _split_loops(loops: Sequence[Loop], layers: list[Tree]) -> dict[str, Tree]:
    split, rest = {}, iter(layers)
    for index, loop in enumerate(loops):
        trips = []
        for _ in range(loop.trips):
            parts = {}
            for key, part in loop.named_parts():
                chunk = [next(rest) for _ in range(part.num_layers)]
                parts[key] = _split_loops(part.loops, chunk) if part.loops else chunk[0]
            trips.append(parts if len(parts) > 1 else parts["part_0"])
        split[f"run_{index}"] = jax.tree.map(_stack_leaves, *trips)
    return split


def _merge_loops(loops: Sequence[Loop], split: dict[str, Tree]) -> list[Tree]:
    layers = []
    for index, loop in enumerate(loops):
        for i in range(loop.trips):
            trip = jax.tree.map(
                lambda leaf, i=i: leaf[i] if is_array(leaf) else leaf,
                split[f"run_{index}"],
            )
            for key, part in loop.named_parts():
                tree = trip[key] if len(loop.parts) > 1 else trip
                layers += _merge_loops(part.loops, tree) if part.loops else [tree]
    return layers


def _check_alike(layers: Sequence[Tree], kinds: int) -> None:
    """Layers of a kind have one structure, in which what is no array is equal."""
    for index in range(kinds, len(layers)):
        (arrays, static), (like, like_static) = (
            _structure(layers[place]) for place in (index, index % kinds)
        )
        if arrays != like or static != like_static:
            raise PolicyError(
                f"layer {index} is not built like layer {index % kinds}: layers that "
                "differ in turn are a list of layer functions, and kinds their number"
            )


def _structure(layer: Tree):
    leaves, treedef = jax.tree.flatten(layer)
    static = [tuple(x.shape) if is_array(x) else ("static", x) for x in leaves]
    return treedef, static


def _stack_leaves(*leaves):
    if not is_array(leaves[0]):
        return leaves[0]
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return np.stack(leaves) if on_host else jnp.stack(leaves)
