"""Policies and JAX's own policy objects: one written as the other.

JAX's policies are functions that are asked about every equation. Those that JAX makes
itself (``jax.checkpoint_policies``) only hold names or a rule, and are read back as a
`Policy`, so that their names are checked and a receipt can print them. Any other
function is passed on as it is. Under ``JAX_REMAT3=1`` JAX asks about few primitives
only, and what a policy says of others would be ignored: here it is an error.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.naming import subjaxprs
from jaxckpt.policies import FULL, Policy, PolicyError, parse_policy

# A policy of JAX's that is more than names or one rule, or a user's own function.
AskedPolicy = Callable[..., Any]


def jax_policy(policy: Policy | AskedPolicy, keep: Collection[str] = ()) -> AskedPolicy:
    """JAX's own policy object for a `Policy` (any but ``none``).

    Args:
      policy: what to keep.
      keep: names of values to keep beside that; those that it offloads are offloaded.
    """
    known = jax.checkpoint_policies
    if not isinstance(policy, Policy):
        names = known.save_only_these_names(*keep)
        return known.save_from_both_policies(policy, names) if keep else policy
    save = dict.fromkeys([*policy.save, *keep])
    if policy.offload:
        return known.save_and_offload_only_these_names(
            names_which_can_be_saved=[n for n in save if n not in policy.offload],
            names_which_can_be_offloaded=list(policy.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    names = known.save_only_these_names(*save)
    if save and policy.rule in ("names", "nothing_saveable"):
        return names
    rule = _rules()[policy.rule]
    if keep and policy.rule != "everything_saveable":
        return known.save_from_both_policies(rule, names)
    return rule


def read_policy(policy: Any) -> Policy | AskedPolicy:
    """One block's policy from whatever says it: text, a `Policy`, a policy of JAX's.

    Args:
      policy: anything that `parse_policy` reads, or a JAX policy, which becomes a
        `Policy` if it is one of JAX's own that holds names or a rule.

    Raises:
      PolicyError: no policy; or JAX's ``save_anything_except_these_names``, which
        saves those names as well.

    Example:
      >>> read_policy(jax.checkpoint_policies.save_only_these_names("b", "a"))
      Policy('save:a,b')
      >>> read_policy(jax.checkpoint_policies.checkpoint_dots)
      Policy('dots_saveable')
    """
    if isinstance(policy, str | Policy) or not callable(policy):
        return parse_policy(policy)
    for name, rule in _rules().items():
        if policy == rule:
            return parse_policy(name)
    return _read_names(policy) or policy


def names_in(policy: Policy | AskedPolicy) -> tuple[str, ...]:
    """Every name that a policy speaks of: to save, to offload or to leave out."""
    if isinstance(policy, Policy):
        return policy.names
    names: list[str] = []
    for value in compat.made_by(policy)[1].values():
        if callable(value):
            names.extend(names_in(value))
        elif isinstance(value, set | frozenset):
            names.extend(value)
    return tuple(names)


def check_asked(
    policy: Policy | AskedPolicy,
    closed: jex_core.ClosedJaxpr,
    keep: Collection[str] = (),
) -> None:
    """Raises where JAX would not do what a policy says, without a word.

    Args:
      policy: a block's policy, not ``none``.
      closed: the block's program.
      keep: see `jax_policy`.

    Raises:
      PolicyError: under ``JAX_REMAT3=1``, when the policy keeps a value about which
        JAX does not ask it.
    """
    emitted = jax_policy(policy, keep)
    asked = compat.asked_about(emitted)
    if asked is None:
        return
    for equation in _equations(closed.jaxpr):
        primitive, params = compat.as_policies_see_it(equation)
        if primitive.name in asked:
            continue
        operands = [operand.aval for operand in equation.invars]
        if compat.keeps(emitted(primitive, *operands, **params)):
            raise PolicyError(
                f"{getattr(policy, '__name__', policy)} keeps results of "
                f"{compat.primitive_name(equation)}, which JAX_REMAT3=1 ignores here; "
                "save by name instead, as in save:a,b"
            )


def _equations(jaxpr: jex_core.Jaxpr) -> Iterator[jex_core.JaxprEqn]:
    """The equations that policies are asked about."""
    for equation in jaxpr.eqns:
        inner = list(subjaxprs(equation)) if equation.primitive.name in _ENTERED else []
        for body in inner:
            yield from _equations(body)
        if not inner:
            yield equation


_ENTERED = ("jit", "pjit", "scan", "cond", "shard_map", "closed_call", "core_call")


def _rules() -> dict[str, AskedPolicy]:
    known = jax.checkpoint_policies
    return {
        "everything_saveable": known.everything_saveable,
        "nothing_saveable": known.nothing_saveable,
        "dots_saveable": known.dots_saveable,
        "dots_with_no_batch_dims_saveable": known.dots_with_no_batch_dims_saveable,
    }


def _read_names(policy: AskedPolicy) -> Policy | None:
    """A JAX policy of names as a `Policy`; None for any other."""
    made_by, values = compat.made_by(policy)
    if made_by == "save_anything_except_these_names":
        raise PolicyError(
            "JAX's save_anything_except_these_names saves those names too: use "
            "save_any_names_but_these, or list what to save, as in save:a,b"
        )
    if made_by == "save_only_these_names":
        (names,) = values.values()
        return _of_names(names, ())
    if made_by == "save_and_offload_only_these_names":
        saved = values["names_which_can_be_saved"]
        offloaded = values["names_which_can_be_offloaded"]
        if (values["offload_src"], values["offload_dst"]) == ("device", "pinned_host"):
            return _of_names(saved, offloaded)
    if made_by == "save_from_both_policies":
        one, other = map(read_policy, values.values())
        return _both(one, other)
    return None


def _of_names(saved: Iterable[str], offloaded: Iterable[str]) -> Policy | None:
    try:
        return Policy(save=tuple(saved), offload=tuple(offloaded))
    except PolicyError:
        # JAX takes any text for a name, the policy language does not.
        return None if saved or offloaded else FULL


def _both(one: Policy | AskedPolicy, other: Policy | AskedPolicy) -> Policy | None:
    """What is saved by either, if a `Policy` can say it."""
    if FULL in (one, other):
        rest = other if one == FULL else one
        return rest if isinstance(rest, Policy) else None
    if isinstance(one, Policy) and isinstance(other, Policy):
        if one.save and other.save and not one.offload and not other.offload:
            return Policy(save=one.save + other.save)
    return None
