"""``dflash generate``, ``dflash chat`` and ``dflash verify``."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal import printable, shortened
from . import options, running

# ---------------------------------------------------------------------------------------------- generate


@options.command()
def generate(
    models: options.ModelOptions,
    sampling: options.SamplingOptions,
    constraint: options.GrammarOptions,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="A model, as --model, and the text to answer; no text or - reads standard input.",
            show_default=False,
        ),
    ] = None,
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
    standard output, a line of statistics to standard error. Without a model, the packaged pair answers.

    Example: dflash generate Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 "Why is the sky blue?"
    """
    # 1. Check the options and encode the prompt: this is quick, loading the models is not.
    running.require_output()
    options.check_sampling(max_new_tokens, draft_sharpness=draft_sharpness, **dataclasses.asdict(sampling))
    models, prompt = _read_words(models, words or [])
    models = models.resolve(draft_sharpness)
    text = _read_prompt(prompt, file)
    import torch

    from ..api import stream
    from ..loading import check_text
    from ..receipts import Recorder
    from . import sources
    from .answer import StreamedAnswer, encode

    for number, string in enumerate(stop or (), 1):
        check_text(string, f"--stop {number}")
    source = models.source(quiet=as_json, samples=True, needs_dense=receipt is not None)  # for its fingerprint
    tokenizer = sources.load_tokenizer(source)
    ids = encode(tokenizer, text, system, raw, bos)
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
    answer = StreamedAnswer(models.tree, quiet=as_json)
    for event in stream(target, drafter, prompts, skip_special_tokens=True, **models.generator(drafter), **arguments):
        answer.add(event)
        if recorder is not None:
            recorder.add(event)
    if recorder is not None and receipt is not None:
        recorder.receipt().write(receipt)
    typer.echo(json.dumps(answer.report()) if as_json else "")
    if not as_json:
        typer.echo(answer.summary(), err=True)


def _read_words(models: Any, words: list[str]) -> tuple[Any, str | None]:
    """Return the models and the prompt; a single word is a model if it has the form of one and none is named."""
    if len(words) > 2 or (len(words) == 2 and models.model is not None):
        wanted = "one text" if models.model is not None else "a model and one text"
        raise ValueError(f"give {wanted}, with quotes around the text, got {len(words)} arguments")
    is_model = len(words) == 2 or (len(words) == 1 and models.model is None and _is_model(words[0]))
    target, prompt = (words[0], words[1:]) if is_model else (None, words)
    return models.named(target), prompt[0] if prompt else None


def _is_model(word: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+(:\S+)?|\S+\.gguf", word)) or Path(word).is_dir()


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise ValueError("give the prompt as an argument or with --file, not both")
        return options.read_text(file, "--file")
    if prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
    from ..loading import check_text

    if prompt is None or prompt == "-":
        running.keep_wrong_bytes()
        return check_text(sys.stdin.read(), "standard input")
    return check_text(prompt, "PROMPT")


# ---------------------------------------------------------------------------------------------- chat


@options.command()
def chat(
    models: options.ModelOptions,
    sampling: options.SamplingOptions,
    target: options.Positional = None,
    system: options.System = None,
    max_length: Annotated[int, "Tokens of the whole conversation at most."] = 4096,
    max_new_tokens: options.MaxNewTokens = 1024,
    as_json: options.Json = False,
) -> None:
    """Chat with the target: a message per line of standard input, with streamed answers.

    /help lists the commands, which begin with a slash; /bye or the end of input leaves, Ctrl-C stops an answer. Only
    the new part of the conversation is run for each answer. A message that cannot be answered is left out of the
    conversation, and the exit code is 1 at the end of piped input. Without a model, the packaged pair answers each
    message separately.

    Example: dflash chat Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16
    """
    # 1. Load the models.
    running.require_output()
    options.check_sampling(max_new_tokens, **dataclasses.asdict(sampling))
    models = models.named(target).resolve()
    from ..generator import Generator
    from ..loading import check_template
    from . import sources
    from .answer import check_system
    from .conversation import Chat, read_messages

    source = models.source(quiet=as_json, samples=True)
    tokenizer = sources.load_tokenizer(source)
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template: use dflash generate")
    check_template(tokenizer, "user", "assistant")
    check_system(tokenizer, system)
    if not as_json:
        drafts = "no drafter" if models.draft is None else f"drafter {printable(models.draft)}"
        typer.echo(f"{printable(models.model)}, {drafts}; /help lists the commands, /bye leaves", err=True)
    model, drafter, device = models.load(source)
    length = sources.room_of(model, max_length)
    generator = Generator(model, drafter, max_length=length, tree=models.tree, **models.generator(drafter))
    arguments = {"max_new_tokens": max_new_tokens, **dataclasses.asdict(sampling)}
    conversation = Chat(generator, tokenizer, device, system, arguments, as_json)
    # 2. Answer message by message.
    all_answered = True
    for message in read_messages(conversation.console):
        all_answered &= conversation.respond(*message)
    if not (all_answered or sys.stdin.isatty()):
        raise typer.Exit(1)


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

    Example: dflash verify receipt.json --model Qwen/Qwen3-4B
    """
    from ..loading import PAIR
    from ..receipts import Receipt, lines_of
    from ..receipts import verify as verify_receipt
    from . import sources

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
