"""Write the tables of docs/targets.md: run a tiny random model of every family and record the result.

python docs/make_targets.py            # writes them, and with which versions; the text is written by hand
python docs/make_targets.py --check    # exits 1 if they are out of date
"""

import argparse
import re
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
    "glm_moe_dsa": "an indexer selects keys, for several layers; latent attention, mixture of experts",
    "deepseek_v32": "an indexer selects keys; latent attention, mixture of experts",
    "deepseek_v4": "windows of keys are pooled, an indexer selects; hyper-connections, sinks, experts by hash; chains",
    "glm4_moe": "partial rotary embedding, mixture of experts",
    "deepseek_v3": "multi-head latent attention (keys and values of different width), mixture of experts",
    "kimi_k25": "its language model is DeepSeek-V3's; [pictures](pictures.md)",
    "qwen3_moe": "mixture of experts",
    "minimax_m2": "mixture of experts",
}
MIXERS = {
    "qwen3_5": "gated delta rule",
    "qwen3_5 (multimodal)": "gated delta rule; [pictures](pictures.md)",
    "qwen3_5_moe": "gated delta rule, mixture of experts",
    "qwen3_next": "gated delta rule, mixture of experts",
    "olmo_hybrid": "gated delta rule",
    "kimi_linear": "KDA (a decay per key channel), latent attention, mixture of experts",
    "bailing_hybrid": "KDA, latent attention, mixture of experts",
    "glm5_next": "KDA, an indexer of pools of keys, latent attention; hyper-connections, mixture of experts",
    "qwen4_exp": "gated delta rule, an indexer of blocks of keys, n-grams; gated residual streams, mixture of experts",
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
    "glm5_next": "GLM-5.3-Flash (DFlash 2, by the community)",
    "lfm2": "LFM2.5-1.2B (by the community)",
}


def new_tokens(name: str) -> int:
    return 12 if name == "qwen4_exp" else 32  # its modules loop over rows in Python


def try_family(name: str) -> str:
    target = make_target(name)
    if reason := refusal(target):
        return f"refused: {reason}"
    prompts, new = [prompt(length) for length in (1, 17, 60)], new_tokens(name)
    ids, mask = left_padded(prompts)
    try:
        output = dflash.generate(target, make_draft(target), ids, attention_mask=mask, max_new_tokens=new)
    except dflash.UnsupportedTargetError as error:
        return f"refused: {error}"
    equal = [
        row[ids.shape[1] :].tolist() == greedy(target, p, new).tolist() for row, p in zip(output, prompts, strict=True)
    ]
    return "equal" if all(equal) else f"DIFFERENT in {equal.count(False)} of {len(equal)} rows"


def try_bf16(name: str) -> str:
    """Compare the bits of one-token decoding with those of blocks of which different parts are accepted."""
    target, prompts = Target(make_target(name, dtype=torch.bfloat16)), [prompt(length) for length in (1, 17, 60)]
    one = play(target, prompts, new_tokens(name))
    played = [play(target, prompts, new_tokens(name), seed, one.tokens) for seed in (1, 2, 3)]
    equal = [all(map(torch.equal, each.logits, one.logits)) for each in played]
    return "equal bits" if all(equal) else f"DIFFERENT in {equal.count(False)} of {len(equal)} patterns"


def tables() -> list[str]:
    plain = ["| family | `model_type` | greedy, fp32 | what is special |", "| --- | --- | --- | --- |"]
    recurrent = [
        "| family | `model_type` | greedy, fp32 | bf16 | layers | drafters for |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (model_type, _) in FAMILIES.items():
        row = f"| {name} | `{model_type}` | {try_family(name)} |"
        if name in RECURRENT:
            recurrent.append(f"{row} {try_bf16(name)} | {MIXERS[name]} | {DRAFTERS.get(name, '')} |")
        else:
            plain.append(f"{row} {NOTES.get(name, '')} |")
    return ["\n".join(rows) + "\n" for rows in (plain, recurrent)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare them with what would be written")
    arguments = parser.parse_args()
    path, made = ROOT / "docs" / "targets.md", iter(tables())
    before = path.read_text()
    text = re.sub(r"(?:^\|.*\n)+", lambda _: next(made), before, flags=re.MULTILINE)
    if arguments.check:
        return int(text != before)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    path.write_text(re.sub(r"(?<=make_targets.py` with ).*(?=\.$)", versions, text, flags=re.MULTILINE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
