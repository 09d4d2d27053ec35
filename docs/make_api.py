"""Write docs/api.md from the docstrings and the help of the command line.

python docs/make_api.py            # writes docs/api.md
python docs/make_api.py --check    # exits 1 if docs/api.md is out of date
"""

import argparse
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

import dflash
from dflash import cli, ops
from dflash.sampling import parameters as sampling
from dflash.sampling import rules

PATH = Path(__file__).resolve().parent / "api.md"
# Section -> its names, in the order of reading; public names that are missing here come last.
SECTIONS = {
    "Generation": ["generate", "stream", "Generator", "GenerateOutput", "StreamEvent", "Statistics", "release"],
    "Drafters": ["load_draft", "demo_pair", "Drafter", "DraftConfig"],
    "From transformers": ["custom_generate", "as_assistant", "UnsupportedTargetError"],
}
HEAD = """# API

Made by `python docs/make_api.py` from the docstrings; `[a, b]` is a tensor's shape.

"""
_ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([^`]+)`")
_ENTRY = re.compile(r" {4}(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*):(?: (.*))?$")
_BLOCKS = ("Args", "Attributes", "Returns", "Yields", "Raises")


def markdown(docstring: str) -> str:
    """A docstring of this project (sections as Google's style has them, Sphinx roles) as Markdown."""
    lines: list[str] = []
    block, follows = None, False  # the section, and whether the next line belongs to the last one written
    for line in inspect.cleandoc(docstring).splitlines():
        line = _ROLE.sub(r"`\1`", line).replace("``", "`")
        if line.removesuffix(":") in _BLOCKS and line.endswith(":"):
            block, follows = line[:-1], False
            lines += ["", f"**{block}**", ""]
        elif not line.strip():
            lines.append("")
            follows = False
        elif line.startswith(">>> "):
            if lines[-1] == "```":
                lines.pop()
            else:
                lines.append("```pycon")
            lines += [line, "```"]
        elif block and (entry := _ENTRY.match(line)) and block not in ("Returns", "Yields"):
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines.append(f"- {names}:" + (f" {entry[2]}" if entry[2] else ""))
            follows = True
        elif follows:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line.strip())
            follows = True
    text = re.sub(r"(?<=\.) (\w+Error): ", r"\n- `\1`: ", "\n".join(lines))  # several errors in one line
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def signature(name: str, thing: object) -> str:
    """How ``thing`` is called, an argument a line where one line is too short."""

    def spelled(annotation: object) -> str:
        return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def shown(default: object) -> str:
        if dataclasses.is_dataclass(default) and default == type(default)():
            return f"{type(default).__name__}()"
        if repr(default) == "<factory>" or (isinstance(default, Path) and default.is_absolute()):
            return "..."
        return repr(default)

    parts, star = [], False
    parameters = inspect.signature(thing)
    for parameter in parameters.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        part = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            part += f": {spelled(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            part += f" = {shown(parameter.default)}"
        parts.append(part)
    returned = parameters.return_annotation
    result = "" if returned is parameters.empty or inspect.isclass(thing) else f" -> {spelled(returned)}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) > 100:
        line = f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"
    return f"```python\n{line}\n```"


def members(kind: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties of a class that it documents itself."""
    for name, member in vars(kind).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if not name.startswith("_") and callable(function) and getattr(function, "__doc__", None):
            yield name, member


def entry(name: str, thing: object) -> list[str]:
    """Heading, signature and docstring of a public name, and of what is public in a class."""
    if not thing.__doc__:
        raise SystemExit(f"{name} has no docstring")
    exception = inspect.isclass(thing) and issubclass(thing, Exception)
    typed = inspect.isclass(thing) and hasattr(thing, "__total__")  # a TypedDict: keyword arguments
    text = [f"### {name}"]
    if not exception and not typed:
        text.append(signature(name, thing))
    text.append(markdown(thing.__doc__))
    if inspect.isclass(thing):
        for member, value in members(thing):
            if isinstance(value, property):
                text += [f"#### {name}.{member} (property)", markdown(value.fget.__doc__)]
            elif not dataclasses.is_dataclass(thing) or member not in thing.__dataclass_fields__:
                function = getattr(value, "__func__", value)
                bound = getattr(thing, member) if isinstance(value, classmethod) else function
                text += [f"#### {name}.{member}", signature(member, bound), markdown(function.__doc__)]
    return text


def options(command: Callable) -> list[str]:
    """A bullet an argument or option, from the function behind a command: typer's own help depends on the terminal."""
    bullets = []
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, info = typing.get_args(hints[name])
        while inner := [k for k in typing.get_args(kind) if k is not type(None)]:  # str of list[str] | None
            kind = inner[0]
        given = [info.default] if isinstance(info.default, str) else []  # where typer keeps the first of them
        flags = ", ".join([*given, *(info.param_decls or [])] or [f"--{name.replace('_', '-')}"])
        if isinstance(info, typer.models.ArgumentInfo):
            spelled = name.upper()
        else:
            spelled = flags if kind is bool else f"{flags} {kind.__name__.upper()}"
        note = ""
        if parameter.default is parameter.empty:
            note = " (required)"
        elif parameter.default is not None and parameter.default is not False:
            value = parameter.default
            note = f" (default {f'{value:g}' if isinstance(value, float) else value})"
        bullets.append(f"- `{spelled}`{note}: {info.help}")
    return ["\n".join(bullets)] if bullets else []


def command_line() -> list[str]:
    general = cli.app.registered_callback.callback
    text = ["## Command line", markdown(general.__doc__), *options(general)]
    for command in cli.app.registered_commands:
        function = command.callback
        text += [f"### dflash {command.name or function.__name__}", markdown(function.__doc__), *options(function)]
    return text


def page() -> str:
    named = [name for names in SECTIONS.values() for name in names]
    others = [name for name in dflash.__all__ if name not in named]
    text = []
    for title, names in (SECTIONS | ({"Other": others} if others else {})).items():
        text.append(f"## {title}")
        for name in names:
            text += entry(f"dflash.{name}", getattr(dflash, name))
        if title == "Generation":
            text += entry("dflash.rules.RuleArguments", rules.RuleArguments)
            text += entry("dflash.sampling.fold", sampling.fold)
    text += ["## Ops", markdown(ops.__doc__)]
    for name in ops.__all__:
        text += entry(f"dflash.ops.{name}", getattr(ops, name))
    return HEAD + "\n\n".join(text + command_line()) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with docs/api.md instead of writing it")
    if not parser.parse_args().check:
        PATH.write_text(page())
        return 0
    return int(PATH.read_text() != page())


if __name__ == "__main__":
    sys.exit(main())
