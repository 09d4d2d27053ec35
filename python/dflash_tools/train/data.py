"""Prompts and training rows from JSONL, chats, plain text or the hub; their measures; what is held out."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash.internals import as_messages, prompt_ids, render_prompt, targets, text_ids
from dflash.light import terminal

from ..measure.datasets import first_prompt, import_datasets, parse_messages, parse_tools, read_records, with_messages

if TYPE_CHECKING:
    import datasets


_TABLE_ROWS = 1024  # rows held as Python lists before they become Arrow, and read at once


def load_prompts(source: str | os.PathLike, *, split: str = "train") -> list[dict[str, Any]]:
    """Load the prompts of a source, in order.

    Args:
        source: a JSONL file (``.gz`` too), or a data set on the hub: ``owner/name`` or ``owner/name:config``. A row has
            ``prompt`` (a string or messages), ``messages``, ``question`` or ``turns``, of which the first is used.
        split: split of a data set on the hub.

    Returns:
        Dicts with ``line`` (int, from 1) and either ``prompt`` (str) or ``messages`` (list of role and content).

    Raises:
        FileNotFoundError, ValueError: the file is missing or empty, or a row, which is named, has no prompt.
    """
    prompts = [{"line": line, **first_prompt(row, where)} for where, line, row in read_records(source, split)]
    if not prompts:
        raise ValueError(f"{source} is empty: it must hold at least one prompt")
    return prompts


def load_rows(
    source: str | os.PathLike | Sequence[str | os.PathLike],
    tokenizer: Any,
    max_length: int,
    *,
    split: str = "train",
    **encoding: Any,
) -> datasets.Dataset:
    """Load training rows: token ids, with a mask of those that the target wrote.

    A source row takes one of these forms:

    - ``{"prompt", "response"}``, as ``dflash regenerate`` writes it, or another form of prompt. Any ``prompt_ids`` and
      ``response_ids`` are used unchanged. Otherwise the prompt is encoded as the row says, and ``raw`` and ``template``
      must not contradict it. With ``"finish_reason": "length"``, the response has no stop token.
    - ``{"messages": [...]}``: each assistant turn is supervised, up to and including its stop token. A turn that the
      template renders differently once others follow it (thoughts left out) is context only, and so is what it writes
      in front of a text, such as an empty thought. Also as ``{"conversations": [...]}``.
    - ``{"text"}``, or a complete ``.txt`` file: supervised everywhere, in pieces of ``max_length``.
    - ``{"input_ids", "loss_mask"}``.

    Args:
        source: a JSONL or text file (``.gz`` too), a hub name (``owner/name`` or ``owner/name:config``), or several.
        tokenizer: the target's tokenizer.
        max_length: maximum tokens per row. Longer responses are truncated.
        split: split of a data set on the hub.
        encoding: the other fields of `RowEncoder`.

    Returns:
        A `datasets.Dataset` in memory with ``input_ids`` (int32) and ``loss_mask`` (int8, 1 on response tokens, stop
        token included). It takes 5 bytes per token.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is empty, or a row, which is named, has none of these forms or does not fit.
    """
    datasets, encode = import_datasets(), RowEncoder(tokenizer, max_length, **encoding)
    columns = {"input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("int8"))}
    features, parts = datasets.Features(columns), []

    def encoded() -> Iterator[_Row]:
        for place in [source] if isinstance(source, (str, os.PathLike)) else source:
            found = 0
            for where, _, row in read_records(place, split):
                found += 1
                yield from encode(row, where)
            if not found:
                raise ValueError(f"{place} is empty: it must hold at least one row")

    rows = encoded()
    while part := list(itertools.islice(rows, _TABLE_ROWS)):
        content = dict(zip(columns, zip(*part, strict=True), strict=True))
        parts.append(datasets.Dataset.from_dict(content, features))
    if not parts:
        raise ValueError(f"no rows: every prompt of {source} has {max_length} tokens (max_length) or more")
    return datasets.concatenate_datasets(parts)


_WRITTEN = {"line", "sample", "seed", "model", "max_new_tokens"}  # fields that mark a row of dflash regenerate
_Row = tuple[list[int], list[int]]  # ids and loss mask
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of messages
_MARK = "\ue000"  # stands for a text, to see what a template writes around it


def _bare(text: str) -> str:
    """Return a text without what tokenizers may change: white space, case and composed characters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


class DistinctPrompts:
    """Finds prompts that lost their text: the same token ids, and texts that these do not show.

    Without a ``tokenizer``, which decodes ids, all texts are compared. Thoughts are no text: templates leave them out.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, tuple[str, int]] = {}  # by digest of the ids: where, and the digest of what they lost

    def add(self, ids: Sequence[int], prompt: Mapping[str, Any], where: str) -> None:
        """Raise ``ValueError`` if another prompt has these ids and lost another text."""
        shown, end, lost = "" if self._tokenizer is None else _bare(self._tokenizer.decode(ids)), 0, []
        for message in as_messages(prompt):
            said = message["content"]
            text = _bare(said.rpartition("</think>")[2] if message["role"] == "assistant" else said)
            if (at := shown.find(text, end)) >= 0:
                end = at + len(text)
            else:
                lost.append(text)
        first, theirs = self._found.setdefault(_digest(repr(list(ids))), (where, ours := _digest("\0".join(lost))))
        if ours != theirs:
            what = f"{where}: the prompt differs from that of {first}, and its token ids do not"
            raise ValueError(f"{what}: the chat template or the tokenizer loses text")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7], "little")


@dataclass
class RowEncoder:
    """Converts source rows to training rows.

    Attributes:
        tokenizer, max_length: see `load_rows`.
        raw: encode prompts without the chat template. Always true for a tokenizer that has none.
        bos: put the tokenizer's BOS token before a raw prompt.
        template: arguments of the chat template, as in ``{"enable_thinking": False}``.
        vocab_size: upper bound of the ids, exclusive; None for the tokenizer's size.
        stop_token_ids: stop tokens of the target's generation_config, in addition to the tokenizer's EOS token.
        skip_long: leave out rows whose prompt leaves no room for a response, instead of raising.
    """

    tokenizer: Any
    max_length: int
    raw: bool = False
    bos: bool = False
    template: Mapping[str, Any] | None = None
    vocab_size: int | None = None
    stop_token_ids: Sequence[int] = ()
    skip_long: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.max_length, int) or self.max_length < 2:
            raise ValueError(f"max_length must be an integer of at least 2, got {self.max_length!r}")
        eos = self.tokenizer.eos_token_id
        self.stops = list(dict.fromkeys([*([] if eos is None else [eos]), *self.stop_token_ids]))
        self.prompts = DistinctPrompts(self.tokenizer)
        self.special = special_ids(self.tokenizer)

    def __call__(self, row: Mapping[str, Any], where: str) -> list[_Row]:
        try:
            if "text" in row:
                return self.text(row["text"], where)
            ids, mask = self.supervised(row, where)
        except ValueError as error:
            raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from None
        if 1 not in mask:
            raise ValueError(f"{where}: no response token to learn from")
        prompt = mask.index(1)
        if prompt < self.max_length:
            return [(ids[: self.max_length], mask[: self.max_length])]
        if self.skip_long:
            return []
        raise ValueError(f"{where}: the prompt has {prompt} tokens, a row with its response at most {self.max_length}")

    def supervised(self, row: Mapping[str, Any], where: str) -> _Row:
        row = with_messages(row)
        if "input_ids" in row:
            ids, mask = self.ids(row, "input_ids"), row.get("loss_mask")
            if not isinstance(mask, list) or len(mask) != len(ids) or not all(mark in (0, 1) for mark in mask):
                raise ValueError(f"loss_mask must hold a 0 or 1 for each of the {len(ids)} input_ids")
            return ids, [int(value) for value in mask]
        if "prompt_ids" in row and "response_ids" in row:
            prompt, response = self.ids(row, "prompt_ids"), self.ids(row, "response_ids")
            if row.get("response") not in (None, self.tokenizer.decode(response, skip_special_tokens=True)):
                raise ValueError("response_ids do not decode to response: the row is of a model with another tokenizer")
            if row.get("prompt") or row.get("messages"):
                self.prompts.add(prompt, first_prompt(row, where), where)
            return _joined((prompt, 0), (response, 1))
        if "response" in row:
            return self.answered(first_prompt(row, where), row, where)
        if "messages" in row:
            return self.conversation(parse_messages(row, where), parse_tools(row, where), where)
        if any(field in row for field in ("prompt", "question", "turns")):
            raise ValueError("the prompt has no response: let the target write one with dflash regenerate")
        known = "prompt and response, messages, conversations, text or input_ids and loss_mask"
        raise ValueError(f"a row has {known}, got {terminal.listed(row)}")

    def ids(self, row: Mapping[str, Any], field: str) -> list[int]:
        ids = row[field]
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise ValueError(f"{field} must be a list of token ids, got {terminal.shortened(ids)}")
        size = self.vocab_size or len(self.tokenizer)
        if bad := [token for token in (min(ids), max(ids)) if not 0 <= token < size]:
            raise ValueError(f"{field} must lie in 0 .. {size - 1}, got {terminal.shortened(bad[0])}")
        return ids

    def plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def answered(self, prompt: dict[str, Any], row: Mapping[str, Any], where: str) -> _Row:
        response = row["response"]
        if not isinstance(response, str):
            raise ValueError(f"response must be text, got {terminal.shortened(response)}")
        asked, stop = self.asked(row), self.stops[:1]
        given, template = prompt_ids(self.tokenizer, prompt, **asked), asked["template"]
        self.prompts.add(given, prompt, where)
        if row.get("finish_reason") == "length":
            stop = []
        elif "messages" in prompt or not (asked["raw"] or self.tokenizer.chat_template is None):
            messages = as_messages(prompt)
            before = render_prompt(self.tokenizer, prompt, messages, True, template)
            messages = [*messages, {"role": "assistant", "content": response}]

            def render(part: list[dict[str, Any]]) -> str:
                return render_prompt(self.tokenizer, prompt, part, False, template)

            said = render(messages)
            if said.startswith(before):
                return _joined((given, 0), *self.turn(said, len(before), messages, render))
            # The template's generation prompt has text that the finished turn drops, such as an empty thought.
            _, found, rest = said.rpartition(response.strip())
            closing = self.until_stop(self.plain(rest))[0][0] if found and response.strip() else []
            if closing and (closing[-1] in self.stops or closing[-1] in self.special):
                stop = closing
        return _joined((given, 0), (self.plain(response) + stop, 1))

    def asked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return how the row's prompt was encoded: its own fields if ``dflash regenerate`` wrote it, else ours."""
        ours = {"raw": self.raw, "bos": self.bos, "template": self.template}
        if not row.keys() >= _WRITTEN:
            return ours
        theirs = {"raw": bool(row.get("raw")), "bos": self.bos or bool(row.get("bos"))}
        theirs["template"] = row.get("template") or {}
        if self.tokenizer.chat_template is not None:
            for name in ("raw", "template"):
                if ours[name] and theirs[name] != ours[name]:
                    raise ValueError(f"the row was written with {name} {theirs[name]}, it cannot use {ours[name]}")
        return theirs

    def conversation(self, messages: list[dict[str, Any]], tools: dict[str, Any], where: str) -> _Row:
        """Encode a conversation up to the assistant's last turn, as the chat template renders it."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("messages has no assistant turn to learn from")

        def render(part: list[dict[str, Any]], asks: bool) -> str:
            return render_prompt(self.tokenizer, tools, part, asks, self.template)

        whole = render(messages[: turns[-1] + 1], False)
        pieces, done = [], 0
        for turn in turns:
            asked = render(messages[:turn], True) if turn else ""
            said = render(messages[: turn + 1], False)
            if whole.startswith(asked) and whole.startswith(said) and done <= len(asked) < len(said):
                pieces.append((self.plain(whole[done : len(asked)]), 0))
                if not done:
                    self.prompts.add(pieces[0][0], {"messages": messages[:turn]}, where)
                pieces += self.turn(said, len(asked), messages[: turn + 1], functools.partial(render, asks=False))
                done = len(said)
        if done < len(whole):
            raise ValueError("the chat template does not render the last answer after its generation prompt")
        return _joined(*pieces)

    def turn(
        self, said: str, start: int, messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
    ) -> list[tuple[list[int], int]]:
        """Split the turn of the last message, ``said[start:]``: after its stop token, and in front of its text.

        What the template writes there, such as an empty thought, is context. ``render`` writes other messages.
        """
        *others, message = messages
        written, lead = said[start:], ""
        if not written.lstrip().startswith(message["content"].strip()) and not any(map(message.get, _THOUGHTS)):
            lead = render([*others, {**message, "content": _MARK}])[start:].partition(_MARK)[0]
        if not lead.strip() or not written.startswith(lead):
            return self.until_stop(self.plain(written))
        return [(self.plain(lead), 0), *self.until_stop(self.plain(written[len(lead) :]))]

    def until_stop(self, ids: list[int]) -> list[tuple[list[int], int]]:
        """Split a turn after its stop token: the first part is supervised, the rest is context.

        Without a known one, it ends at its last special token if only blanks follow: a template's own end of turn.
        """
        end = next((index + 1 for index, token in enumerate(ids) if token in self.stops), None)
        if end is None:
            last = next((i for i in reversed(range(len(ids))) if ids[i] in self.special), None)
            closes = last is not None and not self.tokenizer.decode(ids[last + 1 :]).strip()
            end = last + 1 if closes else len(ids)
        return [(ids[:end], 1), (ids[end:], 0)]

    def text(self, text: object, where: str) -> list[_Row]:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: text must be a non-empty string, got {terminal.shortened(text)}")
        ids = text_ids(self.tokenizer, text, bos=self.bos)
        if ids[-1:] != self.stops[:1]:
            ids += self.stops[:1]
        pieces = [ids[start : start + self.max_length] for start in range(0, len(ids), self.max_length)]
        return [(piece, [1] * len(piece)) for piece in pieces if len(piece) > 1]


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens, those of its template too."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, about in added.items() if about.special)}


def _joined(*pieces: tuple[list[int], int]) -> _Row:
    return [token for ids, _ in pieces for token in ids], [mark for ids, mark in pieces for _ in ids]


class MeasuredRows:
    """Lengths, prompts and a digest of rows (``input_ids`` and ``loss_mask``), checked against the target's config.

    A row's prompt is what comes before the first token that the target wrote; of a row that it wrote as a whole, apart
    from a BOS token, it is the first half.

    Attributes:
        rows: the rows.
        lengths: length of each row in tokens.
        prompt_lengths: length of the prompt of each row that has an anchor, by its number.
        keys: digest of the prompt of each such row, the same for all answers to one prompt.
        digest: digest of all tokens and loss masks.
    """

    def __init__(self, rows: Any, config: Any, mask_token_id: int, what: str = "row") -> None:
        self.rows = rows
        self.lengths: list[int] = []
        self.prompt_lengths: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        digest, bos = hashlib.sha256(), [getattr(config, "bos_token_id", None)]
        for start in range(0, len(rows), _TABLE_ROWS):
            part = rows[start : start + _TABLE_ROWS]
            for number, (ids, mask) in enumerate(zip(part["input_ids"], part["loss_mask"], strict=True), start):
                _check_row(f"{what} {number}", ids, mask, config, mask_token_id)
                self.lengths.append(len(ids))
                digest.update(len(ids).to_bytes(8, "little") + array("i", ids).tobytes() + bytes(m != 0 for m in mask))
                if any(a and b for a, b in itertools.pairwise(mask)):
                    prompt = ids[: mask.index(1)]
                    prompt = ids[: len(ids) // 2] if prompt in ([], bos) else prompt
                    self.prompt_lengths[number] = len(prompt)
                    self.keys[number] = hashlib.sha256(array("i", prompt).tobytes()).digest()[:16]
        self.digest = digest.hexdigest()[:16]


def _check_row(name: str, ids: Sequence[int], mask: Sequence[int], config: Any, mask_token_id: int) -> None:
    """Raise ``ValueError`` for a row that the target cannot have written or the drafter cannot learn from."""
    positions = min(targets.config_values(config, "max_position_embeddings"), default=None)
    vocabulary = min(targets.config_values(config, "vocab_size"))
    if len(ids) != len(mask):
        raise ValueError(f"{name} has {len(ids)} input_ids and a loss_mask of {len(mask)}")
    if positions is not None and len(ids) > positions:
        raise ValueError(f"{name} has {len(ids)} tokens, the target has {positions} positions: cut it shorter")
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(f"{name} has token ids outside 0 .. {vocabulary - 1}, the vocabulary")
    if mask_token_id in ids and any(t == mask_token_id and m for t, m in zip(ids, mask, strict=True)):
        raise ValueError(f"{name} must not teach the mask token {mask_token_id}: choose another (--mask-token-id)")


def hold_out(
    data: MeasuredRows, count: int, seed: int, heldout: MeasuredRows | None = None
) -> tuple[list[int], list[list[int]], int]:
    """Hold out up to ``count`` prompts, each with all rows that answer it.

    The prompts come from the rows ``heldout`` if there are any, else from ``data``, at most a tenth of them.

    Returns:
        Numbers of the rows to train on; ids of the held-out prompts; and the number of rows left out for them.
    """
    # 1. Choose the prompts to answer
    known = data if heldout is None else heldout
    candidates = sorted({key: row for row, key in reversed(known.keys.items())}.values())  # each prompt's first row
    if heldout is None:  # draw them, in their order
        most = max(1, len(candidates) // 10) if len(candidates) > 1 else 0
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
        chosen = sorted(candidates[i] for i in order[: min(count, most)])
    else:
        chosen = candidates[:count]
    if count and not chosen:
        raise ValueError(f"none of {len(candidates)} prompts can be held out: give more, --heldout, or --eval-rows 0")
    # 2. Train on the rows of all other prompts
    held = {known.keys[row] for row in (chosen if heldout is None else heldout.keys)}
    index = [row for row, key in data.keys.items() if key not in held]
    if not index:
        raise ValueError("every row answers a held-out prompt: there is nothing left to train on")
    prompts = [known.rows[row]["input_ids"][: known.prompt_lengths[row]] for row in chosen]
    return index, prompts, len(data.keys) - len(index)
