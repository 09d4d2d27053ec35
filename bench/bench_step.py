"""Milliseconds a step on a GPU, of this package and of its peers, with a fixed number of tokens accepted.

    RUN="python bench/bench_step.py --json bench/results"
    $RUN/step-1k.json --contexts 1024 --table                                  # every runner
    $RUN/step-long.json --contexts 8192 32768 --without static compiled
    $RUN/step-batch.json --contexts 1024 8192 32768 --batches 2 4 8 --runners eager graph fused
    $RUN/step-32k.json --contexts 32768 --runners static graph fused compiled

These four are meant to take less than 8 minutes in all on one H200, most of it torch.compile's in the first and the
last (an estimate: they have not run on one yet). `--stop-after SECONDS` begins no new measurement after that, and the
JSON file is whole after every row. `python bench/bench_step.py --device cpu --model tiny --contexts 64` is a smoke run.

A Qwen3 target and a 5-layer drafter of 16 rows with random weights, made on the device; greedy. The context is random
numbers in the caches of K/V: nothing is prefilled. With random weights acceptance means nothing, so it is forced, in
every runner alike: the drafter drafts, the target verifies these drafts and its argmax is taken, all as ever; then the
target's choices are overwritten by the drafts themselves, and by one that differs (the draft with its lowest bit
flipped) where the n-th token is to be the last (`Forced`); n counts the bonus token. The loops that are not ours get it
as an infinite logit. That adds three or four small kernels to every runner's step, and takes none away. A runner whose
steps did not emit n tokens each is left out, by name.

Runners:
    reference   the reference package's loop and drafter, where `.peers/dflash/model.py` exists (see bench_generate.py);
                batch 1
    native      transformers' `generate(speculation_type="dflash")` with its own drafter class; batch 1
    static      torch.compile and StaticCache: transformers' own forward with SDPA over its StaticCache, the drafter in
                plain torch over K/V as static, one head and argmax each, acceptance and counters on the device, all in
                one compiled graph, launched as we launch ours: as one CUDA graph, read one step late. See `StaticStep`
    eager       this package, kernel by kernel
    graph       this package, one CUDA graph
    fused       the same with Generator(fused=True): the target's layers on our ops
    compiled    the same as graph with Generator(compile=True)

Columns: step, the median of the time between one step's begin and the next one's on the device, by events, in rounds of
--steps from the context on, runners taking turns; share of the floor, which is the time to read the weights once, the
head twice and the K/V of the context once, at the bandwidth of a large copy in this run and at 4.3 TB/s; host, what the
host spends on a step, wall clock less the time in calls that wait for the device (Event.synchronize, Tensor.item and
their like; a wait inside another call is taken for the host's); launches, what the host sends a step (kernels, copies,
memsets, graphs), and kernels, what the device runs of it, both by torch.profiler in a run of its own.
`--table` adds where the steps of `graph` and `fused` go: their kernels by name, and the ops of the same step without a
graph by shape, with the bytes they cannot do without. Prints, asserts nothing.
"""

import argparse
import functools
import gc
import json
import math
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import harness
import torch
import transformers
from bench_generate import native_drafter, reference_package
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import dflash
from dflash.engine.runner import Direct, Replay
from dflash.target import decoder_layers, structural_twin

BLOCK, MASK, PUBLISHED = 16, 7, 4.3e12  # rows a step; any token; bytes a second
SIZES = harness.MODELS | harness.TINY
TARGET_LAYERS = {"qwen3-8b": 36, "qwen3-0.6b": 28, "tiny": 6}
RUNNERS = ("reference", "native", "static", "eager", "graph", "fused", "compiled")
SKIPPED = 2  # steps at the begin of a round: the whole context is injected there, or nothing is under way yet
ROW = (
    "{runner:<10} {context:>7} {batch:>5} {accepted:>8} | {step_ms:8.3f} ms | {share:>4} of floor  {share_4300:>4} at "
    "4.3 TB/s | host {host:>8} us | {launches:>6} launches {kernels:>6} kernels | {tokens:8.0f} tokens/s"
)


# ---- the models


def pair(name: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, dflash.Drafter, dict]:
    """A random target, a random drafter for it, and the drafter's ``config.json``."""
    torch.manual_seed(0)
    size, layers = SIZES[name], TARGET_LAYERS[name]
    shape = {
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    tied = name == "qwen3-0.6b"
    config = Qwen3Config(num_hidden_layers=layers, eos_token_id=None, pad_token_id=0, tie_word_embeddings=tied, **shape)
    with torch.device(device):
        target = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
    apart = (layers - 4) / (size.taps - 1)
    draft = {
        **shape,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": size.layers,
        "num_target_layers": layers,
        "layer_types": ["full_attention"] * size.layers,
        "block_size": BLOCK,
        "attention_bias": False,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1 + round(i * apart) for i in range(size.taps)]},
    }
    drafter = dflash.Drafter(dflash.DraftConfig.from_config(draft), dtype=dtype, device=device).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return target.requires_grad_(False), drafter, draft


def floor_bytes(target: nn.Module, drafter: dflash.Drafter, context: int, batch: int) -> int:
    """What a step cannot but read: every layer's weights once, the head twice, the K/V of the context once."""
    weights = [*target.model.layers.parameters(), *drafter.parameters(), *2 * [target.lm_head.weight]]
    c = target.config
    kv = sum(
        2 * layers * heads * width
        for layers, heads, width in (
            (c.num_hidden_layers, c.num_key_value_heads, c.head_dim),
            (drafter.config.num_hidden_layers, drafter.config.num_kv_heads, drafter.config.head_dim),
        )
    )
    return sum(w.nbytes for w in weights) + batch * context * kv * drafter.dtype.itemsize


# ---- forced acceptance


class Forced:
    """The target's choices, overwritten so that every step emits the same number of tokens.

    Choice j becomes draft j + 1, which is then accepted, and at the last one to be emitted that draft with its lowest
    bit flipped, which is not. The choices that it replaces are an operand all the same, so that no compiler may leave
    out what they are computed from.
    """

    def __init__(self, device: torch.device) -> None:
        self.flip = torch.zeros(2 * BLOCK, dtype=torch.int64, device=device)
        self.off = torch.zeros(1, dtype=torch.bool, device=device)

    def set_(self, accepted: int) -> None:
        self.flip.zero_()
        self.flip[accepted - 1] = 1

    def __call__(self, block: Tensor, posterior: Tensor) -> Tensor:
        """Of the block ``[batch, rows]``, anchor and drafts, and the choices ``[batch, rows]`` behind each."""
        return torch.where(self.off, posterior, block.roll(-1, 1) ^ self.flip[: block.shape[1]])


class ForcedGenerator(dflash.Generator):
    """Our generator with :class:`Forced` choices, in the middle of a text that never was."""

    forced: Forced

    def _accept(self, block: Tensor, posterior: Tensor, limits: Tensor, stopped: tuple[int, ...] = ()) -> None:
        super()._accept(block, self.forced(block, posterior), limits, stopped)

    def fill_(self) -> None:
        """Random tokens, features, keys and values."""
        self.tokens.random_(0, self.vocab_size)
        self.context.normal_()
        config, embedding = self.target.config, self.target.embedding_weight
        like = embedding.new_empty(self.batch_size, config.num_key_value_heads, 0, config.head_dim)
        for index in range(config.num_hidden_layers):
            for buffer in self.target_cache.layer(index, like, like):
                buffer.normal_()
        for buffer in (*self.draft_cache.keys, *self.draft_cache.values):
            buffer.normal_()

    def place_(self, context: int, accepted: int) -> None:
        """The state between two steps of every row, the last of which emitted ``accepted`` tokens."""
        self.length.fill_(context)
        self.num_context.fill_(accepted)
        self.limits.fill_(self.tokens.shape[1])
        self.done.zero_()


class StaticStep:
    """The step that torch.compile and StaticCache make of the same pair.

    All rows of a batch stand at the same position, which is what StaticCache has a counter for; forced acceptance keeps
    them there. Its counters are set back to what was accepted by one more kernel behind the compiled graph. Attention
    is SDPA with a mask over the whole cache, K/V heads repeated, as transformers does it for a static cache.
    """

    def __init__(self, generator: ForcedGenerator, target: nn.Module, compile: bool) -> None:
        self.drafter, self.forced, self.model = generator.draft, generator.forced, structural_twin(target)
        config = self.model.config
        batch, capacity = generator.tokens.shape
        device, dtype = generator.tokens.device, generator.target.dtype
        self.cache = StaticCache(config=config, max_cache_len=capacity)
        self.cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, dtype, device)
        for index, layer in enumerate(self.cache.layers):
            layer.keys.copy_(generator.target_cache.keys[index])
            layer.values.copy_(generator.target_cache.values[index])
        self.draft_keys = [keys.clone() for keys in generator.draft_cache.keys]
        self.draft_values = [values.clone() for values in generator.draft_cache.values]
        self.counters = [layer.cumulative_length for layer in self.cache.layers]
        self.tokens, self.context = generator.tokens.clone(), generator.context.clone()
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.num_context = torch.zeros_like(self.length)
        self.offsets = torch.arange(BLOCK, device=device)
        self.masks = self.tokens.new_full((batch, BLOCK - 1), MASK)
        self.slots = torch.arange(capacity, device=device)
        self.report = self.tokens.new_zeros(batch, 1 + 2 * BLOCK)
        self.taps: dict[int, Tensor] = {}
        layers = decoder_layers(self.model, config.num_hidden_layers)
        for tap in self.drafter.config.target_layer_ids:

            def keep(_module, _args, output, tap=tap):
                self.taps[tap] = output[0] if isinstance(output, tuple) else output

            layers[tap].register_forward_hook(keep)
        self.runner = Replay(self.report) if device.type == "cuda" else Direct(self.report)
        self._run = torch.compile(self.step, fullgraph=True, dynamic=False) if compile else self.step

    def place_(self, context: int, accepted: int) -> None:
        self.length.fill_(context)
        self.num_context.fill_(accepted)
        for counter in self.counters:
            counter.fill_(context)

    @torch.no_grad()
    def launched(self) -> None:
        self._run()
        torch._foreach_copy_(self.counters, [self.length] * len(self.counters))

    def step(self) -> None:
        ahead = self.length + self.offsets
        anchor = self.tokens.index_select(1, self.length[None])
        hidden = self._draft(torch.cat([anchor, self.masks], 1), ahead)
        block = torch.cat([anchor, self.model.lm_head(hidden[:, 1:].flatten(0, 1)).argmax(-1).view_as(self.masks)], 1)
        output = self.model(
            input_ids=block,
            position_ids=ahead[None].expand(len(block), -1),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.context.copy_(torch.cat([self.taps[tap] for tap in self.drafter.config.target_layer_ids], -1))
        posterior = self.forced(block, output.logits.argmax(-1))
        matches = (block[:, 1:] == posterior[:, :-1]).long().cumprod(1).sum(1)
        emitted = matches.min() + 1
        self.tokens.index_copy_(1, ahead + 1, posterior)
        self.num_context.copy_(emitted)
        self.length.add_(emitted)
        self.report.copy_(torch.cat([self.length.expand(len(block), 1), posterior, block], 1))
        self.taps.clear()

    def _draft(self, block: Tensor, ahead: Tensor) -> Tensor:
        draft, config = self.drafter, self.drafter.config
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads
        before = self.length - self.num_context + self.offsets  # past num_context the block's rows write over it
        cos, sin = harness.full_width(*draft.rotary(torch.cat([before, ahead])[None]), draft.dtype)
        mask = (self.slots < self.length + BLOCK)[None, None, None]
        features = draft.hidden_norm(draft.fc(self.context))
        residual = F.embedding(block, self.model.get_input_embeddings().weight)
        for i, layer in enumerate(draft.layers):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = F.linear(torch.cat([features, layer.input_layernorm(residual)], 1), draft.qkv_weight[i])
            qkv = qkv.unflatten(2, (-1, config.head_dim)).transpose(1, 2)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            q = harness.rotate(attention.q_norm(q[:, :, BLOCK:]), cos[:, :, BLOCK:], sin[:, :, BLOCK:])
            k = harness.rotate(attention.k_norm(k), cos, sin)
            whole = []
            for buffer, new in ((self.draft_keys[i], k), (self.draft_values[i], v)):
                buffer.index_copy_(2, before, new[:, :, :BLOCK])
                buffer.index_copy_(2, ahead, new[:, :, BLOCK:])
                whole.append(buffer.repeat_interleave(heads // kv_heads, 1))
            out = F.scaled_dot_product_attention(q, *whole, attn_mask=mask)
            residual = residual + attention.o_proj(out.transpose(1, 2).flatten(2))
            gate, up = F.linear(layer.post_attention_layernorm(residual), draft.gate_up_weight[i]).chunk(2, -1)
            residual = residual + mlp.down_proj(F.silu(gate) * up)
        return draft.norm(residual)


# ---- the clock


class Meter:
    """Marks at the begin of every step: when the device and the host came there, and how long the host had waited.

    Args:
        device: where the steps run.
        profiler: started at the mark ``SKIPPED``, stopped ``profiled`` steps later.
    """

    profiled = 3

    def __init__(self, device: torch.device, profiler: profile | None = None) -> None:
        self.on_gpu, self.profiler = device.type == "cuda", profiler
        self.device_marks: list = []
        self.host_marks: list[float] = []
        self.waited: list[float] = []

    def mark(self, waited: float) -> None:
        count = len(self.host_marks)
        if self.profiler is not None and count in (SKIPPED, SKIPPED + self.profiled):
            if self.on_gpu:
                torch.cuda.synchronize()
            self.profiler.start() if count == SKIPPED else self.profiler.stop()
        if self.on_gpu:
            self.device_marks.append(torch.cuda.Event(enable_timing=True))
            self.device_marks[-1].record()
        self.host_marks.append(time.perf_counter())
        self.waited.append(waited)

    def milliseconds(self) -> list[float]:
        """Of every step but the first two."""
        if not self.on_gpu:
            marks = self.host_marks[SKIPPED:]
            return [1000 * (b - a) for a, b in pairwise(marks)]
        torch.cuda.synchronize()
        marks = self.device_marks[SKIPPED:]
        return [a.elapsed_time(b) for a, b in pairwise(marks)]

    def host_microseconds(self) -> list[float]:
        busy = [host - waited for host, waited in zip(self.host_marks, self.waited, strict=True)][SKIPPED:]
        return [1e6 * (b - a) for a, b in pairwise(busy)]


class Waits:
    """Seconds spent in the calls of Python that make the host wait for the device, while the context is open."""

    CALLS = (
        (torch.cuda.Event, ("synchronize",)),
        (torch.Tensor, ("item", "tolist", "cpu", "__bool__", "__int__", "__index__")),
    )

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def open(self) -> Iterator[None]:
        kept = [(owner, name, owner.__dict__.get(name)) for owner, names in self.CALLS for name in names]
        for owner, name, _ in kept:
            setattr(owner, name, self._timed(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, original in kept:
                delattr(owner, name) if original is None else setattr(owner, name, original)

    def _timed(self, call: Callable) -> Callable:
        @functools.wraps(call)
        def timed(*arguments, **options):
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


# ---- the runners


@dataclass
class Setting:
    """What all runners of one context and batch share."""

    target: nn.Module
    drafter: dflash.Drafter
    draft_config: dict
    forced: Forced
    waits: Waits
    context: int
    batch: int
    steps: int  # of a round, at most
    compile: bool

    @functools.cached_property
    def generator(self) -> ForcedGenerator:
        return self.make_generator()

    @functools.cached_property
    def peers_target(self) -> nn.Module:
        """The target for loops that are not ours: what they hang on its modules would keep it from being fused."""
        return structural_twin(self.target)

    def make_generator(self, **options) -> ForcedGenerator:
        room = self.context + BLOCK * (self.steps + 2)
        length = -(-room // 64) * 64 - BLOCK  # with the block's rows a multiple of 64, which is kind to every kernel
        generator = ForcedGenerator(
            self.target, self.drafter, max_length=length, batch_size=self.batch, reuse_prefix=False, **options
        )
        generator.forced = self.forced
        return generator


class _Enough(Exception):
    """Leaves a peer's loop."""


Run = Callable[[Meter, int, int], None]  # marks the begin of so many steps that each emit so many tokens


def ours(setting: Setting, generator: ForcedGenerator, obstacle: str = "", graph: bool = True) -> Run:
    """Our step, launched and read as the loop of :class:`dflash.Generator` does."""
    return _launches(setting, generator, generator._runner, generator.step, generator._kind(), obstacle, graph)


def static(setting: Setting) -> Run:
    step = StaticStep(setting.generator, setting.target, setting.compile)
    return _launches(setting, step, step.runner, step.launched, "static", "", True)


def _launches(
    setting: Setting, state: ForcedGenerator | StaticStep, runner: Replay | Direct, step, kind, obstacle, graph: bool
) -> Run:
    def run(meter: Meter, accepted: int, steps: int) -> None:
        state.place_(setting.context, accepted)
        runner.start()
        unread = 0
        for _ in range(steps):
            meter.mark(setting.waits.seconds)
            runner.launch(step, kind, obstacle)
            unread += 1
            if unread > runner.ahead:
                runner.read()
                unread -= 1
        meter.mark(setting.waits.seconds)
        while unread:
            runner.read()
            unread -= 1
        if graph and runner.ahead and runner.reason:
            raise RuntimeError(f"no CUDA graph: {runner.reason}")
        _check(state.length, setting.context + accepted * steps, accepted)

    return run


def _check(found: Tensor, wanted: int, accepted: int) -> None:
    if not (found == wanted).all():
        raise RuntimeError(f"its steps did not emit {accepted} tokens each: {found.tolist()} instead of {wanted}")


def foreign(setting: Setting, loop: Callable[[Tensor, int], object]) -> Run:
    """A loop that calls the target itself, from its prompt on: ``loop(prompt [1, context], new tokens at most)``.

    The target's forward is steered from outside while it runs: the first call, the prompt's, fills the loop's cache
    with random numbers instead of running; every later one runs, marks the begin of a step, and has infinities put in
    its logits.
    """
    target = setting.peers_target
    prompt = torch.randint(setting.generator.vocab_size, (1, setting.context), device=target.device)

    def run(meter: Meter, accepted: int, steps: int) -> None:
        forward, starts = target.forward, []

        @functools.wraps(forward)
        def steered(input_ids: Tensor, **options) -> CausalLMOutputWithPast:
            if input_ids.shape[1] == setting.context:
                return _random_prompt(target, input_ids, options["past_key_values"])
            if len(starts) == steps:
                meter.mark(setting.waits.seconds)
                starts.append(options["position_ids"][0, 0])
                raise _Enough
            meter.mark(setting.waits.seconds)
            starts.append(options["position_ids"][0, 0])
            output = forward(input_ids=input_ids, **options)
            choices = setting.forced(input_ids, input_ids)
            output.logits.scatter_(2, choices[..., None], math.inf)
            return output

        target.forward = steered
        try:
            loop(prompt, BLOCK * (steps + 3))
            raise RuntimeError("its loop ended too early")
        except _Enough:
            pass
        finally:
            del target.forward
        _check(torch.stack(starts).diff(), accepted, accepted)

    return run


def _random_prompt(target: nn.Module, ids: Tensor, cache) -> CausalLMOutputWithPast:
    """What a forward of ``ids [1, n]`` gives, in random numbers, and ``cache`` filled with others."""
    config, weight = target.config, target.lm_head.weight
    random = functools.partial(torch.randn, dtype=weight.dtype, device=weight.device)
    for index in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, ids.shape[1], config.head_dim)
        cache.update(random(shape), random(shape), index)
    hidden = random(1, ids.shape[1], config.hidden_size)
    return CausalLMOutputWithPast(
        logits=random(1, 1, weight.shape[0]),
        past_key_values=cache,
        hidden_states=(hidden,) * (config.num_hidden_layers + 1),
    )


def reference(setting: Setting) -> Run:
    package = reference_package()
    if package is None:
        raise ValueError("there is no .peers/dflash/model.py")
    with torch.device(setting.target.device):
        model = package.DFlashDraftModel(Qwen3Config(**setting.draft_config)).eval()
    model.load_state_dict(setting.drafter.state_dict(), assign=True)
    return foreign(setting, lambda ids, new: package.dflash_generate(model, setting.peers_target, ids, new, None))


def native(setting: Setting) -> Run:
    model = native_drafter(setting.draft_config, setting.drafter.state_dict())

    def loop(ids: Tensor, new: int) -> None:
        setting.peers_target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
            assistant_model=model,
            speculation_type="dflash",
        )

    return foreign(setting, loop)


def another(setting: Setting, obstacle: str = "", graph: bool = True, **options) -> Run:
    """Our step with other ``options`` of the generator, on the same caches."""
    generator, shared = setting.make_generator(**options), setting.generator
    generator.tokens, generator.context = shared.tokens, shared.context
    generator.target_cache, generator.draft_cache = shared.target_cache, shared.draft_cache
    return ours(setting, generator, obstacle, graph)


MAKERS: dict[str, Callable[[Setting], Run]] = {
    "reference": reference,
    "native": native,
    "static": static,
    "eager": lambda setting: ours(setting, setting.generator, "eager", False),
    "graph": lambda setting: ours(setting, setting.generator),
    "fused": lambda setting: another(setting, fused=True),
    "compiled": lambda setting: another(setting, compile=setting.compile),
}
ONE_ROW = ("reference", "native")


# ---- the profile

_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


def profiled(run: Run, accepted: int, device: torch.device, shapes: bool = False) -> profile:
    """``Meter.profiled`` steps of a runner."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    profiler = profile(activities=activities, record_shapes=shapes)
    run(Meter(device, profiler), accepted, SKIPPED + Meter.profiled + 1)
    return profiler


def counted(profiler: profile) -> tuple[float, float]:
    """Launches by the host and kernels of the device, a step."""
    events = profiler.events()
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)
    calls = [event.name for event in events if event.name.startswith("cu")]
    launches = sum(any(part in name for part in _LAUNCHES) for name in calls)
    return launches / Meter.profiled, kernels / Meter.profiled


def kernel_table(profiler: profile) -> list[dict]:
    """The kernels of a step by name: how many, and their time."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
    rows = [
        {"kernel": name, "count": len(times) / Meter.profiled, "us": sum(times) / Meter.profiled}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _op_bytes(name: str, shapes: list, size: int, length: int, features: float) -> float | None:
    """The bytes that a call of an op cannot do without, of its operands' shapes; None where that is not known.

    The profiler does not record the shapes of a list: ``features`` is what a call of ``linears`` has on average.
    """
    of = [math.prod(shape) for shape in shapes]
    match name.removeprefix("aten::").removeprefix("dflash::"):
        case "mm":
            return size * (of[0] + of[1] + shapes[0][0] * shapes[1][1])
        case "addmm":
            return size * (of[1] + of[2] + shapes[1][0] * shapes[2][1])
        case "linear" if name.startswith("dflash::"):
            return size * (of[0] + of[1] + of[0] // shapes[0][-1] * shapes[1][0])
        case "linears":
            return size * (of[0] + features * shapes[0][-1] + of[0] // shapes[0][-1] * features)
        case "block_attention":
            batch, kv_heads, _, head_dim = shapes[1]
            return size * (2 * of[0] + 2 * batch * kv_heads * length * head_dim)
        case "rms_norm":
            return size * 2 * of[0]
        case "add_rms_norm":
            return size * 4 * of[0]
        case "silu_mul":
            return size * of[0] * 3 // 2
        case "qkv_norm_rope_append_" | "append_kv_":
            return size * 2 * of[0] * (1 if "qkv" in name else 2)
        case "select_tokens":
            return size * of[0]
    return None


def op_table(profiler: profile, size: int, length: int, features: float, copy: float) -> list[dict]:
    """The ops of an eager step by shape: how many, their time on the device, bytes and share of the bandwidth."""
    rows = []
    on_gpu = torch.cuda.is_available()
    for entry in profiler.key_averages(group_by_input_shape=True):
        time_us = (entry.self_device_time_total if on_gpu else entry.self_cpu_time_total) / Meter.profiled
        if not time_us or entry.device_type == DeviceType.CUDA or entry.key.startswith("cuda"):
            continue
        shapes = [shape for shape in entry.input_shapes if shape]
        try:
            moved = _op_bytes(entry.key, shapes, size, length, features)
        except (IndexError, ValueError, TypeError):
            moved = None
        count = entry.count / Meter.profiled
        rows.append(
            {
                "op": entry.key,
                "shapes": str(shapes[:2]),
                "count": count,
                "us": time_us,
                "mb": None if moved is None else moved * count / 1e6,
                "share_of_copy": None if moved is None else moved * count / (time_us * 1e-6) / copy,
            }
        )
    return sorted(rows, key=lambda row: -row["us"])


def show_tables(runner: str, kernels: list[dict], ops: list[dict]) -> None:
    total = sum(row["us"] for row in kernels)
    if kernels:
        print(f"{runner}: kernels of the step, {total:.1f} us in all")
    for row in kernels[:25]:
        print(f"    {row['us']:9.1f} us {100 * row['us'] / total:5.1f} %  {row['count']:6.1f} x {row['kernel'][:90]}")
    print(f"{runner}: ops of the same step, kernel by kernel")
    for row in ops[:30]:
        moved = "" if row["mb"] is None else f"{row['mb']:9.1f} MB {100 * row['share_of_copy']:4.0f} % of copy"
        print(f"    {row['us']:9.1f} us {row['count']:6.1f} x {row['op']:<30} {row['shapes']:<44} {moved}")


# ---- the lines


@dataclass
class Row:
    """One line as ``--json`` writes it; ``host_us``, ``launches`` and ``kernels`` are None where there is no GPU."""

    runner: str
    device: str
    commit: str
    context: int
    batch: int
    accepted: int
    step_ms: float
    floor_ms: float
    floor_share: float
    floor_4300_ms: float
    floor_4300_share: float
    host_us: float | None
    launches: float | None
    kernels: float | None

    def __str__(self) -> str:
        def shown(value: float | None) -> str:
            return "-" if value is None else f"{value:.0f}"

        return ROW.format(
            **asdict(self) | {"launches": shown(self.launches), "kernels": shown(self.kernels)},
            share=f"{100 * self.floor_share:.0f} %",
            share_4300=f"{100 * self.floor_4300_share:.0f} %",
            host=shown(self.host_us),
            tokens=1000 * self.batch * self.accepted / self.step_ms,
        )


class Bench:
    """The run: its settings one after another, their rows, and the file that they go to."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.device = torch.device(arguments.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dtype = getattr(torch, arguments.dtype or ("bfloat16" if self.device.type == "cuda" else "float32"))
        self.copy = harness.copy_bandwidth(self.device, self.device.type == "cpu", time.perf_counter)
        self.target, self.drafter, self.draft_config = pair(arguments.model, dtype, self.device)
        self.forced = Forced(self.device)
        self.rows: list[Row] = []
        self.facts = harness.header(self.device, self.copy) | {
            "driver": harness.driver(self.device),
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "dflash-engine": dflash.__version__,
            "command": "python " + shlex.join(sys.argv),
            "model": arguments.model,
            "dtype": str(dtype).removeprefix("torch."),
            "block_size": BLOCK,
            "target_parameters": sum(p.numel() for p in self.target.parameters()),
            "draft_parameters": sum(p.numel() for p in self.drafter.parameters()),
            "acceptance": "forced: behind its argmax the target's choices are overwritten by the drafts, and by "
            "another token where the last is to be; the context is random K/V",
            "left_out": [],
        }
        if arguments.commit:
            self.facts["commit"] = arguments.commit

    @property
    def over(self) -> bool:
        limit = self.arguments.stop_after
        return limit is not None and time.perf_counter() - self.began > limit

    def leave_out(self, runner: str, setting: Setting, why: str | Exception) -> None:
        """Say so and go on: a runner that cannot run must not end the others."""
        if isinstance(why, Exception):
            if self.arguments.debug:
                raise why
            why = f"{type(why).__name__}: {why}".splitlines()[0]
        at = {"context": setting.context, "batch": setting.batch}
        self.facts["left_out"].append({"runner": runner, **at, "why": why})
        print(f"{runner} is left out at context {setting.context}, batch {setting.batch}: {why}", file=sys.stderr)

    def write(self) -> None:
        if self.arguments.json:
            rows = [asdict(row) for row in self.rows]
            self.arguments.json.parent.mkdir(parents=True, exist_ok=True)
            self.arguments.json.write_text(json.dumps({**self.facts, "rows": rows}, indent=1) + "\n")

    @torch.no_grad()
    def run(self) -> None:
        f = self.facts
        print(
            f"{f['machine']}, driver {f['driver'] or 'none'}, torch {f['torch']}, transformers {f['transformers']}, "
            f"commit {f['commit']}, copy {f['copy_gb_s']:.1f} GB/s; {f['model']} {f['dtype']}, "
            f"{f['target_parameters'] / 1e6:.1f} M and {f['draft_parameters'] / 1e6:.1f} M random parameters\n"
            f"acceptance is {f['acceptance']}"
        )
        print("runner     context batch accepted |")
        for context in self.arguments.contexts:
            for batch in self.arguments.batches:
                if not self.over:
                    self.measure(
                        Setting(
                            self.target,
                            self.drafter,
                            self.draft_config,
                            self.forced,
                            Waits(),
                            context,
                            batch,
                            SKIPPED + max(self.arguments.steps, Meter.profiled + 1),
                            self.device.type == "cuda",
                        )
                    )
                if self.device.type == "cuda":
                    torch._dynamo.reset()
                    gc.collect()  # the caches of K/V hang in cycles
                    torch.cuda.empty_cache()
        self.write()

    def measure(self, setting: Setting) -> None:
        """Every runner at one context and batch."""
        found: dict[str, Run] = {}
        counts: dict[str, tuple[float | None, float | None]] = {}
        setting.generator.fill_()
        first = self.arguments.accepted[0]
        self.forced.set_(first)
        for name in self.arguments.runners:
            if setting.batch > 1 and name in ONE_ROW:
                self.leave_out(name, setting, "its loop takes one row")
                continue
            if self.over:
                self.leave_out(name, setting, "--stop-after")
                continue
            try:
                run = MAKERS[name](setting)
                run(Meter(self.device), first, setting.steps)  # compiles, captures, allocates
                run(Meter(self.device), first, setting.steps)
                counts[name] = (None, None)
                if self.device.type == "cuda":
                    counts[name] = counted(profiled(run, first, self.device))
                found[name] = run
            except Exception as error:
                self.leave_out(name, setting, error)
        for accepted in self.arguments.accepted:
            if not self.over:
                self.forced.set_(accepted)
                self.interleaved(setting, found, counts, accepted)
        if self.arguments.table and "tables" not in self.facts:
            self.tables(setting, found, first)

    def interleaved(self, setting: Setting, found: dict[str, Run], counts: dict, accepted: int) -> None:
        """Rounds of all runners in turn, then a row each."""
        found = dict(found)
        step_ms: dict[str, list[float]] = {name: [] for name in found}
        host_us: dict[str, list[float]] = {name: [] for name in found}
        for number in range(self.arguments.rounds):
            for name in list(found)[:: -1 if number % 2 else 1]:
                meter = Meter(self.device)
                try:
                    with setting.waits.open():
                        found[name](meter, accepted, setting.steps)
                except Exception as error:
                    self.leave_out(name, setting, error)
                    del found[name]
                    continue
                step_ms[name] += meter.milliseconds()
                host_us[name] += meter.host_microseconds()
        floor = floor_bytes(self.target, self.drafter, setting.context, setting.batch)
        for name in found:
            ms, on_gpu = statistics.median(step_ms[name]), self.device.type == "cuda"
            here, published = 1000 * floor / self.copy, 1000 * floor / PUBLISHED
            row = Row(
                runner=name,
                device=torch.cuda.get_device_name(self.device) if on_gpu else str(self.facts["machine"]),
                commit=str(self.facts["commit"]),
                context=setting.context,
                batch=setting.batch,
                accepted=accepted,
                step_ms=ms,
                floor_ms=here,
                floor_share=here / ms,
                floor_4300_ms=published,
                floor_4300_share=published / ms,
                host_us=statistics.median(host_us[name]) if on_gpu else None,
                launches=counts[name][0],
                kernels=counts[name][1],
            )
            self.rows.append(row)
            print(row, flush=True)
        self.write()

    def tables(self, setting: Setting, found: dict[str, Run], accepted: int) -> None:
        """Where the time of our step goes, with the target's own forward and with its layers on our ops."""
        self.forced.set_(accepted)
        size, config = self.drafter.dtype.itemsize, self.target.config
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        features = (heads * config.head_dim + 2 * config.intermediate_size) / 2  # of two calls a layer
        tables = self.facts["tables"] = {}
        for runner in ("graph", "fused"):
            try:
                kernels = kernel_table(profiled(found[runner], accepted, self.device)) if runner in found else []
                eager = another(setting, "eager", False, fused=runner == "fused")
                profiler = profiled(eager, accepted, self.device, shapes=True)
            except Exception as error:
                self.leave_out(f"{runner}'s table", setting, error)
                continue
            ops = op_table(profiler, size, setting.context, features, self.copy)
            tables[runner] = {"kernels": kernels, "ops": ops}
            show_tables(runner, kernels, ops)
        self.write()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TARGET_LAYERS, default="qwen3-8b")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu: a smoke run, nothing is compiled")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16, on CPU float32")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--accepted", type=int, nargs="+", default=[1, 6, 16], help="tokens a step emits, 1 to 16")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--without", nargs="+", choices=RUNNERS, default=[], metavar="RUNNER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="that count in a round")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin nothing new after that")
    parser.add_argument("--table", action="store_true", help="where the time goes, at the first context and batch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the header, the rows and the tables")
    parser.add_argument("--commit", help="what the rows say, where git cannot tell")
    parser.add_argument("--debug", action="store_true", help="raise where a runner fails")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no GPU")
    for name, low in (("contexts", 2 * BLOCK + 1), ("batches", 1), ("accepted", 1)):
        if wrong := [value for value in getattr(arguments, name) if value < low]:
            parser.error(f"--{name} must be at least {low}, got {wrong[0]}")
    arguments.runners = [name for name in arguments.runners if name not in arguments.without]
    if max(arguments.accepted) > BLOCK:
        parser.error(f"--accepted must be at most {BLOCK}, got {max(arguments.accepted)}")
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    return arguments


def main() -> None:
    Bench(parse()).run()


if __name__ == "__main__":
    main()
