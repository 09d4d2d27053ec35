"""Tiny random models of every tested target family, and random drafters that fit them."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from draft_variants import (
    DFLASH2_VARIANTS,
    KNOWN,
    VARIANTS,
    dspark_dict,
    own,
    random_drafter,
    reduced,
    save_drafter,
)
from recorded import record
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dflash
from dflash.state import Block, State
from dflash.targets import transformers_version

VOCAB = 97
needs_assistant = pytest.mark.skipif(transformers_version() < (5, 18), reason="as_assistant refuses older transformers")

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_MOE = {
    "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_MIXED = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA4 = {**_MIXED, "vocab_size_per_layer_input": 128}  # of a second embedding; 262,144 by default
_DSV4 = {
    "layer_types": [
        "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "sliding_window": 12,
    "index_n_heads": 16, "index_head_dim": 16, "index_topk": 4, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16,
    "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "hc_mult": 2, "mlp_layer_types": ["hash_moe", *["moe"] * 3],
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip
_DSA = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}  # with few heads many scores are equal, 0

_GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_KDA = {
    **{**_MOE, **_MLA, **_LINEAR}, "linear_head_dim": 16, "linear_num_heads": 4,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
}  # fmt: skip
_MAMBA2 = {
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2,
    "mamba_chunk_size": 8, "mamba_expand": 2, "mamba_d_ssm": 128, "shared_intermediate_size": 32,
}  # fmt: skip
_NEMOTRON_H = {
    "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8, "conv_kernel": 4,
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "n_routed_experts": 4,
}  # fmt: skip
_SHORT_CONV = {**_MOE, "num_dense_layers": 1, "layer_types": ["conv", "conv", "full_attention", "conv"]}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_KIMI_VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_MULTIMODAL = {
    "kimi_k25": {"vision_config": _KIMI_VISION},
    "qwen3_5": {"vision_config": _VISION},
    "glm5_next": {"vision_config": {**_VISION, "image_size": 16, "patch_size": 4}},
}

# name -> (model_type, what differs from _COMMON)
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 (windowed)": ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "llama (llama3 RoPE)": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral (windowed)": ("mistral", {"sliding_window": 20}),
    "gemma3": ("gemma3_text", {**_MIXED, "query_pre_attn_scalar": 16}),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4 (shared K/V)": ("gemma4_text", {**_GEMMA4, "num_kv_shared_layers": 2}),
    "gemma4 (experts)": ("gemma4_text", {**_GEMMA4, **_MOE, "enable_moe_block": True, "top_k_experts": 2}),
    "gpt_oss": ("gpt_oss", {**_MOE, **_MIXED}),
    "glm4_moe": ("glm4_moe", {**_MOE, "partial_rotary_factor": 0.5}),
    "glm_moe_dsa": (
        "glm_moe_dsa", {**_MOE, **_MLA, **_DSA, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "deepseek_v3": ("deepseek_v3", {**_MOE, **_MLA}),
    "deepseek_v32": ("deepseek_v32", {**_MOE, **_MLA, **_DSA}),
    "deepseek_v4": ("deepseek_v4", _DSV4),
    "minimax_m2": ("minimax_m2", _MOE),
    "phimoe (windowed)": ("phimoe", {**_MOE, "sliding_window": 20}),
    "kimi_k25": ("kimi_k25", {**_MOE, **_MLA}),
}  # fmt: skip
# Families with recurrent layers.
RECURRENT: dict[str, tuple[str, dict]] = {
    "qwen3_5": ("qwen3_5_text", _GDN), "qwen3_5 (multimodal)": ("qwen3_5", _GDN),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_GDN, **_MOE}),
    "qwen3_next": ("qwen3_next", {**_GDN, **_MOE, "decoder_sparse_step": 1}),
    "olmo_hybrid": ("olmo_hybrid", {**_GDN, **_LINEAR, "linear_num_key_heads": 4}),
    "kimi_linear": ("kimi_linear", _KDA), "bailing_hybrid": ("bailing_hybrid", {**_KDA, "head_dim": 16}),
    "glm5_next": ("glm5_next", {
        **_KDA, "layer_types": ["linear_attention", "full_attention"] * 2, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "kv_lora_rank": 32, "q_lora_rank": 32, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 16,
        "index_kpool": 4, "hc_mult": 2, "num_key_value_heads": 4, "moe_intermediate_size": 32,
        "indexer_types": ["full"] * 4, "qk_rope_head_dim": 0,
    }),
    "qwen4_exp": ("qwen4_exp_text", {
        **_GDN, **_MOE, "layer_types": ["linear_attention", "full_attention"] * 2, "hc_count": 2, "hc_lowrank": 8,
        "ple_layer_ids": [1, 3], "ple_embed_dim": 32, "ngram_size": 3, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 200, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 16, "indexer_compress_ratio": 4, "shared_expert_intermediate_size": 32, "eos_token_id": 96,
        "head_dim": 16, "pad_token_id": 0,
    }),
    "nemotron_h": ("nemotron_h", _NEMOTRON_H),
    "nemotron_h (dt under its limit)": ("nemotron_h", {**_NEMOTRON_H, "time_step_min": 1.2}),
    "granitemoehybrid": (
        "granitemoehybrid", {**_MAMBA2, **_MOE, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [2]}),
    "falcon_h1": ("falcon_h1", _MAMBA2),
    "lfm2": ("lfm2", _SHORT_CONV),
    "lfm2_moe": ("lfm2_moe", _SHORT_CONV),
}  # fmt: skip
FAMILIES |= RECURRENT
_SIZES = {**_GDN, **_MAMBA2, **_MOE, "rotary_dim": 8}  # of other types, where their configs have such keys


def make_config(name: str, **changes):
    model_type, differences = FAMILIES.get(name) or (name, {})
    if model_type not in CONFIG_MAPPING:  # the one reason to leave a family out
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config_class = CONFIG_MAPPING[model_type]
    fields = {**_COMMON, **differences}
    if name not in FAMILIES:  # any other type of transformers
        known, mla = config_class(), _MLA if hasattr(config_class(), "kv_lora_rank") else {}
        sizes = {**_SIZES, **fields, **mla, "bos_token_id": 1, "eos_token_id": 1}.items()
        is_fixed = {key for key in dir(config_class) if isinstance(getattr(config_class, key), property)}
        fields = {key: value for key, value in sizes if hasattr(known, key) and key not in is_fixed}
    fields |= changes
    if model_type in _MULTIMODAL:
        return config_class(text_config=fields, **_MULTIMODAL[model_type])
    return config_class(**fields)


def make_target(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """Return a tiny random model whose logits are spread out, so that greedy choices are never near a tie."""
    torch.manual_seed(seed)
    config = make_config(name, **changes)
    auto = AutoModelForImageTextToText if config.model_type in _MULTIMODAL else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in key:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
    model.generation_config.max_length = None
    if name not in FAMILIES or name == "qwen4_exp":  # its n-grams read the config's, and an answer may hold it
        model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def draft_config(target, variant: str = "Qwen3-4B") -> dict:
    """Return a published variant's config with the width, vocabulary and layers of ``target``."""
    config = copy.deepcopy((VARIANTS | DFLASH2_VARIANTS)[variant])
    text = target.config.get_text_config(decoder=True)
    config |= {
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "num_target_layers": text.num_hidden_layers,
    }
    settings = config["dflash_config"]
    settings["mask_token_id"] = 1
    if "target_layer_ids" in settings:
        settings["target_layer_ids"] = list(range(min(len(settings["target_layer_ids"]), text.num_hidden_layers)))
    return config


def make_draft(target, variant: str = "Qwen3-4B", seed: int = 0) -> dflash.Drafter:
    """Return a random drafter that fits ``target``, in its dtype."""
    return random_drafter(draft_config(target, variant), seed, target.dtype)


def dspark_config(**changes) -> dict:
    """Return a DSpark drafter's config that fits a tiny target."""
    return dspark_dict(vocab_size=VOCAB, num_target_layers=4, mask_token_id=1, target_layer_ids=[1, 3], **changes)


def saved_draft(folder: Path, config: dict, tensors: dict[str, torch.Tensor] | None = None) -> dflash.Drafter:
    """Save a random drafter with ``tensors`` of its own, and load it."""
    return dflash.load_draft(save_drafter(folder, config, tensors))


SOME = {"draft_vocab_size": len(KNOWN)}
# Drafters of every kind for a tiny target, made in a folder.
DRAFTERS: dict[str, Callable[..., dflash.Drafter]] = {
    **{name: lambda target, _, name=name: make_draft(target, name) for name in VARIANTS | DFLASH2_VARIANTS},
    "value scale": lambda target, folder: saved_draft(folder, draft_config(target) | {"attention_value_scale": 0.7}),
    "DSpark": lambda _, folder: saved_draft(folder, dspark_config()),
    "DSpark of some tokens": lambda _, folder: saved_draft(folder, dspark_config(**SOME), reduced()),
    "DSpark without a head": lambda _, folder: saved_draft(folder, dspark_config(markov_rank=0)),
    "some tokens": lambda target, folder: saved_draft(folder, draft_config(target) | SOME, reduced()),
    "own head": lambda target, folder: saved_draft(
        folder, draft_config(target), {"lm_head.weight": own(VOCAB, 64) / 8}
    ),
    "the target's head": lambda target, folder: saved_draft(
        folder, draft_config(target), {"lm_head.weight": target.lm_head.weight.detach().clone()}
    ),
}


_ONE_LAYER = {
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"], "indexer_types": ["full"],
}  # fmt: skip


def save_with_head(folder: Path, family: str, **changes) -> Path:
    """Save a tiny target whose file also holds a random head, under the names of published ones. Returns the folder."""
    target = make_target(family, **changes)
    if "qwen" not in family:
        target.config.num_nextn_predict_layers = 1
    target.save_pretrained(folder)
    # 1. A layer, as it is saved
    config = make_config(family.partition(" ")[0], **changes)
    one = {key: value for key, value in _ONE_LAYER.items() if hasattr(config, key)}
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        one["layer_types"] = ["indexed_attention"]
    make_target(family.partition(" ")[0], seed=1, **changes, **one).save_pretrained(folder / "layer")
    layer = load_file(folder / "layer" / "model.safetensors")
    # 2. Its names, and what joins pairs
    hidden, generator = config.hidden_size, torch.Generator().manual_seed(2)
    shapes = {"fc": (hidden, 2 * hidden), "embedding": (hidden,), "hidden": (hidden,), "norm": (hidden,)}
    parts = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    if "qwen" in family:
        start, names = "mtp.layers.0.", ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
        names = [f"mtp.{name}.weight" for name in names]
    else:
        start = f"model.layers.{config.num_hidden_layers}."
        names = [f"{start}{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
        parts |= {name: 1 + parts[name] for name in ("embedding", "hidden", "norm")}
        parts["copy"], names = torch.zeros(1), [*names, f"{start}shared_head.head.weight"]
    head = dict(zip(names, parts.values(), strict=True))
    head |= {name.replace("model.layers.0.", start): x for name, x in layer.items() if "layers.0." in name}
    whole = load_file(folder / "model.safetensors") | head
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return folder


class Scripted:
    """Proposes what a script says, with every n-th token spoiled; the real drafter runs too."""

    script: torch.Tensor
    spoil: int = 0
    spoil_from: int = 0  # the first position that may be spoiled

    def propose(self, state: State) -> Block:
        drafts = super().propose(state).ids[:, 1:]  # its cache must stay right
        positions = state.positions(drafts.shape[1])
        truth = self.script.gather(1, positions.clamp(max=self.script.shape[1] - 1))
        if self.spoil:
            vocab = self.target.embedding_weight.shape[0]
            is_spoiled = (positions % self.spoil == 0) & (positions >= self.spoil_from)
            truth = torch.where(is_spoiled, (truth + 1) % vocab, truth)
        drafts = torch.where(drafts >= -1, truth, drafts)
        is_whole = self.rows == self.block_size
        return Block(torch.cat([state.anchor, drafts], 1, out=state.block if is_whole else None))


class Cheat(dflash.Generator):
    """A generator whose drafts are a given continuation with every n-th token spoiled: any acceptance length at will.

    ``script [batch, capacity]`` holds the tokens by position; ``spoil`` is n, 0 for never.
    """

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        if self.draft is not None:
            kind = type("ScriptedProposer", (Scripted, type(self.engine.chain)), {})
            chain = kind(self.draft, self.engine.target, self.block_size)
            self.engine.chain = self.engine.proposer = chain

    @property
    def script(self) -> torch.Tensor:
        return self.engine.chain.script

    @script.setter
    def script(self, script: torch.Tensor) -> None:
        self.engine.chain.script = script

    @property
    def spoil(self) -> int:
        return self.engine.chain.spoil

    @spoil.setter
    def spoil(self, spoil: int) -> None:
        self.engine.chain.spoil = spoil


def cheat(target, draft, prompts, answers, spoil: int = 0, ahead: bool = False, **options) -> Cheat:
    """Return a generator that drafts ``answers`` for ``prompts``, with every ``spoil``-th token wrong.

    With ``ahead`` its steps are recorded, and read one step late.
    """
    generator = Cheat(target, draft, **{"max_length": 160, "batch_size": len(prompts)} | options)
    generator.script, generator.spoil = torch.zeros(generator.batch_size, 600, dtype=torch.int64), spoil
    for row, (p, answer) in enumerate(zip(prompts, answers, strict=True)):
        generator.script[row, : len(p) + len(answer)] = torch.cat([p, answer])
    return record(generator) if ahead else generator


class GivenCosts(dict):
    """Stands for an engine's measured costs: steps of every kind cost the same by rows, and nothing is measured."""

    def __init__(self, costs: dict[int, float]) -> None:
        super().__init__()
        self.given = costs

    def __contains__(self, kind: object) -> bool:
        return True

    def __getitem__(self, kind: object) -> dict[int, float]:
        return self.given


def at_costs(generator: dflash.Generator, costs: dict[int, float]) -> dflash.Generator:
    """Let a generator choose rows by these costs instead of measured ones."""
    generator.engine.costs = GivenCosts(costs)
    return generator


def hinted(target, draft, texts: list[torch.Tensor], spoil: int = 5, **options) -> dflash.Generator:
    """Return a generator whose drafter knows each row's text but for every ``spoil``-th token; a selector knows it too.

    What it drafts is drawn from its logits as ever, in which the text stands out. ``script [rows, capacity]`` of the
    generator holds the texts by position.
    """
    options = {"max_length": 110, "batch_size": len(texts)} | options
    generator = dflash.Generator(target, draft, **options)
    generator.script = script = torch.zeros(len(texts), options["max_length"] + 20, dtype=torch.int64)
    for row, text in enumerate(texts):
        script[row, : len(text)] = text

    def hinting(predict):
        def hint(block, features, state):
            predictions = predict(block, features, state)
            positions = state.positions(predictions.logits.shape[1])
            more = torch.where(positions % spoil == 0, 0.0, 40.0).to(predictions.logits.dtype)
            known = script.gather(1, positions.clamp(max=script.shape[1] - 1))
            predictions.logits = predictions.logits.scatter_add(-1, known[..., None], more[..., None])
            return predictions

        return hint

    for proposer in filter(None, (generator.engine.chain, generator.engine.tree)):
        proposer.predict = hinting(proposer.predict)
    return generator
