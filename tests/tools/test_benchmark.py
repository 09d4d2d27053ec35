"""Test ``dflash benchmark``: its input and its report."""

import gzip
import json
import sys
import types

import pytest
import torch
from tiny_pair import CHAT_TEMPLATE, save_pair, word_tokenizer

import dflash
from dflash_tools.config import BenchmarkConfig
from dflash_tools.measure import compare, report
from dflash_tools.measure.benchmark import answer_conversation, summarize
from dflash_tools.measure.datasets import Conversation, load_conversations


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("chat"), chat_template=CHAT_TEMPLATE)


def write(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> str:
    rows = ({"prompt": "w5 w6 w7"}, {"question": "w8 w9"}, {"turns": ["w20", "w21 w22"]})
    return write(tmp_path_factory.mktemp("data") / "three.jsonl", *rows)


@pytest.fixture
def run(shell):
    """Return a function that runs ``dflash benchmark --json`` on a pair and gives the printed report."""

    def call(pair, *arguments) -> dict:
        done = shell("benchmark", "--model", pair / "target", "--draft", pair / "draft", "--json", *arguments)
        assert done.assert_done().err == ""
        return json.loads(done.out)

    return call


# ---------------------------------------------------------------------------------------------- prompts


@pytest.fixture
def data(tmp_path):
    """Return a folder of made-up files in the published formats."""
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write('{"task_id": "HumanEval/0", "prompt": "def f():\\n"}\n')
    write(tmp_path / "gsm8k_test.jsonl", {"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"})
    rows = [{"category": "writing", "turns": ["a", "b"]}, {"category": "rag", "turns": ["c"]}]
    write(tmp_path / "spec_bench.jsonl", *rows, {"category": "coding", "turns": ["d", "e"]})
    return tmp_path


def turns(*arguments) -> list[tuple[str, ...]]:
    return [prompt.turns for prompt in load_conversations(*arguments)]


def test_published_files_are_read(data):
    assert turns("humaneval", data) == [("def f():\n",)]
    assert turns("gsm8k", data) == [("1 + 1?",), ("2 + 2?",)]
    assert turns("gsm8k", data, 1) == [("1 + 1?",)]
    assert turns("mt-bench", data) == [("a", "b"), ("d", "e")]
    assert turns("mt-bench", data, 2) == [("a", "b"), ("d", "e")]
    assert turns("spec-bench", data) == [("a", "b"), ("c",), ("d", "e")]


def test_without_a_folder_the_hub_is_asked(monkeypatch):
    asked = []

    def load_dataset(**arguments):
        asked.append(arguments)
        return [{"prompt": ["a", "b"], "category": "math"}, {"prompt": ["c"], "category": "writing"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert turns("mt-bench") == [("a", "b"), ("c",)]
    assert asked == [{"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"}]


@pytest.mark.parametrize(("text", "message"), [
    ('{"prompt": "a"}\n\n{"prompt": \n', r"x\.jsonl, line 3: not JSON"),
    ('{"prompt": "a"}\n["b"]\n', r"x\.jsonl, line 2: must be a JSON object, got list"),
    ('{"text": "a"}\n', r"line 1: a prompt needs prompt, messages, conversations, question or turns, got text"),
    ('{"turns": ["a", 1]}\n', r"x\.jsonl, line 1: turns must be non-empty text"),
    ('{"messages": [{"role": "user"}]}\n', r"x\.jsonl, line 1: message 1 must have role and content"),
    ("\n", r"x\.jsonl' has no prompts"),
])  # fmt: skip
def test_a_wrong_file_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_conversations(str(path))


def test_conversations_continue_after_their_earlier_turns(tmp_path):
    said = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w8"}]
    path = write(tmp_path / "x.jsonl", {"messages": [*said, {"role": "assistant", "content": "w9"}]}, {"prompt": said})
    for prompt in load_conversations(path):
        assert (prompt.turns, prompt.history) == (("w8",), (said[0],))
    said[0]["role"] = "assistant"
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    assert BenchmarkConfig().encode(tokenizer, ["w8"], said[:1]) == [92, 7, 91, 8, 92]
    with pytest.raises(ValueError, match="--raw continues a text, and a prompt is a conversation"):
        BenchmarkConfig(raw=True).encode(tokenizer, ["w8"], said[:1])


# ---------------------------------------------------------------------------------------------- the report


def test_the_report_follows_from_the_records(run, tiny, three, tmp_path):
    report = run(tiny, "--dataset", three, "--max-new-tokens", 20, "--temperature", 1, "--out", tmp_path / "out")
    found = report["datasets"]["three"]
    records = [json.loads(line) for line in (tmp_path / "out" / "three.jsonl").read_text().splitlines()]
    answers = [record["turns"][0] for record in records]
    assert len(answers) == found["prompts"] == found["turns"] == found["identical"] == 3
    assert found["skipped"] == 0
    assert found["new_tokens"] == sum(answer["new_tokens"] for answer in answers)
    seconds, one_token = (sum(answer[name] for answer in answers) for name in ("seconds", "one_token_seconds"))
    assert found["tokens_per_second"] == pytest.approx(found["new_tokens"] / seconds)
    assert found["speedup"] == pytest.approx(one_token / seconds)  # the same tokens on both sides
    header = report["header"]
    assert header["temperature"] == 1.0
    assert header["block_size"] == 16
    assert header["target_parameters"] == sum(p.numel() for p in load(tiny)[0].parameters())
    assert "benchmark --model" in header["command"]
    for name in ("machine", "isa", "threads", "torch", "transformers"):
        assert header[name]
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == report


def load(pair):
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(pair / "target").eval()
    return target, dflash.load_draft(pair / "draft")


def test_the_summary_equals_a_slow_count():
    def record(lengths, new, identical, ngrams):
        times = {"seconds": 2.0, "one_token_seconds": 5.0}
        return {"new_tokens": new, "one_token_new_tokens": new, "acceptance_lengths": lengths} | {
            "identical": identical, "ngrams": ngrams, "by_context": {}, "one_token_by_context": {}, **times,
        }  # fmt: skip

    found = summarize([[record([4, 1], 6, True, [3, 4])], [record([2, 4, 2], 9, False, [6, 8])]], 4, 3)
    lengths = [4, 1, 2, 4, 2]
    assert found["histogram"] == [lengths.count(n) for n in range(5)]
    assert found["acceptance_length"] == 13 / 5
    # In a step that wrote n tokens, the first n - 1 were drafts and the last is the bonus token.
    kept = [sum(length > position for length in lengths) for position in (1, 2, 3)]
    assert found["acceptance_per_position"] == [count / 5 for count in kept]
    assert found["conditional_acceptance"] == [kept[0] / 5, kept[1] / kept[0], kept[2] / kept[1]]
    assert found["speedup"] == 2.5
    assert found["tokens_per_second"] == 15 / 4
    assert (found["identical"], found["turns"], found["skipped"]) == (1, 2, 1)
    assert found["distinct_ngrams"] == 9 / 12
    nothing_kept = summarize([[record([1, 1], 3, True, [0, 0])]], 4, 1)
    assert nothing_kept["conditional_acceptance"] == [0.0, None, None]
    assert nothing_kept["distinct_ngrams"] is None


def test_the_report_has_steps_by_context(run, tiny, tmp_path, shell):
    path = write(tmp_path / "long.jsonl", {"prompt": "w5 w6"}, {"prompt": "w7 " * 250})
    call = ["--dataset", path, "--max-new-tokens", 40, "--block-size", "auto", "--temperature", 1]
    report = run(tiny, *call)
    found = report["datasets"]["long"]
    assert report["header"]["auto_width"] is True
    assert found["identical"] == 2
    assert [bucket["from"] for bucket in found["by_context"]] == [0, 256]
    assert sum(bucket["steps"] for bucket in found["by_context"]) == sum(found["histogram"])
    written = sum(bucket["steps"] * bucket["acceptance_length"] for bucket in found["by_context"])
    assert written == pytest.approx(found["new_tokens"] - 2)  # the first of each answer comes from the prompt
    seconds = sum(bucket["steps"] * bucket["step_seconds"] for bucket in found["by_context"])
    assert 0 < seconds < found["seconds"]
    assert all(1 <= bucket["rows"] <= 16 for bucket in found["by_context"])
    done = shell("benchmark", "--model", tiny / "target", "--draft", tiny / "draft", "--limit", 1, *call).assert_done()
    assert "block 16, auto" in done.out
    head = next(line for line in done.out.splitlines() if line.startswith("long, context from"))
    assert head.split()[3:] == ["steps", "accepted", "rows", "ms/step", "one-token", "speedup"]


def test_a_wrong_answer_is_not_counted_identical(run, tiny, three, monkeypatch):
    class Wrong(dflash.Generator):
        def generate(self, ids, **arguments):
            out = super().generate(ids, **arguments)
            if self.draft is not None and ids.shape[1] == 2:
                out.sequences[0, -1] += 1
            return out

    monkeypatch.setattr(compare, "Generator", Wrong)
    found = run(tiny, "--dataset", three, "--max-new-tokens", 6)["datasets"]["three"]
    assert (found["identical"], found["turns"]) == (2, 3)


def test_weights_are_stored_as_asked(shell, tiny, three, monkeypatch):
    stored, make = [], dflash.Generator.__init__

    def spy(self, *pair, **options):
        stored.append((options.get("weights"), options.get("draft_weights")))
        make(self, *pair, **options)

    monkeypatch.setattr(dflash.Generator, "__init__", spy)
    call = ["benchmark", "--model", tiny / "target", "--draft", tiny / "draft", "--dataset", three]
    call += ["--max-new-tokens", 4, "--weights", "int8"]
    header = json.loads(shell(*call, "--draft-weights", "int8", "--json").out)["header"]
    assert stored == [("int8", "int8"), ("int8", None)]
    assert (header["weights"], header["draft_weights"]) == ("int8", "int8")
    assert ", int8 target\n" in shell(*call).out


def test_trees_are_measured_next_to_chains(run, tiny, three, tmp_path):
    call = ["--dataset", three, "--max-new-tokens", 20, "--draft-sharpness", 1, "--temperature", 1]
    chain = run(tiny, *call)["datasets"]["three"]
    report = run(tiny, *call, "--tree", 5, "--out", tmp_path)
    found, header = report["datasets"]["three"], report["header"]
    assert chain["tree"] is None
    assert header["tree"] == 5
    assert found["histogram"] == chain["histogram"]  # what is not of trees is of chains
    assert found["tree"]["identical"] == found["identical"] == 3
    records = [json.loads(line)["turns"][0] for line in (tmp_path / "three.jsonl").read_text().splitlines()]
    trees = [record["tree"] for record in records]
    assert found["tree"]["new_tokens"] == sum(tree["new_tokens"] for tree in trees) == found["new_tokens"]
    assert sum(found["tree"]["histogram"]) == sum(len(tree["acceptance_lengths"]) for tree in trees)
    speed = found["new_tokens"] / sum(tree["seconds"] for tree in trees)
    assert found["tree"]["tokens_per_second"] == pytest.approx(speed)


def test_a_trained_pair_writes_identical_text(run, pair_dir):
    call = ["--dataset", pair_dir / "prompts.jsonl", "--raw", "--bos", "--limit", 3, "--max-new-tokens", 40]
    for dtype in (["float32"], ["bfloat16", "--padded"]):
        found = run(pair_dir, *call, "--dtype", *dtype)["datasets"]["prompts"]
        assert found["identical"] == 3
        assert found["acceptance_length"] > 6
    assert found["acceptance_per_position"][0] > 0.8


# ---------------------------------------------------------------------------------------------- conversations


def test_turns_are_encoded_as_the_template_says():
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    assert BenchmarkConfig().encode(tokenizer, ["w5", "w6", "w7"]) == [91, 5, 92, 6, 91, 7, 92]
    assert BenchmarkConfig(thinking=False).encode(tokenizer, ["w5"]) == [91, 5, 93]
    assert BenchmarkConfig(raw=True, bos=True).encode(tokenizer, ["w5"]) == [0, 5]


def test_the_second_turn_follows_the_first_answer(chatty):
    target, draft = load(chatty)
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    config, seen = BenchmarkConfig(max_new_tokens=5, turns="all"), []
    runners = compare.pair_runners(target, draft, compare.Decoding(5), max_length=64)
    for name, answer in runners.items():
        runners[name] = lambda ids, limit=None, answer=answer: seen.append(ids) or answer(ids, limit)
    answer_conversation(compare.Comparison(runners), tokenizer, config, Conversation(("w20", "w21 w22")), 64)
    first = dflash.generate(target, None, torch.tensor([[91, 20, 92]]), max_new_tokens=5)[0, 3:].tolist()
    assert seen[-1] == seen[-2] == [91, 20, 92, *(token for token in first if token), 91, 21, 22, 92]


# ---------------------------------------------------------------------------------------------- the plot


def test_the_plot_is_a_png(run, tiny, three, tmp_path):
    path = tmp_path / "plot.png"
    run(tiny, "--dataset", three, "--max-new-tokens", 4, "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"--plot needs matplotlib: pip install '\.\[bench\]'"):
        report.check_plot(tmp_path / "plot.png")
    with pytest.raises(ValueError, match="--plot: there is no folder"):
        report.check_plot(tmp_path / "nowhere" / "plot.png")


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(("change", "message"), [
    (["--dataset", "nonsense"], "is neither one of humaneval, gsm8k, mt-bench, spec-bench nor a file"),
    (["--dataset", "gsm8k", "--data", "."], "--data '.' holds no gsm8k_test.jsonl or gsm8k.jsonl for gsm8k"),
    (["--turns", "last"], "--turns must be first or all, got 'last'"),
    (["--turns", "all"], "--turns all needs a tokenizer with a chat template"),
    (["--no-thinking"], "--no-thinking needs a tokenizer with a chat template"),
    (["--block-size", "17", "--max-new-tokens", "9"], "block_size must be at most the drafter's own, 16, got 17"),
    (["--max-new-tokens", "600"], "no prompt of three and 600 new tokens fit the model's 512 positions"),
    (["--temperature", "-1"], "temperature must be a finite number of at least 0, got -1.0"),
    (["--plot", "plot.svg"], "--plot writes a .png"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(shell, tiny, three, tmp_path, change, message):
    given = [] if "--dataset" in change else ["--dataset", three]
    out = tmp_path / "out"
    call = ["benchmark", "--model", tiny / "target", "--draft", tiny / "draft", *given, "--out", out, *change]
    shell(*call).assert_refused(message)
    assert not out.exists()
