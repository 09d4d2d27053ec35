"""Receipts of the server: they state what was asked, every token follows, and the check holds up nobody for long."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from served import CHAT, SUM, TEXT, TRIP, Gate, ask, chat, chunks, pair, prompt_ids, refused, serving

import dflash
from dflash.ops import PackedWeight
from dflash.sampling import fold

REQUESTS = [
    (CHAT, chat(SUM, seed=1)),
    (CHAT, chat(TRIP, temperature=1, seed=-3, n=3)),
    (TEXT, {"prompt": [SUM, TRIP], "temperature": 1.5, "seed": 7, "top_k": 50, "min_p": 0.01, "max_tokens": 60}),
    (CHAT, chat(TRIP, temperature=1, seed=4, presence_penalty=0.5, logit_bias={"5": -100, "17": 3.5}, min_tokens=40)),
    (CHAT, chat(SUM, temperature=1, stop=["9"])),
    (CHAT, chat(TRIP, stream=True, ignore_eos=True, max_tokens=90)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("receipts")


@pytest.fixture(scope="module")
def service(folder):
    with serving(receipts=folder) as service:
        yield service


def completion(response) -> tuple[str, int]:
    """Return a response's id and the number of its answers."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        found = chunks(response)
        return found[0]["id"], 1 + max(chunk["choices"][0]["index"] for chunk in found)
    return response.json()["id"], len(response.json()["choices"])


def test_every_answer_of_a_busy_session_follows(tmp_path):
    target, _, tokenizer = pair(torch.bfloat16)
    with serving(rows=4, queue=20, dtype=torch.bfloat16, receipts=tmp_path) as service:
        with ThreadPoolExecutor(2 * len(REQUESTS)) as pool:
            answered = list(pool.map(lambda request: completion(ask(service, *request)), REQUESTS * 2))
        names = {f"{name}-{index}.json": (name, index) for name, count in answered for index in range(count)}
        for name, index in names.values():
            found = ask(service, f"/v1/receipts/{name}/verify?index={index}", b"").json()
            assert found["lines"] == [f"every token follows from seed and weights: {found['num_tokens']} tokens"]
    files = {path.name: path for path in tmp_path.iterdir()}
    assert files.keys() == names.keys()
    assert len(names) == 2 * 9
    for path in files.values():
        found = dflash.verify(dflash.Receipt.read(path), target, tokenizer)
        assert found.is_exact
        assert found.differences == {}


def test_a_receipt_states_what_was_asked(service, folder):
    response = ask(service, CHAT, chat(TRIP, temperature=1, top_p=0.9, seed=-3, n=2, stop=[" to "], max_tokens=50))
    body = response.json()
    for index, choice in enumerate(body["choices"]):
        receipt = dflash.Receipt.read(folder / f"{body['id']}-{index}.json")
        (answer,), settings = receipt.answers, receipt.settings
        assert list(answer.prompt) == prompt_ids(TRIP)[0].tolist()
        assert answer.seed == fold(-3, index)
        assert (settings.temperature, settings.top_p, settings.max_new_tokens) == (1.0, 0.9, 50)
        assert settings.stop_strings == (" to ",)
        text = pair()[2].decode(answer.ids, skip_special_tokens=True)
        assert text.split(" to ")[0] == choice["message"]["content"]
        assert answer.finish_reason == choice["finish_reason"]
        assert ask(service, f"/v1/receipts/{body['id']}?index={index}", None).json() == json.loads(receipt.to_json())


def test_receipts_state_int8_weights_and_are_checked_with_the_servers_own(tmp_path, monkeypatch):
    with serving(receipts=tmp_path, weights="int8") as service:
        monkeypatch.setattr(PackedWeight, "of", lambda *_: pytest.fail("a weight was quantized again"))
        name, _ = completion(ask(service, CHAT, chat(TRIP, temperature=1, seed=3, max_tokens=60)))
        assert ask(service, f"/v1/receipts/{name}", None).json()["weights"] == "int8"
        assert ask(service, f"/v1/receipts/{name}/verify", b"").json()["is_exact"]
    monkeypatch.undo()
    target, _, tokenizer = pair()
    assert dflash.verify(dflash.Receipt.read(tmp_path / f"{name}-0.json"), target, tokenizer).is_exact


def test_a_changed_file_does_not_follow_or_is_refused(service, folder):
    name, _ = completion(ask(service, CHAT, chat(TRIP, temperature=1, seed=2)))
    path = folder / f"{name}-0.json"
    content = json.loads(path.read_text())
    content["answers"][0]["ids"][20] ^= 1
    path.write_text(json.dumps(content))
    found = ask(service, f"/v1/receipts/{name}/verify", b"").json()
    assert not found["follows"]
    assert found["answers"][0]["mismatch"]["index"] == 20
    assert found["lines"][0].startswith("does not follow: token 21 is ")
    content["fingerprints"]["weights"] = "0"
    for text, words in ((json.dumps(content), "weights is 0 in the receipt"), ("{", "not JSON")):
        path.write_text(text)
        refused(ask(service, f"/v1/receipts/{name}/verify", b""), words)


def test_what_has_no_receipt_is_not_found(service):
    none = "chatcmpl-" + "0" * 24
    for path in (none, "..%2F..%2Fetc%2Fpasswd", none + "-0", "%00"):
        for response in (ask(service, f"/v1/receipts/{path}", None), ask(service, f"/v1/receipts/{path}/verify", b"")):
            assert response.status_code in (404, 405)
            assert response.json()["error"]["type"] in ("not_found_error", "invalid_request_error")
    name, _ = completion(ask(service, CHAT, chat(max_tokens=3)))
    assert ask(service, f"/v1/receipts/{name}?index=1", None).status_code == 404
    for index in ("-1", "a", "1.5", "9" * 300):
        assert ask(service, f"/v1/receipts/{name}?index={index}", None).status_code == 400


def test_an_answer_that_did_not_end_has_no_receipt(tmp_path):
    with serving(rows=1, timeout=0.3, receipts=tmp_path) as service:
        gate = Gate(service.scheduler)
        assert ask(service, CHAT, chat()).status_code == 503
        gate.open()
    assert not list(tmp_path.iterdir())


def test_a_receipt_that_cannot_be_written_costs_no_answer(tmp_path, caplog):
    with serving(receipts=tmp_path / "missing") as service:
        name, _ = completion(ask(service, CHAT, chat(max_tokens=3)))
        assert ask(service, f"/v1/receipts/{name}", None).status_code == 404
    assert f"the receipt of {name} was not written" in caplog.text


def test_a_check_can_be_waited_for_only_so_long(tmp_path):
    with serving(rows=1, timeout=0.5, receipts=tmp_path) as service:
        name, _ = completion(ask(service, CHAT, chat(max_tokens=3)))
        endless = iter(lambda: None, 0)
        service.receipts.passes = lambda _: (None for _ in endless)
        response = ask(service, f"/v1/receipts/{name}/verify", b"")
        assert refused(response, "was not ready", 503)["code"] == "timeout"
        service.scheduler.close()


def test_the_server_says_whether_it_has_receipts(service):
    (model,) = ask(service, "/v1/models", None).json()["data"]
    assert model["has_receipts"]
    with serving() as plain:
        response = ask(plain, f"/v1/receipts/chatcmpl-{'0' * 24}/verify", b"")
        assert refused(response, "--receipts FOLDER", 404)["code"] == "receipts_are_off"


def test_a_folder_that_cannot_be_written_to_is_said_before_the_models_are_loaded(shell, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash.cli.options.ModelOptions.load", None)
    (tmp_path / "file").write_text("")
    for path, reason in (("file", "it is a file"), ("file/below", "Not a directory")):
        done = shell("serve", "--port", 0, "--receipts", tmp_path / path)
        assert (done.code, done.out) == (2, "")
        assert reason in done.err
