"""Read the head that a target brings for itself from the target's files: transformers drops its tensors."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

import torch
from torch import nn

from ..drafter import MTP, MtpHead
from ..drafter.mtp import final_norm
from ..files import find_shards, read_json
from ..targets import embedding_table, ranks_in, text_config
from ..terminal import printable
from .folder import Header, read_headers
from .gguf import GgufFile, find_gguf, read_gguf
from .gguf_architectures import find_architecture
from .gguf_target import head_places, load_weights
from .pretrained import Pretrained
from .quantized import QuantizedFolder, read_draft_scheme

# Model types with a head of this form: [embedding, state] joined, a layer of the family, its own final norm.
_FAMILIES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "deepseek_v32"),
    *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
)
_JOINS = "eh_proj."


def _place(name: str, num_layers: int) -> str:
    """Return where a tensor of a checkpoint belongs in a model of one layer; empty if nowhere."""
    layer = f"model.layers.{num_layers}."
    places = {
        "mtp.fc.": _JOINS, "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.norm.": "model.norm.", "mtp.layers.0.": "model.layers.0.",
        **dict.fromkeys((f"{layer}shared_head.head.", f"{layer}embed_tokens."), ""),  # copies of the target's
        **head_places(num_layers),
    }  # fmt: skip
    start = next((start for start in places if name.startswith(start)), None)
    return places[start] + name.removeprefix(start) if start is not None and places[start] else ""


def has_mtp(name: str | os.PathLike, *, local_files_only: bool = True) -> bool:
    """Return True if the files of a target have a head that `load_mtp` reads.

    Downloads at most the config and the index of a hub id.
    """
    source = Pretrained(name, local_files_only=local_files_only)
    try:
        path = find_gguf(name, local_files_only=True)
    except FileNotFoundError:
        return False
    if path is not None:
        file = read_gguf(path)
        return not file.is_draft and _has_block(file) and find_architecture(file).model_type in _FAMILIES
    if (folder := source.folder) is None or not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if text.get("model_type") not in _FAMILIES or not isinstance(text.get("num_hidden_layers"), int):
        return False
    index, single = source.find("model.safetensors.index.json"), folder / "model.safetensors"
    names = read_json(index).get("weight_map", {}) if index is not None else {}
    names = names or (read_headers([single]) if single.is_file() else {})
    is_known = isinstance(names, dict)  # a broken index is refused when the target is loaded
    return is_known and any(_place(name, text["num_hidden_layers"]).startswith(_JOINS) for name in names)


def load_mtp(target: nn.Module) -> MtpHead:
    """Load the prediction layer that a target's files hold, for drafts from it.

    Args:
        target: loaded from these files, which are found by its ``name_or_path``. It is not changed; the head shares its
            embeddings, its own head and its device.

    Raises:
        ValueError: the files hold none that is known, it is incomplete, or the target is spread over processes.
    """
    # 1. The files
    model: Any = target
    config, name, dtype = text_config(target), str(model.name_or_path), embedding_table(target).dtype
    num_layers, device = config.num_hidden_layers, embedding_table(target).device
    asked = f"draft={MTP!r} needs a target whose files hold a head for drafts"
    if config.model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ValueError(f"{asked}, of one of the types {known}, got {config.model_type}: name a drafter")
    if ranks_in(target) > 1:
        raise ValueError(f"{asked} and that is in one process, got one that is spread over {ranks_in(target)}")
    source = Pretrained(name, local_files_only=True)
    file, folder = (source.gguf, source.folder) if name else (None, None)
    headers: dict[str, Header] = {}
    with contextlib.suppress(FileNotFoundError):  # a target in other files, or in none
        found = {} if folder is None else read_headers(find_shards(folder))
        headers = {place: header for each, header in found.items() if (place := _place(each, num_layers))}
    if not (any(place.startswith(_JOINS) for place in headers) if file is None else _has_block(file)):
        raise ValueError(
            f"{asked} (mtp.*, model.layers.{num_layers}.* or blk.{num_layers}.nextn.*), and "
            f"{printable(name) or 'a target without files'} has none: name a drafter, or leave draft out"
        )
    # 2. A model of one layer, with the target's embeddings, head and rotary tables
    head, packs = _one_layer(model), source.packs(dtype, device)
    if file is not None:
        load_weights(head, file, packs=packs, draft_block=num_layers)
    elif folder is not None:
        scheme = read_draft_scheme(read_json(folder / "config.json"), folder)
        QuantizedFolder(folder, headers, scheme, head, packs).load()
    return MtpHead(head.to(device).eval(), num_layers)


def _has_block(file: GgufFile) -> bool:
    return any(name.endswith("nextn.eh_proj.weight") for name in file.shapes)


def _one_layer(target: Any) -> Any:
    """Return a model with one layer of attention like those of ``target``, on the meta device, and what joins pairs."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(text_config(target))
    count, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or []
    like = max((i for i, kind in enumerate(kinds) if kind != "linear_attention"), default=count - 1)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == count:  # one per layer
            setattr(config, key, [value[like]])
    own = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": [], "indexer_types": ["full"]}
    for key in own.keys() & config.to_dict().keys():
        setattr(config, key, own[key])
    config.tie_word_embeddings, config.quantization_config = False, None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=embedding_table(target).dtype)
        model.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, dtype=model.dtype)
        model.enorm, model.hnorm = (copy.deepcopy(final_norm(model)) for _ in range(2))
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(target.get_output_embeddings())
    model.get_decoder().rotary_emb = target.get_decoder().rotary_emb
    model._keys_to_ignore_on_load_missing = ["embed_tokens", "lm_head"]
    return model
