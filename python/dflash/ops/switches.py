"""Environment variables that turn off what may misbehave on a GPU. They are read once, at import; empty is unset.

``DFLASH_OVERLAP=0``: no kernel starts before the one ahead of it on the stream has ended.
``DFLASH_PREFETCH=0``: no kernel reads weights, lengths or older keys before the kernel ahead has ended.
``DFLASH_KERNELS=0``: no CUDA kernel runs, ops are plain torch there; ``-linear,-block_attention``: not these kernels.
``DFLASH_SELF_CHECK``: kernels are compared with plain torch at the first use of a GPU: ``0`` never, ``1`` once per
machine and version (the default), ``always`` in every process.
"""

from __future__ import annotations

import os

from .. import _C


def choice(name: str, *values: str) -> str:
    """Return the environment's ``name``, by default ``"1"``; raise ValueError unless it is one of ``values``."""
    value = os.environ.get(name) or "1"
    if value not in values:
        known = f"{', '.join(values[:-1])} or {values[-1]}"
        raise ValueError(f"{name} must be {known}, got {value!r}: unset it, or set it to 0 to turn it off")
    return value


def is_on(name: str) -> bool:
    """Return True unless the environment turns ``name`` off; raise ValueError for another value than 0 or 1."""
    return choice(name, "0", "1") == "1"


def unwanted_kernels() -> set[str]:
    """Return the kernels that DFLASH_KERNELS names, or ``{"all"}``; raise ValueError for what is no list of names."""
    value = os.environ.get("DFLASH_KERNELS") or "1"
    names = [name.strip() for name in value.split(",")]
    if value in ("0", "1"):
        return {"all"} if value == "0" else set()
    if not all(name[:1] == "-" and name[1:].isidentifier() for name in names):
        raise ValueError(f"DFLASH_KERNELS must be 0, 1 or names such as -linear,-block_attention, got {value!r}")
    return {name[1:] for name in names}


OVERLAP, PREFETCH = is_on("DFLASH_OVERLAP"), is_on("DFLASH_PREFETCH")
SELF_CHECK = choice("DFLASH_SELF_CHECK", "0", "1", "always")
_C.set_overlap(OVERLAP)
