"""From a function to its costed graph: what the solver chooses from.

The function is traced with a name on every intermediate and differentiated; in the
forward pass of that trace every equation is an `Operation`, every named value is a
candidate, and the outputs of `jax.vjp` are what the backward pass reads. Loops are
entered: a value inside a scan counts once per iteration.

FLOPs and bytes are those that JAX then runs again and keeps, exactly; a `lax.cond` is
one operation with the FLOPs of its costliest branch, and a checkpoint inside the
function has its own recomputation on top. Seconds are **estimates**, see
`jaxckpt.planner.roofline`; keeping a value costs its bytes once, as they are copied to
where they stay.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.automatic_names import name_values
from jaxckpt.naming import subjaxprs, trace_forward
from jaxckpt.planner.roofline import (
    FREE,
    Kind,
    Roofline,
    flops_of,
    local_shapes,
    stored_values,
)
from jaxckpt.planner.solve import Operation
from jaxckpt.policies import is_automatic
from jaxckpt.programs import inline_calls, source_line, variables
from jaxckpt.remat import split_static

_ENTERED = ("jit", "pjit", "closed_call", "core_call", "shard_map")
_INPUT = -1  # made by no operation: an input of the function


@dataclass(frozen=True)
class _Around:
    """Where an equation stands.

    Attributes:
      times: how often it runs.
      share: the part of an array on one device, where not known.
      devices: inside of a shard_map, where arrays are what one device has, how many
        devices run it.
    """

    times: int = 1
    share: float = 1.0
    devices: int = 1


@dataclass(frozen=True)
class Value:
    """A value that a policy can keep.

    Attributes:
      name: its checkpoint name: the user's, or an automatic one.
      shape, dtype: as the function sees it; in a loop, of one iteration.
      nbytes: bytes on one device, over all iterations.
      source: the line that made it, as ``file.py:12``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    source: str


@dataclass(frozen=True)
class BlockGraph:
    """One block, ready to be solved.

    Attributes:
      operations: its forward pass.
      values: what can be kept, by name, in order of computation.
      kept_bytes: of what is kept whatever is chosen, on one device.
      forward_seconds: estimate of the whole forward pass on one device.
      forward_flops: its matmul FLOPs, over all devices.
    """

    operations: tuple[Operation, ...]
    values: dict[str, Value]
    forward_seconds: float
    forward_flops: int
    kept_bytes: int = 0


def block_graph(
    fn: Callable[..., Any],
    *args: Any,
    kind: Kind,
    shardings: Any = None,
    gpus_per_host: int | None = None,
    keep: Collection[str] = (),
) -> BlockGraph:
    """Traces a function into the graph of what its gradient reads.

    Args:
      fn: the block, not checkpointed; differentiated by every floating-point argument.
      *args: arrays or `jax.ShapeDtypeStruct`; anything else is static.
      kind: the device, for its peak rates.
      shardings: of the arrays among ``args``, in order; the forward pass is then
        compiled once to see how every value is cut. None: one device.
      gpus_per_host: from how many devices on a collective crosses the network.
      keep: names of values that are kept whatever is chosen: there is no choice of
        them, and to what reads them they are there as the inputs are.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxckpt.compiler.targets import KINDS
      >>> def block(x, w):
      ...     return jnp.tanh(x @ w) @ w.T
      >>> graph = block_graph(block, jnp.ones((4, 8)), jnp.ones((8, 16)),
      ...                     kind=KINDS["h100"])
      >>> [(value.name, value.nbytes) for value in graph.values.values()]
      [('dot_general.0', 256), ('tanh.0', 256), ('dot_general.1', 128)]
    """
    arrays, rebuild = split_static(args)

    def of_arrays(*arrays):
        return split_static(fn(*rebuild(list(arrays))))[0]

    closed = name_values(jax.make_jaxpr(of_arrays)(*arrays))
    named = jex_core.jaxpr_as_fun(closed)
    traced = inline_calls(trace_forward(named, *arrays))
    if shardings is None:
        cuts: dict[Any, tuple[int, ...]] = {}
    else:
        cuts = local_shapes(traced, arrays, jax.tree.leaves(shardings))
    builder = _Builder(Roofline(kind, cuts, gpus_per_host), frozenset(keep))
    return builder.build(traced.jaxpr, len(closed.out_avals))


@dataclass
class _Node:
    """An operation while the graph is built.

    Attributes:
      nbytes: of its results.
      varies: whether it depends on an input; what does not is made again for nothing.
      free: it only moves data.
    """

    cost: float = 0.0
    reads: tuple[int, ...] = ()
    name: str = ""
    nbytes: int = 0
    flops: int = 0
    varies: bool = True
    free: bool = False
    needed: bool = False


@dataclass
class _Builder:
    device: Roofline
    keep: frozenset[str] = frozenset()
    kept_bytes: int = 0
    nodes: list[_Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    def build(self, jaxpr: jex_core.Jaxpr, num_outputs: int) -> BlockGraph:
        made_by = dict.fromkeys(jaxpr.invars, _INPUT)
        stored = stored_values(jaxpr)
        self._visit(jaxpr, made_by, stored, _Around())
        self._forget_copies()
        for variable in variables(jaxpr.outvars[num_outputs:]):
            self._mark_needed(made_by.get(variable))
        return BlockGraph(
            operations=tuple(
                Operation(
                    cost=node.cost,
                    reads=node.reads,
                    name=node.name,
                    nbytes=node.nbytes,
                    needed=node.needed,
                    flops=node.flops,
                    keep_cost=(
                        node.nbytes / self.device.kind.memory_bandwidth
                        if node.name
                        else 0.0
                    ),
                )
                for node in self.nodes
            ),
            values=self.values,
            forward_seconds=sum(node.cost for node in self.nodes),
            forward_flops=sum(node.flops for node in self.nodes),
            kept_bytes=self.kept_bytes,
        )

    def _forget_copies(self) -> None:
        """Takes automatic names off what is another value, moved or spread, and off
        constants: keeping the original, or nothing, does the same for fewer bytes."""
        for name in filter(is_automatic, list(self.values)):
            # One name is kept as one: that of a scan is on all of its results.
            named = [node for node in self.nodes if node.name == name]
            if all(map(self._is_copy, named)):
                del self.values[name]
                for node in named:
                    node.name, node.free = "", True

    def _is_copy(self, node: _Node) -> bool:
        moved = [self._original(index) != index for index in node.reads]
        return not node.varies or not moved or any(moved)

    def _original(self, index: int) -> int | None:
        """Goes up through operations that only move data, while that takes no more
        bytes; None when it ends at an input."""
        while (node := self.nodes[index]).free:
            if not node.reads:
                return None if node.varies else index
            (source,) = node.reads
            if self.nodes[source].nbytes > node.nbytes:
                break
            index = source
        return index

    def _mark_needed(self, index: int | None) -> None:
        if index is not None and index != _INPUT:
            index = self._original(index)
            if index is not None and self.nodes[index].varies:
                self.nodes[index].needed = True

    def _visit(self, jaxpr, made_by, stored, around: _Around) -> None:
        """Adds the operations of a jaxpr.

        ``made_by`` tells which operation makes a variable; constants are not in it.
        """
        for equation in jaxpr.eqns:
            primitive = equation.primitive.name
            if primitive in _ENTERED and len(list(subjaxprs(equation))) == 1:
                self._enter(equation, made_by, around)
            elif primitive == "scan":
                self._loop(equation, made_by, around)
            else:
                self._add(equation, made_by, stored, around)

    def _add(self, equation, made_by, stored, around) -> None:
        origins = self._origins(equation.invars, made_by)
        reads = tuple(dict.fromkeys(x for x in origins if x is not None and x >= 0))
        times, share = around.times, around.share
        nbytes = times * sum(
            self.device.nbytes(result, share) for result in variables(equation.outvars)
        )
        name = compat.checkpoint_name_of(equation) or ""
        if name in self.keep:
            self.kept_bytes += nbytes
            made_by[equation.outvars[0]] = _INPUT
            return
        if name:
            self._add_value(name, equation, nbytes)
        flops = flops_of(equation)
        self.nodes.append(
            _Node(
                cost=times * self.device.seconds(equation, flops, stored, share),
                reads=reads,
                name=name,
                nbytes=nbytes,
                flops=times * around.devices * flops,
                varies=_INPUT in origins or any(self.nodes[x].varies for x in reads),
                free=equation.primitive.name in FREE and not name,
            )
        )
        for result in equation.outvars:
            made_by[result] = len(self.nodes) - 1

    def _add_value(self, name: str, equation, nbytes: int) -> None:
        """Several values of one name are kept together."""
        known = self.values.get(name)
        if known:
            self.values[name] = replace(known, nbytes=known.nbytes + nbytes)
            return
        aval = equation.outvars[0].aval
        self.values[name] = Value(
            name, tuple(aval.shape), str(aval.dtype), nbytes, source_line(equation)
        )

    def _enter(self, equation, made_by, around) -> None:
        (body,) = subjaxprs(equation)
        origins = self._origins(equation.invars, made_by)
        inner = dict(zip(body.invars, origins, strict=True))
        if equation.primitive.name == "shard_map":
            devices = around.devices * compat.shard_map_devices(equation)
            around = replace(around, share=1.0, devices=devices)
        self._visit(body, inner, stored_values(body), around)
        outputs = self._origins(body.outvars, inner)
        made_by.update(zip(equation.outvars, outputs, strict=True))

    def _loop(self, equation, made_by, around) -> None:
        """A scan: its carry reads what it was before and what the body made of it."""
        body = compat.inner_jaxpr(equation.params["jaxpr"])
        constants, carried = compat.scan_counts(equation)
        length = equation.params["length"]
        origins = self._origins(equation.invars, made_by)
        inner = dict(zip(body.invars, origins, strict=True))
        carries = {}
        for position in range(carried):
            start = origins[constants + position]
            before = () if start is None or start == _INPUT else (start,)
            self.nodes.append(_Node(reads=before))
            variable = body.invars[constants + position]
            inner[variable] = carries[position] = len(self.nodes) - 1
        share = self.device.enter_loop(equation, body, around.share)
        inside = replace(around, times=around.times * length, share=share)
        self._visit(body, inner, stored_values(body), inside)
        outputs = self._origins(body.outvars, inner)
        for position, index in carries.items():
            after = outputs[position]
            if after is not None and after not in (index, _INPUT):
                self.nodes[index].reads += (after,)
        made_by.update(zip(equation.outvars, outputs, strict=True))

    def _origins(self, variables, made_by) -> list[int | None]:
        return [
            None if isinstance(one, jex_core.Literal) else made_by.get(one)
            for one in variables
        ]
