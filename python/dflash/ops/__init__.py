"""The ops of the engine, registered in the ``dflash`` library of torch (``torch.ops.dflash.*``).

``torch.compile`` sees every op whole. On CPU an op runs the C++ kernel of the ``_C`` extension (float32 and bfloat16
storage, fp32 accumulation). On CUDA it runs its kernel where one exists (float16 too) and otherwise its plain-torch
twin in `dflash.ops.reference`.

Ops that end in an underscore write into their arguments and return nothing. None of them records gradients.
"""

from .attention import append_context_kv_, append_kv_, block_attention, compact_kv_, gather_rows_, qkv_norm_rope_append_
from .contract import bytes_reached as bytes_reached
from .layers import PackedLayers as PackedLayers
from .layers import decoder_layers
from .linear import experts, linear, linears, sigmoid_mul, silu_mul, swiglu
from .linear import skinny as skinny
from .norm import add_rms_norm, conv_add_rms_norm, draft_rows, dynamic_conv, fuse_features, rms_norm
from .recurrent import L2_EPS as L2_EPS
from .recurrent import causal_conv_, delta_net_inputs, gated_recurrence_, gated_rms_norm
from .registry import cuda_status, has_cuda_kernels, isa
from .switches import OVERLAP as OVERLAP
from .switches import PREFETCH as PREFETCH
from .switches import overlaps
from .tree import MAX_TREE_ROWS as MAX_TREE_ROWS
from .tree import ROW_STATES as ROW_STATES
from .tree import accept_path_, accept_prefix_, build_tree, tree_candidates
from .vocab import MAX_CANDIDATES as MAX_CANDIDATES
from .vocab import select_tokens, top_candidates, walk_candidates
from .weights import BlockConv as BlockConv
from .weights import DecoderLayer as DecoderLayer
from .weights import DeltaNetLayer as DeltaNetLayer
from .weights import Int8Weight as Int8Weight
from .weights import NotFiniteError as NotFiniteError
from .weights import Weight as Weight
from .weights import WeightStorage as WeightStorage
from .weights import int8_layer as int8_layer
from .weights import int8_weights as int8_weights
from .weights import split_weights as split_weights

__all__ = [
    "accept_path_",
    "accept_prefix_",
    "add_rms_norm",
    "append_context_kv_",
    "append_kv_",
    "block_attention",
    "build_tree",
    "causal_conv_",
    "compact_kv_",
    "conv_add_rms_norm",
    "cuda_status",
    "decoder_layers",
    "delta_net_inputs",
    "draft_rows",
    "dynamic_conv",
    "experts",
    "fuse_features",
    "gated_recurrence_",
    "gated_rms_norm",
    "gather_rows_",
    "has_cuda_kernels",
    "isa",
    "linear",
    "linears",
    "overlaps",
    "qkv_norm_rope_append_",
    "rms_norm",
    "select_tokens",
    "sigmoid_mul",
    "silu_mul",
    "swiglu",
    "top_candidates",
    "tree_candidates",
    "walk_candidates",
]
