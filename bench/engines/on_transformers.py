"""The pair in transformers' own ``generate(speculation_type="dflash")``, from ``dflash export --format transformers``.

    python bench/engines/on_transformers.py [--pair FOLDER] [--prompts N] [--new N] [--python PYTHON]

Compares the text and the tokens of every step with this package's. transformers emits what a block has after a stop
token; both answers are cut there. Prints; asserts nothing.
"""

from comparison import Answer, Engine, Job, Result, run


def answer(job: Job) -> Result:
    """Answer in this process."""
    import torch
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Steps(BaseStreamer):
        """Counts the tokens of every step."""

        def __init__(self) -> None:
            self.counts: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.counts.append(value.numel())

        def end(self) -> None:
            pass

    dtype = getattr(torch, job.dtype)
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=dtype).eval()
    draft = AutoModel.from_pretrained(job.draft, dtype=dtype).eval()
    result = Result(f"transformers {transformers.__version__}")
    for prompt in job.prompts:
        ids, steps = torch.tensor([prompt]), Steps()
        options = {"assistant_model": draft, "speculation_type": "dflash", "streamer": steps, "do_sample": False}
        out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job.new, **options)
        result.answers.append(Answer(out[0, len(prompt) :].tolist(), steps.counts[2:]))  # the prompt, the first token
    return result


if __name__ == "__main__":
    install = "pip install 'transformers>=5.19'"
    run(Engine("transformers' DFlash", "transformers", install, "transformers", answer), __doc__)
