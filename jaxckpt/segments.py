"""Cut any function into a chain of stages, and checkpoint those under a layer plan.

`jax.checkpoint` around a whole function saves nothing: its backward pass begins by
making everything again. So the function's program is cut, where few bytes cross, into
stages that a layer plan speaks of as if they were layers. A `lax.scan` is a stage of
its own, and its policy is that of the scan's body. Nothing of the function's Python
runs again, and no annotation is needed.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.layers import LayerPlan, Run
from jaxckpt.naming import aval_bytes, subjaxprs
from jaxckpt.policies import NONE, Policy, PolicyError
from jaxckpt.programs import fingerprint, flat_program, program_of, variables
from jaxckpt.remat import checkpoint, split_static
from jaxckpt.schedules.cuts import least_cut


@dataclass(frozen=True)
class Stage:
    """Some equations of a program, one after the other, as a function.

    Attributes:
      equations: those equations.
      reads: the variables that they read and do not make, inputs of the program too.
      makes: the variables that are read after them.
      crossing: bytes that are alive behind them, without the program's inputs.
    """

    equations: tuple[Any, ...]
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]
    crossing: int

    @property
    def loop(self) -> Any:
        """The stage's equation where it is one scan and nothing else, or None."""
        only = self.equations[0] if len(self.equations) == 1 else None
        return only if only is not None and only.primitive.name == "scan" else None

    def closed(self) -> jex_core.ClosedJaxpr:
        """Its program: ``reads`` in, ``makes`` out."""
        return program_of(self.equations, self.reads, self.makes)


def planned(fn: Callable[..., Any], plan: Any) -> Callable[..., Any]:
    """A function under a plan that `jaxckpt.plan` made for it.

    Raises:
      PolicyError: when called, if it is another function, or of other sizes.
    """

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        call = inspect.signature(fn).bind(*args, **kwargs)
        args, kwargs = call.args, call.kwargs  # x=1 is 1 in its place
        arrays, rebuild = split_static((args, kwargs))
        rebuild_outputs = None

        def of_arrays(*arrays):
            nonlocal rebuild_outputs
            call_args, call_kwargs = rebuild(list(arrays))
            outputs, rebuild_outputs = split_static(fn(*call_args, **call_kwargs))
            return outputs

        closed = flat_program(of_arrays, *arrays)
        if fingerprint(closed) != plan.fingerprint:
            raise PolicyError(
                f"the plan was made for {plan.model}, and this is another function or "
                "has other sizes; plan again"
            )
        outputs = run_stages(closed, plan.starts, plan.layers)(*arrays)
        assert rebuild_outputs is not None  # set while tracing
        return rebuild_outputs(outputs)

    return wrapped


def cut(closed: jex_core.ClosedJaxpr, most: int = 24) -> tuple[int, ...]:
    """Chooses where stages begin: around scans, and where few bytes cross.

    Of all cuts into at most ``most`` stages, those with the least sum of what crosses
    them and of what the largest stage makes, which is about what one level of
    checkpoints needs. A scan makes nothing in that sense, and the cuts around scans do
    not count.

    Args:
      closed: a program from `flat_program`.
      most: stages to make at most, and one more for each cut around a scan.

    Returns:
      The index of each stage's first equation; the first is 0.

    Source: Chen et al. 2016, arXiv 1604.06174, algorithm 3, made exact.
    """
    equations = closed.jaxpr.eqns
    loops = [i for i, one in enumerate(equations) if one.primitive.name == "scan"]
    made = [_made_inside(equation) for equation in equations]
    for index in loops:
        made[index] = 0
    forced = sorted({0, *loops, *(i + 1 for i in loops)} - {len(equations)})
    return least_cut(made, _crossing(closed), forced, most + len(forced) - 1)


def _made_inside(equation: Any) -> int:
    """Bytes that an equation makes; of a conditional, inside its costliest branch."""
    outputs = sum(aval_bytes(result.aval) for result in variables(equation.outvars))
    if equation.primitive.name != "cond":
        return outputs
    branches = [
        sum(_made_inside(one) for one in body.eqns) for body in subjaxprs(equation)
    ]
    return max(outputs, *branches)


def stages(closed: jex_core.ClosedJaxpr, starts: Sequence[int]) -> list[Stage]:
    """The stages of a program that is cut at these equations."""
    ends = [*starts[1:], len(closed.jaxpr.eqns)]
    return [_stage(closed, start, end) for start, end in zip(starts, ends, strict=True)]


def run_stages(
    closed: jex_core.ClosedJaxpr, starts: Sequence[int], plan: LayerPlan
) -> Callable[..., list[Any]]:
    """The program as a function, its stages checkpointed as the plan says."""
    jaxpr = closed.jaxpr
    bounds = [*starts, len(jaxpr.eqns)]

    def run(runs: Sequence[Run], at: int, known: dict[Any, Any]) -> int:
        for one in runs:
            for _ in range(one.count):
                after = at + one.layers_per_iteration
                stage = _stage(closed, bounds[at], bounds[after])
                if one.group:
                    inner = _group(stage, one, at)
                    function = checkpoint(inner, one.policy, in_loop=False)
                else:
                    function = checkpointed_stage(stage, one.policy)
                results = function(*(known[read] for read in stage.reads))
                known.update(zip(stage.makes, results, strict=True))
                at = after
        return at

    def _group(stage: Stage, one: Run, at: int):
        def group(*values):
            known = dict(zip(stage.reads, values, strict=True))
            run(one.group, at, known)
            return [known[made] for made in stage.makes]

        return group

    def whole(*arguments):
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))
        run(plan.runs, 0, known)
        return [
            result.val if isinstance(result, jex_core.Literal) else known[result]
            for result in jaxpr.outvars
        ]

    return whole


def checkpointed_stage(stage: Stage, policy: Policy) -> Callable[..., list[Any]]:
    """A stage under a policy; that of a scan is its body's."""
    if stage.loop is None or policy == NONE:
        return checkpoint(jex_core.jaxpr_as_fun(stage.closed()), policy, in_loop=False)
    equation = stage.loop
    params = equation.params
    constants, carried = compat.scan_counts(equation)
    in_loop = params["length"] // params["unroll"] > 1  # else XLA has no loop
    body = checkpoint(loop_body(equation), policy, in_loop=in_loop)

    def run(*values):
        known = dict(zip(stage.reads, values, strict=True))
        operands = [
            one.val if isinstance(one, jex_core.Literal) else known[one]
            for one in equation.invars
        ]
        fixed, start = operands[:constants], operands[constants : constants + carried]

        def step(carry, xs):
            results = body(*fixed, *carry, *xs)
            return list(results[:carried]), list(results[carried:])

        carry, ys = lax.scan(
            step,
            start,
            operands[constants + carried :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        results = dict(zip(equation.outvars, [*carry, *ys], strict=True))
        return [results[made] for made in stage.makes]

    return run


def loop_body(equation: Any) -> Callable[..., list[Any]]:
    """One iteration of a scan: constants, carry and xs in, carry and ys out."""
    body = equation.params["jaxpr"]
    if not isinstance(body, jex_core.ClosedJaxpr):
        body = jex_core.ClosedJaxpr(body, ())
    return jex_core.jaxpr_as_fun(body)


def _stage(closed: jex_core.ClosedJaxpr, start: int, end: int) -> Stage:
    jaxpr = closed.jaxpr
    equations = tuple(jaxpr.eqns[start:end])
    made = dict.fromkeys(_made(equations))
    reads = dict.fromkeys(
        operand
        for equation in equations
        for operand in variables(equation.invars)
        if operand not in made
    )
    later = set(variables(jaxpr.outvars))
    for equation in jaxpr.eqns[end:]:
        later.update(variables(equation.invars))
    before = _made(jaxpr.eqns[:start])
    alive = [one for one in (*before, *made) if one in later]
    return Stage(
        equations=equations,
        reads=tuple(reads),
        makes=tuple(one for one in made if one in later),
        crossing=sum(aval_bytes(one.aval) for one in alive),
    )


def _made(equations: Sequence[Any]) -> Iterator[Any]:
    return (one for equation in equations for one in variables(equation.outvars))


def _crossing(closed: jex_core.ClosedJaxpr) -> list[int]:
    """Bytes alive behind every equation, the program's inputs not counted."""
    last: dict[Any, int] = {}
    jaxpr = closed.jaxpr
    for index, equation in enumerate(jaxpr.eqns):
        for operand in variables(equation.invars):
            last[operand] = index
    for result in variables(jaxpr.outvars):
        last[result] = len(jaxpr.eqns)
    alive, found = 0, []
    ending: dict[int, int] = {}
    for index, equation in enumerate(jaxpr.eqns):
        for result in variables(equation.outvars):
            if last.get(result, index) > index:
                alive += aval_bytes(result.aval)
                end = last[result]
                ending[end] = ending.get(end, 0) + aval_bytes(result.aval)
        alive -= ending.pop(index, 0)
        found.append(alive)
    return found
