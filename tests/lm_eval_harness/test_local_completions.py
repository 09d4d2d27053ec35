"""What lm-evaluation-harness reads from the server: its own model ``local-completions``, against the package's pair."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the server that other tests start

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from served import SUM, TRIP, live, pair

import dflash

ENDS = ["\n", ". It"]


@pytest.fixture(scope="module")
def server():
    with live(rows=2) as server:
        yield server


@pytest.fixture(params=[(1, 1), (3, 1), (2, 2)], ids=["one by one", "lists of prompts", "at the same time"])
def model(server, request, tmp_path):
    pair()[2].save_pretrained(tmp_path)
    batch, concurrent = request.param
    return LocalCompletionsAPI(
        base_url=f"{server.url}/completions", model="pair", tokenizer=str(tmp_path), tokenizer_backend="huggingface",
        batch_size=batch, num_concurrent=concurrent, max_length=512, max_retries=1,
    )  # fmt: skip


def ids_of(text: str) -> list[int]:
    return pair()[2](text, add_special_tokens=False).input_ids


def written(text: str, count: int) -> str:
    target, draft, tokenizer = pair()
    ids = torch.tensor([ids_of(text)])
    out = dflash.generate(target, draft, ids, max_new_tokens=count)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_likelihoods_are_those_of_a_plain_pass(model):
    pairs = [(SUM, written(SUM, 8)), (SUM, " cats"), (TRIP, written(TRIP, 3)), (TRIP, " é?"), ("", "add 4")]
    found = model.loglikelihood([Instance("loglikelihood", {}, each, n) for n, each in enumerate(pairs)])
    assert len(found) == len(pairs)
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        before = ids_of(context) or [pair()[2].eos_token_id]
        ids = before + ids_of(continuation)
        assert ids == before[: len(before) * (not context)] + ids_of(context + continuation)
        with torch.no_grad():
            rows = pair()[0](torch.tensor([ids])).logits[0, len(before) - 1 : -1].float().log_softmax(-1)
        tokens = torch.tensor(ids[len(before) :])
        assert value == pytest.approx(rows.gather(1, tokens[:, None]).sum().item(), abs=1e-4 * len(tokens))
        assert is_greedy == torch.equal(rows.argmax(1), tokens)
    assert {is_greedy for _, is_greedy in found} == {True, False}


def test_texts_are_those_of_generate_up_to_a_stop_string(model):
    asked = [(SUM, {"until": ENDS, "max_gen_toks": 40}), (TRIP, {"until": ENDS, "max_gen_toks": 40})]
    found = model.generate_until([Instance("generate_until", {}, each, n) for n, each in enumerate(asked)])
    for (text, _), got in zip(asked, found, strict=True):
        whole = written(text, 40)
        assert any(end in whole for end in ENDS)
        assert got == whole[: min(place for end in ENDS if (place := whole.find(end)) >= 0)]
