"""Types of the public names: their signatures, and what mypy makes of calls to them (`.ci/run types`)."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from types import FunctionType, MethodType

import pytest
from torch import Tensor, nn
from typing_extensions import assert_type

import dflash
from dflash.call import GenerateArguments


def signatures() -> Iterator[tuple[str, FunctionType | MethodType]]:
    """Public functions, and the constructors and public methods of public classes."""
    for name in dflash.__all__:
        thing = getattr(dflash, name)
        if not inspect.isclass(thing):
            yield name, thing
            continue
        for member, function in inspect.getmembers(thing):
            if not isinstance(function, FunctionType | MethodType) or not function.__module__.startswith("dflash"):
                continue
            if member == "__init__" or not member.startswith("_"):
                yield f"{name}.{member}", function


@pytest.mark.parametrize(("name", "function"), [pytest.param(*case, id=case[0]) for case in signatures()])
def test_signatures_are_annotated_without_any(name: str, function: FunctionType | MethodType) -> None:
    signature = inspect.signature(function)
    annotations = {p.name: p.annotation for p in signature.parameters.values() if p.name not in ("self", "cls")}
    if not name.endswith("__init__"):
        annotations["return"] = signature.return_annotation
    loose = {k: v for k, v in annotations.items() if v is inspect.Parameter.empty or re.search(r"\bAny\b", str(v))}
    assert not loose


def test_the_arguments_of_generate_are_annotated_without_any() -> None:
    annotations = inspect.get_annotations(GenerateArguments)
    assert not {name: kind for name, kind in annotations.items() if re.search(r"\bAny\b", str(kind))}


def test_the_version_is_that_of_the_distribution() -> None:
    assert dflash.__version__ == importlib.metadata.version("dflash-engine")


def calls(target: nn.Module, ids: Tensor) -> None:
    """Use the package as a typed program does. Never run."""
    draft = dflash.load_draft("folder")
    assert_type(draft, dflash.Drafter)
    assert_type(draft.config, dflash.DraftConfig)
    assert_type(dflash.generate(target, draft, ids, temperature=0.7, seed=1), Tensor)
    assert_type(dflash.generate(target, draft, ids, return_dict_in_generate=True), dflash.GenerateOutput)
    word = dflash.Grammar.regex("yes|no")
    assert_type(word, dflash.Grammar)
    assert_type(dflash.generate(target, draft, ids, grammar=[word, None]), Tensor)
    for event in dflash.stream(target, None, ids, grammar=word, max_new_tokens=8, stop_strings=["."]):
        assert_type(event, dflash.StreamEvent)
        assert_type(event.statistics, dflash.Statistics)
    generator = dflash.Generator(target, draft, max_length=256)
    assert_type(generator.generate(ids, max_new_tokens=8), Tensor)
    dflash.generate(target, draft, ids, temprature=0.7)  # type: ignore[call-overload] # misspelled arguments are found
