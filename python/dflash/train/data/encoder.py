"""Convert source rows to token ids and loss masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...evaluate import (
    as_messages,
    parse_messages,
    parse_prompt,
    prompt_ids,
    render_chat,
    text_ids,
)
from ...terminal import listed, shortened

_WRITTEN = {"line", "sample", "seed", "model", "max_new_tokens"}  # fields that mark a row of dflash regenerate
_RENDERING = {  # arguments of transformers' function, which are not the template's
    *("conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
_Row = tuple[list[int], list[int]]  # ids and loss mask


class _Encoder:
    """Converts source rows to training rows."""

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
            raise ValueError(f"{where}: no response token to learn from")
        prompt = mask.index(1)
        if prompt < self.max_length:
            return [(ids[: self.max_length], mask[: self.max_length])]
        if self.skip_long:
            return []
        raise ValueError(
            f"{where}: the prompt has {prompt} tokens; a row holds at most {self.max_length}, response included"
        )

    def supervised(self, row: Mapping[str, Any], where: str) -> _Row:
        if "input_ids" in row:
            ids, mask = self.ids(row, "input_ids"), row.get("loss_mask")
            if not isinstance(mask, list) or len(mask) != len(ids) or not all(mark in (0, 1) for mark in mask):
                raise ValueError(f"loss_mask must hold a 0 or 1 for each of the {len(ids)} input_ids")
            return ids, [int(value) for value in mask]
        if "prompt_ids" in row and "response_ids" in row:
            prompt, response = self.ids(row, "prompt_ids"), self.ids(row, "response_ids")
            if row.get("response") not in (None, self.tokenizer.decode(response, skip_special_tokens=True)):
                raise ValueError("response_ids do not decode to response: the row is of a model with another tokenizer")
            return _joined((prompt, 0), (response, 1))
        if "response" in row:
            return self.answered(_prompt(row, where), row)
        if "messages" in row:
            return self.conversation(parse_messages(row, where))
        if any(field in row for field in ("prompt", "question", "turns")):
            raise ValueError("the prompt has no response: let the target write one with dflash regenerate")
        raise ValueError(
            f"a row needs a prompt and response, messages, text, or input_ids and loss_mask, got {listed(row)}"
        )

    def ids(self, row: Mapping[str, Any], field: str) -> list[int]:
        ids = row[field]
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise ValueError(f"{field} must be a list of token ids, got {shortened(ids)}")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"{field} must lie in 0 .. {self.vocab_size - 1}, got {shortened(bad)}")
        return ids

    def plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def answered(self, prompt: dict[str, Any], row: Mapping[str, Any]) -> _Row:
        response = row["response"]
        if not isinstance(response, str):
            raise ValueError(f"response must be text, got {shortened(response)}")
        asked = self.asked(row)
        given, template = prompt_ids(self.tokenizer, prompt, **asked), asked["template"]
        if row.get("finish_reason") == "length":
            return _joined((given, 0), (self.plain(response), 1))
        stop = self.stops[:1]
        if "messages" in prompt or not (asked["raw"] or self.tokenizer.chat_template is None):
            messages = as_messages(prompt)
            before = render_chat(self.tokenizer, messages, True, template)
            said = render_chat(self.tokenizer, [*messages, {"role": "assistant", "content": response}], False, template)
            if said.startswith(before):
                return _joined((given, 0), *self.until_stop(self.plain(said[len(before) :])))
            # The template's generation prompt has text that the finished turn drops, such as an empty thought.
            _, found, behind = said.rpartition(response.strip())
            closing = self.until_stop(self.plain(behind))[0][0] if found and response.strip() else []
            if closing and (closing[-1] in self.stops or closing[-1] in self.special):
                stop = closing
        return _joined((given, 0), (self.plain(response) + stop, 1))

    def asked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return how the row's prompt was encoded: its own fields if ``dflash regenerate`` wrote it, else ours."""
        ours = {"raw": self.raw, "bos": self.bos, "template": self.template}
        if not row.keys() >= _WRITTEN:
            return ours
        theirs = {"raw": bool(row.get("raw")), "bos": self.bos or bool(row.get("bos"))}
        theirs["template"] = _template(row.get("template"))
        if self.tokenizer.chat_template is not None:
            for name in ("raw", "template"):
                if ours[name] and theirs[name] != ours[name]:
                    raise ValueError(f"the row was written with {name} {theirs[name]}, it cannot use {ours[name]}")
        return theirs

    def rendered(self, messages: list[dict[str, Any]], asks: bool) -> str:
        return render_chat(self.tokenizer, messages, asks, self.template)

    def conversation(self, messages: list[dict[str, Any]]) -> _Row:
        """Encode a conversation up to the assistant's last turn, as the chat template renders it."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("messages has no assistant turn to learn from")
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
            raise ValueError("the chat template does not render the last answer after its generation prompt")
        return _joined(*pieces)

    def until_stop(self, ids: list[int]) -> list[tuple[list[int], int]]:
        """Split a turn after its stop token: the first part is supervised, the rest is context.

        If the turn has no known stop token, it ends at its last special token, provided that only blanks follow.
        Templates with their own end-of-turn token need this.
        """
        end = next((index + 1 for index, token in enumerate(ids) if token in self.stops), None)
        if end is None:
            last = next((i for i in reversed(range(len(ids))) if ids[i] in self.special), None)
            closes = last is not None and not self.tokenizer.decode(ids[last + 1 :]).strip()
            end = last + 1 if closes else len(ids)
        return [(ids[:end], 1), (ids[end:], 0)]

    def text(self, text: object, where: str) -> list[_Row]:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: text must be a non-empty string, got {shortened(text)}")
        ids = text_ids(self.tokenizer, text, bos=self.bos)
        if ids[-1:] != self.stops[:1]:
            ids += self.stops[:1]
        pieces = [ids[start : start + self.max_length] for start in range(0, len(ids), self.max_length)]
        return [(piece, [1] * len(piece)) for piece in pieces if len(piece) > 1]


def _template(arguments: object) -> dict[str, Any]:
    """Return a row's arguments for the chat template. The template itself comes from the tokenizer only."""
    if arguments is None:
        return {}
    if not isinstance(arguments, dict) or arguments.keys() & _RENDERING:
        raise ValueError(f"template must be an object of arguments of the chat template, got {shortened(arguments)}")
    return arguments


def _joined(*pieces: tuple[list[int], int]) -> _Row:
    return [token for ids, _ in pieces for token in ids], [mark for ids, mark in pieces for _ in ids]


def _prompt(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a row's prompt as ``{"prompt"}`` or ``{"messages"}``. Of several turns, the first is used."""
    messages, turns = parse_prompt(row, where)
    return {"prompt": turns[0]} if messages is None else {"messages": messages}
