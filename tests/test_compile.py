"""Test the step under torch.compile: one graph, the same tokens, and no cache copies in the generated code."""

import re

import pytest
import torch
from baseline import greedy, left_padded, prompt, sampled
from families import make_draft, make_target
from torch._inductor.utils import run_and_get_code

import dflash
from dflash.engine.graphs import compiled_per_shape
from dflash.sampling import fold

MAX_LENGTH = 211  # plus the block: a capacity unlike any other size in the model


@pytest.fixture(scope="module")
def compiled():
    """Return a generator with a compiled step, the generated code, and its target."""
    torch._dynamo.reset()
    target = make_target("qwen3", num_hidden_layers=2)
    draft = make_draft(target, "Qwen3.6-27B")
    generator = dflash.Generator(target, draft, max_length=MAX_LENGTH, batch_size=2, compile=True)
    prompts = [prompt(3), prompt(20)]
    ids, mask = left_padded(prompts)
    output, code = run_and_get_code(lambda: generator.generate(ids, attention_mask=mask, max_new_tokens=12))
    return generator, target, prompts, output, "\n".join(code)


def test_the_compiled_step_writes_the_same_tokens(compiled):
    generator, target, prompts, output, _ = compiled
    ids, mask = left_padded(prompts)
    for row, p in enumerate(prompts):
        assert output[row, ids.shape[1] :].tolist() == greedy(target, p, 12).tolist()
    output = generator.generate(ids, attention_mask=mask, max_new_tokens=12, temperature=1.0, top_p=0.9, seed=2)
    for row, p in enumerate(prompts):
        assert output[row, ids.shape[1] :].tolist() == sampled(target, p, 12, fold(2, row), 1.0, top_p=0.9).tolist()


def test_the_generated_code_allocates_and_clones_no_cache(compiled):
    generator, *_, code = compiled
    capacity = generator.state.target_cache.capacity
    assert capacity == MAX_LENGTH + 16
    assert f"{capacity}" in code, "the caches should appear as inputs"
    assert "torch.ops.dflash.decoder_layers" in code
    allocations = re.findall(r"empty_strided\w*\(\((.*?)\)", code)
    assert allocations
    assert not any(str(capacity) in shape.split(", ") for shape in allocations)


def test_rejection_compiles(compiled):
    generator, target, prompts, *_ = compiled
    eager = dflash.Generator(target, generator.draft, max_length=MAX_LENGTH)
    call = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4, "acceptance": "rejection"}
    for p in prompts:
        assert torch.equal(generator.generate(p[None], **call), eager.generate(p[None], **call))


def test_graphs_follow_the_call_and_belong_to_one_generator():
    """Graphs have no guards, so they must never see another call's rules or another generator's weights."""
    p = prompt(5)[None]
    calls = [
        {"stop_token_ids": []},
        {"suppress_tokens": [3, 7, 11], "logit_bias": {5: 2.0, (9, 5): 1.0}},
        {"stop_token_ids": list(range(60, 97))},
        {"suppress_tokens": list(range(40)), "logit_bias": {50: 3.0, (60, 70): -4.0}},
    ]
    targets = [make_target("qwen3", num_hidden_layers=1, seed=seed) for seed in (0, 1)]
    for target in targets:
        generator = dflash.Generator(target, None, max_length=32, block_size=4, compile=True)
        for call in calls:
            expected = dflash.generate(target, None, p, max_new_tokens=6, **call)
            assert torch.equal(generator.generate(p, max_new_tokens=6, **call), expected)
    assert not torch.equal(*(target.generate(p, max_new_tokens=6, do_sample=False) for target in targets))


def test_a_target_is_compiled_for_each_number_of_rows_by_itself(monkeypatch):
    """A call may ask for any number of rows, and torch stops compiling a code object at eight shapes."""
    target = make_target("qwen3", num_hidden_layers=1)
    generator = dflash.Generator(target, make_draft(target), max_length=64, tree=16)
    compiled, p = [], prompt(5)

    def compile(function, **_options):
        compiled.append((function.__code__, shapes := set()))
        return lambda ids, *rest: shapes.add((tuple(ids.shape), len(rest))) or function(ids, *rest)

    monkeypatch.setattr(torch, "compile", compile)
    generator.engine.target.compiled_forward = compiled_per_shape(generator.engine.target.forward)
    for tree in (None, *range(16, 4, -1), None, 16):
        assert generator.generate(p[None], max_new_tokens=4, tree=tree)[0, 5:].tolist() == greedy(target, p, 4).tolist()
    assert len(compiled) == len({id(code) for code, _ in compiled}) == 13, "a chain, and trees of 5 to 16 rows"
    assert all(len(shapes) == 1 for _, shapes in compiled)
