"""Where a step goes on CPU: the ops of a target's pass on their own, next to a whole step.

    python bench/bench_step_parts.py --model PATH [--rows 1 8 16] [--weights int8] [--dtype bfloat16] [--threads N]

PATH is what --model of the commands takes, of a target that runs on this package's ops. Milliseconds, medians. A part
is called for one layer after the other, so that its weights come from memory; what as many calls on tiny operands take
is subtracted; of the head and of small models' parts the weights may come from a cache. The last lines are from within
the same steps: the layers as one op (0 where they are not), the head, the choice of tokens, and what is left for
Python. Prints; asserts nothing.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import harness
import torch
from bench_rows import parser_of, step_ms
from internals import cache_layers, time_layers, time_parts, weights_of
from torch import Tensor

import dflash
from dflash import ops
from dflash.cli.sources import Source, load_target
from dflash.decoder import split_weights

Calls = Sequence[Callable[[], object]]


def calls_of(generator: dflash.Generator, rows: int, context: int) -> dict[str, Calls]:
    """Return the calls of each part of a step."""
    (layers, head), (keys, values) = weights_of(generator), cache_layers(generator.state.target_cache)
    first, kv_heads, dim = layers[0], keys[0].shape[1], keys[0].shape[3]
    size, width, heads = first.o.shape[0], first.gate.shape[0], first.o.shape[1] // dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, rows, *shape).to(keys[0].dtype)

    def product(*weights: object) -> Callable[[], Tensor]:
        (given, *stored), x = split_weights(*weights), normal(weights[0].shape[1])
        return lambda: ops.linears(x, given, (), False, *stored)

    x, both, logits, qkv = normal(size), normal(2 * width), normal(head.shape[0]), normal((heads + 2 * kv_heads) * dim)
    query, lengths, caches = normal(heads, dim), torch.tensor([context]), list(zip(keys, values, strict=True))
    at = qkv, lengths, None, None, *generator.state.target_cache.rotary, first.q_norm, first.k_norm, 1e-6, query
    return {
        "products of q, k, v": [product(layer.q, layer.k, layer.v) for layer in layers],
        "product of o": [product(layer.o) for layer in layers],
        "products of gate, up": [product(layer.gate, layer.up) for layer in layers],
        "product of down": [product(layer.down) for layer in layers],
        "head": [product(head)],
        "attention": [lambda kv=kv: ops.block_attention(query, *kv, lengths, dim**-0.5, True) for kv in caches],
        "rotation and append": [lambda kv=kv: ops.qkv_norm_rope_append_(*at, *kv) for kv in caches],
        "norms": [lambda: ops.add_rms_norm(x, x, first.input_norm, 1e-6)] * 2 * len(layers),
        "silu": [lambda: ops.silu_mul(both)] * len(layers),
        "selection": [lambda: generator.state.sampling.select(logits, lengths)],
    }


def ms_of(calls: Calls, repeats: int) -> float:
    """Return the median milliseconds of all calls together, after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for call in calls:
            call()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def main() -> None:
    arguments = parser_of(__doc__, rows=(1, 8, 16), new=33, repeats=9).parse_args()
    torch.set_num_threads(arguments.threads)
    target = load_target(Source(arguments.model), arguments.dtype, "cpu")
    prompt = torch.randint(target.config.get_text_config().vocab_size, (1, arguments.prompt))
    print(
        f"{arguments.model}, {target.dtype}, weights {arguments.weights}, {harness.processor()}, ISA {ops.isa()}, "
        f"{arguments.threads} threads"
    )
    found: dict[str, list[float]] = {}
    for rows in arguments.rows:
        generator = dflash.Generator(
            target, None, max_length=arguments.prompt + arguments.new, block_size=rows, weights=arguments.weights,
            reuse_prefix=False,
        )  # fmt: skip
        with time_layers() as layers:
            inner = {"layers": layers, **time_parts(generator)}
            steps = [step_ms(generator, prompt, arguments.new) for _ in range(arguments.repeats // 2 + 1)]
        inner = {f"{name}, in the step": 1000 * statistics.median(s or [0.0]) for name, s in inner.items()}
        tiny = torch.zeros(1, 16)
        call = ms_of([lambda: ops.silu_mul(tiny)] * 100, arguments.repeats) / 100  # noqa: B023
        whole, parts = statistics.median(steps), 0.0
        for name, calls in calls_of(generator, rows, arguments.prompt).items():
            found.setdefault(name, []).append(ms := ms_of(calls, arguments.repeats) - len(calls) * call)
            parts += ms
        wholes = {"a whole step": whole, "less these parts": whole - parts}
        for name, ms in (wholes | inner | {"Python and calls": whole - sum(inner.values())}).items():
            found.setdefault(name, []).append(ms)
    print(f"{'rows':<24}" + "".join(f"{rows:>8}" for rows in arguments.rows))
    for name, times in found.items():
        print(f"{name:<24}" + "".join(f"{ms:>8.2f}" for ms in times))


if __name__ == "__main__":
    main()
