"""Arguments that are not traced: JAX's ``static_argnums`` and ``static_argnames``.

`jaxckpt.remat` needs neither for flags, text and numbers, since whatever is not an
array is closed over. They are for arrays that the function must know when it is traced.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def hide_static(
    fn: Callable[..., Any],
    argnums: int | Sequence[int],
    argnames: str | Iterable[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, the static ones as leaves that are no arrays.

    Args:
      fn: what is called.
      argnums: positions of arguments, from the end if negative.
      argnames: names of arguments, by keyword or by position.
      args: the positional arguments.
      kwargs: the others.

    Raises:
      ValueError: a position that the call does not have.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    names = {argnames} if isinstance(argnames, str) else set(argnames)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"static_argnums={number}: of {len(args)} positional arguments"
            )
    hidden = {number % len(args) for number in numbers}
    if names:
        parameters = inspect.signature(fn).parameters
        hidden |= {i for i, name in enumerate(parameters) if name in names}
    return (
        tuple(_Hidden(arg) if i in hidden else arg for i, arg in enumerate(args)),
        {k: _Hidden(arg) if k in names else arg for k, arg in kwargs.items()},
    )


def show_static(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes the arguments of `hide_static` and gives ``fn`` its own."""

    @functools.wraps(fn)
    def shown(*args, **kwargs):
        return fn(*map(_show, args), **{k: _show(arg) for k, arg in kwargs.items()})

    return shown


@dataclass(frozen=True, eq=False)
class _Hidden:
    """A value that no walk of a pytree looks into."""

    value: Any


def _show(argument: Any) -> Any:
    return argument.value if isinstance(argument, _Hidden) else argument
