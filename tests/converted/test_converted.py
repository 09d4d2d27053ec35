"""Tiny models of every architecture, converted by llama.cpp's own converter, give the original's logits.

DFLASH_LLAMA_CPP is the folder of llama.cpp's source. ``.ci/run converted`` downloads it.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, COMMON
from tiny_tokenizers import byte_level
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dflash.loading import Pretrained
from dflash.loading.gguf import read_gguf
from dflash.loading.gguf_tokenizer import load_tokenizer

SOURCE = Path(os.environ.get("DFLASH_LLAMA_CPP", "."))
pytestmark = pytest.mark.skipif(not (SOURCE / "conversion").is_dir(), reason="DFLASH_LLAMA_CPP names no llama.cpp")
VOCABULARIES = sorted(SOURCE.glob("models/ggml-vocab-*.gguf.inp"))


def random_model(kind, name):
    base, varied = CASES[kind]
    config = CONFIG_MAPPING[kind](**copy.deepcopy({**COMMON, **base, **varied.get(name, {})}))
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
