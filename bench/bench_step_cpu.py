"""Milliseconds a step at larger widths on CPU: ours and the reference package's loop, random weights, interleaved.

    python bench/bench_step_cpu.py [--hidden 512 768 1024] [--layers 8] [--repeats 5]

The target is a random Qwen3 with a random 3-layer drafter of 16 rows. Acceptance with random weights means nothing: a
run emits a fixed number of tokens from a short prompt, and what is compared is the time over the number of steps that
the run took. The reference is left out where `.peers/dflash/model.py` is missing (see bench_generate.py). Prints,
asserts nothing.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peers import reference_runner
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import dflash
from dflash import ops


def pair(hidden: int, layers: int, dtype: torch.dtype, folder: Path):
    """A random target, and a random drafter for it written as a checkpoint to ``folder``."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(hidden // 128, 1),
        "head_dim": 64,
        "vocab_size": 4096,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    }
    config = Qwen3Config(num_hidden_layers=layers, eos_token_id=None, pad_token_id=0, **shape)
    target = Qwen3ForCausalLM(config).to(dtype).eval()
    draft = {
        **shape,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 3,
        "num_target_layers": layers,
        "block_size": 16,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, layers // 2, layers - 2]},
    }
    (folder / "config.json").write_text(json.dumps(draft))
    drafter = dflash.Drafter(dflash.DraftConfig.from_config(draft), dtype=dtype)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, ISA {ops.isa()}, "
        f"torch {torch.__version__}; ms a step, prompt of 16 tokens and its pass included; random weights"
    )
    print("hidden layers dtype         ours  reference  ratio")
    for hidden in arguments.hidden:
        for name in arguments.dtypes:
            dtype = getattr(torch, name)
            with tempfile.TemporaryDirectory() as folder:
                target = pair(hidden, arguments.layers, dtype, Path(folder))
                draft = dflash.load_draft(folder, dtype=dtype)
                generator = dflash.Generator(target, draft, max_length=256)

                def ours(ids, generator=generator):
                    out = generator.generate(
                        ids, max_new_tokens=arguments.new, temperature=0.0, return_dict_in_generate=True
                    )
                    return out.statistics.acceptance_lengths[0]

                runners = {"ours": ours}
                reference = reference_runner(Path(folder), target, dtype, 0.0, arguments.new)
                if reference is not None:
                    runners["reference"] = lambda ids, run=reference: run(ids)[1]
                ids = torch.randint(2, 4000, (1, 16))
                times: dict[str, list[float]] = {key: [] for key in runners}
                for run in runners.values():
                    run(ids)
                for _ in range(arguments.repeats):
                    for key, run in runners.items():
                        began = time.perf_counter()
                        steps = len(run(ids))
                        times[key].append(1000 * (time.perf_counter() - began) / max(steps, 1))
                medians = {key: statistics.median(values) for key, values in times.items()}
                other = medians.get("reference", float("nan"))
                print(
                    f"{hidden:6} {arguments.layers:6} {name:<10} {medians['ours']:7.2f} {other:10.2f} "
                    f"{other / medians['ours']:5.2f}x"
                )


if __name__ == "__main__":
    main()
