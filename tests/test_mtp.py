"""Test heads that targets bring for themselves: what they draft, how they are found, and what they refuse."""

import pytest
import torch
from baseline import prompt
from families import make_draft, make_target, save_with_head
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import dflash
from dflash.loading import load_mtp

COUNT = 3  # drafts per step


def their_head(folder) -> tuple:
    """Return transformers' own target and head of a folder."""
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = target.config
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None):
        config.mtp_layer_types = config.layer_types[-1:]
    if getattr(config, "mlp_layer_types", None):
        config.mtp_mlp_layer_types = ["sparse"]
    # The patterns name the layers of published sizes.
    target._keys_to_ignore_on_load_unexpected = [r"^mtp.*", rf"model\.layers\.{config.num_hidden_layers}\..*"]
    return target, MtpModel.from_pretrained(target).eval()


@torch.no_grad()
def their_drafts(target, head, text: torch.Tensor, length: int) -> list[int]:
    """Return the tokens after ``text[length]`` that transformers' head drafts by passes over its own output."""
    hidden, cache = target.get_decoder()(text[None, :length]).last_hidden_state, MtpCache(config=head.config)
    ids, places, drafts = text[None, 1 : length + 1], torch.arange(1, length + 1)[None], []
    for _ in range(COUNT):
        hidden = head.forward_layer(0, hidden, places, cache, input_ids=ids)[:, -1:]
        drafts.append(int(head._project_to_logits(hidden).argmax()))
        ids, places = torch.tensor([drafts[-1:]]), places[:, -1:] + 1
    return drafts


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe"])
def test_drafts_are_those_of_transformers_head_after_any_rollbacks(family, tmp_path):
    """Of 8 tokens some are guessed right, so steps take up one pair or several; a prompt continues a cached one."""
    theirs = their_head(save_with_head(tmp_path, family, vocab_size=8))
    generator = dflash.Generator(dflash.load_target(tmp_path), "mtp", max_length=120, prefill_chunk=8)
    accepted, state = set(), generator.state
    for first, new in ((prompt(21, vocab=8), 9), (prompt(21, vocab=8), 30), (prompt(1, vocab=8), 30)):
        output = generator.generate(first[None], max_new_tokens=new, return_dict_in_generate=True)
        accepted.update(output.statistics.acceptance_lengths[0])
        length = int(state.length - state.num_context)  # where the last step began
        assert state.block[0, 1:].tolist() == their_drafts(*theirs, output.sequences[0], length)
    assert len(accepted) > 1


def test_rows_of_a_batch_draft_what_they_draft_alone(tmp_path):
    target = dflash.load_target(save_with_head(tmp_path, "qwen3_5", vocab_size=20))
    ids = torch.stack([prompt(9, seed, vocab=20) for seed in (1, 2, 3)])
    call = {"max_new_tokens": 25, "return_dict_in_generate": True}
    together = dflash.generate(target, "mtp", ids, **call).statistics.acceptance_lengths
    assert together == [
        dflash.generate(target, "mtp", row[None], **call).statistics.acceptance_lengths[0] for row in ids
    ]


def test_rejection_sampling_keeps_the_distribution(tmp_path):
    """The second of two drafts is drawn from what the head predicts after the first."""
    target = dflash.load_target(save_with_head(tmp_path, "qwen3_5", vocab_size=6))
    ids, n = prompt(4, vocab=6)[None], 4000
    call = {"max_new_tokens": 4, "temperature": 1.0}
    counts = []
    for acceptance in ("keyed", "rejection"):
        generator = dflash.Generator(target, "mtp", max_length=16, batch_size=n, block_size=4)
        text = generator.generate(ids.expand(n, -1), seed=5, acceptance=acceptance, **call)[:, 4:]
        counts.append([torch.bincount(column, minlength=6) / n for column in text.T])
    for ours, theirs in zip(*counts, strict=True):
        assert (ours - theirs).abs().sum() / 2 < 0.05  # 0.02 by chance


@pytest.mark.parametrize("options", [
    {"tree": 8}, {"draft_weights": "int8"}, {"drafter_window": 9}, {"denoise_steps": 2},
], ids=str)  # fmt: skip
def test_what_a_head_cannot_do_is_refused(options, tmp_path):
    target = dflash.load_target(save_with_head(tmp_path, "qwen3_5"))
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* needs a DFlash drafter, got draft='mtp': leave it"):
        dflash.generate(target, "mtp", prompt(4)[None], **options)
    generator = dflash.Generator(target, "mtp", max_length=32)
    if options.keys() & {"tree", "denoise_steps"}:
        with pytest.raises(ValueError, match=r"needs a DFlash drafter|was made with tree=None"):
            generator.generate(prompt(4)[None], **options)


def test_a_target_without_a_head_is_refused_by_name(tmp_path):
    make_target("qwen3_5").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"whose files hold a head for drafts \(mtp\.\*, .* has none: name a drafter"):
        dflash.generate(dflash.load_target(tmp_path), "mtp", prompt(4)[None])
    with pytest.raises(ValueError, match=r"of one of the types qwen3_next, .* got llama: name a drafter"):
        dflash.generate(make_target("llama"), "mtp", prompt(4)[None])
    with pytest.raises(TypeError, match="draft must be a module, 'mtp' or None, got str"):
        dflash.generate(make_target("llama"), "head", prompt(4)[None])


def test_one_shot_calls_with_a_head_keep_it_apart_from_others(tmp_path):
    target, ids = dflash.load_target(save_with_head(tmp_path, "qwen3_5")), prompt(4)[None]
    call = {"max_new_tokens": 8, "return_dict_in_generate": True}
    for draft, size in (("mtp", 4), (None, 1), (load_mtp(target), 4), (make_draft(target), 16), ("mtp", 4)):
        assert dflash.generate(target, draft, ids, **call).statistics.block_size == size
