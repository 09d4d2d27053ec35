"""``ops.fuse_features`` (a GEMM and a norm) against ``F.linear``, ``F.rms_norm``, and ``torch.where`` for dead rows."""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def plain(context, num_context, fc, norm):
    out = F.rms_norm(F.linear(context, fc), norm.shape, norm, 1e-6)
    live = torch.arange(out.shape[1], device=out.device) < num_context[:, None]
    return torch.where(live[..., None], out, 0.0)


def cases(o):
    for name, m in o.models.items():
        rows, width = min(o.rows), m.taps * m.hidden

        def make(m=m, rows=rows, width=width):
            context, fc = o.random(1, rows, width), o.random(m.hidden, width, scale=width**-0.5)
            return context, o.integers(rows), fc, o.random(m.hidden)

        yield Case(
            f"{name} {width}->{m.hidden} rows={rows}",
            make,
            lambda context, num_context, fc, norm: ops.fuse_features(context, num_context, fc, norm, 1e-6),
            {"F.linear, F.rms_norm": plain},
            (m.hidden * width + rows * (width + m.hidden)) * o.size,
        )


if __name__ == "__main__":
    main(cases)
