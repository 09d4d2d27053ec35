"""Test responses of the target: they depend neither on the batch nor on interruptions."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from families import make_draft, make_target
from test_train_data import THINKS
from tiny_tokenizers import byte_level, spoken

import dflash
from dflash.loading import prompt_ids
from dflash_tools.config import RegenerateConfig
from dflash_tools.train.data import load_prompts, load_rows
from dflash_tools.train.regenerate import LocalWriter, ServerWriter, jobs, regenerate, user_turn, write_prompts

PROMPTS = ["w7 w8", "w9 w10 w11 w12 w13 w14", "w15", "w16 w17 w18", "w19 w20 w21 w22"]


@pytest.fixture(scope="module")
def target():
    """Return a tiny target that ends some answers with a stop token and not others."""
    target = make_target("qwen3")
    target.generation_config.eos_token_id = 1
    with torch.no_grad():
        target.get_output_embeddings().weight[1] *= 1.3
    return target


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def rows_of(path) -> dict[tuple[int, int], dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    keyed = {(row["line"], row["sample"]): row for row in rows}
    assert len(keyed) == len(rows), "a response was written twice"
    return keyed


MIXED = RegenerateConfig(temperatures=(0.0, 1.0), samples=2, seed=3, max_new_tokens=12, top_k=20)


def test_prompts_that_lose_their_text_are_not_asked(target, prompts, tmp_path):
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content.replace('w15', 'w7 w8') }}{% endfor %}"
    writer, out = LocalWriter(target, spoken(template), name="tiny"), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="prompt on line 3: the prompt differs from that of the prompt on line 1, and"):
        regenerate(load_prompts(prompts), writer, out, MIXED)
    assert not out.exists()
    twice = [{**prompt, "prompt": "w7 w8"} for prompt in load_prompts(prompts)[:2]]
    assert regenerate(twice, writer, out, MIXED).written == 6


@pytest.mark.parametrize(("drafted", "weights"), [(False, None), (True, None), (False, "int8")])
def test_a_response_does_not_depend_on_its_batch(target, prompts, tmp_path, drafted, weights):
    tokenizer, out = spoken(), tmp_path / "out.jsonl"
    draft = make_draft(target) if drafted else None
    writer = LocalWriter(target, tokenizer, draft, name="tiny", batch_size=4, raw=True, bos=True, weights=weights)
    summary = regenerate(load_prompts(prompts), writer, out, MIXED)
    rows = rows_of(out)
    assert set(rows) == {(line, sample) for line in range(1, 6) for sample in range(3)}
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}, "the test needs both kinds"
    for (line, sample), row in rows.items():
        assert row["prompt"] == PROMPTS[line - 1]
        assert row["temperature"] == (0.0 if sample == 0 else 1.0)
        ids = prompt_ids(tokenizer, {"prompt": row["prompt"]}, raw=True, bos=True)
        arguments = {"temperature": row["temperature"], "top_k": 20, "seed": row["seed"], "max_new_tokens": 12}
        alone = dflash.generate(target, None, torch.tensor([ids]), weights=weights, **arguments)[0].tolist()
        assert row["prompt_ids"] + row["response_ids"] == alone
        assert row["response"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert (row["response_ids"][-1] == 1) == (row["finish_reason"] == "stop")
    assert any(rows[line, 1]["response"] != rows[line, 2]["response"] for line in range(1, 6))
    assert summary.written == 15
    assert summary.tokens == sum(len(row["response_ids"]) for row in rows.values())
    assert summary.truncated == sum(row["finish_reason"] == "length" for row in rows.values())
    assert (summary.acceptance_length is not None) == drafted


class Stopped(Exception):
    pass


def test_an_interrupted_run_continues(target, prompts, tmp_path):
    writer = LocalWriter(target, spoken(), name="tiny", batch_size=2)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    regenerate(load_prompts(prompts), writer, whole, MIXED)

    def stop(summary, total):
        if summary.written == 4:
            raise Stopped

    with pytest.raises(Stopped):
        regenerate(load_prompts(prompts), writer, out, MIXED, progress=stop)
    assert len(rows_of(out)) == 4
    with open(out, "ab") as file:
        file.write(b'{"line": 3, "sample": 0, "resp')
    seen = []
    summary = regenerate(load_prompts(prompts), writer, out, MIXED, progress=lambda s, total: seen.append(total))
    assert (summary.found, summary.written, set(seen)) == (4, 11, {11})
    assert rows_of(out) == rows_of(whole)
    assert regenerate(load_prompts(prompts), writer, out, MIXED).written == 0


def test_a_file_of_another_run_is_refused_and_not_changed(target, prompts, tmp_path):
    out, writer = tmp_path / "out.jsonl", LocalWriter(target, spoken(), name="tiny")
    few = load_prompts(prompts)[:2]
    made = RegenerateConfig(max_new_tokens=4, seed=3)
    regenerate(few, writer, out, made)
    before = out.read_bytes()
    other_prompt = [{"line": 1, "prompt": "w30"}, few[1]]
    other_template = spoken("<user> {{ messages[0].content }}")
    refused = [
        ({"settings": RegenerateConfig(max_new_tokens=4, seed=4)}, "was written with seed"),
        ({"settings": RegenerateConfig((1.0,), max_new_tokens=4, seed=3)}, r"with temperature 0\.0, now it is 1\.0"),
        ({"settings": RegenerateConfig(max_new_tokens=4, seed=3, top_k=5)}, "with top_k None, now it is 5"),
        ({"writer": LocalWriter(target, spoken(), name="big")}, "was written with model 'tiny', now it is 'big'"),
        ({"writer": LocalWriter(target, spoken(), name="tiny", weights="int8")}, "with weights None, now it is 'int8'"),
        ({"writer": LocalWriter(target, other_template, name="tiny")}, r"asked with other tokens than line \d's"),
        ({"prompts": other_prompt}, "answers another prompt than line 1's"),
        ({"prompts": few[:1]}, "no response to any of these prompts"),
    ]
    for change, message in refused:
        call = {"prompts": few, "writer": writer, "out": out, "settings": made, **change}
        with pytest.raises(ValueError, match=message):
            regenerate(*call.values())
        assert out.read_bytes() == before
    out.write_bytes(b"oops\n" + before)
    with pytest.raises(ValueError, match=r"out\.jsonl, line 1: not a row of dflash regenerate"):
        regenerate(few, writer, out, made)
    assert out.read_bytes() == b"oops\n" + before


def test_long_prompts_are_left_out_and_counted(target, tmp_path, server):
    some = [{"line": 1, "prompt": "w7"}, {"line": 2, "prompt": " ".join(["w8"] * 506)}, {"line": 3, "prompt": "w9"}]
    writer = LocalWriter(target, spoken(), raw=True, skip_long=True)
    summary = regenerate(some, writer, tmp_path / "ours.jsonl", RegenerateConfig((0.0, 1.0), max_new_tokens=8))
    assert (summary.written, summary.skipped) == (4, 1)
    assert {line for line, _ in rows_of(tmp_path / "ours.jsonl")} == {1, 3}
    long = "This model's maximum context length is 512 tokens, however you requested 514"
    server.refused = {some[1]["prompt"]: (400, long)}
    served = {skip: ServerWriter(server.url, "served", raw=True, skip_long=skip) for skip in (True, False)}
    summary = regenerate(some, served[True], tmp_path / "theirs.jsonl")
    assert (summary.written, summary.skipped) == (2, 1)
    with pytest.raises(ValueError, match="refused the prompt on line 2: status 400: This model's maximum"):
        regenerate(some, served[False], tmp_path / "refused.jsonl")
    server.refused = {some[1]["prompt"]: (400, "no such model")}
    with pytest.raises(ValueError, match="no such model"):
        regenerate(some, ServerWriter(server.url, "x", raw=True, skip_long=True), tmp_path / "other.jsonl")


@pytest.mark.parametrize(("arguments", "message"), [
    ({"samples": 0}, "samples must be at least 1, got 0"),
    ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
    ({"temperatures": (0.5, 0.5)}, "distinct values"),
    ({"temperatures": (-1.0,)}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
])  # fmt: skip
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RegenerateConfig(**arguments)


# ---------------------------------------------------------------------------------------------- its own prompts


def test_the_target_continues_the_users_turn(target, tmp_path):
    tokenizer, out = spoken("<user> {{ messages[0].content }} <line> <assistant>"), tmp_path / "prompts.jsonl"
    prompts, counts = write_prompts(LocalWriter(target, tokenizer, name="tiny", batch_size=8), 40, out, seed=3)
    rows = {line: row for (line, _), row in rows_of(out).items()}
    assert list(rows) != sorted(rows), "the test needs a prompt that ends before an earlier one"
    for row in rows.values():
        ids, new = torch.tensor([row["prompt_ids"]]), {"max_new_tokens": 128, "stop_token_ids": [1, 3]}
        alone = dflash.generate(target, None, ids, temperature=1.0, top_p=0.95, seed=row["seed"], **new)
        assert tokenizer.decode(row["prompt_ids"]) == "<user>"
        assert row["prompt_ids"] + row["response_ids"] == alone[0].tolist()
    assert {row["response_ids"][-1] for row in rows.values()} >= {1, 3}, "the test needs both ends"
    assert counts["written"] == 40 == sum(counts.values()) - counts["written"]
    assert counts["kept"] == len(prompts) > 1
    assert all(rows[prompt["line"]]["response"] == prompt["prompt"] for prompt in prompts)
    # A shorter run is the beginning of a longer one, whatever the batch
    few = tmp_path / "few.jsonl"
    writer = LocalWriter(target, tokenizer, name="tiny", batch_size=3)
    assert write_prompts(writer, 24, few, seed=3)[0] == [prompt for prompt in prompts if prompt["line"] <= 24]
    assert write_prompts(writer, 40, few, seed=3) == (prompts, counts)
    with pytest.raises(ValueError, match="was written with seed"):
        write_prompts(writer, 40, few, seed=4)


def test_prompts_begin_with_given_texts_in_turn(target, tmp_path):
    tokenizer, out = spoken("<user> {{ messages[0].content }} <line> <assistant>"), tmp_path / "prompts.jsonl"
    writer = LocalWriter(target, tokenizer, name="tiny")
    prompts, _ = write_prompts(writer, 45, out, beginnings=["w7 w8", "", "w9"], seed=3)
    begun = ["w9", "w7 w8", ""]  # by the line's remainder
    for (line, _), row in rows_of(out).items():
        assert tokenizer.decode(row["prompt_ids"]) == f"<user> {begun[line % 3]}".strip()
    assert {prompt["line"] % 3 for prompt in prompts} == {0, 1, 2}
    assert all(prompt["prompt"].startswith(begun[prompt["line"] % 3]) for prompt in prompts)
    with pytest.raises(ValueError, match="answers another prompt than line"):
        write_prompts(writer, 45, out, beginnings=["w9"], seed=3)


def test_useless_prompts_of_the_target_are_dropped_and_counted(target, tmp_path):
    tokenizer, out = spoken("w90\nw91 {{ messages[0].content }} <end> <line>"), tmp_path / "prompts.jsonl"
    writer = LocalWriter(target, tokenizer, name="tiny")
    write_prompts(writer, 10, out)
    long = " ".join(f"w{word}" for word in range(10, 30))
    written = {
        "w7 w8": "kept", "w7 w8 w9": "kept", long: "kept", f"{long[:31]} w7": "duplicates", "w7  w8": "duplicates",
        "w7 w8 w9 w10 " * 9: "loops", " ": "empty", "w20 <user> w21": "with_marks", "w20 w91 w21": "with_marks",
        "w22 w23": "cut_off",
    }  # fmt: skip
    rows = sorted(rows_of(out).values(), key=lambda row: row["line"])
    for row, (text, fate) in zip(rows, written.items(), strict=True):
        ids = [*tokenizer(text).input_ids, 1]
        row |= {"response": tokenizer.decode(ids, skip_special_tokens=True), "response_ids": ids}
        row["finish_reason"] = "length" if fate == "cut_off" else "stop"
    out.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    prompts, counts = write_prompts(writer, 10, out)
    assert prompts == [{"line": 1, "prompt": "w7 w8"}, {"line": 2, "prompt": "w7 w8 w9"}, {"line": 3, "prompt": long}]
    assert counts == {"written": 10, **{fate: list(written.values()).count(fate) for fate in written.values()}}
    out.write_text(json.dumps(rows[0] | {"response": "", "response_ids": [1]}) + "\n")
    with pytest.raises(ValueError, match=r"none of the 1 prompts .* can be used \(1 written, 1 empty\)"):
        write_prompts(writer, 1, out)


def test_a_users_turn_is_found_in_the_chat_template():
    found = {
        "{{ '<|user|>\n' + messages[0].content + '<|end|>\n' }}<a>": ("<|user|>\n", ["<|end|>", "<a>"]),
        "<s>[INST] {{ messages[0].content | trim }} [/INST]": ("<s>[INST]", ["[/INST]"]),
        "Be kind.\n\nUSER: {{ messages[0].content }}\nASSISTANT:": ("Be kind.\n\nUSER:", ["ASSISTANT:"]),
    }
    for template, turn in found.items():
        assert user_turn(spoken(template)) == turn
    text = "{{ messages[0].content }}"
    for template in (None, f"{text} <end>", f"<user> {text}", f"<user> {text} {text} <end>", "<user> <end>"):
        with pytest.raises(ValueError, match="chat template"):
            user_turn(spoken(template))


def test_a_prompt_ends_before_the_text_that_follows_it_in_the_template(target, tmp_path):
    tokenizer, out = byte_level(), tmp_path / "prompts.jsonl"
    tokenizer.chat_template = "€ {{ messages[0].content }} cd"
    prompts, counts = write_prompts(LocalWriter(target, tokenizer), 40, out)
    assert counts["kept"] == len(prompts) > 1
    texts = [rows_of(out)[prompt["line"], 0]["response"] for prompt in prompts]
    assert any("cd" in text[-3:] for text in texts), "the test needs a prompt that the text ends"
    assert not any("cd" in text[:-3] for text in texts), "nothing is written after it"
    assert [prompt["prompt"] for prompt in prompts] == [text.partition("cd")[0].strip() for text in texts]


# ---------------------------------------------------------------------------------------------- servers


class Server:
    """A small server with OpenAI's protocol. It answers with the last word of the prompt."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict, str | None]] = []
        self.failures: list[tuple[int, str]] = []  # answered first, one per request
        self.refused: dict[str, tuple[int, str]] = {}  # always, by prompt
        self.hangs: set[str] = set()  # prompts that are answered once `released` is set
        self.released = threading.Event()
        self.message: dict = {}
        self.reply: bytes | None = None
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append((self.path, body, self.headers["Authorization"]))
                    status, content = outer.failures.pop(0) if outer.failures else (200, None)
                status, content = outer.refused.get(body.get("prompt"), (status, content))
                if body.get("prompt") in outer.hangs:
                    outer.released.wait(30)
                content = content.encode() if content is not None else outer.reply or outer.answer(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def answer(self, path: str, body: dict) -> bytes:
        chat = path.endswith("/chat/completions")
        text = "re: " + (body["messages"][-1]["content"] if chat else body["prompt"])
        choice = {"finish_reason": "stop", **({"message": {"content": text}} if chat else {"text": text})}
        if chat:
            choice["message"] |= self.message
        reply = {"choices": [choice], "usage": {"completion_tokens": 3}}
        if body.get("return_token_ids"):
            choice["token_ids"], reply["prompt_token_ids"] = [9, 1], [int(word[1:]) for word in body["prompt"].split()]
        return json.dumps(reply).encode()


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def test_a_server_answers(server, prompts, tmp_path):
    template = {"enable_thinking": False}
    writer = ServerWriter(server.url + "/", "served", api_key="secret", template=template)
    server.failures = [(503, "busy"), (429, "slow down")]
    settings = RegenerateConfig((0.0, 0.7), samples=2, seed=5, max_new_tokens=12, min_p=0.1)
    summary = regenerate(load_prompts(prompts), writer, tmp_path / "chat.jsonl", settings)
    rows = rows_of(tmp_path / "chat.jsonl")
    assert len(rows) == 15
    assert {row["response"] for row in rows.values()} == {f"re: {prompt}" for prompt in PROMPTS}
    assert (summary.tokens, summary.written) == (45, 15)
    assert len(server.requests) == 17
    by_seed = {body["seed"]: body for _, body, _ in server.requests}
    assert len(by_seed) == 15
    for row in rows.values():
        assert by_seed[row["seed"] % 2**31] == {
            "model": "served", "messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 12,
            "temperature": row["temperature"], "top_p": 1.0, "min_p": 0.1,
            "chat_template_kwargs": {"enable_thinking": False}, "seed": row["seed"] % 2**31,
        }  # fmt: skip
    assert {(path, key) for path, _, key in server.requests} == {("/v1/chat/completions", "Bearer secret")}


def test_a_servers_answers_are_read_with_their_own_template(server, prompts, tmp_path):
    template = THINKS
    raw, short = tmp_path / "raw.jsonl", tmp_path / "short.jsonl"
    few = load_prompts(prompts)[:1]
    regenerate(few, ServerWriter(server.url, "served", raw=True), raw)
    assert load_rows(raw, spoken(template), 32)["input_ids"][0][:2] == [7, 8]
    regenerate(few, ServerWriter(server.url, "served", template={"thinking": False}), short)
    asked = prompt_ids(spoken(template), few[0], template={"thinking": False})
    assert load_rows(short, spoken(template), 32)["input_ids"][0][: len(asked)] == asked
    with pytest.raises(ValueError, match=r"line 1: the row was written with template .*False.*, it cannot use"):
        load_rows(short, spoken(template), 32, template={"thinking": True})
    with pytest.raises(ValueError, match=r"raw\.jsonl, line 1: was written with raw True, now it is None"):
        regenerate(few, ServerWriter(server.url, "served"), raw)


def test_a_server_completes_raw_prompts_and_tells_ids(server, prompts, tmp_path):
    writer = ServerWriter(server.url, "served", raw=True, token_ids=True)
    regenerate(load_prompts(prompts), writer, tmp_path / "raw.jsonl")
    assert {path for path, _, _ in server.requests} == {"/v1/completions"}
    for row in rows_of(tmp_path / "raw.jsonl").values():
        assert (row["prompt_ids"], row["response_ids"]) == ([int(word[1:]) for word in row["prompt"].split()], [9, 1])
    # A server that loses the prompts' text.
    lost = json.loads(server.answer("/completions", {"prompt": "w7", "return_token_ids": True}))
    server.failures = [(200, json.dumps(lost))] * 2
    one = ServerWriter(server.url, "served", raw=True, token_ids=True, concurrency=1)
    with pytest.raises(ValueError, match="on line 2: the prompt differs from that of the prompt on line 1, and its"):
        regenerate(load_prompts(prompts), one, tmp_path / "lost.jsonl")
    assert set(rows_of(tmp_path / "lost.jsonl")) == {(1, 0)}
    server.reply = b'{"choices": [{"text": "w9", "finish_reason": "stop"}]}'
    with pytest.raises(ValueError, match="token_ids was asked for, and is not there"):
        regenerate(load_prompts(prompts), writer, tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="line 9 is a conversation, which cannot be continued raw"):
        regenerate([{"line": 9, "messages": [{"role": "user", "content": "w7"}]}], writer, tmp_path / "no.jsonl")


def test_a_servers_refusal_ends_the_run_and_earlier_answers_stay(server, prompts, tmp_path):
    out, one = tmp_path / "out.jsonl", {"concurrency": 1}
    server.failures = [(200, server.answer("/completions", {"prompt": "w7 w8"}).decode())]
    server.failures += [(400, json.dumps({"error": {"message": "prompt is\ntoo long"}}))]
    writer = ServerWriter(server.url, "served", raw=True, **one)
    with pytest.raises(ValueError, match=r"/completions refused the prompt on line 2: status 400: prompt is too long"):
        regenerate(load_prompts(prompts), writer, out)
    assert set(rows_of(out)) == {(1, 0)}
    server.failures = [(500, "broken")] * 3
    with pytest.raises(ValueError, match=r"did not answer the prompt on line 2 in 3 tries: status 500: broken"):
        regenerate(load_prompts(prompts), ServerWriter(server.url, "served", raw=True, retries=2, **one), out)
    assert regenerate(load_prompts(prompts), writer, out).written == 4


@pytest.mark.parametrize(("reply", "message"), [
    (b"<html>", r"the answer of http.*/chat/completions to line 1: not an answer of OpenAI's protocol: <html>"),
    (b'{"choices": [{"message": {"content": "\\ud83d"}, "finish_reason": "stop"}]}', "half of a character"),
    (b'{"choices": [{"message": {"content": "w7", "reasoning_content": "hm"}, "finish_reason": "stop"}]}',
     "start the server without a reasoning parser"),
    (b'{"choices": [{"message": {"content": null}, "finish_reason": "tool_calls"}]}',
     "line 1 has finish_reason 'tool_calls'"),
])  # fmt: skip
def test_malformed_answers_are_refused(server, prompts, tmp_path, reply, message):
    server.reply = reply
    with pytest.raises(ValueError, match=message):
        regenerate(load_prompts(prompts)[:1], ServerWriter(server.url, "served"), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_run_that_is_stopped_does_not_wait_for_the_server(server, prompts):
    server.hangs = {PROMPTS[1]}
    writer = ServerWriter(server.url, "served", raw=True)
    before = set(threading.enumerate())
    groups = writer.answers(jobs(load_prompts(prompts), RegenerateConfig()))
    answered = list(next(groups))
    while len(answered) < 4:
        answered += next(groups)
    began = time.monotonic()
    groups.close()  # as Ctrl-C does
    assert time.monotonic() - began < 10, "the request that hangs for 30 s is cancelled"
    ours = [thread for thread in threading.enumerate() if thread not in before and "process_request" not in thread.name]
    assert not ours, "no thread of the writer may remain"
    server.released.set()


def test_an_unreachable_server_is_reported(prompts, tmp_path):
    with socket.socket() as taken:  # bound but not listening, so no other process can answer
        taken.bind(("127.0.0.1", 0))
        writer = ServerWriter(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "served", retries=1)
        with pytest.raises(ValueError, match=r"did not answer the prompt on line \d in 2 tries"):
            regenerate(load_prompts(prompts), writer, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="must be an http:// or https:// URL"):
        ServerWriter("localhost:8000", "served")


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_writes_responses(shell, target, prompts, tmp_path, server):
    target.save_pretrained(tmp_path / "target")
    spoken().save_pretrained(tmp_path / "target")
    out, same = tmp_path / "out.jsonl", tmp_path / "same.jsonl"
    command = ("regenerate", prompts, "--model", tmp_path / "target", "--out", out, "--max-new-tokens", 6)
    command += ("--temperature", 0, "--temperature", 0.8, "--samples", 2)
    done = shell(*command, "--limit", 2, "--json").assert_done()
    assert done.err == ""
    assert json.loads(done.out)["written"] == len(rows_of(out)) == 6
    done = shell(*command).assert_done()
    assert done.out == ""
    assert "9 responses in" in done.err
    assert "6 were there before" in done.err
    writer = LocalWriter(target, spoken(), name=str(tmp_path / "target"))
    regenerate(load_prompts(prompts), writer, same, RegenerateConfig((0.0, 0.8), 2, max_new_tokens=6))
    assert rows_of(out) == rows_of(same)
    assert shell(*command, "--seed", 1).code == 2

    served = ("regenerate", prompts, "--model", "served", "--out", tmp_path / "served.jsonl", "--server", server.url)
    shell(*served).assert_done()
    assert len(rows_of(tmp_path / "served.jsonl")) == 5
    shell(*served, "--draft", "x").assert_refused("--draft does not go with --server: the server decides")
    shell("regenerate", tmp_path / "none.jsonl", "--model", tmp_path, "--out", out).assert_refused("no data file")


def test_the_command_writes_its_own_prompts(shell, target, prompts, tmp_path):
    target.save_pretrained(tmp_path / "target")
    spoken().save_pretrained(tmp_path / "target")
    own = ("regenerate", "--model", tmp_path / "target", "--out", tmp_path / "own.jsonl", "--self-prompts", 16)
    own += ("--max-new-tokens", 4)
    done = json.loads(shell(*own, "--limit", 2, "--json").out)
    assert done["self_prompts"]["written"] == len(rows_of(tmp_path / "own.prompts.jsonl")) == 16
    assert done["written"] == len(rows_of(tmp_path / "own.jsonl")) == 2
    assert "self prompts: 16 written, " in shell(*own).err
    begun, texts = ("--beginnings", tmp_path / "begun.txt"), (*own[:3], "--out", tmp_path / "begun.jsonl", *own[5:])
    begun[1].write_text("w7\n\n")
    shell(*texts, *begun).assert_done()
    assert {row["prompt"] for row in rows_of(tmp_path / "begun.prompts.jsonl").values()} == {"w7", ""}
    shell("regenerate", prompts, *own[1:5], *begun).assert_refused("add --self-prompts N")
    chat = "--self-prompts needs a tokenizer with a chat template, and no --raw"
    for more, message in ((prompts, "one of the two"), ("--raw", chat), ("--server=http://x/v1", "its chat template")):
        shell(*own, more).assert_refused(message)
