"""A queue of requests for a session, served by one thread."""

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from baseline import greedy, prompt
from families import make_draft, make_target
from served import Gate, Reader, wait_until

import dflash
from dflash_serve.scheduler import QueueFullError, Scheduler

NEW = 12


@functools.cache
def pair() -> tuple:
    target = make_target("qwen3")
    return target, make_draft(target)


@pytest.fixture
def scheduler():
    served = Scheduler(dflash.Generator(*pair(), max_length=96, batch_size=2, prefill_chunk=8), max_waiting=3)
    yield served
    served.close(drain=False)
    assert sorted(served.session.idle) == [0, 1]


def submit(scheduler, ids, **arguments):
    return Reader(scheduler, ids, **{"max_new_tokens": NEW} | arguments)


def written(ticket) -> list[int]:
    return [token for event in ticket for token in event.ids[0]]


def test_requests_of_several_threads_write_what_they_write_alone():
    target, draft = pair()
    generator = dflash.Generator(target, draft, max_length=96, batch_size=2, prefill_chunk=8)
    scheduler, prompts = Scheduler(generator), [prompt(3 * n + 1, seed=n) for n in range(12)]

    def ask(index: int) -> list[int]:
        return written(submit(scheduler, prompts[index], temperature=index % 2, seed=index))

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(ask, range(12)))
    scheduler.close()
    assert (scheduler.running, scheduler.waiting) == (0, 0)
    for index, ids in enumerate(prompts):
        call = {"max_new_tokens": NEW, "temperature": index % 2, "seed": index}
        assert got[index] == dflash.generate(target, draft, ids[None], **call)[0, len(ids) :].tolist()


def test_an_answer_that_has_ended_is_cached_with_its_prompt_while_nothing_is_asked(scheduler):
    ids = prompt(20)
    ids = torch.cat([ids, torch.tensor(written(submit(scheduler, ids)))])
    wait_until(lambda: scheduler.session.is_settled)
    *_, last = submit(scheduler, torch.cat([ids, prompt(3, seed=1)]))
    assert last.statistics.num_prefilled_tokens == [35 - 32]


def test_a_reader_that_reads_nothing_holds_up_nobody(scheduler):
    unread = submit(scheduler, prompt(9))
    assert written(submit(scheduler, prompt(5))) == greedy(pair()[0], prompt(5), NEW).tolist()
    assert written(submit(scheduler, prompt(6))) == greedy(pair()[0], prompt(6), NEW).tolist()
    assert written(unread) == greedy(pair()[0], prompt(9), NEW).tolist()


def test_a_cancelled_request_gives_up_its_place_before_the_next_step(scheduler):
    gate = Gate(scheduler)
    tickets = [submit(scheduler, prompt(4)) for _ in range(5)]
    gate.reached.wait()
    tickets[4].cancel()
    tickets.append(submit(scheduler, prompt(4)))
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        submit(scheduler, prompt(4))
    gate.open()
    assert [len(written(ticket)) for ticket in tickets] == [NEW] * 4 + [0, NEW]


def test_a_step_that_fails_ends_its_requests_and_later_ones_are_served(scheduler):
    propose = scheduler.generator.engine.chain.propose

    def fail(state):
        scheduler.generator.engine.chain.propose = propose
        raise MemoryError("no room")

    scheduler.generator.engine.chain.propose = fail
    with pytest.raises(MemoryError, match="no room"):
        list(submit(scheduler, prompt(4)))
    assert written(submit(scheduler, prompt(5))) == greedy(pair()[0], prompt(5), NEW).tolist()


def test_other_work_is_done_a_part_between_any_two_steps(scheduler):
    gate, order = Gate(scheduler), []
    scheduler.on_step = lambda _: order.append("step")

    def parts(name):
        for _ in range(4):
            order.append(name)
            yield
        return name

    ticket = submit(scheduler, prompt(4), max_new_tokens=40, stop_token_ids=[])
    gate.reached.wait()
    works = [scheduler.run_between_steps(parts(name)) for name in "ab"]
    gate.open()
    assert [work.result(60) for work in works] == ["a", "b"]
    assert written(ticket) == greedy(pair()[0], prompt(4), 40).tolist()
    parts_only = [name for name in order if name != "step"]
    assert parts_only == ["a"] * 4 + ["b"] * 4
    assert not any(first != "step" and second != "step" for first, second in itertools.pairwise(order))
    assert scheduler.run_between_steps(parts("idle")).result(60) == "idle"


def test_work_that_fails_or_is_cancelled_ends_alone(scheduler):
    gate, began, ended = Gate(scheduler), threading.Event(), threading.Event()

    def fails():
        yield
        raise MemoryError("no room")

    def endless():
        began.set()
        try:
            while True:
                yield
        finally:
            ended.set()

    ticket = submit(scheduler, prompt(4))
    gate.reached.wait()
    running, failing, waiting = (scheduler.run_between_steps(work()) for work in (endless, fails, endless))
    scheduler.run_between_steps(endless())
    with pytest.raises(QueueFullError, match="4 checks wait already"):
        scheduler.run_between_steps(endless())
    swap = scheduler.run_alone(lambda: None)  # is never refused
    gate.open()
    assert began.wait(60)
    running.cancel()
    with pytest.raises(MemoryError, match="no room"):
        failing.result(60)
    assert ended.wait(60)
    assert len(written(ticket)) == NEW
    scheduler.close(drain=False)
    assert waiting.cancelled()
    assert swap.cancelled()
    with pytest.raises(RuntimeError, match="the scheduler is closed"):
        scheduler.run_between_steps(endless())


@pytest.mark.parametrize("drain", [True, False])
def test_closing_finishes_or_ends_what_was_submitted(scheduler, drain):
    gate = Gate(scheduler)
    tickets = [submit(scheduler, prompt(4), max_new_tokens=80, stop_token_ids=[]) for _ in range(4)]
    gate.reached.wait()
    closing = threading.Thread(target=scheduler.close, kwargs={"drain": drain})
    closing.start()

    def is_refused() -> bool:
        try:
            submit(scheduler, prompt(4)).cancel()
        except RuntimeError as error:
            return str(error) == "the scheduler is closed: it takes no more requests"
        return False

    wait_until(is_refused)
    gate.open()
    closing.join()
    counts = [len(written(ticket)) for ticket in tickets]
    assert counts == [80] * 4 if drain else max(counts) <= 17
