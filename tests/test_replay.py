"""Test that recorded, replayed and late-read steps write exactly what the eager loop writes."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import families
import pytest
import torch
from baseline import check_batch, greedy, left_padded, prompt
from families import make_draft, make_target
from recorded import HostRead, Recorded, no_host_reads, no_peeking, record, recorder
from tiny_tokenizers import byte_level
from transformers import RepetitionPenaltyLogitsProcessor

import dflash
from dflash import generator as generator_module
from dflash.engine import graphs
from dflash.ops import registry

NEW = 40

CALLS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 4, "draft_sharpness": 2.0},
    "rejection": {"temperature": 1.0, "seed": 5, "acceptance": "rejection"},
    "rules": {
        "repetition_penalty": 1.3, "presence_penalty": 0.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[5], [6, 7]],
        "logit_bias": {9: 1.0}, "suppress_tokens": [11], "begin_suppress_tokens": [12], "min_new_tokens": 4,
        "forced_eos_token_id": 13,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def batch(target):
    """Return prompts, their mask, greedy answers, and a stop token that two rows reach at different steps."""
    prompts = [prompt(length) for length in (3, 9, 30)]
    answers = [greedy(target, p, NEW) for p in prompts]
    return *left_padded(prompts), prompts, answers, [int(answers[0][11]), int(answers[1][29])]


def cheat(target, draft, batch, **options) -> families.Cheat:
    _, _, prompts, answers, _ = batch
    generator = families.cheat(target, draft, prompts, answers, spoil=5, **{"max_length": 90} | options)
    generator.script = generator.script.to(target.device)
    return generator


def same(ours: dflash.GenerateOutput, theirs: dflash.GenerateOutput) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.finish_reasons == theirs.finish_reasons
    assert ours.statistics.acceptance_lengths == theirs.statistics.acceptance_lengths


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_step_is_captured_and_writes_the_same(target, draft, batch, name):
    ids, mask, *_, stop = batch
    eager, late = cheat(target, draft, batch), record(cheat(target, draft, batch))
    for limit in (NEW, NEW - 3, 7):  # the first captures, the others only replay
        call = {"attention_mask": mask, "max_new_tokens": limit, "stop_token_ids": stop, **CALLS[name]}
        expected = eager.generate(ids, return_dict_in_generate=True, **call)
        launched = late.runner.device.steps.copy()
        same(late.generate(ids, return_dict_in_generate=True, **call), expected)
        steps = max(map(len, expected.statistics.acceptance_lengths))
        launches = sum(late.runner.device.steps.values()) - sum(launched.values())
        assert launches <= steps + 1, "more than one surplus step"
        eager.reset(), late.reset()
    assert late.runner.device.captures == 1
    assert late.runner.device.steps["eager"] == 2
    assert late.runner.device.steps["replayed"] > 4
    assert late.runner.device.most_ahead == 2
    assert late.graph_reason == ""


@pytest.mark.parametrize(("family", "sizes", "options"), [
    ("gemma2", {}, {"denoise_steps": 3}), ("gpt_oss", {}, {}), ("glm4_moe", {}, {"block_size": 4}),
    ("lfm2_moe", {}, {}), ("qwen3_5", {}, {}), ("kimi_linear", {}, {}), ("nemotron_h (dt under its limit)", {}, {}),
    ("qwen3_moe", {"num_hidden_layers": 2}, {}), ("minimax_m2", {"num_hidden_layers": 2}, {}),
])  # fmt: skip
def test_a_captured_step_of_any_family_writes_the_greedy_text(family, sizes, options):
    """Modules of the model's own, experts, and states that go back."""
    target, prompts = make_target(family, **sizes), [prompt(length) for length in (1, 17, 30)]
    answers = [greedy(target, p, 24) for p in prompts]
    generator = families.cheat(target, make_draft(target), prompts, answers, ahead=True, **options)
    for generator.spoil in (5, 3):
        check_batch(generator.generate, prompts, answers, max_new_tokens=24)
    assert generator.graph_reason == ""
    assert generator.runner.device.steps["replayed"] > 5


def test_a_call_waits_for_what_was_queued_before_it(target, draft, batch):
    generator, ids = record(cheat(target, draft, batch)), batch[0]
    for calls in (1, 2):
        generator.generate(ids, attention_mask=batch[1], max_new_tokens=4)
        assert generator.runner.device.settled == calls


def test_neither_streams_nor_captures_share_counters(monkeypatch):
    launch, places = registry.CudaLauncher(SimpleNamespace(NUM_COUNTERS=4)), {}
    monkeypatch.setattr(registry, "_stream_and_capture", lambda _: place)
    for place in ((1, 0), (2, 0), (1, 7), (2, 7), (1, 0), (1, 7), (1, 8), (1, 0)):
        counters = launch.counters(torch.device("cpu"))
        assert places.setdefault(place, counters) is counters, "a stream and a capture keep theirs"
        assert not counters.any()
    assert len({counters.data_ptr() for counters in places.values()}) == 5


class TestHostReads:
    def test_the_loop_makes_no_host_read(self, target, draft, batch):
        ids, mask, _, answers, stop = batch
        generator, tokenizer = record(cheat(target, draft, batch)), byte_level()
        call = {"attention_mask": mask, "max_new_tokens": NEW, "stop_token_ids": stop[:1], "tokenizer": tokenizer}
        strings = tokenizer.decode(answers[2][:20])[-2:]
        expected = list(cheat(target, draft, batch).stream(ids, stop_strings=strings, **call))
        for _ in range(2):
            events = generator.stream(ids, stop_strings=strings, **call)
            got = [next(events)]
            with no_peeking(generator):
                got += list(events)
            assert [event.ids for event in got] == [event.ids for event in expected]
            assert [event.text for event in got] == [event.text for event in expected]
            generator.reset()

    def test_planted_host_reads_are_found(self, target):
        generator = dflash.Generator(target, max_length=30)
        length = generator.state.length
        for read in (
            *(lambda: length.item(), lambda: length.tolist(), lambda: int(length[0]), lambda: bool(length[0] > 3)),
            *(lambda: length.cpu(), lambda: length.nonzero(), lambda: length[length > 3]),
        ):
            with pytest.raises(HostRead), no_peeking(generator):
                read()
            with pytest.raises(HostRead), no_host_reads():
                read()
        with pytest.raises(HostRead), no_host_reads():
            torch.tensor([1, 2, 3])


class TestGraphContents:
    """A graph must not outlive the state that it was captured with."""

    def test_a_longer_stop_list_is_captured_again(self, target, draft, batch):
        ids, mask, _, _, stop = batch
        eager, late = cheat(target, draft, batch), record(cheat(target, draft, batch))
        for stops in (stop, [*range(60, 80), *stop], stop):
            call = {"attention_mask": mask, "max_new_tokens": NEW, "stop_token_ids": stops}
            same(
                late.generate(ids, return_dict_in_generate=True, **call),
                eager.generate(ids, return_dict_in_generate=True, **call),
            )
        assert late.runner.device.captures == 2

    def test_replaced_drafter_weights_are_captured_again(self, target):
        draft = make_draft(target)
        late, p = record(dflash.Generator(target, draft, max_length=60)), prompt(6)
        first = late.generate(p[None], max_new_tokens=NEW)
        draft.norm.weight.data = draft.norm.weight.data * float("nan")
        output = late.generate(p[None], max_new_tokens=NEW, return_dict_in_generate=True)
        assert torch.equal(output.sequences, first)
        assert set(output.statistics.acceptance_lengths[0]) == {1}, "the old weights were used"
        assert late.runner.device.captures == 2

    def test_only_the_most_recent_graphs_stay(self, target, draft, batch, monkeypatch):
        monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
        ids, mask, *_ = batch
        late = record(cheat(target, draft, batch))
        for name in ("greedy", "rejection", "rules", "greedy", "greedy"):
            call = {"attention_mask": mask, "max_new_tokens": NEW, **CALLS[name]}
            expected = cheat(target, draft, batch).generate(ids, **call)
            assert torch.equal(late.generate(ids, **call), expected)
            assert late.runner.graphs <= 2
        assert late.runner.device.captures == 4

    def test_one_shot_calls_keep_a_graph_until_they_grow_or_the_target_changes(self, monkeypatch, kept):
        monkeypatch.setattr(generator_module, "Direct", recorder)
        target = make_target("qwen3", num_hidden_layers=2)
        draft = make_draft(target)

        def check(length: int, new: int = NEW) -> graphs.Replay:
            p = prompt(length)
            assert dflash.generate(target, draft, p[None], max_new_tokens=new)[0, length:].tolist() == (
                greedy(target, p, new).tolist()
            )
            return kept().runner

        runner = check(5)
        assert check(9) is runner
        assert (runner.device.captures, runner.reason) == (1, "")
        handle = target.model.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
        assert check(9).reason == "a graph would not call the target's hook on model.layers.1"
        handle.remove()
        again = check(9)
        assert (again.device.captures, again.reason) == (1, "")
        longer = check(300, 8)
        assert longer is not again
        assert check(310, 20) is longer
        assert longer.device.captures == 1
        dflash.release()


def test_a_capture_that_ran_the_step_does_not_loop_forever(target, monkeypatch):
    """A capture on another device's stream gives an empty graph: the step has run, and replays do nothing."""
    monkeypatch.setattr(Recorded, "capture", lambda self, step: lambda: None)
    generator = record(dflash.Generator(target, None, max_length=60))
    with pytest.raises(RuntimeError, match="did nothing for row 0, which is running"):
        generator.generate(prompt(5)[None], max_new_tokens=NEW)
    monkeypatch.undo()
    assert generator.generate(prompt(5)[None], max_new_tokens=NEW)[0, 5:].tolist() == (
        greedy(target, prompt(5), NEW).tolist()
    )


def test_memory_is_freed_after_the_surplus_step(target, monkeypatch):
    alive = []
    monkeypatch.setattr(generator_module, "Direct", recorder)
    monkeypatch.setattr(Recorded, "drain", lambda self: alive.append(state() is not None))
    generator = dflash.Generator(target, None, max_length=60)
    generator.generate(prompt(5)[None], max_new_tokens=3)  # too short for a capture; a graph would hold the state
    state = weakref.ref(generator.state.tokens)
    assert not alive
    del generator
    gc.collect()
    assert alive == [True], "waited once, while the state still existed"


def test_work_queued_on_two_streams_stays_in_order(target, monkeypatch):
    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.after = name, []

        def wait_stream(self, other: "Stream") -> None:
            self.after.append(other.name)

    streams = [Stream("first"), Stream("second")]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[0])
    monkeypatch.setattr(Recorded, "follow", graphs.Device.follow)
    generator = record(dflash.Generator(target, None, max_length=60))
    events = generator.stream(prompt(5)[None], max_new_tokens=9)
    next(events), next(events)
    assert not streams[0].after
    streams.reverse()
    next(events), next(events)
    assert (streams[0].after, streams[1].after) == (["first"], [])
    streams.reverse()
    generator.generate(prompt(7)[None], max_new_tokens=3)  # a new call follows the one before
    assert (streams[0].after, streams[1].after) == (["second"], ["first"])


class TestFallbacks:
    def expect(self, generator, batch, reason: str, **call) -> None:
        ids, mask, _, answers, _ = batch
        for _ in range(2):
            output = generator.generate(ids, attention_mask=mask, max_new_tokens=NEW, **call)
            for row, answer in enumerate(answers):
                assert output[row, ids.shape[1] :].tolist() == answer.tolist()
            generator.reset()
        assert reason in generator.graph_reason
        assert generator.runner.graphs == 0
        assert generator.runner.device.steps["replayed"] == 0

    @pytest.mark.parametrize(("name", "value", "reason"), [
        ("waits", "modeling_some_moe.py:71", "the step waits for the device (modeling_some_moe.py:71)"),
        ("broken", RuntimeError("no capture\nmore"), "captured: RuntimeError: no capture"),
    ])  # fmt: skip
    def test_a_step_that_cannot_be_captured_runs_eagerly(self, target, draft, batch, name, value, reason):
        generator = record(cheat(target, draft, batch))
        setattr(generator.runner.device, name, value)
        self.expect(generator, batch, reason)

    def test_after_a_failed_capture_other_kinds_warm_up_again(self):
        device = Recorded(torch.zeros(1, 4, dtype=torch.int64))
        runner, ran = graphs.Replay(device.report, device), []

        def launch(kind: str) -> None:
            runner.launch(lambda: ran.append(kind), lambda: kind)
            runner.read()

        launch("waits")
        launch("waits")  # as warm as a capture needs
        device.broken = RuntimeError("no capture")
        for _ in range(3):
            launch("fails")
        device.broken = None
        launch("waits")
        assert runner.graphs == 0
        launch("waits")
        launch("waits")
        assert runner.graphs == 1
        launch("fails")
        assert "no capture" in runner.reason

    def test_python_rules_run_eagerly(self, target, draft, batch):
        generator, asked = record(cheat(target, draft, batch)), []
        processor = lambda ids, scores: asked.append(ids.shape[1]) or scores  # noqa: E731
        self.expect(generator, batch, "run on the host", logits_processor=[processor])
        assert generator.runner.device.most_ahead == 1
        # Each of the two calls asks once per token, and never after the last.
        assert len(asked) == 2 * 3 * NEW

    def test_a_hooked_drafter_and_graph_false_run_eagerly(self, target, draft, batch):
        self.expect(record(cheat(target, draft, batch, graph=False)), batch, "graph=False was asked for")
        hooked = make_draft(target)
        hooked.norm.register_forward_hook(lambda *args: None)
        self.expect(record(cheat(target, hooked, batch)), batch, "the drafter's hook on norm")

    def test_graph_true_raises_if_no_graph_can_be_used(self, target, draft, batch):
        with pytest.raises(ValueError, match="graph=True needs a target on a GPU, this one is on cpu"):
            cheat(target, draft, batch, graph=True)
        with pytest.raises(ValueError, match="graph must be True, False or \"auto\", got 'yes'"):
            cheat(target, draft, batch, graph="yes")
        generator = record(cheat(target, draft, batch))
        generator.graph = True
        call = {"ids": batch[0], "attention_mask": batch[1], "max_new_tokens": NEW}
        processor = RepetitionPenaltyLogitsProcessor(1.5)
        with pytest.raises(ValueError, match=r"graph=True cannot be followed: logits_processor .* run on the host"):
            generator.generate(logits_processor=[processor], **call)
        generator.runner.device.waits = "file.py:1"
        with pytest.raises(RuntimeError, match=r"graph=True cannot be followed: the step waits for the device"):
            generator.generate(**call)

    def test_a_cpu_is_named_as_the_reason(self, target, draft):
        assert dflash.Generator(target, draft, max_length=30).graph_reason == "the target is on cpu"


@pytest.fixture(scope="module")
def on_gpu():
    """Return a function from a dtype to a target, a drafter and a batch on the GPU."""
    made = {}

    def get(dtype: torch.dtype):
        if dtype not in made:
            target = make_target("qwen3", dtype=dtype)
            draft = make_draft(target).cuda()
            target.cuda()
            prompts = [prompt(length).cuda() for length in (3, 9, 30)]
            ids, mask = left_padded([p.cpu() for p in prompts])
            one = dflash.Generator(target, None, max_length=90, batch_size=3, block_size=16, graph=False)
            text = one.generate(ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=NEW, stop_token_ids=[])
            answers = list(text[:, ids.shape[1] :])
            stop = [int(answers[0][11]), int(answers[1][29])]
            made[dtype] = target, draft, (ids.cuda(), mask.cuda(), prompts, answers, stop)
        return made[dtype]

    return get


@pytest.mark.cuda
class TestOnAGPU:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", CALLS)
    def test_the_graph_writes_what_eager_and_one_token_decoding_write(self, on_gpu, dtype, name):
        target, draft, batch = on_gpu(dtype)
        ids, mask, *_, stop = batch
        call = {"attention_mask": mask, "max_new_tokens": NEW, "stop_token_ids": stop, **CALLS[name]}
        graph, eager = cheat(target, draft, batch, graph=True), cheat(target, draft, batch, graph=False)
        for _ in range(2):
            graph.reset(), eager.reset()
            expected = eager.generate(ids, return_dict_in_generate=True, **call)
            same(graph.generate(ids, return_dict_in_generate=True, **call), expected)
        assert (graph.runner.graphs, graph.graph_reason) == (1, "")
        assert eager.graph_reason == "graph=False was asked for"
        if name != "rejection":
            one = dflash.Generator(target, None, max_length=90, batch_size=3, block_size=16, graph=True)
            assert torch.equal(one.generate(ids, **call), expected.sequences)

    def test_a_compiled_target_is_captured(self, on_gpu):
        target, draft, batch = on_gpu(torch.float32)
        ids, mask, *_, stop = batch
        call = {"attention_mask": mask, "max_new_tokens": NEW, "stop_token_ids": stop, "return_dict_in_generate": True}
        compiled = cheat(target, draft, batch, graph=True, compile=True)
        same(compiled.generate(ids, **call), cheat(target, draft, batch, graph=False).generate(ids, **call))
        assert compiled.runner.graphs == 1

    def test_the_loop_never_waits_but_for_its_late_read(self, on_gpu):
        target, draft, batch = on_gpu(torch.bfloat16)
        ids, mask, _, answers, stop = batch
        generator, tokenizer = cheat(target, draft, batch), byte_level()
        strings = tokenizer.decode(answers[2][:20])[-2:]
        call = {"attention_mask": mask, "max_new_tokens": NEW, "stop_token_ids": stop, "tokenizer": tokenizer}
        texts = []
        for _ in range(3):  # eager and captured, then only replayed
            generator.reset()
            events = generator.stream(ids, stop_strings=strings, **call)
            got = [next(events)]
            torch.cuda.set_sync_debug_mode("error")
            try:
                got += list(events)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            texts.append([[token for event in got for token in event.ids[row]] for row in range(3)])
        assert generator.graph_reason == ""
        assert texts[0] == texts[1] == texts[2]

    def test_a_repeated_call_allocates_nothing(self, on_gpu):
        target, draft, batch = on_gpu(torch.bfloat16)
        ids, mask, *_ = batch
        generator = cheat(target, draft, batch)
        call = {"attention_mask": mask, "max_new_tokens": NEW}

        def device_memory() -> tuple[int, ...]:
            stats = torch.cuda.memory_stats()
            names = ("segment.all.allocated", "reserved_bytes.all.current", "allocated_bytes.all.current")
            return tuple(stats[name] for name in (*names, "num_device_alloc"))

        def allocations() -> int:
            return torch.cuda.memory_stats()["allocation.all.allocated"]

        for _ in range(2):
            generator.reset()
            generator.generate(ids, **call)
        before = device_memory()
        for _ in range(5):
            generator.reset()
            generator.generate(ids, **call)
        assert device_memory() == before
        events = generator.stream(ids, **call)
        next(events)
        before = allocations()
        for _ in events:
            assert allocations() == before, "a replayed step asked the allocator for memory"

    def test_python_rules_and_experts_run_too(self, on_gpu):
        target, draft, batch = on_gpu(torch.float32)
        ids, mask, *_ = batch
        call = {"attention_mask": mask, "max_new_tokens": 12}
        generator = dflash.Generator(target, draft, max_length=90, batch_size=3)
        by_rule = generator.generate(ids, repetition_penalty=1.5, **call)
        processor = RepetitionPenaltyLogitsProcessor(1.5)
        assert torch.equal(generator.generate(ids, logits_processor=[processor], **call), by_rule)
        assert "run on the host" in generator.graph_reason
        experts = make_target("qwen3_moe")
        draft = make_draft(experts).cuda()
        experts.cuda()
        p = prompt(9).cuda()
        generator = dflash.Generator(experts, draft, max_length=90)
        for _ in range(2):  # in a graph or not: transformers may wait for the experts' counts
            assert generator.generate(p[None], max_new_tokens=NEW)[0, 9:].tolist() == greedy(experts, p, NEW).tolist()

    def test_generators_capture_in_two_threads(self, on_gpu):
        target, draft, batch = on_gpu(torch.float32)
        ids, mask, *_ = batch
        expected = cheat(target, draft, batch, graph=False).generate(ids, attention_mask=mask, max_new_tokens=NEW)
        generators = [cheat(target, draft, batch, graph=True) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(g.generate, ids, attention_mask=mask, max_new_tokens=NEW) for g in generators]
            for call in calls:
                assert torch.equal(call.result(), expected)
        assert [generator.graph_reason for generator in generators] == ["", ""]
        assert torch.cuda.get_sync_debug_mode() == 0

    def test_a_deleted_generator_writes_to_no_other_tensor(self, on_gpu):
        target, draft, batch = on_gpu(torch.float32)
        ids, mask, *_ = batch
        generator = cheat(target, draft, batch)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            generator.generate(ids, attention_mask=mask, max_new_tokens=NEW)
            size = generator.state.target_cache.keys[0].shape
            del generator
        mine = [torch.full(size, 3.0, device="cuda") for _ in range(64)]
        torch.cuda.synchronize()
        assert all(bool(tensor.eq(3.0).all()) for tensor in mine)

    def test_calls_on_several_streams_follow_one_another(self, on_gpu):
        target, draft, batch = on_gpu(torch.float32)
        ids, mask, _, answers, _ = batch
        generator = cheat(target, draft, batch)
        torch.cuda.synchronize()
        for _ in range(4):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                output = generator.generate(ids, attention_mask=mask, max_new_tokens=NEW)
            stream.synchronize()
            assert torch.equal(output[:, ids.shape[1] :], torch.stack(answers))
