"""``ops.gather_rows_`` of the target's features against ``index_select`` and ``gather``: 16 of 64 rows."""

import torch
from harness import Case, main

from dflash import ops

ROWS, PATH_ROWS = 64, 16


def gather(x, path, out):
    torch.gather(x, 1, path[:, :, None].expand_as(out), out=out)


def index_select(x, path, out):
    torch.index_select(x[0], 0, path[0], out=out[0])


def cases(o):
    for m in o.models.values():
        for batch in (1, 8):
            width = m.taps * m.hidden

            def make(width=width, batch=batch):
                path = torch.arange(0, ROWS, ROWS // PATH_ROWS, device=o.device).repeat(batch, 1)
                return o.random(batch, ROWS, width), path, o.random(batch, PATH_ROWS, width)

            peers = {"gather": gather} | ({"index_select": index_select} if batch == 1 else {})
            moved = batch * PATH_ROWS * (2 * width * o.size + 8)
            yield Case(f"batch={batch} width={width}", make, ops.gather_rows_, peers, moved)


if __name__ == "__main__":
    main(cases)
