"""`jaxckpt.plan`: a budget in bytes for any function, or for a stack of any block."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.sharding import Mesh, SingleDeviceSharding

from jaxckpt import compat
from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.targets import Target, parse_target
from jaxckpt.layers import layer_plan
from jaxckpt.layout import split_layers
from jaxckpt.modules import refuse_nnx
from jaxckpt.naming import aval_bytes, is_array
from jaxckpt.planner.frontier import frontier
from jaxckpt.planner.graph import BlockGraph, block_graph
from jaxckpt.planner.layer_stack import LayerStack
from jaxckpt.planner.plan import Plan
from jaxckpt.planner.roofline import kind_of
from jaxckpt.planner.search import MAX_COMPILES, Model, search
from jaxckpt.planner.solve import Link, evaluate
from jaxckpt.planner.stage_chain import StageChain, StageModel
from jaxckpt.remat import split_static
from jaxckpt.segments import (
    Stage,
    cut,
    fingerprint,
    flat_program,
    loop_body,
    run_stages,
    stages,
)
from jaxckpt.stack import stack
from jaxckpt.units import check_budget, parse_bytes


def plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: int | str,
    target: str = "attached",
    mesh: Mesh | None = None,
    num_layers: int | None = None,
    offload: bool = False,
    host_budget: int | str | None = None,
    max_compiles: int = MAX_COMPILES,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Finds what a function keeps for its backward pass, within a budget in bytes.

    The budget holds for the compiled program that computes the function and all its
    gradients: arguments, outputs and temporaries, per device. The function needs no
    annotation, and is cut into stages where few bytes cross.

    With ``num_layers`` the function is one layer of a stack, ``(carry, layer_values)
    -> (carry, output)`` as `jaxckpt.stack` takes it, and ``args`` are its carry and
    the values of one layer.

    Args:
      fn: the function whose gradient is taken: a loss, or a block.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`, with shardings on a mesh;
        whatever is no array is static. All floating-point ones are differentiated.
      budget: bytes, or text such as ``"14GiB"``.
      target: as `jaxckpt.report` takes it: ``"attached"``, ``"cpu"``, ``"h100:8"``.
        For absent GPUs JAX must run on the CPU (``JAX_PLATFORMS=cpu`` before it is
        imported).
      mesh: where arguments are that have no sharding: all on each of its devices.
      num_layers: depth of the stack.
      offload: whether values may move to host memory; stacks only.
      host_budget: host bytes for that, per device.
      max_compiles: how many candidates to compile at most.
      progress: told what is being done.

    Returns:
      A `Plan` for ``jaxckpt.remat(fn, plan)``; of a stack, for
      ``jaxckpt.stack(fn, plan, num_layers)``.

    Raises:
      Infeasible: nothing fits, with what needs what.

    Example:
      >>> import jax, jax.numpy as jnp, jaxckpt
      >>> def loss(x, w):
      ...     for _ in range(8):
      ...         x = x + jnp.tanh(x @ w) @ w.T
      ...     return jnp.sum(x)
      >>> x, w = jnp.ones((256, 32)), jnp.ones((32, 128)) / 64
      >>> plan = jaxckpt.plan(loss, x, w, budget="800KiB", target="cpu")
      >>> plan.compiled["device_total_bytes"] <= plan.budget_bytes
      True
      >>> gradient = jax.grad(jaxckpt.remat(loss, plan))(x, w)

    Source: section 3 of Jain et al. 2020 (arXiv 1910.02653) reduced to one
    recomputation per value; Beaumont et al. 2019 (arXiv 1911.13214) for the chain.
    """
    if not callable(fn):
        raise PlanArgumentError(
            f"plan takes one function, not a {type(fn).__name__}; of layers in turn "
            "plan each kind by itself"
        )
    limit = _bytes("budget", budget)
    host_limit = math.inf if host_budget is None else _bytes("host_budget", host_budget)
    if offload and num_layers is None:
        raise PlanArgumentError(
            "offload=True needs num_layers: values of a stack's layers move to the "
            "host, those of a function do not"
        )
    if max_compiles < 1:
        raise PlanArgumentError(f"max_compiles is 1 or more, not {max_compiles}")
    if num_layers is not None and num_layers < 1:
        raise PlanArgumentError(f"num_layers is 1 or more, not {num_layers}")
    if not any(map(_is_differentiable, jax.tree.leaves(args))):
        raise PlanArgumentError(
            "nothing to differentiate: no argument holds a floating-point array"
        )
    if num_layers is not None and len(args) != 2:
        raise PlanArgumentError(
            f"with num_layers the arguments are a carry and one layer's values, not "
            f"{len(args)} arguments"
        )
    refuse_nnx(args)
    where = parse_target(target)
    site = _Site(where, mesh)
    if num_layers is not None:
        job = _stack_job(fn, args, num_layers, site, offload, host_limit)
    else:
        job = _function_job(fn, args, site)
    model, compile, starts, mark, values = job
    found = search(model, limit, compile, max_compiles=max_compiles, progress=progress)
    best = found.best
    layers = num_layers if num_layers is not None else max(len(starts), 1)
    kept = {
        name
        for policy in layer_plan(best.proposal.layer_plan, layers).policies()
        for name in policy.names
    }
    return Plan(
        layer_plan=best.proposal.layer_plan,
        num_layers=layers,
        budget_bytes=limit,
        target=target,
        mesh=site.text,
        model=getattr(fn, "__name__", type(fn).__name__),
        batch_size=None,
        sequence_length=None,
        predicted={
            "device_total_bytes": best.predicted_bytes,
            "recompute_flops": best.proposal.flops,
            "recompute_seconds": best.proposal.cost,
        },
        compiled=best.row,
        recompute_fraction=best.row["recompute_fraction"],
        lower_bound={"recompute_seconds": found.lower_bound},
        solver={"status": "optimal", "gap": found.gap, "seconds": found.seconds},
        compiles=len(found.tried),
        values=tuple(value for value in values if value["name"] in kept),
        starts=tuple(starts),
        fingerprint=mark,
    )


class PlanArgumentError(ValueError):
    """An argument of `plan` that cannot be. One line."""


def _is_differentiable(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _bytes(name: str, value: int | str) -> int:
    if isinstance(value, str):
        check_budget(name, value)
        return parse_bytes(value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise PlanArgumentError(
            f"{name} is bytes, a whole number above 0, or text such as '14GiB'; "
            f"not {value!r}"
        )
    return value


class _Site:
    """Where a function is compiled: its devices, shardings and rates."""

    def __init__(self, target: Target, mesh: Mesh | None):
        devices = list(mesh.devices.flat) if mesh is not None else target.devices()
        self.target = target
        self.platform = "gpu" if target.is_absent else devices[0].platform
        self.kind = kind_of(target, self.platform)
        self.text = (
            ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items())
            if mesh is not None
            else ""
        )
        self.default = (
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            if mesh is not None
            else SingleDeviceSharding(devices[0])
        )
        self.is_cut = mesh is not None and mesh.size > 1

    def place(self, array: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(array, "sharding", None)
        if not self.is_cut or not isinstance(sharding, jax.sharding.NamedSharding):
            sharding = self.default
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def graph(self, fn: Callable[..., Any], *arrays: Any) -> BlockGraph:
        placed = [self.place(array) for array in arrays]
        return block_graph(
            fn,
            *placed,
            kind=self.kind,
            shardings=[one.sharding for one in placed] if self.is_cut else None,
            gpus_per_host=self.target.gpus,
        )

    def row(self, text: str, fn: Callable[..., Any], arrays: list[Any]) -> dict:
        """Compiles a function with its gradients; a row as in a report."""
        program = _with_gradients(fn)
        placed = [self.place(array) for array in arrays]
        compiled, seconds = compile_step(
            jax.jit(program), *placed, platform=self.platform
        )
        flops = count_flops(program, *placed)
        return {
            "policy": text,
            **memory_bytes(compiled).as_dict(),
            "flops": {
                "forward": flops.forward,
                "recompute": flops.recompute,
                "backward": flops.backward,
                "other": flops.other,
            },
            "recompute_fraction": flops.recompute_fraction,
            "compile_seconds": round(seconds, 3),
        }


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """All outputs, and the gradients of their sum by all floating-point arguments."""

    def program(*arrays):
        chosen = [jnp.issubdtype(array.dtype, jnp.inexact) for array in arrays]

        def of_chosen(*parts):
            rest = iter(parts)
            merged = [
                next(rest) if take else array
                for take, array in zip(chosen, arrays, strict=True)
            ]
            return fn(*merged)

        outputs, pull = jax.vjp(
            of_chosen,
            *(array for take, array in zip(chosen, arrays, strict=True) if take),
        )
        ones = jax.tree.map(
            lambda leaf: (
                jnp.ones_like(leaf)
                if jnp.issubdtype(leaf.dtype, jnp.inexact)
                else jnp.zeros(leaf.shape, jax.dtypes.float0)
            ),
            outputs,
        )
        return outputs, pull(ones)

    return program


def _stack_job(fn, args, num_layers: int, site: _Site, offload: bool, host_budget):
    carry, values = args
    arrays, rebuild = split_static((carry, values))

    def layer(*arrays):
        return split_static(fn(*rebuild(list(arrays))))[0]

    graph = site.graph(layer, *arrays)
    width = len(split_static(carry)[0])
    gradients = num_layers * sum(_local_bytes(site, x) for x in arrays[width:])
    inputs = sum(_local_bytes(site, x) for x in arrays[:width])
    link = Link(site.kind.host_bandwidth, graph.forward_seconds) if offload else None
    model = LayerStack(
        operations=graph.operations,
        num_layers=num_layers,
        static={"layer values": gradients, "carry": inputs},
        gradient_bytes=gradients + 2 * inputs,
        input_bytes=inputs,
        forward_seconds=graph.forward_seconds,
        forward_flops=graph.forward_flops,
        link=link,
        host_budget=host_budget,
        layer_bytes=gradients // num_layers,
    )

    def compile(text: str) -> dict[str, Any]:
        stacked = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (num_layers, *leaf.shape),
                leaf.dtype,
                sharding=_stacked(site.place(leaf).sharding),
            ),
            values,
        )
        split = jax.eval_shape(lambda v: split_layers(v, text, num_layers), stacked)
        run = stack(fn, text, num_layers)
        leaves, structure = jax.tree.flatten((carry, split))

        def whole(*leaves):
            return jax.tree.leaves(run(*jax.tree.unflatten(structure, leaves)))

        return site.row(text, whole, leaves)

    values_found = [_as_dict(value) for value in graph.values.values()]
    return model, compile, (), "", values_found


def _stacked(sharding: Any) -> Any:
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        return jax.sharding.NamedSharding(sharding.mesh, spec)
    return sharding


def _function_job(fn, args, site: _Site):
    arrays, rebuild = split_static(args)

    def of_arrays(*arrays):
        return split_static(fn(*rebuild(list(arrays))))[0]

    closed = flat_program(of_arrays, *arrays)
    starts = cut(closed)
    memo: dict[str, StageModel] = {}
    models, values = [], []
    for stage in stages(closed, starts):
        mark = fingerprint(stage.closed())
        if mark not in memo:
            memo[mark], found = _stage_model(stage, site)
            values += found
        models.append(memo[mark])
    differentiated = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
    model: Model = StageChain(
        stages=models,
        static={
            "arguments": sum(_local_bytes(site, x) for x in arrays),
            "gradients": sum(_local_bytes(site, x) for x in differentiated),
        },
        gradient_bytes=sum(aval_bytes(aval) for aval in closed.out_avals),
    )

    def compile(text: str) -> dict[str, Any]:
        layers = layer_plan(text, len(starts))
        return site.row(text, run_stages(closed, starts, layers), arrays)

    return model, compile, starts, fingerprint(closed), values


def _stage_model(stage: Stage, site: _Site) -> tuple[StageModel, list[dict]]:
    iterations, carry = 1, 0
    if stage.loop is not None:
        equation = stage.loop
        iterations = equation.params["length"]
        function = loop_body(equation)
        jaxpr = compat.inner_jaxpr(equation.params["jaxpr"])
        inputs: list[Any] = [one.aval for one in jaxpr.invars]
        constants, carried = compat.scan_counts(equation)
        carry = sum(map(aval_bytes, inputs[constants : constants + carried]))
    else:
        function = jex_core.jaxpr_as_fun(stage.closed())
        inputs = [one.aval for one in stage.reads]
    arrays: list[Any] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    graph = site.graph(function, *arrays)
    operations = graph.operations
    model = StageModel(
        choices=frontier(operations, copies=iterations, budgets=24),
        full=evaluate(operations, (), ()),
        all_bytes=sum(one.nbytes for one in operations if one.needed),
        output_bytes=sum(aval_bytes(one.aval) for one in stage.makes),
        iterations=iterations,
        carry_bytes=carry,
        forward_seconds=iterations * graph.forward_seconds,
        forward_flops=iterations * graph.forward_flops,
    )
    return model, [_as_dict(value) for value in graph.values.values()]


def _as_dict(value: Any) -> dict[str, Any]:
    return {
        "name": value.name,
        "shape": list(value.shape),
        "dtype": value.dtype,
        "nbytes": value.nbytes,
        "source": value.source,
    }


def _local_bytes(site: _Site, array: Any) -> int:
    assert is_array(array)
    local = site.place(array).sharding.shard_shape(array.shape)
    whole = math.prod(array.shape)
    return aval_bytes(array) * math.prod(local) // whole if whole else 0
