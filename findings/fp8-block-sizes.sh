#!/usr/bin/env bash
# transformers 5.24.0 reads FP8 checkpoints by the shapes of weights and scales, not by `weight_block_size`.
#
# A matrix whose sides are no multiples of the block has a last block that is cut: 64 rows in blocks of 48 have two
# scales. Expected: rows 0 to 47 by the first, 48 to 63 by the second, as config.json says. Seen: blocks of 64 / 2 = 32
# rows, so that a quarter of the values is wrong, without a warning. Exits with 1 if that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 safetensors==0.8.0 numpy
cat >"$folder/find.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

BLOCK, SIZE, folder = 48, 64, Path(sys.argv[1])
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=1, num_attention_heads=2
)
torch.manual_seed(0)
model, tensors = transformers.LlamaForCausalLM(config), {}
for name, value in model.state_dict().items():
    tensors[name] = value.clone()
    if name.startswith("model.layers") and value.dim() == 2:
        tensors[name] = (value / 0.02).clamp(-4, 4).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.arange(1.0, 5.0).view(2, 2)  # two blocks each way: 48 and 16
save_file(tensors, folder / "model.safetensors", {"format": "pt"})
method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
(folder / "config.json").write_text(
    json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": method})
)
loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # becomes dense on a CPU
name = "model.layers.0.mlp.up_proj.weight"


def by_blocks(size: int) -> torch.Tensor:
    scales = tensors[f"{name}_scale_inv"].repeat_interleave(size, 0).repeat_interleave(size, 1)
    return tensors[name].float() * scales[:SIZE, :SIZE]


found = loaded.state_dict()[name]
print(f"transformers {transformers.__version__}, weight_block_size {BLOCK}, {SIZE} rows")
print(f"equal to blocks of 48 (expected): {torch.equal(found, by_blocks(48))}")
print(f"equal to blocks of 32 (seen): {torch.equal(found, by_blocks(32))}")
sys.exit(not torch.equal(found, by_blocks(32)))
PYTHON
"$folder/venv/bin/python" "$folder/find.py" "$folder" 2>/dev/null
