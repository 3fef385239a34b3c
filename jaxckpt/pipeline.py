"""Run a chain of equal stages as a pipeline over devices, on plain functions.

All stages compute at once, in one vectorised call, on different micro-batches; then
every result moves on by one stage. With the leading axis of weights and activations
cut over a mesh axis, each device has one stage, and the move is a collective permute:
no device runs another's work (Xu et al. 2021, arXiv 2105.04663, section 3.3).

Layouts, for P stages, R repeats (1 in GPipe, more in a circular schedule), M micro-
batches of b sequences, and C = M / P:
  values   (P, R, ...)       weights and keys; stage p, repeat r is chunk r P + p
  streams  (P, C, b, ...)    inputs, and in their place what has come out
  state    (P, b, ...)       what each stage reads next

Micro-batch m waits in row m // C, column m % C. Iteration t takes column t % C: its
first row goes into stage 0 and the others move up one row. The result that leaves the
last stage entered at t - (P - 1); it fills the hole which its micro-batch left, which
has moved up (P - 1) // C rows since. There it comes by again after M iterations, for
the next repeat; after the last one it is at the place of its input, but for the rows
by which the P - 1 iterations at the end turned the columns on.

The derivative is written out here and not left to `jax.grad`:
* an iteration keeps what the stage's own checkpoints let it keep, and nothing that
  depends on weights alone. `jax.grad` of a circular schedule would keep each
  iteration's weights;
* gradients are added in the values' own dtype, whatever the stage computes in.
In the first and last P - 1 iterations some stages work on what is there and nobody
reads the result: real inputs, so that they meet no number that others do not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jaxtyping import Array, Int

from jaxckpt.programs import program_of, variables
from jaxckpt.schedules.pipeline import PipelineSchedule

Tree = Any
Stage = Callable[[Tree, Tree, Int[Array, ""]], Tree]


def _identity(tree: Tree) -> Tree:
    return tree


def pipeline(
    stage: Stage,
    schedule: PipelineSchedule,
    *,
    axis: str | None = None,
    cast: Callable[[Tree], Tree] = _identity,
    constrain_state: Callable[[Tree], Tree] = _identity,
    constrain_streams: Callable[[Tree], Tree] = _identity,
    constrain_values: Callable[[Tree], Tree] = _identity,
) -> Callable[[Tree, Tree], Tree]:
    """Makes a pipeline of a stage function.

    Args:
      stage: ``(values, x, micro_batch) -> x``: one chunk of layers on one micro-batch,
        whose number is an int32 scalar, for random keys. ``x`` keeps its structure,
        shapes and dtypes. What it keeps for its backward pass is up to the checkpoints
        in it, as `jaxckpt.stack` makes them.
      schedule: stages, micro-batches and repeats.
      axis: the mesh axis of the stages, for sharding constraints inside the stage.
      cast: gives values in the dtypes that the stage computes in, with their shapes;
        done once, not in each iteration. Gradients do without its derivative.
      constrain_state, constrain_streams: place a tree of arrays (P, b, ...) and
        (P, C, b, ...) on devices, see the module.
      constrain_values: places a tree like the values: their gradients, as they add up.

    Returns:
      ``(values, inputs) -> outputs`` with values of leaves (P, R, ...), inputs and
      outputs of leaves (batch, ...). The batch divides by M. Each stage's share of the
      batch is a contiguous part of it; a part's micro-batches take every C-th row, so
      that rows cut over other mesh axes stay where they are.

    Raises:
      ValueError: when called, for values that are not (P, R, ...), or a batch that
        does not divide.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxckpt import remat
      >>> stage = remat(lambda w, x, micro_batch: jnp.tanh(x @ w), "full")
      >>> weights = jax.random.normal(jax.random.key(0), (4, 2, 8, 8))  # 8 chunks
      >>> run = pipeline(stage, PipelineSchedule(stages=4, microbatches=8, repeats=2))
      >>> x = jnp.ones((16, 8))
      >>> y = run(weights, x)
      >>> for chunk in range(8):
      ...     x = jnp.tanh(x @ weights[chunk % 4, chunk // 4])
      >>> bool(jnp.allclose(x, y, atol=1e-6))
      True
    """

    def run(values: Tree, inputs: Tree) -> Tree:
        _check(values, inputs, schedule)
        leaves, treedef = jax.tree.flatten(values)
        is_weight = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
        weights = [one for one, yes in zip(leaves, is_weight, strict=True) if yes]
        constants = [one for one, yes in zip(leaves, is_weight, strict=True) if not yes]

        def merge(weights, constants):
            parts = [iter(constants), iter(weights)]
            return jax.tree.unflatten(treedef, [next(parts[yes]) for yes in is_weight])

        loop = _Loop(
            *(stage, schedule, axis, merge, cast),
            *(constrain_state, constrain_streams, constrain_values),
        )
        streams = jax.tree.map(functools.partial(_to_streams, schedule), inputs)
        return jax.tree.map(_from_streams, loop(weights, constants, streams))

    return run


class _Loop:
    """The iterations of one call, and their derivative."""

    def __init__(
        self,
        stage,
        schedule,
        axis,
        merge,
        cast,
        constrain_state,
        constrain_streams,
        constrain_values,
    ):
        self.schedule = schedule
        self.rows = schedule.stages
        self.columns = schedule.microbatches // schedule.stages
        self.behind = schedule.stages - 1  # iterations, of what leaves the last stage
        self.moved = self.behind // self.columns  # rows, that its hole has moved up
        self.merge = merge
        self.cast = cast
        self.constrain_state = constrain_state
        self.constrain_streams = constrain_streams
        self.constrain_values = constrain_values
        self.stages = jax.vmap(stage, spmd_axis_name=axis)

    def __call__(self, weights, constants, streams):
        @jax.custom_vjp
        def call(weights, constants, streams):
            return self._run(weights, constants, streams, self._iteration)[0]

        call.defvjp(self._forward, self._backward)
        return call(weights, constants, streams)

    # One pass

    def _run(self, weights, constants, streams, iteration):
        values = self._cast(weights, constants)

        def body(carry, t):
            streams, state = carry
            x = self.constrain_state(self._take(streams, state, t))
            y, kept = iteration(*self._pick(values, t), x, self._places(t)[1])
            streams, state = self._put(streams, y, t)
            carry = self.constrain_streams(streams), self.constrain_state(state)
            return carry, kept

        streams = self.constrain_streams(streams)
        state = jax.tree.map(lambda stream: stream[:, 0], streams)
        steps = jnp.arange(self.schedule.iterations, dtype=jnp.int32)
        (streams, _), kept = lax.scan(body, (streams, state), steps)
        return self._turn_back(streams), kept

    def _iteration(self, weights, constants, x, micro_batches):
        return self.stages(self.merge(weights, constants), x, micro_batches), None

    def _cast(self, weights, constants):
        """The values in the dtypes that the stage computes in, as two lists."""
        cast = self.cast(self.merge(weights, constants))
        leaves = jax.tree.leaves(cast)
        found = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return found, constants

    def _places(self, t):
        """Per stage the repeat and the micro-batch of iteration ``t``: (P,), (P,)."""
        last = self.schedule.repeats * self.schedule.microbatches - 1
        entered = jnp.clip(t - jnp.arange(self.rows, dtype=jnp.int32), 0, last)
        return jnp.divmod(entered, self.schedule.microbatches)

    def _pick(self, values, t):
        """Each stage's values of the repeat that it is in: leaves (P, ...)."""
        if self.schedule.repeats == 1:
            return jax.tree.map(lambda leaf: leaf[:, 0], values)
        repeats, _ = self._places(t)
        pick = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
        return jax.tree.map(lambda leaf: jax.vmap(pick)(leaf, repeats), values)

    def _take(self, streams, state, t):
        """What the stages read in iteration ``t``."""
        column = t % self.columns

        def take(stream, state):
            return jnp.where(_rows(state) == 0, _get(stream, column), state)

        return jax.tree.map(take, streams, state)

    def _put(self, streams, y, t):
        """Streams and state after iteration ``t``."""

        def put(stream, y):
            column = t % self.columns
            stream = _set(stream, jnp.roll(_get(stream, column), -1, axis=0), column)
            column = (t - self.behind) % self.columns
            arrived = jnp.roll(y, -self.moved, axis=0)
            filled = jnp.where(self._hole(y, t), arrived, _get(stream, column))
            return _set(stream, filled, column)

        streams = jax.tree.map(put, streams, y)
        return streams, jax.tree.map(lambda y: jnp.roll(y, 1, axis=0), y)

    def _hole(self, y, t):
        """Where the result that is finished in iteration ``t`` goes."""
        return (_rows(y) == self.behind - self.moved) & (t >= self.behind)

    def _turn_back(self, streams, sign=1):
        """Undoes how far the last P - 1 iterations turned each column."""
        turns, more = divmod(self.behind, self.columns)

        def turn(stream):
            parts = stream[:, :more], stream[:, more:]
            turned = [
                jnp.roll(part, sign * (turns + extra), axis=0)
                for part, extra in zip(parts, (1, 0), strict=True)
            ]
            return jnp.concatenate(turned, axis=1)

        return self.constrain_streams(jax.tree.map(turn, streams))

    # Its derivative. Left to JAX, a roll would be sent in two parts on the way back.

    def _take_back(self, streams, x, t):
        """Of `_take`: cotangents of streams, of what was read, to streams and state."""

        def back(stream, x):
            column, first = t % self.columns, _rows(x) == 0
            waiting = _get(stream, column) + jnp.where(first, x, 0)
            return _set(stream, waiting, column)

        streams = jax.tree.map(back, streams, x)
        return streams, jax.tree.map(lambda x: jnp.where(_rows(x) == 0, 0, x), x)

    def _put_back(self, streams, state, t):
        """Of `_put`: cotangents of streams and state, to streams and the result."""
        column = (t - self.behind) % self.columns

        def of_result(stream, state):
            filled = jnp.where(self._hole(state, t), _get(stream, column), 0)
            moved = jnp.roll(filled, self.moved, axis=0)
            return moved + jnp.roll(state, -1, axis=0)

        def of_stream(stream, state):
            there = jnp.where(self._hole(state, t), 0, _get(stream, column))
            stream, taken = _set(stream, there, column), t % self.columns
            return _set(stream, jnp.roll(_get(stream, taken), 1, axis=0), taken)

        y = jax.tree.map(of_result, streams, state)
        return jax.tree.map(of_stream, streams, state), y

    def _forward(self, weights, constants, streams):
        split = self._split(weights, constants, streams)
        streams, kept = self._run(weights, constants, streams, split.forward)
        return streams, (weights, constants, kept, split)

    def _backward(self, saved, cotangents):
        weights, constants, kept, split = saved
        values = self._cast(weights, constants)

        def body(carry, inputs):
            (streams, state), gradients = carry
            t, kept = inputs
            streams, y = self._put_back(streams, state, t)
            picked = self._pick(values, t)
            of_weights, x = split.backward(
                *picked, self._places(t)[1], kept, self.constrain_state(y)
            )
            gradients = self._place(self._add(gradients, of_weights, t), constants)
            streams, state = self._take_back(streams, x, t)
            carry = self.constrain_streams(streams), self.constrain_state(state)
            return (carry, gradients), None

        streams = self._turn_back(cotangents, sign=-1)
        state = jax.tree.map(lambda stream: jnp.zeros_like(stream[:, 0]), streams)
        gradients = [jnp.zeros_like(leaf) for leaf in weights]
        gradients = self._place(gradients, constants)
        steps = jnp.arange(self.schedule.iterations, dtype=jnp.int32)
        carry = (streams, state), gradients
        ((streams, state), gradients), _ = lax.scan(
            body, carry, (steps, kept), reverse=True
        )
        return gradients, None, streams

    def _place(self, gradients, constants):
        """Gradients where the weights are; else the compiler may cut them otherwise and
        gather them in every iteration."""
        placed = self.constrain_values(self.merge(gradients, constants))
        leaves = jax.tree.leaves(placed)
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def _add(self, gradients, more, t):
        """Adds an iteration's gradients, (P, ...), to those of all, (P, R, ...)."""
        if self.schedule.repeats == 1:
            return [
                total + one[:, None].astype(total.dtype)
                for total, one in zip(gradients, more, strict=True)
            ]
        repeats, _ = self._places(t)

        def add(total, one, repeat):
            return total.at[repeat].add(one.astype(total.dtype))

        return [
            jax.vmap(add)(total, one, repeats)
            for total, one in zip(gradients, more, strict=True)
        ]

    def _split(self, weights, constants, streams):
        """Traces an iteration's forward pass and what it keeps; nothing runs."""

        def arguments(weights, constants, streams):
            state = jax.tree.map(lambda stream: stream[:, 0], streams)
            t = jnp.int32(0)
            values = self._pick(self._cast(weights, constants), t)
            return *values, state, self._places(t)[1]

        shapes = jax.eval_shape(arguments, weights, constants, streams)
        return _Split(self._iteration, *shapes)


@jax.tree_util.register_static
class _Split:
    """An iteration's forward and backward pass, with what is kept between them."""

    def __init__(self, iteration, weights, constants, x, micro_batches):
        def forward(weights, constants, x, micro_batches):
            def differentiable(weights, x):
                return iteration(weights, constants, x, micro_batches)[0]

            return jax.vjp(differentiable, weights, x)

        arguments = weights, constants, x, micro_batches
        closed, shape = jax.make_jaxpr(forward, return_shape=True)(*arguments)
        outputs, pull_back = shape
        self._outputs = jax.tree.structure(outputs)
        self._pull_back = jax.tree.structure(pull_back)
        jaxpr = closed.jaxpr
        count = self._outputs.num_leaves
        kept = dict.fromkeys(variables(jaxpr.outvars[count:]))
        # What depends on neither x nor its micro-batch is found again.
        whole = len(jaxpr.invars) - len(jax.tree.leaves((x, micro_batches)))
        fixed = jaxpr.invars[:whole]
        steady, known = [], {*fixed}
        for equation in jaxpr.eqns:
            if known.issuperset(variables(equation.invars)):
                steady.append(equation)
                known.update(equation.outvars)
        again = [one for one in kept if one in known]
        self._kept = [one for one in kept if one not in known]
        self._again = again
        self._residuals = jaxpr.outvars[count:]
        self._run = jex_core.jaxpr_as_fun(
            closed.replace(
                jaxpr=jaxpr.replace(outvars=[*jaxpr.outvars[:count], *self._kept])
            )
        )
        self._rerun = jex_core.jaxpr_as_fun(
            program_of(_needed(steady, again), fixed, again)
        )
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def forward(self, weights, constants, x, micro_batches):
        found = self._run(*jax.tree.leaves((weights, constants, x, micro_batches)))
        count = self._outputs.num_leaves
        return jax.tree.unflatten(self._outputs, found[:count]), found[count:]

    def backward(self, weights, constants, micro_batches, kept, cotangents):
        known = dict(zip(self._kept, kept, strict=True))
        again = self._rerun(*weights, *constants)
        known.update(zip(self._again, again, strict=True))
        leaves = [
            one.val if isinstance(one, jex_core.Literal) else known[one]
            for one in self._residuals
        ]
        pull_back: Any = jax.tree.unflatten(self._pull_back, leaves)
        return pull_back(cotangents)


def _needed(equations, results):
    """The equations that some results come from, in order."""
    wanted, found = {*results}, []
    for equation in reversed(equations):
        if wanted.intersection(equation.outvars):
            wanted.update(variables(equation.invars))
            found.append(equation)
    return found[::-1]


def _rows(array):
    """The stage of every row of an array (P, ...), to broadcast against it."""
    return lax.broadcasted_iota(jnp.int32, (len(array), *(1,) * (array.ndim - 1)), 0)


def _get(stream, column):
    """One column of a stream, over all stages: (P, b, ...)."""
    return lax.dynamic_index_in_dim(stream, column, 1, keepdims=False)


def _set(stream, rows, column):
    return lax.dynamic_update_index_in_dim(stream, rows, column, 1)


def _to_streams(schedule, leaf):
    """(batch, ...) to (P, C, b, ...)."""
    rows, columns = schedule.stages, schedule.microbatches // schedule.stages
    size = len(leaf) // schedule.microbatches
    return leaf.reshape(rows, size, columns, *leaf.shape[1:]).swapaxes(1, 2)


def _from_streams(stream):
    rows, columns, size = stream.shape[:3]
    return stream.swapaxes(1, 2).reshape(rows * columns * size, *stream.shape[3:])


def _check(values: Tree, inputs: Tree, schedule: PipelineSchedule) -> None:
    lead = (schedule.stages, schedule.repeats)
    for leaf in jax.tree.leaves(values):
        if leaf.shape[:2] != lead:
            raise ValueError(
                f"values are of shape {leaf.shape} and must start with (stages, "
                f"repeats) = {lead}"
            )
    for leaf in jax.tree.leaves(inputs):
        if leaf.shape[0] % schedule.microbatches:
            raise ValueError(
                f"a batch of {leaf.shape[0]} does not divide into "
                f"{schedule.microbatches} micro-batches"
            )
