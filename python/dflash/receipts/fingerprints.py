"""What a text was computed with: fingerprints of the weights and the tokenizer, versions, dtype and device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..limits import MAX_SHOWN, MAX_VOCABULARY
from ..sampling import integer
from ..targets import check_target, describe_config, embedding_table, version_of, versions, weights_digest
from ..terminal import shortened
from .settings import check_names

__all__ = ["DTYPES", "Fingerprints"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Fingerprints:
    """What a text was computed with.

    Attributes:
        weights: SHA-256 of every value in the target's ``state_dict()``, with names, dtypes and shapes. For quantized
            weights those of the tensors that they are made of.
        config: SHA-256 of the target's text config, without keys that change no number. Another version of
            transformers may write another config for the same model.
        dtype: of the target's embeddings: float32, bfloat16 or float16.
        vocab_size: rows of the target's embedding table.
        tokenizer: SHA-256 of the tokenizer's vocabulary and rules; None without a tokenizer.
        chat_template: SHA-256 of the tokenizer's chat template; None if it has none.
        device: where the target was: "cpu", or the kind of accelerator.
        dflash: version of this package.
        torch: version.
        transformers: version.
        llguidance: version, or "not installed". It decides the text under a grammar only.
    """

    weights: str
    config: str
    dtype: str
    vocab_size: int
    tokenizer: str | None
    chat_template: str | None
    device: str
    dflash: str
    torch: str
    transformers: str
    llguidance: str

    @classmethod
    def of(cls, target: nn.Module, tokenizer: object = None) -> Fingerprints:
        """Compute them for a target. Reads all weights, which takes a second per GB and core, or less.

        Args:
            target: a causal language model of transformers. Every process of one that is spread over several must call.
            tokenizer: the target's, or None.

        Raises:
            ValueError: the target is not supported.
        """
        target = check_target(target)
        table = embedding_table(target)
        template = getattr(tokenizer, "chat_template", None)
        return cls(
            weights=weights_digest(target),
            config=_digest(describe_config(target)),
            dtype=str(table.dtype).removeprefix("torch."),
            vocab_size=table.shape[0],
            tokenizer=None if tokenizer is None else _digest(_describe_tokenizer(tokenizer)),
            chat_template=None if template is None else _digest(json.dumps(template, sort_keys=True)),
            device=table.device.type,
            **versions(),
            llguidance=version_of("llguidance"),
        )

    @classmethod
    def parse(cls, content: object) -> Fingerprints:
        """Check fingerprints of unknown origin.

        Raises:
            ValueError: a name is missing or unknown, or a value is wrong.
            TypeError: a value has the wrong type.
        """
        given: Any = check_names(content, [field.name for field in dataclasses.fields(cls)], "fingerprints")
        for name, value in given.items():
            is_text = isinstance(value, str) and len(value) <= MAX_SHOWN
            if name != "vocab_size" and not is_text and not (value is None and name in ("tokenizer", "chat_template")):
                raise TypeError(f"{name} must be a text of at most {MAX_SHOWN} characters, got {shortened(value)}")
        if not 1 <= integer("vocab_size", given["vocab_size"]) <= MAX_VOCABULARY:
            raise ValueError(f"vocab_size must lie in 1 .. {MAX_VOCABULARY}, got {shortened(given['vocab_size'])}")
        if given["dtype"] not in DTYPES:
            raise ValueError(f"dtype must be {', '.join(DTYPES)}, got {shortened(given['dtype'])}")
        return cls(**given)

    def differences(self, other: Fingerprints) -> dict[str, tuple[object, object]]:
        """Return, by name, what differs: the value here and that of ``other``."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return {name: (value, theirs[name]) for name, value in mine.items() if value != theirs[name]}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _describe_tokenizer(tokenizer: Any) -> str:
    """Return a tokenizer's definition as JSON: all of it for a fast one, else its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(sorted(tokenizer.get_vocab().items()))
    definition: Mapping[str, Any] = json.loads(backend.to_str())
    # How the last batch was padded or cut is no part of it.
    return json.dumps({key: value for key, value in definition.items() if key not in ("padding", "truncation")})
