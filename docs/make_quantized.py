"""Write docs/quantized.md: run the pair inside the package, quantized by every method, and record the result.

    python docs/make_quantized.py            # writes docs/quantized.md
    python docs/make_quantized.py --check    # exits 1 if its table is out of date

Needs what tests/quantized/requirements.txt lists.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "quantized")]

import methods  # noqa: E402
from baseline import greedy  # noqa: E402
from quantized_page import BELOW, HEAD, NOTES  # noqa: E402
from storages import storages  # noqa: E402

import dflash  # noqa: E402
from dflash_tools.measure import demo, demo_prompts  # noqa: E402

NEW = 40
# Methods of transformers that cannot be loaded here, each with its config.
UNLOADABLE = {
    "torchao int4 weights": lambda: transformers.TorchAoConfig(methods.ao.Int4WeightOnlyConfig()),
    "torchao fp8 dynamic": lambda: transformers.TorchAoConfig(methods.ao.Float8DynamicActivationFloat8WeightConfig()),
    "FP8, fine-grained, on the fly": lambda: transformers.FineGrainedFP8Config(),
    "NVFP4": lambda: transformers.NVFP4Config(),
    "HQQ": lambda: transformers.HqqConfig(nbits=4, group_size=64),
}


def try_method(name: str, prompts: list[torch.Tensor]) -> str:
    """Return a method's row: what generation gave, and what the generator holds beside the model's own memory."""
    model, draft = methods.load(name), dflash.load_draft(demo.PAIR / "draft", dtype=torch.float32)
    try:
        generator = dflash.Generator(model, draft, max_length=256)
    except dflash.UnsupportedTargetError:
        return f"| {name} | yes | refused |  | {NOTES[name]} |"
    alone, equal = methods.load(name), []
    for prompt in prompts:
        output = generator.generate(prompt[None], max_new_tokens=NEW, temperature=0.0)[0, len(prompt) :]
        equal.append(output.tolist() == greedy(alone, prompt, NEW, (0,)).tolist())
    own = storages(model)
    extra = sum(size for at, size in storages(generator.engine.target.model).items() if at not in own)
    shared = "all" if extra < 0.01 * sum(own.values()) else f"all but {extra} bytes"
    return f"| {name} | yes | {'equal' if all(equal) else 'DIFFERENT'} | {shared} | {NOTES[name]} |"


def try_to_load(name: str) -> str:
    """Return the row of a method that transformers is expected not to load."""
    try:
        options = {"quantization_config": UNLOADABLE[name](), "device_map": "cpu", "dtype": torch.bfloat16}
        transformers.AutoModelForCausalLM.from_pretrained(demo.PAIR / "target", **options)
    except Exception as error:
        return f"| {name} | no: {type(error).__name__} |  |  | {NOTES[name]} |"
    return f"| {name} | YES |  |  | {NOTES[name]} |"


def page() -> str:
    """Return docs/quantized.md."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.PAIR / "target")
    prompts = [torch.tensor([0, *tokenizer.encode(prompt.text)]) for prompt in demo_prompts()[:3]]
    rows = [try_method(name, prompts) for name in (*methods.CONFIGS, *methods.SCHEMES)]
    rows += [try_to_load(name) for name in UNLOADABLE]
    table = ["| method | loads on CPU | greedy, fp32 | memory shared | remarks |", "| --- | --- | --- | --- | --- |"]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    made = f"Made by `python docs/make_quantized.py` with {versions} and `tests/quantized/requirements.txt`."
    return f"{HEAD}\n{made}\n\n" + "\n".join([*table, *rows]) + f"\n\n{BELOW}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with docs/quantized.md instead of writing it")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    path, text = ROOT / "docs" / "quantized.md", page()
    if not arguments.check:
        path.write_text(text)
        return 0
    written, new = ([line for line in lines.splitlines() if line[0:1] == "|"] for lines in (path.read_text(), text))
    for line in set(new) - set(written):
        print(f"not in the page: {line}", file=sys.stderr)
    return int(written != new)


if __name__ == "__main__":
    sys.exit(main())
