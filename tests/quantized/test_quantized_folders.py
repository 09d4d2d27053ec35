"""Values of quantized folders equal the libraries' own, bit for bit and in the checkpoint's dtype.

Run by `.ci/run quantized`, which unpacks autoawq's source into the folder that DFLASH_AUTOAWQ names.
"""

import importlib.util
import os
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import quantized_folders
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from quantized_folders import write_gpt_oss, write_llama
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash.loading import Pretrained

GROUP = {"strategy": "group", "group_size": 32}
COMPRESSED = {
    "int4": {"num_bits": 4, **GROUP},
    "int4, asymmetric": {"num_bits": 4, **GROUP, "symmetric": False},
    "int4, per channel": {"num_bits": 4, "strategy": "channel"},
    "packed int8": {"num_bits": 8, **GROUP, "symmetric": False},
    "int8": {"num_bits": 8, "strategy": "channel"},
    "int8, groups": {"num_bits": 8, **GROUP, "symmetric": False},
    "mxfp4": {"num_bits": 4, "type": "float", **GROUP},
    "fp8 per channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


def compressed(kind: str, parts: dict[str, Tensor]) -> Tensor:
    layout = (quantized_folders.PACKED | quantized_folders.DENSE)[kind][0]["format"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**COMPRESSED[kind]))
    return BaseCompressor.get_value_from_registry(layout).decompress(parts, scheme)["weight"]


def awq(_kind: str, parts: dict[str, Tensor]) -> Tensor:
    (path,) = Path(os.environ["DFLASH_AUTOAWQ"]).glob("*/awq/utils/packing_utils.py")
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    group = len(parts["qweight"]) // len(parts["scales"])
    return library.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, group).T


def fp8(_kind: str, parts: dict[str, Tensor]) -> Tensor:
    return Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.bfloat16)


def mlx(kind: str, parts: dict[str, Tensor]) -> Tensor:
    """In float32: of numbers in bfloat16 MLX rounds the products too (0.32.4)."""
    scheme = (quantized_folders.PACKED | quantized_folders.DENSE)[kind][0]
    words, scales, *biases = (mx.array(parts[name].numpy()) for name in ("weight", "scales", "biases") if name in parts)
    bits = {"mxfp4": 4, "mxfp8": 8}.get(scheme.get("mode"), scheme["bits"])
    group = words.shape[1] * 32 // bits // scales.shape[1]
    if biases:
        scales, biases = scales.astype(mx.float32), [biases[0].astype(mx.float32)]
    made = mx.dequantize(words, scales, *biases, group_size=group, bits=bits, mode=scheme.get("mode", "affine"))
    return torch.from_numpy(np.array(made.astype(mx.float32)))


MLX = [kind for kind in quantized_folders.PACKED | quantized_folders.DENSE if kind.startswith("mlx")]
LIBRARIES = {
    **dict.fromkeys(MLX, mlx),
    "awq": awq,
    "awq, per channel": awq,
    "fp8 in blocks": fp8,
    **dict.fromkeys(COMPRESSED, compressed),
}


def load_dense(folder: Path, dtype: torch.dtype) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Pretrained(folder, keeps_blocks=False).load_target(dtype)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_values_are_those_of_the_library(tmp_path, kind):
    dtype = torch.bfloat16 if "fp" in kind else torch.float16
    write_llama(tmp_path, kind, dtype)
    target, tensors = load_dense(tmp_path, dtype), load_file(tmp_path / "model.safetensors")
    for name, module in target.named_modules():
        parts = {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}
        if isinstance(module, nn.Linear) and len(parts) > 1:
            assert torch.equal(module.weight, LIBRARIES[kind](kind, parts).to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_of_gpt_oss_are_those_of_transformers(tmp_path, dtype):
    write_gpt_oss(tmp_path)
    target, tensors = load_dense(tmp_path, dtype), load_file(tmp_path / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        stem = f"model.layers.0.mlp.experts.{name}"
        expected = convert_moe_packed_tensors(tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"], dtype=dtype)
        assert torch.equal(target.get_parameter(stem), expected)
