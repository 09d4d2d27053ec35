"""What identifies a model: its tensors, its config and some of its values."""

from __future__ import annotations

import hashlib
import json
import weakref

from torch import nn

from .support import text_config

# Of a config: what says nothing of the numbers that the model computes.
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
        module: it is not kept alive.
        values: notice changes in place too (an optimizer's step, ``copy_``), except those made through ``.data``.
    """

    def __init__(self, module: nn.Module, values: bool = False) -> None:
        self._module = weakref.ref(module)
        self._values = values
        self._tensors = self._read(module)

    def _read(self, module: nn.Module) -> tuple:
        tensors = (*module.parameters(), *module.buffers())
        found = tuple((id(t), t.data_ptr(), t.dtype) for t in tensors)
        if self._values:
            found += tuple(0 if t.is_inference() else t._version for t in tensors)
        return found

    def matches(self, module: nn.Module) -> bool:
        """Whether ``module`` is the same one, with the tensors it had."""
        return self._module() is module and self._tensors == self._read(module)

    def replaced(self) -> bool:
        """Whether the module still lives and has other tensors now."""
        module = self._module()
        return module is not None and self._tensors != self._read(module)


def describe_config(target: nn.Module) -> str:
    """The text config as JSON, without what says nothing of the numbers: names, versions, special tokens, dtype."""
    content = text_config(target).to_dict()
    return json.dumps({k: v for k, v in content.items() if k not in _METADATA}, sort_keys=True, default=str)


def sample_digest(model: nn.Module) -> str:
    """A cheap fingerprint of a model's weights: every tensor's name, shape and dtype, and some 64 of its values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        few = flat[:: max(1, flat.numel() // 64)].float().cpu()
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode() + few.numpy().tobytes())
    return digest.hexdigest()[:16]
