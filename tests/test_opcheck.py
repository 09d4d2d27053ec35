"""Every op as torch sees it: schema, fake tensors and results agree, and a graph holds the op."""

import pytest
import torch
from op_calls import CALLS, copied, op_of, packed_for, written

from dflash import ops

pytestmark = pytest.mark.op


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    layers = packed_for(name)
    call = CALLS[name]() | ({"layers": layers.handle} if layers else {})
    torch.library.opcheck(getattr(torch.ops.dflash, op_of(name)).default, (), call)


@pytest.mark.parametrize("name", [name for name in CALLS if not packed_for(name)])
def test_compiles_into_one_graph(name):
    def step(**call):
        return getattr(ops, op_of(name))(**call)

    eager = CALLS[name]()
    compiled = copied(eager)
    want = step(**eager)
    have = torch.compile(step, backend="aot_eager", fullgraph=True)(**compiled)
    pairs = [(have, want), *((compiled[name], eager[name]) for name in written(name))]
    torch.testing.assert_close(*zip(*pairs, strict=True), rtol=0, atol=0, equal_nan=True)
