"""Bytes, FLOPs and seconds as people write them.

Binary units for bytes, decimal ones for FLOPs.
"""

import re

_LEAST = 1024  # bytes; a smaller budget without a unit is one whose unit is missing
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}


class UnitError(ValueError):
    """A number of bytes that cannot be read. One line."""


def parse_bytes(text: str | int, whole: int | None = None) -> int:
    """Reads ``14GiB``, ``60GB``, ``1000`` or ``80%`` of a whole.

    Args:
      text: a number and a unit; an int is taken as bytes.
      whole: what a percentage is of, in bytes.

    Raises:
      UnitError: anything else, a negative number, or a percentage of nothing known.

    Example:
      >>> parse_bytes("1.5KiB"), parse_bytes("2 GB"), parse_bytes("50%", whole=4096)
      (1536, 2000000000, 2048)
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*|%)\s*", str(text))
    try:
        number, unit = float(match[1]), match[2]  # pyright: ignore[reportOptionalSubscript]
    except (TypeError, ValueError):
        raise UnitError(
            f"{text!r} is no number of bytes, such as 14GiB or 80%"
        ) from None
    if unit == "%":
        if whole is None:
            raise UnitError(f"{text!r} of what? The device's memory is not known")
        return int(whole * number / 100)
    known = {name.lower(): size for name, size in _UNITS.items()}
    if unit.lower() not in known:
        raise UnitError(
            f"unknown unit {unit!r} in {text!r}; known: B, KB, KiB, MB, ..."
        )
    return int(number * known[unit.lower()])


def check_budget(flag: str, text: str) -> None:
    """Refuses a budget that cannot be, before it is known what a percentage is of.

    Raises:
      UnitError: no number of bytes, nothing, a few bytes for want of a unit, or more
        than 100 %.

    Example:
      >>> try:
      ...     check_budget("--memory-budget", "30")
      ... except UnitError as error:
      ...     print(error)
      --memory-budget=30 is in bytes; did you mean 30GiB?
    """
    whole = 10**9
    amount = parse_bytes(text, whole)
    if amount <= 0:
        raise UnitError(f"{flag}={text} is nothing; give bytes, such as 14GiB or 80%")
    if text.strip().isdecimal() and amount < _LEAST:
        raise UnitError(f"{flag}={text} is in bytes; did you mean {text.strip()}GiB?")
    if text.strip().endswith("%") and amount > whole:
        raise UnitError(f"{flag}={text} is more than there is; use 100% at most")


def parse_share(text: str) -> float:
    """Reads ``40%`` or ``0.4``, a share from 0 to 1.

    Raises:
      UnitError: anything else.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UnitError(f"{text!r} is no share, such as 40% or 0.4")
    return share


def format_bytes(value: int | None) -> str:
    """Bytes with a binary unit: ``format_bytes(1536) == '1.50 KiB'``."""
    if value is None:
        return "unknown"
    size, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{value} B" if unit == "B" else f"{size:.2f} {unit}"


def format_flops(value: float) -> str:
    """FLOPs with a decimal unit: ``format_flops(2.5e9) == '2.50 GFLOP'``."""
    size, unit = float(value), ""
    for larger in ("k", "M", "G", "T", "P", "E"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.2f} {unit}FLOP"


def format_milliseconds(seconds: float) -> str:
    """Milliseconds to three digits: ``format_milliseconds(1.2345) == '1234 ms'``."""
    value = 1000 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
