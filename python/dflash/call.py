"""One call of ``generate``: its arguments, documented once, and the frozen `Call` that they resolve to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .options import TreeSize, check_tree_call, checked_logprobs, checked_tree
from .prompts import check_ids
from .sampling import (
    Grammar,
    Matcher,
    RuleArguments,
    RuleSettings,
    Sampling,
    SamplingArguments,
    integer,
    integer_from,
    is_list,
    resolve_grammars,
)
from .streaming import StopCriterion, Streamer, Tokenizer, check_streamer
from .targets import embedding_table, generation_defaults, stop_string_criterion

__all__ = ["Call", "GenerateArguments", "TargetDefaults", "check_stream_arguments"]

_DEFAULT_NEW_TOKENS = 20  # as in transformers


class GenerateArguments(RuleArguments, total=False):
    """The keyword arguments of ``generate`` and ``stream``, for one-shot calls and for a Generator.

    An argument that is left out or None follows the target's ``generation_config``; what is unset there too is off
    (transformers' own ``generate`` would then sample with top_k = 50). Only draft_sharpness, acceptance, denoise_steps
    and tree have defaults of their own, and only the last takes None. The logit rules of `RuleArguments` are
    arguments too: repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram_size, logit_bias,
    bad_words_ids, suppress_tokens, begin_suppress_tokens, forced_bos_token_id, forced_eos_token_id, min_length,
    min_new_tokens, logits_processor, stopping_criteria. They are applied as transformers applies them to the row alone:
    its padding is never seen.

    Attributes:
        attention_mask: ``[batch, length]`` of zeros and ones; a row's ones are contiguous (padding left or right).
        max_new_tokens: at least 1; 20 if the generation_config sets neither this nor max_length.
        temperature: 0 is greedy.
        top_k: keep the ``top_k`` best tokens; 0 is off.
        top_p: in (0, 1]; keep the most probable tokens up to this mass; 1 is off.
        min_p: in [0, 1]; drop tokens less probable than ``min_p`` times the best; 0 is off.
        seed: an integer, or one per row; row r of a batch with one seed uses ``sampling.fold(seed, r)``. None draws one
            from torch's default generator.
        draft_sharpness: the drafter proposes ``argmax(draft_sharpness * logits / temperature + gumbel)``; 0 or more,
            ``inf`` is its plain argmax, 1, the default, draws with the target's own noise. Changes the speed, never
            the text.
        acceptance: ``"keyed"``, the default, or ``"rejection"``: classic speculative sampling
            (`dflash.sampling.rejection`). The text is then distributed as the target's, but it is not a function
            of the seed alone: it depends on the drafter, the block size and where blocks begin, and differs from
            ``"keyed"``'s. Rejection needs a drafter and ``denoise_steps=1``, and cannot be combined with Python
            processors or criteria. At temperature 0 both are greedy.
        stop_token_ids: ids that end a row, emitted as its last token; an empty list for none.
        stop_strings: strings that end a row with the token that completes one of them, wherever in a block it stands,
            exactly as transformers does it in one-token decoding (its ``StopStringCriteria``). They need ``tokenizer``.
        grammar: a `dflash.Grammar` that the answers match, or a list with one or None per prompt. A token is the keyed
            choice among those that the grammar allows, so the text is still a function of the seed whatever is drafted.
            Stop tokens are allowed exactly where a match may end; ``max_new_tokens`` and stop strings may end a row
            earlier. Applied after the logit rules and before ``logits_processor``, which must not undo it. Needs
            ``tokenizer``, ``acceptance="keyed"`` and the extra ``grammar``. See the page on structured output.
        logprobs: return the log probability of each new token and of the 0 to 20 most probable ones at its position
            (`dflash.outputs.TokenLogprobs`): in the `GenerateOutput`, and in the events of ``stream``. They need
            ``tree=None`` and a target in one process.
        prompt_logprobs: return those of the prompt's own tokens too; needs ``logprobs``. The whole prompt is run,
            whatever the caches hold. In 16-bit types the logits of all its positions may be rounded otherwise than the
            last one's alone, so that a near-tie may choose another first token.
        tokenizer: the target's. With it, the events of ``stream`` carry text.
        streamer: a streamer of transformers, for a batch of one: gets the prompt, then the new ids of every step, and
            ``end()`` whatever happens. Only for ``generate``.
        num_return_sequences: answers per prompt, in consecutive rows of a batch that repeats it, so that each row has a
            seed of its own; 1 at temperature 0, where all would be equal.
        denoise_steps: passes of the drafter over a block, at least 1, by default the Generator's own (1 in one-shot
            calls). Each further pass keeps the tokens that the one before was most sure of and drafts the others again
            (`dflash.proposers.ChainProposer`). Changes the speed, never the text.
        tree: rows that a step verifies, the anchor included, 2 to 128: the most probable prefixes instead of one chain
            (`dflash.proposers.TreeProposer`). ``"auto"`` chooses 16, 32, 64 or 128 before each step, by what the
            drafter expects of them and what they cost on this device, which the first such call measures. None is
            a chain; by default the Generator's own (None in one-shot calls). A tree needs a drafter, a target without
            recurrent layers, ``denoise_steps=1`` and ``acceptance="keyed"``, and has no draft_sharpness. Changes the
            speed, never the text.
    """

    attention_mask: Tensor | None
    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | Sequence[int] | None
    draft_sharpness: float
    acceptance: Literal["keyed", "rejection"]
    stop_token_ids: Sequence[int] | int | None
    stop_strings: Sequence[str] | str | None
    grammar: Grammar | Sequence[Grammar | None] | None
    logprobs: int | None
    prompt_logprobs: bool
    tokenizer: Tokenizer | None
    streamer: Streamer | None
    num_return_sequences: int | None
    denoise_steps: int
    tree: int | Literal["auto"] | None


@dataclass(frozen=True)
class TargetDefaults:
    """What resolving a call needs to know of the target.

    Attributes:
        settings: from `dflash.targets.generation_defaults`.
        vocab_size: rows of the embedding table.
        device: of the target.
    """

    settings: Mapping[str, Any]
    vocab_size: int
    device: torch.device

    @classmethod
    def of(cls, target: nn.Module) -> TargetDefaults:
        """Read them off a target of transformers."""
        table = embedding_table(target)
        return cls(generation_defaults(target), table.shape[0], table.device)


@dataclass(frozen=True, eq=False)
class Call:
    """One call, checked once: all that the engine needs to know.

    Attributes:
        ids: ``[batch, length]``, each prompt as often as answers to it are returned.
        prompts: per row ``[tokens]`` int64, what the attention mask leaves.
        max_new_tokens: at least 1.
        sampling: temperature, filters, sharpness and seed.
        stop_token_ids: ids that end a row.
        pad_token_id: pads the answers.
        rules: the logit rules.
        stop_criteria: transformers' stop-string criteria.
        stop_strings: what they look for.
        tokenizer: the target's, or None.
        streamer: one of transformers, or None.
        acceptance: ``"keyed"`` or ``"rejection"``.
        denoise_steps: passes of the drafter over each block.
        tree: rows of a tree, ``"auto"``, or None for chains.
        grammars: per row, the start of its grammar or None; empty if no row has one.
        logprobs: probable tokens per position; None for no log probabilities.
        prompt_logprobs: log probabilities of the prompts' tokens too.
    """

    ids: Tensor
    prompts: list[Tensor]
    max_new_tokens: int
    sampling: SamplingArguments
    stop_token_ids: list[int]
    pad_token_id: int
    rules: RuleSettings
    stop_criteria: tuple[StopCriterion, ...]
    stop_strings: tuple[str, ...]
    tokenizer: Tokenizer | None
    streamer: Streamer | None
    acceptance: str
    denoise_steps: int
    tree: TreeSize
    grammars: tuple[Matcher | None, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @classmethod
    def resolve(
        cls,
        target: TargetDefaults,
        ids: Tensor,
        arguments: GenerateArguments,
        *,
        denoise_steps: int = 1,
        tree: TreeSize = None,
    ) -> Call:
        """Check every argument that can be checked without a drafter, and fill in the defaults; nothing is run.

        Args:
            target: what the call is for.
            ids: ``[batch, length]`` int64 or int32.
            arguments: see `GenerateArguments`.
            denoise_steps: the default for the argument of that name.
            tree: likewise.

        Raises:
            ValueError: an argument is out of range, or two contradict each other.
            TypeError: an argument is unknown or has the wrong type.
        """
        # 1. The prompts.
        _check_names(arguments)
        mask = check_ids(ids, arguments.get("attention_mask"), target.vocab_size, target.device)
        # 2. What the generation_config fills in.
        _check_supported(settings := target.settings)
        new = _max_new_tokens(arguments.get("max_new_tokens"), settings, ids.shape[1])
        sampling = _sampling(arguments, settings)
        stop = _stop_token_ids(arguments.get("stop_token_ids"), settings, target.vocab_size)
        given = {name: value for name, value in arguments.items() if name in RuleArguments.__annotations__}
        rules = RuleSettings.resolve(cast(RuleArguments, given), settings["rules"], stop, target.vocab_size)
        repeats = _num_return_sequences(arguments.get("num_return_sequences"), settings, sampling)
        if repeats > 1:
            ids, mask = ids.repeat_interleave(repeats, 0), mask.repeat_interleave(repeats, 0)
        # 3. What must fit the batch, or each other.
        rows = ids.shape[0]
        Sampling.create(rows).set_(rows, sampling, seed=0 if sampling.seed is None else sampling.seed)  # raises
        steps, acceptance, tree = _drafting(arguments, sampling, rules, denoise_steps, tree)
        streamer, tokenizer = arguments.get("streamer"), arguments.get("tokenizer")
        if streamer is not None:
            check_streamer(streamer, rows)
        strings, criteria = _stop_strings(arguments.get("stop_strings"), settings, tokenizer)
        grammars = resolve_grammars(arguments.get("grammar"), rows // repeats, repeats, tokenizer, stop)
        return cls(
            ids=ids,
            prompts=[row[live].long() for row, live in zip(ids, mask, strict=True)],
            max_new_tokens=new,
            sampling=sampling,
            stop_token_ids=stop,
            pad_token_id=(stop or [0])[0] if (pad := settings["pad_token_id"]) is None else pad,
            rules=rules,
            stop_criteria=criteria,
            stop_strings=strings,
            tokenizer=tokenizer,
            streamer=streamer,
            acceptance=acceptance,
            denoise_steps=steps,
            tree=tree,
            grammars=grammars,
            logprobs=checked_logprobs(arguments.get("logprobs"), arguments.get("prompt_logprobs", False), tree),
            prompt_logprobs=arguments.get("prompt_logprobs", False),
        )

    def decisive(self) -> tuple[object, ...]:
        """Return what decides the text and the shapes of a step, with one ``repr`` in every process."""
        rules = dataclasses.replace(self.rules, logits_processor=(), stopping_criteria=())
        given: Any = self.sampling.seed
        seed = given.tolist() if hasattr(given, "tolist") else given
        return (
            *([prompt.tolist() for prompt in self.prompts], self.max_new_tokens, self.stop_token_ids),
            *(dataclasses.replace(self.sampling, seed=seed), rules, self.rules.run_on_host),
            *(len(self.stop_criteria), self.stop_strings, self.acceptance, self.tree),
            [matcher and matcher.grammar for matcher in self.grammars],
        )

    def check_drafts(self, has_drafts: bool) -> None:
        """Raise ValueError if this call needs drafts and there are none."""
        if self.acceptance == "rejection" and not has_drafts:
            raise ValueError('acceptance="rejection" needs drafts to reject, got draft=None or block_size=1')


def check_stream_arguments(arguments: GenerateArguments) -> None:
    """Raise TypeError for arguments of ``generate`` that a stream does not take."""
    for name in ("streamer", "return_dict_in_generate"):
        if name in arguments:
            raise TypeError(f"stream() takes no {name}")


def _check_names(arguments: GenerateArguments) -> None:
    if "reuse_prefix" in arguments:
        raise TypeError(
            "a call takes no reuse_prefix: one-shot calls never reuse the caches of an earlier call, and a "
            "Generator decides it when it is made, dflash.Generator(..., reuse_prefix=True)"
        )
    if unknown := arguments.keys() - GenerateArguments.__annotations__.keys():
        raise TypeError(f"generate got an unexpected keyword argument {min(unknown)!r}")


def _check_supported(settings: Mapping[str, Any]) -> None:
    if unsupported := settings["unsupported"]:
        listed = ", ".join(f"{name}={value!r}" for name, value in unsupported.items())
        raise ValueError(
            f"the target's generation_config asks for {listed}, which dflash does not apply; set it to None there"
        )


def _max_new_tokens(given: int | None, settings: Mapping[str, Any], length: int) -> int:
    if given is None:
        given = settings["max_new_tokens"]
    if given is None:
        total = settings["max_length"]
        given = _DEFAULT_NEW_TOKENS if total is None else total - length
        if given < 1:
            raise ValueError(f"the prompt has {length} tokens, generation_config.max_length is {total}")
    return integer_from(1, "max_new_tokens", given)


def _sampling(arguments: GenerateArguments, settings: Mapping[str, Any]) -> SamplingArguments:
    """Fill in temperature and filters; the config's filters count where it samples, or the caller does."""
    samples, temperature = settings["do_sample"], arguments.get("temperature")
    if temperature is None:
        temperature = (1.0 if settings["temperature"] is None else settings["temperature"]) if samples else 0.0
    configured, given = samples or arguments.get("temperature"), cast("Mapping[str, Any]", arguments)

    def pick(name: str, off: float) -> Any:
        if given.get(name) is not None:
            return given[name]
        value = settings[name] if configured else None
        return off if value is None else value

    return SamplingArguments(
        temperature=temperature,
        top_k=pick("top_k", 0),
        top_p=pick("top_p", 1.0),
        min_p=pick("min_p", 0.0),
        seed=arguments.get("seed"),
        draft_sharpness=arguments.get("draft_sharpness", 1.0),
    )


def _stop_token_ids(given: Any, settings: Mapping[str, Any], vocab_size: int) -> list[int]:
    if given is None:
        given = settings["eos_token_id"]
    if hasattr(given, "tolist"):  # a tensor, an array or one of its scalars
        given = given.tolist()
    stop = [integer("stop_token_ids", token) for token in (given if is_list(given) else [given])]
    for token in stop:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_token_ids must lie in 0 .. {vocab_size - 1}, got {token}")
    return stop


def _num_return_sequences(given: int | None, settings: Mapping[str, Any], sampling: SamplingArguments) -> int:
    if given is None:
        given = settings["num_return_sequences"]
    repeats = integer_from(1, "num_return_sequences", 1 if given is None else given)
    if repeats > 1 and not sampling.temperature:
        raise ValueError(f"at temperature 0 every answer is the same: num_return_sequences must be 1, got {repeats}")
    return repeats


def _drafting(
    arguments: GenerateArguments, sampling: SamplingArguments, rules: RuleSettings, denoise_steps: int, tree: TreeSize
) -> tuple[int, str, TreeSize]:
    """Return denoise_steps, acceptance and tree, with these defaults; raise if they cannot be combined."""
    steps = integer_from(1, "denoise_steps", arguments.get("denoise_steps", denoise_steps))
    acceptance = _acceptance(arguments, steps, sampling, rules)
    tree = checked_tree(arguments.get("tree", tree))
    check_tree_call(tree, steps, acceptance, sampling.draft_sharpness)
    return steps, acceptance, tree


def _acceptance(
    arguments: GenerateArguments, denoise_steps: int, sampling: SamplingArguments, rules: RuleSettings
) -> str:
    acceptance, sharpness = arguments.get("acceptance", "keyed"), sampling.draft_sharpness
    if acceptance not in ("keyed", "rejection"):
        raise ValueError(f'acceptance must be "keyed" or "rejection", got {acceptance!r}')
    if acceptance == "keyed":
        return acceptance
    if denoise_steps > 1:
        raise ValueError(
            f'acceptance="rejection" needs denoise_steps=1, got {denoise_steps}: the tokens would be biased'
        )
    if sharpness != 1:
        raise ValueError(
            'acceptance="rejection" draws drafts from the drafter\'s own distribution: draft_sharpness must be 1 '
            f"there, got {sharpness!r}"
        )
    if rules.run_on_host:
        raise ValueError('acceptance="rejection" cannot be combined with logits_processor or stopping_criteria')
    if arguments.get("grammar") is not None:
        raise ValueError('acceptance="rejection" cannot be combined with grammar: the drafts are not masked')
    return acceptance


def _stop_strings(
    given: Sequence[str] | str | None, settings: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[tuple[str, ...], tuple[StopCriterion, ...]]:
    """Return the stop strings, and transformers' criteria for them."""
    if given is None:
        given = settings["stop_strings"]
    strings = (given,) if isinstance(given, str) else tuple(given or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop_strings must be strings that are not empty, got {string!r}")
    if not strings:
        return (), ()
    if tokenizer is None:
        raise ValueError(f"stop_strings {list(strings)} need the target's tokenizer: pass tokenizer=")
    return strings, (stop_string_criterion(tokenizer, list(strings)),)
