"""Prompts and training rows from JSONL, chats, plain text or the hub.

`load_prompts` reads prompts for `dflash.train.regenerate`, `load_rows` reads training rows. Both read all of the source
before any other work starts; errors name the line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...evaluate import (
    import_datasets,
    prompt_ids,
    read_records,
)
from .encoder import _Encoder, _prompt

if TYPE_CHECKING:
    import datasets

__all__ = ["load_prompts", "load_rows", "prompt_ids"]

_TABLE_ROWS = 1024  # rows held as Python lists before they become Arrow


def load_prompts(source: str | os.PathLike, *, split: str = "train") -> list[dict[str, Any]]:
    """Load the prompts of a source, in order.

    A row has ``prompt`` (a string or a list of messages), ``messages``, ``question`` or ``turns``. Of ``turns``, the
    first is used; of ``messages``, all up to the last one that is not the assistant's.

    Args:
        source: a JSONL file (``.gz`` too), or a data set on the hub: ``owner/name`` or ``owner/name:config``.
        split: split of a data set on the hub.

    Returns:
        Dicts with ``line`` (int, from 1) and either ``prompt`` (str) or ``messages`` (list of role and content).

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is empty, a line is not JSON, or a row has no prompt. The message names the line.
    """
    prompts = [{"line": line, **_prompt(row, where)} for where, line, row in read_records(source, split)]
    if not prompts:
        raise ValueError(f"{source} is empty: it must hold at least one prompt")
    return prompts


def load_rows(  # noqa: PLR0913
    source: str | os.PathLike | Sequence[str | os.PathLike],
    tokenizer: Any,
    max_length: int,
    *,
    raw: bool = False,
    bos: bool = False,
    template: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    stop_token_ids: Sequence[int] = (),
    skip_long: bool = False,
    split: str = "train",
) -> datasets.Dataset:
    """Load training rows: token ids, with a mask of those that the target wrote.

    A source row takes one of these forms:

    - ``{"prompt", "response"}``, as ``dflash regenerate`` writes it. ``messages``, ``question`` or ``turns`` can
      replace ``prompt``. Any ``prompt_ids`` and ``response_ids`` are used unchanged. Otherwise the prompt is encoded as
      the row says, and ``raw`` and ``template`` must not contradict it. With ``"finish_reason": "length"``, the
      response has no stop token.
    - ``{"messages": [...]}``: each assistant turn is supervised, up to and including its stop token. Some chat
      templates render a turn differently once others follow it (thoughts left out); such a turn is context only.
    - ``{"text"}``, or a complete ``.txt`` file: supervised everywhere, in pieces of ``max_length``.
    - ``{"input_ids", "loss_mask"}``.

    Args:
        source: a JSONL or text file (``.gz`` too), a hub name (``owner/name`` or ``owner/name:config``), or several.
        tokenizer: the target's tokenizer.
        max_length: maximum tokens per row. Longer responses are truncated.
        raw: encode prompts without the chat template. Always true for a tokenizer that has none.
        bos: put the tokenizer's BOS token before a raw prompt.
        template: arguments of the chat template, as in ``{"enable_thinking": False}``.
        vocab_size: upper bound of the ids, exclusive; None for the tokenizer's size.
        stop_token_ids: stop tokens of the target's generation_config, in addition to the tokenizer's EOS token.
        skip_long: leave out rows whose prompt leaves no room for a response, instead of raising.
        split: split of a data set on the hub.

    Returns:
        A `datasets.Dataset` in memory with ``input_ids`` (lists of int32) and ``loss_mask`` (lists of int8 of the same
        lengths, 1 on response tokens, stop token included). It takes 5 bytes per token.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is empty, or a row has none of the forms above, no response, a prompt of ``max_length``
            tokens or more, ids of another tokenizer, or messages although there is no chat template. The message names
            the line.
    """
    datasets = import_datasets()
    import pyarrow as pa

    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise ValueError(f"max_length must be an integer of at least 2, got {max_length!r}")
    encode = _Encoder(
        tokenizer, max_length, raw, bos, template or {}, vocab_size or len(tokenizer), stop_token_ids, skip_long
    )
    features = datasets.Features(
        input_ids=datasets.List(datasets.Value("int32")), loss_mask=datasets.List(datasets.Value("int8"))
    )
    tables, pending = [], []

    def flush() -> None:
        columns = {name: [row[index] for row in pending] for index, name in enumerate(features)}
        tables.append(pa.table(columns, schema=features.arrow_schema))
        pending.clear()

    for place in [source] if isinstance(source, (str, os.PathLike)) else source:
        found = 0
        for where, _, row in read_records(place, split):
            found += 1
            pending += encode(row, where)
            if len(pending) >= _TABLE_ROWS:
                flush()
        if not found:
            raise ValueError(f"{place} is empty: it must hold at least one row")
    if pending:
        flush()
    if not tables:
        raise ValueError(f"no rows: every prompt of {source} has {max_length} tokens (max_length) or more")
    return datasets.Dataset(pa.concat_tables(tables), info=datasets.DatasetInfo(features=features))
