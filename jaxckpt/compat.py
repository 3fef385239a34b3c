"""Every difference between JAX versions, and nothing else."""

import contextlib
import inspect
import math
import re
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
        hidden = equation.params["_prim"].params
        return {
            key: value.jaxpr if isinstance(value, jax.stages.Traced) else value
            for key, value in hidden.items()
        }
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


def as_policies_see_it(
    equation: jex_core.JaxprEqn,
) -> tuple[jex_core.Primitive, dict[str, Any]]:
    """The primitive and the parameters that JAX asks a checkpoint policy about.

    They are those of the equation, but a name is always the primitive ``name``.
    """
    from jax._src.ad_checkpoint import name_p

    name = checkpoint_name_of(equation)
    if name is not None:
        return name_p, {"name": name}
    return equation.primitive, equation.params


def remat3() -> bool:
    """Whether JAX's coming implementation of checkpoints is on, ``JAX_REMAT3=1``."""
    return bool(getattr(jax.config, "jax_remat3", False))


def asked_about(policy: Any) -> frozenset[str] | None:
    """The primitives whose results this JAX keeps if this policy of JAX's says so.

    Returns:
      None for all of them. Under ``JAX_REMAT3=1`` few have a rule; before jax 0.11
      each of those knew some of JAX's own policies, and asked no other.
    """
    if not remat3() or policy is jax.checkpoint_policies.nothing_saveable:
        return None
    if jax.__version_info__ >= (0, 11):
        everything = policy is jax.checkpoint_policies.everything_saveable
        return None if everything else frozenset(_WITH_A_RULE)
    known = {
        "DotsSaveable": {"dot_general"},
        "SaveOnlyTheseNames": {"name"},
        "SaveAnyNamesButThese": {"name"},
    }
    return frozenset(known.get(type(policy).__name__, ()))


_WITH_A_RULE = ("name", "dot_general", "conv_general_dilated")


def closes_over(error: Exception) -> bool:
    """Whether JAX refused to differentiate by what a custom_vjp closes over.

    Its exception is not in the public API.
    """
    return type(error).__name__ == "CustomVJPException"


def keeps(decision: Any) -> bool:
    """Whether a policy's answer is to save or to offload."""
    from jax._src.interpreters import partial_eval

    return not isinstance(
        partial_eval.ensure_enum(decision), partial_eval.RecomputeType
    )


def made_by(policy: Any) -> tuple[str, dict[str, Any]]:
    """Which of ``jax.checkpoint_policies`` made a policy, and from what.

    They are closures, or some of them from jax 0.9 on data classes, by version.

    Returns:
      The name of the function and its arguments; an empty name for a policy that is
      not JAX's own.
    """
    if getattr(type(policy), "__module__", "") == "jax._src.ad_checkpoint":
        words = re.findall("[A-Z][a-z]*", type(policy).__name__)
        return "_".join(words).lower(), dict(vars(policy))
    if getattr(policy, "__module__", "") == "jax._src.ad_checkpoint":
        name, _, inner = policy.__qualname__.partition(".<locals>")
        if inner:
            return name, dict(inspect.getclosurevars(policy).nonlocals)
    return "", {}


def keeps_names_of_rules() -> bool:
    """Whether a policy finds the names in the forward rule of a custom_vjp.

    Under ``JAX_REMAT3=1`` only with JAX's new custom_vjp, ``JAX_CUSTOM_VJP3=1``.
    """
    return not remat3() or bool(getattr(jax.config, "jax_custom_vjp3", False))


def effects_not_in_checkpoints(closed: jex_core.ClosedJaxpr) -> list[str]:
    """The side effects of a program that JAX does not run a second time."""
    from jax._src import effects

    return sorted(map(str, effects.remat_allowed_effects.filter_not_in(closed.effects)))


def is_dropped(variable: Any) -> bool:
    """Whether an equation's result is used nowhere; ``DropVar`` is public from 0.8."""
    return type(variable).__name__ == "DropVar"


def primitive_name(equation: jex_core.JaxprEqn) -> str:
    """The primitive's name, the same whether ``JAX_REMAT3`` is on or not."""
    hidden = type(equation.params.get("_prim")).__name__
    return _HIDDEN.get(hidden, equation.primitive.name)


_HIDDEN = {
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "RematTraced": "remat2",
    "CustomVJPTraced": "custom_vjp_call",
}


def name_params(name: str, aval: Any) -> dict[str, Any]:
    """The parameters of an equation that gives a value a checkpoint name."""
    if not remat3():
        return {"name": name}
    from jax._src.ad_checkpoint import CheckpointName

    return {"_prim": CheckpointName(name, aval)}


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


def haiku_state() -> list[int]:
    """Tells apart the states of the `haiku.transform` around, where there is one."""
    if not in_haiku_transform():
        return []
    from haiku._src import stateful

    return list(map(id, jax.tree.leaves(stateful.internal_state())))


def thread_haiku_state(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a transformation of pure functions one that `haiku.transform` may contain.

    Parameters, state and random numbers become arguments and results, as they do in
    `haiku.remat`; Haiku has no public name for it.
    """
    from haiku._src import stateful

    return stateful.thread_hk_state_in_kwargs(transform)
