"""What the model's ``generation_config`` asks for, and transformers' own test of stop strings."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import StopStringCriteria

from ..settings import SETTINGS

__all__ = ["generation_defaults", "stop_string_criterion", "transformers_version"]

# Settings that would change the text and are not applied here, and the values that turn them off.
_UNSUPPORTED: dict[str, tuple] = {
    "num_beams": (None, 1),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "guidance_scale": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "max_time": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False, True),  # a constant added to all logits changes no choice
}


def generation_defaults(model: nn.Module) -> dict[str, Any]:
    """Return what ``model.generation_config`` gives for the settings of a call, by our names; None if unset.

    ``do_sample``, ``max_length`` and ``pad_token_id`` are added. ``unsupported`` maps every setting that would change
    the text but is not applied here to its value.
    """
    config = model.generation_config
    vocab = model.get_input_embeddings().weight.shape[0]
    eos = config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else eos
    unsupported = {name: getattr(config, name) for name, off in _UNSUPPORTED.items() if _is_set(config, name, off)}
    found = {name: getattr(config, row.config, None) for name, row in SETTINGS.items() if row.config}
    if (pairs := found["logit_bias"]) is not None:  # a dict of tuples, or a list of pairs
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        found["logit_bias"] = {tuple(sequence): bias for sequence, bias in pairs}
    return {
        **{name: getattr(config, name, None) for name in ("do_sample", "max_length", "pad_token_id")},
        **found,
        "stop_token_ids": [token for token in eos if 0 <= token < vocab],  # ids past the vocabulary are never emitted
        "unsupported": unsupported,
    }


def _is_set(config: Any, name: str, off: tuple) -> bool:
    value = getattr(config, name, None)
    is_empty = isinstance(value, (list, tuple, dict)) and len(value) == 0
    return value not in off and not is_empty


def stop_string_criterion(tokenizer: Any, stop_strings: list[str]) -> StopStringCriteria:
    """Return transformers' own test of stop strings: a function of a row's last tokens.

    Raises:
        ValueError: the tokenizer cannot decode its vocabulary token by token, as transformers does for this test.
    """
    try:
        with torch.device("cpu"):  # its tables; it moves them to the ids that it is asked about
            return StopStringCriteria(tokenizer, stop_strings)
    except ValueError as error:
        name = type(tokenizer).__name__
        raise ValueError(f"stop_strings: transformers cannot match strings with this {name}: {error}") from error


def transformers_version() -> tuple[int, int]:
    """Return the major and minor version of the imported transformers."""
    major, minor, *_ = transformers.__version__.split(".")
    return int(major), int(minor)
