"""Small quantized checkpoints, each in the layout of its library: a random Llama, and mixtures of experts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Parts = dict[str, Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns whose values lie in a word from the lowest bits on
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last dimension into int32, the first in the lowest bits."""
    parts = codes.long().unflatten(-1, (-1, 32 // bits)) << bits * torch.arange(32 // bits)
    return parts.sum(-1).to(torch.int32)


def integers(out: int, inputs: int, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return random codes, scales in float16 and zero points."""
    middle, groups = 2 ** (bits - 1), inputs // group
    codes = torch.randint(0, 2 * middle, (out, inputs))
    scales = (torch.rand(out, groups) + 0.2).mul(0.5 / middle).half()
    zeros = torch.full((out, groups), middle) if symmetric else torch.randint(1, 2 * middle - 1, (out, groups))
    return codes, scales, zeros


def values(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None = None) -> Tensor:
    groups = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1]) if groups is None else groups
    return (codes - zeros[:, groups]) * scales.float()[:, groups]


def shuffled(inputs: int, group: int, seed: int | None = None) -> Tensor:
    """Return the group of each column; with a seed the same for all weights of so many inputs."""
    random = None if seed is None else torch.Generator().manual_seed(seed)
    return (torch.arange(inputs) // group)[torch.randperm(inputs, generator=random)]


def awq(out: int, inputs: int, group: int = 32) -> tuple[Parts, Tensor]:
    codes, scales, zeros = integers(out, inputs, 4, group or inputs, False)
    pack = lambda x: words(x.T.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4)  # noqa: E731
    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales.T}, values(codes, scales, zeros)


def gptq(
    out: int, inputs: int, bits: int = 4, group: int = 32, less: int = 1, symmetric: bool = False, ordered: bool = True
) -> tuple[Parts, Tensor]:
    codes, scales, zeros = integers(out, inputs, bits, group or inputs, symmetric)
    groups = torch.arange(inputs) // (group or inputs) if ordered else shuffled(inputs, group)
    parts = {"qweight": words(codes, bits).T, "qzeros": words(zeros.T - less, bits), "scales": scales.T}
    return parts | {"g_idx": groups.int()}, values(codes, scales, zeros, groups)


def packed(
    out: int, inputs: int, bits: int = 4, group: int = 32, symmetric: bool = True, ordered: bool = True
) -> tuple[Parts, Tensor]:
    codes, scales, zeros = integers(out, inputs, bits, group or inputs, symmetric)
    parts = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor([out, inputs])}
    if not symmetric:
        parts["weight_zero_point"] = words(zeros.T, bits).T
    groups = None if ordered else shuffled(inputs, group, 0)  # of q, k and v one, as libraries have it
    parts |= {} if groups is None else {"weight_g_idx": groups.int()}
    return parts, values(codes, scales, zeros, groups)


def int8(out: int, inputs: int, group: int = 0, symmetric: bool = True) -> tuple[Parts, Tensor]:
    codes, scales, zeros = integers(out, inputs, 8, group or inputs, symmetric)
    parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    parts |= {} if symmetric else {"weight_zero_point": (zeros - 128).to(torch.int8)}
    return parts, values(codes, scales, zeros)


def fp4(out: int, inputs: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, (out, inputs))
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), E2M1[codes]


def mxfp4(out: int, inputs: int) -> tuple[Parts, Tensor]:
    (bytes_, numbers), exponents = fp4(out, inputs), torch.randint(121, 125, (out, inputs // 32))
    parts = {"weight_packed": bytes_, "weight_scale": exponents.to(torch.uint8)}
    return parts, numbers * (2.0 ** (exponents - 127)).repeat_interleave(32, 1)


def nvfp4(out: int, inputs: int, of: str = "modelopt") -> tuple[Parts, Tensor]:
    (bytes_, numbers), scales = fp4(out, inputs), (torch.rand(out, inputs // 16) * 400 + 1).to(torch.float8_e4m3fn)
    if of == "modelopt":
        factor = torch.tensor(0.00031)
        parts = {"weight": bytes_, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.ones(())}
        return parts, numbers * (scales.float() * factor).repeat_interleave(16, 1)
    divisor = torch.tensor([3210.0])
    parts = {"weight_packed": bytes_, "weight_scale": scales, "weight_global_scale": divisor}
    return parts, numbers * (scales.float() / divisor).repeat_interleave(16, 1)


def fp8(out: int, inputs: int, block: tuple[int, int] = (0, 0), name: str = "weight_scale") -> tuple[Parts, Tensor]:
    rows, columns = block[0] or out, block[1] or inputs
    weight = (torch.randn(out, inputs) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-out // rows), -(-inputs // columns)) * 0.004
    wide = scales.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :inputs]
    stored = scales[0, 0] if scales.numel() == 1 and name == "weight_scale" else scales
    return {"weight": weight, name: stored}, weight.float() * wide


def mlx(out: int, inputs: int, bits: int = 4, group: int = 64) -> tuple[Parts, Tensor]:
    """As MLX packs: a stream of bits, a scale and a bias per group; groups of 32 where inputs are not whole ones."""
    group = group if inputs % group == 0 else 32
    codes, scales, _ = integers(out, inputs, bits, group, True)
    minima = (scales * -(2 ** (bits - 1)) * (1 + torch.randn(scales.shape) / 50)).half()
    stream = (codes[..., None] >> torch.arange(bits) & 1).view(out, -1, 8) << torch.arange(8)
    parts = {"weight": stream.sum(-1).to(torch.uint8).view(torch.uint32), "scales": scales, "biases": minima}
    every = [x.float().repeat_interleave(group, 1) for x in (scales, minima)]
    return parts, codes * every[0] + every[1]


def mlx_floats(parts: Parts, wide: Tensor) -> tuple[Parts, Tensor]:
    """What another layout holds, under MLX's names and in words."""
    weight, scales = parts.values()
    return {"weight": weight.view(torch.uint8).view(torch.uint32), "scales": scales.view(torch.uint8)}, wide


def mxfp8(out: int, inputs: int) -> tuple[Parts, Tensor]:
    (parts, wide), exponents = fp8(out, inputs), torch.randint(118, 122, (out, inputs // 32), dtype=torch.uint8)
    wide = parts["weight"].float() * (2.0 ** (exponents.int() - 127)).repeat_interleave(32, 1)
    return {"weight": parts["weight"], "weight_scale": exponents}, wide


def compressed(layout: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {}, **more}


Write = Callable[[int, int], tuple[Parts, Tensor]]
GPTQ = {"quant_method": "gptq", "bits": 4}
MLX = {"group_size": 64, "bits": 4}
PACKED: dict[str, tuple[dict, Write]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "awq, per channel": ({"quant_method": "awq", "bits": 4}, lambda *size: awq(*size, 0)),
    "gptq": (GPTQ, lambda *size: gptq(*size, symmetric=True)),
    "gptq, asymmetric": (GPTQ | {"checkpoint_format": "gptq"}, gptq),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda *size: gptq(*size, less=0)),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, lambda *size: gptq(*size, 8)),
    "gptq, by activations": (GPTQ | {"desc_act": True}, lambda *size: gptq(*size, ordered=False)),
    "int4": (compressed("pack-quantized"), packed),
    "int4, asymmetric": (compressed("pack-quantized"), lambda *size: packed(*size, symmetric=False)),
    "int4, per channel": (compressed("pack-quantized"), lambda *size: packed(*size, group=0)),
    "int4, by activations": (compressed("pack-quantized"), lambda *size: packed(*size, ordered=False)),
    "packed int8": (compressed("pack-quantized"), lambda *size: packed(*size, 8, symmetric=False)),
    "int8": (compressed("int-quantized"), int8),
    "int8, groups": (compressed("naive-quantized"), lambda *size: int8(*size, 32, False)),
    "mxfp4": (compressed("mxfp4-pack-quantized"), mxfp4),
    "mlx": (MLX, mlx),
    "mlx, groups of 32": (MLX, lambda *size: mlx(*size, group=32)),
    "mlx, 8 bits": (MLX | {"bits": 8}, lambda *size: mlx(*size, 8)),
    "mlx, mxfp4": (MLX | {"mode": "mxfp4"}, lambda *size: mlx_floats(*mxfp4(*size))),
}
FP8, INVERSE = {"quant_method": "fp8"}, "weight_scale_inv"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
DENSE: dict[str, tuple[dict, Write]] = {
    "fp8 in blocks": (FP8 | {"weight_block_size": [32, 32]}, lambda *size: fp8(*size, (32, 32), INVERSE)),
    "fp8 in ragged blocks": (FP8 | {"weight_block_size": [48, 32]}, lambda *size: fp8(*size, (48, 32), INVERSE)),
    "fp8 per channel": (compressed("float-quantized"), lambda *size: fp8(*size, (1, 0))),
    "fp8 of Model-Optimizer": (MODELOPT, fp8),
    "nvfp4": (compressed("nvfp4-pack-quantized"), lambda *size: nvfp4(*size, of="compressed-tensors")),
    "nvfp4 of Model-Optimizer": (MODELOPT | {"quant_algo": "NVFP4"}, nvfp4),
    "mlx, 3 bits": (MLX | {"bits": 3}, lambda *size: mlx(*size, 3)),
    "mlx, 6 bits": (MLX | {"bits": 6}, lambda *size: mlx(*size, 6)),
    "mlx, mxfp8": (MLX | {"mode": "mxfp8"}, lambda *size: mlx_floats(*mxfp8(*size))),
    "groups of 16": (GPTQ, lambda *size: gptq(*size, group=16)),
}  # fmt: skip


def write_llama(folder: Path, kind: str, dtype: torch.dtype = torch.float16, **config: Any) -> LlamaForCausalLM:
    """Write a random Llama with quantized linear layers, in MLX also embeddings and head; return it with the values."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0, bos_token_id=0, tie_word_embeddings=False,
        initializer_range=0.3, dtype=dtype, **config,
    )).to(dtype).float().eval()  # fmt: skip
    return _write(folder, kind, model, dtype)


def write_mixture(folder: Path, kind: str) -> Qwen3MoeForCausalLM:
    """Write a random Qwen3 with experts, all linear layers but routers and the head quantized."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=12, num_experts_per_tok=2,
        max_position_embeddings=256, norm_topk_prob=True, tie_word_embeddings=False, initializer_range=0.3,
        eos_token_id=0, bos_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    return _write(folder, kind, Qwen3MoeForCausalLM(config).bfloat16().float().eval(), torch.bfloat16)


def _write(folder: Path, kind: str, model: Any, dtype: torch.dtype) -> Any:
    scheme, write = (PACKED | DENSE)[kind]
    tensors: Parts = {}
    is_mlx = "quant_method" not in scheme
    kept = ("gate.weight",) if is_mlx else ("embed", "lm_head", "gate.weight")

    def add(name: str, weight: Tensor) -> Tensor:
        if weight.dim() < 2 or any(part in name for part in kept):
            tensors[name] = weight.to(dtype)
            return weight
        parts, wide = write(*weight.shape)
        tensors.update({f"{name.removesuffix('weight')}{part}": x for part, x in parts.items()})
        return wide

    for name, weight in model.state_dict().items():
        if ".experts." not in name:
            weight.copy_(add(name, weight))
            continue
        stem, key = name.rsplit(".", 1)
        for number, expert in enumerate(weight):
            names = ("gate_proj", "up_proj") if key == "gate_up_proj" else ("down_proj",)
            halves = zip(names, expert.chunk(len(names)), strict=True)
            expert.copy_(torch.cat([add(f"{stem}.{number}.{each}.weight", half) for each, half in halves]))
    if is_mlx:  # of all experts one tensor
        stacked: dict[str, list[Tensor]] = {}
        for name, x in tensors.items():
            stacked.setdefault(re.sub(r"experts\.\d+", "switch_mlp", name), []).append(x)
        tensors = {name: torch.stack(x) if "switch_mlp" in name else x[0] for name, x in stacked.items()}
    save(folder, model.config, scheme, tensors)
    return model


def write_gpt_oss(folder: Path) -> GptOssForCausalLM:
    """Write a random gpt-oss as its publisher does: experts in MXFP4, their biases and all else in bfloat16."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
        sliding_window=16, tie_word_embeddings=False, initializer_range=0.3, eos_token_id=0, bos_token_id=0,
        pad_token_id=None, dtype=torch.bfloat16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model, tensors = GptOssForCausalLM(config).bfloat16().float().eval(), {}
    for name, weight in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = weight.bfloat16()
            continue
        experts, inputs, out = weight.shape
        parts, wide = mxfp4(experts * out, inputs)
        tensors[f"{name}_blocks"] = parts["weight_packed"].view(experts, out, inputs // 32, 16)
        tensors[f"{name}_scales"] = parts["weight_scale"].view(experts, out, inputs // 32)
        weight.copy_(wide.view(experts, out, inputs).mT)
    save(folder, config, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, tensors)
    return model


def save(folder: Path, config: Any, scheme: dict, tensors: Parts) -> None:
    config.quantization_config = scheme
    config.save_pretrained(folder)
    del config.quantization_config
    save_file(
        {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
