"""Compare what two releases write, token for token: every family of targets, every kind of drafter, every mode.

    python bench/same_outputs.py --against SITE_PACKAGES     # the folder that holds the other release's dflash

Tiny random pairs are saved to disk once; each release then runs every case in a process of its own. At a temperature
of 3 the shared noise lets random drafters agree with random targets now and then, so the lengths of the steps show
what was drafted. Texts, shapes, steps and log probabilities are compared. Exits with 1 if a case differs.
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
STYLES = {
    "greedy": {},
    "sampled": {"temperature": 3.0, "seed": 7},
    "tree": {"temperature": 3.0, "seed": 7, "tree": 24},
    "greedy tree": {"tree": 40},
    "filtered": {"temperature": 1.5, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "rules": {
        "temperature": 2.0, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 3, "logit_bias": {5: 2.0, 9: -1.0}, "bad_words_ids": [[7], [8, 9]],
        "suppress_tokens": [11], "begin_suppress_tokens": [12], "min_new_tokens": 4,
    },
    "rejection": {"temperature": 3.0, "seed": 7, "acceptance": "rejection"},
    "denoise": {"temperature": 3.0, "seed": 7, "denoise_steps": 3},
    "logprobs": {"temperature": 3.0, "seed": 7, "logprobs": 3},
}  # fmt: skip
FEW = ("greedy", "sampled", "tree")  # styles of most families; these have all of them:
THOROUGH = ("qwen3", "gemma3", "qwen3_5", "nemotron_h")
PROMPTS = ("add 48213 and 90377\n=>\n", "sort 5 3 9 1\n=>\n", "What is it?\n")


def save_pairs(folder: Path) -> dict[str, tuple[str, str]]:
    """Save a tiny pair per family and, for one family, one per kind of drafter; return their folders by name."""
    sys.path.insert(0, str(TESTS))
    from draft_variants import DFLASH2_VARIANTS, VARIANTS, dspark_dict, random_tensors, save_checkpoint
    from families import FAMILIES, draft_config, make_target

    from dflash import DraftConfig

    pairs = {}
    for family in FAMILIES:
        target, place = make_target(family), folder / family.replace("/", "-")
        target.generation_config.pad_token_id = 0
        target.save_pretrained(place / "target")
        configs = {family: draft_config(target)}
        if family == "qwen3":
            configs |= {f"{family} x {kind}": draft_config(target, kind) for kind in {**VARIANTS, **DFLASH2_VARIANTS}}
            sizes = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
            configs[f"{family} x DSpark"] = dspark_dict(
                **sizes, mask_token_id=1, num_target_layers=4, target_layer_ids=[0, 2]
            )
        for number, (name, config) in enumerate(configs.items()):
            draft = save_checkpoint(place / str(number), config, random_tensors(DraftConfig.from_config(config)))
            pairs[name] = str(place / "target"), str(draft)
    return pairs


def cases(pairs: dict[str, tuple[str, str]]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every case: its name, and what runs it."""
    import transformers

    import dflash

    ids = torch.randint(2, 90, (2, 37), generator=torch.Generator().manual_seed(1))
    output = {"return_dict_in_generate": True}
    for name, (target_folder, draft_folder) in pairs.items():
        model_class = getattr(transformers, transformers.AutoConfig.from_pretrained(target_folder).architectures[0])
        for dtype in (torch.float32,) if " x " in name else (torch.float32, torch.bfloat16):
            target = model_class.from_pretrained(target_folder, dtype=dtype).eval()
            draft = dflash.load_draft(draft_folder, dtype=dtype)
            case, run = f"{name} | {dtype}", functools.partial(dflash.generate, target, draft, ids, **output)
            is_thorough = " x " in name or (name in THOROUGH and dtype == torch.float32)
            for style in STYLES if is_thorough else FEW:
                yield f"{case} | {style}", functools.partial(run, max_new_tokens=40, **arguments_of(style))
            if " x " not in name and dtype == torch.float32:
                sampled = {**arguments_of("sampled"), "max_new_tokens": 24}
                alone = functools.partial(dflash.generate, target, None, ids, temperature=1.0, seed=3, **output)
                yield f"{case} | no drafter", functools.partial(alone, max_new_tokens=12)
                yield f"{case} | int8", functools.partial(run, weights="int8", draft_weights="int8", **sampled)
                yield f"{case} | unfused", functools.partial(unfused, target, draft, ids, **sampled, **output)
            dflash.release()
    target, draft, tokenizer = dflash.demo_pair()
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        run = functools.partial(dflash.generate, target, draft, ids, max_new_tokens=80, **output)
        for style in STYLES:
            yield f"pair | {prompt!r} | {style}", functools.partial(run, **arguments_of(style))


def arguments_of(style: str) -> dict[str, object]:
    """Return a style's arguments, and this release's default sharpness where drafts are drawn by keyed noise."""
    arguments = STYLES[style]
    return arguments if {"tree", "acceptance"} & arguments.keys() else {"draft_sharpness": 1.0, **arguments}


def unfused(target: object, draft: object, ids: torch.Tensor, **arguments: object) -> object:
    """Run a call with the target's own modules."""
    import dflash

    return dflash.Generator(target, draft, max_length=128, batch_size=2, fused=False).generate(ids, **arguments)


def digest(output: object) -> list:
    """Return what is compared of a `GenerateOutput`."""
    lengths, logprobs = output.statistics.acceptance_lengths, output.logprobs
    texts = hashlib.sha256(repr(output.sequences.tolist()).encode()).hexdigest()
    return [texts, list(output.sequences.shape), lengths, hashlib.sha256(repr(logprobs).encode()).hexdigest()]


def run_release(folder: str, pairs: Path, out: Path, only: str) -> None:
    """Run every case with the release in ``folder`` (empty for this one), and write what it gives."""
    torch.set_num_threads(1)
    if folder:
        path = Path(folder) / "dflash" / "__init__.py"
        spec = importlib.util.spec_from_file_location("dflash", path, submodule_search_locations=[str(path.parent)])
        sys.modules["dflash"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["dflash"])
    results: dict[str, object] = {}
    for case, run in cases(json.loads(pairs.read_text())):
        if only in case:
            try:
                results[case] = digest(run())
            except (ValueError, TypeError) as error:
                results[case] = f"{type(error).__name__}: {error}"
    out.write_text(json.dumps(results))


def main() -> None:
    """Compare, or be the process of one release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="FOLDER", help="site-packages folder that holds the other release")
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        folder, pairs, out = options.run
        run_release(folder, Path(pairs), Path(out), options.only)
        return
    if not options.against:
        parser.error("name the other release with --against")
    with tempfile.TemporaryDirectory() as name:
        pairs, results = Path(name) / "pairs.json", []
        pairs.write_text(json.dumps(save_pairs(Path(name))))
        for folder in ("", options.against):
            out = Path(name) / "out.json"
            arguments = ["--only", options.only, "--run", folder, str(pairs), str(out)]
            subprocess.run([sys.executable, __file__, *arguments], check=True)
            results.append(json.loads(out.read_text()))
    here, there = results
    different = [case for case in here if here[case] != there.get(case)]
    for case in different:
        print(f"DIFFERENT {case}\n  here  {here[case]}\n  there {there.get(case)}")
    refused = sum(isinstance(value, str) for value in here.values())
    print(f"{len(here) - len(different)} of {len(here)} cases are equal, {refused} of all are refusals")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
