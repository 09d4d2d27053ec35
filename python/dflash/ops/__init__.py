"""The ops of the engine, registered in the ``dflash`` library of torch (``torch.ops.dflash.*``).

``torch.compile`` sees every op whole. On CPU an op runs the C++ kernel of the ``_C`` extension (float32 and bfloat16
storage, fp32 accumulation). On CUDA it runs its kernel where one exists (float16 too) and otherwise its plain-torch
twin in `dflash.ops.reference`.

Ops that end in an underscore write into their arguments and return nothing. None of them records gradients.
"""

# The CPU kernels' instruction set, such as avx512 (DFLASH_ISA names another); and whether kernels on a CUDA device may
# start before the one ahead has ended, as on sm_90 and newer.
from .._C import __file__ as EXTENSION
from .._C import isa, overlaps, set_overlap
from .._C import with_cuda as has_cuda_kernels  # this build holds CUDA kernels at all
from ..settings import WeightStorage
from . import attention, layers, linear, norm, recurrent, switches, tree, vocab
from .contract import bytes_reached
from .formats import BLOCKS, FORMATS, NotFiniteError, PackedWeight, Weight, format_of
from .layers import PackedLayers
from .recurrent import L2_EPS
from .registry import OPS, cuda_status, kernels_off, skinny, turn_off, use_threads
from .switches import OVERLAP, PREFETCH
from .tree import MAX_TREE_ROWS, ROW_STATES
from .vocab import MAX_CANDIDATES
from .weights import (
    BlockConv,
    DecoderLayer,
    DeltaNetLayer,
    packed_layer,
    separate_packed,
)

globals().update(OPS)  # every function under @op is a name of this package
for name in switches.unwanted_kernels():
    turn_off(name, "DFLASH_KERNELS turns it off" if name != "all" else "DFLASH_KERNELS=0 turns them off")
