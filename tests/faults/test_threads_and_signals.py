"""Threads that share generators, interrupts at any moment and abandoned streams never change another call."""

import concurrent.futures
import gc
import random
import signal
import threading
import time

import pytest
import torch
from baseline import greedy, prompt

import dflash

NEW = 10
PROMPTS = [prompt(length, seed=6) for length in (3, 8, 15, 22)]


@pytest.fixture(scope="module")
def expected(target):
    return [greedy(target, p, NEW).tolist() for p in PROMPTS]


def in_threads(count, work) -> list:
    """Return ``work(index)`` of as many threads, started at once."""
    barrier = threading.Barrier(count)

    def started(index):
        barrier.wait()
        return work(index)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(started, range(count)))


def ids_of(events) -> list[int]:
    return [token for event in events for token in event.ids[0]]


def test_threads_that_stream_from_one_generator_get_their_texts_or_an_error(target, draft, expected):
    generator = dflash.Generator(target, draft, max_length=48)

    def work(index: int) -> list[str]:
        said = []
        for turn in range(6):
            which, got = (index + turn) % len(PROMPTS), []
            try:
                for event in generator.stream(PROMPTS[which][None], max_new_tokens=NEW):
                    got += event.ids[0]
                said.append("right" if got == expected[which] else "wrong")
            except RuntimeError as error:
                is_named = "this stream has ended" in str(error) and got == expected[which][: len(got)]
                said.append("ended" if is_named else f"wrong {error}")
        return said

    said = [word for words in in_threads(4, work) for word in words]
    assert set(said) <= {"right", "ended"}
    assert "right" in said


def test_one_shot_calls_resets_and_releases_of_many_threads_do_not_mix(target, draft, expected):
    generator = dflash.Generator(target, draft, max_length=48)

    def work(index: int) -> bool:
        right = True
        for turn in range(6):
            which = (index + turn) % len(PROMPTS)
            if index % 3 == 2:
                (dflash.release if turn % 2 else generator.reset)()
                continue
            call = generator.generate if index % 3 else lambda *a, **k: dflash.generate(target, draft, *a, **k)
            output = call(PROMPTS[which][None], max_new_tokens=NEW)
            right &= output[0, len(PROMPTS[which]) :].tolist() == expected[which]
        return right

    assert all(in_threads(6, work))


def test_threads_whose_calls_call_back_do_not_wait_for_each_other_forever(target, draft, expected):
    def one_shot(which: int) -> bool:
        out = dflash.generate(target, draft, PROMPTS[which][None], max_new_tokens=NEW)
        return out[0].tolist()[-NEW:] == expected[which]

    def processor(ids, scores):
        # Inside a step of the stream, once the other thread is about to wait for the generator that runs it.
        if not right:
            right.append(True)
            other.start()
            started.wait(5)
            threading.Event().wait(0.3)
            right.append(one_shot(0))
        return scores

    right, started = [], threading.Event()
    other = threading.Thread(target=lambda: (started.set(), right.append(one_shot(1))), daemon=True)
    events = dflash.stream(target, draft, PROMPTS[1][None], max_new_tokens=NEW, logits_processor=[processor])
    assert next(events).ids[0] == expected[1][:1]
    other.join(60)
    assert not other.is_alive(), "both wait"
    assert [*right, one_shot(0)] == [True] * 4


@pytest.mark.parametrize("how", ["dropped", "closed", "closed by another thread", "left open"])
def test_streams_that_are_left_do_not_touch_later_calls(target, draft, expected, how):
    generator, left = dflash.Generator(target, draft, max_length=48), []
    doors = (generator.stream, lambda *a, **k: dflash.stream(target, draft, *a, **k))
    for turn in range(12):
        which, door = turn % len(PROMPTS), doors[turn % 2]
        events = door(PROMPTS[which][None], max_new_tokens=NEW)
        got = [token for _ in range(turn % 5) for token in next(events).ids[0]]
        assert got == expected[which][: len(got)]
        if how == "closed":
            events.close()
        elif how == "closed by another thread":
            closer = threading.Thread(target=events.close)
            closer.start()
            closer.join()
        elif how == "left open":
            left.append(events)
        del events
        output = generator.generate(PROMPTS[which][None], max_new_tokens=NEW)
        assert output[0, len(PROMPTS[which]) :].tolist() == expected[which]
        assert ids_of(dflash.stream(target, draft, PROMPTS[which][None], max_new_tokens=NEW)) == expected[which]
    gc.collect()
    for turn, events in enumerate(left):
        if turn % 5:  # it had begun
            with pytest.raises(RuntimeError, match="this stream has ended"):
                next(events)


def test_an_interrupt_at_any_moment_leaves_everything_usable(target, draft, expected):
    def new() -> dflash.Generator:
        return dflash.Generator(target, draft, max_length=64)

    generator, chance, interrupted = new(), random.Random(1), 0
    ids, want = PROMPTS[1][None], expected[1]
    door = {"custom_generate": dflash.custom_generate, "draft": draft, "do_sample": False, "pad_token_id": 0}
    calls = [
        lambda: generator.generate(ids, max_new_tokens=NEW)[0].tolist()[-NEW:],
        lambda: ids_of(generator.stream(ids, max_new_tokens=NEW)),
        lambda: dflash.generate(target, draft, ids, max_new_tokens=NEW)[0].tolist()[-NEW:],
        lambda: ids_of(dflash.stream(target, draft, ids, max_new_tokens=NEW)),
        lambda: new().generate(ids, max_new_tokens=NEW)[0].tolist()[-NEW:],
        lambda: target.generate(ids, max_new_tokens=NEW, **door)[0].tolist()[-NEW:],
        lambda: generator.reset() or want,
    ]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for call in calls:
            call()
            took = time.perf_counter()
            call()
            took = time.perf_counter() - took
            for _ in range(10):
                try:
                    signal.setitimer(signal.ITIMER_REAL, max(chance.random() * took, 1e-6))
                    call()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                    assert calls[0]() == want  # while the interrupt is still being handled
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert call() == want
                assert not torch.is_inference_mode_enabled()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 30
