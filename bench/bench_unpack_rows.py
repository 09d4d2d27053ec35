"""``ops.unpack_rows`` against gathering and unpacking in plain torch: 16 embeddings of a table in Q4_K."""

import torch
from harness import Case, main

from dflash import ops
from dflash.ops import reference

ROWS, VOCAB, FORMAT = 16, 4096, "q4_k"


def cases(o):
    for m in o.models.values():
        columns = max(256, m.hidden // 256 * 256)

        def setup(columns=columns):
            packed = torch.zeros(VOCAB, ops.FORMATS[FORMAT].size(columns), dtype=torch.uint8)
            return packed, torch.arange(ROWS) * 97, columns, FORMAT

        bytes_read = ROWS * (ops.FORMATS[FORMAT].size(columns) + 4 * columns)
        yield Case(f"hidden={columns}", setup, ops.unpack_rows, {"all rows": reference.unpack_rows}, bytes_read)


if __name__ == "__main__":
    main(cases)
