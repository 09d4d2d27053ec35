"""A head that a target brings for itself (multi-token prediction): one layer that drafts a token per pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..decoder import product
from ..targets import Target, config_values, embedding_table, max_positions, text_config, weight_of
from .config import DraftConfig

MTP_ROWS, MAX_MTP_ROWS = 4, 16  # of a block: by default, and at most


class MtpHead(nn.Module):
    """A target's own prediction layer, which drafts a chain by running again on what it gave (DeepSeek-V3, 2.2).

    It runs on pairs. The pair of position t joins the target's final state at t with the token at t + 1; its output
    predicts the token at t + 2, and stands for the state at t + 1 in the pair after it. Its keys and values are in slot
    t. Those of drafted states are overwritten once the target's are known, so a rejected draft needs no rollback.

    The layer is a decoder layer of the target's family. It is held as a model of one layer, with the target's
    embeddings and head, and runs as a target does: on `dflash.ops`, or as transformers' modules.

    Args:
        model: the model of one layer, whose final norm is the head's. ``eh_proj`` projects a pair, ``enorm`` of the
            token's embedding, then ``hnorm`` of the state.
        num_target_layers: layers of the target.

    Attributes:
        config: as of a drafter that reads the target's last layer.
    """

    selector = None

    def __init__(self, model: Any, num_target_layers: int) -> None:
        super().__init__()
        self.model = model
        self.config = _config_of(model, num_target_layers)
        self._target: Target | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.model.enorm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.enorm.weight.device

    @property
    def target(self) -> Target:
        """The model of one layer as the engine runs it. Made at first use, with a trial run."""
        if self._target is None:
            self._target = Target(self.model)
        return self._target

    def weights(self) -> dict[str, Tensor]:
        """Return its own parameters by name: those of the target's embeddings and head are not among them."""
        shared = {id(part.weight) for part in (self.model.get_input_embeddings(), self.model.get_output_embeddings())}
        return {name: tensor for name, tensor in self.model.named_parameters() if id(tensor) not in shared}

    def share_(self, embedding: Tensor, head: Tensor) -> None:
        """Do nothing: it was made with the target's embeddings and head."""

    def refresh(self) -> None:
        """Do nothing: its weights come from files and are never replaced."""

    def forget_values(self) -> None:
        """Do nothing: there are no copies of its weights."""

    def new_cache(self, batch_size: int, capacity: int, slides: bool = False) -> KVCache:  # noqa: ARG002
        """Return an empty cache for ``batch_size`` sequences of ``capacity`` pairs, lookahead included: all of them."""
        return self.target.new_cache(batch_size, capacity, 1)

    def forward(self, tokens: Tensor, states: Tensor, start: Tensor, cache: KVCache) -> Tensor:
        """Run pairs and append their keys and values.

        Args:
            tokens: ``[batch, rows]`` int64, the token after each position.
            states: ``[batch, rows, hidden]``, the target's final states there, or this method's results.
            start: ``[batch]`` int64, the position of each sequence's first pair.
            cache: from `new_cache`; it holds all pairs before.

        Returns:
            ``[batch, rows, hidden]`` after the head's norm: the input of the target's head, and of the next pair.
        """
        embeds = self.target.embedding_rows[tokens]
        joined = torch.cat([self.model.enorm(embeds), self.model.hnorm(states)], -1)
        return self.target.decode(product(joined, weight_of(self.model.eh_proj)), start, cache)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_target": None}


def final_norm(model: Any) -> nn.Module:
    """Return the norm after the layers."""
    return model.get_decoder().norm


def _config_of(model: nn.Module, num_target_layers: int) -> DraftConfig:
    config = text_config(model)
    heads, hidden = config.num_attention_heads, config.hidden_size
    return DraftConfig(
        hidden_size=hidden, intermediate_size=max(config_values(config, "intermediate_size"), default=hidden),
        num_hidden_layers=1, num_attention_heads=heads,
        num_kv_heads=max(config_values(config, "num_key_value_heads"), default=heads),
        head_dim=max(config_values(config, "head_dim"), default=hidden // heads), block_size=MTP_ROWS, mask_token_id=0,
        target_layer_ids=(num_target_layers - 1,), causal=(True,), window=(0,),
        vocab_size=embedding_table(model).shape[0], num_target_layers=num_target_layers,
        max_position_embeddings=max_positions(model), scales_like_target=True,
    )  # fmt: skip
