"""Loads a drafter: from a folder, a repository of the hub, or a module that holds one."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import DraftConfig
from .drafter import Drafter

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Other names for the same tensors, as serving engines map them.
_PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_DFLASH2_PARTS = ("attention_conv", "mlp_conv", "candidate_selector")
_REFUSED_TENSORS = {
    "lm_head": "a drafter predicts through the target's head; one of its own is not supported",
    "embed_tokens": "a drafter embeds with the target's table; one of its own is not supported",
    "d2t": "a head over part of the vocabulary is not supported",
    "t2d": "a head over part of the vocabulary is not supported",
    "mask_embedding": "a mask embedding of the drafter's own is not supported",
    "mask_hidden": "a mask embedding of the drafter's own is not supported",
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
        draft: a folder with ``config.json`` and safetensors (one file, or shards with an index), a repository of the
            Hugging Face hub, or a module with a drafter's parameter names and ``.config`` (loaded by the reference
            package or through ``AutoModel``), whose weights are copied. A :class:`Drafter` comes back as it is unless
            ``dtype`` or ``device`` asks for a change, which a copy gets.
        dtype: of the parameters; None for the checkpoint's (that of ``fc.weight``).
        device: of the parameters; None for the CPU, or the module's.
        revision: branch, tag or commit of the repository.

    Returns:
        The drafter, with parameters that ask for no gradient.

    Raises:
        FileNotFoundError: there is no such folder and no such repository within reach, or a file is missing.
        ValueError: the config or the tensors are not those of a drafter that is supported; what is wrong is named.
            Nothing has been allocated then. Or a revision came with a folder.
        TypeError: ``draft`` or ``dtype`` is of another kind.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating torch.dtype or None, got {dtype!r}")
    if isinstance(draft, nn.Module):
        return _from_module(getattr(draft, "_orig_mod", draft), dtype, device)
    if not isinstance(draft, (str, os.PathLike)):
        raise TypeError(f"draft must be a folder, a hub repository or a module, got {type(draft).__name__}")
    return _from_folder(draft_folder(draft, revision), dtype, device)


def _from_module(module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None) -> Drafter:
    if isinstance(module, Drafter):
        same_device = device is None or torch.empty(0, device=device).device == module.device
        if dtype in (None, module.dtype) and same_device:
            return module
        return copy.deepcopy(module).to(device=device, dtype=dtype)
    source, config = type(module).__name__, getattr(module, "config", None)
    if config is None:
        raise TypeError(f"draft must be a drafter with a .config, got {source} without one")
    config = config if isinstance(config, DraftConfig) else DraftConfig.from_config(config, f"{source}.config")
    tensors = module.state_dict()
    names = _match(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    first = next(tensors[given] for given, name in names.items() if name == "fc.weight")
    _floating(source, {given: str(tensors[given].dtype) for given in names if not tensors[given].is_floating_point()})
    if any(tensors[given].is_meta for given in names):
        raise ValueError(f"{source}: its parameters are on the meta device: it holds no weights")
    drafter = Drafter(config, dtype=dtype or first.dtype, device=first.device if device is None else device)
    return _fill(drafter, ((names[given], tensors[given]) for given in names))


def draft_folder(draft: str | os.PathLike, revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded if ``draft`` is a repository; raises as :func:`load_draft` does."""
    name = os.fspath(draft)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for a hub repository, but {name!r} is a folder")
        return folder
    import huggingface_hub

    wanted = ["*.json", "*.safetensors", _MASK_EMBEDDING_FILE]
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # no such name, not found, gated, offline, unreachable, nothing cached
        reason = error
    at = "" if revision is None else f" at revision {revision!r}"
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    raise FileNotFoundError(
        f"draft {name!r} is neither a folder nor a hub repository within reach{at}: {lines[0]}"
    ) from reason


def _from_folder(folder: Path, dtype: torch.dtype | None, device: torch.device | str | None) -> Drafter:
    from safetensors import safe_open

    config = DraftConfig.from_config(_json(folder / "config.json"), str(folder / "config.json"))
    if (folder / _MASK_EMBEDDING_FILE).exists():
        raise ValueError(f"{folder / _MASK_EMBEDDING_FILE}: {_REFUSED_TENSORS['mask_embedding']}")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    for path in _shards(folder):
        for name, (shape, kind) in _header(path).items():
            if name in files:
                raise ValueError(f"{folder}: tensor {name} is in {files[name].name} and in {path.name}")
            files[name], shapes[name], kinds[name] = path, shape, kind
    names = _match(config, shapes, str(folder))
    _floating(str(folder), {given: kinds[given] for given in names if kinds[given] not in _DTYPES})
    first = next(_DTYPES[kinds[given]] for given, name in names.items() if name == "fc.weight")
    drafter = Drafter(config, dtype=dtype or first, device="cpu" if device is None else device)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for path in sorted(set(files.values())):
            with safe_open(path, framework="pt") as file:
                for given in file.keys():  # noqa: SIM118 (not a mapping)
                    if given in names:
                        yield names[given], file.get_tensor(given)

    return _fill(drafter, tensors())


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} is no drafter's folder: it has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold an object, got {type(content).__name__}")
    return content


def _shards(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}")
    mapping = _json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to files")
    for name in sorted(set(mapping.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: weight_map names {name!r}, which is not a file beside it")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: shard {name}, which {index.name} names, is missing")
    return [folder / name for name in sorted(set(mapping.values()))]


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and storage type of every tensor of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file (truncated or corrupt?): {error}") from error


def _match(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> dict[str, str]:
    """Each given tensor's name in the drafter, fused ones under their fused names; raises unless all of it fits."""
    names: dict[str, str] = {}
    for given in shapes:
        name = given
        for prefix, ours in _PREFIXES:
            if name.startswith(prefix):
                name = ours + name[len(prefix) :]
        if not name.endswith("rotary_emb.inv_freq"):
            names[given] = name
    parts = [set(name.split(".")) for name in names.values()]
    second = [part for part in _DFLASH2_PARTS if any(part in words for words in parts)]
    if second:
        raise ValueError(
            f"{source}: this is a DFlash 2 drafter (tensors {', '.join(second)}), which is not supported yet: "
            "it has its own issue"
        )
    for part, why in _REFUSED_TENSORS.items():
        for given, words in zip(names, parts, strict=True):
            if part in words:
                raise ValueError(f"{source}: tensor {given} is not supported: {why}")
    skeleton = Drafter(config, device="meta")
    owners = {parameter: name for name, parameter in skeleton.named_parameters()}
    wanted = {name: (tuple(parameter.shape), {name}) for parameter, name in owners.items()}
    for fused, packed, views in skeleton._packed():
        wanted[fused] = (tuple(packed.shape), {owners[parameter] for parameter in views})
    unknown = [given for given, name in names.items() if name not in wanted]
    if unknown:
        raise ValueError(f"{source}: unknown tensors: {_list(unknown)}")
    givers: dict[str, str] = {}
    for given, name in names.items():
        for parameter in sorted(wanted[name][1]):
            if parameter in givers:
                raise ValueError(f"{source}: tensors {givers[parameter]} and {given} both hold {parameter}")
            givers[parameter] = given
    missing = [name for name in owners.values() if name not in givers]
    if missing:
        raise ValueError(f"{source}: missing tensors: {_list(missing)}")
    for given, name in names.items():
        if shapes[given] != wanted[name][0]:
            raise ValueError(
                f"{source}: tensor {given} must be {list(wanted[name][0])} by the config, got {list(shapes[given])}"
            )
    return names


def _floating(source: str, others: Mapping[str, str]) -> None:
    for name, kind in others.items():
        raise ValueError(f"{source}: tensor {name} is stored as {kind}: quantised drafters are not read")


@torch.no_grad()
def _fill(drafter: Drafter, tensors: Iterator[tuple[str, Tensor]]) -> Drafter:
    targets: dict[str, Tensor] = {name: packed for name, packed, _ in drafter._packed()}
    targets.update(drafter.named_parameters())
    for name, tensor in tensors:
        targets[name].copy_(tensor)
    return drafter.eval()


def _list(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
