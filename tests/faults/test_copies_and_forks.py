"""A generator that is pickled or copied says that it cannot be; a forked child finds it free, with the right text."""

import copy
import pickle

import process
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


FORKS = """
import os
import signal
import threading
import time

import torch
from baseline import prompt
from families import make_draft, make_target

import dflash

torch.set_num_threads(2)
target = make_target("qwen3")
draft = make_draft(target)
generator = dflash.Generator(target, draft, max_length=80)
outer, inner = prompt(9)[None], prompt(5)[None]
call = {"max_new_tokens": 16}
expected = [generator.generate(ids, **call).tolist() for ids in (outer, inner)]


def forked(name, work):
    \"\"\"Print what a forked child that does ``work`` says, or that it hangs or crashes.\"\"\"
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
    print(name, os.read(reading, 4096).decode() or "hangs or crashes", sep=": ", flush=True)


def right():
    texts = [generator.generate(outer, **call).tolist(), dflash.generate(target, draft, inner, **call).tolist()]
    texts += [dflash.Generator(target, draft, max_length=80).generate(outer, **call).tolist()]
    generator.reset()
    return texts == [expected[0], expected[1], expected[0]]


def hanging(work):
    while not stopped:
        work()


forked("idle", right)
works = {
    "a generator": lambda: generator.generate(outer, **call),
    "one-shot": lambda: dflash.generate(target, draft, outer, **call),
    "resets": generator.reset,
    "generators": lambda: dflash.Generator(target, draft, max_length=80),
}
for name, work in works.items():
    stopped = False
    threads = [threading.Thread(target=hanging, args=[work]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.02)
        forked(f"while threads use {name}", right)
    stopped = True
    for thread in threads:
        thread.join()
    assert right()


class Streamer:
    def put(self, value):
        forked("inside a call", lambda: generator.generate(inner, **call))
        forked("one-shot inside a call", lambda: dflash.generate(target, draft, inner, **call).tolist() == expected[1])
        self.put = lambda value: None

    def end(self):
        pass


print("the call that forked:", generator.generate(outer, streamer=Streamer(), **call).tolist() == expected[0])
events = generator.stream(outer, **call)
first = next(events).ids[0]
rest = lambda: first + [token for event in events for token in event.ids[0]] == expected[0][0][9:]
forked("an open stream", rest)
print("the stream in the parent:", rest())
"""


def test_a_forked_child_gets_the_right_text_whatever_threads_did():
    done = process.python(FORKS)
    assert done.returncode == 0, done.stderr
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    assert len(lines) == 18
    for name, said in lines:
        if name == "inside a call":
            assert said.startswith("RuntimeError: this generator is in the middle of a call")
        else:
            assert said == "True", name
