"""Write docs/targets.md: run a tiny random model of every family and record the result.

python docs/make_targets.py            # writes docs/targets.md
python docs/make_targets.py --check    # exits 1 if docs/targets.md is out of date
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from baseline import greedy, left_padded, prompt  # noqa: E402
from families import FAMILIES, RECURRENT, make_draft, make_target  # noqa: E402
from rollback import play  # noqa: E402

import dflash  # noqa: E402
from dflash.targets import Target, refusal  # noqa: E402

NOTES = {
    "qwen3 (windowed)": "sliding and full layers",
    "mistral (windowed)": "sliding layers",
    "gemma3": "sliding and full layers, scaled embeddings",
    "gemma4": "sliding and full layers, scaled embeddings, softcapped logits",
    "gemma4 (shared K/V)": "the last layers read the K/V of earlier ones",
    "gpt_oss": "sliding and full layers, attention sinks, YaRN, mixture of experts",
    "gemma4 (experts)": "mixture of experts next to an MLP, sliding and full layers",
    "glm4_moe": "partial rotary embedding, mixture of experts",
    "deepseek_v3": "multi-head latent attention (keys and values of different width), mixture of experts",
    "kimi_k25": "text only; its language model is DeepSeek-V3's",
    "qwen3_moe": "mixture of experts",
    "minimax_m2": "mixture of experts",
}
MIXERS = {
    "qwen3_5": "gated delta rule",
    "qwen3_5 (multimodal)": "gated delta rule; text prompts",
    "qwen3_5_moe": "gated delta rule, mixture of experts",
    "qwen3_next": "gated delta rule, mixture of experts",
    "olmo_hybrid": "gated delta rule",
    "kimi_linear": "KDA (a decay per key channel), latent attention, mixture of experts",
    "bailing_hybrid": "KDA, latent attention, mixture of experts",
    "nemotron_h": "Mamba-2",
    "nemotron_h (dt under its limit)": "Mamba-2, time steps that a prompt clamps and decoding does not",
    "granitemoehybrid": "Mamba-2, mixture of experts",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2 and attention side by side",
    "lfm2": "short convolution",
    "lfm2_moe": "short convolution, mixture of experts",
}
DRAFTERS = {
    "qwen3_5": "Qwen3.5-4B, 9B, 27B; Qwen3.6-27B",
    "qwen3_5 (multimodal)": "the same, from the multimodal checkpoint",
    "qwen3_5_moe": "Qwen3.5-35B-A3B, 122B-A10B; Qwen3.6-35B-A3B",
    "qwen3_next": "Qwen3-Coder-Next",
    "lfm2": "LFM2.5-1.2B (by the community)",
}
HEAD = """# Which targets run

A causal language model of transformers >= 5.15 runs if its layers attend to the whole past, or to a sliding window of
it, through transformers' attention interface, or if they keep a recurrent state by functions that dflash can roll
back (second table). Each family below was tried with a tiny random model in fp32: 4 layers, prompts of 1, 17 and 60
tokens in one padded batch, 32 new tokens, a random drafter. "Equal" means token for token equal to
`generate(do_sample=False)`.

Every target is tried once, when the first generator is made for it, and refused if something differs:

- The logits of 24 tokens, by its own forward pass and with dflash's cache and attention. Part of a block is rejected.
  A [tree](trees.md) is tried too: a target that gets only this wrong is refused trees and runs chains.
- The masks past every window and chunk that the config names, at the end of a prompt and for a token after it, with the
  cache that transformers' `generate` makes of the config. That cache drops keys by `sliding_window`,
  `attention_chunk_size`, `layer_types` and `per_layer_config` in every family, also where the modules apply no window,
  as in a Llama whose config says `sliding_window`. Take such keys out of the config.

`python -m pytest tests/test_every_target.py -m long` tries every causal language model of transformers that can be made
tiny, with windows, chunks, layers that differ and shared keys: each writes what `generate` writes, or is refused.

Refused by name: Mamba-1 (jamba, mamba, falcon_mamba, zamba), lightning attention (minimax) and other states of their
own (zaya, inkling, rwkv, xlstm, recurrent_gemma), modules that keep a convolution or a recurrence by other functions
than those of the second table, sparse-attention indexers (also qwen4_exp, glm5_next), compressed keys (deepseek_v4),
chunked attention, RoPE whose frequencies depend on the data (dynamic, longrope), encoder-decoders, models spread over
several devices by one process, sharded or offloaded, dynamic quantization of activations, and replaced functions of
transformers' attention, masks, caches, recurrences or generation loop. A model whose other functions were replaced
(Liger kernels, for example), or that has hooks, runs its own modules after the same trial.

Mixtures of experts keep the family's router and shared experts. The experts themselves run on `ops.experts` in a step's
passes if transformers would run them by its `grouped_mm` or `batched_mm`, with SiLU, GELU by tanh or gpt-oss's clamped
activation. This holds for all families with experts below. Experts without a gate (nemotron_h), or with other
activations or layouts, and those that `experts_implementation="eager"` asks for, keep their own function. On a GPU a
function that waits for the host keeps the step out of a graph, and `Generator.graph_reason` names its line.

"""
RECURRENT_HEAD = """
## Recurrent layers

A block moves the state of these layers by rows that may be rejected, and no counter can trim a state. dflash keeps it
in front of the block and takes up the accepted rows with the next pass ([how](step.md#recurrent-layers)). "bf16"
compares the bits of the logits with those of one-token decoding at the same shapes, for three patterns of accepted
and rejected drafts. The last column names the targets with a published DFlash drafter.

"""


def try_family(name: str) -> str:
    target = make_target(name)
    if reason := refusal(target):
        return f"refused: {reason}"
    prompts = [prompt(length) for length in (1, 17, 60)]
    ids, mask = left_padded(prompts)
    try:
        output = dflash.generate(target, make_draft(target), ids, attention_mask=mask, max_new_tokens=32)
    except dflash.UnsupportedTargetError as error:
        return f"refused: {error}"
    equal = [
        row[ids.shape[1] :].tolist() == greedy(target, p, 32).tolist() for row, p in zip(output, prompts, strict=True)
    ]
    return "equal" if all(equal) else f"DIFFERENT in {equal.count(False)} of {len(equal)} rows"


def try_bf16(name: str) -> str:
    """Compare the bits of one-token decoding with those of blocks of which different parts are accepted."""
    target, prompts = Target(make_target(name, dtype=torch.bfloat16)), [prompt(length) for length in (1, 17, 60)]
    one = play(target, prompts, 32)
    played = [play(target, prompts, 32, seed, one.tokens) for seed in (1, 2, 3)]
    equal = [all(map(torch.equal, each.logits, one.logits)) for each in played]
    return "equal bits" if all(equal) else f"DIFFERENT in {equal.count(False)} of {len(equal)} patterns"


def table() -> str:
    plain, recurrent = [], []
    for name, (model_type, _) in FAMILIES.items():
        row = f"| {name} | `{model_type}` | {try_family(name)} |"
        if name in RECURRENT:
            recurrent.append(f"{row} {try_bf16(name)} | {MIXERS[name]} | {DRAFTERS.get(name, '')} |")
        else:
            plain.append(f"{row} {NOTES.get(name, '')} |")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    lines = [
        *("| family | `model_type` | greedy, fp32 | what is special |", "| --- | --- | --- | --- |", *plain),
        *RECURRENT_HEAD.splitlines(),
        "| family | `model_type` | greedy, fp32 | bf16 | layers | drafters for |",
        *("| --- | --- | --- | --- | --- | --- |", *recurrent),
    ]
    return f"{HEAD}Made by `python docs/make_targets.py` with {versions}.\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with docs/targets.md instead of writing it")
    arguments = parser.parse_args()
    path, text = ROOT / "docs" / "targets.md", table()
    if not arguments.check:
        path.write_text(text)
        return 0
    rows = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return int(rows != [line for line in text.splitlines() if line.startswith("|")])


if __name__ == "__main__":
    sys.exit(main())
