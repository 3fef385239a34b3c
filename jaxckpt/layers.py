"""Layer plans: which policy each layer of a stack runs under, and the grouping.

A `LayerPlan` is a tree. A run ``12xdots_saveable`` is twelve layers, each
checkpointed under one policy. A group ``6x4xfull`` is six checkpointed groups of
four layers: only a group's input is kept, and its layers run forward once more
when their turn in the backward pass comes (Chen et al. 2016, arXiv 1604.06174).
A group of several runs takes parentheses, ``2x(3xfull+1xnone)``, and is the only
text of the language that a shell wants quoted.

Depth-free forms, resolved once the number of layers is known:
  a policy       every layer under it
  every:K        groups of K layers, the last one smaller;  ``every:4/save:context``
  revolve:S      nested groups, at most S layer inputs held at once
  sqrt           the K that minimises ceil(L/K) + K: checkpoints plus one live group

No JAX here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxckpt.policies import FULL, NONE, Policy, PolicyError, parse_policy


@dataclass(frozen=True)
class Run:
    """``count`` repetitions of a body: one layer, or a checkpointed group.

    Attributes:
      count: how many times the body runs; the trip count of the scan.
      body: the policy of a single layer, or the runs inside one group.

    Example:
      >>> layers = Run(3, parse_policy("save:context"))
      >>> str(LayerPlan((Run(2, (layers,)), Run(1, NONE))))
      '2x3xsave:context+1xnone'
    """

    count: int
    body: "Policy | tuple[Run, ...]"

    def __post_init__(self):
        if not isinstance(self.count, int) or self.count < 1:
            raise PolicyError(f"a run has at least one layer, not {self.count!r}")
        if not isinstance(self.body, Policy) and not self.body:
            raise PolicyError("a group has at least one run of layers")

    @property
    def group(self) -> "tuple[Run, ...]":
        """The runs inside one group; empty when the body is a single layer."""
        return () if isinstance(self.body, Policy) else self.body

    @property
    def policy(self) -> Policy:
        """What one iteration is checkpointed under; a group keeps its input alone."""
        return self.body if isinstance(self.body, Policy) else FULL

    @property
    def layers_per_iteration(self) -> int:
        return sum(run.num_layers for run in self.group) or 1

    @property
    def num_layers(self) -> int:
        return self.count * self.layers_per_iteration

    def __str__(self) -> str:
        if isinstance(self.body, Policy):
            return f"{self.count}x{self.body}"
        inside = "+".join(map(str, self.body))
        return f"{self.count}x{inside if len(self.body) == 1 else f'({inside})'}"


@dataclass(frozen=True)
class LayerPlan:
    """How a stack of layers runs, first layer first.

    Example:
      >>> plan = layer_plan("12xsave:context+20xfull", num_layers=32)
      >>> str(plan), plan.num_layers
      ('12xsave:context+20xnothing_saveable', 32)
      >>> str(layer_plan("sqrt", num_layers=36))
      '6x6xnothing_saveable'
    """

    runs: tuple[Run, ...]

    def __post_init__(self):
        if not self.runs:
            raise PolicyError("a layer plan has at least one run of layers")

    @property
    def num_layers(self) -> int:
        return sum(run.num_layers for run in self.runs)

    def policies(self) -> tuple[Policy, ...]:
        """The distinct policies of single layers, in order of appearance."""
        return tuple(dict.fromkeys(policy for policy, _, _ in self.leaves()))

    def leaves(self) -> Iterator[tuple[Policy, int, tuple[int, ...]]]:
        """Yields (policy, layers, trip counts of the groups around) per run."""

        def walk(runs: tuple[Run, ...], around: tuple[int, ...]):
            for run in runs:
                if run.group:
                    yield from walk(run.group, (*around, run.count))
                else:
                    yield run.policy, run.count, around

        return walk(self.runs, ())

    def __str__(self) -> str:
        return "+".join(map(str, self.runs))

    def __repr__(self) -> str:
        return f"LayerPlan({str(self)!r})"


@dataclass(frozen=True)
class Grouping:
    """Layers grouped alike at any depth: ``every:4/save:context`` or ``sqrt``.

    Attributes:
      size: layers per checkpointed group, or ``"sqrt"``.
      policy: the policy of each layer inside its group.

    Example:
      >>> layer_plan(Grouping(4, parse_policy("save:context")), num_layers=10)
      LayerPlan('2x4xsave:context+1x2xsave:context')
    """

    size: int | Literal["sqrt"]
    policy: Policy = FULL

    def __post_init__(self):
        if self.size != "sqrt" and (not isinstance(self.size, int) or self.size < 1):
            raise PolicyError(f"every:K groups at least one layer, not {self.size!r}")

    def resolve(self, num_layers: int) -> tuple[Run, ...]:
        size = sqrt_group(num_layers) if self.size == "sqrt" else self.size
        if size > num_layers:
            raise PolicyError(f"{self} groups more than the {num_layers} layers")
        if size == 1 and self.policy != NONE:
            return (Run(num_layers, self.policy),)
        groups, rest = divmod(num_layers, size)
        runs = [Run(groups, (Run(size, self.policy),))]
        if rest == 1 and self.policy != NONE:
            runs.append(Run(1, self.policy))  # a group of one gains nothing
        elif rest:
            runs.append(Run(1, (Run(rest, self.policy),)))
        return tuple(runs)

    def __str__(self) -> str:
        head = "sqrt" if self.size == "sqrt" else f"every:{self.size}"
        return head if self.policy == FULL else f"{head}/{self.policy}"

    def __repr__(self) -> str:
        return f"Grouping({str(self)!r})"


@dataclass(frozen=True)
class Revolve:
    """Layers grouped so that few inputs are held at once: ``revolve:4``.

    Attributes:
      checkpoints: layer inputs held at most, the first layer's among them.
      policy: what a layer keeps when it runs forward for the last time.

    Example:
      >>> print(layer_plan("revolve:3", num_layers=8))
      1x(3xnothing_saveable+1xnone)+...

    Source: Griewank and Walther 2000, algorithm 799: the fewest forward runs.
    """

    checkpoints: int
    policy: Policy = NONE

    def resolve(self, num_layers: int) -> tuple[Run, ...]:
        from jaxckpt.schedules.revolve import revolve_schedule
        from jaxckpt.schedules.runs import runs_of

        schedule = revolve_schedule(num_layers, self.checkpoints)
        return runs_of(schedule.items, num_layers * [[self.policy]])

    def __str__(self) -> str:
        head = f"revolve:{self.checkpoints}"
        return head if self.policy == NONE else f"{head}/{self.policy}"

    def __repr__(self) -> str:
        return f"Revolve({str(self)!r})"


Layers = Policy | Grouping | Revolve | LayerPlan


def sqrt_group(num_layers: int) -> int:
    """The group size K minimising ceil(L/K) + K; the smaller one of a tie.

    That is one checkpoint per group plus one live group, Chen et al. 2016,
    section 4.3. The minimum is 2 sqrt(L) for perfect squares.
    """
    return min(
        range(1, num_layers + 1), key=lambda size: (-(-num_layers // size) + size, size)
    )


def parse_layers(text: str | Layers) -> Layers:
    """Reads any text of the policy language, with or without a number of layers.

    Returns:
      A `Policy`, a `Grouping` or a `LayerPlan`; ``parse_layers(str(x)) == x``.

    Raises:
      PolicyError: one line with the known forms and the nearest match.

    Example:
      >>> parse_layers("every:4/save:context")
      Grouping('every:4/save:context')
      >>> parse_layers("2 x (3xfull + 1xnone) + 1xdots_saveable").num_layers
      9
    """
    if isinstance(text, Layers):
        return text
    if isinstance(planned := getattr(text, "layers", None), LayerPlan):
        return planned  # a Plan, the planner's answer
    if not isinstance(text, str):
        raise PolicyError(f"a policy is text or a Policy, not {text!r}")
    text = text.strip()
    if not text:
        raise PolicyError("an empty policy; 'none' means no checkpointing")
    if re.match(r"-?\d", text):
        return LayerPlan(_parse_runs(text))
    return _parse_grouping(text) or parse_policy(text)


def layer_plan(layers: str | Layers, num_layers: int) -> LayerPlan:
    """Resolves a policy, a grouping or a layer plan for a stack of given depth.

    Args:
      layers: text of the policy language or one of its objects.
      num_layers: depth of the stack, 1 or more.

    Raises:
      PolicyError: the plan is for another depth, or a group exceeds the stack.

    Example:
      >>> layer_plan("every:3", num_layers=7)
      LayerPlan('2x3xnothing_saveable+1xnothing_saveable')
    """
    if not hasattr(num_layers, "__index__"):
        raise PolicyError(f"num_layers is a whole number, not {num_layers!r}")
    if num_layers < 1:
        raise PolicyError(f"a stack has at least one layer, not {num_layers}")
    layers = parse_layers(layers)
    if isinstance(layers, Policy):
        return LayerPlan((Run(num_layers, layers),))
    if isinstance(layers, Grouping | Revolve):
        return LayerPlan(layers.resolve(num_layers))
    if layers.num_layers != num_layers:
        raise PolicyError(
            f"{layers} plans {layers.num_layers} layers and the stack has {num_layers}"
        )
    return layers


def _parse_grouping(text: str) -> Grouping | Revolve | None:
    head, slash, rest = text.partition("/")
    head = head.strip()
    if head == "sqrt":
        size = "sqrt"
    elif head.startswith("revolve:"):
        digits = head.removeprefix("revolve:").strip()
        if not digits.isdecimal() or int(digits) < 1:
            raise PolicyError(
                f"revolve:S needs a whole number of checkpoints, not {digits!r}"
            )
        return Revolve(int(digits), parse_policy(rest) if slash else NONE)
    elif head.startswith("every:"):
        digits = head.removeprefix("every:").strip()
        if not digits.isdecimal() or int(digits) < 1:
            raise PolicyError(f"every:K needs a whole number of layers, not {digits!r}")
        size = int(digits)
    else:
        return None
    return Grouping(size, parse_policy(rest) if slash else FULL)


def _parse_runs(text: str) -> tuple[Run, ...]:
    runs: list[Run] = []
    for part in _split_top_level(text):
        match = re.fullmatch(r"(-?\d+)\s*x\s*(.+)", part.strip(), re.DOTALL)
        if not match:
            raise PolicyError(
                f"{part.strip()!r} is not a run of layers such as 12xdots_saveable"
            )
        count, body = int(match[1]), match[2].strip()
        if count < 1:
            raise PolicyError(f"a run has at least one layer, not {count}")
        if body.startswith("(") and body.endswith(")"):
            runs.append(Run(count, _parse_runs(body[1:-1])))
        elif re.match(r"-?\d", body):
            runs.append(Run(count, _parse_runs(body)))
        elif grouping := _parse_grouping(body):
            runs.extend(grouping.resolve(count))
        else:
            runs.append(Run(count, parse_policy(body)))
    return tuple(runs)


def _split_top_level(text: str) -> Iterator[str]:
    depth = start = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "+" and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth:
        raise PolicyError(f"parentheses do not match in {text!r}")
    yield text[start:]
