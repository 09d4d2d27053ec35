"""Every op as torch sees it: schema, fake tensors and results agree, and a graph holds the op."""

import pytest
import torch
from op_calls import CALLS, copied, packed_for, written

from dflash import ops

pytestmark = pytest.mark.op


NAMES = [name for name in CALLS if not packed_for(name)]  # decoder_layers has its own tests


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.dflash, name).default, (), CALLS[name]())


@pytest.mark.parametrize("name", NAMES)
def test_compiles_into_one_graph(name):
    def step(**call):
        return getattr(ops, name)(**call)

    eager = CALLS[name]()
    compiled = copied(eager)
    want = step(**eager)
    have = torch.compile(step, backend="aot_eager", fullgraph=True)(**compiled)
    pairs = [(have, want), *((compiled[name], eager[name]) for name in written(name))]
    torch.testing.assert_close(*zip(*pairs, strict=True), rtol=0, atol=0, equal_nan=True)
