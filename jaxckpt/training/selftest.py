"""The sections of ``python -m jaxckpt.selftest``, and the run of all their checks."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jaxckpt.checks.check import FAILED, Check, broken
from jaxckpt.checks.environment import memory_kinds, remat3, versions
from jaxckpt.checks.layer_stack import Case, check_plans
from jaxckpt.checks.planned import (
    Say,
    check_memory,
    check_planned,
    check_planned_function,
)
from jaxckpt.checks.sizes import stack_sizes
from jaxckpt.training.model_checks import (
    ModelCase,
    check_flash,
    check_model,
    small_model,
)


@dataclass(frozen=True)
class Suite:
    """What is tried.

    Attributes:
      scanned: plans of a stack of eight layers, in float32.
      unrolled: the same without loops.
      bfloat16: plans of a stack of four layers, in that dtype.
      bfloat16_unrolled: the same without loops.
      sharded: plans of eight layers that are cut over all devices.
      model: policies of the shipped model.
      model_unrolled: the same without loops.
    """

    scanned: tuple[str, ...]
    unrolled: tuple[str, ...]
    bfloat16: tuple[str, ...]
    bfloat16_unrolled: tuple[str, ...]
    sharded: tuple[str, ...]
    model: tuple[str, ...]
    model_unrolled: tuple[str, ...]


SUITE = Suite(
    scanned=(
        "everything_saveable", "full", "dots_saveable",
        "dots_with_no_batch_dims_saveable", "save:hidden", "save:tanh.0",
        "save:layer_input", "offload:hidden", "offload:layer_input",
        "offload:dot_general.0", "save:hidden/offload:layer_input", "sqrt", "every:3",
        "every:3/none", "every:4/save:hidden", "every:4/offload:hidden", "revolve:3",
        "2x2x2xsave:hidden", "2x2x2xoffload:hidden", "2x(3xoffload:hidden+1xnone)",
        "3xnone+5xfull", "4xsave:hidden+4xoffload:hidden",
    ),
    unrolled=(
        "full", "dots_saveable", "save:tanh.0", "save:hidden", "offload:hidden",
        "every:3/none", "revolve:3", "2x2x2xoffload:hidden", "3xnone+5xfull",
    ),
    bfloat16=("full", "dots_saveable", "offload:hidden", "every:2", "1xnone+3xfull"),
    bfloat16_unrolled=("full", "save:hidden"),
    sharded=(
        "full", "dots_saveable", "save:hidden", "offload:hidden", "every:3/none",
        "revolve:3", "2x2x2xoffload:hidden", "3xnone+5xfull",
    ),
    model=(
        "full", "save:context,out_proj", "deepspeed:cpu",
        "save:context/offload:mlpwi_0", "every:2/save:context",
    ),
    model_unrolled=("full",),
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Checks that belong together; `checks` is told how to say what is being done."""

    title: str
    checks: Callable[[Say], Iterator[Check]]


def sections(devices: Sequence[Any], suite: Suite | None = None) -> list[Section]:
    """The self-test of attached devices.

    Args:
      devices: all of this process, alike. Most checks run on the first.
      suite: what is tried; `SUITE` when left out.
    """
    suite = suite or SUITE
    one, count = devices[:1], len(devices)
    platform = one[0].platform
    large = Case(stack_sizes(platform), one)

    def bfloat16(say: Say) -> Iterator[Check]:
        case = Case(stack_sizes(platform, layers=4), one, dtype="bfloat16")
        yield from check_plans(case, suite.bfloat16)
        yield from check_plans(case, suite.bfloat16_unrolled, scan=False)

    def model(devices: Sequence[Any], policies: Sequence[str], scan: bool):
        architecture = small_model(platform, len(devices), scan=scan)
        return check_model(ModelCase(devices, architecture), policies)

    found = [
        Section("memory", lambda say: check_memory(large)),
        Section(
            "gradients, float32, a loop over layers",
            lambda say: check_plans(large, suite.scanned),
        ),
        Section(
            "gradients, float32, layers unrolled",
            lambda say: check_plans(large, suite.unrolled, scan=False),
        ),
        Section("gradients, bfloat16", bfloat16),
        Section(
            "plans of the planner",
            lambda say: chain(
                check_planned(large, say),
                check_planned_function(Case(stack_sizes(platform, layers=4), one), say),
            ),
        ),
        Section(
            "gradients of the shipped model",
            lambda say: chain(
                model(one, suite.model, True), model(one, suite.model_unrolled, False)
            ),
        ),
        Section("attention", lambda say: check_flash(one[0])),
    ]
    if count > 1:
        cut = Case(stack_sizes(platform, count), devices)
        found += [
            Section(
                f"gradients, float32, cut over {count} devices",
                lambda say: check_plans(cut, suite.sharded),
            ),
            Section(
                f"gradients of the shipped model, cut over {count} devices",
                lambda say: model(devices, suite.model[:3], True),
            ),
        ]
    return found


def facts(devices: Sequence[Any]) -> dict[str, Any]:
    """What is installed and attached, JSON data."""
    first = devices[0]
    return {
        "versions": versions(),
        "platform": first.platform,
        "device": first.device_kind,
        "num_devices": len(devices),
        "compute_capability": getattr(first, "compute_capability", None),
        "memory_kinds": memory_kinds(first),
        "jax_remat3": remat3(),
    }


def run(
    sections: Sequence[Section],
    begin: Callable[[Section], None],
    show: Callable[[Check], None],
    say: Say,
) -> dict[str, Any]:
    """Runs all checks; one that breaks is a failed one, and the others go on.

    Args:
      sections: in order.
      begin: told of each section before its checks.
      show: given each check as it is done.
      say: told of what takes long.

    Returns:
      ``passed, counts, seconds, checks``, JSON data.
    """
    start, rows = time.monotonic(), []
    for section in sections:
        begin(section)
        for check, seconds in _timed(section, say):
            show(check)
            row = {"section": section.title, **check.as_dict(), "seconds": seconds}
            rows.append(row)
    counts = dict(Counter(row["verdict"] for row in rows))
    return {
        "passed": FAILED not in counts,
        "counts": counts,
        "seconds": round(time.monotonic() - start, 1),
        "checks": rows,
    }


def _timed(section: Section, say: Say) -> Iterator[tuple[Check, float]]:
    clock = time.monotonic()
    try:
        for check in section.checks(say):
            yield check, round(time.monotonic() - clock, 2)
            clock = time.monotonic()
    except Exception as error:
        check = broken(section.title, "ran", error)
        yield check, round(time.monotonic() - clock, 2)
