"""The largest sizes accepted in configs. Anything above is refused by name."""

from __future__ import annotations

# Of a target's config: one layer of any target costs transformers a millisecond. The largest published: 126, 16384.
MAX_TARGET_LAYERS = 2**10
MAX_EXPERTS = 2**16
MAX_POSITIONS = 2**31 - 1

MAX_VOCABULARY = 2**24
