"""Tokens per step under grammars by how often a block's banned drafts are drawn again, with the package's pair.

    python bench/bench_grammar.py [--rounds 0 2 4 8 15] [--prompts 10] [--temperature 1] [--first-generation]

Records that the pair writes as JSON, and sums: under grammars of what it would write anyway, and of what it never saw.
0 rounds leave the drafts unmasked. Prints; asserts that the text is the same at every number of rounds.
"""

import argparse
import json
import random
import re
from unittest import mock

import dflash
from dflash.proposers import ChainProposer
from dflash_tools.measure import demo_prompts

Grammar = dflash.Grammar
SUM = Grammar.regex(r"The (sum|difference|product) of [0-9]+ and [0-9]+ is [0-9]+\.")


def schema(properties: dict[str, dict]) -> dflash.Grammar:
    """Return the grammar of objects with exactly these properties."""
    closed = {"properties": properties, "required": [*properties], "additionalProperties": False}
    return Grammar.json_schema({"type": "object", **closed})


def record_cases(count: int) -> dict[str, list[tuple[str, dflash.Grammar]]]:
    """Return prompts that ask for a record as JSON, with grammars."""
    objects = [json.loads(found[0]) for p in demo_prompts() if (found := re.search(r"\{.*?\}", p.text, re.DOTALL))]
    values = {key: value for record in objects for key, value in record.items()}
    cases: dict[str, list[tuple[str, dflash.Grammar]]] = {}
    for number in range(count):
        keys = random.Random(number).sample(sorted(values), 9)
        lines = "".join(f"{key}={values[key]}\n" for key in keys)
        kinds = {key: {"type": "integer" if isinstance(values[key], int) else "string"} for key in keys}
        grammars = {
            "any object": Grammar.json_schema({"type": "object"}),
            "its own keys": schema(kinds),
            "its keys, sorted": schema({key: kinds[key] for key in sorted(keys)}),
            "every other key": schema({key: kinds[key] for key in keys[::2]}),
            "other keys": schema({f"the_{key}": kind for key, kind in kinds.items()}),
        }
        for name, grammar in grammars.items():
            cases.setdefault(f"record: {name}", []).append((f"ini to json:\n[item]\n{lines}=>\n", grammar))
    return cases


def sum_cases(count: int) -> dict[str, list[tuple[str, dflash.Grammar]]]:
    """Return sums, of which only the last sentence, or JSON, may be written."""
    texts = [p.text for p in demo_prompts() if re.match("(add|take|multiply) ", p.text)][:count]
    result = schema({"steps": {"type": "string", "maxLength": 60}, "result": {"type": "integer"}})
    return {
        "sum: last sentence": [(text, SUM) for text in texts],
        "sum: as JSON": [(text, result) for text in texts],
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[0, 2, 4, 8, 15])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--first-generation", action="store_true", help="its other drafter")
    arguments = parser.parse_args()
    target, draft, tokenizer = dflash.demo_pair(generation=1 if arguments.first_generation else None)
    call = {"tokenizer": tokenizer, "max_new_tokens": 160, "temperature": arguments.temperature, "seed": 5}
    print("rounds                " + "".join(f"{rounds:>8}" for rounds in arguments.rounds))
    for name, prompts in {**record_cases(arguments.prompts), **sum_cases(arguments.prompts)}.items():
        line, texts = f"{name:22}", []
        for rounds in arguments.rounds:
            steps, text = [], []
            for prompt, grammar in prompts:
                ids = tokenizer(prompt, return_tensors="pt").input_ids
                with mock.patch.object(ChainProposer, "ROUNDS", rounds):
                    out = dflash.generate(target, draft, ids, grammar=grammar, return_dict_in_generate=True, **call)
                steps += out.statistics.acceptance_lengths[0]
                text.append(out.sequences.tolist())
            texts.append(text)
            line += f"{sum(steps) / len(steps):8.2f}"
        print(line, flush=True)
        assert all(text == texts[0] for text in texts)


if __name__ == "__main__":
    main()
