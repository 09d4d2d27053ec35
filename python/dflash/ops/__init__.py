"""The ops of the engine, registered in the ``dflash`` library of torch (``torch.ops.dflash.*``).

``torch.compile`` sees every op whole. On CPU an op runs the C++ kernel of the ``_C`` extension (float32 and bfloat16
storage, fp32 accumulation). On CUDA it runs its kernel where one exists (float16 too) and otherwise its plain-torch
twin in `dflash.ops.reference`.

Ops that end in an underscore write into their arguments and return nothing. None of them records gradients.
"""

from .attention import block_attention
from .candidates import MAX_CANDIDATES as MAX_CANDIDATES
from .candidates import top_candidates, walk_candidates
from .checks import bytes_reached as bytes_reached
from .choose import ROW_STATES as ROW_STATES
from .choose import accept_prefix_, select_tokens
from .delta_net import L2_EPS as L2_EPS
from .delta_net import delta_net_inputs, gated_rms_norm
from .draft_rows import draft_rows
from .dynamic_conv import conv_add_rms_norm, dynamic_conv
from .experts import experts
from .gates import sigmoid_mul, silu_mul, swiglu
from .int8 import Int8Weight as Int8Weight
from .int8 import NotFiniteError as NotFiniteError
from .int8 import Weight as Weight
from .int8 import WeightStorage as WeightStorage
from .int8 import split_weights as split_weights
from .kv_cache import append_context_kv_, append_kv_, qkv_norm_rope_append_
from .layers import PackedLayers as PackedLayers
from .layers import decoder_layers
from .linear import linear, linears
from .linear import skinny as skinny
from .norm import add_rms_norm, fuse_features, rms_norm
from .recurrent import causal_conv_, gated_recurrence_
from .registry import cuda_status, has_cuda_kernels, isa
from .switches import OVERLAP as OVERLAP
from .switches import PREFETCH as PREFETCH
from .switches import overlaps
from .tree import MAX_TREE_ROWS as MAX_TREE_ROWS
from .tree import build_tree, tree_candidates
from .tree_commit import accept_path_, compact_kv_, gather_rows_
from .weights import BlockConv as BlockConv
from .weights import DecoderLayer as DecoderLayer
from .weights import DeltaNetLayer as DeltaNetLayer
from .weights import int8_layer as int8_layer
from .weights import int8_weights as int8_weights

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
