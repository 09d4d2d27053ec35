"""A quantized target writes its own text and shares all of its memory with its copy, or is refused by name.

Run by `.ci/run quantized` in an environment of its own, because plain `pytest` must not need these packages.
"""

import copy
import json
from collections.abc import Iterator

import methods
import pytest
import torch
from baseline import greedy
from baseline import prompt as random_prompt
from families import Cheat, make_draft, make_target
from methods import ACCEPTED, CONFIGS, REFUSED
from storages import storages
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

import dflash
from dflash.targets import UnsupportedTargetError
from dflash_tools.measure import demo

NEW = 24
SAMPLED = ["bitsandbytes nf4, double", "torchao int8 dynamic, per row"]
RECURRENT = ["torchao int8 weights", "quanto int8", "compressed-tensors W4A16"]
SAVED = [name for name in ACCEPTED if not name.startswith("quanto")]  # transformers does not save quanto's


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    dflash.release()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.PAIR / "target")


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Tensor]:
    lines = (demo.PAIR / "prompts.jsonl").read_text().splitlines()[:2]
    return [torch.tensor([0, *tokenizer.encode(json.loads(line)["prompt"])]) for line in lines]


def draft(dtype: torch.dtype = torch.float32) -> dflash.Drafter:
    return dflash.load_draft(demo.PAIR / "draft", dtype=dtype)


def layer(model: PreTrainedModel) -> nn.Module:
    return model.model.layers[0].mlp.gate_proj


@pytest.mark.parametrize("name", ACCEPTED)
def test_greedy_text_is_what_generate_writes_with_the_same_weights(name, prompts):
    """In fp32, on a trained model: its margins are wide, where a random model may tie."""
    generator = dflash.Generator(methods.load(name), draft(), max_length=160)
    alone = methods.load(name)
    for prompt in prompts:
        output = generator.generate(prompt[None], max_new_tokens=NEW, temperature=0.0, return_dict_in_generate=True)
        assert output.sequences[0, len(prompt) :].tolist() == greedy(alone, prompt, NEW, (0,)).tolist()
        assert output.statistics.acceptance_length > 5, "drafts of this pair are mostly right"


@pytest.mark.parametrize(
    ("name", "temperature"), [*((name, 0.0) for name in ACCEPTED), *((name, 1.0) for name in SAMPLED)]
)
def test_bfloat16_text_does_not_depend_on_what_is_accepted(name, temperature, prompts):
    """Bit for bit the text of one-token mode at the same shapes, so that no row's result depends on another row."""
    model, drafter, prompt = methods.load(name, torch.bfloat16), draft(torch.bfloat16), prompts[0]
    arguments = {"max_new_tokens": NEW, "temperature": temperature, "seed": 5, "stop_token_ids": []}
    one_token = dflash.Generator(model, None, max_length=160, block_size=16).generate(prompt[None], **arguments)
    cheat = Cheat(model, drafter, max_length=160)
    cheat.script = torch.zeros(1, 200, dtype=torch.int64)
    cheat.script[:, : one_token.shape[1]] = one_token
    lengths = set()
    for spoil in (0, 3, 1):  # all drafts right, two of three, none
        cheat.spoil = spoil
        output = cheat.generate(prompt[None], **arguments, return_dict_in_generate=True)
        assert torch.equal(output.sequences, one_token)
        lengths.add(output.statistics.acceptance_length)
    assert len(lengths) == 3


@pytest.mark.parametrize("name", ["torchao int8 weights", "compressed-tensors W4A16"])
def test_a_dflash_2_drafter_leaves_the_text_as_it_is(name, prompts):
    """In fp32, on a trained model, with block sizes as the drafter was trained and below."""
    model, alone, ids = methods.load(name), methods.load(name), prompts[0]
    for block_size in (16, 5):
        generator = dflash.Generator(model, make_draft(model, "DFlash2"), max_length=160, block_size=block_size)
        output = generator.generate(ids[None], max_new_tokens=NEW, temperature=0.0)
        assert output[0, len(ids) :].tolist() == greedy(alone, ids, NEW, (0,)).tolist()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_target_writes_its_own_text_whatever_is_accepted(name, tmp_path_factory):
    """Its text may not depend on a forward that a library puts in front of a stateful module."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    make_target("qwen3_5").save_pretrained(folder)
    model, ids = methods.load(name, folder=folder), random_prompt(17)
    text = greedy(methods.load(name, folder=folder), ids, NEW)
    cheat = Cheat(model, make_draft(make_target("qwen3_5")), max_length=128)
    cheat.script = torch.nn.functional.pad(torch.cat([ids, text])[None], (0, 64))
    for spoil in (0, 3, 1):
        cheat.spoil = spoil
        output = cheat.generate(ids[None], max_new_tokens=NEW, temperature=0.0, stop_token_ids=[])
        assert output[0, len(ids) :].tolist() == text.tolist()
    dflash.Generator(methods.load(name, torch.bfloat16, folder), max_length=64)  # is not refused


@torch.no_grad()
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_users_model_keeps_its_numbers_and_the_copy_holds_no_memory_of_its_own(name, prompts):
    """Even if the copy runs first, which is when layers of some libraries move or make what they hold."""
    ids = prompts[0][None]
    expected = methods.load(name)(ids).logits
    model = methods.load(name)
    generator = dflash.Generator(model, None, max_length=160, block_size=16)
    generator.generate(ids, max_new_tokens=4)
    assert torch.equal(model(ids).logits, expected)
    generator.generate(ids, max_new_tokens=4)
    own = storages(model)
    extra = {address: size for address, size in storages(generator.engine.target.model).items() if address not in own}
    assert sum(extra.values()) < 0.01 * sum(own.values()), extra  # the state of the tap, copied small buffers


def rows_and_the_same_with_an_outlier() -> tuple[Tensor, Tensor]:
    rows = torch.randn(1, 16, 192, generator=torch.Generator().manual_seed(3))
    changed = rows.clone()
    changed[0, 5] *= 50
    return rows, changed


def others(output: Tensor) -> Tensor:
    return torch.cat([output[:, :5], output[:, 6:]], 1)


@torch.no_grad()
@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_an_outlier_in_one_row_changes_other_rows_only_where_the_method_is_refused(name, prompts):
    model = methods.load(name)
    model(prompts[0][None])
    outputs = [others(layer(model)(rows)) for rows in rows_and_the_same_with_an_outlier()]
    assert torch.equal(*outputs) == (name in ACCEPTED)


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_a_scale_or_a_choice_of_columns_for_all_rows_is_refused_before_anything_runs(name, prompts):
    model, ids = methods.load(name), prompts[0][None]
    expected = methods.load(name)(ids).logits
    for call in (
        lambda: dflash.generate(model, None, ids, max_new_tokens=2),
        lambda: next(dflash.stream(model, None, ids, max_new_tokens=2)),
        lambda: dflash.Generator(model, max_length=64),
        lambda: model.generate(ids, max_new_tokens=2, do_sample=False, custom_generate=dflash.custom_generate),
    ):
        with pytest.raises(UnsupportedTargetError, match="a row's numbers depend on the rows next to it") as error:
            call()
        assert REFUSED[name] in str(error.value)
        assert "model.layers.0.self_attn.q_proj" in str(error.value)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("name", [name for name in ACCEPTED if name.startswith("torchao")])
def test_a_weight_that_is_a_tensor_subclass_is_not_taken_for_a_dense_one(name):
    model = methods.load(name)
    assert type(layer(model)) is nn.Linear
    assert dflash.Generator(model, max_length=64).fused_reason
    with pytest.raises(UnsupportedTargetError, match=r"fused=True needs exactly .* with weights that the kernels take"):
        dflash.Generator(model, max_length=64, fused=True)
    with pytest.raises(UnsupportedTargetError, match="its weights are quantized already"):
        dflash.Generator(model, max_length=64, weights="int8")


def test_a_quantized_cache_of_compressed_tensors_is_refused(tmp_path):
    folder = methods.compressed("compressed-tensors FP8, dynamic", demo.PAIR / "target")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = methods._loaded(tmp_path, torch.float32)
    with pytest.raises(UnsupportedTargetError):
        dflash.Generator(model, max_length=64)


@pytest.mark.parametrize("name", [name for name in SAVED if name in CONFIGS or "W8A8" in name])
def test_the_command_reads_a_saved_checkpoint(name, tokenizer, shell, tmp_path):
    folder = tmp_path / "model"
    if name in CONFIGS:
        methods.load(name).save_pretrained(folder)
    else:
        folder = methods.compressed(name, demo.PAIR / "target")
    tokenizer.save_pretrained(folder)
    arguments = ["--model", folder, "--draft", demo.PAIR / "draft", "--dtype", "float32", "--max-new-tokens", NEW]
    done = shell("generate", "add 48213 and 90377", *arguments, "--json")
    assert done.code == 0, done.err
    prompt = torch.tensor([0, *tokenizer.encode("add 48213 and 90377\n=>\n")])
    answer = tokenizer.decode(greedy(methods.load(name), prompt, NEW, (0,)), skip_special_tokens=True)
    assert json.loads(done.out)["text"].strip() == answer.strip()


def test_layers_quantized_by_hand_are_judged_too(prompts):
    """As torchao's own `quantize_` does, without a config that says so."""
    model = methods._loaded(demo.PAIR / "target", torch.float32)
    copied = copy.deepcopy(model)
    methods.ao.quantize_(copied.model.layers[1].mlp, methods.ao.Int8WeightOnlyConfig())
    ids = prompts[0][None]
    output = dflash.generate(copied, None, ids, max_new_tokens=8, temperature=0.0, stop_token_ids=[])
    assert output[0, ids.shape[1] :].tolist() == greedy(copied, prompts[0], 8).tolist()
    methods.ao.quantize_(
        model.model.layers[1].mlp, methods.ao.Int8DynamicActivationInt8WeightConfig(granularity=methods.ao.PerTensor())
    )
    with pytest.raises(UnsupportedTargetError, match=r"model\.layers\.1\.mlp\.gate_proj quantizes activations"):
        dflash.generate(model, None, ids, max_new_tokens=2)
