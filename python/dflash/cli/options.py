"""Options shared by several commands, what they load, and the decorator that makes a function a command."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import re
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.markup import escape

from ..files import check_writable, read_json
from ..grammar import Grammar
from ..loading import PAIR, Pretrained, check_text, draft_folder, load_draft
from ..options import OPTIONS, GeneratorArguments, OneShotOptions, check_combination, check_tree, resolve_options
from ..settings import SETTINGS, GenerateArguments, TreeSize, checked
from ..targets import (
    check_target,
    is_packed,
    is_quantized,
    max_positions,
    modules_of_text,
    store_int8_,
    weight_bytes_per_token,
)
from ..terminal import printable
from ..threads import fit_threads

_LOG = logging.getLogger(__name__)

# Options that several commands have; a text is the help, see `command`.
Model = Annotated[str, "The target: a folder, a hub id or a GGUF file (FILE.gguf, owner/name:FILE.gguf)."]
Draft = Annotated[str, "Its DFlash drafter: a folder, a GGUF file or a hub id."]
PairModel = Annotated[str | None, "The target: a folder or a hub id; default: the package's pair."]
MaxNewTokens = Annotated[int, SETTINGS["max_new_tokens"].help]
Sharpness = Annotated[float, SETTINGS["draft_sharpness"].help]
Stop = Annotated[list[str] | None, SETTINGS["stop_strings"].help]
System = Annotated[str | None, "System message, for a tokenizer with a chat template."]
Raw = Annotated[bool, "Continue the text itself, without a chat template."]
Bos = Annotated[bool, "Put the tokenizer's BOS token before a raw prompt."]
NoThinking = Annotated[bool, "Tell the chat template enable_thinking=False."]
Limit = Annotated[int | None, typer.Option(min=1, help="Take only the first prompts.")]
Dtype = Annotated[str, "float32, bfloat16, float16 or auto (the target's own)."]
Device = Annotated[str | None, "Default: cuda if there is a GPU, else cpu."]
TrustRemoteCode = Annotated[
    bool, "Run the Python code that comes with the model, with your rights; without this, it is never run."
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
TreeRows = Annotated[str | None, OPTIONS["tree"].help]


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_pair(model: str | None, draft: str | None, otherwise: str) -> None:
    """Raise ValueError if one of a pair's options is given without the other; ``otherwise`` says what neither means."""
    if (model is None) != (draft is None):
        given, missing = ("--draft", "--model") if model is None else ("--model", "--draft")
        raise ValueError(f"{given} needs {missing} too: {otherwise}")


# ---------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Source(Pretrained):
    """A target and its tokenizer, as named on the command line.

    ``quiet`` shows no spinner and no bars. ``is_logged``: the log says what is loaded, and how long it took.
    ``stores_int8`` puts copies in 8 bits in the place of the target's weights.
    """

    quiet: bool = False
    is_logged: bool = False
    stores_int8: bool = False


@contextlib.contextmanager
def _waiting(what: str, name: str, source: Source) -> Iterator[None]:
    """On a terminal, show a spinner while ``what`` is loaded, or the hub's bars for a download, on standard error."""
    console, path, began = Console(stderr=True), Path(name), time.monotonic()
    quiet, local = source.quiet or not console.is_terminal, path.exists()
    files = path.glob("*.safetensors") if path.is_dir() else [path] if local else []
    total = sum(file.stat().st_size for file in files) / 1e9
    size = f", {total:.1f} GB" if total >= 0.05 and what != "tokenizer" else ""
    if source.is_logged:
        _LOG.info("loading the %s from %s%s", what, printable(name), size)
    with contextlib.ExitStack() as stack:
        if not quiet and local:
            stack.enter_context(console.status(f"loading the {what}{size}"))
        elif not quiet:
            console.print(f"[dim]loading the {what} from {escape(printable(name))}[/]")
        from transformers.utils import logging as bars  # a slow import

        if (quiet or local) and bars.is_progress_bar_enabled():
            bars.disable_progress_bar()  # and the hub's
            stack.callback(bars.enable_progress_bar)
        yield
    if source.is_logged and (seconds := time.monotonic() - began) >= 1:
        _LOG.info("the %s is loaded after %.0f s", what, seconds)


def load_tokenizer(source: Source) -> Any:
    """Load it; raises ValueError for a missing path, before any download."""
    name = source.name
    if source.gguf is None and not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise ValueError(f"no folder {name!r}, and it is not a hub id (owner/name) either")
    with _waiting("tokenizer", name, source):
        return source.load_tokenizer()


def check_dtype(dtype: str) -> None:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")


def check_device(dtype: str, device: str | None) -> str:
    """Return the device, by default cuda if there is a GPU; raises ValueError if it or the dtype does not exist."""
    check_dtype(dtype)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r}: {str(error).splitlines()[0]}") from error
    return device


def load_target(source: Source, dtype: str, device: Any) -> Any:
    """Load it and store it as asked. Says what copies will take, and what a token reads of packed weights."""

    def say(text: str) -> None:
        if source.is_logged:
            _LOG.info("%s", text)
        elif not source.quiet:
            typer.echo(text, err=True)

    if source.stores_int8:
        modules = [module for _, module in modules_of_text(check_target(source.load_empty_target(), loaded=False))]
        layers = [module for module in modules if not isinstance(module, torch.nn.Embedding)]
        weights = {weight for layer in layers for weight in layer._parameters.values() if weight is not None}
        size = sum(weight.numel() for weight in weights if weight.dim() > 1)
        say(f"weights in 8 bits, at most {size / 1e9:.2f} GB, take the place of those in the files")
    fit_threads()  # before weights are packed
    with _waiting("target", source.name, source):
        target = source.load_target(dtype, device)
        is_wide = dtype != "auto" or target.dtype != torch.float16 or target.device.type != "cpu"
        if not is_wide and not is_quantized(target):
            text = "the target is stored as float16, which CPU kernels do not take: it runs as --dtype float32"
            typer.echo(text, err=True)
            target = target.float()
        if source.stores_int8:
            store_int8_(target)
    if is_packed(target):
        sizes = weight_bytes_per_token(target)
        kinds = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items())
        most = memory_bytes_per_second() / sum(sizes.values())
        say(f"a token reads {kinds} of weights: memory allows {most:.0f} tokens per second without drafts")
    return target


def memory_bytes_per_second() -> float:
    """Measure how fast memory is read: the fastest of a few reductions. Takes a tenth of a second."""
    values, fastest = torch.ones(2**25), float("inf")
    for _ in range(4):
        began = time.perf_counter()
        values.amax()
        fastest = min(fastest, time.perf_counter() - began)
    return values.nbytes / fastest


def room_of(target: Any, max_length: int) -> int:
    """Return ``max_length``, or the target's positions if these are fewer."""
    return min(max_length, max_positions(target) or max_length)


# ---------------------------------------------------------------------------------------------- groups of options


@dataclass(frozen=True)
class _Models:
    """Target and drafter; `ModelOptions` adds the options of a generator."""

    model: PairModel = None
    draft: Annotated[str | None, "Its DFlash drafter: a folder, a GGUF file or a hub id."] = None
    dtype: Dtype = "auto"
    device: Device = None
    trust_remote_code: TrustRemoteCode = False

    def resolve(self, draft_sharpness: float = 1.0, *, needs_draft: bool = True) -> Any:
        """Check the options before anything is loaded, and parse ``block_size`` and ``tree``.

        Fills in the packaged pair if none is named, and says so on standard error. ``draft_sharpness`` is that of the
        call, if all of it drafts trees where these are asked for. ``needs_draft``: a target may not come without one.
        """
        # 1. What the table of options has.
        given = {name: as_number(getattr(self, name)) for name in (*OneShotOptions.__annotations__, "tree")}
        options = resolve_options(given)
        tree, block_size = options["tree"], options["block_size"]
        check_combination(tree, block_size, draft_sharpness=draft_sharpness)
        # 2. The weights.
        self.check_storage()
        if self.draft_weights is not None and block_size == 1:
            option = f"--draft-weights {self.draft_weights}"
            raise ValueError(f"{option} needs a drafter, and --block-size 1 has none: leave one of them out")
        # 3. The models.
        resolved = dataclasses.replace(self, tree=tree, block_size=block_size)
        if needs_draft or self.model is None:
            check_pair(self.model, self.draft, "without both, the pair inside the package answers")
        elif self.draft_weights is not None and self.draft is None:
            raise ValueError("--draft-weights needs a drafter: name one with --draft")
        elif self.draft is None and self.prompt_lookup is None and block_size not in (None, 1):
            raise ValueError(f"--block-size {block_size} needs drafts: name a drafter with --draft, or --prompt-lookup")
        if self.model is not None:
            return resolved
        typer.echo(
            "no --model: the pair inside the package answers; it knows sums, letters and records (docs/demo-pair.md)",
            err=True,
        )
        draft = draft_folder(PAIR, None if tree is None else 1)  # trees need its drafter of the first generation
        return dataclasses.replace(resolved, model=str(PAIR / "target"), draft=str(draft))

    def check_storage(self) -> None:
        """Raise ValueError if the target's weights are to be stored in 8 bits on another device than the CPU."""
        if self.weights is None:
            return
        if torch.device(found := check_device(self.dtype, self.device)).type != "cpu":
            what = f"--weights {self.weights} needs the models on the CPU"
            raise ValueError(f"{what}, got {found}: pass --device cpu")

    def source(self, quiet: bool = False, is_logged: bool = False, needs_dense: bool = False) -> Source:
        """Return the target's files; ``needs_dense`` keeps dense weights next to copies in 8 bits."""
        stored = {"quiet": quiet, "is_logged": is_logged, "stores_int8": self.weights is not None and not needs_dense}
        return Source(cast(str, self.model), self.trust_remote_code, **stored)

    def load(self, source: Source) -> tuple[Any, Any, str]:
        """Load the target and its drafter, if one is named; return both with the device.

        With the dtype "auto", the target keeps that of its files, and the drafter gets the target's. If the target
        cannot verify trees of ``tree`` rows, nothing is loaded.
        """
        dtype, draft, drafter, device = self.dtype, self.draft, None, check_device(self.dtype, self.device)
        if self.tree is not None:
            check_tree(source.load_empty_target(), cast(TreeSize, self.tree), None if self.block_size == 1 else draft)
        if draft is not None:  # first, because it is small and fails quickly
            with _waiting("drafter", draft, source):
                drafter = load_draft(draft, dtype=None if dtype == "auto" else getattr(torch, dtype), device=device)
        target = load_target(source, dtype, device)
        if drafter is not None and dtype == "auto":
            drafter = load_draft(drafter, dtype=target.dtype)
        return target, drafter, device

    @property
    def generator(self) -> dict[str, Any]:
        """Arguments of a `dflash.Generator`, but for trees."""
        return {name: getattr(self, name) for name in OneShotOptions.__annotations__}


def _generator_options() -> Iterator[tuple[str, Any, None]]:
    """Yield a field for each row of the table of options that has a help text; one that may be "auto" is a text."""
    for name, annotation in GeneratorArguments.__annotations__.items():
        if text := OPTIONS[name].help:
            kind = typing.get_args(annotation)[0]
            words = {word for part in typing.get_args(kind) for word in typing.get_args(part)}
            kind = str | None if "auto" in words else kind
            yield name, Annotated[kind, text], None


ModelOptions = dataclasses.make_dataclass("ModelOptions", _generator_options(), bases=(_Models,), frozen=True)
"""Target and drafter, how their weights are stored and how many rows a step has."""


def as_number(value: Any) -> Any:
    """Return the integer that a text is, anything else as it is."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,9}", value) else value


_SAMPLING = [
    (name, Annotated[typing.get_args(typing.get_args(annotation)[0])[0] | None, row.help], None)
    for name, annotation in GenerateArguments.__annotations__.items()
    if (row := SETTINGS[name]).kind and row.help and name != "draft_sharpness"
]
SamplingOptions = dataclasses.make_dataclass("SamplingOptions", _SAMPLING, frozen=True)
"""Options of the sampling and of the logit rules: every row of the table that has a help text."""


@dataclass(frozen=True)
class GrammarOptions:
    """A grammar that the answer must match; at most one is given."""

    json_schema: Annotated[Path | None, "Answer with JSON that the schema in this file describes."] = None
    regex: Annotated[str | None, "Answer with text that this regular expression matches as a whole."] = None
    grammar: Annotated[Path | None, "Answer with text that the Lark grammar in this file describes."] = None

    def resolve(self, tokenizer: Any) -> Grammar | None:
        """Return the grammar, None without one; raises ValueError for several, or one that cannot be used."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(map(option_of, given))}, not both")
        grammar = next((_GRAMMARS[name](value) for name, value in given.items()), None)
        if grammar is not None and tokenizer.eos_token_id is not None:  # before a large model is loaded
            grammar.begin(tokenizer, [tokenizer.eos_token_id])
        return grammar


_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "json_schema": lambda path: Grammar.json_schema(read_json(path)),
    "regex": Grammar.regex,
    "grammar": lambda path: Grammar.lark(read_text(path, "--grammar")),
}


def read_text(path: Path, option: str) -> str:
    """Read the text file that an option names; raises ValueError if there is none or it is not Unicode."""
    if not path.exists() or path.is_dir():
        raise ValueError(f"{option}: there is no file {str(path)!r}")
    return check_text(path.read_text(encoding="utf-8", errors="surrogateescape"), f"{option} {path}")


def check_new_file(path: Path, option: str) -> None:
    """Raise ``ValueError`` or ``OSError`` unless a file can be written there, before a large model is loaded."""
    if path.is_dir():
        raise ValueError(f"{option}: {printable(path)} is a folder: name a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: there is no folder {printable(path.absolute().parent)}")
    check_writable(path.absolute().parent)


def check_sampling(max_new_tokens: int, **numbers: Any) -> None:
    """Raise ``ValueError`` for a setting that is out of range, before a large model is loaded; None is not checked."""
    for name, number in {"max_new_tokens": max_new_tokens, **numbers}.items():
        checked(name, number)


def command(variables: str = "", **without: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: its parameters become options, and so do the fields of those that are dataclasses.

    A parameter or field is ``Annotated`` with typer's option or argument, or with the help text of an option; a bool
    then becomes a flag without a ``--no-`` form. ``without`` has, by parameter, the fields that are no options. With
    the prefix ``variables``, each option may also be a variable: ``--max-length`` is PREFIX_MAX_LENGTH.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)  # typing.get_type_hints hides Annotated in Python 3.10
        options, groups = [], {}
        for name, parameter in signature.parameters.items():
            kind = parameter.annotation
            if not dataclasses.is_dataclass(kind):
                options.append(_option(name, kind, parameter.default, variables))
                continue
            hints = typing.get_type_hints(kind, include_extras=True)
            fields = [field for field in dataclasses.fields(kind) if field.name not in without.get(name, ())]
            groups[name] = kind, [field.name for field in fields]
            options += [_option(field.name, hints[field.name], field.default, variables) for field in fields]

        @functools.wraps(function)
        def call(**given: Any) -> None:
            for name, (kind, fields) in groups.items():
                given[name] = kind(**{field: given.pop(field) for field in fields})
            function(**given)

        call.__signature__ = signature.replace(parameters=options, return_annotation=None)  # type: ignore[attr-defined]
        call.__annotations__ = {option.name: option.annotation for option in options}
        return call

    return decorate


def _option(name: str, annotation: Any, default: Any, variables: str) -> inspect.Parameter:
    help = next(iter(getattr(annotation, "__metadata__", ())), None)
    if isinstance(help, str):
        kind = typing.get_args(annotation)[0]
        help = typer.Option(*[option_of(name)] if kind is bool else [], help=help)
        annotation = Annotated[kind, help]
    if variables and isinstance(help, typer.models.OptionInfo):
        help.envvar, help.show_envvar = f"{variables}_{name.upper()}", False
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
