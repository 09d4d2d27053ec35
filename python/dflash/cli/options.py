"""Options shared by several commands, and the decorator that makes a function a command.

Help and wrong options take no time: nothing here imports torch or transformers before models are loaded.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import typer

from ..files import check_writable, read_json
from ..options import OPTIONS, GeneratorArguments, OneShotOptions, resolve_options
from ..settings import MTP, SETTINGS, BlockSize, GenerateArguments, WeightStorage, check_combination, checked
from ..terminal import printable

if TYPE_CHECKING:
    from ..grammar import Grammar
    from . import sources

# Options that several commands have; a text is the help, see `command`.
Model = Annotated[str, "The target: a folder, a hub id or a GGUF file (FILE.gguf, owner/name:FILE.gguf)."]
_TARGET = "The target, as --model: a folder, a hub id or a GGUF file."
Positional = Annotated[str | None, typer.Argument(metavar="MODEL", help=_TARGET, show_default=False)]
Draft = Annotated[str, "Its DFlash drafter: a folder, a GGUF file or a hub id."]
KnownDraft = Annotated[
    str | None,
    "Its DFlash drafter: a folder, a GGUF file or a hub id; mtp: the head for drafts in the target's own files, which "
    "is the default where there is one; auto: that, a drafter next to its files, or a published one that lies in the "
    "hub's cache; none: a step writes one token.",
]
PairModel = Annotated[str | None, "The target: a folder, a hub id or a GGUF file; default: the package's pair."]
MaxNewTokens = Annotated[int, SETTINGS["max_new_tokens"].help]
Sharpness = Annotated[float, SETTINGS["draft_sharpness"].help]
Stop = Annotated[list[str] | None, SETTINGS["stop_strings"].help]
System = Annotated[str | None, "System message, for a tokenizer with a chat template."]
Raw = Annotated[bool, "Continue the text itself, without a chat template."]
Bos = Annotated[bool, "Put the tokenizer's BOS token before a raw prompt."]
NoThinking = Annotated[bool, "Tell the chat template enable_thinking=False."]
# As in llama.cpp.
_SHORT = {"model": "-m", "draft": "-md", "max_new_tokens": "-n", "max_length": "-c", "seed": "-s", "file": "-f"}
_SHORT |= {"system": "-sys", "threads": "-t", "temperature": "--temp"}
Limit = Annotated[int | None, typer.Option(min=1, help="Take only the first prompts.")]
Dtype = Annotated[str, "float32, bfloat16, float16 or auto (the target's own)."]
Device = Annotated[str | None, "Default: cuda if there is a GPU, else cpu."]
TrustRemoteCode = Annotated[
    bool, "Run the Python code that comes with the model, with your rights; without this, it is never run."
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
Weights = Annotated[WeightStorage, "Multiply by copies of the target's weights in 8 bits (CPU)."]
TreeRows = Annotated[str | None, OPTIONS["tree"].help]


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def known_draft(model: str, draft: str | None) -> str | None:
    """Return the drafter that ``--draft`` names; "auto" stands for the one that is known for the model."""
    if draft != "auto":
        return draft
    from ..loading import require_known_draft

    found = require_known_draft(model)
    typer.echo(f"--draft auto: {printable(found)}", err=True)
    return found


def check_pair(model: str | None, draft: str | None, otherwise: str) -> None:
    """Raise ValueError if one of a pair's options is given without the other; ``otherwise`` says what neither means."""
    if (model is None) != (draft is None):
        given, missing = ("--draft", "--model") if model is None else ("--model", "--draft")
        raise ValueError(f"{given} needs {missing} too: {otherwise}")


# ---------------------------------------------------------------------------------------------- groups of options


@dataclass(frozen=True)
class _Models:
    """Target and drafter; `ModelOptions` adds the options of a generator."""

    PANELS: ClassVar = {"model": "Models", "block_size": "Speed"}

    model: PairModel = None
    draft: KnownDraft = None
    dtype: Dtype = "auto"
    device: Device = None
    trust_remote_code: TrustRemoteCode = False
    may_lack_draft: bool = False  # once resolved without --draft: a damaged head is left out; not an option

    def named(self, target: str | None) -> Any:
        """Return these options with the positional MODEL, if there is one, as the target."""
        if target is not None and self.model not in (None, target):
            raise ValueError(f"name one model: MODEL is {target!r}, --model {self.model!r}")
        return self if target is None else dataclasses.replace(self, model=target)

    def resolve(self, draft_sharpness: float = 1.0, *, needs_draft: bool = False) -> Any:
        """Check the options before anything is loaded, and parse ``block_size`` and ``tree``.

        Fills in the packaged pair if none is named, and says so on standard error. ``draft_sharpness`` is that of the
        call, if all of it drafts trees where these are asked for. ``needs_draft``: a target may not come without one.
        """
        for what, name in (("model", self.model), ("drafter", self.draft)):
            if name is not None and name.startswith((".", "/", "~")) and not Path(name).exists():
                raise FileNotFoundError(f"the {what}: there is no file or folder {printable(name)}")
        # 1. What the table of options has.
        given = {name: as_number(getattr(self, name)) for name in (*OneShotOptions.__annotations__, "tree")}
        options = resolve_options(given)
        tree, block_size = options["tree"], options["block_size"]
        check_combination(tree, block_size, draft_sharpness=draft_sharpness)
        # 2. The weights.
        self.check_storage()
        of_drafter = [name for name in ("draft_weights", "drafter_window") if options[name] is not None]
        if of_drafter and block_size == 1:
            option = f"{option_of(of_drafter[0])} {options[of_drafter[0]]}"
            raise ValueError(f"{option} needs a drafter, and --block-size 1 has none: leave one of them out")
        # 3. The models.
        own = None if needs_draft else self._own_head(block_size)
        draft = own or (None if self.draft == "none" else self.draft)
        if draft == MTP and self.draft is None and block_size is None:
            block_size = "auto"
        how = {"tree": tree, "block_size": block_size, "may_lack_draft": self.draft is None}
        resolved = dataclasses.replace(self, draft=draft, **how)
        if needs_draft or self.model is None:
            check_pair(self.model, draft, "without both, the pair inside the package answers")
        elif draft is None and (of_drafter or tree is not None):
            raise ValueError(f"{option_of([*of_drafter, 'tree'][0])} needs a drafter: name one with --draft")
        elif draft is None and self.prompt_lookup is None and block_size not in (None, 1):
            raise ValueError(f"--block-size {block_size} needs drafts: name a drafter with --draft, or --prompt-lookup")
        if self.model is not None:
            return dataclasses.replace(resolved, draft=known_draft(self.model, draft))
        typer.echo(
            "no --model: the pair inside the package answers; it knows sums, letters and records (docs/demo-pair.md)",
            err=True,
        )
        from ..loading import PAIR

        return dataclasses.replace(resolved, model=str(PAIR / "target"), draft=str(PAIR / "draft"))

    def _own_head(self, block_size: BlockSize) -> str | None:
        """Return `MTP` if the target's own head is to draft, because nothing else is asked for, and say so."""
        others = (self.draft, self.tree, self.draft_weights, self.drafter_window, self.prompt_lookup)
        if self.model is None or block_size == 1 or any(other is not None for other in others):
            return None
        from ..loading import has_mtp

        if not has_mtp(self.model, local_files_only=False):
            return None
        typer.echo("the target brings a head for drafts, which is used (mtp); --draft none turns it off", err=True)
        return MTP

    def check_storage(self) -> None:
        """Raise ValueError if the target's weights are to be stored in 8 bits on another device than the CPU."""
        if self.weights is None:
            return
        from . import sources

        if not (found := sources.check_device(self.dtype, self.device)).startswith("cpu"):
            what = f"--weights {self.weights} needs the models on the CPU"
            raise ValueError(f"{what}, got {found}: pass --device cpu")

    def source(self, *, needs_dense: bool = False, **how: bool) -> sources.Source:
        """Return the target's files.

        ``needs_dense`` keeps dense weights next to copies in 8 bits; ``how`` has fields of `Source`.
        """
        from . import sources

        stores_int8 = self.weights is not None and not needs_dense
        return sources.Source(cast(str, self.model), self.trust_remote_code, stores_int8=stores_int8, **how)

    def load(self, source: sources.Source) -> tuple[Any, Any, str]:
        """Load the target and its drafter, if one is named; return both with the device.

        With the dtype "auto", the target keeps that of its files, and the drafter gets the target's. If the target
        cannot verify trees of ``tree`` rows, nothing is loaded. A damaged head that nobody asked for is left out.
        """
        from . import sources

        return sources.load_models(self, source)

    def generator(self, drafter: Any) -> dict[str, Any]:
        """Return the arguments of a `dflash.Generator` for what `load` returned, but for trees."""
        given = {name: getattr(self, name) for name in OneShotOptions.__annotations__}
        return given if drafter is not None or self.prompt_lookup is not None else given | {"block_size": None}


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
SamplingOptions = dataclasses.make_dataclass(
    "SamplingOptions", _SAMPLING, frozen=True, namespace={"PANELS": {"temperature": "Sampling"}}
)
"""Options of the sampling and of the logit rules: every row of the table that has a help text."""


@dataclass(frozen=True)
class GrammarOptions:
    """A grammar that the answer must match; at most one is given."""

    PANELS: ClassVar = {"json_schema": "Grammar"}

    json_schema: Annotated[Path | None, "Answer with JSON that the schema in this file describes."] = None
    regex: Annotated[str | None, "Answer with text that this regular expression matches as a whole."] = None
    grammar: Annotated[Path | None, "Answer with text that the Lark grammar in this file describes."] = None

    def resolve(self, tokenizer: Any) -> Grammar | None:
        """Return the grammar, None without one; raises ValueError for several, or one that cannot be used."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(map(option_of, given))}, not both")
        if not given:
            return None
        from ..grammar import Grammar

        if self.json_schema is not None:
            grammar = Grammar.json_schema(read_json(self.json_schema))
        elif self.regex is not None:
            grammar = Grammar.regex(self.regex)
        else:
            grammar = Grammar.lark(read_text(cast(Path, self.grammar), "--grammar"))
        if tokenizer.eos_token_id is not None:  # before a large model is loaded
            grammar.begin(tokenizer, [tokenizer.eos_token_id])
        return grammar


def read_text(path: Path, option: str) -> str:
    """Read the text file that an option names; raises ValueError if there is none or it is not Unicode."""
    if not path.exists() or path.is_dir():
        raise ValueError(f"{option}: there is no file {str(path)!r}")
    from ..loading import check_text

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
    then becomes a flag without a ``--no-`` form. Fields without ``Annotated`` are no options, nor are those that
    ``without`` has by parameter. A dataclass may have ``PANELS``: the heading of the help from a field on. With the
    prefix ``variables``, each option may also be a variable: ``--max-length`` is PREFIX_MAX_LENGTH.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)  # typing.get_type_hints hides Annotated in Python 3.10
        options, groups = [], {}
        for name, parameter in signature.parameters.items():
            kind = parameter.annotation
            if not dataclasses.is_dataclass(kind):
                options.append(_option(name, kind, parameter.default, variables=variables))
                continue
            hints = typing.get_type_hints(kind, include_extras=True)
            skipped = {field for field, hint in hints.items() if not hasattr(hint, "__metadata__")}
            skipped.update(without.get(name, ()))
            fields = [field for field in dataclasses.fields(kind) if field.name not in skipped]
            groups[name], panel = (kind, [field.name for field in fields]), None
            for field in fields:
                panel = getattr(kind, "PANELS", {}).get(field.name, panel)
                options.append(_option(field.name, hints[field.name], field.default, panel, variables))

        @functools.wraps(function)
        def call(**given: Any) -> None:
            for name, (kind, fields) in groups.items():
                given[name] = kind(**{field: given.pop(field) for field in fields})
            function(**given)

        call.__signature__ = signature.replace(parameters=options, return_annotation=None)  # type: ignore[attr-defined]
        call.__annotations__ = {option.name: option.annotation for option in options}
        # Paragraphs of one line, which fit any terminal; the last paragraph, in lines, is an example.
        call.__doc__ = re.sub(r"(?<!\n)\n(?![\n ])", " ", inspect.getdoc(function) or "")
        return call

    return decorate


def _option(
    name: str, annotation: Any, default: Any, panel: str | None = None, variables: str = ""
) -> inspect.Parameter:
    if metadata := getattr(annotation, "__metadata__", ()):
        kind, found = typing.get_args(annotation)[0], metadata[0]
        found = typer.Option(help=found) if isinstance(found, str) else copy.copy(found)
        if isinstance(found, typer.models.OptionInfo):
            # Inside of Annotated, typer.Option takes the first name as its default.
            names = [name for name in (found.default, *(found.param_decls or ())) if isinstance(name, str)]
            found.default, *found.param_decls = [*(names or [option_of(name)]), *_SHORT.get(name, "").split()]
            found.metavar, found.rich_help_panel = "" if kind is bool else found.metavar, panel  # typer writes <bool>
            if variables:
                found.envvar, found.show_envvar = f"{variables}_{name.upper()}", False
        annotation = Annotated[kind, found]
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
