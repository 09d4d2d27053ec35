"""``dflash verify``: derive every token of a receipt again."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..evaluate import PAIR
from ..terminal import printable, shortened
from .loading import Source, check_device, load_target, load_tokenizer
from .options import Device, Json, TrustRemoteCode

if TYPE_CHECKING:
    from ..receipts import CheckedAnswer, Mismatch, Verification

__all__ = ["verify"]


def verify(
    file: Annotated[Path, typer.Argument(help="The receipt, from dflash generate --receipt FILE.")],
    model: Annotated[
        str | None, typer.Option(help="The target: a folder or a hub id; default: the package's pair.")
    ] = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Let a near-tie count as a token that does not follow.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that every token of a receipt's answers follows from its seed and the target's weights.

    The target runs over the recorded text once, in passes of many rows; no drafter is needed. The exit code is 0 if
    every token follows, 1 if one does not, 2 if the receipt cannot be checked: it is broken, or it was made with other
    weights. Near-ties, which rounding decides, are counted and shown.
    """
    # 1. Read the receipt: what is wrong with it is said before a model is loaded.
    from ..receipts import Receipt
    from ..receipts import verify as verify_receipt

    receipt = Receipt.read(file)
    source = Source(str(PAIR / "target") if model is None else model, trust_remote_code, quiet=as_json)
    device = check_device(receipt.fingerprints.dtype, device)
    tokenizer = load_tokenizer(source)
    # 2. Derive the tokens again.
    try:
        found = verify_receipt(receipt, load_target(source, receipt.fingerprints.dtype, device), tokenizer)
    except (RuntimeError, MemoryError) as error:  # exit code 1 would say that a token does not follow
        raise ValueError(f"the receipt cannot be checked here: {error}") from error
    # 3. Say what was found.
    if as_json:
        typer.echo(json.dumps(_report(found)))
    else:
        _print(found, receipt.fingerprints.dtype, tokenizer)
    if not (found.is_exact if exact else found.follows):
        raise typer.Exit(1)


def _report(found: Verification) -> dict[str, Any]:
    """Describe what was found for ``--json``; an infinite margin is null."""
    answers = []
    for answer in found.answers:
        row = dataclasses.asdict(answer) | {"follows": answer.follows}
        for mismatch in (row["mismatch"], *row["near_ties"]):
            if mismatch is not None and math.isinf(mismatch["margin"]):
                mismatch["margin"] = None
        answers.append(row)
    names = ("follows", "is_exact", "num_tokens", "seconds")
    differences = {name: {"receipt": theirs, "here": here} for name, (theirs, here) in found.differences.items()}
    return {**{name: getattr(found, name) for name in names}, "answers": answers, "differences": differences}


def _print(found: Verification, dtype: str, tokenizer: Any) -> None:
    for number, answer in enumerate(found.answers, 1):
        where = f"answer {number}: " if len(found.answers) > 1 else ""
        for mismatch in answer.near_ties:
            typer.echo(f"{where}near-tie in {dtype}: {_describe(mismatch, tokenizer)}")
        typer.echo(where + _verdict(answer, tokenizer))
    for name, (theirs, here) in found.differences.items():
        typer.echo(f"note: {name} is {shortened(here)} here, {shortened(theirs)} in the receipt", err=True)


def _verdict(answer: CheckedAnswer, tokenizer: Any) -> str:
    """Say in one line what was found about an answer."""
    if answer.mismatch is not None:
        return f"does not follow: {_describe(answer.mismatch, tokenizer)}"
    if answer.wrong_end:
        return f"does not follow: every token does, but {answer.wrong_end}"
    but = f", {len(answer.near_ties)} of them by a near-tie" if answer.near_ties else ""
    return f"every token follows from seed and weights: {answer.num_tokens} tokens{but}"


def _describe(mismatch: Mismatch, tokenizer: Any) -> str:
    recorded, chosen = (
        f"{token} {printable(repr(tokenizer.decode([token])))}" for token in (mismatch.token, mismatch.chosen)
    )
    margin = "a rule forbids it" if math.isinf(mismatch.margin) else f"it lost by {mismatch.margin:.3g}"
    return (
        f"token {mismatch.index + 1} is {recorded}, seed and weights choose {chosen}; {margin} "
        f"(up to {mismatch.rounding:.2g} may be rounding)"
    )
