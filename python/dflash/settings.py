"""The table of settings: every argument of a call in one row.

`GenerateArguments` gives each argument its type, and in the same row its `Setting`: how it is checked, what holds if
nobody sets it, and its names elsewhere. Calls, options of the command, fields of requests, receipts and the entry
points for transformers read this table. A new logit rule is a row here and a class in `dflash.sampling.rules`.
"""

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypedDict, runtime_checkable

from .streaming import Streamer, Tokenizer

if TYPE_CHECKING:  # a slow import, and the command's help comes from this table
    from torch import Tensor

MAX_LOGPROBS = 20
"""The most probable tokens per position that a call may ask for; OpenAI's limit."""

# What one call's rules may cost in memory and time, since strangers send them to servers and in files. Sequences of ids
# are counted as rows of the longest; those of one id do not count. Every step looks for the stop strings.
_MAX_NGRAM, _MAX_SEQUENCES = 2**8, 2**16
MAX_STOP_STRINGS, _MAX_CHARACTERS = 2**7, 2**12

MTP = "mtp"
"""Names the head of the target's own files in place of a drafter."""

TreeSize = int | Literal["auto"] | None
"""Rows of a draft tree; "auto" to choose them as a call proceeds; None for chains."""

WeightStorage = Literal["int8"] | None
"""How the weights of products are stored: "int8" for copies in 8 bits, None for the weights as they are."""

BlockSize = int | Literal["auto"] | None
"""Rows of a chain; "auto" to choose them as a call proceeds; None for the drafter's own."""

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""``(input_ids [1, length] int64, scores [1, vocab] float32) -> scores``."""
StoppingCriterion = Callable[["Tensor", None], "bool | Tensor"]
"""``(input_ids [1, length] int64, None) -> bool``, or a tensor with one element."""

Check = Callable[[str, object, int], object]
"""``(name, value, vocab_size) -> checked value``; raises TypeError or ValueError."""


@runtime_checkable
class AnswerGrammar(Protocol):
    """A `dflash.Grammar` as the core uses it, which does not import its package."""

    def begin(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> Any:
        """Return the place of a row that has not begun, a `dflash.grammar.Matcher`."""


@dataclass(frozen=True)
class Setting:
    """One argument of a call, or option of a generator: how it is checked, and its names elsewhere.

    Attributes:
        check: returns the checked value; None if it is checked where it is used.
        off: the value if neither the call nor the generation_config has one. A rule with this value is not applied.
        kind: ``"sampling"`` for a field of `dflash.sampling.SamplingArguments`, ``"rule"`` for a logit rule.
        receipt: ``"stated"`` if receipts state it, ``"needless"`` if they need not; a call with any other has none.
        help: of the command's option; empty if the command has none.
        flag: the option, if it is not the name with dashes.
        request: the field of a request to the server; empty if there is none.
        config: the name in transformers' generation_config.
        processor: class of transformers' processor that does the same, and the attribute that holds the value.
        of_drafts: it means nothing without drafts.
    """

    check: Check | None = None
    off: object = None
    kind: Literal["", "sampling", "rule"] = ""
    receipt: Literal["", "stated", "needless"] = ""
    help: str = ""
    flag: str = ""
    request: str = ""
    config: str = ""
    processor: tuple[str, str] | None = None
    of_drafts: bool = False


# ------------------------------------------------------------------------------------------------------------- checks


def integer(name: str, value: object, wanted: str = "be an integer") -> int:
    """Return ``value`` as an int; raise TypeError unless it is an integer of Python or numpy and not a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must {wanted}, got {value!r}")
    return int(value)


def integer_from(low: int, name: str, value: object, _: int = 0) -> int:
    """Return ``value`` as an int of at least ``low``."""
    wanted = f"be an integer of at least {low}"
    if (number := integer(name, value, wanted)) < low:
        raise ValueError(f"{name} must {wanted}, got {value!r}")
    return number


def is_list(value: object) -> bool:
    """Return True for an iterable that is not a string and not a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def string(name: str, value: object) -> str:
    """Return ``value``; raise unless it is a string of Unicode text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be Unicode text: {error.reason} at character {error.start}") from None
    return value


def at_least(low: int) -> Check:
    return functools.partial(integer_from, low)


def _up_to(most: int) -> Check:
    def check(name: str, value: object, _: int) -> int:
        if (number := integer_from(0, name, value)) > most:
            raise ValueError(f"{name} must be at most {most}, got {number}")
        return number

    return check


def _number(wanted: str, holds: Callable[[float], bool]) -> Callable[[str, object, int], float]:
    """Check a real number; ``wanted`` completes "``name`` must ..." in the error."""

    def check(name: str, value: object, _: int) -> float:
        message = f"{name} must {wanted}, got {value!r}"
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(message)
        if not holds(float(value)):
            raise ValueError(message)
        return float(value)

    return check


def one_of(*choices: object) -> Check:
    def check(name: str, value: object, _: int) -> object:
        for choice in choices:
            if _listed(value) == choice:
                return choice
        *first, last = (f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")

    return check


def _listed(value: object) -> object:
    """Return tensors, arrays and their scalars as Python values; anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _token(name: str, value: object, vocab_size: int) -> int:
    wanted = f"hold token ids in 0 .. {vocab_size - 1}"
    if not 0 <= (token := integer(name, value, wanted)) < vocab_size:
        raise ValueError(f"{name} must {wanted}, got {value!r}")
    return token


def _tokens(name: str, value: object, vocab_size: int) -> tuple[int, ...]:
    value = _listed(value)
    if not isinstance(value, Iterable) or not is_list(value):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(_token(name, item, vocab_size) for item in value)


def _token_or_tokens(name: str, value: object, vocab_size: int) -> tuple[int, ...]:
    value = _listed(value)
    return _tokens(name, value, vocab_size) if is_list(value) else (_token(name, value, vocab_size),)


def _at_most_one_token(name: str, value: object, vocab_size: int) -> tuple[int, ...]:
    ids = _token_or_tokens(name, value, vocab_size)
    if len(ids) > 1:
        raise ValueError(f"{name} must be one token id, got {list(ids)}")
    return ids


def _words(name: str, value: object, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    words = _listed(value)
    words = tuple(words) if isinstance(words, Iterable) and is_list(words) else (words,)  # an iterator is read once
    if not all(is_list(_listed(word)) for word in words):
        raise TypeError(f"{name} must be a list of lists of token ids, got {value!r}")
    found = dict.fromkeys(_tokens(name, word, vocab_size) for word in words)
    if () in found:
        raise ValueError(f"{name} must not hold an empty list")
    return _few(name, tuple(found), found)


def _few(name: str, value: Any, sequences: Iterable[tuple[int, ...]]) -> Any:
    """Return ``value``; raise ValueError if its sequences would fill the memory."""
    lengths = [len(ids) for ids in sequences if len(ids) > 1]
    if (cells := len(lengths) * max(lengths, default=0)) > _MAX_SEQUENCES:
        wanted = f"sequences times the longest of them must be at most {_MAX_SEQUENCES}, got {cells}"
        raise ValueError(f"{name}: {wanted}: leave out the longest")
    return value


def _biases(name: str, value: object, vocab_size: int) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Return pairs of token ids and bias, those of single tokens first."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map token ids to numbers, got {value!r}")
    single: dict[tuple[int, ...], float] = {}
    longer: dict[tuple[int, ...], float] = {}
    for key, bias in value.items():
        ids = _tokens(name, key, vocab_size) if isinstance(key, tuple) else (_token(name, key, vocab_size),)
        if not ids:
            raise ValueError(f"{name} must not hold an empty tuple")
        whose = f"{name} of token {ids[0]}" if len(ids) == 1 else f"{name} of tokens {list(ids)}"
        number = _bias(whose, bias, vocab_size)
        (single if len(ids) == 1 else longer)[ids] = number
    return _few(name, (*single.items(), *longer.items()), longer)


def _seed(name: str, value: object, _: int) -> int | tuple[int, ...]:
    value = _listed(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(_seed_of_row(f"{name}[{row}]", item) for row, item in enumerate(value))
    integer(name, value, "be an integer, a sequence with one per row, or None")
    return _seed_of_row(name, value)


def _seed_of_row(name: str, value: object) -> int:
    seed = integer(name, value)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{name} must fit in int64, got {seed}")
    return seed


def _strings(name: str, value: object, _: int) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must be strings that are not empty, got {text!r}")
        string(name, text)
    if len(strings) > MAX_STOP_STRINGS or sum(map(len, strings)) > _MAX_CHARACTERS:
        wanted = f"be at most {MAX_STOP_STRINGS} strings with {_MAX_CHARACTERS} characters together"
        raise ValueError(f"{name} must {wanted}, got {len(strings)} with {sum(map(len, strings))}")
    return strings


def _callables(name: str, value: object, _: int) -> tuple[object, ...]:
    if not isinstance(value, Iterable) or not is_list(value):
        raise TypeError(f"{name} must be a list of callables, got {type(value).__name__}")
    for item in (found := tuple(value)):
        if not callable(item):
            raise TypeError(f"{name} must be a list of callables, got {item!r} in it")
    return found


def _pictures(name: str, value: object, _: int) -> "dict[str, Tensor] | None":
    from torch import Tensor

    if not isinstance(value, Mapping) or not all(isinstance(item, Tensor) for item in value.values()):
        raise TypeError(f"{name} must map names of tensors to tensors, as processors return them, got {value!r:.200}")
    if taken := value.keys() & {"input_ids", "attention_mask", "position_ids"}:
        raise ValueError(f"{name} must not hold {min(taken)}: ids and attention_mask are arguments of their own")
    return dict(value) or None


def _true_or_false(name: str, value: object, _: int) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _tree(name: str, value: object, _: int) -> int | str:
    from .ops import MAX_TREE_ROWS

    wanted = f'be a number of rows in 2 .. {MAX_TREE_ROWS}, "auto" or None'
    if isinstance(value, str):
        if value == "auto":
            return value
    elif 2 <= (rows := integer(name, value, wanted)) <= MAX_TREE_ROWS:
        return rows
    raise ValueError(f"{name} must {wanted}, got {value!r}")


# -------------------------------------------------------------------------------------------------------------- table

_FLOAT32, _TINY = (2 - 2.0**-23) * 2.0**127, 2.0**-126  # the largest number, and the least normal one
_temperature = _number("be a finite number of at least 0", lambda x: 0 <= x <= _FLOAT32)
_top_p = _number("lie in (0, 1] (1 is off)", lambda x: 0 < x <= 1)
_min_p = _number("lie in [0, 1] (0 is off)", lambda x: 0 <= x <= 1)
_sharpness = _number("be a number of at least 0 (infinity is allowed)", lambda x: x >= 0)
_repetition = _number(
    "be a finite number of more than 0 (1 is off), a normal one in float32", lambda x: _TINY <= x <= _FLOAT32
)
_bias = _number("be a finite number or -inf, in float32 too", lambda x: abs(x) <= _FLOAT32 or x == -math.inf)
_penalty = _number("lie in -1e30 .. 1e30", lambda x: abs(x) <= 1e30)  # a count times it stays finite in float32


class GenerateArguments(TypedDict, total=False):
    """The keyword arguments of ``generate`` and ``stream``, for one-shot calls and for a Generator.

    An argument that is left out or None follows the target's ``generation_config``; what is unset there too is off
    (transformers' own ``generate`` would then sample with top_k = 50). Token ids lie in the target's vocabulary. The
    logit rules, repetition_penalty to min_new_tokens, are applied as transformers applies them to the row alone: its
    padding is never seen. The value in parentheses turns a rule off that the generation_config asks for.

    Attributes:
        attention_mask: ``[batch, length]`` of zeros and ones; a row's ones are contiguous (padding left or right).
        pictures: what the target's processor makes of prompts with pictures, besides ids and mask, as the model's
            forward pass takes it: ``pixel_values``, ``image_grid_thw``, ``mm_token_type_ids``, ... Such prompts are
            padded on the left and run whole. Needs a target with a vision tower in one process, without
            ``weights="int8"``; not with ``prompt_logprobs`` or ``num_return_sequences``.
        max_new_tokens: at least 1; 20 if the generation_config sets neither this nor max_length.
        temperature: 0 is greedy, and so is anything below 1e-30.
        top_k: keep the ``top_k`` best tokens, and ties with the last of them; 0 is off.
        top_p: in (0, 1]; keep a token if all strictly more probable ones together have less than this; 1 is off.
        min_p: in [0, 1]; drop tokens less probable than ``min_p`` times the best; 0 is off.
        seed: an integer, or one per row; row r of a batch with one seed uses ``sampling.fold(seed, r)``. None draws one
            from torch's default generator.
        draft_sharpness: the drafter proposes ``argmax(draft_sharpness * logits / temperature + gumbel)``; 0 or more,
            ``inf`` is its plain argmax, 1, the default, draws with the target's own noise. Changes the speed, never
            the text.
        acceptance: ``"keyed"``, the default, or ``"rejection"``: classic speculative sampling
            (`dflash.sampling.acceptance`). The text is then distributed as the target's, but it is not a function
            of the seed alone: it depends on the drafter, the block size and where blocks begin, and differs from
            ``"keyed"``'s. Rejection needs a drafter and ``denoise_steps=1``, and cannot be combined with Python
            processors or criteria. At temperature 0 both are greedy.
        stop_token_ids: ids that end a row, emitted as its last token; an empty list for none.
        stop_strings: strings that end a row with the token that completes one of them, wherever in a block it stands,
            as one-token decoding would. They are looked for in what prompt and answer decode to, special tokens too,
            and need ``tokenizer``; at most 128, with 4,096 characters together.
        repetition_penalty: positive. Divides the positive logits, and multiplies the negative ones, of tokens in the
            prompt or the answer so far (1).
        presence_penalty, frequency_penalty: -1e30 .. 1e30. A token drawn ``c`` times in the answer so far loses
            ``c * frequency_penalty + (c > 0) * presence_penalty`` from its logit, as in OpenAI's API: the prompt does
            not count. Applied right after repetition_penalty (0).
        no_repeat_ngram_size: no n-gram of this size, at most 256, occurs twice in prompt and answer together (0).
        logit_bias: maps a token id to a number that is added to its logit, finite or -inf. A tuple of ids as the key,
            as in transformers' ``sequence_bias``, biases the last of them where the others came before ({}).
        bad_words_ids: sequences of ids that are never completed; a stop token on its own cannot be one ([]).
            transformers before 5.18 overlooks a sequence, here and in sequence_bias, whose other tokens are the whole
            text so far.
        suppress_tokens: ids that are never chosen ([]).
        begin_suppress_tokens: ids that are not chosen as the first new token ([]).
        forced_bos_token_id: the second token of a row whose prompt is a single token ([]).
        forced_eos_token_id: the last token that ``max_new_tokens`` allows: an id, or several of equal logit ([]).
        min_length: no stop token before prompt and answer together have this length (0).
        min_new_tokens: no stop token among the first new tokens; min_length is then ignored (None).
        grammar: a `dflash.Grammar` that the answers match, or a list with one or None per prompt. A token is the keyed
            choice among those that the grammar allows, so the text is still a function of the seed whatever is drafted.
            Stop tokens are allowed exactly where a match may end; ``max_new_tokens`` and stop strings may end a row
            earlier. Applied after the logit rules and before ``logits_processor``, which must not undo it. Needs
            ``tokenizer``, ``acceptance="keyed"`` and the extra ``grammar``. See the page on structured output.
        logits_processor: callables ``(input_ids [1, length] int64, scores [1, vocab] float32) -> scores``, such as
            transformers' ``LogitsProcessor``. They are called in order after every rule above, for each row of the
            batch with that row's own ids. They must be functions of their inputs: one that counts its calls sees other
            calls than in one-token decoding. They run on the host, token by token, which is slower.
        stopping_criteria: callables ``(input_ids [1, length] int64, None) -> bool`` or one-element tensor, such as
            transformers' ``StoppingCriteria``. The row ends with the first token for which one is true. They too must
            be functions of their inputs; stop tokens and max_new_tokens still hold.
        logprobs: return the log probability of each new token and of the 0 to 20 most probable ones at its position
            (`dflash.outputs.TokenLogprobs`): in the `GenerateOutput`, and in the events of ``stream``. They need
            ``tree=None`` and a target in one process.
        store: False keeps this call's answers from the generator's ``on_answer`` (True).
        prompt_logprobs: return those of the prompt's own tokens too; needs ``logprobs``. The whole prompt is run,
            whatever the caches hold. In 16-bit types the logits of all its positions may be rounded otherwise than the
            last one's alone, so that a near-tie may choose another first token.
        tokenizer: the target's. With it, the events of ``stream`` carry text.
        streamer: a streamer of transformers, for a batch of one: gets the prompt, then the new ids of every step, and
            ``end()`` whatever happens. Only for ``generate``.
        num_return_sequences: answers per prompt, in consecutive rows of a batch that repeats it, so that each row has a
            seed of its own; 1 at temperature 0, where all would be equal.
        denoise_steps: passes of the drafter over a block, at least 1, by default the Generator's own (1 in one-shot
            calls). Each further pass keeps the tokens that the one before was most sure of and drafts the others again.
            Changes the speed, never the text.
        tree: rows that a step verifies, the anchor included, 2 to 128: the most probable prefixes instead of one chain.
            ``"auto"`` chooses 8, 16, 32, 64, 128 or no drafts before each step, by what the drafter expects of them and
            what they cost on this device, which the first such call measures. None is a chain; by default the
            Generator's own (None in one-shot calls). A tree needs a drafter, a target without recurrent layers,
            ``denoise_steps=1`` and ``acceptance="keyed"``, and has no draft_sharpness. Changes the speed, never the
            text.
    """

    # fmt: off
    attention_mask: Annotated["Tensor | None", Setting(receipt="needless")]
    pictures: Annotated["Mapping[str, Tensor] | None", Setting(_pictures, receipt="needless")]  # stated by digests
    max_new_tokens: Annotated[int | None, Setting(
        at_least(1), None, "", "stated", help="New tokens at most.", request="max_tokens", config="max_new_tokens")]
    temperature: Annotated[float | None, Setting(
        _temperature, 0.0, "sampling", "stated", help="0 is greedy; default: the model's own.",
        request="temperature", config="temperature", processor=("TemperatureLogitsWarper", "temperature"))]
    top_k: Annotated[int | None, Setting(
        at_least(0), 0, "sampling", "stated", help="Keep the k best tokens; 0 is off.",
        request="top_k", config="top_k", processor=("TopKLogitsWarper", "top_k"))]
    top_p: Annotated[float | None, Setting(
        _top_p, 1.0, "sampling", "stated", help="Keep the most probable tokens up to this mass.",
        request="top_p", config="top_p", processor=("TopPLogitsWarper", "top_p"))]
    min_p: Annotated[float | None, Setting(
        _min_p, 0.0, "sampling", "stated", help="Drop tokens this much less probable than the best.",
        request="min_p", config="min_p", processor=("MinPLogitsWarper", "min_p"))]
    seed: Annotated[int | Sequence[int] | None, Setting(
        _seed, None, "sampling", "needless", help="The same seed writes the same text.", request="seed")]
    draft_sharpness: Annotated[float | None, Setting(
        _sharpness, 1.0, "sampling", "needless", help="How sharply the drafter follows its logits: a number, or inf.")]
    acceptance: Annotated[Literal["keyed", "rejection"] | None, Setting(
        one_of("keyed", "rejection"), "keyed", "", "needless")]
    stop_token_ids: Annotated[Sequence[int] | int | None, Setting(
        _token_or_tokens, (), "", "stated", request="stop_token_ids", config="eos_token_id")]
    stop_strings: Annotated[Sequence[str] | str | None, Setting(
        _strings, (), "", "stated", help="End where this text is written; may be repeated.", flag="--stop",
        request="stop", config="stop_strings")]
    repetition_penalty: Annotated[float | None, Setting(
        _repetition, 1.0, "rule", "stated", request="repetition_penalty", config="repetition_penalty",
        processor=("RepetitionPenaltyLogitsProcessor", "penalty"))]
    presence_penalty: Annotated[float | None, Setting(_penalty, 0.0, "rule", "stated", request="presence_penalty")]
    frequency_penalty: Annotated[float | None, Setting(_penalty, 0.0, "rule", "stated", request="frequency_penalty")]
    no_repeat_ngram_size: Annotated[int | None, Setting(
        _up_to(_MAX_NGRAM), 0, "rule", "stated", request="no_repeat_ngram_size", config="no_repeat_ngram_size",
        processor=("NoRepeatNGramLogitsProcessor", "ngram_size"))]
    logit_bias: Annotated[Mapping[int | tuple[int, ...], float] | None, Setting(
        _biases, (), "rule", "stated", request="logit_bias", config="sequence_bias",
        processor=("SequenceBiasLogitsProcessor", "sequence_bias"))]
    bad_words_ids: Annotated[Sequence[Sequence[int]] | None, Setting(
        _words, (), "rule", "stated", config="bad_words_ids", processor=("NoBadWordsLogitsProcessor", "bad_word_ids"))]
    suppress_tokens: Annotated[Sequence[int] | None, Setting(
        _tokens, (), "rule", "stated", config="suppress_tokens",
        processor=("SuppressTokensLogitsProcessor", "suppress_tokens"))]
    begin_suppress_tokens: Annotated[Sequence[int] | None, Setting(
        _tokens, (), "rule", "stated", config="begin_suppress_tokens",
        processor=("SuppressTokensAtBeginLogitsProcessor", "begin_suppress_tokens"))]
    forced_bos_token_id: Annotated[int | Sequence[int] | None, Setting(
        _at_most_one_token, (), "rule", "stated", config="forced_bos_token_id",
        processor=("ForcedBOSTokenLogitsProcessor", "bos_token_id"))]
    forced_eos_token_id: Annotated[int | Sequence[int] | None, Setting(
        _token_or_tokens, (), "rule", "stated", config="forced_eos_token_id",
        processor=("ForcedEOSTokenLogitsProcessor", "eos_token_id"))]
    min_length: Annotated[int | None, Setting(
        at_least(0), 0, "rule", "stated", config="min_length", processor=("MinLengthLogitsProcessor", "min_length"))]
    min_new_tokens: Annotated[int | None, Setting(  # even 0 turns min_length off
        at_least(0), None, "rule", "stated", request="min_tokens", config="min_new_tokens",
        processor=("MinNewTokensLengthLogitsProcessor", "min_new_tokens"))]
    grammar: Annotated[AnswerGrammar | Sequence[AnswerGrammar | None] | None, Setting(receipt="stated")]
    logits_processor: Annotated[Sequence[LogitsProcessor] | None, Setting(_callables, ())]
    stopping_criteria: Annotated[Sequence[StoppingCriterion] | None, Setting(_callables, ())]
    logprobs: Annotated[int | None, Setting(_up_to(MAX_LOGPROBS), receipt="needless")]
    prompt_logprobs: Annotated[bool | None, Setting(_true_or_false, False, receipt="needless")]
    store: Annotated[bool | None, Setting(_true_or_false, True, receipt="needless", request="store")]
    tokenizer: Annotated[Tokenizer | None, Setting(receipt="needless")]
    streamer: Annotated[Streamer | None, Setting(receipt="needless")]
    num_return_sequences: Annotated[int | None, Setting(
        at_least(1), 1, "", "needless", config="num_return_sequences")]
    denoise_steps: Annotated[int | None, Setting(at_least(1), 1, "", "needless")]
    tree: Annotated[TreeSize, Setting(
        _tree, None, "", "needless", help="Draft trees of so many rows, 2 to 128, or auto; default: chains.")]
    # fmt: on


def rows_of(table: type) -> dict[str, Setting]:
    """Return the rows of a table by name, in its order."""
    return {name: annotation.__metadata__[0] for name, annotation in table.__annotations__.items()}


SETTINGS = rows_of(GenerateArguments)
"""Every setting by its name."""


def checked(name: str, value: object, vocab_size: int = 0) -> Any:
    """Return one setting's checked value; None is unset, and stays so.

    Raises:
        ValueError: it is out of range.
        TypeError: it has the wrong type.
    """
    check = SETTINGS[name].check
    return value if value is None or check is None else check(name, value, vocab_size)


def resolve(
    given: Mapping[str, object], configured: Mapping[str, object], vocab_size: int = 0, *,
    table: Mapping[str, Setting] = SETTINGS, caller: str = "generate",
) -> dict[str, Any]:  # fmt: skip
    """Return every setting's checked value: the caller's, else the generation_config's, else that of the row.

    Args:
        given: the arguments of a call.
        configured: values of the target's generation_config, by our names.
        vocab_size: of the target.
        table: the rows.
        caller: whose arguments they are.

    Raises:
        ValueError: a value is out of range.
        TypeError: a name is unknown, or a value has the wrong type.
    """
    if unknown := given.keys() - table.keys():
        raise TypeError(f"{caller} got an unexpected keyword argument {min(unknown)!r}")
    values = {}
    for name, row in table.items():
        value = configured.get(name) if given.get(name) is None else given[name]
        if value is not None and row.check is not None:
            value = row.check(name, value, vocab_size)
        values[name] = row.off if value is None else value
    return values


def resolve_rules(values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the logit rules that are on, by name of their setting; ``stop_token_ids`` too if one reads them.

    Args:
        values: of every setting, from `resolve`.
        vocab_size: of the target.

    Raises:
        ValueError: two of them contradict each other.
    """
    rules = {name: values[name] for name, row in SETTINGS.items() if row.kind == "rule" and values[name] != row.off}
    if not rules:
        return rules
    stop = values["stop_token_ids"]
    # 1. What other settings make void.
    if "min_new_tokens" in rules:
        rules.pop("min_length", None)
    if "bad_words_ids" in rules:
        rules["bad_words_ids"] = tuple(w for w in rules["bad_words_ids"] if len(w) > 1 or w[0] not in stop)
    rules = {name: value for name, value in rules.items() if value}
    if stop and ("min_length" in rules or "min_new_tokens" in rules):
        rules["stop_token_ids"] = stop
    # 2. What would leave no token.
    suppressed = set(rules.get("suppress_tokens", ()))
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if name in rules and suppressed.issuperset(rules[name]):
            raise ValueError(f"{name} {list(rules[name])} is also in suppress_tokens: no token is left")
    never = suppressed | {ids[0] for ids, bias in rules.get("logit_bias", ()) if len(ids) == 1 and bias == -math.inf}
    never |= {word[0] for word in rules.get("bad_words_ids", ()) if len(word) == 1}
    if len(never) == vocab_size:
        raise ValueError("logit_bias, bad_words_ids and suppress_tokens together leave no token to choose")
    # 3. transformers would replace its own processor by one of the caller's with the same class.
    kinds = {type(processor).__name__ for processor in values["logits_processor"]}
    for name, value in rules.items():
        if (theirs := SETTINGS[name].processor) is not None and theirs[0] in kinds:
            raise ValueError(
                f"{name} is {value!r} (an argument or the target's generation_config) and "
                f"logits_processor holds a {theirs[0]}: choose one of them"
            )
    return rules


def check_combination(
    tree: TreeSize, block_size: BlockSize = None, denoise_steps: int = 1, acceptance: str = "keyed",
    draft_sharpness: float = 1.0,
) -> None:  # fmt: skip
    """Raise ValueError if the other settings rule out a tree, or a chain whose width is chosen as a call proceeds."""
    reason = ""
    # 1. Trees
    if acceptance == "rejection":
        reason = 'acceptance="rejection": a tree\'s drafts are not drawn from the drafter, and tokens would be biased'
    elif denoise_steps > 1:
        reason = f"denoise_steps={denoise_steps}: a tree grows from one pass of the drafter"
    elif draft_sharpness != 1:
        reason = f"draft_sharpness={draft_sharpness!r}: a tree holds the drafter's best tokens, and none is drawn"
    if tree is not None and reason:
        raise ValueError(f"tree={tree!r} cannot be combined with {reason}. Pass tree=None, or leave that out")
    # 2. Widths
    reason = f"tree={tree!r}, which verifies rows of its own number" if tree is not None else ""
    if acceptance == "rejection":
        reason = 'acceptance="rejection": its text depends on where blocks begin, and so would on the time of steps'
    if block_size == "auto" and reason:
        raise ValueError(f"block_size={block_size!r} cannot be combined with {reason}. Pass a number, or leave it out")


def tree_rows(tree: TreeSize) -> int:
    """Return the most rows of a tree of this size; 0 for chains."""
    from .ops import MAX_TREE_ROWS

    return 0 if tree is None else MAX_TREE_ROWS if tree == "auto" else tree
