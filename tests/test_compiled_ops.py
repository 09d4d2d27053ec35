"""Every op stands in a compiled graph: it breaks none, and what it returns and writes has the same bits."""

import pytest
import torch
from op_calls import CALLS, as_list, assert_same, copied, packed_for, written

from dflash import ops

pytestmark = pytest.mark.op


@pytest.mark.parametrize("name", [name for name in CALLS if not packed_for(name)])
def test_compiles_into_one_graph(name):
    torch.compiler.reset()
    op, eager = getattr(ops, name), CALLS[name]()
    compiled = copied(eager)
    returned = op(**eager), torch.compile(lambda **call: op(**call), backend="aot_eager", fullgraph=True)(**compiled)
    want, have = (
        as_list(out) + [tensor for argument in written(name) for tensor in as_list(call[argument])]
        for out, call in zip(returned, (eager, compiled), strict=True)
    )
    assert_same(have, want, 0, 0)
