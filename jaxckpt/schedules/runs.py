"""A schedule's tree as the runs of a layer plan, which `jaxckpt.stack` runs."""

from collections.abc import Sequence

from jaxckpt.layers import Run
from jaxckpt.policies import FULL, NONE, Policy
from jaxckpt.schedules.tree import Item, Stage


def runs_of(
    items: Sequence[Item], policies: Sequence[Sequence[Policy]]
) -> tuple[Run, ...]:
    """Turns stages and segments into runs of layers, equal neighbours joined.

    Args:
      items: of a `Schedule`.
      policies: per stage, the policy of each of its options.

    Example:
      >>> from jaxckpt.schedules.tree import Checkpointed
      >>> items = (
      ...     Checkpointed((Stage(0), Stage(1))),
      ...     Checkpointed((Stage(2), Stage(3))),
      ...     Stage(4, 1),
      ...     Stage(5, 1),
      ... )
      >>> print(*runs_of(items, 6 * [[NONE, Policy(save=("hidden",))]]))
      2x2xnone 2xsave:hidden
    """
    runs: list[Run] = []
    for item in items:
        if isinstance(item, Stage):
            run = Run(1, policies[item.index][item.option])
        else:
            inner = runs_of(item.items, policies)
            alone = len(inner) == 1 and inner[0] == Run(1, NONE)
            run = Run(1, FULL if alone else inner)
        if runs and runs[-1].body == run.body:
            runs[-1] = Run(runs[-1].count + 1, run.body)
        else:
            runs.append(run)
    return tuple(runs)
