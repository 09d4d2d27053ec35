"""Prompts and training rows from JSONL, chats, plain text or the hub.

:func:`load_prompts` gives what :mod:`dflash.train.regenerate` answers, :func:`load_rows` what training reads. Both read
the whole source before any other work starts, and say what is wrong with a row by its line.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

__all__ = ["load_prompts", "load_rows", "prompt_ids"]

_PROMPT_FIELDS = "prompt, messages, question or turns"
_WRITTEN = {"line", "sample", "seed", "model", "max_new_tokens"}  # of a row of dflash regenerate
_TABLE_ROWS = 1024  # rows held as Python lists before they become Arrow
_TEXT_SUFFIXES = (".txt", ".txt.gz")
_JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


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
    prompts = [{"line": line, **_prompt(row, where)} for where, line, row in _records(source, split)]
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
    encode = _Encoder(tokenizer, max_length, raw, bos, template or {}, vocab_size or len(tokenizer), skip_long)
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
        for where, _, row in _records(place, split):
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


def prompt_ids(
    tokenizer: Any,
    prompt: Mapping[str, Any],
    *,
    raw: bool = False,
    bos: bool = False,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids that the target is given for a prompt of :func:`load_prompts`.

    A ``prompt`` is a user's message where the tokenizer has a chat template, unless ``raw``; ``template`` holds
    arguments for that.

    Raises:
        ValueError: messages without a chat template, or ``bos`` without a BOS token.
    """
    if "messages" in prompt or not (raw or tokenizer.chat_template is None):
        text = _rendered(tokenizer, _as_messages(prompt), True, template or {})
        return tokenizer(text, add_special_tokens=False).input_ids
    ids = tokenizer(prompt["prompt"]).input_ids
    if bos:
        if tokenizer.bos_token_id is None:
            raise ValueError("--bos: this tokenizer has no BOS token")
        ids = [tokenizer.bos_token_id, *ids]
    return ids


def need_datasets() -> Any:
    """The ``datasets`` package, or an error that names the extra it comes with."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("this needs the datasets package: pip install 'dflash-engine[train]'") from error
    return datasets


# ---------------------------------------------------------------------------------------------- sources


def _records(source: str | os.PathLike, split: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The rows of one source: what messages call the row's place, its line, itself."""
    name = os.fspath(source)
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"data {name!r} is a folder: name its files")
    if path.is_file():
        if name.endswith(_TEXT_SUFFIXES):
            text = "".join(line for _, line in _lines(path))
            if text.strip():
                yield str(path), 1, {"text": text}
            return
        for line, content in _lines(path):
            if not content.strip():
                continue
            where = f"{path}, line {line}"
            try:
                row = json.loads(content)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}")
            yield where, line, row
        return
    if name.startswith((".", "/", "~")) or name.endswith(_TEXT_SUFFIXES + _JSON_SUFFIXES) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no data file {name!r}")
    hub, _, config = name.partition(":")
    try:
        rows = need_datasets().load_dataset(hub, config or None, split=split)
    except Exception as error:  # of several libraries: not found, gated, offline, no such config or split
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"data {name!r} is neither a file nor a data set within reach: {reason}") from error
    for line, row in enumerate(rows, 1):
        yield f"{name}, row {line}", line, {key: value for key, value in row.items() if value is not None}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text after line {number}: {error.reason}") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a whole gzip file after line {number}: {error}") from error


def _prompt(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``{"prompt"}`` or ``{"messages"}`` of a row, whatever its source calls it."""
    if "messages" in row or isinstance(row.get("prompt"), list):
        messages = _messages(row, where)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not any(message["role"] != "system" for message in messages):
            raise ValueError(f"{where}: messages has nothing to answer: no message before the assistant's")
        return {"messages": messages}
    for field in ("prompt", "question", "turns"):
        if field in row:
            value = row[field]
            if field == "turns" and isinstance(value, list) and value:
                value = value[0]
            if not isinstance(value, str) or not value:
                raise ValueError(f"{where}: {field} must be text that is not empty, got {_short(value)}")
            return {"prompt": value}
    raise ValueError(f"{where}: a prompt needs {_PROMPT_FIELDS}, got {_fields(row)}")


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    messages = row.get("messages", row.get("prompt"))
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: messages must be a list of role and content, got {_short(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{where}: message {number} must have role and content, both text, got {_short(message)}")
    return [dict(message) for message in messages]


def _as_messages(prompt: Mapping[str, Any]) -> list[dict[str, Any]]:
    return prompt["messages"] if "messages" in prompt else [{"role": "user", "content": prompt["prompt"]}]


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], asks: bool, template: Mapping[str, Any]) -> str:
    if tokenizer.chat_template is None:
        raise ValueError("messages need a chat template, and this tokenizer has none")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False, **template)
    except Exception as error:  # whatever a template raises: roles that do not alternate, a role it does not know
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def _fields(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "no field"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
        skip_long: bool,
    ) -> None:
        self.tokenizer, self.max_length, self.vocab_size = tokenizer, max_length, vocab_size
        self.raw, self.bos, self.template, self.skip_long = raw, bos, template, skip_long

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
            return self.conversation(_messages(row, where))
        if any(field in row for field in ("prompt", "question", "turns")):
            raise ValueError("a prompt without a response: let the target write one, with dflash regenerate")
        raise ValueError(
            f"a row needs a prompt and response, messages, text, or input_ids and loss_mask, got {_fields(row)}"
        )

    def ids(self, row: Mapping[str, Any], field: str) -> list[int]:
        ids = row[field]
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise ValueError(f"{field} must be a list of token ids, got {_short(ids)}")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"{field} must lie in 0 .. {self.vocab_size - 1}, got {bad}")
        return ids

    def plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @property
    def stop(self) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return [] if eos is None else [eos]

    def answered(self, prompt: dict[str, Any], row: Mapping[str, Any]) -> _Row:
        response = row["response"]
        if not isinstance(response, str):
            raise ValueError(f"response must be text, got {_short(response)}")
        asked = self.asked(row)
        given, template = prompt_ids(self.tokenizer, prompt, **asked), asked["template"]
        if row.get("finish_reason") == "length":
            return _joined((given, 0), (self.plain(response), 1))
        if "messages" in prompt or not (asked["raw"] or self.tokenizer.chat_template is None):
            messages = _as_messages(prompt)
            before = _rendered(self.tokenizer, messages, True, template)
            said = _rendered(self.tokenizer, [*messages, {"role": "assistant", "content": response}], False, template)
            if said.startswith(before):  # else the template asks with more than it keeps: an empty thought, say
                return _joined((given, 0), *self.until_stop(self.plain(said[len(before) :])))
        return _joined((given, 0), (self.plain(response) + self.stop, 1))

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
        return _rendered(self.tokenizer, messages, asks, self.template)

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
        """A turn up to its stop token, supervised, and what the template writes behind that."""
        end = next((index + 1 for index, token in enumerate(ids) if token in self.stop), len(ids))
        return [(ids[:end], 1), (ids[end:], 0)]

    def text(self, text: object, where: str) -> list[_Row]:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: text must be text that is not empty, got {_short(text)}")
        ids = self.tokenizer(text).input_ids
        if self.bos and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id, *ids]
        ids += self.stop
        pieces = [ids[start : start + self.max_length] for start in range(0, len(ids), self.max_length)]
        return [(piece, [1] * len(piece)) for piece in pieces if len(piece) > 1]


def _joined(*pieces: tuple[list[int], int]) -> _Row:
    return [token for ids, _ in pieces for token in ids], [mark for ids, mark in pieces for _ in ids]
