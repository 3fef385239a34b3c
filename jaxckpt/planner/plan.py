"""The Plan: what the planner answers, as data, to a file and back.

A plan names the values it keeps. Automatic names are only meaningful for the function
that was planned, so a plan also holds each value's shape and dtype, and refuses a
function whose values of those names are others.

No JAX here.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxckpt.layers import LayerPlan, layer_plan
from jaxckpt.policies import Policy, PolicyError
from jaxckpt.units import format_bytes

VERSION = 1


class PlanFileError(ValueError):
    """A file that is no plan, or a plan for something else. One line."""


@dataclass(frozen=True)
class Plan:
    """What to keep where, what it costs, and what was promised.

    Attributes:
      layer_plan: text in the policy language.
      num_layers: how many layers it plans; 1 for a function.
      budget_bytes: device bytes that the compiled peak is within.
      target, mesh: what it was compiled for.
      model: preset or function that was planned.
      batch_size, sequence_length: of the step; None for a function.
      predicted: the model's ``device_total_bytes`` before the last compile, and its
        ``recompute_flops`` and ``recompute_seconds`` (estimated).
      compiled: the compiled step, a row as in a report.
      recompute_fraction: recomputed FLOPs over all others, counted.
      lower_bound: ``recompute_seconds`` (estimated) that no plan within the budget
        goes below.
      solver: ``status``, the largest relative ``gap`` left, ``seconds``.
      compiles: how many candidates were compiled.
      values: the values that the plan keeps: ``name, shape, dtype, nbytes, source``.
      starts: of a function that was cut into stages: the first equation of each.
      fingerprint: of that function's program; another one is refused.
      version: of this format.
      microbatches, repeats: of a pipeline, where ``num_layers`` are those of a chunk of
        it; None without one.

    Use it wherever a policy is taken: ``remat(fn, plan)``, ``stack(block, plan, 32)``,
    ``train --plan=plan.json``, ``report --policies plan.json``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxckpt import plan
      >>> def loss(x, w):
      ...     return jnp.tanh(jnp.tanh(x @ w) @ w).sum()
      >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
      >>> made = plan(loss, x, w, budget="1MiB", target="cpu")
      >>> made.recompute_fraction, made.solver["status"]
      (0.0, 'optimal')
      >>> made.compiled["device_total_bytes"] <= made.budget_bytes == 2**20
      True
      >>> print(made)
      2xnone on cpu: 668 B of 1.00 MiB (compiled), 0.00% recomputed (counted)
    """

    layer_plan: str
    num_layers: int
    budget_bytes: int
    target: str
    mesh: str
    model: str
    batch_size: int | None
    sequence_length: int | None
    predicted: dict[str, Any]
    compiled: dict[str, Any]
    recompute_fraction: float
    lower_bound: dict[str, float]
    solver: dict[str, Any]
    compiles: int
    values: tuple[dict[str, Any], ...] = ()
    starts: tuple[int, ...] = ()
    fingerprint: str = ""
    version: int = VERSION
    microbatches: int | None = None
    repeats: int | None = None

    def __str__(self) -> str:
        """The plan in a line: what is kept where, and what that takes and costs."""
        total = format_bytes(self.compiled["device_total_bytes"])
        return (
            f"{self.layer_plan} on {self.target}: {total} of "
            f"{format_bytes(self.budget_bytes)} (compiled), "
            f"{self.recompute_fraction:.2%} recomputed (counted)"
        )

    @property
    def layers(self) -> LayerPlan:
        """The layer plan as an object."""
        return layer_plan(self.layer_plan, self.num_layers)

    @property
    def policy(self) -> Policy:
        """The policy of every layer, where there is one alone.

        Raises:
          PolicyError: the layers differ.
        """
        policies = self.layers.policies()
        if len(policies) != 1 or any(run.group for run in self.layers.runs):
            raise PolicyError(
                f"{self.layer_plan} gives layers different policies; use "
                "jaxckpt.stack, which runs them all"
            )
        return policies[0]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        data = dataclasses.asdict(self)
        Path(path).write_text(json.dumps(data, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan that `save` wrote.

        Raises:
          PlanFileError: no file, no plan, another version, or a broken field.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is no text"
            raise PlanFileError(f"{path}: {reason}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanFileError(f"{path} is no JSON: {error}") from error
        return cls.from_json(data, str(path))

    @classmethod
    def from_json(cls, data: Any, origin: str = "plan") -> "Plan":
        """Checks and reads the JSON data of a plan."""
        if not isinstance(data, dict) or "layer_plan" not in data:
            raise PlanFileError(f"{origin} is no plan: it has no layer_plan")
        if data.get("version") is True or data.get("version") != VERSION:
            raise PlanFileError(
                f"{origin} is of version {data.get('version')} and this jaxckpt reads "
                f"{VERSION}; plan again"
            )
        fields = {field.name: field for field in dataclasses.fields(cls)}
        missing = sorted(set(fields) - set(data))
        if missing:
            raise PlanFileError(f"{origin} is no plan: it has no {missing[0]}")
        unknown = sorted(set(data) - set(fields))
        if unknown:
            raise PlanFileError(f"{origin} has a field {unknown[0]!r} that no plan has")
        for name, is_valid in _VALID.items():
            if not is_valid(data[name]):
                raise PlanFileError(f"{origin}: {name} is {data[name]!r}")
        lists = {name: tuple(data[name]) for name in ("values", "starts")}
        plan = cls(**{**data, **lists})
        try:
            layers = plan.layers
        except PolicyError as error:
            raise PlanFileError(f"{origin}: {error}") from error
        if plan.starts and len(plan.starts) != layers.num_layers:
            raise PlanFileError(f"{origin}: starts is {data['starts']!r}")
        return plan

    def check_values(self, found: Iterable[Any]) -> None:
        """Refuses a function whose values of the plan's names are others.

        Args:
          found: objects with ``name``, ``shape`` and ``dtype``.

        Raises:
          PolicyError: naming the value, as planned and as found.
        """
        have: dict[str, set[tuple[tuple[int, ...], str]]] = {}
        for value in found:
            key = (tuple(value.shape), str(value.dtype))
            have.setdefault(value.name, set()).add(key)
        for value in self.values:
            planned = (tuple(value["shape"]), value["dtype"])
            name = value["name"]
            if name in have and planned not in have[name]:
                shape, dtype = min(have[name])
                raise PolicyError(
                    f"the plan keeps {name}, {planned[1]}{list(planned[0])}, and here "
                    f"that is {dtype}{list(shape)}: it was made for another function "
                    "or other sizes; plan again"
                )


def _is_count(number: Any, least: int = 0) -> bool:
    return type(number) is int and number >= least


def _is_number(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool)


def _are_values(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("dtype"), str)
        and isinstance(value.get("shape"), list)
        for value in values
    )


def _are_starts(starts: Any) -> bool:
    return isinstance(starts, list) and (
        not starts
        or (
            all(map(_is_count, starts))
            and starts[0] == 0
            and starts == sorted(set(starts))
        )
    )


_VALID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("layer_plan", "target", "mesh", "model", "fingerprint"),
        lambda value: isinstance(value, str),
    ),
    **dict.fromkeys(
        ("predicted", "compiled", "lower_bound", "solver"),
        lambda value: isinstance(value, dict),
    ),
    **dict.fromkeys(("budget_bytes", "compiles"), _is_count),
    "num_layers": lambda value: _is_count(value, 1),
    **dict.fromkeys(
        ("batch_size", "sequence_length"),
        lambda value: value is None or _is_count(value, 1),
    ),
    "recompute_fraction": _is_number,
    "values": _are_values,
    "starts": _are_starts,
}
