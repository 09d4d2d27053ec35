"""Load a drafter from a folder, a repository of the Hugging Face hub, or a module that holds its weights."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..files import read_json
from ..limits import MAX_JSON_BYTES, MAX_SHARDS
from ..terminal import listed, named, printable, shortened
from ..weight_files import FLOATING, StoredTensor, find_shards, read_header, read_tensor_
from .config import DraftConfig
from .drafter import Drafter
from .keys import DFLASH2_KEYS
from .own_parts import MASK_EMBEDDING_FILE, check_token_map, config_of_stored_parts, read_mask_embedding

__all__ = ["draft_folder", "load_draft"]

# Serving engines use other names for the same tensors.
_PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    (MASK_EMBEDDING_FILE, "mask_embedding"),
)
# The reference package saves them under these names, files on the hub have them without the suffix.
_CODEBOOKS = ("predecessor_codebook.weight", "successor_codebook.weight")
_DFLASH2_PARTS = ("attention_conv", "mlp_conv", "candidate_selector")
_REFUSED_PARTS = {"mask_hidden": "mask states that are not an embedding are not implemented"}
# What trainers also store: the inverse of d2t, parts of the target, and a head that predicts acceptance.
_IGNORED = (
    *("rotary_emb.inv_freq", "t2d", "verifier_lm_head.weight", "verifier_norm.weight"),
    *("confidence_head.proj.weight", "confidence_head.proj.bias"),
)


def load_draft(
    draft: str | os.PathLike | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> Drafter:
    """Load a DFlash drafter.

    Args:
        draft: one of

            - a folder with ``config.json`` and safetensors (one file, or shards with an index),
            - a repository of the Hugging Face hub,
            - a module with a drafter's parameter names and ``.config``, such as one loaded by the reference package or
              through ``AutoModel``; its weights are copied,
            - a `Drafter`, which is returned as it is, or copied if ``dtype`` or ``device`` differ.
        dtype: dtype of the parameters; None for that of the checkpoint's ``fc.weight``.
        device: device of the parameters; None for the CPU, or the module's own.
        revision: branch, tag or commit of the repository.

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
    if isinstance(draft, nn.Module):
        return _load_module(getattr(draft, "_orig_mod", draft), dtype, device)
    if not isinstance(draft, (str, os.PathLike)):
        raise TypeError(f"draft must be a folder, a hub repository or a module, got {type(draft).__name__}")
    return _load_folder(draft_folder(draft, revision), dtype, device)


def draft_folder(draft: str | os.PathLike, revision: str | None = None) -> Path:
    """Return the local folder of a checkpoint, downloading it if ``draft`` is a repository.

    Raises:
        FileNotFoundError, ValueError: see `load_draft`.
    """
    name = os.fspath(draft)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for a hub repository, but {name!r} is a folder")
        return folder
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", MASK_EMBEDDING_FILE]
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # no such name, not found, gated, offline, unreachable, nothing cached
        reason = error
    at = "" if revision is None else f" at revision {revision!r}"
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    raise FileNotFoundError(
        f"draft {name!r} is neither a folder nor a reachable hub repository{at}: {lines[0]}"
    ) from reason


# ---------------------------------------------------------------------------------------------- modules


def _load_module(module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None) -> Drafter:
    if isinstance(module, Drafter):
        same_device = device is None or torch.empty(0, dtype=torch.uint8, device=device).device == module.device
        if dtype in (None, module.dtype) and same_device:
            return module
        return copy.deepcopy(module).to(device=device, dtype=dtype)
    source, config = type(module).__name__, getattr(module, "config", None)
    if config is None:
        raise TypeError(f"draft must be a drafter with a .config, got {source} without one")
    config = config if isinstance(config, DraftConfig) else DraftConfig.from_config(config, f"{source}.config")
    tensors = module.state_dict()
    config, names = _match(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    stored = {given: tensors[given] for given in names}
    _expect_kinds(source, names, {given: _kind(tensor.dtype) for given, tensor in stored.items()})
    if any(tensor.is_meta for tensor in stored.values()):
        raise ValueError(f"{source} holds no weights: its parameters are on the meta device")
    if config.draft_vocab_size is not None:
        check_token_map(config, stored[_given_name(names, "d2t")], source)
    first = stored[_given_name(names, "fc.weight")]
    drafter = Drafter(config, dtype=dtype or first.dtype, device=first.device if device is None else device)
    _copy_weights(drafter, ((names[given], tensor) for given, tensor in stored.items()))
    drafter.refresh()
    return drafter.eval()


# ---------------------------------------------------------------------------------------------- folders


def _load_folder(folder: Path, dtype: torch.dtype | None, device: torch.device | str | None) -> Drafter:
    # 1. Check everything, and read what is small, before anything large is allocated
    config, source, small = _read_config(folder), printable(folder), {}
    if (folder / MASK_EMBEDDING_FILE).exists():
        small[MASK_EMBEDDING_FILE] = read_mask_embedding(folder / MASK_EMBEDDING_FILE, config)
    stored = _read_headers(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in (stored | small).items()}
    config, names = _match(config, shapes, source)
    _expect_kinds(source, names, {given: stored[given].kind for given in names if given in stored})
    if config.draft_vocab_size is not None:
        given = _given_name(names, "d2t")
        small[given] = torch.empty(stored[given].shape, dtype=torch.int64, device="cpu")
        read_tensor_(stored[given], small[given])
        check_token_map(config, small[given], source)
    # 2. Read
    dtype = dtype or FLOATING[stored[_given_name(names, "fc.weight")].kind]
    drafter = Drafter(config, dtype=dtype, device="cpu" if device is None else device)
    destinations = _destinations(drafter)
    for given in names.keys() - small.keys():
        read_tensor_(stored[given], destinations[names[given]])
    _copy_weights(drafter, ((names[given], tensor) for given, tensor in small.items()))
    drafter.refresh()
    return drafter.eval()


def _read_config(folder: Path) -> DraftConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{printable(folder)} is not a drafter's folder: {path.name} is missing")
    return DraftConfig.from_config(read_json(path, MAX_JSON_BYTES, unique_keys=True), str(path))


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder by its name."""
    stored: dict[str, StoredTensor] = {}
    room = MAX_JSON_BYTES
    for path in find_shards(folder, MAX_JSON_BYTES, MAX_SHARDS):
        tensors, length = read_header(path, room)
        room -= length
        if twice := stored.keys() & tensors.keys():
            name = min(twice)
            raise ValueError(
                f"{printable(folder)}: tensor {named(name)} is in {stored[name].path.name} and in {path.name}"
            )
        stored |= tensors
    return stored


# ---------------------------------------------------------------------------------------------- matching tensors


def _match(
    config: DraftConfig, shapes: Mapping[str, tuple[int, ...]], source: str
) -> tuple[DraftConfig, dict[str, str]]:
    """Map each stored tensor to the drafter's name for it, packed tensors to theirs. Raise unless all of them fit.

    Returns:
        The config with the parts that are stored, and the map.
    """
    # 1. Translate the names, refuse other kinds of drafters, and note which parts the drafter brings
    names = {given: name for given in shapes if not (name := _translate(given)).endswith(_IGNORED)}
    _refuse_parts(config, names, source)
    config = config_of_stored_parts(config, {name: shapes[given] for given, name in names.items()}, source)
    # 2. List what the drafter takes: every parameter, and every packed tensor with the parameters inside it
    skeleton = Drafter(config, device="meta")
    parameters = {parameter: name for name, parameter in skeleton.named_parameters()}
    expected = {name: (tuple(tensor.shape), {name}) for name, tensor in skeleton.state_dict().items()}
    for packed in skeleton.packed_tensors():
        expected[packed.name] = (tuple(packed.tensor.shape), {parameters[parameter] for parameter in packed.views})
    # 3. Every stored tensor must be expected, and every parameter stored exactly once
    if unknown := [given for given, name in names.items() if name not in expected]:
        raise ValueError(f"{source}: unknown tensors: {listed(unknown)} ({_sizes(config)})")
    origins: dict[str, str] = {}
    for given, name in names.items():
        for parameter in sorted(expected[name][1]):
            if parameter in origins:
                both = f"{named(origins[parameter])} and {named(given)}"
                raise ValueError(f"{source}: tensors {both} both hold {parameter}")
            origins[parameter] = given
    if missing := [name for name in skeleton.state_dict() if name not in origins]:
        raise ValueError(f"{source}: missing tensors: {listed(missing)} ({_sizes(config)})")
    # 4. Shapes must be those of the config
    for given, name in names.items():
        shape = expected[name][0]
        if shapes[given] != shape:
            stored = shortened(list(shapes[given]))
            raise ValueError(
                f"{source}: the config makes tensor {named(given)} {list(shape)}, got {stored} ({_sizes(config)})"
            )
    return config, names


def _sizes(config: DraftConfig) -> str:
    """Return the keys of the config that decide which tensors there are, and their shapes."""
    added = {} if config.dflash2 is None else dataclasses.asdict(config.dflash2)
    return (
        f"num_hidden_layers {config.num_hidden_layers}, hidden_size {config.hidden_size}, intermediate_size "
        f"{config.intermediate_size}, num_attention_heads {config.num_attention_heads}, num_key_value_heads "
        f"{config.num_kv_heads}, head_dim {config.head_dim}, {len(config.target_layer_ids)} target_layer_ids, "
        f"attention_bias {config.attention_bias}, attention_sink_bias {config.attention_sinks}, "
        f"vocab_size {config.vocab_size}, draft_vocab_size {config.draft_vocab_size or config.vocab_size}"
        + (f", markov_rank {config.markov_rank}" if config.markov_rank else "")
        + "".join(f", {key} {value}" for key, value in added.items())
    )


def _translate(name: str) -> str:
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
    return name.removesuffix(".weight") if name.endswith(_CODEBOOKS) else name


def _refuse_parts(config: DraftConfig, names: Mapping[str, str], source: str) -> None:
    """Raise if a tensor belongs to a kind of drafter that is not supported."""
    parts = {given: set(name.split(".")) for given, name in names.items()}
    found = [part for part in _DFLASH2_PARTS if any(part in words for words in parts.values())]
    if found and config.dflash2 is None:
        raise ValueError(
            f"{source}: tensors {', '.join(found)} belong to a DFlash 2 drafter, whose config.json states "
            f"{', '.join(DFLASH2_KEYS)}: add them"
        )
    for part, reason in _REFUSED_PARTS.items():
        for given, words in parts.items():
            if part in words:
                raise ValueError(f"{source}: tensor {named(given)} is not supported: {reason}")


def _expect_kinds(source: str, names: Mapping[str, str], kinds: Mapping[str, str]) -> None:
    """Raise unless ``d2t`` is stored as int64 and every other tensor in a type that torch computes in."""
    for given, kind in kinds.items():
        if names[given] == "d2t":
            if kind != "I64":
                raise ValueError(f"{source}: tensor {named(given)} must be stored as I64, got {named(kind)}")
        elif kind not in FLOATING:
            raise ValueError(
                f"{source}: tensor {named(given)} is stored as {named(kind)}: quantized drafters cannot be loaded"
            )


def _kind(dtype: torch.dtype) -> str:
    """Return what safetensors calls a dtype, or torch's name for one that no drafter is stored in."""
    kinds = {known: kind for kind, known in FLOATING.items()} | {torch.int64: "I64"}
    return kinds.get(dtype, str(dtype))


def _given_name(names: Mapping[str, str], name: str) -> str:
    return next(given for given, translated in names.items() if translated == name)


@torch.no_grad()
def _copy_weights(drafter: Drafter, tensors: Iterable[tuple[str, Tensor]]) -> None:
    destinations = _destinations(drafter)
    for name, tensor in tensors:
        destinations[name].copy_(tensor)


def _destinations(drafter: Drafter) -> dict[str, Tensor]:
    """Return every tensor that a checkpoint may hold, by the drafter's name for it."""
    destinations: dict[str, Tensor] = {packed.name: packed.tensor for packed in drafter.packed_tensors()}
    return destinations | drafter.state_dict()
