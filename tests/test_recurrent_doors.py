"""Every door on a recurrent target: a tiny Qwen3.5, as the text class saves it and as a multimodal checkpoint."""

import json

import pytest
import torch
from families import draft_config, make_draft
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.models.qwen3_5 import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

import dflash

NEW = 24
LETTERS = 13  # the first ids of the tokenizer: what the target writes
KINDS = ("text", "multimodal")

TEXT = {
    "vocab_size": 104,  # more than the tokenizer has, as published
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 2048,
    "eos_token_id": 0, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
# Keys of the published checkpoints that transformers does not read.
UNREAD = {"attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32"}
UNREAD |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}
MEDIA = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
# Like Qwen's: past answers lose their reasoning, here all up to the last "e".
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}a{{ m.content }}\n{% else %}b{{ m.content.split('e')[-1] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}be{% endif %}"
)


def save_text_class(folder):
    """Save a random target that writes letters, and return it."""
    torch.manual_seed(0)
    target = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT)).eval()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
        target.lm_head.weight[LETTERS:] = 0
        target.lm_head.weight[:2] = 0
    target.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    target.save_pretrained(folder)
    return target


def save_checkpoint(folder, target):
    """Save ``target`` as published: with a vision tower and a multi-token head, under the wrapper's names."""
    wrapper = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=VISION, **MEDIA))
    wrapper.model.language_model.load_state_dict(target.model.state_dict())
    wrapper.lm_head.load_state_dict(target.lm_head.state_dict())
    wrapper.generation_config = target.generation_config
    wrapper.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.randn(64, 128)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= UNREAD
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with ``text``, ``multimodal`` and ``draft``."""
    root = tmp_path_factory.mktemp("qwen3_5")
    target = save_text_class(root / "text")
    save_checkpoint(root / "multimodal", target)
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    for kind in KINDS:
        tokenizer.save_pretrained(root / kind)
    (root / "draft").mkdir()
    (root / "draft" / "config.json").write_text(json.dumps(draft_config(target)))
    weights = {name: tensor.contiguous() for name, tensor in make_draft(target).state_dict().items()}
    save_file(weights, root / "draft" / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def target(root):
    return AutoModelForCausalLM.from_pretrained(root / "text").eval()


@pytest.fixture(scope="module")
def wrapper(root):
    return AutoModelForImageTextToText.from_pretrained(root / "multimodal").eval()


@pytest.fixture(scope="module")
def draft(root):
    return dflash.load_draft(root / "draft")


@pytest.fixture(scope="module")
def tokenizer(root):
    return AutoTokenizer.from_pretrained(root / "multimodal")


@pytest.fixture(params=KINDS)
def models(request, root):
    """Return the options that name a pair, of both kinds of folder."""
    return ["--model", str(root / request.param), "--draft", str(root / "draft")]


def own_text(target, tokenizer, ids, new=NEW):
    """Return what ``target.generate`` writes after ``ids``."""
    out = target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=new)
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def asked(tokenizer, *contents, template=None):
    """Return the token ids of a conversation of a user and the assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


PROMPTS = ["abc def", "face", "a bad idea", "hij " * 15 + "b", "dig"]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    return path


# ---------------------------------------------------------------------------------------------- generate, chat


# ---------------------------------------------------------------------------------------------- from Python


def test_one_shot_calls_and_streams_equal_generate(target, wrapper, draft, tokenizer):
    ids = asked(tokenizer, "abc def")
    expected = own_text(target, tokenizer, ids)
    for model in (target, wrapper):
        out = dflash.generate(model, draft, torch.tensor([ids]), max_new_tokens=NEW)
        assert tokenizer.decode(out[0, len(ids) :]) == expected
        events = dflash.stream(model, draft, torch.tensor([ids]), tokenizer=tokenizer, max_new_tokens=NEW)
        assert "".join(event.text[0] for event in events) == expected
    dflash.release()


def test_images_are_refused_by_name(wrapper, draft):
    def generate(**call):
        ids = torch.tensor([[5, 102, 100, 103, 6]])
        return wrapper.generate(ids, custom_generate=dflash.custom_generate, draft=draft, max_new_tokens=2, **call)

    kinds = torch.tensor([[0, 0, 1, 0, 0]])
    with pytest.raises(ValueError, match="mm_token_type_ids other than 0, which are those of text: prompts must be te"):
        generate(mm_token_type_ids=kinds)
    pixels = {"pixel_values": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.raises(ValueError, match=r"does not apply (image inputs|pixel_values)"):
        generate(mm_token_type_ids=kinds, **pixels)
    with pytest.raises(ValueError, match="position_ids other than 0, 1, 2"):
        generate(position_ids=torch.arange(1, 6).expand(3, 1, 5))


# ---------------------------------------------------------------------------------------------- measure, write, train


@pytest.fixture
def train(shell, models, questions, tmp_path):
    """Return a function that runs ``dflash train`` on the target's own answers."""
    out = tmp_path / "answers.jsonl"
    assert shell("regenerate", questions, *models, "--out", out, "--max-new-tokens", NEW).code == 0

    def run(output, *options):
        call = ["--model", models[1], "--data", out, "--layers", 1, "--block-size", 4, "--steps", 2]
        call += ["--eval-rows", 1, "--eval-tokens", 5, "--output", output, "--json"]
        done = shell("train", *call, *options)
        assert done.code == 0, done.err
        return json.loads(done.out)

    return run


def test_cached_features_are_the_hidden_states_of_each_row_alone(train, target, tmp_path):
    """Rows are padded in batches. The run's mixed precision may round what is stored, not the recurrence."""
    train(tmp_path / "draft", "--cache-features", tmp_path / "features", "--taps", "0,3", "--batch-tokens", 400)
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    cache = dflash.train.features.FeatureCache(tmp_path / "features")
    assert len({len(row["prompt_ids"]) for row in rows}) > 1
    for index, row in enumerate(rows):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        states = target(ids, output_hidden_states=True).hidden_states
        expected = torch.cat([states[1], states[4]], -1)
        torch.testing.assert_close(cache.features([index]), expected.bfloat16(), rtol=2**-7, atol=1e-3)
