"""The largest sizes accepted in receipts, requests and servers' answers. Anything above is refused by name."""

from __future__ import annotations

# Of a target's config: one layer of any target costs transformers a millisecond. The largest published: 126, 16384.
MAX_TARGET_LAYERS = 2**10
MAX_EXPERTS = 2**16
MAX_POSITIONS = 2**31 - 1

MAX_VOCABULARY = 2**24
MAX_BLOCK_SIZE = 2**12
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
