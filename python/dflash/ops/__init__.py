"""The ops of the engine, registered in the ``dflash`` library of torch (``torch.ops.dflash.*``).

``torch.compile`` sees every op whole. On CPU an op runs the C++ kernel of the ``_C`` extension (float32 and bfloat16
storage, fp32 accumulation). On CUDA it runs its kernel where one exists (float16 too) and otherwise its plain-torch
twin in `dflash.ops.reference`.

Ops that end in an underscore write into their arguments and return nothing. None of them records gradients.
"""

from .attention import append_context_kv_, append_kv_, block_attention, compact_kv_, gather_rows_, qkv_norm_rope_append_
from .contract import bytes_reached
from .layers import PackedLayers, decoder_layers
from .linear import experts, linear, linears, sigmoid_mul, silu_mul, skinny, swiglu
from .norm import add_rms_norm, conv_add_rms_norm, draft_rows, dynamic_conv, fuse_features, rms_norm
from .recurrent import L2_EPS, causal_conv_, delta_net_inputs, gated_recurrence_, gated_rms_norm
from .registry import cuda_status, has_cuda_kernels, isa
from .switches import OVERLAP, PREFETCH, overlaps
from .tree import MAX_TREE_ROWS, ROW_STATES, accept_path_, accept_prefix_, build_tree, tree_candidates
from .vocab import MAX_CANDIDATES, select_tokens, top_candidates, walk_candidates
from .weights import (
    BlockConv,
    DecoderLayer,
    DeltaNetLayer,
    Int8Weight,
    NotFiniteError,
    Weight,
    WeightStorage,
    int8_layer,
    int8_weights,
    split_weights,
)
