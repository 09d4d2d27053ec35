"""Compare two drafters on new conversations of `traffic`, or on prompts of a file, by replaying one's answers."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path

import dflash
from dflash.cli.sources import Source, load_target
from dflash_serve.record import AnswerRecorder
from dflash_tools.learn import Gain, Replayer

from .traffic import conversations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "draft", "learned"):
        parser.add_argument(name)
    parser.add_argument("--count", type=int, default=40, help="conversations")
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--prompts", type=Path, help="ask these instead: JSONL of prompt, or of turns")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", choices=["int8"], help="as of the server")
    options = parser.parse_args()
    # 1. Let the first drafter answer, and keep the answers.
    source = Source(options.model)
    tokenizer, target = source.load_tokenizer(), load_target(source, options.dtype, "cpu")
    drafters = [dflash.load_draft(name, dtype=target.dtype) for name in (options.draft, options.learned)]
    if options.prompts is None:
        source_of_turns = conversations(options.seed)
    else:
        rows = map(json.loads, options.prompts.read_text().splitlines())
        source_of_turns = iter([row["turns"][:1] if "turns" in row else [row["prompt"]] for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        recorder = AnswerRecorder(Path(folder) / "answers", target, drafters[0], max_bytes=2**34)
        given = {"max_length": 1024, "prefill_chunk": 64, "weights": options.weights}
        generator = dflash.Generator(target, drafters[0], on_answer=recorder, **given)
        for number, turns in enumerate(itertools.islice(source_of_turns, options.count)):
            messages: list[dict[str, str]] = []
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
                call = {"max_new_tokens": 160, "temperature": options.temperature, "seed": number}
                answer = generator.generate(ids[:, -800:], **call)[0, ids[:, -800:].shape[1] :]
                messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        recorder.close()
        # 2. Replay them with both.
        store, vocab = recorder.store, target.get_input_embeddings().weight.shape[0]
        answers = [store.read(path, vocab) for path in store.answers()]
    steps = []
    for draft in drafters:
        replayer = Replayer(target, draft, max_length=1024, prefill_chunk=64)
        steps.append([replayer(answer) for answer in answers])
    print(f"T = {options.temperature:g}: {Gain.of(*steps)}")


if __name__ == "__main__":
    main()
