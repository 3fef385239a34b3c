"""Every difference between JAX versions, and nothing else."""

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import mlir
from jaxlib.mlir import ir


def equation_params(equation: jex_core.JaxprEqn) -> dict[str, Any]:
    """An equation's parameters.

    Under ``JAX_REMAT3=1`` (jax >= 0.12) checkpoints and names are equations
    ``call_hi_primitive`` whose own parameters sit one level down, in ``_prim``.
    """
    if equation.primitive.name == "call_hi_primitive":
        return equation.params["_prim"].params
    return equation.params


def checkpoint_name_of(equation: jex_core.JaxprEqn) -> str | None:
    """The name that a `checkpoint_name` equation gives, None for any other.

    It is the primitive ``name``, or under ``JAX_REMAT3=1`` one of the classes
    ``CheckpointName`` and ``CheckpointNameFwd`` (see `equation_params`).
    """
    if equation.primitive.name == "name":
        return equation.params["name"]
    if equation.primitive.name == "call_hi_primitive":
        hidden = equation.params["_prim"]
        if type(hidden).__name__.startswith("CheckpointName"):
            return hidden.params["name"]
    return None


def is_dropped(variable: Any) -> bool:
    """Whether an equation's result is used nowhere; ``DropVar`` is public from 0.8."""
    return type(variable).__name__ == "DropVar"


def scan_counts(equation: jex_core.JaxprEqn) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are its carry.

    ``num_consts`` and ``num_carry`` became one parameter, ``ft_in``, in jax 0.11+.
    """
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


def shard_map_devices(equation: jex_core.JaxprEqn) -> int:
    """How many devices each run a shard_map's body; 1 for any other equation.

    ``manual_axes`` became ``newly_manual_axes`` after jax 0.7.
    """
    if equation.primitive.name != "shard_map":
        return 1
    params = equation.params
    axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
    return math.prod(params["mesh"].shape[axis] for axis in axes)


def inner_jaxpr(value: Any) -> jex_core.Jaxpr:
    """A parameter's jaxpr, closed or open: jax 0.12 made a scan's and a jit's open."""
    return value.jaxpr if isinstance(value, jex_core.ClosedJaxpr) else value


def memory_kinds(device: Any) -> tuple[str, ...] | None:
    """The kinds of memory that a program can name on a device.

    Returns:
      None for a device that is only compiled for: it lists none, and a sharding
      forgets its ``memory_kind`` there without a word. Nothing for a CPU before
      jax 0.8, whose programs end the process when their arguments are pinned.
    """
    if device.platform == "cpu" and jax.__version_info__ < (0, 8):
        return ()
    try:
        found = device.addressable_memories()
    except jax.errors.JaxRuntimeError:
        return None
    return tuple(memory.kind for memory in found) or None


def offload_ends_process(device: Any) -> bool:
    """Whether compiling a program that offloads may end the process.

    On a CPU before jax 0.8, as soon as the jitted function has ``out_shardings``: it
    does with "double free or corruption", or fails for want of a custom call.
    """
    return device.platform == "cpu" and jax.__version_info__ < (0, 8)


def in_host_memory(argument: Any) -> Any:
    """Declares an argument of the jitted function around to be in pinned host memory.

    For devices that are only compiled for, where no sharding can say so. It writes
    ``mhlo.memory_kind`` on the argument of the lowered program, as JAX does for a
    sharding with that memory kind on an attached device, and does nothing else.

    Args:
      argument: an argument itself, at the top level of the function: nothing computed.
    """
    return _host_argument.bind(argument)


_host_argument = jex_core.Primitive("host_argument")


@_host_argument.def_abstract_eval
def _on_host(aval):
    return aval.update(memory_space=jax.memory.Space.Host)


def _declare(ctx, argument):
    function = argument.owner.owner  # of the block that it is an argument of
    attributes = list(ir.ArrayAttr(function.attributes["arg_attrs"]))
    own = {one.name: one.attr for one in ir.DictAttr(attributes[argument.arg_number])}
    own["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
    attributes[argument.arg_number] = ir.DictAttr.get(own)
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    return [argument]


mlir.register_lowering(_host_argument, _declare, cacheable=False)


def coordination_client() -> Any:
    """The client of the service that joins processes; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client


def process_numbers() -> tuple[int, int]:
    """Which process this is and of how many, without asking for devices."""
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


def let_signals_end_it() -> None:
    """Lets SIGTERM end a process of several, which JAX would catch for its own use.

    In jax 0.7 nothing turns that off.
    """
    with contextlib.suppress(AttributeError):
        jax.config.update("jax_enable_preemption_service", False)


def in_haiku_transform() -> bool:
    """Whether this runs inside `haiku.transform`."""
    if "haiku" not in sys.modules:
        return False
    from haiku._src import base

    return base.inside_transform()


def thread_haiku_state(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a transformation of pure functions one that `haiku.transform` may contain.

    Parameters, state and random numbers become arguments and results, as they do in
    `haiku.remat`; Haiku has no public name for it.
    """
    from haiku._src import stateful

    return stateful.thread_hk_state_in_kwargs(transform)
