"""Prompts and training rows from JSONL, chats, plain text or the hub.

:func:`load_prompts` gives what :mod:`dflash.train.regenerate` answers, :func:`load_rows` what training reads. Both read
the whole source before any other work starts, and say what is wrong with a row by its line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..evaluate.prompts import (
    as_messages,
    chat,
    conversation,
    need_datasets,
    plain_ids,
    prompt_ids,
    records,
    rendered,
    short,
)

if TYPE_CHECKING:
    import datasets

__all__ = ["load_prompts", "load_rows", "prompt_ids"]

_WRITTEN = {"line", "sample", "seed", "model", "max_new_tokens"}  # of a row of dflash regenerate
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
    prompts = [{"line": line, **_prompt(row, where)} for where, line, row in records(source, split)]
    if not prompts:
        raise ValueError(f"{source} is empty: it must hold at least one prompt")
    return prompts


def load_rows(
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
        A :class:`datasets.Dataset` in memory with ``input_ids`` (lists of int32) and ``loss_mask`` (lists of int8 of
        the same lengths: 1 on tokens of a response, its stop token included), 5 bytes a token.

    Raises:
        FileNotFoundError: a file is missing. ValueError: a file is empty or a row is not one of the above, has no
            response, a prompt of ``max_length`` tokens or more, ids of another tokenizer, or messages where there is
            no chat template; the line is named.
    """
    datasets = need_datasets()
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
        for where, _, row in records(place, split):
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


def _prompt(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``{"prompt"}`` or ``{"messages"}`` of a row, whatever its source calls it; of several turns the first."""
    messages, turns = conversation(row, where)
    return {"prompt": turns[0]} if messages is None else {"messages": messages}


# ---------------------------------------------------------------------------------------------- rows

_Row = tuple[list[int], list[int]]  # ids and loss mask


class _Encoder:
    """Makes training rows of a source's rows."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        raw: bool,
        bos: bool,
        template: Mapping[str, Any],
        vocab_size: int,
        stop_token_ids: Sequence[int],
        skip_long: bool,
    ) -> None:
        self.tokenizer, self.max_length, self.vocab_size = tokenizer, max_length, vocab_size
        self.raw, self.bos, self.template, self.skip_long = raw, bos, template, skip_long
        eos = tokenizer.eos_token_id
        self.stops = list(dict.fromkeys([*([] if eos is None else [eos]), *stop_token_ids]))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(token for token, about in added.items() if about.special)}

    def __call__(self, row: Mapping[str, Any], where: str) -> list[_Row]:
        try:
            if "text" in row:
                return self.text(row["text"], where)
            ids, mask = self.supervised(row, where)
        except ValueError as error:
            raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from None
        if 1 not in mask:
            raise ValueError(f"{where}: no token of a response to learn from")
        prompt = mask.index(1)
        if prompt < self.max_length:
            return [(ids[: self.max_length], mask[: self.max_length])]
        if self.skip_long:
            return []
        raise ValueError(
            f"{where}: the prompt has {prompt} tokens, and a row may have {self.max_length} with its response"
        )

    def supervised(self, row: Mapping[str, Any], where: str) -> _Row:
        if "input_ids" in row:
            ids, mask = self.ids(row, "input_ids"), row.get("loss_mask")
            if not isinstance(mask, list) or len(mask) != len(ids) or not set(mask) <= {0, 1}:
                raise ValueError(f"loss_mask must hold a 0 or 1 for each of the {len(ids)} input_ids")
            return ids, [int(value) for value in mask]
        if "prompt_ids" in row and "response_ids" in row:
            prompt, response = self.ids(row, "prompt_ids"), self.ids(row, "response_ids")
            if row.get("response") not in (None, self.tokenizer.decode(response, skip_special_tokens=True)):
                raise ValueError("response_ids are not its response in this tokenizer: it was written by another model")
            return _joined((prompt, 0), (response, 1))
        if "response" in row:
            return self.answered(_prompt(row, where), row)
        if "messages" in row:
            return self.conversation(chat(row, where))
        if any(field in row for field in ("prompt", "question", "turns")):
            raise ValueError("a prompt without a response: let the target write one, with dflash regenerate")
        raise ValueError(
            f"a row needs a prompt and response, messages, text, or input_ids and loss_mask, got {', '.join(row)}"
        )

    def ids(self, row: Mapping[str, Any], field: str) -> list[int]:
        ids = row[field]
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise ValueError(f"{field} must be a list of token ids, got {short(ids)}")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"{field} must lie in 0 .. {self.vocab_size - 1}, got {bad}")
        return ids

    def plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def answered(self, prompt: dict[str, Any], row: Mapping[str, Any]) -> _Row:
        response = row["response"]
        if not isinstance(response, str):
            raise ValueError(f"response must be text, got {short(response)}")
        asked = self.asked(row)
        given, template = prompt_ids(self.tokenizer, prompt, **asked), asked["template"]
        if row.get("finish_reason") == "length":
            return _joined((given, 0), (self.plain(response), 1))
        stop = self.stops[:1]
        if "messages" in prompt or not (asked["raw"] or self.tokenizer.chat_template is None):
            messages = as_messages(prompt)
            before = rendered(self.tokenizer, messages, True, template)
            said = rendered(self.tokenizer, [*messages, {"role": "assistant", "content": response}], False, template)
            if said.startswith(before):
                return _joined((given, 0), *self.until_stop(self.plain(said[len(before) :])))
            # The template asks with more than it keeps: an empty thought, say.
            _, found, behind = said.rpartition(response.strip())
            closing = self.until_stop(self.plain(behind))[0][0] if found and response.strip() else []
            if closing and (closing[-1] in self.stops or closing[-1] in self.special):
                stop = closing
        return _joined((given, 0), (self.plain(response) + stop, 1))

    def asked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """How a row's prompt was put to the target: as it says itself, where ``dflash regenerate`` wrote it."""
        ours = {"raw": self.raw, "bos": self.bos, "template": self.template}
        if not row.keys() >= _WRITTEN:
            return ours
        theirs = {"raw": bool(row.get("raw")), "bos": self.bos or bool(row.get("bos"))}
        theirs["template"] = row.get("template") or {}
        if self.tokenizer.chat_template is not None:
            for name in ("raw", "template"):
                if ours[name] and theirs[name] != ours[name]:
                    raise ValueError(f"was asked with {name} {theirs[name]}, and is to be read with {ours[name]}")
        return theirs

    def rendered(self, messages: list[dict[str, Any]], asks: bool) -> str:
        return rendered(self.tokenizer, messages, asks, self.template)

    def conversation(self, messages: list[dict[str, Any]]) -> _Row:
        """A conversation as the template writes it, up to the assistant's last turn."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("messages has no turn of the assistant to learn from")
        whole = self.rendered(messages[: turns[-1] + 1], False)
        pieces, done = [], 0
        for turn in turns:
            asked = self.rendered(messages[:turn], True) if turn else ""
            said = self.rendered(messages[: turn + 1], False)
            if whole.startswith(asked) and whole.startswith(said) and done <= len(asked) < len(said):
                pieces.append((self.plain(whole[done : len(asked)]), 0))
                pieces += self.until_stop(self.plain(whole[len(asked) : len(said)]))
                done = len(said)
        if done < len(whole):
            raise ValueError("the chat template does not write the last answer behind what asks for it")
        return _joined(*pieces)

    def until_stop(self, ids: list[int]) -> list[tuple[list[int], int]]:
        """A turn up to its stop token, supervised, and what the template writes behind that.

        Without one of the known stop tokens the turn ends with the special token that closes it, as a template's own
        end of turn does: one with nothing but blanks behind it.
        """
        end = next((index + 1 for index, token in enumerate(ids) if token in self.stops), None)
        if end is None:
            last = next((i for i in reversed(range(len(ids))) if ids[i] in self.special), None)
            closes = last is not None and not self.tokenizer.decode(ids[last + 1 :]).strip()
            end = last + 1 if closes else len(ids)
        return [(ids[:end], 1), (ids[end:], 0)]

    def text(self, text: object, where: str) -> list[_Row]:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: text must be text that is not empty, got {short(text)}")
        ids = plain_ids(self.tokenizer, text, bos=self.bos)
        if ids[-1:] != self.stops[:1]:
            ids += self.stops[:1]
        pieces = [ids[start : start + self.max_length] for start in range(0, len(ids), self.max_length)]
        return [(piece, [1] * len(piece)) for piece in pieces if len(piece) > 1]


def _joined(*pieces: tuple[list[int], int]) -> _Row:
    return [token for ids, _ in pieces for token in ids], [mark for ids, mark in pieces for _ in ids]
