"""Make text of unknown origin safe to show on a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]

# Control characters (ANSI escapes start with one), line separators, overrides of the reading direction, and
# surrogates, which no encoding of a terminal has.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, keep: str = "") -> str:
    r"""Return ``str(text)`` with the characters that could steer a terminal written as escapes, such as ``\x1b``.

    Applying it twice changes nothing. It does not escape the markup of rich.

    Args:
        text: a name, a message or generated text.
        keep: characters that stay as they are, such as ``"\n\t"`` in a text of several lines.
    """
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
