"""Prompts and training rows from JSONL, chats, plain text or the hub.

`load_prompts` gives what `dflash.train.regenerate` answers, `load_rows` what training reads. Both read
the whole source before any other work starts, and say what is wrong with a row by its line.
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
    """The prompts of a source, in its order.

    Args:
        source: a JSONL file (``.gz`` too), or the hub name of a data set, ``owner/name`` or ``owner/name:config``. A
            row has ``prompt`` (a string, or a list of messages), ``messages``, ``question`` or ``turns``; of ``turns``
            the first is taken, of ``messages`` all up to the last that is not the assistant's.
        split: of a data set of the hub.

    Returns:
        Dicts with ``line`` (int, from 1) and either ``prompt`` (str) or ``messages`` (list of role and content).

    Raises:
        FileNotFoundError: there is no such file. ValueError: it is empty, a line is not JSON, or a row has no prompt;
            the line is named.
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
    """Training rows: token ids, and which of them the target wrote.

    A row of the source is one of

    - ``{"prompt", "response"}``, or ``messages``, ``question`` or ``turns`` in the place of ``prompt``: what
      ``dflash regenerate`` writes. Its ``prompt_ids`` and ``response_ids``, where it has them, are taken as they are;
      else the prompt is encoded as the row says that it was asked; ``raw`` and ``template`` must not contradict it.
      With ``"finish_reason": "length"`` the response has no stop token;
    - ``{"messages": [...]}``: each turn of the assistant is supervised, up to and including its stop token. A turn
      that the chat template writes otherwise once others follow it (thoughts left out) is context alone;
    - ``{"text"}``, or a whole ``.txt`` file: supervised everywhere, in pieces of ``max_length``;
    - ``{"input_ids", "loss_mask"}``.

    Args:
        source: JSONL or text files (``.gz`` too), hub names (``owner/name`` or ``owner/name:config``), or several.
        tokenizer: the target's.
        max_length: tokens of a row at most; a longer response is cut there.
        raw: prompts are continued as they are, without the chat template; always so where there is none.
        bos: the tokenizer's BOS token comes before a raw prompt.
        template: arguments of the chat template, as in ``{"enable_thinking": False}``.
        vocab_size: ids must lie below it; None for the tokenizer's.
        stop_token_ids: what ends an answer of the target beside the tokenizer's EOS token: its generation_config's.
        skip_long: leave out rows whose prompt leaves no room for a response, instead of raising.
        split: of a data set of the hub.

    Returns:
        A `datasets.Dataset` in memory with ``input_ids`` (lists of int32) and ``loss_mask`` (lists of int8 of
        the same lengths: 1 on tokens of a response, its stop token included), 5 bytes a token.

    Raises:
        FileNotFoundError: a file is missing. ValueError: a file is empty or a row is not one of the above, has no
            response, a prompt of ``max_length`` tokens or more, ids of another tokenizer, or messages where there is
            no chat template; the line is named.
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
