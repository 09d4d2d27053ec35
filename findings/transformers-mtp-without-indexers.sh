#!/usr/bin/env bash
# transformers 5.24.0: `MtpModel`, which drafts with the layers that a checkpoint brings for it, has no mask for layers
# that pick their keys by an indexer, so it drafts for DeepSeek-V3 and not for DeepSeek-V3.2.
#
# Both publish such a layer, and the class takes the target's own layer and config. Expected: a draft from either. Seen:
# KeyError 'indexed_attention' for V3.2: the mask is made for this type of layer and then has no name to be passed on
# by. GLM-5, with layers of that type, has the same. Exits with 1 if that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.24.0
cat >"$folder/find.py" <<'PYTHON'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 1, "max_position_embeddings": 128,
}
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
found = {}
for name, more in (("deepseek_v3", {}), ("deepseek_v32", INDEXER), ("glm_moe_dsa", INDEXER)):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **more)).eval()
    if getattr(target.config, "layer_types", None):
        target.config.mtp_layer_types = target.config.layer_types[-1:]
    if getattr(target.config, "mlp_layer_types", None):
        target.config.mtp_mlp_layer_types = target.config.mlp_layer_types[-1:]
    head = MtpModel(target, 1).eval()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        hidden = target.get_decoder()(ids).last_hidden_state
        try:
            head.forward_layer(0, hidden, ids, MtpCache(config=head.config), input_ids=ids)
            found[name] = "a draft"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(f"{name}: {found[name]}")
seen = "KeyError: 'indexed_attention'"
sys.exit(found != {"deepseek_v3": "a draft", "deepseek_v32": seen, "glm_moe_dsa": seen})
PYTHON
"$folder/venv/bin/python" "$folder/find.py"
