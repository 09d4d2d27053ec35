"""A default dtype or device that the user has set changes no text, no dtype and no device inside the engine."""

import process

# Functions of torch that ask the default dtype, or the default device, where a call does not say.


# Every attempt runs in each of the states; what it returns, and the dtype and device of every tensor that it makes,
# must be those of the plain state.
ATTEMPTS = """
import json
import sys

import torch
from families import make_draft, make_target
from tiny_pair import save_pair
from tiny_tokenizers import byte_level
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dflash
from dflash.ops import registry

INF = float("inf")
target, tokenizer = make_target("qwen3"), byte_level()
draft, pair = make_draft(target), save_pair(__import__("pathlib").Path(sys.argv[1]))
others = [make_target("qwen3", dtype=torch.bfloat16), make_target("gemma3"), make_target("gpt_oss")]
drafters = [make_draft(model) for model in others]
ids = torch.tensor([[5, 17, 33, 70, 8, 61, 12], [9, 3, 44, 2, 90, 71, 30]])
mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
rules = {
    "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "no_repeat_ngram_size": 3,
    "logit_bias": {4: 2.5, (5, 6): -3.0, 7: -INF}, "bad_words_ids": [[11], [12, 13]], "suppress_tokens": [20, 21],
    "begin_suppress_tokens": [22], "forced_eos_token_id": [2], "min_new_tokens": 4, "stop_token_ids": [2, 30],
}
python_rules = {
    "logits_processor": [lambda ids, scores: scores - 0.5 * scores.softmax(-1)],
    "stopping_criteria": [lambda ids, scores: ids[0, -1] == 40],
}
calls = {
    "greedy": {}, "filters": {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 3},
    "fixed sharpness": {"temperature": 0.9, "seed": 4, "draft_sharpness": 1.0},
    "rejection": {"temperature": 0.8, "seed": 5, "acceptance": "rejection", "top_p": 0.9},
    "denoising": {"denoise_steps": 3, "temperature": 0.7, "seed": 2}, "rules": rules,
    "sampled rules": {**rules, "temperature": 1.0, "seed": 8}, "forced first token": {"forced_bos_token_id": 4},
    "Python rules": {**python_rules, "temperature": 0.6, "seed": 1},
    "stop strings": {"stop_strings": ["ab", "j"], "tokenizer": tokenizer},
    "several answers": {"num_return_sequences": 2, "temperature": 1.0, "seed": 6}, "no seed": {"temperature": 1.0},
}


class Trace(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.made.append([str(func), *(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)])
        return out


def events(stream):
    return [(event.ids, event.text, event.finish_reasons) for event in stream]


def new(model, drafter, **options):
    return dflash.Generator(model, drafter, max_length=40, batch_size=4, **options)


def attempts():
    batch = {"attention_mask": mask, "max_new_tokens": 12}
    for name, call in calls.items():
        yield f"one-shot, {name}", lambda: dflash.generate(target, draft, ids, **batch, **call).tolist()
    kept = new(target, draft)
    for name in ("filters", "rules", "Python rules", "stop strings"):
        yield f"stream, {name}", lambda: events(kept.stream(ids, **batch, **calls[name]))
    yield "one-shot stream", lambda: events(dflash.stream(target, draft, ids, **batch, **calls["stop strings"]))
    for fused in (True, False):
        yield f"fused={fused}", lambda: new(target, draft, fused=fused).generate(ids, **batch).tolist()
    int8 = {"weights": "int8", "draft_weights": "int8"}
    yield "weights in 8 bits", lambda: new(target, draft, **int8).generate(ids, **batch).tolist()
    yield "no drafter", lambda: new(target, None, block_size=4).generate(ids, **batch).tolist()
    yield "a folder", lambda: new(target, dflash.load_draft(pair / "draft")).generate(ids, **batch).tolist()
    yield "a moved drafter", lambda: (dflash.load_draft(draft, dtype=torch.bfloat16, device="cpu").norm.weight.tolist())
    door = {"custom_generate": dflash.custom_generate, "draft": draft, "do_sample": False}
    one = {"attention_mask": mask[1:], "max_new_tokens": 12, **door}
    yield "custom_generate", lambda: target.generate(ids[1:], **one).tolist()
    for model, drafter in zip(others, drafters):
        name = f"{model.config.model_type} in {model.dtype}"
        yield name, lambda: dflash.generate(model, drafter, ids, **batch).tolist()


def run(attempt):
    torch.manual_seed(0)
    registry.dispatches_all = True  # where the mode sees ops
    try:
        with Trace() as trace:
            return json.dumps(attempt()), trace.made
    finally:
        registry.dispatches_all = False


states = {"plain": None, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16, "meta": "meta"}
seen = {}
for state, default in states.items():
    dflash.release()
    tried = attempts()
    while True:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        elif default:
            torch.set_default_device(default)
        try:
            name, attempt = next(tried, ("", None))
            if attempt is None:
                break
            result = run(attempt)
        except Exception as error:
            result = f"{type(error).__name__}: {error}", []
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        plain = seen.setdefault(name, result)
        print(state, name, sep="|", end="|")
        if result[0] != plain[0] or "Error" in result[0]:
            print("other text:", repr(result[0][:200]))
        elif result[1] != plain[1]:
            differing = [pair for pair in zip(plain[1], result[1]) if pair[0] != pair[1]]
            print(f"{len(plain[1])} and {len(result[1])} tensors, first difference {differing[:1]}")
        else:
            print("same")
"""


def test_no_default_changes_a_text_or_a_tensor(tmp_path):
    done = process.python(ATTEMPTS, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert len(lines) > 100
    assert not [line for line in lines if line[2] != "same"]
