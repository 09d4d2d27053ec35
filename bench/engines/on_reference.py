"""The pair in the reference package (PyPI ``dflash`` 0.1.0), from ``dflash export --format published``.

    python bench/engines/on_reference.py [--pair FOLDER] [--prompts N] [--new N]

Compares the text and the tokens of every step with this package's. Prints; asserts nothing.
"""

import sys
from pathlib import Path

from comparison import Answer, Engine, Job, Result, run


def answer(job: Job) -> Result:
    """Answer in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from peers import checkpoint, reference_loop

    dtype = getattr(torch, job.dtype)
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=dtype).eval()
    try:
        loop = reference_loop(*checkpoint(Path(job.draft), dtype), target, 0.0, job.new)
    except ValueError as error:
        raise ImportError(str(error)) from None
    result = Result("the reference package 0.1.0")
    with torch.no_grad():
        for prompt in job.prompts:
            out, steps = loop(torch.tensor([prompt]))
            result.answers.append(Answer(out[0, len(prompt) :].tolist(), steps))
    return result


if __name__ == "__main__":
    install = "pip install --no-deps --target .peers dflash==0.1.0"
    run(Engine("the reference package", "transformers", install, "published", answer), __doc__)
