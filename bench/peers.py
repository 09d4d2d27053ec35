"""Other people's loops and drafters that several benches compare with."""

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]


def reference_package() -> ModuleType | None:
    """The reference package's ``model.py``, or None where it is not installed."""
    path = ROOT / ".peers" / "dflash" / "model.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("dflash_reference_package", path)
    sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def reference_runner(folder: Path, target, dtype: torch.dtype, temperature: float, new: int) -> Callable | None:
    """The reference package's own loop over its own drafter, ``ids -> (sequences, tokens of each step)``, or None."""
    package = reference_package()
    if package is None:
        return None
    package._cuda_time = time.perf_counter  # its timer wants a GPU
    model = package.DFlashDraftModel.from_pretrained(folder, dtype=dtype).eval()
    eos = target.generation_config.eos_token_id
    stops = [eos] if isinstance(eos, int) else eos

    def run(ids):
        out = package.dflash_generate(model, target, ids, new, stops, temperature=temperature, return_stats=True)
        return out.output_ids, out.acceptance_lengths

    return run


def native_drafter(config: dict, weights: dict[str, Tensor]) -> nn.Module:
    """transformers' own drafter class around the weights of a checkpoint whose architecture it has, else ValueError."""
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError as error:
        raise ValueError(f"transformers {transformers.__version__} has no drafter class") from error
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "block_size"),
    )
    special = {name: config["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    with torch.device(weights["fc.weight"].device):
        model = MuseGlimmerAssistantModel(
            MuseGlimmerAssistantConfig(**{name: config[name] for name in names if name in config}, **special)
        )
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    try:
        model.load_state_dict({renamed.get(name, name): tensor for name, tensor in weights.items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is no {type(model).__name__}: {error}") from error
    return model.eval()
