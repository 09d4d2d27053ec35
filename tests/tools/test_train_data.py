"""Test reading prompts and training rows from common kinds of files."""

import gzip
import json

import datasets
import pytest
from tiny_tokenizers import spoken
from tokenizers.processors import TemplateProcessing

from dflash.loading import prompt_ids
from dflash_tools.train.data import load_prompts, load_rows

END, BOS, LINE, USER, ASSISTANT, SYSTEM = 1, 2, 3, 4, 5, 6
THINKS = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}"
    "<assistant> {% if not thinking | default(true) %}w90 {% endif %}{% endif %}"
)


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows, name: str = "rows.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return path

    return write


def only(source, tokenizer, max_length=32, **options) -> tuple[list[int], list[int]]:
    (row,) = load_rows(source, tokenizer, max_length, **options)
    return row["input_ids"], row["loss_mask"]


def test_prompts_are_found_under_the_names_that_sources_use(jsonl, tmp_path):
    chat = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
    path = jsonl(
        {"prompt": "def f():", "task_id": "x/0"}, "", {"question": "how many?", "answer": "3"},
        {"turns": ["first", "second"]}, {"messages": chat}, {"prompt": [*chat, {"role": "user", "content": "w9"}]},
    )  # fmt: skip
    wanted = [
        {"line": 1, "prompt": "def f():"},
        {"line": 3, "prompt": "how many?"},
        {"line": 4, "prompt": "first"},
        {"line": 5, "messages": chat[:1]},
        {"line": 6, "messages": [*chat, {"role": "user", "content": "w9"}]},
    ]
    assert load_prompts(path) == wanted
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_prompts(packed) == wanted


def test_prompts_and_rows_come_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"prompt": "w7", "response": "w8", "turns": None}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts("owner/name:main", split="test") == [{"line": 1, "prompt": "w7"}]
    assert only("owner/name", spoken(None)) == ([7, 8, END], [0, 1, 1])
    assert asked == [("owner/name", "main", "test"), ("owner/name", None, "train")]


def test_responses_are_supervised_up_to_their_stop_token(jsonl):
    tokenizer, row = spoken(), {"prompt": "w7 w8", "response": "w9 w10"}
    assert only(jsonl(row), tokenizer) == (
        [USER, 7, 8, END, LINE, ASSISTANT, 9, 10, END, LINE],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 0],
    )
    assert only(jsonl(row), tokenizer, raw=True, bos=True) == ([BOS, 7, 8, 9, 10, END], [0, 0, 0, 1, 1, 1])
    assert only(jsonl(row), tokenizer, max_length=4, raw=True) == ([7, 8, 9, 10], [0, 0, 1, 1])
    assert only(jsonl(row), spoken(None)) == ([7, 8, 9, 10, END], [0, 0, 1, 1, 1])


def test_every_turn_of_the_assistant_is_supervised(jsonl):
    said = [("system", "w20"), ("user", "w7"), ("assistant", "w8 w9"), ("user", "w10"), ("assistant", "w11")]
    messages = [{"role": role, "content": content} for role, content in said]
    first = [SYSTEM, 20, END, LINE, USER, 7, END, LINE, ASSISTANT]
    second = [LINE, USER, 10, END, LINE, ASSISTANT]
    wanted = [*first, 8, 9, END, *second, 11, END, LINE]
    assert only(jsonl({"messages": messages}), spoken()) == (
        wanted,
        [0] * len(first) + [1, 1, 1] + [0] * len(second) + [1, 1, 0],
    )
    trailing = {"messages": [*messages, {"role": "user", "content": "w12"}]}
    assert only(jsonl(trailing), spoken())[0] == wanted


def test_a_turn_that_is_rendered_differently_later_is_only_context(jsonl):
    """Templates that drop thoughts from earlier turns do this: the target never wrote the turn that way."""
    template = (
        "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and loop.last %}w90 {% endif %}"
        "{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    said = [("user", "w7"), ("assistant", "w8"), ("user", "w9"), ("assistant", "w10")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    ids, mask = only(jsonl(row), spoken(template))
    assert ids == [USER, 7, END, ASSISTANT, 8, END, USER, 9, END, ASSISTANT, 90, 10, END]
    assert mask == [0] * 11 + [1, 1]  # the target did not write w90 either, unless the row has it
    row["messages"][-1] |= {"content": "w10", "reasoning_content": "w90"}
    assert only(jsonl(row), spoken(template))[1] == [0] * 10 + [1, 1, 1]
    answered = {"prompt": "w7", "response": "w8"}
    wanted = ([USER, 7, END, ASSISTANT, 90, 8, END], [0] * 5 + [1, 1])
    assert only(jsonl(answered), spoken(template)) == wanted
    assert only(jsonl({"prompt": "w7", "response": "w90 w8"}), spoken(template))[1] == [0] * 5 + [1, 1, 1]


@pytest.mark.parametrize("names", [("from", "value", "human", "gpt"), ("role", "content", "user", "assistant")])
def test_conversations_are_messages(names, jsonl):
    who, what, user, assistant = names
    roles = {"system": "w5", "user": "w7", "assistant": "w8"}
    messages = [{"role": role, "content": text} for role, text in roles.items()]
    said = [{who: name, what: text} for name, text in zip(("system", user, assistant), roles.values(), strict=True)]
    path = jsonl({"id": "a", "conversations": said})
    assert only(path, spoken()) == only(jsonl({"messages": messages}, name="other.jsonl"), spoken())
    assert load_prompts(path)[0]["messages"] == messages[:2]
    # Beside another prompt they are a field like any other
    answered = jsonl({"prompt": "w7", "response": "w8", "conversations": [{who: user, what: "w9"}]})
    assert only(answered, spoken()) == only(jsonl({"prompt": "w7", "response": "w8"}, name="other.jsonl"), spoken())
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: message 1 must have role and content as text"):
        only(jsonl({"conversations": [{who: ["a"], what: "w9"}]}), spoken())


def test_arguments_of_the_chat_template_are_used(jsonl):
    template, short = THINKS, {"thinking": False}
    assert prompt_ids(spoken(template), {"prompt": "w7"}, template=short) == [USER, 7, END, ASSISTANT, 90]
    cut = {"prompt": "w7", "response": "w8", "finish_reason": "length"}
    assert only(jsonl(cut), spoken(template), template=short) == ([USER, 7, END, ASSISTANT, 90, 8], [0] * 5 + [1])
    whole = {"prompt": "w7", "response": "w8"}
    wanted = ([USER, 7, END, ASSISTANT, 90, 8, END], [0] * 5 + [1, 1])
    assert only(jsonl(whole), spoken(template), template=short) == wanted
    said = jsonl({"messages": [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]})
    with pytest.raises(ValueError, match="line 1: the chat template does not render the last answer"):
        load_rows(said, spoken(template), 32, template=short)
    with pytest.raises(ValueError, match="line 1: the chat template refuses these messages: no such role"):
        load_rows(said, spoken("{{ raise_exception('no such role') }}"), 32)


def test_the_stop_token_is_the_one_that_the_target_writes(jsonl):
    """It can be one of several in the generation_config, or the special token that ends a turn in the template."""
    row = {"prompt": "w7", "response": "w9"}
    closing = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <line> {% endfor %}"
    closing += "{% if add_generation_prompt %}<assistant> {% endif %}"
    asked = [USER, 7, LINE, ASSISTANT]
    assert only(jsonl(row), spoken(closing)) == ([*asked, 9, LINE], [0, 0, 0, 0, 1, 1])
    listed = closing.replace("<line>", "w20")
    asked = [USER, 7, 20, ASSISTANT]
    assert only(jsonl(row), spoken(listed), stop_token_ids=[END, 20]) == ([*asked, 9, 20], [0, 0, 0, 0, 1, 1])
    messages = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w9"}]
    assert only(jsonl({"messages": messages}), spoken(closing))[1] == [0, 0, 0, 0, 1, 1]
    # A template whose generation prompt has extra text still ends the answer.
    thinking = closing.replace("<assistant> {% endif", "<assistant> w90 {% endif")
    assert only(jsonl(row), spoken(thinking)) == ([USER, 7, LINE, ASSISTANT, 90, 9, LINE], [0] * 5 + [1, 1])


def test_rows_whose_prompts_lost_their_text_are_refused(jsonl):
    lossy = spoken("{% for m in messages %}<{{ m.role }}> {{ 'w9' if m.content == 'w8' else m.content }} {% endfor %}")
    asked = [{"prompt": prompt, "response": "w7"} for prompt in ("w8", "w9 ", " w9")]
    chats = [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "w7"}] for row in asked]
    ids = [row | {"prompt_ids": [USER, 9], "response_ids": [7]} for row in asked[:2]]
    for rows in (asked, [{"messages": chat} for chat in chats], [asked[2], ids[0]], ids):
        with pytest.raises(ValueError, match=r"line 2: the prompt differs from that of .*line 1, and its token ids do"):
            load_rows(jsonl(*rows), lossy, 32)
    assert len(load_rows(jsonl(*asked[1:], *asked[1:]), lossy, 32)) == 4  # spaces around a text are not text


def test_what_templates_leave_out_lawfully_is_not_lost(jsonl):
    usual = "[{'role': 'system', 'content': 'w15'}]"
    template = f"{{% set said = messages if messages[0].role == 'system' else {usual} + messages %}}" + (
        "{% for m in said if m.content %}<{{ m.role }}> {{ m.content.split('</think>')[-1] }} {% endfor %}"
    )
    said = [
        [("user", "w8"), ("assistant", f"{thought}w7"), ("user", "w6"), ("assistant", "w9")]
        for thought in ("", "<think> w1 </think> ", "<think> w2 </think> ")
    ]
    said += [[("system", system), *said[0]] for system in ("", "w15")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in said]
    for count in (2, 3, 5):
        assert len(load_rows(jsonl(*rows[:count]), spoken(template), 32)) == count
    rows[-1]["messages"][0]["content"] = "w14"
    lossy = template.replace("m in said if m.content", "m in messages if m.role != 'system'")
    with pytest.raises(ValueError, match="line 2: the chat template shows no text of system messages"):
        load_rows(jsonl(rows[0], rows[-1]), spoken(lossy), 32)
    lossy = template.replace("m.content.split", "('w15' if m.content == 'w14' else m.content).split")
    with pytest.raises(ValueError, match=r"line 2: the prompt differs from that of .*line 1, and its token ids do"):
        load_rows(jsonl(rows[0], rows[-1]), spoken(lossy), 32)


def test_tools_of_rows_are_shown_by_the_template_or_refused(jsonl):
    shows = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    turns = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    tools = [{"type": "function", "function": {"name": "w13"}}]
    chat = [{"role": "user", "content": "w8"}, {"role": "assistant", "content": "w9"}]
    named = {"default": turns, "tool_use": shows + turns}
    for row in ({"prompt": "w8", "response": "w9"}, {"messages": chat}):
        for template, given in ((shows + turns, tools), (named, json.dumps(tools))):
            assert only(jsonl(row | {"tools": given}), spoken(template))[0][:3] == [13, USER, 8]
        for template, given, wrong in (
            (turns, tools, "the chat template does not show the tool 'w13'"),
            (None, tools, "messages need a chat template"),
            (named, ["w13"], "tools must be objects with a function"),
            (named, "w13", "line 1: tools"),
        ):
            with pytest.raises(ValueError, match=wrong):
                load_rows(jsonl(row | {"tools": given}), spoken(template), 32)
        assert only(jsonl(row | {"tools": []}), spoken(turns))[0][:2] == [USER, 8]


def test_rows_are_written_in_the_form_that_the_template_reads(jsonl):
    row, turn = {"prompt": "w8", "response": "w7"}, "{{% for m in messages %}}<{{{{ m.role }}}}> {} {{% endfor %}}"
    assert only(jsonl(row), spoken(turn.format("{{ m.content[0].text }}")))[0][:2] == [USER, 8]
    with pytest.raises(ValueError, match="line 1: the chat template shows no text of user messages"):
        load_rows(jsonl(row), spoken(turn.format("")), 32)


def marked(*, bos: bool = False, eos: bool = False):
    """Return a tokenizer that adds a BOS token before a text, or an EOS token after it, by itself."""
    tokenizer = spoken(None)
    single = ["<bos>"] * bos + ["$A"] + ["<end>"] * eos
    marks = [("<bos>", BOS)] * bos + [("<end>", END)] * eos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=" ".join(single), special_tokens=marks)
    return tokenizer


def test_bos_and_eos_come_once(jsonl):
    for bos in (False, True):
        assert prompt_ids(marked(bos=True), {"prompt": "w7"}, raw=True, bos=bos) == [BOS, 7]
        assert only(jsonl({"text": "w7 w8"}), marked(bos=True), bos=bos)[0] == [BOS, 7, 8, END]
    assert only(jsonl({"text": "w7 w8"}), marked(eos=True))[0] == [7, 8, END]
    without = spoken(None)
    without.bos_token = None
    for row in ({"text": "w7 w8"}, {"prompt": "w7", "response": "w8"}):
        with pytest.raises(ValueError, match="line 1: --bos: this tokenizer has no BOS token"):
            load_rows(jsonl(row), without, 8, bos=True)


def test_plain_text_comes_in_pieces(jsonl, tmp_path):
    tokenizer = spoken(None)
    text = tmp_path / "book.txt"
    text.write_text("w7 w8\n\nw9\nw10 w11\n")
    rows = load_rows([text, jsonl({"text": "w12 w13"})], tokenizer, 4)
    assert rows["input_ids"][:] == [[7, 8, 9, 10], [11, END], [12, 13, END]]
    assert rows["loss_mask"][:] == [[1] * 4, [1] * 2, [1] * 3]


def test_long_prompts_are_an_error_or_left_out(jsonl):
    path = jsonl({"prompt": "w7", "response": "w8"}, {"prompt": "w7 w8 w9 w10", "response": "w8"})
    with pytest.raises(ValueError, match=r"line 2: the prompt has 4 tokens, a row with its response at most 4"):
        load_rows(path, spoken(None), 4)
    assert load_rows(path, spoken(None), 4, skip_long=True)["input_ids"][:] == [[7, 8, END]]
    with pytest.raises(ValueError, match="no rows"):
        load_rows(jsonl({"prompt": "w7 w8 w9", "response": "w8"}), spoken(None), 2, skip_long=True)


@pytest.mark.parametrize(("line", "message"), [
    ("{'a': 1}", "line 2: not JSON"),
    ("[1]", "line 2: must be a JSON object, got list"),
    ("[" * 100_000, "line 2: not JSON"),
    (r'{"prompt": "w7 \ud83d", "response": "w8"}', "line 2: not JSON"),
    ('{"answer": 1}', "line 2: a row has .* got answer"),
    ('{"prompt": "w7"}', "line 2: the prompt has no response: .*dflash regenerate"),
    ('{"prompt": "w7", "response": 3}', "line 2: response must be text, got 3"),
    ('{"prompt": "", "response": "w8"}', "line 2: prompt must be non-empty text"),
    ('{"response": "w8"}', "line 2: a prompt needs prompt, messages, conversations, question or turns, got response"),
    ('{"messages": []}', "line 2: messages must be a list of role and content"),
    ('{"messages": [{"role": "user", "content": "w7"}]}', "line 2: messages has no assistant turn"),
    ('{"text": 5}', "line 2: text must be a non-empty string"),
    ('{"input_ids": [7, 8]}', "line 2: loss_mask must hold a 0 or 1 for each of the 2 input_ids"),
    ('{"input_ids": [7, 97], "loss_mask": [0, 1]}', r"line 2: input_ids must lie in 0 \.\. 96, got 97"),
    ('{"input_ids": [7, 8], "loss_mask": [0, 0]}', "line 2: no response token"),
    ('{"prompt": "w7", "response": "w8", "prompt_ids": [7], "response_ids": [9]}',
     "line 2: response_ids do not decode to response"),
])  # fmt: skip
def test_a_bad_row_is_reported_with_its_line(jsonl, line, message):
    path = jsonl({"prompt": "w7", "response": "w8"}, line)
    with pytest.raises(ValueError, match=message):
        load_rows(path, spoken(), 32)


def test_a_bad_source_is_reported(jsonl, tmp_path):
    for load in (load_prompts, lambda source: load_rows(source, spoken(), 32)):
        with pytest.raises(FileNotFoundError, match=r"there is no data file '.*missing\.jsonl'"):
            load(tmp_path / "missing.jsonl")
        with pytest.raises(ValueError, match="is empty"):
            load(jsonl(""))
        with pytest.raises(ValueError, match="is a folder"):
            load(tmp_path)
        latin = tmp_path / "latin.jsonl"
        latin.write_bytes('{"prompt": "é"}'.encode("latin-1"))
        with pytest.raises(ValueError, match=r"latin\.jsonl, line 1: not UTF-8"):
            load(latin)
        packed = gzip.compress(b'{"prompt": "w7", "response": "w8"}\n' * 1000)
        broken = tmp_path / "broken.jsonl.gz"
        for content in (packed[:-20], packed[:30] + bytes(8) + packed[38:], packed[:12] + b"\xff" * 20):
            broken.write_bytes(content)
            with pytest.raises(ValueError, match=r"broken\.jsonl\.gz: not a whole gzip file after line \d+"):
                load(broken)
    with pytest.raises(ValueError, match="line 1: messages need a chat template, and this tokenizer has none"):
        load_rows(jsonl({"messages": [{"role": "assistant", "content": "w7"}]}), spoken(None), 32)
    with pytest.raises(ValueError, match="max_length must be an integer of at least 2, got 1"):
        load_rows(jsonl({"text": "w7 w8"}), spoken(), 1)
