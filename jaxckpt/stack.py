"""Run a stack of equal layers under a layer plan, on plain functions.

Each run of a plan is one `lax.scan` over checkpointed layers; a group is a
checkpointed function that scans again. Weights live in the split layout of `layout`, in
which every run owns an array of its own: slicing one stacked array inside a
training step would copy the weights and their gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from jaxckpt import compat
from jaxckpt.carry import Body, keeps_carry, returns_pair
from jaxckpt.layers import LayerPlan, Layers, Run, layer_plan
from jaxckpt.layout import check_layout, merge_layers
from jaxckpt.loops import Loop, Part, layer_parts, loops_of
from jaxckpt.modules import refuse_closed_over, refuse_nnx
from jaxckpt.naming import NamedValue, list_names
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
      >>> from jaxckpt import join_layers, split_layers
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
        check_layout(values, plan, scan, kinds)
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
        list_names(body, carry, first, automatic=True)
        for body, first in zip(bodies, firsts, strict=False)
    ]


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
