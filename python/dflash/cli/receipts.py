"""``dflash verify``: derive every token of a receipt again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..evaluate import PAIR
from ..terminal import shortened
from .loading import Source, check_device, load_target, load_tokenizer
from .options import Device, Json, TrustRemoteCode

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
    from ..receipts import Receipt, lines_of
    from ..receipts import verify as verify_receipt

    receipt = Receipt.read(file)
    source = Source(str(PAIR / "target") if model is None else model, trust_remote_code, quiet=as_json)
    if device is None and receipt.weights is not None:
        device = "cpu"  # int8 weights are computed with there only
    device = check_device(receipt.fingerprints.dtype, device)
    tokenizer = load_tokenizer(source)
    # 2. Derive the tokens again.
    try:
        found = verify_receipt(receipt, load_target(source, receipt.fingerprints.dtype, device), tokenizer)
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
