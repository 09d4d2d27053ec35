"""The recipe of the drafter for SmolLM2, from a tiny random model to the table, and what it refuses."""

import bz2
import json
import re

import gguf_files
import pytest
import recipes.smollm2.stages as stages
import recipes.smollm2.texts as texts
from recipes.smollm2.__main__ import main
from recipes.smollm2.evaluate import Answer, summarize
from recipes.smollm2.stages import RESULTS, HeldOut

import dflash

TEMPLATE = (
    "{% for m in messages %}<mask>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<mask>assistant\n{% endif %}"
)
TINY = {"layers": 1, "block-size": 4, "mask-token-id": 1, "draft-vocab-size": 40, "batch-tokens": 512, "eval-rows": 2}
HELD_OUT = [{"category": "b", "turns": ["ab ba", "cd"]}, {"category": "b", "prompt": "fed"}, {"question": "ba de"}]


@pytest.fixture
def folder(tmp_path, monkeypatch, another_run):
    """Return a folder with a model and prompts, for which the recipe's sizes are small."""
    monkeypatch.setattr(gguf_files, "TEMPLATE", TEMPLATE)
    small = {"TRAINING": TINY, "EPOCHS": 1, "ANSWER_TOKENS": 24, "ROWS": {"cpu": 8}, "EVALUATED_TOKENS": 16}
    for name, value in small.items():
        monkeypatch.setattr(stages, name, value)
    gguf_files.write_llama(tmp_path / "tiny.gguf", rare=1)
    write(tmp_path / "mine.jsonl", [{"prompt": "abc abc abc"}])
    write(tmp_path / "held.jsonl", HELD_OUT)
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder, **changes):
    given = {"device": "cpu", "tokens": 600, "prompts": [folder / "mine.jsonl"], "held_out": [folder / "held.jsonl"]}
    main(folder / "run", **{**given, "model": folder / "tiny.gguf", **changes})


def test_a_run_makes_every_result_and_a_second_one_makes_nothing_again(folder, capsys):
    out = folder / "run"
    run(folder, only="model")
    run(folder)
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if "done" in line] == ["model"]
    assert all((out / name).exists() for name in RESULTS.values())
    # 1. The user's prompts come first, and both temperatures answer about as many tokens as were asked for
    prompts, answers = read(out / "prompts.jsonl"), read(out / "answers.jsonl")
    assert prompts[0] == {"prompt": "abc abc abc"}
    assert sorted(row["temperature"] for row in answers) == [0.0] * len(prompts) + [0.7] * len(prompts)
    assert 300 < sum(len(row["response_ids"]) for row in answers) < 1200
    # 2. The drafter is the configured one
    config = dflash.load_draft(out / "drafter").config
    assert (config.block_size, config.num_hidden_layers, config.draft_vocab_size) == (4, 1, 40)
    # 3. The report has every category
    report = json.loads((out / "evaluation.json").read_text())["files"]["held.jsonl"]
    assert {kind: found["prompts"] for kind, found in report.items()} == {"all": 3, "b": 2}
    assert report["all"]["identical"] == 3
    assert 1 <= report["all"]["T=0.7"]["tokens_per_step"] <= 4
    assert "| held.jsonl | b | 2 | 2 |" in printed
    # 4. What is there is not made again
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "options.json"}
    run(folder)
    assert times == {path: path.stat().st_mtime_ns for path in times}
    assert capsys.readouterr().out.count("done") == len(RESULTS)


def test_an_interrupted_stage_continues(folder):
    out, whole = folder / "run", 4
    for stage in ("model", "prompts"):
        run(folder, only=stage)
    write(out / "prompts.jsonl", read(out / "prompts.jsonl")[:whole])
    run(folder, only="answers")
    answers = (out / "answers.jsonl").read_text()
    (out / "answers.jsonl").unlink()
    (out / "answers.unfinished.jsonl").write_text(answers[: len(answers) // 2])
    run(folder, only="answers")
    assert (out / "answers.jsonl").read_text().startswith(answers[: len(answers) // 3])
    assert len(read(out / "answers.jsonl")) == 2 * whole


@pytest.mark.parametrize(("changes", "message"), [
    ({"only": "pretraining"}, "--only must be model, prompts, answers"),
    ({"only": "training"}, "stage training needs .*answers.jsonl: run stage answers first"),
    ({"only": "evaluation", "held_out": []}, "add --held-out FILE"),
    ({"tokens": 700}, "was begun with --tokens 600, not 700"),
])  # fmt: skip
def test_what_cannot_run_is_refused_before_any_work(folder, monkeypatch, changes, message):
    run(folder, only="model")
    before = sorted((folder / "run").iterdir())
    monkeypatch.setattr(stages.Recipe, "measure", lambda recipe: pytest.fail("it measured"))
    with pytest.raises(ValueError, match=message):
        run(folder, **changes)
    assert sorted((folder / "run").iterdir()) == before


@pytest.mark.parametrize("turns", [["AB, ba!"], ["a", "cd"]])
def test_prompts_that_are_held_out_are_refused_by_their_line(folder, turns):
    messages = [{"role": "user", "content": turn} for turn in turns]
    write(folder / "mine.jsonl", [{"prompt": "abc"}, {"messages": messages}])
    with pytest.raises(ValueError, match=r"mine.jsonl, line 2: this prompt is held out \(.*held.jsonl, line 1\)"):
        run(folder)
    assert not (folder / "run").exists()


def test_a_held_out_text_is_found_inside_a_longer_prompt(folder):
    text = "a train leaves the station at nine and arrives at noon"
    write(folder / "held.jsonl", [{"question": text}, {"question": "yes please"}])
    held = HeldOut([folder / "held.jsonl"])
    assert held.find({"prompt": f"Solve this: {text.upper()}. Think."})
    assert held.find({"prompt": "If a train leaves the station at nine, and arrives at ten, how fast is it?"})
    assert held.find({"prompt": "Yes, please!"})
    assert not held.find({"prompt": "train leaves the station at nine and arrives at"}), "short parts are common"
    assert not held.find({"prompt": "I said yes please, and then I left the room for a while"})
    assert not held.find({"prompt": "strain leaves the station at nine and arrives at noon"}), "only whole words"


def test_texts_become_questions_summaries_and_translations(tmp_path):
    words = " ".join(f"word{number}" for number in range(450))
    page = f"&#39;&#39;&#39;Sand&#39;&#39;&#39; {words} [[Desert|deserts]] {{{{box}}}}&lt;ref&gt;a&lt;/ref&gt;\n* a\n"
    pages = f"<title>Dune</title><text /><title>Talk:Sand</title><text>{page}</text>"
    pages += f'<title>Sand &amp; dust</title><text bytes="9">{page * 2}</text>'
    (tmp_path / "wiki.bz2").write_bytes(bz2.compress(pages.encode()))
    news = " ".join(["news"] * 50)
    (tmp_path / "news.txt").write_text(f"{news}\ntoo short\n")
    (tmp_path / "german").mkdir()
    (tmp_path / "german" / "witze").write_text("Der Sand liegt in der großen Wüste.\n%\nZu kurz.\n")
    sources = {"wiki": tmp_path / "wiki.bz2", "news": tmp_path / "news.txt", "german": tmp_path / "german"}
    texts.main(tmp_path / "out.jsonl", **sources, questions=1, summaries=1, translations=5)
    prompts = [row["prompt"] for row in read(tmp_path / "out.jsonl")]
    (asked,) = [prompt for prompt in prompts if "\n" in prompt]
    passage, question = asked.split("\n")
    assert passage.startswith("Sand word0 word1 ")
    assert len(passage.split()) in texts.PASSAGE_WORDS
    assert "Sand & dust" in question
    summaries = sorted(prompt for prompt in prompts if prompt.startswith("Summarize: "))
    assert len(summaries) == 2
    assert summaries[1] == f"Summarize: {news}"
    assert "Translate German to English: Der Sand liegt in der großen Wüste." in prompts
    assert len(prompts) == 4


def test_paragraphs_of_pages_become_a_question_about_several_and_summaries_of_others(tmp_path):
    long = [" ".join([f"{name}&amp;co <b>bold</b>"] * 30) for name in "abcdefgh"]
    body = "".join(f"<p class='x'>{text}</p>" for text in [*long, "too short", long[0]])
    (tmp_path / "docs").mkdir()
    page = f"<title>The\nbook</title><pre>{'code ' * 60}</pre><p>never closed {body}"
    (tmp_path / "docs" / "a.html").write_text(page)
    texts.main(tmp_path / "out.jsonl", pages=tmp_path / "docs", questions=1, summaries=9)
    prompts = [row["prompt"] for row in read(tmp_path / "out.jsonl")]
    summaries = [prompt for prompt in prompts if prompt.startswith("Summarize: ")]
    assert all(re.fullmatch(r"Summarize: (([a-h])&co bold ?){30}", prompt) for prompt in summaries)
    (asked,) = set(prompts) - set(summaries)
    *passages, question = asked.split("\n")
    assert "The book" in question
    assert all(passage.startswith("The book ") for passage in passages)
    told = {passage.split()[2] for passage in passages} | {prompt.split()[1] for prompt in summaries}
    assert len(passages) + len(summaries) == len(told) == len(long)


def test_measurements_are_those_of_the_answers():
    loop = [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]
    found = {"T=0": [Answer(loop, [3, 3, 3])], "T=0.7": [Answer([1, 2], [1])], "one-token": [Answer(loop, [1] * 9)]}
    summary = summarize([[5, 6, 7]], found, 4)
    assert (summary["prompts"], summary["identical"]) == (1, 1)
    wanted = {"tokens_per_step": 3, "prompt_lookup": 3, "distinct_4_grams": 3 / 7, "new_tokens": 10}
    assert summary["T=0"] == wanted
    assert summary["T=0.7"]["distinct_4_grams"] is None
    assert summarize([[5]], found | {"one-token": [Answer(loop[:-1], [])]}, 4)["identical"] == 0
