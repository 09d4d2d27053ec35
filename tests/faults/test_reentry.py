"""Calls from inside a call, by a streamer, a processor or a hook: both texts are right, or it is refused."""

import contextlib
import re
import signal
import threading

import pytest
from baseline import greedy, prompt
from families import make_draft

import dflash
from dflash.generator import held

NEW = 8
OUTER, INNER = prompt(9, seed=3), prompt(5, seed=4)
REFUSED = r"this generator is in the middle of a call.*make a second Generator"


class Streamer:
    """Calls back from ``put`` and ``end``, as a streamer of transformers is called."""

    def __init__(self, on_put=lambda: None, on_end=lambda: None) -> None:
        self.put, self.end = (lambda _: on_put()), on_end


class Inside:
    """Does ``act`` whenever it is called from inside a call, but not from inside ``act`` itself."""

    def __init__(self, act) -> None:
        self.act, self.busy, self.got = act, False, []

    def __call__(self, *arguments):
        if self.busy:
            return
        self.busy = True
        try:
            self.got.append(self.act())
        except RuntimeError as error:
            self.got.append(error)
        finally:
            self.busy = False


PLACES = ("put", "end", "processor", "criterion", "hook of the target", "hook of the drafter", "signal handler")


@contextlib.contextmanager
def from_inside(place, inside, target, draft, is_call=lambda: True):
    """Yield arguments for a call that ``inside`` interrupts at ``place``.

    A target with hooks is tried out when a generator is made for it. ``is_call`` tells a call from that.
    """
    with contextlib.ExitStack() as after:
        if place == "signal handler":
            after.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, inside))
        elif place.startswith("hook"):
            hooked = draft if place == "hook of the drafter" else target.model.layers[1]
            after.enter_context(hooked.register_forward_hook(lambda *_: inside() if is_call() else None))
        yield {
            "put": {"streamer": Streamer(on_put=inside)},
            "end": {"streamer": Streamer(on_end=inside)},
            "processor": {"logits_processor": [lambda ids, scores: inside() or scores]},
            "criterion": {"stopping_criteria": [lambda ids, scores: bool(inside())]},
            "signal handler": {"streamer": Streamer(on_put=lambda: signal.raise_signal(signal.SIGUSR1))},
        }.get(place, {})


@pytest.fixture
def draft(target):
    return make_draft(target)


@pytest.fixture(scope="module")
def expected(target):
    return [greedy(target, p, NEW).tolist() for p in (OUTER, INNER)]


def refused(errors) -> None:
    assert errors
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert re.search(REFUSED, str(error))


def answer(sequences, p) -> list[int]:
    return sequences[0, len(p) :].tolist()


class TestOneGenerator:
    @pytest.mark.parametrize(
        ("place", "act"), [*((place, "generate") for place in PLACES), ("put", "reset"), ("end", "reset")]
    )
    def test_a_call_or_a_reset_on_a_generator_that_is_running_is_refused(self, target, draft, expected, place, act):
        def from_the_inside():
            if act == "reset":
                return generator.reset()
            return answer(generator.generate(INNER[None], max_new_tokens=NEW), INNER)

        inside = Inside(from_the_inside)
        with from_inside(place, inside, target, draft, lambda: held.locks) as arguments:
            generator = dflash.Generator(target, draft, max_length=64)
            output = generator.generate(OUTER[None], max_new_tokens=NEW, **arguments)
        assert answer(output, OUTER) == expected[0]
        if place == "end":  # by then the call has its text
            assert inside.got == [None if act == "reset" else expected[1]]
        else:
            refused(inside.got)
        assert answer(generator.generate(INNER[None], max_new_tokens=NEW), INNER) == expected[1]

    def test_a_stream_that_starts_or_continues_inside_a_call_is_refused(self, target, draft, expected):
        generator = dflash.Generator(target, draft, max_length=64)
        earlier, later = (generator.stream(INNER[None], max_new_tokens=NEW) for _ in range(2))
        next(earlier)
        for events in (earlier, later):
            inside = Inside(lambda events=events: next(events, None))
            output = generator.generate(OUTER[None], max_new_tokens=NEW, streamer=Streamer(on_put=inside))
            assert answer(output, OUTER) == expected[0]
            refused(inside.got[:1])

    def test_a_second_generator_of_the_same_pair_may_be_called(self, target, draft, expected):
        second = dflash.Generator(target, draft, max_length=64)
        inside = Inside(lambda: answer(second.generate(INNER[None], max_new_tokens=NEW), INNER))
        for place in ("put", "processor", "hook of the target"):
            with from_inside(place, inside, target, draft, lambda: held.locks) as arguments:
                generator = dflash.Generator(target, draft, max_length=64)
                output = generator.generate(OUTER[None], max_new_tokens=NEW, **arguments)
            assert answer(output, OUTER) == expected[0]
        assert len(inside.got) > 3
        assert all(got == expected[1] for got in inside.got)

    def test_a_call_of_another_thread_waits_for_the_one_that_runs(self, target, draft, expected):
        generator, got = dflash.Generator(target, draft, max_length=64), []

        def call() -> None:
            got.append(answer(generator.generate(INNER[None], max_new_tokens=NEW), INNER))

        thread = threading.Thread(target=call)
        start = Streamer(on_put=lambda: thread.ident or thread.start())
        output = generator.generate(OUTER[None], max_new_tokens=NEW, streamer=start)
        thread.join()
        assert (answer(output, OUTER), got) == (expected[0], [expected[1]])


class TestOneShot:
    @pytest.mark.parametrize("place", PLACES)
    def test_a_release_inside_a_call_leaves_its_text_alone(self, target, draft, expected, place):
        def act() -> list[int]:
            dflash.release()
            return answer(dflash.generate(target, draft, INNER[None], max_new_tokens=NEW), INNER)

        inside = Inside(act)
        with from_inside(place, inside, target, draft) as arguments:
            output = dflash.generate(target, draft, OUTER[None], max_new_tokens=NEW, **arguments)
        assert answer(output, OUTER) == expected[0]
        assert inside.got
        assert all(got == expected[1] for got in inside.got)
