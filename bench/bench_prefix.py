"""What cached prompts save in a session: users who share a system prompt, and more conversations than rows.

    python bench/bench_prefix.py --model PATH [--shared 1200] [--users 4] [--conversations 6] [--turns 4] [--threads N]

Prompts are random tokens, and steps draft nothing. First all users ask at once, with ``--shared`` tokens in common and
20 of their own; printed are the seconds to their first tokens over those of one user alone, median and slowest, by
turns with them, and the tokens that were run. Then the conversations take turns, each of ``--shared`` / 2 tokens at
first, an answer of 60 and a question of 30 per turn; printed is the share of each turn's prompts that was cached. A
session settles one chunk between two requests, as a server does that waits. Asserts nothing.
"""

import argparse
import statistics
import time

import harness
import torch
from torch import Tensor

import dflash
from dflash import ops
from dflash.cli.sources import Source, load_target
from dflash.session import Session

QUESTION, ANSWER = 30, 60


def answered(session: Session, prompts: list[Tensor], new: int) -> tuple[list[float], list[int], list[list[int]]]:
    """Answer prompts that come at once; return seconds to the first tokens, prompt tokens that were run, answers."""
    began = time.perf_counter()
    rows = [session.admit(session.resolve(ids[None], max_new_tokens=new, stop_token_ids=[])) for ids in prompts]
    first: dict[int, float] = {}
    run, texts = dict.fromkeys(rows, 0), {row: list[int]() for row in rows}
    while session.is_busy:
        for row, event, _ in session.step():
            first.setdefault(row, time.perf_counter() - began)
            run[row] = event.statistics.num_prefilled_tokens[0]
            texts[row] += event.ids[0]
            if event.finish_reasons[0] is not None:
                session.retire(row)
    return list(first.values()), list(run.values()), list(texts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto", help="default: that of the files")
    parser.add_argument("--shared", type=int, default=1200, help="tokens of the system prompt")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a chunk")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, source = load_target(Source(arguments.model), arguments.dtype, "cpu"), torch.Generator().manual_seed(0)
    vocab, users = target.config.get_text_config().vocab_size, arguments.users

    def tokens(count: int) -> Tensor:
        return torch.randint(vocab, (count,), generator=source)

    def session() -> Session:
        longest = arguments.shared + arguments.turns * (QUESTION + ANSWER) + ANSWER
        sizes = {"max_length": longest, "batch_size": users, "prefill_chunk": arguments.chunk}
        return Session(dflash.Generator(target, None, **sizes))

    dtype = str(target.dtype).removeprefix("torch.")
    print(f"{harness.processor()}, {arguments.threads} threads, ISA {ops.isa()}, {dtype}, chunks of {arguments.chunk}")
    # 1. Users at once
    shared, ratios, run = tokens(arguments.shared), [], []
    for number in range(arguments.repeats + 1):
        prompts = [torch.cat([shared, tokens(20)]) for _ in range(users + 1)]
        (alone,), _, _ = answered(session(), prompts[:1], 8)
        seconds, run, _ = answered(session(), prompts[1:], 8)
        if number:  # the first is a warm-up
            ratios.append((statistics.median(seconds) / alone, max(seconds) / alone))
    middle, slowest = (statistics.median(column) for column in zip(*ratios, strict=True))
    whole = users * (arguments.shared + 20)
    print(f"{users} users at once: {middle:.2f}x and {slowest:.2f}x of one user; {sum(run)} of {whole} tokens run")
    # 2. Conversations in turn
    rows, conversations = session(), [tokens(arguments.shared // 2) for _ in range(arguments.conversations)]
    for turn in range(arguments.turns):
        run, length = [], len(conversations[0])
        for place, ids in enumerate(conversations):
            _, (count,), (text,) = answered(rows, [ids], ANSWER)
            rows.settle()
            run.append(count)
            conversations[place] = torch.cat([ids, torch.tensor(text), tokens(QUESTION)])
        cached = 1 - statistics.mean(run) / length
        print(
            f"turn {turn + 1} of {len(conversations)} conversations, {length} tokens: {cached:.0%} cached", flush=True
        )


if __name__ == "__main__":
    main()
