"""Conversations of one narrow kind for a server that learns: replies to guests of a hotel, by templates.

A conversation begins with one of several thousand requests. In half of them the target's own reply comes back, and it
is asked to change it. See docs/learn.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

GUESTS = ["Mr. Smith", "Ms. Johnson", "Mrs. Lee", "Mr. Garcia", "Ms. Novak", "Dr. Hansen", "Mr. Okafor", "Mrs. Tanaka"]
MATTERS = [
    "asks whether breakfast is included", "wants to cancel a booking for {day}", "asks for a late check-out on {day}",
    "complains that the room was noisy", "asks whether dogs are allowed", "lost a jacket in room {room}",
    "wants to book a table for {count} on {day}", "asks for a bill for room {room}", "asks how to get here by train",
    "wants a room with a view for {count} nights", "complains that the heating in room {room} is broken",
    "asks whether there is parking", "thanks us for a pleasant stay", "asks for a cot in room {room}",
]  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
CHANGES = ["Make it shorter.", "Make it more formal.", "Make it friendlier.", "Offer a discount of 10 percent too."]


def conversations(seed: int) -> Iterator[list[str]]:
    """Yield the user's turns of one conversation after another."""
    draw = random.Random(seed)
    while True:
        matter = draw.choice(MATTERS)
        matter = matter.format(day=draw.choice(DAYS), room=draw.randint(101, 420), count=draw.randint(2, 8))
        guest = draw.choice(GUESTS)
        turns = [f"Write a short email reply to {guest}, a guest of the Hotel Adler, who {matter}. Sign as Anna Weber."]
        yield turns + [draw.choice(CHANGES)] * (draw.random() < 0.5)


def fetch(url: str, body: object = None) -> dict:
    """Return what an OpenAI-compatible server says."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def converse(url: str, turns: list[str], write: Callable[[str], object], **settings: object) -> None:
    """Ask the turns of a conversation one after another."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        write(json.dumps({"messages": messages}) + "\n")
        answer = fetch(f"{url}/chat/completions", {"messages": messages, **settings})
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="as in http://127.0.0.1:8000/v1")
    parser.add_argument("--count", type=int, default=300, help="conversations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=Path, help="ask these instead: JSONL of prompt, or of turns")
    parser.add_argument("--asked", type=Path, help="write what was asked to this file, for dflash benchmark")
    parser.add_argument("--no-store", action="store_true", help="ask the server to keep nothing")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args()
    if options.prompts is None:
        source = conversations(options.seed)
    else:
        rows = map(json.loads, options.prompts.read_text().splitlines())
        source = iter([row["turns"][:1] if "turns" in row else [row["prompt"]] for row in rows])
    asked: list[str] = []
    settings = {"temperature": options.temperature, "max_tokens": options.max_tokens, "store": not options.no_store}
    settings["model"] = fetch(f"{options.url}/models")["data"][0]["id"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        works = []
        for number, turns in zip(range(options.count), source, strict=False):
            works.append(
                pool.submit(converse, options.url, turns, asked.append, seed=options.seed + number, **settings)
            )
        for done, work in enumerate(concurrent.futures.as_completed(works), 1):
            work.result()
            print(f"\r{done} of {len(works)} conversations", end="", flush=True)
    print()
    if options.asked is not None:
        options.asked.write_text("".join(asked))


if __name__ == "__main__":
    main()
