"""Environment variables that turn off what may misbehave on a GPU. They are read once, at import; empty is unset.

``DFLASH_OVERLAP=0``: no kernel starts before the one ahead of it on the stream has ended.
``DFLASH_PREFETCH=0``: no kernel reads weights, lengths or older keys before the kernel ahead has ended.
"""

from __future__ import annotations

import os

from .. import _C


def is_on(name: str) -> bool:
    """Return True unless the environment turns ``name`` off; raise ValueError for another value than 0 or 1."""
    value = os.environ.get(name) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}: unset it, or set it to 0 to turn it off")
    return value == "1"


OVERLAP, PREFETCH = is_on("DFLASH_OVERLAP"), is_on("DFLASH_PREFETCH")
_C.set_overlap(OVERLAP)
