"""Fingerprints of a model: whether its tensors were replaced, and whether a stored result belongs to it."""

from __future__ import annotations

import hashlib
import json
import weakref

from torch import nn

from .support import text_config

__all__ = ["WeightsFingerprint", "describe_config", "sample_digest"]

# Keys of a config that do not affect the numbers computed by the model.
_METADATA = frozenset(
    [
        *("_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id"),
        *("id2label", "initializer_range", "is_encoder_decoder", "label2id", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "pad_token_id", "problem_type", "return_dict"),
        *("transformers_version", "use_cache"),
    ]
)


class WeightsFingerprint:
    """Notices when a module's tensors were replaced (``.to``, ``load_state_dict(assign=True)``).

    Args:
        module: not kept alive.
        values: also notice changes in place (an optimizer's step, ``copy_``), except through ``.data``.
    """

    def __init__(self, module: nn.Module, values: bool = False) -> None:
        self._module = weakref.ref(module)
        self._values = values
        self._tensors = self._read(module)

    def _read(self, module: nn.Module) -> tuple:
        tensors = (*module.parameters(), *module.buffers())
        identities = tuple((id(t), t.data_ptr(), t.dtype) for t in tensors)
        if self._values:
            identities += tuple(0 if t.is_inference() else t._version for t in tensors)
        return identities

    def matches(self, module: nn.Module) -> bool:
        """Return True if ``module`` is the same one, with the same tensors."""
        return self._module() is module and self._tensors == self._read(module)

    def replaced(self) -> bool:
        """Return True if the module is still alive and has other tensors now."""
        module = self._module()
        return module is not None and self._tensors != self._read(module)


def describe_config(target: nn.Module) -> str:
    """Return the text config as JSON, without keys that do not affect the computed numbers."""
    content = text_config(target).to_dict()
    return json.dumps({k: v for k, v in content.items() if k not in _METADATA}, sort_keys=True, default=str)


def sample_digest(model: nn.Module) -> str:
    """Return a cheap digest of the weights: every tensor's name, shape and dtype, and about 64 of its values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        few = flat[:: max(1, flat.numel() // 64)].float().cpu()
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode() + few.numpy().tobytes())
    return digest.hexdigest()[:16]
