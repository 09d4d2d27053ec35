"""Load a drafter from a folder, a GGUF file, a repository of the Hugging Face hub, or a module with its weights."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..drafter.config import DFLASH2_KEYS, DraftConfig
from ..drafter.drafter import Drafter, target_ids
from ..drafter.mtp import MtpHead
from ..files import find_shards, open_tensors, read_json, read_torch_file
from ..ops import PackedWeight
from ..settings import MTP
from ..terminal import listed, named, printable, shortened
from .fill import StoredWeight, packed_for
from .gguf import find_gguf, read_gguf
from .gguf_draft import gguf_config, gguf_tensors
from .quantized import FEW_BITS, Quantized, Scheme, read_draft_scheme, read_weights

MASK_EMBEDDING_FILE = "mask_embedding.pt"
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MASK_EMBEDDING_BYTES = 2**24  # at most: 2**20 values of 8 bytes, and room for what torch adds
# Serving engines use other names for the same tensors.
_PREFIXES = {"model.": "", "midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_PREFIXES |= {"logit_head.": "", "markov_w1.": "markov_head.markov_w1.", "markov_w2.": "markov_head.markov_w2."}
_PREFIXES[MASK_EMBEDDING_FILE] = "mask_embedding"
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# The reference package saves them under these names, files on the hub have them without the suffix.
_CODEBOOKS = ("predecessor_codebook.weight", "successor_codebook.weight")
_DFLASH2_PARTS = ("attention_conv", "mlp_conv", "candidate_selector")
_OWN_PARTS = {"embed_tokens": "embed_tokens.weight", "lm_head": "lm_head.weight", "mask_embedding": "mask_embedding"}
_SIZES = (  # fields of the config that decide which tensors there are, and their shapes
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_kv_heads", "head_dim"),
    *("target_layer_ids", "attention_bias", "attention_sinks", "vocab_size", "draft_vocab_size", "markov_rank"),
    "dflash2",
)
# What trainers also store: the inverse of d2t, parts of the target, and a head that predicts acceptance.
_IGNORED = (
    *("rotary_emb.inv_freq", "t2d", "verifier_lm_head.weight", "verifier_norm.weight"),
    *("confidence_head.proj.weight", "confidence_head.proj.bias", "confidence_proj.weight", "confidence_proj.bias"),
)


def load_draft(
    draft: str | os.PathLike | nn.Module, *, dtype: torch.dtype | None = None,
    device: torch.device | str | None = None, revision: str | None = None, keeps_blocks: bool = True,
) -> Drafter:  # fmt: skip
    """Load a DFlash drafter.

    On a CPU, in float32 and bfloat16, projections, heads and embeddings that a GGUF file or another library has
    quantized stay packed where kernels read them (``docs/files.md``). Of others a warning says that they become dense.

    Args:
        draft: one of

            - a folder with ``config.json`` and safetensors (one file, or shards with an index),
            - a repository of the Hugging Face hub,
            - a GGUF file of llama.cpp or one of its forks, a folder with one, or ``owner/name:FILE.gguf`` on the hub,
            - a module with a drafter's parameter names and ``.config``, such as one loaded by the reference package or
              through ``AutoModel``; its weights are copied,
            - a `Drafter`, which is returned as it is, or copied if ``dtype`` or ``device`` differ.
        dtype: dtype of the parameters and of what it computes; None for that of the checkpoint's ``fc.weight``, and
            that of the norms where this is quantized.
        device: device of the parameters; None for the CPU, or the module's own.
        revision: branch, tag or commit of the repository.
        keeps_blocks: False to have all weights dense, as for training.

    Returns:
        The drafter in eval mode. Its parameters do not require gradients.

    Raises:
        FileNotFoundError: no such folder or reachable repository, or a file is missing.
        ValueError: the config or the tensors are not those of a supported drafter (nothing is allocated then), or a
            revision was given for a folder.
        TypeError: ``draft`` or ``dtype`` has the wrong type.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating torch.dtype or None, got {dtype!r}")
    if draft == MTP or isinstance(draft, MtpHead):
        what = f"draft={MTP!r}, the head in a target's own files, is for dflash.generate and dflash.Generator"
        raise ValueError(f"{what}: this needs a DFlash drafter")
    if isinstance(draft, nn.Module):
        return _from_module(getattr(draft, "_orig_mod", draft), dtype, device, keeps_blocks)
    if not isinstance(draft, (str, os.PathLike)):
        raise TypeError(f"draft must be a folder, a hub repository or a module, got {type(draft).__name__}")
    return _from_path(find_draft(draft, revision), dtype, device, keeps_blocks)


def find_draft(draft: str | os.PathLike, revision: str | None = None) -> Path:
    """Return a checkpoint's folder or GGUF file, downloading it if it is on the hub; see `load_draft`."""
    name = os.fspath(draft)
    path = Path(name).expanduser()
    if revision is not None and path.exists():
        kind = "folder" if path.is_dir() else "file"
        raise ValueError(f"revision {revision!r} is for a hub repository, but {name!r} is a {kind}")
    if (file := find_gguf(name, is_draft=True, revision=revision)) is not None or path.is_dir():
        return file or path
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", MASK_EMBEDDING_FILE]
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # no such name, not found, gated, offline, unreachable, nothing cached
        at = "" if revision is None else f" at revision {revision!r}"
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        what = f"draft {name!r} is neither a folder nor a reachable hub repository{at}: {reason}"
        raise FileNotFoundError(what) from error


def _from_module(
    module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None, keeps_blocks: bool
) -> Drafter:
    if isinstance(module, Drafter):
        wanted = dtype or module.dtype, torch.empty(0, dtype=torch.uint8, device=device or module.device).device
        if module.packed_weights() and not (keeps_blocks and packed_for(*wanted) == "cpu"):
            return _load(module.config, "the drafter", module.weights(), *wanted, keeps_blocks=False)
        if wanted == (module.dtype, module.device):
            return module
        return copy.deepcopy(module).to(device=device, dtype=dtype)
    source, config = type(module).__name__, getattr(module, "config", None)
    if config is None:
        raise TypeError(f"draft must be a drafter with a .config, got {source} without one")
    config = config if isinstance(config, DraftConfig) else DraftConfig.from_config(config, f"{source}.config")
    return _load(config, source, dict(module.state_dict()), dtype, device, keeps_blocks=False)


def read_draft_config(path: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` of a checkpoint's folder, or what would be that of a GGUF file."""
    if path.is_file():
        return gguf_config(read_gguf(path))
    if not (path / "config.json").is_file():
        advice = "config.json is missing (a GGUF file on the hub is owner/name:FILE.gguf)"
        raise FileNotFoundError(f"{printable(path)} is not a drafter's folder: {advice}")
    return read_json(path / "config.json", unique_keys=True)


def _from_path(path: Path, dtype: torch.dtype | None, device: torch.device | str | None, keeps_blocks: bool) -> Drafter:
    if path.is_file():
        file = read_gguf(path)
        config = DraftConfig.from_config(gguf_config(file), str(path))
        tensors = gguf_tensors(file, config.num_hidden_layers)
        return _load(config, printable(path), tensors, dtype, device, keeps_blocks)
    keys = read_draft_config(path)
    config = DraftConfig.from_config(keys, str(path / "config.json"))
    stored: dict[str, Tensor] = {}
    for shard in find_shards(path):
        with open_tensors(shard) as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is not a mapping
        if twice := stored.keys() & tensors.keys():
            raise ValueError(f"{printable(path)}: tensor {named(min(twice))} is in {shard.name} and in another file")
        stored |= tensors
    if (path / MASK_EMBEDDING_FILE).exists():
        stored[MASK_EMBEDDING_FILE] = _read_mask_embedding(path / MASK_EMBEDDING_FILE, config)
    weights = _read_quantized(config, stored, read_draft_scheme(keys, path), printable(path))
    return _load(config, printable(path), weights, dtype, device, keeps_blocks)


Stored = Tensor | StoredWeight | PackedWeight


def _read_quantized(
    config: DraftConfig, stored: Mapping[str, Tensor], scheme: Scheme | None, source: str
) -> Mapping[str, Tensor | Quantized]:
    """Return the weights of a folder, some of which another library may have quantized."""
    if scheme is None and not any(tensor.dtype in FEW_BITS for tensor in stored.values()):
        return stored
    own = _with_own_parts(config, {_translate(name) for name in stored}, source)
    shapes, _ = _expected(own)
    return read_weights(stored, scheme, lambda name: shapes.get(_translate(name)), source)


def _expected(config: DraftConfig) -> tuple[dict[str, torch.Size], dict[str, dict[str, int]]]:
    """Return shapes by the names of tensors that a drafter may have, and the rows of the parameters that each holds."""
    shapes = {name: tensor.shape for name, tensor in Drafter(config, device="meta").state_dict().items()}
    parts = {name: {name: shape[0]} for name, shape in shapes.items()}
    for name, shape in list(shapes.items()):
        for fused, (first, *others) in _FUSED.items():
            if f".{first}." in name:
                rows = {each: shapes[each][0] for each in (name, *(name.replace(first, other) for other in others))}
                parts[name.replace(first, fused)] = rows
                shapes[name.replace(first, fused)] = torch.Size([sum(rows.values()), *shape[1:]])
    return shapes, parts


def _load(
    config: DraftConfig, source: str, stored: Mapping[str, Stored], dtype: torch.dtype | None,
    device: torch.device | str | None, keeps_blocks: bool,
) -> Drafter:  # fmt: skip
    """Make a drafter of stored tensors, which are checked before anything is allocated or read."""
    # 1. Translate the names, refuse other kinds of drafters, and note which parts the drafter brings
    names = {given: name for given in stored if not (name := _translate(given)).endswith(_IGNORED)}
    words = {word: given for given, name in names.items() for word in name.split(".")}
    found = [part for part in _DFLASH2_PARTS if part in words]
    if found and config.dflash2 is None:
        raise ValueError(
            f"{source}: tensors {', '.join(found)} belong to a DFlash 2 drafter, whose config.json states "
            f"{', '.join(DFLASH2_KEYS)}: add them"
        )
    if "mask_hidden" in words:
        what = "mask states that are not an embedding are not implemented"
        raise ValueError(f"{source}: tensor {named(words['mask_hidden'])} is not supported: {what}")
    d2t = next((stored[given] for given, name in names.items() if name == "d2t"), None)
    if d2t is not None and not d2t.is_meta and config.draft_vocab_size is None and [*d2t.shape] == [config.vocab_size]:
        # Of the whole vocabulary: in the target's order, where it says nothing, or in another
        names = {given: name for given, name in names.items() if name != "d2t" or d2t.any()}
        config = dataclasses.replace(config, draft_vocab_size=config.vocab_size if d2t.any() else None)
    config = _with_own_parts(config, set(names.values()), source)
    # 2. Each stored tensor must be a parameter or a packed tensor, and each parameter must be stored exactly once
    expected, parts = _expected(config)
    if unknown := [given for given, name in names.items() if name not in expected]:
        raise ValueError(f"{source}: unknown tensors: {listed(unknown)} ({_sizes(config)})")
    origins: dict[str, str] = {}
    for given, name in names.items():
        for part in parts[name]:
            if part in origins:
                raise ValueError(f"{source}: tensors {named(origins[part])} and {named(given)} both hold {part}")
            origins[part] = given
    if missing := [name for name in expected if name in parts[name] and name not in origins]:
        raise ValueError(f"{source}: missing tensors: {listed(missing)} ({_sizes(config)})")
    # 3. Shapes must be those of the config, and the types those that drafters are stored in
    tensors = {name: stored[given] for given, name in names.items()}
    for given, name in names.items():
        what, tensor, shape = f"tensor {named(given)}", stored[given], list(expected[name])
        if list(tensor.shape) != shape:
            what = f"the config makes {what} {shape}, got {shortened(list(tensor.shape))}"
            raise ValueError(f"{source}: {what} ({_sizes(config)})")
        if not isinstance(tensor, Tensor):
            continue
        if name == "d2t" and tensor.dtype != torch.int64:
            raise ValueError(f"{source}: {what} must be stored as torch.int64, got {tensor.dtype}")
        if name != "d2t" and tensor.dtype not in _FLOATING:
            raise ValueError(f"{source}: {what} is stored as {tensor.dtype}: quantized drafters cannot be loaded")
        if tensor.is_meta:
            raise ValueError(f"{source} holds no weights: its parameters are on the meta device")
    if config.draft_vocab_size is not None:
        _check_token_map(config, tensors["d2t"], source)
    # 4. Allocate. Memory that is not written to before packed weights take its place is not used
    first = next(x for x in map(tensors.get, ("fc.weight", "hidden_norm.weight")) if isinstance(x, Tensor))
    drafter = Drafter(config, dtype=dtype or first.dtype, device=first.device if device is None else device)
    packs = keeps_blocks and packed_for(drafter.dtype, drafter.device) == "cpu"
    if unpacked := _fill(drafter, tensors, parts, packs=packs):
        what = f"{len(unpacked)} quantized weights become dense in {drafter.dtype}"
        warnings.warn(f"{source}: {what}: {listed(unpacked)}", stacklevel=4)
    drafter.refresh()
    return drafter.eval()


@torch.no_grad()
def _fill(
    drafter: Drafter, tensors: Mapping[str, Stored], sizes: Mapping[str, Mapping[str, int]], packs: bool
) -> list[str]:
    """Give a drafter its weights. Returns the names of those that were quantized and become dense.

    Args:
        drafter: a new one.
        tensors: by name.
        sizes: of each the parameters that it holds one above the other, and their rows.
        packs: leave weights packed where it takes them.
    """
    kept: dict[str, PackedWeight] = {}
    for name, weight in tensors.items():
        takes = packs and not isinstance(weight, (Tensor, PackedWeight)) and all(map(drafter.can_pack, sizes[name]))
        if takes and (packed := weight.pack()) is not None and packed.order is None:
            rows = torch.arange(packed.shape[0]).split([*sizes[name].values()])
            for part, ids in zip(sizes[name], rows, strict=True):
                kept[part] = packed.select(ids) if len(rows) > 1 else packed
    drafter.pack_(kept)
    places, unpacked = drafter.state_dict(), []
    for name, weight in tensors.items():
        if sizes[name].keys() <= kept.keys():
            continue
        if not isinstance(weight, Tensor):
            unpacked += [] if isinstance(weight, PackedWeight) else [name]  # which somebody asked to unpack
            weight = weight.dense()
        for part, rows in zip(sizes[name], weight.split([*sizes[name].values()]), strict=True):
            places[part].copy_(rows)
    _undo_storage(drafter)
    return unpacked


def _undo_storage(drafter: Drafter) -> None:
    """Change weights that are stored for another form of RoPE or of norms, and say so in the drafter's config."""
    config = drafter.config
    for module in drafter.modules() if config.stores_less_one else ():
        if isinstance(module, nn.RMSNorm):
            module.weight.add_(1)
    if config.stores_interleaved:
        drafter.reorder_interleaved_()
    drafter.config = dataclasses.replace(config, stores_interleaved=False, stores_less_one=False)


def _translate(name: str) -> str:
    for prefix, replacement in _PREFIXES.items():
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
    return name.removesuffix(".weight") if name.endswith(_CODEBOOKS) else name


def _sizes(config: DraftConfig) -> str:
    return ", ".join(f"{name} {getattr(config, name)}" for name in _SIZES)


# ---------------------------------------------------------------------------------------------- parts of its own


def _with_own_parts(config: DraftConfig, names: set[str], source: str) -> DraftConfig:
    """Return ``config`` with the parts that a checkpoint stores, by the drafter's names for its tensors."""
    needed = {*config.own_parts, *(["lm_head"] if config.draft_vocab_size else [])}
    parts = tuple(part for part, name in _OWN_PARTS.items() if part in needed or name in names)
    if config.vocab_size is None and {"embed_tokens", "lm_head"} & set(parts):
        own = listed([_OWN_PARTS[part] for part in parts if part != "mask_embedding"])
        raise ValueError(f"{source}: the config must state vocab_size, since the drafter has its own {own}")
    return dataclasses.replace(config, own_parts=parts)


def _read_mask_embedding(path: Path, config: DraftConfig) -> Tensor:
    """Read ``mask_embedding.pt``: a tensor, or a dict with ``embedding`` and perhaps ``mask_token_id``."""
    where = printable(path)
    if (size := path.stat().st_size) > _MASK_EMBEDDING_BYTES:
        raise ValueError(f"{where}: must have at most {_MASK_EMBEDDING_BYTES} bytes, got {size}")
    try:
        content = read_torch_file(path)
    except Exception as error:  # torch raises many types for empty, truncated or foreign files
        raise ValueError(f"{where}: cannot be read: {shortened(str(error))}") from error
    mask, tensor = None, content
    if isinstance(content, dict):
        mask, tensor = content.get("mask_token_id"), content.get("embedding")
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise ValueError(f"{where}: must hold a floating tensor, or a dict with one under 'embedding'")
    if mask is not None and mask != config.mask_token_id:
        raise ValueError(f"{where}: its mask_token_id is {shortened(mask)}, and the config's is {config.mask_token_id}")
    if tensor.numel() != config.hidden_size:
        what = f"hidden_size = {config.hidden_size} values, got {shortened(list(tensor.shape))}"
        raise ValueError(f"{where}: the mask embedding must have {what}")
    return tensor.flatten()


def _check_token_map(config: DraftConfig, d2t: Tensor, source: str) -> None:
    """Raise ValueError unless each draft token has a token of the target's, and no two have the same."""
    ids = target_ids(d2t)
    outside = (ids < 0) | (ids >= config.vocab_size)
    if outside.any():
        index = int(outside.nonzero()[0])
        raise ValueError(
            f"{source}: d2t must map each of the {config.draft_vocab_size} draft tokens to a token below vocab_size "
            f"{config.vocab_size}, and it maps {index} to {int(ids[index])}"
        )
    if len(ids.unique()) < len(ids):
        raise ValueError(f"{source}: d2t must map each draft token to another token, and it maps some to the same")
