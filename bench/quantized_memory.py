"""Bytes and resident memory that a generator adds to a quantized target, on random weights of Qwen3-0.6B's shape.

    python bench/quantized_memory.py METHOD [--layers 28]

Methods are those of tests/quantized/methods.py, which needs tests/quantized/requirements.txt. Prints; asserts nothing.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import dflash

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / part) for part in ("", "quantized")]

import methods  # noqa: E402
from storages import storages  # noqa: E402

MIB = 2**20


def resident() -> float:
    """Return this process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / MIB


def save(folder: str, layers: int) -> None:
    """Write random bf16 weights."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(vocab_size=8192, num_hidden_layers=layers, head_dim=128, tie_word_embeddings=True, **shape)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
    model.save_pretrained(folder)


def main() -> None:
    """Print one line for a method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=methods.ACCEPTED)
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save(folder, arguments.layers)
        model = methods.load(arguments.method, torch.bfloat16, Path(folder))
    before = resident()
    generator = dflash.Generator(model, None, max_length=64, block_size=16)
    generator.generate(torch.arange(2, 10)[None], max_new_tokens=4, temperature=0.0)
    added, own = resident() - before, storages(model)
    extra = sum(size for at, size in storages(generator.engine.target.model).items() if at not in own)
    print(
        f"{arguments.method}: model {sum(own.values()) / MIB:.0f} MiB, held by the copy only {extra / MIB:.1f} MiB, "
        f"resident memory +{added:.0f} MiB"
    )


if __name__ == "__main__":
    main()
