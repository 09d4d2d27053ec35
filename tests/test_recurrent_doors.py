"""Every door on a recurrent target: a tiny Qwen3.5, as the text class saves it and as a multimodal checkpoint."""

import json

import pytest
import torch
from baseline import prompt
from families import make_draft, make_target
from tiny_tokenizers import byte_level
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

import dflash
from dflash_tools.train.features import FeatureCache

NEW = 24
FAMILIES = ["qwen3_5", "qwen3_5 (multimodal)"]
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}
MEDIA = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}


def test_images_are_refused_by_name():
    text = make_target("qwen3_5", vocab_size=104).config.to_dict()
    wrapper = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=VISION, **MEDIA)).eval()

    def generate(**call):
        ids = torch.tensor([[5, 102, 100, 103, 6]])
        draft = make_draft(wrapper)
        return wrapper.generate(ids, custom_generate=dflash.custom_generate, draft=draft, max_new_tokens=2, **call)

    kinds = torch.tensor([[0, 0, 1, 0, 0]])
    with pytest.raises(ValueError, match="mm_token_type_ids other than 0, which are those of text: prompts must be te"):
        generate(mm_token_type_ids=kinds)
    pixels = {"pixel_values": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.raises(ValueError, match=r"does not apply (image inputs|pixel_values)"):
        generate(mm_token_type_ids=kinds, **pixels)
    with pytest.raises(ValueError, match="position_ids other than 0, 1, 2"):
        generate(position_ids=torch.arange(1, 6).expand(3, 1, 5))


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_features_are_the_hidden_states_of_each_row_alone(family, shell, tmp_path):
    """Rows are padded in batches. The run's mixed precision may round what is stored, not the recurrence."""
    folder, data = tmp_path / "target", tmp_path / "answers.jsonl"
    make_target(family, vocab_size=104).save_pretrained(folder)  # more than the tokenizer has, as published
    byte_level().save_pretrained(folder)
    rows = [(prompt(length).tolist(), prompt(NEW, seed=length).tolist()) for length in (7, 4, 10, 46, 3)]
    data.write_text("\n".join(json.dumps({"prompt_ids": asked, "response_ids": said}) for asked, said in rows))
    call = ["--model", folder, "--data", data, "--layers", 1, "--block-size", 4, "--steps", 2, "--eval-rows", 1]
    call += ["--eval-tokens", 5, "--output", tmp_path / "draft", "--json", "--cache-features", tmp_path / "features"]
    done = shell("train", *call, "--taps", "0,3", "--batch-tokens", 400)
    assert done.code == 0, done.err
    target, cache = (
        AutoModelForCausalLM.from_pretrained(folder),
        FeatureCache(tmp_path / "features"),
    )
    for index, (asked, said) in enumerate(rows):
        states = target(torch.tensor([asked + said]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[1], states[4]], -1)
        torch.testing.assert_close(cache.features([index]), expected.bfloat16(), rtol=2**-7, atol=1e-3)
