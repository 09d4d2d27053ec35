"""Recurrent targets: states go back exactly to where the accepted rows end, and what cannot go back is refused."""

import contextlib
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import families
import pytest
import torch
from baseline import greedy, left_padded, prompt
from families import RECURRENT, make_draft, make_target
from recorded import no_host_reads
from rollback import BLOCK, play, run_prompts, standing
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dflash
from dflash import ops
from dflash.cache import RecurrentCache
from dflash.targets import Target, UnsupportedTargetError, refusal

NEW = 24
LENGTHS = (1, 17, 60)
KINDS = ["qwen3_5", "kimi_linear", "nemotron_h (dt under its limit)", "lfm2"]  # one per mixer
NAN = float("nan")


def cheat(target, prompts, answers, spoil=5, ahead=False, **options) -> families.Cheat:
    return families.cheat(target, make_draft(target), prompts, answers, spoil, ahead, **options)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("chunk", [16, 512])
def test_greedy_equals_generate_in_chunks(family, chunk):
    target, prompts = make_target(family), [prompt(length) for length in LENGTHS]
    answers, (ids, mask) = [greedy(target, p, NEW) for p in prompts], left_padded(prompts)
    for spoil in (0, 2, 3):
        generator = cheat(target, prompts, answers, spoil, prefill_chunk=chunk)
        output = generator.generate(ids, attention_mask=mask, max_new_tokens=NEW)
        assert torch.equal(output[:, ids.shape[1] :], torch.stack(answers))


@pytest.mark.parametrize("family", RECURRENT)
def test_bf16_logits_do_not_depend_on_what_is_accepted(family):
    target = Target(make_target(family, dtype=torch.bfloat16))
    prompts = [prompt(length) for length in LENGTHS]
    one = play(target, prompts, NEW)
    for seed in (1, 2, 3):
        played = play(target, prompts, NEW, seed, one.tokens)
        assert played.steps < one.steps / 2
        assert all(map(torch.equal, played.logits, one.logits))


@torch.no_grad()
@pytest.mark.parametrize("family", KINDS)
def test_nan_in_a_rejected_row_reaches_nothing(family):
    model = make_target(family)
    model.get_input_embeddings().weight[96] = NAN
    target = Target(model)
    outs = []
    for rejected in (95, 96):
        cache, lengths = target.new_cache(1, 64, BLOCK), torch.tensor([9])
        run_prompts(target, cache, [prompt(9, vocab=95)], 16)
        block = prompt(BLOCK, vocab=95)[None]
        block[:, 4:] = rejected
        first, _ = target.forward(block, lengths, cache)
        assert first[:, 4:].isnan().any() == (rejected == 96)
        second, _ = target.forward(prompt(BLOCK, seed=1, vocab=95)[None], lengths + 4, cache)
        outs.append([first[:, :4], second, *standing(cache)])
    assert not any(tensor.isnan().any() for tensor in outs[1])
    assert all(map(torch.equal, *outs))


CALLS = {
    "sampled": {"temperature": 1.0, "seed": 3},
    "rules": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [11]},
    "several passes": {"denoise_steps": 2},
    "stop tokens": {"stop_token_ids": list(range(20))},
}


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_equals_one_token_decoding(name):
    target, prompts = make_target("qwen3_5"), [prompt(length) for length in LENGTHS]
    ids, mask = left_padded(prompts)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True, **CALLS[name]}
    expected = dflash.generate(target, None, ids, **{**call, "denoise_steps": 1})
    steps = call.pop("denoise_steps", 1)
    generator = cheat(target, prompts, [row[60:] for row in expected.sequences], denoise_steps=steps)
    output = generator.generate(ids, **call)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.finish_reasons == expected.finish_reasons
    assert output.statistics.acceptance_length > 2


def test_a_conversation_goes_on_after_rejection_sampling():
    target, p = make_target("qwen3_5"), prompt(17)
    generator = cheat(target, [p], [greedy(target, p, NEW)], spoil=3)
    call = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    first = generator.generate(p[None], temperature=1.0, seed=4, acceptance="rejection", **call)
    second = generator.generate(first.sequences, **call)
    assert second.statistics.num_prefilled_tokens == [1]
    assert second.sequences[0, 41:].tolist() == greedy(target, first.sequences[0], NEW).tolist()


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1", "kimi_linear", "lfm2"])
def test_a_step_neither_waits_nor_breaks_the_graph(family):
    target = Target(make_target(family))
    cache, lengths, block = target.new_cache(2, 64, BLOCK), torch.tensor([9, 5]), torch.stack([prompt(BLOCK)] * 2)
    run_prompts(target, cache, [prompt(9), prompt(5)], 16)
    addresses = [buffer.data_ptr() for buffer in cache.buffers]
    with torch.no_grad():
        expected, _ = target.forward(block, lengths, cache)
        with no_host_reads():
            target.forward(block, lengths, cache)
        torch._dynamo.reset()
        compiled = torch.compile(target.forward, backend="eager", fullgraph=True, dynamic=False)
        logits, _ = compiled(block, lengths, cache)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert [buffer.data_ptr() for buffer in cache.buffers] == addresses


def test_modules_classes_and_globals_stay_as_they_were():
    model = make_target("qwen3_5").train()
    kinds = {base for module in model.modules() for base in type(module).__mro__}

    def seen():
        parts = [(type(module), dict(module.__dict__)) for module in model.modules()]
        spaces = {kind.__module__: dict(vars(sys.modules[kind.__module__])) for kind in kinds}
        return parts, {kind: dict(vars(kind)) for kind in kinds}, spaces

    def same(before) -> bool:
        (parts, classes, spaces), (old_parts, old_classes, old_spaces) = seen(), before
        pairs = [(now, then) for (_, now), (_, then) in zip(parts, old_parts, strict=True)]
        pairs += [(now[key], then[key]) for now, then in ((classes, old_classes), (spaces, old_spaces)) for key in now]
        if not all(kind is old for (kind, _), (old, _) in zip(parts, old_parts, strict=True)):
            return False
        return all(now.keys() == then.keys() and all(now[key] is then[key] for key in now) for now, then in pairs)

    class Interrupt:
        def put(self, value):
            raise KeyboardInterrupt

        def end(self):
            pass

    before, draft = seen(), make_draft(model)
    dflash.generate(model, draft, prompt(9)[None], max_new_tokens=8)
    assert same(before)
    with pytest.raises(KeyboardInterrupt):
        dflash.generate(model, draft, prompt(9)[None], max_new_tokens=8, streamer=Interrupt())
    with pytest.raises(ValueError, match="temperature"):
        dflash.generate(model, draft, prompt(9)[None], max_new_tokens=8, temperature=-1.0)
    assert same(before)


@pytest.mark.parametrize("interrupted", [False, True], ids=["", "after an interrupt"])
def test_a_freed_generator_frees_its_states_at_once(interrupted, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    generator = dflash.Generator(make_target("qwen3_5"), None, max_length=64, fused=False)
    generator.generate(prompt(9)[None], max_new_tokens=4)
    if interrupted:
        monkeypatch.setattr(ops, "causal_conv_", stop)
        with contextlib.suppress(KeyboardInterrupt):
            generator.generate(prompt(9, seed=1)[None], max_new_tokens=4)
    cache = weakref.ref(generator.state.target_cache)
    gc.collect()
    gc.disable()
    try:
        del generator
        assert cache() is None
    finally:
        gc.enable()


class TestProbe:
    @pytest.mark.parametrize("family", KINDS)
    def test_it_notices_states_that_keep_rejected_rows(self, family, monkeypatch):
        begin = RecurrentCache.begin_pass_

        def begin_pass_(self, lengths, keep):
            begin(self, lengths, keep if keep.any() else torch.full_like(lengths, 99))

        monkeypatch.setattr(RecurrentCache, "begin_pass_", begin_pass_)
        with pytest.raises(UnsupportedTargetError, match="gives other logits"):
            Target(make_target(family))

    def test_it_notices_a_state_that_nobody_knows_of(self):
        """A token shift that remembers the last row of the last pass, which may have been rejected."""

        class Shift(nn.Module):
            def __init__(self, inside):
                super().__init__()
                self.inside, self.last = inside, None

            def forward(self, x):
                before = torch.zeros_like(x[:, :1]) if self.last is None else self.last
                shifted = torch.cat([before, x[:, :-1]], 1)
                self.last = x[:, -1:].detach()
                return self.inside(x + 0.5 * shifted)

        model = make_target("llama")
        model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)
        with pytest.raises(UnsupportedTargetError, match="gives other logits"):
            Target(model)


# model type -> part of the reason
REFUSED = {
    "jamba": "Mamba-1", "minimax": "lightning attention", "zaya": "delayed values",
    "inkling_text": "four convolutions in a layer",
    "falcon_mamba": "Mamba-1", "recurrent_gemma": "recurrent blocks",
    "rwkv": "stateful layers that dflash does not know", "xlstm": "stateful layers that dflash does not know",
}  # fmt: skip


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_name(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}")
    config = CONFIG_MAPPING[model_type]()
    is_multimodal = type(config) not in AutoModelForCausalLM._model_mapping
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM).from_config(config)
    assert REFUSED[model_type] in refusal(model, loaded=False)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_recurrent_family_configured_with_attention_only_writes_its_own_text(family):
    model, p = make_target(family, layer_types=["full_attention"] * 4), prompt(9)
    assert not Target(model).is_recurrent
    output = dflash.generate(model, make_draft(model), p[None], max_new_tokens=20)
    assert output[0, 9:].tolist() == greedy(model, p, 20).tolist()


def test_a_model_whose_installed_kernels_need_a_gpu_is_refused_by_name():
    """With flash-linear-attention or causal-conv1d, transformers calls their kernels: nothing to compare with."""
    script = """
import sys, types
for package, names in {"causal_conv1d": ["causal_conv1d_fn", "causal_conv1d_update"],
                       "fla": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]}.items():
    sys.modules[package] = module = types.ModuleType(package)
    module.__file__ = package
    for name in names:
        def kernel(*args, **kwargs):
            raise NotImplementedError("needs a GPU")
        setattr(module, name, kernel)
import torch
from families import make_target
from baseline import prompt
import dflash
model = make_target("qwen3_5")
try:
    dflash.generate(model, None, prompt(9)[None], max_new_tokens=12)
except dflash.UnsupportedTargetError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fails on its own in a trial run, without dflash: NotImplementedError: needs a GPU" in done.stdout


def test_a_replaced_function_of_the_states_is_refused(monkeypatch):
    model = make_target("qwen3_5")
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "causal_conv1d_fn", lambda x, *args, **kwargs: x)
    with pytest.raises(UnsupportedTargetError, match="gives other logits"):
        Target(dflash.targets.check_target(model))


def test_layers_that_would_share_a_state_are_refused():
    model = make_target("qwen3_5")
    model.model.layers[1].linear_attn.layer_idx = 0
    assert "has the layer_idx of another recurrent layer, 0" in refusal(model)


def test_a_mixer_in_two_layers_is_refused():
    model = make_target("qwen3_5")
    model.model.layers[1].linear_attn = model.model.layers[0].linear_attn
    assert "one Qwen3_5GatedDeltaNet is in several layers" in refusal(model)
