"""Gemma 3 270M, from the GGUF file (Q4_K_M) of packages: a base model with windows and a vocabulary of 262,144."""

import dataclasses
from pathlib import Path

import pytest
import torch
from models import TREE, check_same, drafted, model_file, narrow, one_token, plain

from dflash.loading import Pretrained
from dflash.loading.gguf import read_gguf

NEW = 64
LICENSE = Path(__file__).parents[2] / "LICENSE"
PATH = "gemma-3-270m-q4_k_m.gguf"
BOS, EOS, WINDOW = 2, 1, 512
LENGTHS = {12: 9, 60: 8, 560: 3}  # of prompts, how many


@pytest.fixture(scope="module")
def files():
    return Pretrained(model_file(PATH))


@pytest.fixture(scope="module")
def model(files):
    return dataclasses.replace(files, keeps_blocks=False).load_target(torch.float32)


@pytest.fixture(scope="module")
def prompts():
    """Return parts of a text. Its tokens are the longest that fit: transformers takes a minute for the tokenizer."""
    known = {
        token: number for number, token in enumerate(read_gguf(model_file(PATH)).metadata["tokenizer.ggml.tokens"])
    }
    text, ids = " ".join(LICENSE.read_text().split()).replace(" ", "▁"), []
    while text:
        length = next(length for length in range(24, 0, -1) if text[:length] in known)
        ids.append(known[text[:length]])
        text = text[length:]
    lengths = [length for length, count in LENGTHS.items() for _ in range(count)]
    return [torch.tensor([BOS, *ids[80 * n : 80 * n + length]]) for n, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def texts(model, prompts):
    return plain(model, prompts, NEW, EOS)


@pytest.mark.parametrize("options", [{}, {"tree": TREE}], ids=["chain", "tree"])
def test_float32_text_is_that_of_transformers(model, prompts, texts, options):
    assert max(map(len, prompts)) > WINDOW == model.config.sliding_window
    found, tokens_per_step = drafted(model, prompts, texts, NEW, **options)
    check_same(found, [text.tolist() for text in texts])
    assert 3 < tokens_per_step < 7, "most drafts are right, and some are not"


@pytest.mark.parametrize("options", [{}, {"tree": TREE}], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["int8", "bfloat16", "packed"])
def test_narrow_text_is_that_of_one_token_decoding(files, model, prompts, kind, options):
    (settings, target), prompts = narrow(kind, files, model), prompts[::6]
    expected = one_token(target, prompts, 24, **settings)
    found, tokens_per_step = drafted(target, prompts, list(map(torch.tensor, expected)), 24, **settings, **options)
    check_same(found, expected)
    assert tokens_per_step > 3
