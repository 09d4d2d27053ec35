"""Check numbers and token ids that users pass, before any work is done."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping

__all__ = ["callables", "finite", "integer", "integer_from", "is_list", "listed", "real", "string", "token", "tokens"]


def integer(name: str, value: object) -> int:
    """Return ``value`` as an int; raise TypeError unless it is an integer of Python or numpy and not a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def integer_from(low: int, name: str, value: object) -> int:
    """Return ``value`` as an int of at least ``low``."""
    number = integer(name, value)
    if number < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {number}")
    return number


def real(name: str, value: object, wanted: str) -> float:
    """Return ``value`` as a float; ``wanted`` completes "``name`` must be ..." in the error."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    return float(value)


def finite(name: str, value: object) -> float:
    """Return ``value`` as a float that is neither infinite nor NaN."""
    number = real(name, value, "a finite number")
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def penalty(name: str, value: object) -> float:
    """Return ``value`` as a float of at most 1e30, so that a count times it stays finite in float32."""
    number = finite(name, value)
    if abs(number) > 1e30:
        raise ValueError(f"{name} must lie in -1e30 .. 1e30, got {value!r}")
    return number


def string(name: str, value: object) -> str:
    """Return ``value``; raise unless it is a string of Unicode text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be Unicode text: {error.reason} at character {error.start}") from None
    return value


def token(name: str, value: object, vocab_size: int) -> int:
    """Return ``value`` as a token id of the vocabulary."""
    wanted = f"{name} must hold token ids in 0 .. {vocab_size - 1}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(wanted)
    if not 0 <= value < vocab_size:
        raise ValueError(wanted)
    return int(value)


def listed(value: object) -> object:
    """Return tensors, arrays and their scalars as Python values; anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: object) -> bool:
    """Return True for an iterable that is not a string and not a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def tokens(name: str, value: object, vocab_size: int) -> tuple[int, ...]:
    """Return a list of token ids of the vocabulary as a tuple."""
    value = listed(value)
    if not is_list(value):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(token(name, item, vocab_size) for item in value)


def callables(name: str, value: object) -> tuple[Callable, ...]:
    """Return a list of callables as a tuple."""
    if not is_list(value):
        raise TypeError(f"{name} must be a list of callables, got {type(value).__name__}")
    value = tuple(value)
    for item in value:
        if not callable(item):
            raise TypeError(f"{name} must be a list of callables, got {item!r} in it")
    return value
