"""The trained pair's target, quantized by every method that transformers loads on the CPU."""

import copy
import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torchao.quantization as ao
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, QuantoConfig, TorchAoConfig

from dflash_tools.measure import demo

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # warns at every pass that int8 casts its inputs

# Quantized while they are loaded.
CONFIGS: dict[str, Callable[[], object]] = {
    "bitsandbytes nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes nf4, double": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes int8, threshold 0": lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes int8, threshold 6": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8 weights": lambda: TorchAoConfig(ao.Int8WeightOnlyConfig()),
    "torchao fp8 weights": lambda: TorchAoConfig(ao.Float8WeightOnlyConfig()),
    "torchao intx weights": lambda: TorchAoConfig(ao.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "torchao int8 dynamic, per row": lambda: TorchAoConfig(ao.Int8DynamicActivationInt8WeightConfig()),
    "torchao int8 dynamic, per tensor": lambda: TorchAoConfig(
        ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor())
    ),
    "quanto int8": lambda: QuantoConfig(weights="int8"),
    "quanto int4": lambda: QuantoConfig(weights="int4"),
    "quanto fp8": lambda: QuantoConfig(weights="float8"),
}
_INT8_CHANNELS = QuantizationArgs(num_bits=8, strategy="channel")
_INT8_TENSOR = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=True)
# Saved compressed, then loaded.
SCHEMES: dict[str, tuple[QuantizationScheme, str]] = {
    "compressed-tensors W8A8, per token": (preset_name_to_scheme("W8A8", ["Linear"]), "int-quantized"),
    "compressed-tensors W8A8, per tensor": (
        QuantizationScheme(targets=["Linear"], weights=_INT8_CHANNELS, input_activations=_INT8_TENSOR),
        "int-quantized",
    ),
    "compressed-tensors W4A16": (
        QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32)),
        "pack-quantized",
    ),
    "compressed-tensors FP8, dynamic": (preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]), "float-quantized"),
    "compressed-tensors FP8, static": (preset_name_to_scheme("FP8", ["Linear"]), "float-quantized"),
}
REFUSED = {
    "bitsandbytes int8, threshold 6": "outlier threshold of 6.0",
    "torchao int8 dynamic, per tensor": "one scale for all rows (torchao, PerTensor())",
    "compressed-tensors W8A8, per tensor": 'one scale for all rows (compressed-tensors, strategy "tensor", dynamic)',
}
ACCEPTED = [name for name in (*CONFIGS, *SCHEMES) if name not in REFUSED]


def load(name: str, dtype: torch.dtype = torch.float32, folder: Path = demo.PAIR / "target") -> PreTrainedModel:
    """Load a model from ``folder`` by this method, in eval mode, as it is before its first pass."""
    if name in CONFIGS:
        return _loaded(folder, dtype, quantization_config=CONFIGS[name](), device_map="cpu")
    return _loaded(compressed(name, folder), dtype)


def _loaded(folder: Path, dtype: torch.dtype, **options) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


@functools.cache
def compressed(name: str, folder: Path) -> Path:
    """Return a folder with the compressed checkpoint of a method, made once per process."""
    model = _loaded(folder, torch.float32)
    scheme, layout = SCHEMES[name]
    groups = {"group_0": copy.deepcopy(scheme)}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen", format=layout)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _choose_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    made = Path(tempfile.mkdtemp(prefix="dflash-compressed-"))
    model.save_pretrained(made)
    compressor.update_config(made)
    return made


def _choose_scales(module: torch.nn.Linear) -> None:
    """Set a layer's scales by the extremes of its weights. Static activation scales are a constant."""
    arguments, weight = module.quantization_scheme.weights, module.weight.data
    groups = {"channel": weight, "tensor": weight.reshape(1, -1)}.get(arguments.strategy)
    groups = weight.unflatten(-1, (-1, arguments.group_size)) if groups is None else groups
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    for own, value in (("weight_scale", scale), ("weight_zero_point", zero)):
        if hasattr(module, own):
            getattr(module, own).data.copy_(value.reshape(getattr(module, own).shape))
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.25)
