"""Write a drafter as the GGUF file that llama.cpp's architecture ``dflash`` loads: see `dflash.loading.gguf_draft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash import DraftConfig, Drafter
from dflash.internals import Pretrained, gguf, gguf_draft, target_ids
from dflash.light import terminal

from .layouts import NEUTRAL, key_values

FLOATING = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
QUANTIZED = "q8_0"
_TOKENS, _KINDS, _SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores"))
_NORMAL, _CONTROL, _OWN, _UNUSED = 1, 3, 4, 5  # kinds of tokens
_UNUSED_SCORE = -10000.0
_POSITIONS = 2**17  # llama.cpp needs a number, also where neither config has one


class GgufTarget(NamedTuple):
    """Facts about the target that a drafter's file states."""

    tokenizer: dict[str, tuple[Any, ...]]  # key -> value, and the type it has in the file, or nothing
    hidden_size: int
    num_layers: int
    positions: int | None
    is_mrope: bool


def read_gguf_target(files: Pretrained) -> GgufTarget:
    """Read the target of a drafter. Raises ValueError if its tokenizer cannot be written."""
    if files.gguf is None:
        config = files.load_config().get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        sizes = config.hidden_size, config.num_hidden_layers, getattr(config, "max_position_embeddings", None)
        return GgufTarget(_byte_level(files, config.vocab_size), *sizes, "mrope_section" in rope)
    file, kinds = files.gguf, gguf.require_gguf().GGUFValueType
    keys = ("embedding_length", "block_count", "context_length", "rope.dimension_sections")
    hidden, layers, positions, sections = (file.metadata.get(f"{file.architecture}.{key}") for key in keys)
    stated = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    tokenizer = {key: (value, *map(kinds, file.types[key])) for key, value in stated.items()}
    return GgufTarget(tokenizer, hidden, layers, positions, any(sections or ()))


def _byte_level(files: Pretrained, size: int) -> dict[str, tuple[Any, ...]]:
    """Return the metadata of a byte-level BPE tokenizer for ``size`` tokens. Raises ValueError for other kinds."""
    tokenizer = files.load_tokenizer()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {"model": {}, "decoder": None} if backend is None else json.loads(backend.to_str())
    if (kind := state["model"].get("type")) != "BPE" or "ByteLevel" not in json.dumps(state["decoder"]):
        name = terminal.printable(files.name)
        raise ValueError(
            f"{name}: only byte-level BPE tokenizers are written, and this is {kind or 'another'}: "
            "convert the target to GGUF with llama.cpp, and give that file as --target"
        )
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    if not texts.keys() - tokenizer.added_tokens_decoder.keys():  # what transformers makes of a config alone
        raise ValueError(f"{terminal.printable(files.name)} has no tokenizer: its files are missing")
    size, kinds = max(size, max(texts) + 1), dict.fromkeys(texts, _NORMAL)
    kinds |= {index: _CONTROL if token.special else _OWN for index, token in tokenizer.added_tokens_decoder.items()}
    out = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",  # how text is split: drafters get ids only
        _TOKENS: [texts.get(index, f"[PAD{index}]") for index in range(size)],
        _KINDS: [kinds.get(index, _UNUSED) for index in range(size)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
    }
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    out |= {f"tokenizer.ggml.{name}_token_id": getattr(tokenizer, f"{key}_token_id") for key, name in names.items()}
    return {key: (value,) for key, value in out.items() if value not in (None, [])}


def gguf_metadata(config: DraftConfig, target: GgufTarget) -> dict[str, tuple[Any, ...]]:
    """Return the metadata of a drafter's file: key -> value, and its type if it is not the usual one.

    Raises:
        ValueError: the drafter does not fit the target, or llama.cpp cannot run it as it is.
    """
    # 1. Refuse what does not fit
    last, tokens = max(config.target_layer_ids), len(target.tokenizer.get(_TOKENS, [()])[0])
    if config.hidden_size != target.hidden_size or last >= target.num_layers:
        what = f"layer {last} of a target that is {config.hidden_size} wide"
        has = f"has {target.num_layers} layers and is {target.hidden_size} wide"
        raise ValueError(f"the drafter reads {what}, and this target {has}")
    rows = max(tokens, config.mask_token_id + 1) if config.vocab_size is None else config.vocab_size
    if not tokens or rows < tokens:
        raise ValueError(f"the target has {tokens} tokens, and the drafter's vocab_size is {rows}")
    # 2. Write the keys with other names, then those in another form
    values = key_values(config) | {"hidden_act": None, "is_causal": config.causal[0]}
    values["max_position_embeddings"] = config.max_position_embeddings or target.positions or _POSITIONS
    if not config.markov_rank:
        values["sample_from_anchor"] = None
    keys = gguf_draft.GGUF_KEYS.items()
    out = {key: values.get(name) for name, key in keys if values.get(name) != NEUTRAL.get(name)}
    out |= {"target_layers": [tap + 1 for tap in config.target_layer_ids], "attention.value_length": config.head_dim}
    if config.markov_rank:
        out["has_confidence_head"] = False
    if any(config.window):
        out["attention.sliding_window"] = max(config.window)
        out["attention.sliding_window_pattern"] = [window > 0 for window in config.window]
    if target.is_mrope:  # texts have the first of its positions only
        out["rope.dimension_sections"] = [config.head_dim // 2, 0, 0, 0]
    if config.rope.type != "default":
        out |= {"rope.scaling.type": config.rope.type, "rope.scaling.factor": config.rope.factor}
    if config.rope.type == "yarn":
        out["rope.scaling.original_context_length"] = config.rope.original_max_position_embeddings
        out |= {f"rope.scaling.yarn_{key}": getattr(config.rope, key) for key in ("beta_fast", "beta_slow")}
    metadata = {f"{gguf_draft.LLAMA_CPP}.{key}": (value,) for key, value in out.items() if value is not None}
    # 3. Add the tokenizer, with a token per row of the drafter's tables
    pads = {_TOKENS: lambda index: f"[PAD{index}]", _KINDS: lambda _: _UNUSED, _SCORES: lambda _: _UNUSED_SCORE}
    metadata |= target.tokenizer | {gguf_draft.MASK: (config.mask_token_id,)}
    for key in pads.keys() & metadata.keys():
        value, *types = metadata[key]
        metadata[key] = ([*value, *map(pads[key], range(len(value), rows))], *types)
    return metadata


def write_gguf(path: Path, drafter: Drafter, metadata: dict[str, tuple[Any, ...]], *, is_quantized: bool) -> None:
    """Write the file. Matrices keep the drafter's dtype, or become Q8_0; norms and kernels are float32 there."""
    library = gguf.require_gguf()
    writer, kinds = library.GGUFWriter(path, gguf_draft.LLAMA_CPP), library.GGMLQuantizationType
    types = library.GGUFValueType
    kind = "Q8_0" if is_quantized else FLOATING[drafter.dtype]
    writer.add_file_type(library.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    if is_quantized:
        writer.add_quantization_version(library.GGML_QUANT_VERSION)
    for key, (value, *stored) in metadata.items():
        usual = types.UINT32 if type(value) is int else types.get_type(value)
        writer.add_key_value(key, value, *stored or [usual])
    names = gguf_draft.tensor_names(drafter.config.num_hidden_layers)
    for name, tensor in drafter.state_dict().items():
        if name == "d2t":
            writer.add_tensor(name, target_ids(tensor).cpu().numpy(), raw_dtype=kinds.I64)
        else:
            form = kinds[_kind(names[name], tensor, kind)]
            values = library.quants.quantize(tensor.float().cpu().contiguous().numpy(), form)
            writer.add_tensor(names[name], values, raw_dtype=form)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _kind(name: str, tensor: Tensor, kind: str) -> str:
    if tensor.dim() == 1 or not name.endswith(".weight"):
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind  # as llama.cpp's converter
