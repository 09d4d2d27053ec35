"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="The target: a folder or a hub id.")]
Draft = Annotated[str, typer.Option(help="Its DFlash drafter: a folder or a hub id.")]
MaxNewTokens = Annotated[int, typer.Option(help="New tokens at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k best tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most probable tokens up to this mass.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens this much less probable than the best.")]
Seed = Annotated[int | None, typer.Option(help="The same seed writes the same text.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens a step verifies; default: the drafter's.")]
Sharpness = Annotated[str, typer.Option(help="How sharply the drafter follows its logits: a number, inf, or auto.")]
Stop = Annotated[list[str] | None, typer.Option(help="End where this text is written; may be repeated.")]
System = Annotated[str | None, typer.Option(help="System message, for a tokenizer with a chat template.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")]
Device = Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
