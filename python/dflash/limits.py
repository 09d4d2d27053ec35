"""The largest sizes accepted in files and in servers' answers. Anything above is refused by name.

Each limit is far above every published model, and low enough that reading up to it takes little memory and time: less
than a second, or some seconds for all headers of a target.
"""

from __future__ import annotations

__all__ = [
    "MAX_ANSWERS",
    "MAX_ANSWER_BYTES",
    "MAX_BLOCK_SIZE",
    "MAX_DRAFT_LAYERS",
    "MAX_EXPERTS",
    "MAX_GRAMMAR_CHARACTERS",
    "MAX_HEADS",
    "MAX_HEAD_DIM",
    "MAX_JSON_BYTES",
    "MAX_JSON_DEPTH",
    "MAX_MASK_EMBEDDING_BYTES",
    "MAX_NGRAM",
    "MAX_NUMBER",
    "MAX_POSITIONS",
    "MAX_RECEIPT_BYTES",
    "MAX_REQUEST_BYTES",
    "MAX_SHARDS",
    "MAX_SHOWN",
    "MAX_STOP_CHARACTERS",
    "MAX_STOP_STRINGS",
    "MAX_TAPS",
    "MAX_TARGET_CONFIG_BYTES",
    "MAX_TARGET_JSON_BYTES",
    "MAX_TARGET_LAYERS",
    "MAX_TARGET_SHARDS",
    "MAX_TOKEN_ID",
    "MAX_VOCABULARY",
    "MAX_WIDTH",
    "MAX_WORD_CELLS",
]

# Levels of brackets in JSON. Python's own reader needs stack for each; tool schemas in chat data have about twenty.
MAX_JSON_DEPTH = 100
# Bytes of a drafter's config.json, of its index and of all its safetensors headers together. Published: 10 KB. Python
# objects take up to thirty times the bytes of the JSON they are read from.
MAX_JSON_BYTES = 2**20
# Bytes of a target's config.json, where lists of quantized experts make megabytes; of its index, and of all its
# safetensors headers together. Published: 20 MB.
MAX_TARGET_CONFIG_BYTES = 2**24
MAX_TARGET_JSON_BYTES = 2**26
# Bytes of a drafter's mask_embedding.pt: MAX_WIDTH values of 8 bytes, and room for what torch adds. Published: 10 KB.
MAX_MASK_EMBEDDING_BYTES = 2**24
# Files of a drafter's weights, and of a target's. Published: 1 and 191.
MAX_SHARDS = 256
MAX_TARGET_SHARDS = 2**12

# The shape of a drafter, with the largest published values.
MAX_DRAFT_LAYERS = 256  # 8
MAX_WIDTH = 2**20  # hidden_size and intermediate_size: 18432
MAX_HEADS = 2**12  # 128
MAX_HEAD_DIM = 2**12  # 512
MAX_VOCABULARY = 2**24  # 262144
MAX_BLOCK_SIZE = 2**12  # 32
MAX_TAPS = 2**10  # 8
MAX_TARGET_LAYERS = 2**10  # 126; one layer of any target costs transformers a millisecond
MAX_EXPERTS = 2**16  # of a target: 16384
# Positions and windows: kernels count them in 64 bits, but rotary angles in float32 mean nothing above.
MAX_POSITIONS = 2**31 - 1
# Scales, epsilons and RoPE settings are at most this and, where they must be positive, at least its inverse: whatever
# is computed from them then stays finite in float32, up to theta * factor * positions.
MAX_NUMBER = 1e12

# Characters of one name or value in an error message.
MAX_SHOWN = 120

# One answer of a server: 128 bytes per token of a context of 131,072. `ServerWriter` may hold 32 of them at a time.
MAX_ANSWER_BYTES = 16 * 2**20
# One request to the server: 128 bytes per token of a context of 32,768, and ids of one of 500,000.
MAX_REQUEST_BYTES = 4 * 2**20
# Ids are stored as int32. Whether the vocabulary has them is checked where its size is known.
MAX_TOKEN_ID = 2**31 - 1

# Bytes of a receipt: ids of a million tokens; and its answers.
MAX_RECEIPT_BYTES = 2**23
MAX_ANSWERS = 2**10
# What a receipt's rules may cost in memory and time: the words of bad_words_ids or logit_bias times the longest of
# them; no_repeat_ngram_size; stop strings, for which transformers looks at every token of the vocabulary; a grammar.
MAX_WORD_CELLS = 2**16
MAX_NGRAM = 2**8
MAX_STOP_STRINGS = 2**6
MAX_STOP_CHARACTERS = 2**10  # of all together
MAX_GRAMMAR_CHARACTERS = 2**18
