"""Fingerprints of a model: whether its tensors were replaced or changed, and whether a stored result belongs to it."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import platform
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..files import version_of
from .model import PLAIN_TENSORS, modules_of, shard_of, tensors_of, text_config
from .packed import PackedEmbedding, PackedExperts, PackedLinear
from .parallel import ranks_in

# Keys of a config that do not affect the numbers computed by the model.
# fmt: off
_METADATA = frozenset("""
    _name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range
    is_encoder_decoder label2id output_attentions output_hidden_states output_router_logits pad_token_id problem_type
    return_dict transformers_version use_cache
""".split())  # noqa: SIM905
# fmt: on
_DTYPE = operator.attrgetter("dtype")
_DIGEST_BYTES = 2**26  # of a tensor that are hashed at a time


class Fingerprint:
    """Notices in microseconds what a program does to a live module between calls.

    That is: tensors replaced or moved (``.to``, ``load_state_dict(assign=True)``), forward hooks that came or went, and
    adapters of peft that were switched, merged or turned off.

    Args:
        module: not kept alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._tensors, self._attached, self._versions = _look_at(module)

    def is_of(self, module: nn.Module) -> bool:
        """Return True if ``module`` is the same object, whatever has changed in it."""
        return self._module() is module

    def matches(self, module: nn.Module) -> bool:
        """Return True if ``module`` is the same one, unchanged but for values."""
        return self.is_of(module) and (self._tensors, self._attached) == _look_at(module)[:2]

    def replaced(self) -> bool:
        """Return True if the module is still alive and has other tensors now."""
        module = self._module()
        return module is not None and self._tensors != _look_at(module)[0]

    def has_same_values(self, module: nn.Module, *, trusts_inference_tensors: bool = False) -> bool:
        """Return True if the module matches, and its values are the same as far as torch counts writes in place.

        torch does not count writes through ``tensor.data``, NumPy or DLPack, nor those of fused optimizers. It counts
        none of inference tensors: a module that has one never has the same values, unless these are trusted.
        """
        is_counted = trusts_inference_tensors or None not in self._versions
        seen = self._tensors, self._attached, self._versions
        return self.is_of(module) and is_counted and seen == _look_at(module)


def _look_at(module: nn.Module) -> tuple[list[tuple[int, int, torch.dtype]], list[tuple], list[int | None]]:
    """Return the identities of all tensors, what is attached to modules, and the versions of the tensors.

    Of tensors that are spread over several processes the parts of this one count too.
    """
    modules = modules_of(module)
    tensors = tensors_of(modules)
    if not PLAIN_TENSORS.issuperset(map(type, tensors)):
        tensors += filter(torch.is_tensor, map(shard_of, tensors))
    identities = list(zip(map(id, tensors), map(Tensor.data_ptr, tensors), map(_DTYPE, tensors), strict=True))
    return identities, _attached(modules), [None if x.is_inference() else x._version for x in tensors]


def _attached(modules: list[nn.Module]) -> list[tuple]:
    """Return the hooks and the state of the adapters of all modules."""
    # Hooks by their numbers: holding one could hold the model.
    found = [(*torch_module._global_forward_hooks, None, *torch_module._global_forward_pre_hooks)]
    for part in modules:
        if part._forward_hooks or part._forward_pre_hooks:
            found.append((*part._forward_hooks, None, *part._forward_pre_hooks))
        if "merged_adapters" in part.__dict__:  # a layer of peft
            names = ("_active_adapter", "_disable_adapters", "merged_adapters")
            found.append(tuple(str(part.__dict__.get(name)) for name in names))
    return found


class KnownWeights:
    """The weights that caches were filled with and that steps were captured with. The target comes first."""

    _values: Sequence[Fingerprint] = ()
    _addresses: Sequence[Fingerprint] = ()

    def fill(self, modules: list[nn.Module]) -> None:
        """Take note that the caches are filled with the weights of these modules from now on."""
        self._values = [Fingerprint(module) for module in modules]

    def filled(self, modules: list[nn.Module]) -> bool:
        """Return True if nothing shows that the caches were filled with other weights."""
        # A drafter's inference tensors are trusted: what is drafted changes the speed, never the text.
        return bool(self._values) and all(
            seen.has_same_values(module, trusts_inference_tensors=index > 0)
            for index, (seen, module) in enumerate(zip(self._values, modules, strict=True))
        )

    def have_moved(self, modules: list[nn.Module]) -> bool:
        """Return True if these are not the tensors that were there when this was asked before, or it never was."""
        if self._addresses and all(map(Fingerprint.matches, self._addresses, modules)):
            return False
        self._addresses = [Fingerprint(module) for module in modules]
        return True


# ---------------------------------------------------------------------------------------------- digests


def describe_config(target: nn.Module) -> str:
    """Return the text config as JSON, without keys that do not affect the computed numbers."""
    content = text_config(target).to_dict()
    return json.dumps({k: v for k, v in content.items() if k not in _METADATA}, sort_keys=True, default=str)


def sample_digest(model: nn.Module) -> str:
    """Return a cheap digest of the weights: names, shapes, dtypes, and about 64 values of each that is not spread."""
    digest = hashlib.sha256()
    for name, said in _formats(model):
        digest.update(f"{name} {said}".encode())
    state = model.state_dict().keys()
    packed = ((name, buffer) for name, buffer in model.named_buffers() if name in state)
    for name, parameter in (*model.named_parameters(), *packed):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        if shard_of(parameter) is None:
            flat = parameter.detach().flatten()
            digest.update(flat[:: max(1, flat.numel() // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of all weights as hexadecimal digits. Reads every byte: a second per GB and core, or less.

    It covers name, dtype, shape and bytes of every tensor in ``model.state_dict()``, of a quantized one of the tensors
    inside, and the formats of packed ones. Every process of a target that is spread over several must call this: the
    whole tensors count.
    """
    state = {name: tensor for name, tensor in sorted(model.state_dict().items()) if isinstance(tensor, Tensor)}
    if ranks_in(model) > 1:  # gathered one by one, in the same order everywhere
        digests = list(map(_tensor_digest, state.values()))
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(_tensor_digest, state.values()))
    return hashlib.sha256(json.dumps([*zip(state, digests, strict=True), *_formats(model)]).encode()).hexdigest()


def _formats(model: nn.Module) -> list[tuple[str, str]]:
    """Return the names of modules with packed weights, and what their bytes stand for."""
    packed = (PackedLinear, PackedEmbedding, PackedExperts)
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, packed))
    return [(name, str(getattr(module, "sizes", None) or module.format)) for name, module in found]


@torch.no_grad()
def _tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes, read in pieces of bounded size."""
    tensor = tensor.full_tensor() if shard_of(tensor) is not None else tensor  # type: ignore[attr-defined]
    digest = hashlib.sha256()
    for part in _plain_parts(tensor):
        digest.update(f"{part.dtype} {list(part.shape)} ".encode())
        values = part.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for piece in values.split(_DIGEST_BYTES):
            digest.update(piece.cpu().numpy())
    return digest.hexdigest()


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor is made of: those inside a quantized one of torchao, else itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_parts(getattr(tensor, name))


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute a text, by name."""
    return {
        "dflash": version_of("dflash-engine"),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
    }


def machine_name(device: torch.device) -> str:
    """Return the name of the GPU, or that of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
