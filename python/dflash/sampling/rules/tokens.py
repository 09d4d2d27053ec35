"""Tokens that are banned or forced at certain positions."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import ClassVar

import torch
from torch import Tensor

from .rule import IDS, Rows, Rule, Settings, filled, upper_bound

__all__ = ["BannedTokens", "BeginSuppressTokens", "ForcedBos", "ForcedEos", "MinLength", "SuppressTokens"]

_YES = torch.tensor(True, dtype=torch.bool, device="cpu")


class BannedTokens(Rule):
    """bad_words_ids of one token: ``banned [batch, vocab]`` float32, -inf for them."""

    for_drafts = True
    neutral: ClassVar = {"banned": math.inf}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        single = [word[0] for word in settings.get("bad_words_ids", ()) if len(word) == 1]
        return {"banned": upper_bound(single, vocab_size)} if single else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return torch.minimum(logits, self.banned[:, None, : logits.shape[-1]])


class MinLength(Rule):
    """``min_length`` and ``min_new_tokens [batch]`` int64; ``stop [batch, vocab]`` float32: -inf for stop tokens."""

    for_drafts = True
    neutral: ClassVar = {"stop": math.inf, "min_length": 0, "min_new_tokens": 0}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        if "stop_token_ids" not in settings:
            return {}
        return {
            "stop": upper_bound(settings["stop_token_ids"], vocab_size),
            "min_length": torch.tensor(settings.get("min_length", 0), **IDS),
            "min_new_tokens": torch.tensor(settings.get("min_new_tokens", 0), **IDS),
        }

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        least, least_new = self.min_length[:, None], self.min_new_tokens[:, None]
        early = (rows.positions < least) | (rows.positions - rows.prompt < least_new)
        return torch.minimum(logits, torch.where(early[..., None], self.stop[:, None, : logits.shape[-1]], math.inf))


class ForcedBos(Rule):
    """forced_bos_token_id: ``forced_bos [batch, vocab]`` float32, the logits that force it where ``forces [batch]``."""

    for_drafts = True
    neutral: ClassVar = {"forced_bos": 0.0, "forces": False}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        forced = settings.get("forced_bos_token_id")
        return {"forced_bos": filled(forced, 0.0, -math.inf, vocab_size), "forces": _YES} if forced else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        second = self.forces[:, None] & (rows.positions == 1)
        return torch.where(second[..., None], self.forced_bos[:, None, : logits.shape[-1]], logits)


class ForcedEos(Rule):
    """forced_eos_token_id: ``forced_eos [batch, vocab]`` float32, the logits that force it where ``forces [batch]``."""

    for_drafts = True
    neutral: ClassVar = {"forced_eos": 0.0, "forces": False}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        forced = settings.get("forced_eos_token_id")
        return {"forced_eos": filled(forced, 0.0, -math.inf, vocab_size), "forces": _YES} if forced else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        last = self.forces[:, None] & (rows.positions == rows.limits - 1)
        return torch.where(last[..., None], self.forced_eos[:, None, : logits.shape[-1]], logits)


class SuppressTokens(Rule):
    """suppress_tokens: ``suppressed [batch, vocab]`` float32, -inf for them."""

    for_drafts = True
    neutral: ClassVar = {"suppressed": math.inf}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        ids = settings.get("suppress_tokens")
        return {"suppressed": upper_bound(ids, vocab_size)} if ids else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return torch.minimum(logits, self.suppressed[:, None, : logits.shape[-1]])


class BeginSuppressTokens(Rule):
    """begin_suppress_tokens: ``begin_suppressed [batch, vocab]`` float32, -inf for them."""

    for_drafts = True
    neutral: ClassVar = {"begin_suppressed": math.inf}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        ids = settings.get("begin_suppress_tokens")
        return {"begin_suppressed": upper_bound(ids, vocab_size)} if ids else {}

    @staticmethod
    def constants(settings: Settings) -> dict[str, Hashable]:
        return {"bos_is_forced": bool(settings.get("forced_bos_token_id"))}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        first = rows.prompt + (rows.prompt <= 1) if self.bos_is_forced else rows.prompt
        bound = self.begin_suppressed[:, None, : logits.shape[-1]]
        return torch.minimum(logits, torch.where((rows.positions == first)[..., None], bound, math.inf))
