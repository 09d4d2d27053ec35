"""``dflash generate``, ``dflash chat`` and ``dflash verify``."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..api import stream
from ..generator import Generator
from ..loading import PAIR, check_encoding, check_template, check_text, prompt_ids
from ..outputs import mean_acceptance
from ..receipts import Receipt, Recorder, lines_of
from ..receipts import verify as verify_receipt
from ..terminal import printable, shortened
from . import options, running, sources

# ---------------------------------------------------------------------------------------------- generate


@options.command()
def generate(
    models: options.ModelOptions,
    sampling: options.SamplingOptions,
    constraint: options.GrammarOptions,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; none or - reads standard input.")] = None,
    file: Annotated[Path | None, "Read the prompt from this file."] = None,
    system: options.System = None,
    raw: options.Raw = False,
    bos: options.Bos = False,
    max_new_tokens: options.MaxNewTokens = 256,
    stop: options.Stop = None,
    draft_sharpness: options.Sharpness = 1.0,
    receipt: Annotated[Path | None, "Write what dflash verify needs to derive the answer again to this file."] = None,
    as_json: options.Json = False,
) -> None:
    """Answer or continue PROMPT with the target's own text, several tokens per step, and stream it.

    If the tokenizer has a chat template, PROMPT becomes a user's message, unless --raw is given. The text goes to
    standard output, a line of statistics to standard error. Without --model, the packaged pair answers.
    """
    # 1. Check the options and encode the prompt: this is quick, loading the models is not.
    running.require_output()
    text = _read_prompt(prompt, file)
    for number, string in enumerate(stop or (), 1):
        check_text(string, f"--stop {number}")
    models = models.resolve(draft_sharpness)
    options.check_sampling(max_new_tokens, draft_sharpness=draft_sharpness, **dataclasses.asdict(sampling))
    source = models.source(quiet=as_json, needs_dense=receipt is not None)  # for its fingerprint
    tokenizer = sources.load_tokenizer(source)
    ids = _encode(tokenizer, text, system, raw, bos)
    grammar = constraint.resolve(tokenizer)
    if receipt is not None:
        options.check_new_file(receipt, "--receipt")
    # 2. Load the models.
    target, drafter, device = models.load(source)
    # 3. Stream the answer.
    prompts = torch.tensor([ids], dtype=torch.int64, device=device).reshape(1, -1)
    arguments: Any = {"tokenizer": tokenizer, "max_new_tokens": max_new_tokens, "stop_strings": stop or None}
    arguments |= {"grammar": grammar, "draft_sharpness": draft_sharpness, "tree": models.tree}
    arguments |= dataclasses.asdict(sampling)
    recorder = None if receipt is None else Recorder(target, prompts, **arguments)
    arguments = arguments if recorder is None else recorder.arguments
    answer = _StreamedAnswer(models.tree, quiet=as_json)
    for event in stream(target, drafter, prompts, skip_special_tokens=True, **models.generator, **arguments):
        answer.add(event)
        if recorder is not None:
            recorder.add(event)
    if recorder is not None and receipt is not None:
        recorder.receipt().write(receipt)
    typer.echo(json.dumps(answer.report()) if as_json else "")
    if not as_json:
        typer.echo(answer.summary(), err=True)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise ValueError("give the prompt as an argument or with --file, not both")
        return options.read_text(file, "--file")
    if prompt is None or prompt == "-":
        if sys.stdin.isatty() and prompt is None:
            raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
        _keep_wrong_bytes()
        return check_text(sys.stdin.read(), "standard input")
    return check_text(prompt, "PROMPT")


def _keep_wrong_bytes() -> None:
    """Read bytes of standard input that are not UTF-8 as surrogates, which `check_text` finds."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _encode(tokenizer: Any, text: str, system: str | None, raw: bool, bos: bool) -> list[int]:
    has_template = check_encoding(tokenizer, raw, bos, {"--system": system is not None})
    _check_system(tokenizer, system)
    if not has_template:
        return prompt_ids(tokenizer, {"prompt": text}, raw=True, bos=bos)
    return _chat_ids(tokenizer, system, [{"role": "user", "content": text}])


def _check_system(tokenizer: Any, system: str | None) -> None:
    """Raise ``ValueError`` if the chat template has no place for a system message, before a large model is loaded."""
    if system is not None:
        check_text(system, "--system")
        try:
            _chat_ids(tokenizer, system, [{"role": "user", "content": "?"}])
        except ValueError as error:
            raise ValueError(f"--system: {error}") from error


def _chat_ids(tokenizer: Any, system: str | None, messages: list[dict[str, str]]) -> list[int]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return prompt_ids(tokenizer, {"messages": first + messages})


# Of the statistics, as they are.
_REPORTED = ("seconds", "time_to_first_token", "tokens_per_second", "histogram", "block_size", "weights")


class _StreamedAnswer:
    """The answer of a one-row stream with draft trees or chains, printed as it arrives unless ``quiet``."""

    def __init__(self, tree: int | str | None, quiet: bool) -> None:
        self.text, self.last, self._tree, self._quiet = "", None, tree, quiet
        self._is_terminal = sys.stdout.isatty()

    def add(self, event: Any) -> None:
        self.text, self.last = self.text + event.text[0], event
        if not self._quiet:
            text = printable(event.text[0], keep="\n\t") if self._is_terminal else event.text[0]
            typer.echo(text, nl=False)
            sys.stdout.flush()

    def summary(self) -> str:
        statistics = self.last.statistics
        first = f"first token after {statistics.time_to_first_token * 1000:.0f} ms"
        rows, steps = "" if self._tree is None else f" in trees of {self._tree} rows", set(statistics.rows)
        rows = " in trees of 8 to 128 rows" if self._tree == "auto" else rows
        rows = f" in blocks of {min(steps)} to {max(steps)} rows" if len(steps) > 1 and self._tree is None else rows
        weights = "" if statistics.weights is None else f", {statistics.weights} weights"
        return (
            f"{statistics.num_new_tokens[0]} tokens in {statistics.seconds:.2f} s, "
            f"{statistics.tokens_per_second:.1f} tokens/s, acceptance length {statistics.acceptance_length:.2f} "
            f"of {statistics.block_size}{rows}{weights}, {first}"
        )

    def report(self) -> dict[str, Any]:
        statistics = self.last.statistics
        report = {"text": self.text, "finish_reason": self.last.finish_reasons[0]}
        report |= {name: getattr(statistics, name)[0] for name in ("num_prefilled_tokens", "num_new_tokens")}
        report |= {name: getattr(statistics, name) for name in _REPORTED}
        return report | {"acceptance_length": mean_acceptance(statistics), "tree": self._tree}


# ---------------------------------------------------------------------------------------------- chat


@options.command()
def chat(
    models: options.ModelOptions,
    sampling: options.SamplingOptions,
    system: options.System = None,
    max_length: Annotated[int, "Tokens of the whole conversation at most."] = 4096,
    max_new_tokens: options.MaxNewTokens = 1024,
    as_json: options.Json = False,
) -> None:
    """Chat with the target: one message per line on standard input, with streamed answers.

    /drop forgets the oldest message and its answer, /reset all of them, /exit or the end of input leaves, Ctrl-C stops
    an answer. Only the new part of the conversation is run for each answer. A message that cannot be answered is left
    out of the conversation, and the exit code is 1 at the end of piped input. Without --model, the packaged pair
    answers each message separately.
    """
    # 1. Load the models.
    running.require_output()
    models = models.resolve()
    options.check_sampling(max_new_tokens, **dataclasses.asdict(sampling))
    source = models.source(quiet=as_json)
    tokenizer = sources.load_tokenizer(source)
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template: use dflash generate")
    check_template(tokenizer, "user", "assistant")
    _check_system(tokenizer, system)
    target, drafter, device = models.load(source)
    length = sources.room_of(target, max_length)
    generator = Generator(target, drafter, max_length=length, tree=models.tree, **models.generator)
    arguments = {"max_new_tokens": max_new_tokens, **dataclasses.asdict(sampling)}
    conversation = _Conversation(generator, tokenizer, device, system, arguments, as_json)
    # 2. Answer line by line.
    console, all_answered = conversation.console, True
    for number, line in _read_lines(console):
        if line.strip() == "/reset":
            conversation.messages.clear()
        elif line.strip() == "/drop":
            del conversation.messages[:2]
        else:
            all_answered &= conversation.answer(number, line)
    if not (all_answered or sys.stdin.isatty()):
        raise typer.Exit(1)


@dataclass
class _Conversation:
    """A conversation: its messages, the generator that answers them, and the arguments of an answer."""

    generator: Generator
    tokenizer: Any
    device: str
    system: str | None
    arguments: dict[str, Any]
    as_json: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def answer(self, number: int, message: str) -> bool:
        """Answer a message, line ``number`` of the input.

        Returns False, and leaves the conversation as it was, if that cannot be done.
        """
        answer = _StreamedAnswer(self.generator.tree, quiet=self.as_json)
        try:
            check_text(message, "standard input", number)
            with contextlib.closing(self._ask(message)) as events:
                for event in events:
                    answer.add(event)
        except KeyboardInterrupt:
            self.console.print("[dim](stopped)[/]")
        except ValueError as error:
            running.print_error(error)
            if self.as_json:
                typer.echo(json.dumps({"error": str(error)}))
            return False
        if answer.last is None:
            return True  # stopped before it began
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer.text}]
        if self.as_json:
            typer.echo(json.dumps(answer.report()))
        else:
            typer.echo()
            self.console.print(f"[dim]{answer.summary()}[/]", soft_wrap=True)
        return True

    def _ask(self, message: str) -> Iterator[Any]:
        """Stream the answer to a message, which is not added yet. Raises ValueError if there is no room for it."""
        ids = _chat_ids(self.tokenizer, self.system, [*self.messages, {"role": "user", "content": message}])
        limit = self.generator.max_length
        if len(ids) >= limit and not self.messages:
            raise ValueError(f"this message has {len(ids)} tokens, the limit is {limit}: send a shorter one")
        if len(ids) >= limit:
            raise ValueError(
                f"the conversation would have {len(ids)} tokens, the limit is {limit}: this message was left out; "
                "/drop forgets the oldest message and its answer, /reset all of them"
            )
        new = min(self.arguments["max_new_tokens"], limit - len(ids))
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.device)
        rest = {"tokenizer": self.tokenizer, "skip_special_tokens": True, **self.arguments, "max_new_tokens": new}
        return self.generator.stream(prompt, **rest)


def _read_lines(console: Console) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines of standard input up to /exit, with numbers. On a terminal, show a prompt sign."""
    _keep_wrong_bytes()
    for number in itertools.count(1):
        if sys.stdin.isatty():
            console.print("[bold green]>[/] ", end="")
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield number, line.rstrip("\n")


@options.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The receipt, from dflash generate --receipt FILE.")],
    model: options.PairModel = None,
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
    exact: Annotated[bool, "Let a near-tie count as a token that does not follow."] = False,
    pictures: Annotated[bool, "Load the vision tower too, for receipts of dflash serve --pictures."] = False,
    as_json: options.Json = False,
) -> None:
    """Check that every token of a receipt's answers follows from its seed and the target's weights.

    The target runs over the recorded text once, in passes of many rows; no drafter is needed. The exit code is 0 if
    every token follows, 1 if one does not, 2 if the receipt cannot be checked: it is broken, or it was made with other
    weights. Near-ties, which rounding decides, are counted and shown.
    """
    # 1. Read the receipt: what is wrong with it is said before a model is loaded.
    receipt = Receipt.read(file)
    if receipt.pictures:
        raise ValueError(
            "the receipt names pictures, which it does not hold: check it in Python, with the tensors of the call, "
            "dflash.verify(receipt, target, tokenizer, pictures=...)"
        )
    name = str(PAIR / "target") if model is None else model
    source = sources.Source(name, trust_remote_code, quiet=as_json, pictures=pictures)
    if device is None and receipt.weights is not None:
        device = "cpu"  # int8 weights are computed with there only
    device = sources.check_device(receipt.fingerprints.dtype, device)
    tokenizer = sources.load_tokenizer(source)
    # 2. Derive the tokens again.
    try:
        found = verify_receipt(receipt, sources.load_target(source, receipt.fingerprints.dtype, device), tokenizer)
    except (RuntimeError, MemoryError) as error:  # exit code 1 would say that a token does not follow
        raise ValueError(f"the receipt cannot be checked here: {error}") from error
    # 3. Say what was found.
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        typer.echo("\n".join(lines_of(found, receipt.fingerprints.dtype, tokenizer)))
        for name, (theirs, here) in found.differences.items():
            typer.echo(f"note: {name} is {shortened(here)} here, {shortened(theirs)} in the receipt", err=True)
    if not (found.is_exact if exact else found.follows):
        raise typer.Exit(1)
