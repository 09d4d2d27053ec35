"""Load a drafter from a folder, a repository of the Hugging Face hub, or a module that holds its weights."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import DraftConfig
from .drafter import Drafter

__all__ = ["draft_folder", "load_draft"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Serving engines use other names for the same tensors.
_PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_DFLASH2_PARTS = ("attention_conv", "mlp_conv", "candidate_selector")
_PART_OF_VOCABULARY = "heads over part of the vocabulary are not supported"
_OWN_MASK_EMBEDDING = "drafters with their own mask embedding are not supported"
_REFUSED_PARTS = {
    "lm_head": "a drafter predicts through the target's head, its own head is not supported",
    "embed_tokens": "a drafter embeds with the target's table, its own table is not supported",
    "d2t": _PART_OF_VOCABULARY,
    "t2d": _PART_OF_VOCABULARY,
    "mask_embedding": _OWN_MASK_EMBEDDING,
    "mask_hidden": _OWN_MASK_EMBEDDING,
}
_MASK_EMBEDDING_FILE = "mask_embedding.pt"


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

    patterns = ["*.json", "*.safetensors", _MASK_EMBEDDING_FILE]
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
    names = _match(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    stored = {given: tensors[given] for given in names}
    _expect_floating(source, {g: str(t.dtype) for g, t in stored.items() if not t.is_floating_point()})
    if any(tensor.is_meta for tensor in stored.values()):
        raise ValueError(f"{source} holds no weights: its parameters are on the meta device")
    first = stored[_given_name(names, "fc.weight")]
    drafter = Drafter(config, dtype=dtype or first.dtype, device=first.device if device is None else device)
    return _copy_weights(drafter, ((names[given], tensor) for given, tensor in stored.items()))


# ---------------------------------------------------------------------------------------------- folders


def _load_folder(folder: Path, dtype: torch.dtype | None, device: torch.device | str | None) -> Drafter:
    config = DraftConfig.from_config(_read_json(folder / "config.json"), str(folder / "config.json"))
    if (folder / _MASK_EMBEDDING_FILE).exists():
        raise ValueError(f"{folder / _MASK_EMBEDDING_FILE}: {_OWN_MASK_EMBEDDING}")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    for path in _find_shards(folder):
        for name, (shape, kind) in _read_header(path).items():
            if name in files:
                raise ValueError(f"{folder}: tensor {name} is in {files[name].name} and in {path.name}")
            files[name], shapes[name], kinds[name] = path, shape, kind
    names = _match(config, shapes, str(folder))
    _expect_floating(str(folder), {given: kinds[given] for given in names if kinds[given] not in _DTYPES})
    stored = _DTYPES[kinds[_given_name(names, "fc.weight")]]
    drafter = Drafter(config, dtype=dtype or stored, device="cpu" if device is None else device)
    return _copy_weights(drafter, _read_tensors(files, names))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} is not a drafter's folder: {path.name} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold an object, got {type(content).__name__}")
    return content


def _find_shards(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}")
    mapping = _read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to files")
    for name in sorted(set(mapping.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: weight_map names {name!r}, which is not a file in the same folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: shard {name} is missing, but {index.name} names it")
    return [folder / name for name in sorted(set(mapping.values()))]


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the storage type of every tensor in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file (truncated or corrupt?): {error}") from error


def _read_tensors(files: Mapping[str, Path], names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor under the drafter's name for it, file by file."""
    from safetensors import safe_open

    for path in sorted({files[given] for given in names}):
        with safe_open(path, framework="pt") as file:
            for given, name in names.items():
                if files[given] == path:
                    yield name, file.get_tensor(given)


# ---------------------------------------------------------------------------------------------- matching tensors


def _match(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> dict[str, str]:
    """Map each stored tensor to the drafter's name for it, packed tensors to theirs. Raise unless all of them fit."""
    # 1. Translate the names and refuse other kinds of drafters
    names = {given: name for given in shapes if not (name := _translate(given)).endswith("rotary_emb.inv_freq")}
    _refuse_parts(names, source)
    # 2. List what the drafter takes: every parameter, and every packed tensor with the parameters inside it
    skeleton = Drafter(config, device="meta")
    parameters = {parameter: name for name, parameter in skeleton.named_parameters()}
    expected = {name: (tuple(parameter.shape), {name}) for parameter, name in parameters.items()}
    for packed in skeleton.packed_tensors():
        expected[packed.name] = (tuple(packed.tensor.shape), {parameters[parameter] for parameter in packed.views})
    # 3. Every stored tensor must be expected, and every parameter stored exactly once
    if unknown := [given for given, name in names.items() if name not in expected]:
        raise ValueError(f"{source}: unknown tensors: {_first_few(unknown)}")
    origins: dict[str, str] = {}
    for given, name in names.items():
        for parameter in sorted(expected[name][1]):
            if parameter in origins:
                raise ValueError(f"{source}: tensors {origins[parameter]} and {given} both hold {parameter}")
            origins[parameter] = given
    if missing := [name for name in parameters.values() if name not in origins]:
        raise ValueError(f"{source}: missing tensors: {_first_few(missing)}")
    # 4. Shapes must be those of the config
    for given, name in names.items():
        shape = expected[name][0]
        if shapes[given] != shape:
            raise ValueError(f"{source}: the config makes tensor {given} {list(shape)}, got {list(shapes[given])}")
    return names


def _translate(name: str) -> str:
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
    return name


def _refuse_parts(names: Mapping[str, str], source: str) -> None:
    """Raise if a tensor belongs to a kind of drafter that is not supported."""
    parts = {given: set(name.split(".")) for given, name in names.items()}
    if dflash2 := [part for part in _DFLASH2_PARTS if any(part in words for words in parts.values())]:
        raise ValueError(f"{source}: DFlash 2 drafters are not supported yet (found tensors {', '.join(dflash2)})")
    for part, reason in _REFUSED_PARTS.items():
        for given, words in parts.items():
            if part in words:
                raise ValueError(f"{source}: tensor {given} is not supported: {reason}")


def _expect_floating(source: str, others: Mapping[str, str]) -> None:
    """Raise if there are tensors of other storage types; ``others`` maps their names to their types."""
    for name, kind in others.items():
        raise ValueError(f"{source}: tensor {name} is stored as {kind}: quantized drafters cannot be loaded")


def _given_name(names: Mapping[str, str], name: str) -> str:
    return next(given for given, translated in names.items() if translated == name)


@torch.no_grad()
def _copy_weights(drafter: Drafter, tensors: Iterable[tuple[str, Tensor]]) -> Drafter:
    destinations: dict[str, Tensor] = {packed.name: packed.tensor for packed in drafter.packed_tensors()}
    destinations.update(drafter.named_parameters())
    for name, tensor in tensors:
        destinations[name].copy_(tensor)
    return drafter.eval()


def _first_few(names: Collection[str]) -> str:
    listed = ", ".join(list(names)[:8])
    return listed + (f" and {len(names) - 8} more" if len(names) > 8 else "")
