"""A generator that is pickled or copied says that it cannot be; a forked child finds it free, with the right text."""

import copy
import os
import pickle
import signal
import threading
import time

import pytest
import torch
from baseline import greedy, prompt
from families import needs_assistant

import dflash

REFUSED = "a Generator cannot be pickled or copied.* Make one from the target and the drafter"


class Own(dflash.Generator):
    """A user's subclass."""


@pytest.mark.parametrize("kind", [dflash.Generator, Own])
def test_a_generator_cannot_be_copied(target, draft, kind):
    generator = kind(target, draft, max_length=40)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy, lambda generator: copy.deepcopy([generator])):
        with pytest.raises(TypeError, match=REFUSED):
            copied(generator)
    answer = generator.generate(prompt(5)[None], max_new_tokens=6)[0, 5:]
    assert answer.tolist() == greedy(target, prompt(5), 6).tolist()


AGAIN = (copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing)))


def test_drafters_and_results_are_copied(target, draft):
    ids = prompt(5)[None]
    output = dflash.generate(target, draft, ids, max_new_tokens=6, return_dict_in_generate=True)
    event = next(dflash.stream(target, draft, ids, max_new_tokens=6))
    for again in AGAIN:
        assert torch.equal(again(output).sequences, output.sequences)
        assert again(output).statistics == output.statistics
        assert again(event) == event
        assert torch.equal(dflash.generate(target, again(draft), ids, max_new_tokens=6), output.sequences)


@needs_assistant
def test_assistants_are_copied(target, draft):
    ids = prompt(5)[None]
    want = dflash.generate(target, draft, ids, max_new_tokens=6)
    for again in AGAIN:
        door = {"assistant_model": again(dflash.as_assistant(draft)), "speculation_type": "dflash"}
        assert torch.equal(target.generate(ids, max_new_tokens=6, do_sample=False, **door), want)


OUTER, INNER, CALL = prompt(9)[None], prompt(5)[None], {"max_new_tokens": 16}


def forked(work) -> str:
    """Return what a forked child that does ``work`` says, or that it hangs or crashes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # torch's own threads do not survive
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    until = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    with open(reading, "rb") as pipe:
        return pipe.read().decode() or "hangs or crashes"


@pytest.fixture
def generator(target, draft, set_threads):
    set_threads(2)
    return dflash.Generator(target, draft, max_length=80)


@pytest.fixture
def expected(target) -> list:
    """Return the texts of both prompts."""
    return [dflash.generate(target, None, ids, **CALL).tolist() for ids in (OUTER, INNER)]


@pytest.mark.parametrize("busy", ["idle", "generate", "one-shot", "reset", "make"])
def test_a_forked_child_gets_the_right_text_whatever_threads_did(target, draft, generator, expected, busy):
    def is_right() -> bool:
        texts = [generator.generate(OUTER, **CALL).tolist(), dflash.generate(target, draft, INNER, **CALL).tolist()]
        texts.append(dflash.Generator(target, draft, max_length=80).generate(OUTER, **CALL).tolist())
        generator.reset()
        return texts == [*expected, expected[0]]

    work = {
        "idle": lambda: time.sleep(0.01), "generate": lambda: generator.generate(OUTER, **CALL),
        "one-shot": lambda: dflash.generate(target, draft, OUTER, **CALL), "reset": generator.reset,
        "make": lambda: dflash.Generator(target, draft, max_length=80),
    }[busy]  # fmt: skip

    def repeat() -> None:
        while not stopped.is_set():
            work()

    stopped = threading.Event()
    threads = [threading.Thread(target=repeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            time.sleep(0.02)
            assert forked(is_right) == "True"
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert is_right()


def test_a_child_that_is_forked_inside_a_call_is_refused_and_other_calls_are_right(target, draft, generator, expected):
    said = []

    class Streamer:
        def put(self, value) -> None:
            if not said:
                said.append(forked(lambda: generator.generate(INNER, **CALL)))
                said.append(forked(lambda: dflash.generate(target, draft, INNER, **CALL).tolist() == expected[1]))

        def end(self) -> None:
            pass

    assert generator.generate(OUTER, streamer=Streamer(), **CALL).tolist() == expected[0]
    refusal, is_right = said
    assert refusal.startswith("RuntimeError: this generator is in the middle of a call")
    assert is_right == "True"
    events = generator.stream(OUTER, **CALL)
    first = next(events).ids[0]

    def ends_right() -> bool:
        return first + [token for event in events for token in event.ids[0]] == expected[0][0][9:]

    assert forked(ends_right) == "True"
    assert ends_right()
