"""From a function to its costed graph: what the solver chooses from.

The function is traced with a name on every intermediate and differentiated; in the
forward pass of that trace every equation is an `Operation`, every named value is a
candidate, and the outputs of `jax.vjp` are what the backward pass reads. Loops are
entered: a value inside a scan counts once per iteration.

All costs are **estimates**, seconds of one device at its peak rates:

* a matmul or attention kernel: ``max(FLOPs / peak, bytes read and written /
  bandwidth)``, of the part that one device has;
* a matmul whose contracted axis is cut over devices: its all-reduce on top,
  ``2 (n - 1) / n x bytes / link``; a sharding constraint that gathers: the bytes it
  receives over the link;
* keeping a value: the bytes it takes, once, as they are copied to where they stay;
* a reduction: the bytes it reads. An element-wise operation: the bytes it writes,
  where a kernel or the backward pass reads its result; XLA fuses the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.automatic_names import name_values
from jaxckpt.compiler.flops import equation_flops, walk
from jaxckpt.compiler.targets import GpuKind
from jaxckpt.naming import aval_bytes, subjaxprs, trace_forward
from jaxckpt.planner.solve import Operation
from jaxckpt.policies import is_automatic
from jaxckpt.remat import split_static
from jaxckpt.segments import inline_calls, variables

_ENTERED = ("jit", "pjit", "closed_call", "core_call", "shard_map")
# Data movement that XLA folds into whatever reads the result.
_FREE = (
    "broadcast_in_dim convert_element_type copy copy_p expand_dims iota name reshape "
    "sharding_constraint squeeze stop_gradient transpose slice pvary rev"
).split()
_INPUT = -1  # made by no operation: an input of the function
_REDUCTIONS = ("reduce_", "argm", "cumsum", "cumlogsumexp", "cummax", "cumprod", "sort")


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
      forward_seconds: estimate of the whole forward pass on one device.
      forward_flops: its matmul FLOPs, over all devices.
    """

    operations: tuple[Operation, ...]
    values: dict[str, Value]
    forward_seconds: float
    forward_flops: int


def block_graph(
    fn: Callable[..., Any],
    *args: Any,
    kind: GpuKind,
    shardings: Any = None,
    gpus_per_host: int | None = None,
) -> BlockGraph:
    """Traces a function into the graph of what its gradient reads.

    Args:
      fn: the block, not checkpointed; differentiated by every floating-point argument.
      *args: arrays or `jax.ShapeDtypeStruct`; anything else is static.
      kind: the device, for its peak rates.
      shardings: of the arrays among ``args``, in order; the forward pass is then
        compiled once to see how every value is cut. None: one device.
      gpus_per_host: from how many devices on a collective crosses the network.

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
        cuts = _local_shapes(traced, arrays, jax.tree.leaves(shardings))
    builder = _Builder(kind, cuts, gpus_per_host)
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
    kind: GpuKind
    cuts: dict[Any, tuple[int, ...]]
    gpus_per_host: int | None
    nodes: list[_Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    def build(self, jaxpr: jex_core.Jaxpr, num_outputs: int) -> BlockGraph:
        made_by = dict.fromkeys(jaxpr.invars, _INPUT)
        stored = _stored(jaxpr)
        self._visit(jaxpr, made_by, stored, times=1, share=1.0)
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
                        node.nbytes / self.kind.memory_bandwidth if node.name else 0.0
                    ),
                )
                for node in self.nodes
            ),
            values=self.values,
            forward_seconds=sum(node.cost for node in self.nodes),
            forward_flops=sum(node.flops for node in self.nodes),
        )

    def _forget_copies(self) -> None:
        """Takes automatic names off what is another value, moved or spread, and off
        constants: keeping the original, or nothing, does the same for fewer bytes."""
        for node in self.nodes:
            if not is_automatic(node.name):
                continue
            moved = [self._original(index) != index for index in node.reads]
            if not node.varies or not moved or any(moved):
                del self.values[node.name]
                node.name, node.free = "", True

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

    def _visit(self, jaxpr, made_by, stored, times: int, share: float) -> None:
        """Adds the operations of a jaxpr that runs ``times`` times.

        ``made_by`` tells which operation makes a variable; constants are not in it.
        ``share`` is the part of an array on one device, where not known.
        """
        for equation in jaxpr.eqns:
            primitive = equation.primitive.name
            if primitive in _ENTERED and len(list(subjaxprs(equation))) == 1:
                self._enter(equation, made_by, times, share)
            elif primitive == "scan":
                self._loop(equation, made_by, times, share)
            else:
                self._add(equation, made_by, stored, times, share)

    def _add(self, equation, made_by, stored, times, share) -> None:
        origins = self._origins(equation.invars, made_by)
        reads = tuple(dict.fromkeys(x for x in origins if x is not None and x >= 0))
        results = variables(equation.outvars)
        nbytes = times * sum(self._nbytes(result, share) for result in results)
        name = compat.checkpoint_name_of(equation) or ""
        if name:
            self._add_value(name, equation, nbytes)
        flops = _flops(equation)
        self.nodes.append(
            _Node(
                cost=times * self._seconds(equation, flops, stored, share),
                reads=reads,
                name=name,
                nbytes=nbytes,
                flops=times * flops,
                varies=_INPUT in origins or any(self.nodes[x].varies for x in reads),
                free=equation.primitive.name in _FREE and not name,
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
            name, tuple(aval.shape), str(aval.dtype), nbytes, _source(equation)
        )

    def _enter(self, equation, made_by, times, share) -> None:
        (body,) = subjaxprs(equation)
        origins = self._origins(equation.invars, made_by)
        inner = dict(zip(body.invars, origins, strict=True))
        stored = _stored(body)
        self._visit(body, inner, stored, times, share)
        outputs = self._origins(body.outvars, inner)
        made_by.update(zip(equation.outvars, outputs, strict=True))

    def _loop(self, equation, made_by, times, share) -> None:
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
        largest = max(equation.invars, key=lambda x: aval_bytes(x.aval), default=None)
        share = self._share(largest, share)
        stored = _stored(body)
        self._visit(body, inner, stored, times * length, share)
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

    def _seconds(self, equation, flops, stored, share) -> float:
        primitive = equation.primitive.name
        results = variables(equation.outvars)
        written = sum(self._nbytes(result, share) for result in results)
        if flops or list(subjaxprs(equation)):
            return self._kernel_seconds(equation, flops, written, share)
        if primitive == "sharding_constraint":
            received = written - self._nbytes(equation.invars[0], share)
            return max(0, received) / self._link(2)
        if primitive in _FREE:
            return 0.0
        if primitive.startswith(_REDUCTIONS):
            read = sum(self._nbytes(x, share) for x in variables(equation.invars))
            return read / self.kind.memory_bandwidth
        kept = sum(self._nbytes(x, share) for x in results if x in stored)
        return kept / self.kind.memory_bandwidth

    def _kernel_seconds(self, equation, flops, written, share) -> float:
        operands = variables(equation.invars)
        read = sum(self._nbytes(operand, share) for operand in operands)
        on_all = sum(aval_bytes(result.aval) for result in equation.outvars)
        local = flops * written / on_all if on_all else flops
        link = 0.0
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0]
            whole = math.prod(left.aval.shape[axis] for axis in contracted)
            cut = self.cuts.get(left)
            if cut:
                parts = whole // math.prod(cut[axis] for axis in contracted)
                local /= parts
                link = 2 * (parts - 1) / parts * written / self._link(parts)
        dtype = operands[0].aval.dtype if operands else "float32"
        peak = matmul_peak(self.kind, str(dtype))
        return max(local / peak, (read + written) / self.kind.memory_bandwidth) + link

    def _link(self, members: int) -> float:
        if self.gpus_per_host and members > self.gpus_per_host:
            network = self.gpus_per_host * self.kind.network_bandwidth
            return min(self.kind.link_bandwidth, network)
        return self.kind.link_bandwidth

    def _share(self, variable, otherwise: float) -> float:
        cut = self.cuts.get(variable) if variable is not None else None
        if cut is None or not variable.aval.size:
            return otherwise
        return math.prod(cut) / variable.aval.size

    def _nbytes(self, variable, share: float = 1.0) -> int:
        return round(aval_bytes(variable.aval) * self._share(variable, share))


def matmul_peak(kind: GpuKind, dtype: str) -> float:
    """Matmul FLOP/s of a kind by operand type; float32 is TF32 from Ampere on."""
    if dtype in ("bfloat16", "float16"):
        return kind.matmul_flops
    if dtype == "float32" and kind.capability >= (8, 0):
        return kind.matmul_flops / 2
    if dtype.startswith(("float8", "int8", "uint8")) and kind.capability >= (8, 9):
        return 2 * kind.matmul_flops
    return 2e9 * kind.cores * kind.fpus_per_core * kind.clock_ghz


def _flops(equation) -> int:
    inner = list(subjaxprs(equation))
    if equation_flops(equation) or not inner:
        return equation_flops(equation)
    return max(
        sum(visit.times * equation_flops(visit.equation) for visit in walk(body))
        for body in inner
    )


def _stored(jaxpr: jex_core.Jaxpr) -> set[Any]:
    """Variables that are written to memory: outputs, and what a kernel reads. What only
    element-wise operations and reductions read is fused into them."""
    stored = set(variables(jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        primitive = equation.primitive.name
        if primitive in _FREE:
            if any(result in stored for result in equation.outvars):
                stored.update(variables(equation.invars))
        elif equation_flops(equation) or list(subjaxprs(equation)):
            stored.update(variables(equation.invars))
    return stored


def _source(equation) -> str:
    """The innermost line outside of JAX, Flax and this package."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = frame.file_name.replace("\\", "/")
        inside = ("/jax/", "/flax/", "/jaxckpt/planner/", "/jaxckpt/remat")
        if not any(part in path for part in (*inside, "/equinox/", "<")):
            return f"{path.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""


def _local_shapes(closed, arrays, shardings) -> dict[Any, tuple[int, ...]]:
    """The part of every value that one device holds, as XLA's propagation cuts it."""
    jaxpr = closed.jaxpr
    made = [
        result
        for equation in jaxpr.eqns
        for result in variables(equation.outvars)
        if not jax.dtypes.issubdtype(result.aval.dtype, jax.dtypes.extended)
    ]
    everything = closed.replace(jaxpr=jaxpr.replace(outvars=made))
    arguments = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    lowered = jax.jit(jex_core.jaxpr_as_fun(everything)).lower(*arguments)
    placed = lowered.compile().output_shardings
    cuts = {
        variable: sharding.shard_shape(variable.aval.shape)
        for variable, sharding in zip(made, placed, strict=True)
    }
    for variable, sharding in zip(jaxpr.invars, shardings, strict=True):
        cuts[variable] = sharding.shard_shape(variable.aval.shape)
    return cuts
