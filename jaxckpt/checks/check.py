"""One check: what was compared, the number it gave, and what that means."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

Verdict = Literal["ok", "FAILED", "unknown", "not applicable"]
OK, FAILED, UNKNOWN, NOT_APPLICABLE = "ok", "FAILED", "unknown", "not applicable"

_TOLD = 200  # characters of a failure that are told
_MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}  # bits behind the first

Result = TypeVar("Result")


@dataclass(frozen=True)
class Check:
    """A line of the self-test.

    Attributes:
      name: of what was looked at, such as a policy.
      compared: what with what.
      found: the number, with its unit and what is allowed; "" where there is none.
      verdict: what it means.
      reason: why it failed otherwise, is unknown or does not apply.
      figures: for the file, JSON data.
    """

    name: str
    compared: str
    found: str
    verdict: Verdict
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [self.compared, self.found, self.reason]
        return f"{self.verdict:<8} {self.name}: {': '.join(filter(None, parts))}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def judged(holds: bool | None) -> Verdict:
    """None: the backend does not say."""
    if holds is None:
        return UNKNOWN
    return OK if holds else FAILED


def broken(name: str, compared: str, error: BaseException) -> Check:
    """A check that ended in an error, told in its first line."""
    return Check(name, compared, "", FAILED, failure(error))


def failure(error: BaseException) -> str:
    """An error in one line, with its type unless it is one of ours."""
    told = (str(error).strip().splitlines() or [""])[0][:_TOLD]
    ours = type(error).__module__.startswith("jaxckpt")
    return told if ours else f"{type(error).__name__}: {told}"


def largest_difference(got: Any, want: Any) -> float:
    """Of two pytrees' entries, relative to the largest entry of each array.

    Returns:
      A share; infinite where one is no number, as memory that was read too early.

    Example:
      >>> got, want = {"a": np.array([2.0, 4.0])}, {"a": np.array([2.0, 5.0])}
      >>> largest_difference(got, want)
      0.2
    """
    return max((one / scale for one, scale in _differences(got, want)), default=0.0)


def largest_ulps(got: Any, want: Any, dtype: str) -> float:
    """The same in units in the last place of each array's largest entry.

    Args:
      got, want: pytrees of arrays.
      dtype: whose units: "float32", "bfloat16" or "float16".

    Example:
      >>> got, want = {"a": np.array([2.0, 4.0])}, {"a": np.array([2.0, 5.0])}
      >>> largest_ulps(got, want, "bfloat16")  # between 4 and 8 one is 4 / 128
      32.0
    """
    bits = _MANTISSA[dtype]
    return max(
        (
            one / 2.0 ** (math.floor(math.log2(scale)) - bits)
            for one, scale in _differences(got, want)
        ),
        default=0.0,
    )


def _differences(got: Any, want: Any) -> Iterator[tuple[float, float]]:
    """Of each array: the largest difference, and the largest entry that is wanted."""
    import jax

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for left, right in pairs:
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        scale = max(np.abs(right).max(initial=0), np.finfo(np.float32).tiny)
        difference = float(np.abs(left - right).max(initial=0))
        yield (difference if np.isfinite(difference) else float("inf")), float(scale)


def in_turn(
    jobs: Iterable[Callable[[], Result]],
) -> Iterator[Callable[[], Result]]:
    """Runs jobs side by side, one per core, as compiling takes one; in their order.

    Yields:
      For each job a function that waits for it, and gives its result or its error.
    """
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        for future in [pool.submit(job) for job in jobs]:
            yield future.result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
