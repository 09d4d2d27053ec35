"""Quantize the pair's target with GPTQ and compare its text with `generate`. By hand: see docs/quantized.md.

    python bench/try_gptq.py [--folder FOLDER]

With a folder, the checkpoint is kept there, and taken from there if it exists. Takes two minutes on two cores.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTQConfig

import dflash
from dflash_tools.measure import demo, demo_prompts

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / part) for part in ("", "quantized")]

from storages import storages  # noqa: E402

NEW = 60


def quantize(folder: Path) -> None:
    """Write the quantized target and its tokenizer, calibrated on the pair's prompts."""
    tokenizer = AutoTokenizer.from_pretrained(demo.PAIR / "target")
    texts = [prompt.text + (prompt.answer or "") for prompt in demo_prompts()[:32]]
    config = GPTQConfig(bits=4, group_size=64, dataset=texts, tokenizer=tokenizer)
    options = {"dtype": torch.float32, "device_map": "cpu", "quantization_config": config}
    AutoModelForCausalLM.from_pretrained(demo.PAIR / "target", **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def compare(folder: Path, dtype: torch.dtype) -> str:
    """Return how many answers are those of `generate`, and what memory the twin does not share."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, alone = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu").eval() for _ in "ab")
    generator = dflash.Generator(model, dflash.load_draft(demo.PAIR / "draft", dtype=dtype), max_length=256)
    prompts = [torch.tensor([[0, *tokenizer.encode(prompt.text)]]) for prompt in demo_prompts()[:8]]
    equal = 0
    for prompt in prompts:
        expected = alone.generate(prompt, do_sample=False, max_new_tokens=NEW)
        equal += generator.generate(prompt, temperature=0.0, max_new_tokens=NEW).tolist() == expected.tolist()
    own, twin = storages(model), storages(generator.engine.target.model)
    extra = sum(size for address, size in twin.items() if address not in own)
    kind = type(model.model.layers[0].mlp.gate_proj).__name__
    return f"{dtype}: {equal}/{len(prompts)} equal, {extra} of {sum(own.values())} bytes not shared ({kind})"


def main() -> None:
    """Quantize if needed, then print one line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    if not (folder / "config.json").is_file():
        quantize(folder)
    for dtype in (torch.float32, torch.bfloat16):
        print(compare(folder, dtype), flush=True)


if __name__ == "__main__":
    main()
