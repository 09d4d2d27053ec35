"""The receipt of a call: prompts, answers, and everything that decided them. Its files come from strangers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..call import Call, GenerateArguments, TargetDefaults
from ..files import read_json, write_atomically
from ..grammar import Grammar
from ..options import OPTIONS
from ..outputs import GenerateOutput, StreamEvent
from ..settings import SETTINGS, WeightStorage, resolve, resolve_rules
from ..targets import check_target, describe_config, embedding_table, version_of, versions, weights_digest
from ..terminal import MAX_SHOWN, listed, printable, shortened

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Bytes of a receipt, enough for the ids of a million tokens, and its answers.
MAX_BYTES, MAX_ANSWERS = 2**23, 2**10
MAX_VOCABULARY, MAX_BLOCK_SIZE, MAX_POSITIONS = 2**24, 2**12, 2**31 - 1

STATED = tuple(name for name, row in SETTINGS.items() if row.receipt == "stated")


# ---------------------------------------------------------------------------------------------- values of a file

Check = tuple[str, Callable[[Any], bool]]
"""Words that complete "NAME must ...", and the check."""

_INT64 = -(2**63), 2**63 - 1
_ANY: Check = "", lambda _: True  # checked later
_GIVEN: Check = "not be null", lambda value: value is not None  # null would mean "unset" to a call
_LIST: Check = "be a list", lambda value: isinstance(value, list)


def _within(low: int, high: int) -> Check:
    return f"lie in {low} .. {high}", lambda value: type(value) is int and low <= value <= high


def _one_of(*choices: str | None) -> Check:
    return f"be {' or '.join(map(json.dumps, choices))}", lambda value: value in choices


def _text(most: int) -> Check:
    return f"be a text of at most {most} characters", lambda value: isinstance(value, str) and len(value) <= most


def _is_list_of(value: object, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(holds, value))


def parse_object(content: object, checks: Mapping[str, Check], what: str) -> dict[str, Any]:
    """Return a stranger's JSON object as a dict. Raise unless it has exactly these names, with allowed values."""
    if not isinstance(content, Mapping):
        raise TypeError(f"{what} must be an object, got {shortened(content)}")
    if missing := [name for name in checks if name not in content]:
        raise ValueError(f"{what} must have {listed(missing)}")
    if unknown := [name for name in content if name not in checks]:
        raise ValueError(f"{what} has {listed(unknown)}, which this version of dflash does not know")
    for name, (wanted, holds) in checks.items():
        if not holds(content[name]):
            raise ValueError(f"{name} must {wanted}, got {shortened(content[name])}")
    return dict(content)


def _are_digests(value: object) -> bool:
    """Return True for a few names with a SHA-256 each."""
    is_small = isinstance(value, Mapping) and len(value) <= MAX_SHOWN
    return is_small and all(re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in value.values())


def _check_integers(content: object) -> None:
    """Raise ValueError for an integer that int64 cannot hold, at any depth."""
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, int) and not _INT64[0] <= value <= _INT64[1]:
            raise ValueError(f"integers must fit in int64, got {shortened(value)}")
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


# ---------------------------------------------------------------------------------------------- the settings


@dataclass(frozen=True)
class RecordedSettings(dataclasses.make_dataclass("_Stated", [(name, Any) for name in STATED], frozen=True)):
    """The settings of a call that decide its text, as in `dflash.settings.GenerateArguments`, defaults filled in.

    ``logit_bias`` has sequences of token ids with the bias of the last of them; ``grammar`` is one for all answers.
    """

    def __post_init__(self) -> None:
        """Raise ValueError if no answer can have so many tokens."""
        if self.max_new_tokens > MAX_POSITIONS:
            raise ValueError(f"max_new_tokens must be at most {MAX_POSITIONS}, got {self.max_new_tokens}")

    @classmethod
    def of(cls, call: Call) -> RecordedSettings:
        """Return the settings of a call. Raises ValueError if grammars differ."""
        stated = call.recorded()
        if len(grammars := set(stated.pop("grammar"))) > 1:
            raise ValueError(f"a receipt states one grammar for all answers, got {len(grammars)}: make several calls")
        return cls(**stated, grammar=next(iter(grammars), None))

    @classmethod
    def parse(cls, content: object, vocab_size: int) -> RecordedSettings:
        """Check settings of unknown origin, as JSON has them; raises ValueError or TypeError."""
        checks = {name: _LIST if isinstance(SETTINGS[name].off, tuple) else _GIVEN for name in STATED}
        given = parse_object(content, checks, "settings")
        _check_integers(given)
        grammar = _parse_grammar(given.pop("grammar"))
        given["logit_bias"] = _parse_biases(given["logit_bias"])
        values = resolve(given, {}, vocab_size)  # as a call checks them
        resolve_rules(values, vocab_size)
        return cls(**{**{name: values[name] for name in STATED}, "grammar": grammar})

    def arguments(self) -> GenerateArguments:
        """Return them as arguments of a call, without the stop strings and the grammar, which need a tokenizer."""
        given = {name: getattr(self, name) for name in STATED if name not in ("stop_strings", "grammar")}
        if self.min_length:
            del given["min_new_tokens"]  # even 0 would turn min_length off
        return cast("GenerateArguments", {**given, "logit_bias": dict(self.logit_bias)})

    def to_json(self) -> dict[str, object]:
        """Return the settings for `parse`. A bias of -inf, for which JSON has no number, is "-inf"."""
        content = dataclasses.asdict(self)
        biases = [[ids, "-inf" if bias == -math.inf else bias] for ids, bias in self.logit_bias]
        return {**content, "logit_bias": biases, "grammar": content["grammar"] or {}}


def _parse_grammar(value: object) -> Grammar | None:
    """Return a grammar from its kind and text, None from an empty object."""
    if value == {}:
        return None
    checks = {"kind": _one_of("json_schema", "regex", "lark"), "text": _text(MAX_BYTES)}
    try:
        given = parse_object(value, checks, "it")
        text = json.loads(given["text"]) if given["kind"] == "json_schema" else given["text"]
        return getattr(Grammar, given["kind"])(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"grammar: {printable(str(error)[:MAX_SHOWN])}") from error


def _parse_biases(pairs: Sequence[Any]) -> dict[tuple[int, ...], object]:
    """Return ``logit_bias`` as the argument of that name."""
    found: dict[tuple[int, ...], object] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and _is_list_of(pair[0], lambda token: type(token) is int)):
            raise TypeError(f"logit_bias must be a list of pairs [token ids, bias], got {shortened(pair)}")
        found[tuple(pair[0])] = -math.inf if pair[1] == "-inf" else pair[1]
    if len(found) < len(pairs):
        raise ValueError("logit_bias must have each sequence of token ids once")
    return found


# ---------------------------------------------------------------------------------------------- the fingerprints


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of everything that computed a text.

    Attributes:
        weights: SHA-256 of the target's ``state_dict()``: names, dtypes, shapes and values.
        config: SHA-256 of the target's text config, without keys that change no number.
        dtype: of the target's embeddings: float32, bfloat16 or float16.
        vocab_size: rows of the target's embedding table.
        tokenizer: SHA-256 of the tokenizer's vocabulary and rules; None without a tokenizer.
        chat_template: SHA-256 of the tokenizer's chat template; None if it has none.
        device: where the target was: "cpu", or the kind of accelerator.
        dflash, torch, transformers: versions.
        llguidance: version, or "not installed". It decides the text under a grammar only.
    """

    weights: str
    config: str
    dtype: str
    vocab_size: int
    tokenizer: str | None
    chat_template: str | None
    device: str
    dflash: str
    torch: str
    transformers: str
    llguidance: str

    @classmethod
    def of(cls, target: nn.Module, tokenizer: object = None) -> Fingerprints:
        """Compute the fingerprints of a target. Reads all weights, at up to a second per GB and core.

        Every process of a target that is spread over several must call. Raises ValueError for an unsupported target.
        """
        target = check_target(target)
        table = embedding_table(target)
        template = getattr(tokenizer, "chat_template", None)
        return cls(
            weights=weights_digest(target),
            config=_digest(describe_config(target)),
            dtype=str(table.dtype).removeprefix("torch."),
            vocab_size=table.shape[0],
            tokenizer=None if tokenizer is None else _digest(_describe_tokenizer(tokenizer)),
            chat_template=None if template is None else _digest(json.dumps(template, sort_keys=True)),
            device=table.device.type,
            **versions(),
            llguidance=version_of("llguidance"),
        )

    @classmethod
    def parse(cls, content: object) -> Fingerprints:
        """Check fingerprints of unknown origin; raises ValueError or TypeError."""
        wanted, is_text = _text(MAX_SHOWN)
        checks = {field.name: (wanted, is_text) for field in dataclasses.fields(cls)}
        checks |= dict.fromkeys(("tokenizer", "chat_template"), (wanted, lambda text: text is None or is_text(text)))
        checks |= {"dtype": _one_of("float32", "bfloat16", "float16"), "vocab_size": _within(1, MAX_VOCABULARY)}
        return cls(**parse_object(content, checks, "fingerprints"))

    def differences(self, other: Fingerprints) -> dict[str, tuple[object, object]]:
        """Return the differences by name: the value here and in ``other``."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return {name: (value, theirs[name]) for name, value in mine.items() if value != theirs[name]}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _describe_tokenizer(tokenizer: Any) -> str:
    """Return a tokenizer's definition as JSON: all of it for a fast one, else its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(sorted(tokenizer.get_vocab().items()))
    definition: Mapping[str, Any] = json.loads(backend.to_str())
    # Leave out how the last batch was padded or cut.
    return json.dumps({key: value for key, value in definition.items() if key not in ("padding", "truncation")})


def picture_digests(pictures: Mapping[str, Tensor] | None) -> dict[str, str]:
    """Return the SHA-256 of each tensor of a call's pictures: of its dtype, shape and values."""
    found = {}
    for name, tensor in (pictures or {}).items():
        head = f"{tensor.dtype} {list(tensor.shape)} ".encode()
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = hashlib.sha256(head + values.numpy().tobytes()).hexdigest()
    return found


# ---------------------------------------------------------------------------------------------- the receipt

_FORMAT = "dflash-receipt-1"


@dataclass(frozen=True)
class RecordedAnswer:
    """One row of a call.

    Attributes:
        prompt: its token ids, without padding.
        ids: the answer's token ids, the stop token included.
        seed: of the row's keyed noise (`dflash.sampling.fold`); unused at temperature 0.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    seed: int
    finish_reason: str

    @classmethod
    def parse(cls, content: object, vocab_size: int) -> RecordedAnswer:
        """Check an answer of unknown origin; raises TypeError or ValueError."""
        _, is_token = _within(0, vocab_size - 1)
        ids = f"hold token ids in 0 .. {vocab_size - 1}", lambda value: _is_list_of(value, is_token)
        checks = {"prompt": ids, "ids": ids, "seed": _within(*_INT64), "finish_reason": _one_of("stop", "length")}
        given = parse_object(content, checks, "an answer")
        return cls(**given | {"prompt": tuple(given["prompt"]), "ids": tuple(given["ids"])})


@dataclass(frozen=True)
class Receipt:
    """Record from which `dflash.verify` derives every token of a call's answers again.

    A `Recorder` makes it. It does not mention the drafter, and checking needs none.

    Attributes:
        answers: one per row of the call.
        settings: temperature, filters, stop lists, logit rules and grammar.
        fingerprints: of the target and the tokenizer.
        block_size: rows per answer of a step. In bf16 the same bits come from the same shapes.
        batch_size: answers that a step had room for, including other calls'.
        prefill_chunk: prompt tokens per pass.
        weights: how the target's weights were stored: "int8", or None for unchanged.
        pictures: digests of the tensors of the prompts' pictures, by name (`picture_digests`).
    """

    answers: tuple[RecordedAnswer, ...]
    settings: RecordedSettings
    fingerprints: Fingerprints
    block_size: int
    batch_size: int
    prefill_chunk: int
    weights: WeightStorage = None
    pictures: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Receipt:
        """Read a file of unknown origin.

        Raises:
            ValueError: this version cannot check it; the message begins with the path.
        """
        content = read_json(Path(path), MAX_BYTES, unique_keys=True)
        try:
            return cls.parse(content)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{printable(path)} is not a receipt that can be checked: {error}") from error

    @classmethod
    def parse(cls, content: object) -> Receipt:
        """Check the content of a receipt's JSON, as ``json.loads`` returns it; raises ValueError or TypeError."""
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f'its "format" must be {_FORMAT!r}')
        checks = {
            **dict.fromkeys(["format", *(field.name for field in dataclasses.fields(cls))], _ANY),
            "answers": (f"be a list of 1 to {MAX_ANSWERS}", lambda v: _LIST[1](v) and 1 <= len(v) <= MAX_ANSWERS),
            "block_size": _within(1, MAX_BLOCK_SIZE),
            "batch_size": _within(1, MAX_ANSWERS),
            "prefill_chunk": _within(1, MAX_POSITIONS),
            "weights": _one_of("int8", None),
            "pictures": ("map names to SHA-256 digests", _are_digests),
        }
        given = parse_object({"pictures": {}, **content}, checks, "a receipt")
        if given["batch_size"] < len(given["answers"]):
            raise ValueError(f"batch_size must be at least the number of answers, got {given['batch_size']}")
        fingerprints = Fingerprints.parse(given["fingerprints"])
        settings = RecordedSettings.parse(given["settings"], fingerprints.vocab_size)
        answers = tuple(RecordedAnswer.parse(row, fingerprints.vocab_size) for row in given["answers"])
        del given["format"]
        return cls(**given | {"answers": answers, "settings": settings, "fingerprints": fingerprints})

    def to_json(self) -> str:
        """Return the receipt as JSON."""
        content = {"format": _FORMAT, **dataclasses.asdict(self), "settings": self.settings.to_json()}
        return json.dumps(content, allow_nan=False)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the receipt as a JSON file, which appears whole or not at all. Raises OSError."""
        write_atomically(Path(path), lambda unfinished: unfinished.write_text(self.to_json() + "\n", encoding="utf-8"))


class Recorder:
    """Makes the receipt of one call of `dflash.generate`, `dflash.stream` or a `Generator`.

    >>> recorder = dflash.Recorder(target, ids, tokenizer=tokenizer, temperature=1.0, max_new_tokens=200)
    >>> output = dflash.generate(target, draft, ids, return_dict_in_generate=True, **recorder.arguments)
    >>> recorder.receipt(output).write("receipt.json")

    With `dflash.stream`, `add` every event, then ask for the receipt.

    Args:
        target: the target of the call.
        ids: ``[batch, length]`` int64 or int32 prompts.
        fingerprints: of the target and its tokenizer, if they are known already; else `receipt` computes them.
        arguments: of the call, see `dflash.call.GenerateArguments`. With ``tokenizer`` the receipt states its
            fingerprints too.

    Attributes:
        arguments: to pass to the call: the given ones, with a seed for every row.

    Raises:
        ValueError: the answer could not be checked: ``acceptance="rejection"``, Python processors or criteria, several
            grammars, or rules larger than a receipt may state; or the call itself is wrong.
        TypeError: an argument is unknown or has the wrong type.
    """

    def __init__(
        self, target: nn.Module, ids: Tensor, *, fingerprints: Fingerprints | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> None:  # fmt: skip
        target = check_target(target)
        call = Call.resolve(TargetDefaults.of(target), ids, arguments)
        if call.acceptance == "rejection":
            raise ValueError('a receipt needs acceptance="keyed", got "rejection", whose text depends on the drafter')
        if call.pictures and call.longest < call.ids.shape[1]:
            raise ValueError("a receipt of prompts with pictures needs one row without padding: cut the columns off")
        if unstated := [name for name, value in arguments.items() if not SETTINGS[name].receipt and value is not None]:
            raise ValueError(f"a receipt cannot state {listed(unstated)}: use rules of dflash.call.GenerateArguments")
        self._settings = RecordedSettings.of(call)
        self._seeds = call.sampling.seeds(len(call.prompts))  # drawn now if the call names none
        self.arguments = cast("GenerateArguments", {**arguments, "seed": self._seeds})
        self._target, self._fingerprints, self._tokenizer = target, fingerprints, arguments.get("tokenizer")
        self._prompts: list[list[int]] = [prompt.tolist() for prompt in call.prompts]
        self._width = call.ids.shape[1]
        self._answers: list[list[int]] = [[] for _ in call.prompts]
        self._last: StreamEvent | GenerateOutput | None = None

    def add(self, event: StreamEvent) -> None:
        """Add an event of `dflash.stream`."""
        for answer, new in zip(self._answers, event.ids, strict=True):
            answer.extend(new)
        self._last = event

    def receipt(self, output: GenerateOutput | None = None) -> Receipt:
        """Return the receipt. ``output`` comes from `dflash.generate`; None if the events of a stream were added.

        Raises:
            ValueError: the call has not ended, or ``output`` has another number of rows.
        """
        if output is not None:
            rows = zip(output.sequences[:, self._width :].tolist(), output.statistics.num_new_tokens, strict=True)
            self._answers, self._last = [row[:count] for row, count in rows], output
        reasons = [None] if self._last is None else self._last.finish_reasons
        if None in reasons or len(self._answers) != len(self._prompts):
            raise ValueError(f"a receipt needs all {len(self._prompts)} answers of the call, and these to their end")
        parts = zip(self._prompts, self._answers, self._seeds, reasons, strict=True)
        answers = (RecordedAnswer(tuple(prompt), tuple(ids), seed, str(reason)) for prompt, ids, seed, reason in parts)
        fingerprints = self._fingerprints or Fingerprints.of(self._target, self._tokenizer)
        statistics = cast("StreamEvent | GenerateOutput", self._last).statistics
        shapes = statistics.block_size, len(self._prompts), cast(int, OPTIONS["prefill_chunk"].off)
        digests = picture_digests(self.arguments.get("pictures"))
        return Receipt(tuple(answers), self._settings, fingerprints, *shapes, statistics.weights, digests)
