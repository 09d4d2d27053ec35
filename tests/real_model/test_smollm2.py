"""SmolLM2-135M-Instruct, from the GGUF file (Q4_1) of a package: a Llama with a chat template."""

import dataclasses
import json

import pytest
import torch
from equal_bits import differing, run_all
from families import make_draft
from models import TREE, check_same, drafted, model_file, narrow, one_token, plain
from served import ask

import dflash
from dflash import _C
from dflash.loading import Pretrained
from dflash_serve.prompts import PromptReader
from dflash_serve.scheduler import Scheduler
from dflash_serve.service import Service

NEW, EOS = 64, 2
QUESTIONS = [
    "What is the capital of France?", "Write a haiku about the sea.", "Explain photosynthesis to a child.",
    "Give me three tips for learning a language.", "What is 12 times 7?", "Who wrote Hamlet?",
    "Write a Python function that reverses a string.", "List five fruits that are red.", "How do I boil an egg?",
    "Summarize the plot of Cinderella.", "What causes the tides?", "Translate 'good morning' into Spanish.",
    "Why is the sky blue?", "Write a short email to ask for a day off.", "What is the largest planet?",
    "Name two differences between cats and dogs.", "How does a bicycle stay upright?",
    "Write the opening of a story about a lighthouse.", "What should I pack for a hike?",
    "Rewrite more politely: give me the report now.",
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "inhabitants", "is_capital"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def files():
    return Pretrained(model_file("smollm2.gguf"))


@pytest.fixture(scope="module")
def tokenizer(files):
    return files.load_tokenizer()


@pytest.fixture(scope="module")
def model(files):
    return dataclasses.replace(files, keeps_blocks=False).load_target(torch.float32)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [encode(tokenizer, question) for question in QUESTIONS]


def encode(tokenizer, question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids[0]


@pytest.fixture(scope="module")
def texts(model, prompts):
    return plain(model, prompts, NEW, EOS)


@pytest.mark.parametrize("options", [{}, {"tree": TREE}], ids=["chain", "tree"])
def test_float32_text_is_that_of_transformers(model, prompts, texts, options):
    found, tokens_per_step = drafted(model, prompts, texts, NEW, **options)
    check_same(found, [text.tolist() for text in texts])
    assert 3 < tokens_per_step < 7, "most drafts are right, and some are not"


@pytest.mark.parametrize("options", [{}, {"tree": TREE}], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["int8", "bfloat16", "packed"])
def test_narrow_text_is_that_of_one_token_decoding(files, model, prompts, kind, options):
    settings, target = narrow(kind, files, model)
    expected = one_token(target, prompts[:5], 24, **settings)
    found, tokens_per_step = drafted(target, prompts[:5], list(map(torch.tensor, expected)), 24, **settings, **options)
    check_same(found, expected)
    assert tokens_per_step > 3


@pytest.fixture(scope="module")
def service(model, tokenizer):
    generator = dflash.Generator(model, make_draft(model), max_length=256, batch_size=2)
    scheduler, reader = Scheduler(generator, max_waiting=2), PromptReader(tokenizer)
    service = Service(scheduler=scheduler, reader=reader, name="smollm2", version="0", timeout=300.0)
    yield service
    service.scheduler.close(drain=False)


def answer(service, question, **fields):
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "temperature": 0, **fields}
    response = ask(service, "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_the_server_answers_in_the_chat_template(service, model, tokenizer, prompts):
    found = answer(service, QUESTIONS[0], max_tokens=NEW)["message"]["content"]
    assert found == tokenizer.decode(plain(model, prompts[:1], NEW, EOS)[0], skip_special_tokens=True)
    assert "Paris" in found


def test_a_json_schema_is_filled(service):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    found = answer(service, "Describe Paris as JSON.", max_tokens=128, response_format=form)
    assert found["finish_reason"] == "stop"
    city = json.loads(found["message"]["content"])
    assert list(map(type, city.values())) == [str, int, bool]
    assert set(city) == set(SCHEMA["required"])


@pytest.mark.parametrize("weights", ["int8", ""], ids=["int8", "packed"])
def test_answers_in_few_bits_have_equal_bits_with_every_instruction_set(weights):
    lines = run_all("bfloat16", 4, model_file("smollm2.gguf"), weights)
    assert [line["isa"] for line in lines] == _C.isas()
    assert differing(lines) == []
    assert all(line["is_exact"] for line in lines[1:])
