"""``ops.linear`` against ``F.linear``: the down and up projections at a few rows, and the LM head at 16.

Also with int8 weights, and at 16 rows with some formats of files, where kernels read them, against ``F.linear`` with
weights of the dtype.
"""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops
from dflash.decoder import split_weights

PACKED = {"cpu": ("q4_0", "q4_k", "q6_k", "q8_0"), "cuda": ("w4a16g128", "w4a16g32", "w4a16g32k", "w8a16g16k")}


def cases(o):
    for name, m in o.models.items():
        for width, out, all_rows in (
            (m.ffn, m.hidden, (1, 16, 26, 40, 64)),
            (m.hidden, m.ffn, (16,)),
            (m.hidden, m.vocab, (16,)),
        ):
            for rows in all_rows:
                yield Case(f"{name} {width}->{out} rows={rows}", *product(o, rows, width, out))
                if o.device.type == "cuda" and o.dtype == torch.float32:
                    continue
                if out != m.vocab:
                    yield Case(f"{name} {width}->{out} rows={rows} int8", *int8_product(o, rows, width, out))
                for form in PACKED[o.device.type] if rows == 16 else ():
                    yield Case(f"{name} {width}->{out} rows={rows} {form}", *packed_product(o, rows, width, out, form))


def product(o, rows, width, out):
    return (
        lambda: (o.random(rows, width), o.random(out, width, scale=width**-0.5)),
        ops.linear,
        {"F.linear": F.linear},
        (out * width + rows * (width + out)) * o.size,
    )


def int8_product(o, rows, width, out):
    def operands():
        x, weight = product(o, rows, width, out)[0]()
        return x, weight, *split_weights(ops.PackedWeight.of(weight, ops.format_of("int8", o.device.type)))

    return (
        operands,
        lambda x, _, packed, *stored: ops.linear(x, *packed, None, False, *stored),
        {"F.linear": lambda x, weight, *_: F.linear(x, weight)},
        out * width + rows * (width + out) * o.size,
    )


def packed_product(o, rows, width, out, form):
    """Multiply by bytes that are all alike: each half-precision number among them is 3.1e-5."""
    size = ops.FORMATS[form].size(width)
    return (
        lambda: (*product(o, rows, width, out)[0](), torch.full((out, size), 2, dtype=torch.uint8, device=o.device)),
        lambda x, _, packed: ops.linear(x, packed, format=form),
        {"F.linear": lambda x, weight, _: F.linear(x, weight)},
        out * size + rows * (width + out) * o.size,
    )


if __name__ == "__main__":
    main(cases)
