"""Tiny models of every architecture, converted by llama.cpp's own converter, give the original's logits.

DFLASH_LLAMA_CPP is the folder of llama.cpp's source. ``.ci/run converted`` downloads it. DFLASH_LLAMA_PROGRAMS is that
of its programs (``bench/llama_server.py`` builds them): then their texts are compared too.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from cases import CASES, COMMON, OTHERWISE
from families import save_with_head
from tiny_tokenizers import byte_level
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dflash
from dflash.loading import Pretrained, has_mtp
from dflash.loading.gguf import read_gguf
from dflash.loading.gguf_tokenizer import load_tokenizer

SOURCE = Path(os.environ.get("DFLASH_LLAMA_CPP", "."))
pytestmark = pytest.mark.skipif(not (SOURCE / "conversion").is_dir(), reason="DFLASH_LLAMA_CPP names no llama.cpp")
PROGRAMS, BENCH = os.environ.get("DFLASH_LLAMA_PROGRAMS"), Path(__file__).parents[2] / "bench"
VOCABULARIES = sorted(SOURCE.glob("models/ggml-vocab-*.gguf.inp"))


def random_model(kind, name):
    base, varied = CASES[kind]
    config = CONFIG_MAPPING[kind](**copy.deepcopy({**COMMON, **base, **varied.get(name, {})}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(0)
    saved = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for name, tensor in saved.items():  # biases, norms and corrections are not 0 and 1 either
        tensor += torch.randn(tensor.shape, generator=noise) * (0.15 if tensor.dim() < 2 else 0.1)
        if name.endswith("A_log"):
            tensor.copy_(torch.rand(tensor.shape, generator=noise))
    return model


IDS = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(1))
EVERY = [(kind, name) for kind, (_, varied) in CASES.items() for name in ("", *varied)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every model in a folder of its own, with its logits, ``model.f32.gguf``, and the first of each ``.q8_0.gguf``."""
    root = tmp_path_factory.mktemp("converted")
    for kind, name in EVERY:
        model = random_model(kind, name)
        model.save_pretrained(root / f"{kind}-{name}")
        byte_level().save_pretrained(root / f"{kind}-{name}")
        with torch.no_grad():
            torch.save(model(IDS).logits, root / f"{kind}-{name}" / "logits.pt")
    for precision, names in (("f32", [f"{kind}-{name}" for kind, name in EVERY]), ("q8_0", [f"{k}-" for k in CASES])):
        worker = [sys.executable, Path(__file__).with_name("convert.py"), SOURCE, precision]
        subprocess.run([*worker, *(root / name for name in names)], check=True, capture_output=True)
    return root


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=lambda part: part or "plain")
def test_logits_of_a_converted_model_are_the_originals(folder, kind, name):
    path = folder / f"{kind}-{name}"
    target, expected = Pretrained(path / "model.f32.gguf").load_target(torch.float32), torch.load(path / "logits.pt")
    with torch.no_grad():
        assert (target(IDS).logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.skipif(not PROGRAMS, reason="DFLASH_LLAMA_PROGRAMS names no programs of llama.cpp")
@pytest.mark.parametrize(("kind", "name"), EVERY, ids=lambda part: part or "plain")
def test_llama_cpp_writes_the_same_text_from_the_file(folder, monkeypatch, kind, name):
    """Each token of its greedy text is our best one after those before it.

    Another may be it where ours is ahead by less than 1e-4 of the largest logit, ten times what the test above allows
    float32, and at one place in a mixture, whose router may take another of two experts. Its cache is in float32 too.
    """
    if f"{kind}-{name}" in OTHERWISE:
        pytest.skip(f"llama.cpp differs: {OTHERWISE[f'{kind}-{name}']}")
    monkeypatch.syspath_prepend(BENCH)
    import llama_server

    file = folder / f"{kind}-{name}" / "model.f32.gguf"
    options = ["-m", file, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup"]
    if name == "FAST":  # keys that it reads for Grok and Mistral only
        options += ["--yarn-beta-fast", 16, "--yarn-beta-slow", 2]
    asked = {"prompt": IDS[0].tolist(), "n_predict": 40, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    try:
        with llama_server.serve(Path(PROGRAMS), 1, 128, *options) as url:
            text = httpx.post(f"{url}/completion", json=asked, timeout=60).json()["tokens"]
    except SystemExit as ended:
        pytest.skip(next(line for line in str(ended).splitlines() if "error loading model" in line))
    assert len(text) == 40
    ids, target = torch.cat([IDS, torch.tensor([text[:-1]])], 1), Pretrained(file).load_target(torch.float32)
    with torch.no_grad():
        logits = target(ids).logits[0, IDS.shape[1] - 1 :, 1:]  # 0 is eos
    ahead = logits.max(-1).values - logits[range(40), [token - 1 for token in text]]
    has_router = any("expert" in part for part, _ in target.named_modules())
    assert (ahead > 1e-4 * logits.abs().max()).sum() <= has_router


@pytest.mark.parametrize("kind", CASES)
def test_weights_of_a_quantized_file_stay_packed(folder, kind):
    file = folder / f"{kind}-" / "model.q8_0.gguf"
    packed, dense = (Pretrained(file, keeps_blocks=keeps).load_target(torch.float32) for keeps in (True, False))
    left = {
        name for name, weight in packed.named_parameters() if weight.dim() > 1 and weight.shape[-1] % 32 == 0
    }  # fmt: skip
    assert not [name for name in left if not any(part in name for part in ("norm", "gate.", "router", "conv"))]
    with torch.no_grad():
        logits = dense(IDS).logits
        error = (packed(IDS).logits - logits).abs()
    assert error.median() < 0.03 * logits.abs().max()  # a rounded row may choose another expert


@pytest.mark.parametrize(("family", "sizes"), [
    ("qwen3_5", {"linear_value_head_dim": 16, "shared_expert_intermediate_size": None}),
    ("qwen3_5_moe", {"linear_value_head_dim": 16, "n_group": None, "topk_group": None}), ("glm4_moe", {}),
])  # fmt: skip
def test_the_head_of_a_converted_model_drafts_what_the_originals_does(tmp_path, family, sizes):
    save_with_head(tmp_path, family, **sizes)
    byte_level().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "mtp_num_hidden_layers": 1}))
    worker = [sys.executable, Path(__file__).with_name("convert.py"), SOURCE, "f32", tmp_path, "mtp"]
    subprocess.run(worker, check=True, capture_output=True)
    seen = []
    for path in (tmp_path, tmp_path / "model.f32.gguf"):
        assert has_mtp(path)
        generator = dflash.Generator(dflash.load_target(path, dtype=torch.float32), "mtp", max_length=64)
        text = generator.generate(IDS[:, :7], max_new_tokens=9, temperature=0.0)
        seen.append((text.tolist(), generator.state.block.tolist()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.name.split(".")[0].removeprefix("ggml-vocab-"))
def test_ids_are_those_of_llama_cpp(path):
    file = read_gguf(path.with_suffix(""))
    if file.metadata["tokenizer.ggml.model"] == "bert":
        pytest.skip("not a decoder's")
    tokenizer = load_tokenizer(file)
    assert len(tokenizer) == len(file.metadata["tokenizer.ggml.tokens"])
    texts = path.read_text().split("\n__ggml_vocab_test__\n")
    expected = [[int(id) for id in line.split()] for line in path.with_suffix(".out").read_text().splitlines()]
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert found[: len(expected)] == expected
