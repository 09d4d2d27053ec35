"""Loops and drafters of others, around the same weights as ours."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3Config

_REFERENCE = Path(__file__).resolve().parents[1] / ".peers" / "dflash" / "model.py"
_SHARED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "layer_types",
    "block_size",
)


def checkpoint(folder: Path, dtype: torch.dtype) -> tuple[dict, dict[str, Tensor]]:
    """Return a drafter's config and weights as they are in its folder."""
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    return json.loads((folder / "config.json").read_text()), weights


def native_drafter(config: dict, weights: dict[str, Tensor]) -> nn.Module:
    """Return transformers' own drafter class with these weights.

    Raises:
        ValueError: transformers has no such class, or the checkpoint has another architecture.
    """
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError as error:
        raise ValueError(f"transformers {transformers.__version__} has no drafter class") from error
    shared = {name: config[name] for name in _SHARED_KEYS if name in config}
    special = {name: config["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    with torch.device(weights["fc.weight"].device):
        model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**shared, **special))
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    try:
        model.load_state_dict({renamed.get(name, name): tensor for name, tensor in weights.items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is not a {type(model).__name__}: {error}") from error
    return model.eval()


def reference_drafter(config: dict, weights: dict[str, Tensor]) -> tuple[ModuleType, nn.Module]:
    """Return the reference package's ``model.py``, and its drafter with these weights.

    Raises:
        ValueError: the reference package is not installed next to this folder.
    """
    if not _REFERENCE.exists():
        raise ValueError(
            "there is no .peers/dflash/model.py (pip install --no-deps --target .peers dflash==0.1.0 puts it there)"
        )
    spec = importlib.util.spec_from_file_location("dflash_reference_package", _REFERENCE)
    sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    is_second = "candidate_selector.hidden_projection.weight" in weights
    kind = package.DFlash2DraftModel if is_second else package.DFlashDraftModel
    with torch.device(weights["fc.weight"].device):
        model = kind(Qwen3Config(**config)).eval()
    named = {f"{name}.weight" if name.endswith("codebook") else name: tensor for name, tensor in weights.items()}
    model.load_state_dict(named, assign=True)
    return package, model


def reference_loop(
    config: dict, weights: dict[str, Tensor], target: nn.Module, temperature: float, new: int
) -> Callable[[Tensor], tuple[Tensor, list[int]]]:
    """Return the reference package's loop around ``target``: ids to sequences and tokens emitted per step.

    Raises:
        ValueError: the reference package is not installed next to this folder.
    """
    package, model = reference_drafter(config, weights)
    package._cuda_time = time.perf_counter  # its own timer needs a GPU
    eos = target.generation_config.eos_token_id
    stops = [eos] if isinstance(eos, int) else eos

    def run(ids: Tensor) -> tuple[Tensor, list[int]]:
        out = package.dflash_generate(model, target, ids, new, stops, temperature=temperature, return_stats=True)
        return out.output_ids, out.acceptance_lengths

    return run
