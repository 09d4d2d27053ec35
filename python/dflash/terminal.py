"""Make text of unknown origin safe and short enough to show on a terminal."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection
from itertools import islice
from typing import Any

MAX_SHOWN = 120  # characters of one name in a message
# Control characters (ANSI escapes start with one), line separators, overrides of the reading direction, and
# surrogates, which no encoding of a terminal has.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LISTED = 8
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 8


def printable(text: object, keep: str = "") -> str:
    r"""Return ``str(text)`` with the characters that could steer a terminal written as escapes, such as ``\x1b``.

    Applying it twice changes nothing. It does not escape the markup of rich. ``keep`` names characters that stay as
    they are, such as ``"\n\t"`` in a text of several lines.
    """
    escape = lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode("ascii")  # noqa: E731
    return _UNSAFE.sub(escape, str(text))


def shortened(value: Any) -> str:
    """Return ``repr(value)``, printable and cut to 60 characters, for a value of any size and depth."""
    try:
        text = printable(_SHORT.repr(value))
    except Exception:  # a repr of someone else's, or an integer that Python refuses to print
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def named(name: object) -> str:
    """Return a name without quotes, printable and cut to a line."""
    text = printable(name)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def listed(names: Collection[object]) -> str:
    """Return the first few of ``names``, as by `named`, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(named, islice(names, _LISTED))) + more
