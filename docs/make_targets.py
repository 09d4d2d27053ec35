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
from families import FAMILIES, make_draft, make_target  # noqa: E402

import dflash  # noqa: E402
from dflash.target import refusal  # noqa: E402

NOTES = {
    "qwen3 (windowed)": "sliding and full layers",
    "mistral (windowed)": "sliding layers",
    "gemma3": "sliding and full layers, scaled embeddings",
    "gemma4": "sliding and full layers, scaled embeddings, softcapped logits",
    "gemma4 (shared K/V)": "the last layers read the K/V of earlier ones",
    "gpt_oss": "sliding and full layers, attention sinks, YaRN, mixture of experts",
    "glm4_moe": "partial rotary embedding, mixture of experts",
    "deepseek_v3": "multi-head latent attention (keys and values of different width), mixture of experts",
    "kimi_k25": "text only; its language model is DeepSeek-V3's",
    "qwen3_moe": "mixture of experts",
    "minimax_m2": "mixture of experts",
}
HEAD = """# Which targets run

A causal language model of transformers >= 5.15 runs if each of its layers attends to the whole past, or to a sliding
window of it, through transformers' attention interface, or is recurrent in one of the ways of the table: a gated delta
rule, Mamba-2 or a short convolution. Each family below was tried with a tiny random model in fp32: 4
layers, prompts of 1, 17 and 60 tokens in one padded batch, 32 new tokens, a random drafter. "Equal" means token for
token equal to `generate(do_sample=False)`. A family that is not in this table is tried on 24 tokens when a generator is
made for it, and refused if its logits differ with dflash's cache and attention.

Refused by name: recurrent layers of other kinds (jamba, minimax, zaya, inkling, qwen4_exp, glm5_next, deepseek_v4),
sparse-attention indexers, chunked attention, RoPE whose frequencies depend on the data
(dynamic, longrope), encoder-decoders, models spread over several devices, sharded or offloaded, dynamic quantization of
activations, and replaced functions of transformers' attention, masks, caches or generation loop. A model whose other
functions were replaced (Liger kernels, for example), or that has hooks, runs its own modules after the same trial.

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


def table() -> str:
    lines = ["| family | `model_type` | greedy, fp32 | what is special |", "| --- | --- | --- | --- |"]
    for name, (model_type, _) in FAMILIES.items():
        lines.append(f"| {name} | `{model_type}` | {try_family(name)} | {NOTES.get(name, '')} |")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
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
