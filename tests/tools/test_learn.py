"""Answers that are kept, replayed and learned from, and drafters that are swapped while requests run."""

import dataclasses
import errno
import functools
import json
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

import datasets
import pytest
import torch
from baseline import prompt
from families import make_draft, make_target
from schedules import PAIRS, alone, options, play, requests
from served import SUM, Reader, ask, serving, wait_until

import dflash
from dflash.answers import Drafters, RunningRequests, Store
from dflash.session import Session
from dflash_serve.adopt import Adopter
from dflash_serve.record import AnswerRecorder
from dflash_serve.scheduler import Scheduler
from dflash_tools.learn import CandidateGains, Gain, LearnOptions, Replayer, learn
from dflash_tools.learn.learning import add_lora_, merge_lora_
from dflash_tools.train import TargetFeatures, save_draft

VOCAB = 97


@pytest.fixture
def pair():
    target = make_target("qwen3")
    return target, make_draft(target)


def written(store: Store) -> list:
    return [store.read(path, VOCAB) for path in store.answers()]


def answers_of(folder, pair, count, **arguments) -> AnswerRecorder:
    """Keep the answers to some prompts in a folder."""
    target, draft = pair
    recorder = AnswerRecorder(folder, target, draft)
    generator = dflash.Generator(target, draft, max_length=48, on_answer=recorder)
    for seed in range(count):
        given = {"max_new_tokens": 24, "temperature": 1.0, "seed": seed} | arguments
        generator.generate(prompt(9, seed=seed)[None], **given)
        recorder.flush()  # few may wait for a slow disk
    return recorder


def kept(folder, pair, count, **arguments) -> Store:
    """Do the same, and end."""
    recorder = answers_of(folder, pair, count, **arguments)
    recorder.close()
    return recorder.store


# ---------------------------------------------------------------------------------------------- answers and replays


@pytest.mark.parametrize("pair", ["tiny fp32", "tiny bf16", "recurrent bf16", "trained fp32", "trained bf16"])
@pytest.mark.parametrize("options", [{}, {"prompt_lookup": 2}, {"block_size": 5, "denoise_steps": 2}])
def test_a_replay_has_the_steps_that_serving_had(pair, options, tmp_path):
    """Prompts share beginnings, come from the cache of the session, and have every setting that drafts depend on."""
    target, draft, tokenizer = PAIRS[pair]()
    vocab, recorder = target.get_input_embeddings().weight.shape[0], AnswerRecorder(tmp_path, target, draft)
    given = {"max_length": 72, "prefill_chunk": 8, **options}
    session = Session(dflash.Generator(target, draft, batch_size=4, on_answer=recorder, **given))
    wanted = [request for request in requests(vocab, tokenizer) if "grammar" not in request.arguments]
    count = sum(1 for _ in play(session, wanted, random.Random(1), meanwhile=recorder.flush))
    recorder.flush()
    answers = [recorder.store.read(path, vocab) for path in recorder.store.answers()]
    assert len(answers) >= count > 30
    replayer = Replayer(target, draft, **given)
    steps = [replayer(answer) for answer in answers]
    assert steps == [answer.steps for answer in answers]
    assert max(map(max, filter(None, steps))) > 1


def test_kept_is_what_the_target_computed(tmp_path, pair):
    target, draft = pair
    answer = written(kept(tmp_path, pair, 2, temperature=0.0))[1]
    with torch.no_grad():
        logits = target(answer.ids[None, :-1]).logits[0, answer.prompt_length - 1 :]
    features = TargetFeatures(target, draft.config.target_layer_ids)(answer.ids[None, :-1])[0]
    torch.testing.assert_close(answer.features, features, atol=1e-4, rtol=1e-4)
    want = logits.topk(16)
    torch.testing.assert_close(answer.top_logits, want.values, atol=1e-4, rtol=1e-4)
    assert torch.equal(answer.top_ids.long(), want.indices)
    assert answer.ids[answer.prompt_length :].tolist() == want.indices[:, 0].tolist()


def test_the_oldest_answers_make_room_and_only_the_owner_can_read(tmp_path, pair):
    store = kept(tmp_path / "kept", pair, 6)
    size = max(path.stat().st_size for path in store.answers())
    small = Store(store.folder, max_bytes=4 * size)
    names = [path.name for path in store.answers()]
    small.add(written(store)[0])
    assert [path.name for path in small.answers()] == [*names[-3:], "000000000006.safetensors"]
    assert sum(path.stat().st_size for path in small.answers()) <= 4 * size
    assert {path.stat().st_mode & 0o777 for path in small.answers()} == {0o600}
    assert store.folder.stat().st_mode & 0o777 == 0o700
    small.add(dataclasses.replace(written(store)[0], features=torch.zeros(100 * size)))
    assert len(small.answers()) == 4
    assert small.forget() == 4
    assert not store.folder.exists()


def test_what_cannot_be_replayed_or_must_not_be_kept_is_left_out(tmp_path, pair):
    assert not written(kept(tmp_path, pair, 1, store=False))
    assert not written(kept(tmp_path, pair, 1, acceptance="rejection"))
    assert not written(kept(tmp_path, pair, 1, stopping_criteria=[lambda ids, _: False]))
    assert len(written(kept(tmp_path, pair, 1))) == 1


def test_folders_of_something_else_or_another_version_are_refused(tmp_path, pair):
    target, draft = pair
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        AnswerRecorder(tmp_path / "file", target, draft)
    with pytest.raises(ValueError, match="holds something else"):
        AnswerRecorder(tmp_path, target, draft)
    store = kept(tmp_path / "kept", pair, 1)
    other = make_target("qwen3", seed=1)
    with pytest.raises(ValueError, match="another target"):
        AnswerRecorder(tmp_path / "kept", other, make_draft(other))
    path = store.answers()[0]
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="not an answer that dflash kept"):
        written(store)
    with pytest.raises(ValueError, match="on_answer needs a drafter"):
        dflash.Generator(target, max_length=20, on_answer=print)
    must = r"drafters.json must have adopted, before, refused, last, got .* delete it"
    for content in ({"adopted": 1, "epoch": 2}, {"adopted": "1", "before": 0, "refused": [], "last": 1}, {}):
        (store.folder / "drafters.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=must):
            store.drafters()


def is_full(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "a file")


def test_a_full_disk_loses_nothing_and_is_said_once(tmp_path, pair, monkeypatch, caplog):
    target, draft = pair
    with monkeypatch.context() as full:  # at the first start
        full.setattr(Store, "write", is_full)
        with pytest.raises(OSError, match="No space"):
            AnswerRecorder(tmp_path, target, draft)
    (tmp_path / "answers").mkdir(exist_ok=True)  # of earlier versions
    names = [path.name for path in kept(tmp_path, pair, 2).answers()]
    with monkeypatch.context() as full:  # in the middle of an answer
        full.setattr("dflash.files.fsync", is_full)
        store = kept(tmp_path, pair, 4)
    assert [path.name for path in store.answers()] == names
    assert len(list((tmp_path / "answers").iterdir())) == 2
    assert [record.message for record in caplog.records].count(caplog.messages[0]) == len(caplog.messages) == 1
    assert len(kept(tmp_path, pair, 1).answers()) == 3


def test_answers_that_were_removed_by_hand_and_other_files_are_in_nobodys_way(tmp_path, pair):
    recorder = answers_of(tmp_path, pair, 2)
    shutil.rmtree(tmp_path / "answers")
    recorder.store.add(written(kept(tmp_path.parent / "other", pair, 1))[0])
    recorder.close()
    for name in ("notes.txt", "000000000001 (copy).safetensors", ".DS_Store"):
        (tmp_path / "answers" / name).touch()
    store = kept(tmp_path, pair, 1)
    assert len(store.answers()) == 2
    assert store.forget() == 2
    assert not tmp_path.exists()


# ---------------------------------------------------------------------------------------------- the gate


def test_a_gain_is_adopted_if_it_is_sure_and_nothing_is_lost():
    slow, fast = [[2, 2, 2, 2]] * 30, [[4, 4]] * 30
    mixed = [[4, 4] if i % 2 else [2, 2, 2, 2] for i in range(30)]
    same = Gain.of(slow, slow)
    assert (same.gain, same.low, same.high) == (0, 0, 0)
    gain = Gain.of(slow, mixed)
    assert gain.gain == pytest.approx(1 / 3)
    assert gain.low < gain.gain < gain.high
    assert (gain.before, gain.after) == (2, 8 / 3)
    assert CandidateGains(gain, same).is_adopted
    assert not CandidateGains(same, same).is_adopted
    assert not CandidateGains(gain, Gain.of(fast, mixed)).is_adopted
    unsure = Gain.of([[2, 2, 2, 2]] * 2, [[8], [1] * 8])  # one answer is four times as fast, the other half as fast
    assert unsure.low < 0 < unsure.high
    assert not CandidateGains(unsure, same).is_adopted
    first = str(CandidateGains(gain, same)).splitlines()[0]
    assert first == "Adopted: +33.3% tokens per step on new answers, +0.0% on general ones."


# ---------------------------------------------------------------------------------------------- learning


def sums(count: int, seed: int, encode: Callable) -> list[torch.Tensor]:
    """Return prompts that the pair inside the package knows."""
    draw = random.Random(seed)
    return [encode(f"add {draw.randint(100, 99999)} and {draw.randint(100, 99999)}") for _ in range(count)]


@functools.cache
def known_pair() -> tuple:
    """Return the pair inside the package, and a function that encodes a question."""
    target, draft, tokenizer = dflash.demo_pair(generation=1)

    def encode(text: str) -> torch.Tensor:
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids[0]

    return target, draft, encode


def forgetful(draft, damage: float):
    """Return a drafter with noise in its weights."""
    other, random_ = type(draft)(draft.config, dtype=draft.dtype), torch.Generator().manual_seed(0)
    weights = draft.state_dict()
    for name, x in weights.items():
        if x.is_floating_point() and x.dim() == 2:
            weights[name] = x + damage * x.std() * torch.randn(x.shape, generator=random_)
    other.load_state_dict(weights)
    return other.eval()


def lesson(folder, count: int, new: int = 60) -> tuple:
    """Keep answers of the pair inside the package, with a drafter that has something to learn, and general ones."""
    target, draft, encode = known_pair()
    draft = forgetful(draft, 0.6)
    recorder = AnswerRecorder(folder, target, draft)
    generator = dflash.Generator(target, draft, max_length=200, on_answer=recorder)
    for ids in sums(count, 0, encode):
        generator.generate(ids[None], max_new_tokens=new)
        recorder.flush()
    recorder.close()
    asked = sums(100, 1, encode)
    rows = [dflash.generate(target, draft, ids[None], max_new_tokens=new)[0].tolist() for ids in asked]
    masks = [[0] * len(ids) + [1] * (len(row) - len(ids)) for ids, row in zip(asked, rows, strict=True)]
    return recorder.store, target, draft, datasets.Dataset.from_dict({"input_ids": rows, "loss_mask": masks})


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> tuple:
    """Return what `lesson` does for 52 short answers. Tests learn from copies of the folder."""
    return lesson(tmp_path_factory.mktemp("taught"), 52, new=20)


@pytest.fixture
def short_lesson(taught, tmp_path) -> tuple:
    """Return what `lesson` does for a folder of the test's own."""
    return Store(shutil.copytree(taught[0].folder, tmp_path, dirs_exist_ok=True)), *taught[1:]


def test_a_drafter_learns_and_is_adopted(tmp_path):
    store, target, draft, base = lesson(tmp_path, 80)
    before, said = {name: x.clone() for name, x in draft.state_dict().items()}, []
    options = LearnOptions(steps=40, learning_rate=1e-3, batch_tokens=512)
    verdict = learn(store, target, draft, base, options, say=said.append)
    assert verdict.own.answers == 8
    assert verdict.is_adopted, (str(verdict), said)
    assert store.drafters() == Drafters(adopted=1, before=0, last=1)
    assert all(torch.equal(x, before[name]) for name, x in draft.state_dict().items())
    assert not store.run_folder.exists()
    (report,) = map(json.loads, (tmp_path / "reports.jsonl").read_text().splitlines())
    assert report["adopted"]
    assert report["answers"] == 80
    # What the replay promised is what serving has.
    learned, encode = dflash.load_draft(store.drafter_folder(1), dtype=torch.float32), known_pair()[2]
    steps = [], []
    for ids in sums(6, 5, encode):
        for one, found in zip((draft, learned), steps, strict=True):
            call = {"max_new_tokens": 60, "return_dict_in_generate": True}
            found.append(dflash.generate(target, one, ids[None], **call).statistics.acceptance_lengths[0])
    assert Gain.of(*steps).gain > verdict.own.gain / 2


def test_a_drafter_that_has_nothing_to_learn_is_not_adopted(tmp_path, short_lesson):
    store, target, draft, base = short_lesson
    for folder, name in (("drafters", "notes.txt"), ("drafters/old", "x"), ("run/answers", "x")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).touch()  # of an editor, or of a desktop
    (tmp_path / "run" / "run.json").write_text('{"epoch": 2}')  # of another version
    base = datasets.concatenate_datasets([base, base.select([50])])
    taught = [*base[100]["input_ids"][:-1], draft.config.mask_token_id]
    base = base.select(range(100)).add_item({"input_ids": taught, "loss_mask": base[100]["loss_mask"]})
    verdict = learn(store, target, draft, base, LearnOptions(steps=2, learning_rate=1e-9))
    assert not verdict.is_adopted
    assert abs(verdict.own.gain) < 0.02
    assert store.drafters() == Drafters(adopted=0, before=0, last=1)
    assert not store.drafter_folder(1).exists()
    assert {path.name for path in (tmp_path / "drafters").iterdir()} == {"notes.txt", "old"}


def test_a_stopped_run_goes_on_with_its_answers(short_lesson, monkeypatch):
    store, target, draft, base = short_lesson
    monkeypatch.setattr("dflash_tools.learn.learning.SAVE_EVERY", 0.0)

    def stop(line):
        if line.startswith("step"):
            raise KeyboardInterrupt

    given = LearnOptions(steps=12, rank=2)
    with pytest.raises(KeyboardInterrupt):
        learn(store, target, draft, base, given, say=stop)
    for path in store.answers()[:2]:
        path.unlink()  # as a server makes room
    said = []
    with pytest.raises(KeyboardInterrupt):
        learn(store, target, draft, base, given, say=lambda line: (said.append(line), stop(line)))
    assert any(", from step " in line for line in said), said
    assert said[0].startswith("52 answers")
    # With other general answers it is another run.
    learn(store, target, draft, base.select(range(98)), given, say=said.append)
    assert said[-1].startswith("50%")
    assert sum(", from step " in line for line in said) == 1


def test_few_answers_and_few_general_ones_are_refused(tmp_path, pair):
    target, draft = pair
    rows = [prompt(30, seed=i).tolist() for i in range(20)]
    base = datasets.Dataset.from_dict({"input_ids": rows, "loss_mask": [[0] * 9 + [1] * 21] * 20})
    store = kept(tmp_path, pair, 3)
    with pytest.raises(ValueError, match="at least 50 answers to learn from, there are 3"):
        learn(store, target, draft, base)
    store = kept(tmp_path, pair, 50)
    with pytest.raises(ValueError, match=r"at least 96 prompts, .* got 20 prompts"):
        learn(store, target, draft, base)


def test_lora_is_merged_into_the_same_drafter(pair):
    _, draft = pair
    weights = {name: weight.clone() for name, weight in draft.state_dict().items()}
    add_lora_(draft, 3)
    for name, parameter in draft.named_parameters():
        assert parameter.requires_grad == name.endswith((".up", ".down"))
    linear = draft.layers[0].mlp.up_proj
    with torch.no_grad():
        linear.parametrizations.weight[0].up.normal_()
    wanted = linear.weight.clone()
    merge_lora_(draft)
    assert torch.equal(linear.weight, wanted)
    assert torch.linalg.matrix_rank(wanted - weights["layers.0.mlp.up_proj.weight"], rtol=1e-3) == 3
    changed = {name for name, weight in draft.state_dict().items() if not torch.equal(weight, weights[name])}
    assert draft.state_dict().keys() == weights.keys()
    assert changed == {"layers.0.mlp.up_proj.weight"}


def test_who_learns_sees_the_requests_of_another_process(tmp_path, pair):
    store = kept(tmp_path, pair, 1)
    code = (
        "import sys; from dflash.answers import Store as S\nwith S(sys.argv[1]).requests() as x: print(x.run_elsewhere)"
    )

    def seen() -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with store.requests() as requests:
        assert seen() == "False"
        requests.hold(True)
        assert seen() == "True"
        requests.hold(False)
        assert seen() == "False"


def test_learning_waits_while_requests_run(short_lesson, monkeypatch):
    store, target, draft, base = short_lesson
    looks = iter([True] * 5)
    monkeypatch.setattr(RunningRequests, "run_elsewhere", property(lambda _: next(looks, False)))
    learn(store, target, draft, base, LearnOptions(minutes=0.01))
    assert next(looks, None) is None


def test_a_folder_has_one_server_and_one_learner(tmp_path, pair):
    target, draft = pair
    recorder = answers_of(tmp_path, pair, 50)
    rows = [prompt(30, seed=i).tolist() for i in range(100)]
    base = datasets.Dataset.from_dict({"input_ids": rows, "loss_mask": [[0] * 9 + [1] * 21] * 100})
    with pytest.raises(ValueError, match="a server uses"):
        AnswerRecorder(tmp_path, target, draft)
    with pytest.raises(ValueError, match="a server uses"):
        recorder.store.forget()
    with recorder.store.used_by("learner"), pytest.raises(ValueError, match="a learner uses"):
        learn(recorder.store, target, draft, base)
    recorder.close()
    AnswerRecorder(tmp_path, target, draft).close()
    assert recorder.store.forget() == 50


# ---------------------------------------------------------------------------------------------- swaps


@pytest.mark.parametrize("name", ["tiny fp32", "trained bf16"])
def test_answers_are_the_same_whenever_drafters_are_swapped(name):
    """Weights change between random steps, while answers are being written too."""
    target, draft, wanted, results = alone(name)
    expected = {id(request): result for request, result in zip(wanted, results, strict=True)}
    session, swaps = Session(dflash.Generator(target, draft, **options(name))), 0
    choose, first = random.Random(3), {key: x.clone() for key, x in draft.state_dict().items()}

    def swap():
        nonlocal swaps
        if choose.random() < 0.1:
            noise = choose.choice([0, 0.3])
            other = {key: x + noise * x.std() * torch.randn(x.shape) if x.dim() == 2 else x for key, x in first.items()}
            draft.load_state_dict({key: x.to(first[key].dtype) for key, x in other.items()})
            session.generator.engine.refresh()
            swaps += 1

    try:
        for request, result in play(session, choose.choices(wanted, k=40), choose, meanwhile=swap):
            assert result[:3] == expected[id(request)][:3], request
            assert all(map(torch.equal, result.kept, expected[id(request)].kept))
    finally:
        draft.load_state_dict(first)
    assert swaps > 10


@pytest.fixture
def served(request, tmp_path, pair):
    """Return what serves a pair, with the options of a generator that a test may give as its parameter."""
    target, draft = pair
    recorder = AnswerRecorder(tmp_path / "kept", target, draft)
    given = {"max_length": 48, "batch_size": 2, "prefill_chunk": 8, **getattr(request, "param", {})}
    generator = dflash.Generator(target, draft, **given, on_answer=recorder)
    scheduler = Scheduler(generator)
    adopter = Adopter(recorder, scheduler, poll=0)
    yield scheduler, adopter, recorder.store
    adopter.close()
    scheduler.close(drain=False)
    recorder.close()


def adopt(store: Store, draft, number: int, scale: float) -> None:
    """Put a drafter into the folder, and ask for it."""
    weights = {name: x * scale if x.is_floating_point() else x for name, x in draft.state_dict().items()}
    other = type(draft)(draft.config, dtype=draft.dtype)
    other.load_state_dict(weights)
    save_draft(other, store.drafter_folder(number), dtype=None)
    with store.changing_drafters() as drafters:
        drafters.before, drafters.adopted, drafters.last = drafters.adopted, number, number


def test_a_server_swaps_drafters_between_requests(served, pair):
    scheduler, adopter, store = served
    target, draft = pair
    weight, ended = draft.fc.weight.clone(), threading.Event()

    def ask(seed):
        return Reader(scheduler, prompt(9), max_new_tokens=24, temperature=1.0, seed=seed)

    def swap_often():
        for number in range(1, 6):
            adopt(store, draft, number, 0.5)
            adopter.look()
        ended.set()

    texts, swapping = {}, threading.Thread(target=swap_often)
    swapping.start()
    while not ended.is_set() or len(texts) < 5:
        seed = len(texts)
        texts[seed] = [token for event in ask(seed) for token in event.ids[0]]
    swapping.join()
    torch.testing.assert_close(draft.fc.weight, weight * 0.5**5)
    assert adopter.number == 5
    for seed, text in texts.items():
        want = dflash.generate(target, None, prompt(9)[None], max_new_tokens=24, temperature=1.0, seed=seed)
        assert text == want[0, 9:].tolist()


def test_a_worse_drafter_is_rolled_back(served, pair):
    _scheduler, adopter, store = served
    weight = pair[1].fc.weight.clone()
    for _ in range(60):
        adopter.observe([4, 4, 3])
    adopt(store, pair[1], 1, 0.5)
    adopter.look()
    assert adopter.number == 1
    assert adopter.before.mean == pytest.approx(11 / 3)
    for _ in range(49):
        adopter.observe([3, 1, 2])
    adopter.look()
    assert store.drafters().adopted == 1  # too few
    adopter.observe([2, 2, 2])
    adopter.look()
    assert (store.drafters().adopted, store.drafters().refused) == (0, [1])
    assert adopter.number == 0
    assert torch.equal(pair[1].fc.weight, weight)


def test_a_drafter_of_another_shape_is_not_served(served, pair):
    _, adopter, store = served
    _, draft = pair
    config = dataclasses.replace(draft.config, block_size=3)
    save_draft(type(draft)(config, dtype=draft.dtype), store.drafter_folder(1))
    with store.changing_drafters() as drafters:
        drafters.adopted = 1
    with pytest.raises(ValueError, match="another shape"):
        adopter.look()
    assert adopter.number == 0


@pytest.mark.parametrize("served", [{"drafter_window": 8}], indirect=True)
def test_a_drafter_is_served_in_the_window_of_the_server(served, pair):
    _, adopter, store = served
    adopt(store, pair[1], 1, 0.5)
    adopter.look()
    assert adopter.number == 1


def test_the_lock_is_held_while_requests_run(served):
    scheduler, *_ = served
    busy = []
    hold = scheduler.on_busy
    scheduler.on_busy = lambda is_busy: (hold(is_busy), busy.append(is_busy))
    assert list(Reader(scheduler, prompt(9), max_new_tokens=9))
    wait_until(lambda: busy == [True, False])


MESSAGES = {"model": "pair", "messages": [{"role": "user", "content": SUM}], "max_tokens": 9}


def test_metrics_show_acceptance_before_and_after(served):
    _, adopter, _ = served
    with serving(tolerance={"adopter": adopter}) as service:
        assert ask(service, "/v1/chat/completions", {**MESSAGES, "max_tokens": 90}).status_code == 200
        page = ask(service, "/metrics", None).text
    assert "dflash_drafter 0.0" in page
    assert float(re.search(r'dflash_drafter_step_tokens{drafter="now"} (.*)', page)[1]) == adopter.now.mean > 1
    assert 'dflash_drafter_step_tokens{drafter="before"} NaN' in page


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_shows_and_deletes(shell, tmp_path, pair):
    store = kept(tmp_path / "kept", pair, 3)
    done = shell("learn", "status", store.folder)
    assert (done.code, done.out.split(",")[0]) == (0, "3 answers")
    assert done.out.strip().endswith("a server serves the drafter that it was started with")
    head = shell("learn", store.folder, "--model", "m", "--draft", "mtp", "--base", "b.jsonl")
    assert "a head in the target's own files cannot learn" in head.err
    assert shell("learn", "forget", store.folder).out.startswith("3 answers")
    assert not store.folder.exists()


@pytest.mark.parametrize(("words", "message"), [
    ("learn status missing", "there is no folder missing: start a server with --learn missing"),
    ("learn show missing", "name a folder, or status or forget and a folder, got show missing"),
    ("learn a b c", "name a folder, or status or forget and a folder, got a b c"),
    ("learn .", ". holds something else than answers"),
    ("serve --port 0 --learn .", ". holds something else than answers"),
    ("serve --port 0 --learn kept --block-size 1", "--learn needs a drafter with blocks of at least 2 rows"),
])  # fmt: skip
def test_mistakes_are_told_before_models_are_loaded(shell, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").touch()
    monkeypatch.setattr("dflash.cli.sources.load_target", lambda *_: pytest.fail("the target was loaded"))
    done = shell(*words.split())
    assert done.code == 2
    assert message in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_settings_out_of_range_are_refused(pair):
    for given, message in (
        ({"learning_rate": 0.0}, "learning_rate must be above 0"), ({"steps": 0}, "steps must be at least 1"),
        ({"rank": -1}, "rank must be at least 0"), ({"minutes": 0.0}, "minutes must be above 0"),
        ({"batch_tokens": 0}, "batch_tokens must be above 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            LearnOptions(**given)
    target, draft = pair
    with pytest.raises(TypeError, match="store must be True or False, got 'no'"):
        dflash.generate(target, draft, prompt(3)[None], store="no")
    with pytest.raises(ValueError, match="blocks of at least 2 rows"):
        Replayer(target, draft, max_length=20, block_size=1)
