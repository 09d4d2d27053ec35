"""The receipt of a call: what was asked and answered, and all that decided it. A file of one has an unknown origin."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from ..call import Call, GenerateArguments, TargetDefaults
from ..files import read_json, write_atomically
from ..grammar import Grammar
from ..ops import WeightStorage
from ..options import GeneratorOptions
from ..outputs import GenerateOutput, StreamEvent
from ..settings import SETTINGS, integer, resolve, resolve_rules
from ..targets import check_target, describe_config, embedding_table, version_of, versions, weights_digest
from ..terminal import MAX_SHOWN, listed, printable, shortened

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Bytes of a receipt: ids of a million tokens; its answers, and what else is read of it.
MAX_BYTES, MAX_ANSWERS = 2**23, 2**10
MAX_VOCABULARY, MAX_BLOCK_SIZE, MAX_POSITIONS = 2**24, 2**12, 2**31 - 1
# What rules may cost in memory and time: the words of bad_words_ids or logit_bias times the longest of them;
# no_repeat_ngram_size; stop strings, for which transformers looks at every token of the vocabulary; a grammar.
MAX_WORD_CELLS, MAX_NGRAM = 2**16, 2**8
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 2**6, 2**10  # of all together
MAX_GRAMMAR_CHARACTERS = 2**18

STATED = tuple(name for name, row in SETTINGS.items() if row.receipt == "stated")


@dataclass(frozen=True)
class RecordedSettings(dataclasses.make_dataclass("_Stated", [(name, Any) for name in STATED], frozen=True)):
    """The settings of a call that decide its text, as in `dflash.settings.GenerateArguments`, defaults filled in.

    ``logit_bias`` has sequences of token ids with the bias of the last of them; ``grammar`` is one for all answers.
    """

    def __post_init__(self) -> None:
        _check_cost(self)

    @classmethod
    def of(cls, call: Call) -> RecordedSettings:
        """Return the settings of a call. Raises ValueError if a rule is too large, or grammars differ."""
        stated = call.stated()
        if len(grammars := set(stated.pop("grammar"))) > 1:
            raise ValueError(f"a receipt states one grammar for all answers, got {len(grammars)}: make several calls")
        return cls(**stated, grammar=next(iter(grammars), None))

    @classmethod
    def parse(cls, content: object, vocab_size: int) -> RecordedSettings:
        """Check settings of unknown origin, as JSON has them; raises ValueError or TypeError."""
        # 1. What costs nothing: names, sizes of numbers, lists that are lists, null, which would mean "unset".
        given = check_names(content, STATED, "settings")
        _check_numbers(given)
        if missing := [name for name, value in given.items() if value is None]:
            raise ValueError(f"settings must not be null, got {listed(missing)}")
        for name, value in given.items():
            if isinstance(SETTINGS[name].off, tuple) and not isinstance(value, list):
                raise TypeError(f"{name} must be a list, got {shortened(value)}")
        words, biases = given["bad_words_ids"], _parse_biases(given["logit_bias"])
        _check_cells("bad_words_ids", [word for word in words if isinstance(word, list)])
        # 2. The values, as a call checks them.
        grammar = _parse_grammar(given.pop("grammar"))
        values = resolve({**given, "logit_bias": dict(biases)}, {}, vocab_size)
        resolve_rules(values, vocab_size)
        return cls(**{**{name: values[name] for name in STATED}, "grammar": grammar})

    def arguments(self) -> GenerateArguments:
        """Return them as arguments of a call, without the stop strings and the grammar, which need a tokenizer."""
        given = {name: getattr(self, name) for name in STATED if name not in ("stop_strings", "grammar")}
        if self.min_length:
            del given["min_new_tokens"]  # even 0 would turn min_length off
        given["logit_bias"] = {ids[0] if len(ids) == 1 else ids: bias for ids, bias in self.logit_bias}
        return cast("GenerateArguments", given)

    def to_json(self) -> dict[str, object]:
        """Return what `parse` takes; a bias of -inf, which JSON has no number for, is "-inf"."""
        content = dataclasses.asdict(self) | {"grammar": dataclasses.asdict(self.grammar) if self.grammar else {}}
        content["logit_bias"] = [[ids, "-inf" if bias == -math.inf else bias] for ids, bias in self.logit_bias]
        return content


def check_names(content: object, names: Sequence[str], what: str) -> dict[str, object]:
    """Return a JSON object as a dict. Raise unless it has exactly these names."""
    if not isinstance(content, Mapping):
        raise TypeError(f"{what} must be an object, got {shortened(content)}")
    if missing := [name for name in names if name not in content]:
        raise ValueError(f"{what} must have {listed(missing)}")
    if unknown := [name for name in content if name not in names]:
        raise ValueError(f"{what} has {listed(unknown)}, which this version of dflash does not know")
    return dict(content)


def _check_numbers(value: object) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"integers must fit in int64, got {shortened(value)}")
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item)


def _parse_grammar(value: object) -> Grammar | None:
    """Return a grammar from its kind and text, None from an empty object."""
    if value == {}:
        return None
    given = check_names(value, ["kind", "text"], "grammar")
    if not all(isinstance(part, str) for part in given.values()):
        raise TypeError(f"grammar must have a kind and a text, got {shortened(value)}")
    kind, text = str(given["kind"]), str(given["text"])
    _check_grammar(text)
    if kind not in ("json_schema", "regex", "lark"):
        raise ValueError(f"grammar must be of the kind json_schema, regex or lark, got {shortened(kind)}")
    try:
        return Grammar.json_schema(json.loads(text)) if kind == "json_schema" else getattr(Grammar, kind)(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"grammar: {printable(str(error)[:MAX_SHOWN])}") from error


def _expect_at_most(most: int, what: str, cost: int) -> None:
    if cost > most:
        raise ValueError(f"{what} must be at most {most} in a receipt, got {cost}")


def _check_grammar(text: str) -> None:
    _expect_at_most(MAX_GRAMMAR_CHARACTERS, "grammar: its characters", len(text))


def _parse_biases(value: Any) -> list[tuple[int | tuple[int, ...], object]]:
    """Return ``logit_bias`` as the items of the argument of that name."""
    pairs: list[tuple[int | tuple[int, ...], object]] = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], list) or not pair[0]:
            raise TypeError(
                f"logit_bias must be a list of pairs of a list of token ids and a bias, got {shortened(pair)}"
            )
        ids, bias = pair
        if not all(type(token) is int for token in ids):
            raise TypeError(f"logit_bias must hold token ids, got {shortened(ids)}")
        pairs.append((ids[0] if len(ids) == 1 else tuple(ids), -math.inf if bias == "-inf" else bias))
    if len(dict(pairs)) < len(pairs):
        raise ValueError("logit_bias must have each sequence of token ids once")
    _check_cells("logit_bias", [key for key, _ in pairs if isinstance(key, tuple)])
    return pairs


def _check_cells(name: str, words: Sequence[Sequence[int]]) -> None:
    words = [word for word in words if len(word) > 1]
    cells = len(words) * max(map(len, words), default=0)
    _expect_at_most(MAX_WORD_CELLS, f"{name}: sequences times the longest of them", cells)


def _check_cost(settings: RecordedSettings) -> None:
    """Raise if checking a text by these settings could cost memory or time out of proportion to it."""
    _check_cells("bad_words_ids", settings.bad_words_ids)
    _check_cells("logit_bias", [ids for ids, _ in settings.logit_bias])
    _expect_at_most(MAX_NGRAM, "no_repeat_ngram_size", settings.no_repeat_ngram_size)
    _expect_at_most(MAX_POSITIONS, "max_new_tokens", settings.max_new_tokens)
    _expect_at_most(MAX_STOP_STRINGS, "stop_strings: their number", len(settings.stop_strings))
    _expect_at_most(MAX_STOP_CHARACTERS, "stop_strings: their characters", sum(map(len, settings.stop_strings)))
    if settings.grammar is not None:
        _check_grammar(settings.grammar.text)


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Fingerprints:
    """What a text was computed with.

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
        """Compute them for a target. Reads all weights, which takes up to a second per GB and core.

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
        given: Any = check_names(content, [field.name for field in dataclasses.fields(cls)], "fingerprints")
        for name, value in given.items():
            is_text = isinstance(value, str) and len(value) <= MAX_SHOWN
            if name != "vocab_size" and not is_text and not (value is None and name in ("tokenizer", "chat_template")):
                raise TypeError(f"{name} must be a text of at most {MAX_SHOWN} characters, got {shortened(value)}")
        if not 1 <= integer("vocab_size", given["vocab_size"]) <= MAX_VOCABULARY:
            raise ValueError(f"vocab_size must lie in 1 .. {MAX_VOCABULARY}, got {shortened(given['vocab_size'])}")
        if given["dtype"] not in DTYPES:
            raise ValueError(f"dtype must be {', '.join(DTYPES)}, got {shortened(given['dtype'])}")
        return cls(**given)

    def differences(self, other: Fingerprints) -> dict[str, tuple[object, object]]:
        """Return, by name, what differs: the value here and that of ``other``."""
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
    # How the last batch was padded or cut is not part of it.
    return json.dumps({key: value for key, value in definition.items() if key not in ("padding", "truncation")})


_FORMAT = "dflash-receipt-1"
_REASONS = ("stop", "length")


@dataclass(frozen=True)
class RecordedAnswer:
    """One row of a call.

    Attributes:
        prompt: its token ids, without padding.
        ids: the answer's token ids, the stop token included.
        seed: of the row's keyed noise (`dflash.sampling.fold`); means nothing at temperature 0.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    seed: int
    finish_reason: str

    @classmethod
    def parse(cls, content: object, vocab_size: int) -> RecordedAnswer:
        """Check an answer of unknown origin; raises TypeError or ValueError."""
        given = check_names(content, [field.name for field in dataclasses.fields(cls)], "an answer")
        seed, reason = integer("seed", given["seed"]), given["finish_reason"]
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must fit in int64, got {shortened(seed)}")
        if reason not in _REASONS:
            raise ValueError(f"finish_reason must be {' or '.join(_REASONS)}, got {shortened(reason)}")
        for name in ("prompt", "ids"):
            ids = given[name]
            if not isinstance(ids, list) or not ids:
                raise TypeError(f"{name} must be a list of at least one token id, got {shortened(ids)}")
            for token in ids:
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise ValueError(f"{name} must hold token ids in 0 .. {vocab_size - 1}, got {shortened(token)}")
        return cls(tuple(given["prompt"]), tuple(given["ids"]), seed, str(reason))


@dataclass(frozen=True)
class Receipt:
    """What `dflash.verify` needs to derive every token of a call's answers again.

    It is made by a `Recorder`. It says nothing of the drafter, and needs none.

    Attributes:
        answers: one per row of the call.
        settings: temperature, filters, stop lists, logit rules and grammar.
        fingerprints: of the target and the tokenizer.
        block_size: rows per answer of a step. In bf16 the same bits come from the same shapes.
        batch_size: answers that a step had room for, those of other calls included.
        prefill_chunk: prompt tokens per pass.
        weights: how the target's were stored: "int8", or None for the weights themselves.
    """

    answers: tuple[RecordedAnswer, ...]
    settings: RecordedSettings
    fingerprints: Fingerprints
    block_size: int
    batch_size: int
    prefill_chunk: int
    weights: WeightStorage = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Receipt:
        """Read a file of unknown origin.

        Raises:
            ValueError: this version cannot check it; the message begins with the path.
        """
        where = printable(path)
        content = read_json(Path(path), MAX_BYTES, unique_keys=True)
        try:
            return cls.parse(content)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where} is not a receipt that can be checked: {error}") from error

    @classmethod
    def parse(cls, content: object) -> Receipt:
        """Check the content of a receipt's JSON, as ``json.loads`` returns it; raises ValueError or TypeError."""
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f'its "format" must be {_FORMAT!r}')
        given = check_names(content, ["format", *(field.name for field in dataclasses.fields(cls))], "a receipt")
        fingerprints, rows = Fingerprints.parse(given["fingerprints"]), given["answers"]
        if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_ANSWERS:
            raise ValueError(f"answers must be a list of 1 to {MAX_ANSWERS}, got {shortened(rows)}")
        settings = RecordedSettings.parse(given["settings"], fingerprints.vocab_size)
        answers = tuple(RecordedAnswer.parse(row, fingerprints.vocab_size) for row in rows)
        ranges = {"block_size": (1, MAX_BLOCK_SIZE), "batch_size": (len(rows), MAX_ANSWERS)}
        ranges["prefill_chunk"] = 1, MAX_POSITIONS
        for name, (low, high) in ranges.items():
            if not low <= integer(name, given[name]) <= high:
                raise ValueError(f"{name} must lie in {low} .. {high}, got {shortened(given[name])}")
        if (weights := given["weights"]) not in ("int8", None):
            raise ValueError(f'weights must be "int8" or null, got {shortened(weights)}')
        return cls(answers, settings, fingerprints, **{name: given[name] for name in ranges}, weights=weights)

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
        arguments: of the call, see `dflash.call.GenerateArguments`. With ``tokenizer`` its fingerprints are stated too.

    Attributes:
        arguments: what to pass to the call: the same, with a seed for every row.

    Raises:
        ValueError: the answer could not be checked: ``acceptance="rejection"``, Python processors or criteria, several
            grammars, or rules larger than a receipt may state; or the call itself is wrong.
        TypeError: an argument is unknown or has the wrong type.
    """

    def __init__(
        self,
        target: nn.Module,
        ids: Tensor,
        *,
        fingerprints: Fingerprints | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> None:
        target = check_target(target)
        call = Call.resolve(TargetDefaults.of(target), ids, arguments)
        if call.acceptance == "rejection":
            raise ValueError(
                'a receipt needs acceptance="keyed", got "rejection", whose text depends on the drafter and could not '
                "be derived again"
            )
        if unstated := [name for name, value in arguments.items() if not SETTINGS[name].receipt and value is not None]:
            raise ValueError(
                f"a receipt cannot state {listed(unstated)}: use the rules of dflash.call.GenerateArguments"
            )
        self._settings = RecordedSettings.of(call)
        rows = len(call.prompts)
        self._seeds = call.sampling.seeds(rows)  # drawn now if the call names none
        self.arguments = cast("GenerateArguments", {**arguments, "seed": self._seeds})
        self._target, self._fingerprints, self._tokenizer = target, fingerprints, arguments.get("tokenizer")
        self._prompts: list[list[int]] = [prompt.tolist() for prompt in call.prompts]
        self._width = call.ids.shape[1]
        self._answers: list[list[int]] = [[] for _ in range(rows)]
        self._last: StreamEvent | GenerateOutput | None = None

    def add(self, event: StreamEvent) -> None:
        """Add an event of `dflash.stream`."""
        for answer, new in zip(self._answers, event.ids, strict=True):
            answer.extend(new)
        self._last = event

    def receipt(self, output: GenerateOutput | None = None) -> Receipt:
        """Return the receipt; ``output`` is that of `dflash.generate`, None if the events of a stream were added.

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
        shapes = statistics.block_size, len(self._prompts), GeneratorOptions.prefill_chunk
        return Receipt(tuple(answers), self._settings, fingerprints, *shapes, statistics.weights)
