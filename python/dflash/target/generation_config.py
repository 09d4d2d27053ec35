"""What transformers says of a generation: the model's settings, and its test of stop strings."""

from __future__ import annotations

import transformers
from torch import nn
from transformers import StopStringCriteria

_OFF = {
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
    "renormalize_logits": (None, False, True),  # changes no choice
}

_RULES = (
    *("repetition_penalty", "no_repeat_ngram_size", "sequence_bias", "bad_words_ids", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
)


def generation_defaults(model: nn.Module) -> dict:
    """What the model's ``generation_config`` says of the arguments of ``generate``, None where it is silent.

    ``rules`` maps the names of :mod:`dflash.rules`, and ``sequence_bias``, to theirs. ``unsupported`` maps every
    setting that would change the text and is not applied here to its value.
    """
    config = model.generation_config
    eos = config.eos_token_id
    vocab = model.get_input_embeddings().weight.shape[0]

    def asks(name: str, off: tuple) -> bool:
        value = getattr(config, name, None)
        return value not in off and not (isinstance(value, (list, tuple, dict)) and len(value) == 0)

    names = (
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "max_length", "pad_token_id"),
        *("stop_strings", "num_return_sequences"),
    )
    return {
        **{name: getattr(config, name, None) for name in names},
        # An id past the vocabulary is never emitted.
        "eos_token_id": [t for t in ([] if eos is None else [eos] if isinstance(eos, int) else eos) if 0 <= t < vocab],
        "rules": {name: getattr(config, name, None) for name in _RULES},
        "unsupported": {name: getattr(config, name) for name, off in _OFF.items() if asks(name, off)},
    }


def transformers_version() -> tuple[int, int]:
    """Major and minor version of the transformers that is imported."""
    major, minor, *_ = transformers.__version__.split(".")
    return int(major), int(minor)


def stop_string_criterion(tokenizer, stop_strings: list[str]):
    """transformers' own test of a one-token loop, ``StopStringCriteria``: a function of the last tokens of a row."""
    try:
        return StopStringCriteria(tokenizer, stop_strings)
    except ValueError as error:  # it decodes the vocabulary token by token, which not every tokenizer bears
        name = type(tokenizer).__name__
        raise ValueError(f"stop_strings: transformers cannot match strings with this {name}: {error}") from error
