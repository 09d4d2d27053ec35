"""The pair in SGLang, from ``dflash export --format published``. Needs a GPU: SGLang refuses DFlash on CPUs.

    python bench/engines/on_sglang.py --python VENV/bin/python [--pair FOLDER] [--prompts N] [--new N]

Compares the text and the tokens of every step with this package's. This project has not run it: the options were read
from SGLang 0.5.23. Prints; asserts nothing.
"""

from itertools import pairwise

from comparison import Answer, Engine, Job, Result, run


def answer(job: Job) -> Result:
    """Answer in this process."""
    import sglang

    engine = sglang.Engine(
        model_path=job.target,
        dtype=job.dtype,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=job.draft,
        skip_tokenizer_init=True,
        max_running_requests=1,
        stream_interval=1,
        disable_radix_cache=True,
    )
    result = Result(f"sglang {sglang.__version__}")
    params = {"temperature": 0, "max_new_tokens": job.new, "stop_token_ids": job.stop}
    try:
        for prompt in job.prompts:
            seen = [len(chunk["output_ids"]) for chunk in _stream(engine, prompt, params, result)]
            steps = [after - before for before, after in pairwise(seen)]
            result.answers[-1].steps = [count for count in steps if count]
    finally:
        engine.shutdown()
    return result


def _stream(engine, prompt: list[int], params: dict, result: Result):
    """Yield the chunks of one answer, each with all ids so far, and note the last as the answer."""
    result.answers.append(Answer([], []))
    for chunk in engine.generate(input_ids=prompt, sampling_params=params, stream=True):
        result.answers[-1].ids = list(chunk["output_ids"])
        yield chunk


if __name__ == "__main__":
    run(Engine("sglang", "sglang", "pip install sglang          # needs an NVIDIA GPU", "published", answer), __doc__)
