"""Tiny models per architecture that llama.cpp converts: sizes, flags, biases, windows, RoPE, experts, tied heads."""

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 0,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
THETA = {"rope_type": "default", "rope_theta": 10000.0}


def rope(**options: Any) -> dict[str, Any]:
    return {"rope_parameters": THETA | options}


def layered(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": THETA | full, "sliding_attention": THETA | sliding}}


BASE = rope(rope_theta=23456.5)
TIED = {"tie_word_embeddings": True}
LINEAR = rope(rope_type="linear", factor=4.0)
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
FAST = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0)
LLAMA3 = rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
OTHER3 = rope(  # of a model that was trained on 64 tokens
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
ONE_KV = {"num_key_value_heads": 1}
WIDE = {"head_dim": 32}
NARROW = {"head_dim": 8}
EPS = {"rms_norm_eps": 3e-3}
SIZES = {"TIED": TIED, "HEADS": HEADS, "ONE_KV": ONE_KV, "BASE": BASE, "EPS": EPS}
SCALED = {"LINEAR": LINEAR, "YARN": YARN, "FAST": FAST}
DIMS = {"WIDE": WIDE, "NARROW": NARROW}
WINDOW = {"sliding_window": 12}
TYPES = ["sliding_attention", "full_attention"]
MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GATED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "head_dim": 16,
}  # fmt: skip
SECTIONS = rope(mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25)
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
MSCALE = rope(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.707, mscale_all_dim=0.707,
    beta_fast=32, beta_slow=1,
)  # fmt: skip
LAYERS6 = {"num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, **TIED}
NORM_EPS = {"layer_norm_eps": 3e-3}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0], "long_factor": [2.0] * 4 + [5.0] * 4}

# By model_type: what differs from COMMON, and what is varied.
CASES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "llama": ({}, {
        **SIZES, **SCALED, **DIMS, "LLAMA3": LLAMA3, "OTHER3": OTHER3, "attention_bias": {"attention_bias": True},
        "mlp_bias": {"mlp_bias": True},
    }),
    "mistral": ({"sliding_window": None}, {**SIZES, **DIMS}),
    "mixtral": ({**MOE, "sliding_window": None}, {
        **SIZES, "experts": {"num_local_experts": 5, "num_experts_per_tok": 3},
    }),
    "ministral3": ({"head_dim": 16}, {
        "TIED": TIED, "WIDE": WIDE,
        "YARN": rope(
            rope_type="yarn", factor=16.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0,
            mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
        ),
    }),
    "arcee": ({}, {**SIZES, "YARN": YARN}),
    "qwen2": ({}, {**SIZES, **SCALED}),
    "qwen2_moe": ({**MOE, "shared_expert_intermediate_size": 64}, {
        **SIZES, "widths": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 32},
    }),
    "qwen3": ({"head_dim": 16}, {**SIZES, **SCALED, **DIMS, "attention_bias": {"attention_bias": True}}),
    "qwen3_moe": ({**MOE, "head_dim": 16, "norm_topk_prob": True}, {
        **SIZES, **DIMS, "width": {"moe_intermediate_size": 96},
        "experts": {"num_experts": 4, "num_experts_per_tok": 4},
    }),
    "qwen3_next": ({**GATED, **MOE, "shared_expert_intermediate_size": 32, "norm_topk_prob": True}, {
        **SIZES, "heads": {"linear_num_value_heads": 8}, "equal": {"linear_num_key_heads": 4},
        "dims": {"linear_key_head_dim": 32, "linear_value_head_dim": 16}, "square": {"linear_value_head_dim": 16},
    }),
    "qwen3_5_text": ({**GATED, **SECTIONS, "head_dim": 32}, {
        **SIZES, "heads": {"linear_num_value_heads": 8}, "equal": {"linear_num_key_heads": 4},
        "dims": {"linear_key_head_dim": 32, "linear_value_head_dim": 16}, "square": {"linear_value_head_dim": 16},
    }),
    "qwen3_5_moe_text": (
        {**GATED, **MOE, **SECTIONS, "head_dim": 32, "shared_expert_intermediate_size": 64}, {
            **SIZES, "widths": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 32},
            "heads": {"linear_num_value_heads": 8}, "equal": {"linear_num_key_heads": 4},
            "square": {"linear_value_head_dim": 16},
        },
    ),
    "gemma": ({**GEMMA}, {"ONE_KV": ONE_KV, "EPS": EPS, **DIMS}),
    "gemma2": ({**GEMMA, **WINDOW}, {
        "ONE_KV": ONE_KV, "EPS": EPS, "caps": {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        "27B": {"num_hidden_layers": 46, "head_dim": 32, "query_pre_attn_scalar": 16},
        "WIDE": {"head_dim": 32, "query_pre_attn_scalar": 32},
    }),
    "gemma3_text": ({**GEMMA, **WINDOW, **LAYERS6}, {
        "ONE_KV": ONE_KV, "EPS": EPS, "BASE": layered({"rope_theta": 1e6}, {"rope_theta": 5e4}),
        "LINEAR": layered({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {}),
        "27B": {
            "num_hidden_layers": 62, "head_dim": 32, "query_pre_attn_scalar": 16,
            "layer_types": ([*["sliding_attention"] * 5, "full_attention"] * 11)[:62],
        },
        "cap": {"final_logit_softcapping": 10.0}, "WIDE": {"head_dim": 32, "query_pre_attn_scalar": 32},
    }),
    "gemma4_text": (
        {
            "head_dim": 16, "global_head_dim": 32, **WINDOW, **TIED, "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
        }, {
            "shared": {"num_kv_shared_layers": 3}, "wide": {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
            "plain": {"hidden_size_per_layer_input": 0},
            "experts": {"enable_moe_block": True, "top_k_experts": 2, **MOE, "hidden_size_per_layer_input": 0},
            "heads": {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
        },
    ),
    "phi3": ({"original_max_position_embeddings": 512}, {
        **SIZES, "part": rope(partial_rotary_factor=0.5),
        "LONG": {"original_max_position_embeddings": 32, **rope(**LONG)},
    }),
    "phi": (
        {**rope(partial_rotary_factor=0.5), "intermediate_size": 256, "num_key_value_heads": 4},
        {"HEADS": {"num_attention_heads": 8, "num_key_value_heads": 8}},
    ),
    "granite": (
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.5, "attention_multiplier": 0.3},
        {**SIZES, "attention_bias": {"attention_bias": True}, "mlp_bias": {"mlp_bias": True}, "YARN": YARN},
    ),
    "granitemoe": (
        {**MOE, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.5,
         "attention_multiplier": 0.3},
        {**SIZES, "attention_bias": {"attention_bias": True}},
    ),
    "olmo": ({}, {"TIED": TIED, "HEADS": HEADS, "BASE": BASE, "clip": {"clip_qkv": 0.3}}),
    "olmo2": ({}, {**SIZES, "attention_bias": {"attention_bias": True}}),
    "olmo3": ({**WINDOW, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}, {
        **SIZES, "types": {"layer_types": TYPES * 2}, "YARN": YARN,
    }),
    "olmoe": (MOE, {"TIED": TIED, "HEADS": HEADS, "BASE": BASE, "all": {"num_key_value_heads": 4}}),
    "glm4": ({"head_dim": 16, "attention_bias": True}, {
        **SIZES, **DIMS, "plain": {"attention_bias": False}, "part": rope(partial_rotary_factor=0.25),
    }),
    "glm4_moe": ({**MOE, **MLA, "head_dim": 16, **ONE_KV}, {
        **SIZES, "norms": {"use_qk_norm": True}, "bias": {"attention_bias": True},
        "scale": {"routed_scaling_factor": 2.5}, "dense": {"first_k_dense_replace": 2},
        "part": rope(partial_rotary_factor=0.5), "norm": {"norm_topk_prob": False},
    }),
    "smollm3": ({"use_sliding_window": False}, {**SIZES, "attention_bias": {"attention_bias": True}, "YARN": YARN}),
    "seed_oss": ({"head_dim": 16}, {
        **SIZES, **DIMS, "out": {"attention_out_bias": True},
        "plain": {"attention_bias": False},
    }),
    "starcoder2": ({"use_bias": True, "norm_epsilon": 1e-5, "sliding_window": None}, {
        "TIED": TIED, "HEADS": HEADS, "BASE": rope(rope_theta=999999.4420358813), "eps": {"norm_epsilon": 3e-3},
        "plain": {"use_bias": False},
    }),
    "cohere": ({"logit_scale": 0.25, **TIED}, {
        "HEADS": HEADS, "BASE": BASE, "norms": {"use_qk_norm": True}, "eps": NORM_EPS, "bias": {"attention_bias": True},
    }),
    "cohere2": ({"logit_scale": 0.25, **TIED, **WINDOW, "rotary_pct": 1.0, "head_dim": 16}, {
        "HEADS": HEADS | {"head_dim": 8}, "BASE": BASE, "eps": NORM_EPS,
    }),
    "deepseek_v2": (MLA, {
        "TIED": TIED, "direct": {"q_lora_rank": None}, "ranks": {"kv_lora_rank": 64, "v_head_dim": 32},
        "dense": {"first_k_dense_replace": 2}, "scale": {"routed_scaling_factor": 2.5}, "EPS": EPS,
    }),
    "deepseek_v3": ({**MLA, "rope_interleave": True, "scoring_func": "sigmoid"}, {
        "TIED": TIED, "direct": {"q_lora_rank": None}, "ranks": {"kv_lora_rank": 64, "v_head_dim": 32},
        "dense": {"first_k_dense_replace": 2}, "scale": {"routed_scaling_factor": 2.5}, "EPS": EPS,
        "groups": {"n_group": 4, "topk_group": 2}, "norm": {"norm_topk_prob": False}, "MSCALE": MSCALE,
        "shared": {"n_shared_experts": 2},
    }),
    "gpt_oss": ({**MOE, **WINDOW, "layer_types": TYPES * 2, "head_dim": 16}, {
        "TIED": TIED, "HEADS": HEADS, "WIDE": WIDE, "EPS": EPS, "BASE": BASE,
        "YARN": rope(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0,
            truncate=False,
        ),
    }),
    "falcon": (
        {
            "alibi": False, "new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1,
            "parallel_attn": True, "bias": False,
        },
        {
            "TIED": TIED, "groups": {"new_decoder_architecture": True, "num_kv_heads": 2},
            "HEADS": {"num_attention_heads": 8},
        },
    ),
    "stablelm": ({**rope(partial_rotary_factor=0.25), "use_qkv_bias": False}, {
        "TIED": TIED, "HEADS": HEADS, "bias": {"use_qkv_bias": True},
        "parallel": {"use_parallel_residual": True}, "eps": NORM_EPS, "half": rope(partial_rotary_factor=0.5),
    }),
    "nemotron": ({**rope(partial_rotary_factor=0.5), "head_dim": 16}, {
        "TIED": TIED, "HEADS": HEADS | {"head_dim": 8}, "eps": {"norm_eps": 3e-3},
        "BASE": rope(rope_theta=5e4, partial_rotary_factor=0.5),
    }),
    "exaone4": ({"sliding_window": None, "head_dim": 16, "layer_types": ["full_attention"] * 4}, {
        **SIZES, **DIMS, "LLAMA3": LLAMA3, "windows": {**WINDOW, "layer_types": TYPES * 2},
    }),
    "ernie4_5": ({"head_dim": 16, "use_bias": False}, {**SIZES, **DIMS, "bias": {"use_bias": True}}),
    "hunyuan_v1_dense": ({"head_dim": 16}, {**SIZES, **DIMS}),
    "lfm2": ({"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention", "conv"]}, {
        "TIED": TIED, "HEADS": HEADS, "eps": {"norm_eps": 3e-3},
    }),
}  # fmt: skip

# Where llama.cpp 11434 computes something else than the model from the same file, by model_type and name, and why.
OTHERWISE = {
    "deepseek_v2-EPS": "norms of latents have an epsilon of their own, which no key of the file says",
    "deepseek_v3-EPS": "as for DeepSeek V2",
    "exaone4-windows": "the window counts in models of 64 layers only",
    **dict.fromkeys(
        [f"gpt_oss-{name}" for name in ("", "HEADS", "WIDE", "EPS", "YARN")],
        "the ends of YaRN's ramp are rounded, although the config says truncate: false, which no key of the file says",
    ),
}
