"""The largest sizes accepted in configs and servers' answers. Anything above is refused by name."""

from __future__ import annotations

# Of a target's config: one layer of any target costs transformers a millisecond. The largest published: 126, 16384.
MAX_TARGET_LAYERS = 2**10
MAX_EXPERTS = 2**16
MAX_POSITIONS = 2**31 - 1

MAX_VOCABULARY = 2**24
# One answer of a server: 128 bytes per token of a context of 131,072. `ServerWriter` may hold 32 of them at a time.
MAX_ANSWER_BYTES = 16 * 2**20
# Ids are stored as int32. Whether the vocabulary has them is checked where its size is known.
MAX_TOKEN_ID = 2**31 - 1
