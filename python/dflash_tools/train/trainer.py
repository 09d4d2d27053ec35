"""The training loop: `Trainer`.

Random choices are keyed by (seed, epoch, place of the micro-batch), so resumed runs and other numbers of processes make
the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash import Drafter, Generator
from dflash.internals import check_config, files, scale_logits, target_ids, targets

from ..config import Decoding, TrainConfig
from ..measure.compare import GeneratorRunner
from ..measure.progress import bars
from .batches import BatchBlocks, Batches, add_noise, default_gamma, make_blocks, mix_seed, pad, sample_anchors
from .checkpoint import CheckpointError, resume_run, save_draft, save_run
from .data import MeasuredRows, hold_out
from .export import engine_warnings
from .features import TargetFeatures
from .files import one_line_errors, remove_unfinished
from .model import BlockLoss, Teacher, TrainableDrafter, block_loss

# ---------------------------------------------------------------------------------------------- optimizers

_BETAS = (0.9, 0.95)
Parameters = Sequence[nn.Parameter]


def make_muon(
    matrices: Parameters, others: Parameters, rate: float, weight_decay: float = 0.0, *, fused: bool | None = True
) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al., 2024) for the matrices and AdamW without decay for the others."""
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=rate, betas=_BETAS, weight_decay=0.0, fused=fused)]


def drafter_optimizers(drafter: Drafter, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``config`` selects. Norms, a selector's codebooks and fixed kernels do not decay."""
    matrices, others = [], []
    for name, p in drafter.named_parameters():
        if p.requires_grad:
            is_matrix = p.dim() == 2 and not name.endswith(("_codebook", "_w1.weight", "_w2.weight"))
            (matrices if is_matrix else others).append(p)
    if config.optimizer == "muon":
        return make_muon(matrices, others, config.learning_rate, config.weight_decay)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others}]
    return [torch.optim.AdamW(groups, lr=config.learning_rate, betas=_BETAS, weight_decay=0.0, fused=True)]


def learning_rate(step: int, steps: int, warmup: float, constant: float) -> float:
    """Return the learning rate of a step as a fraction of the peak: linear warmup, plateau, cosine decay to 0.

    ``warmup`` and ``constant`` are the fractions of ``steps`` after which warmup and plateau end.
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    start = max(rise, round(constant * steps))
    return 0.5 * (1 + math.cos(math.pi * max(0, step - start) / max(1, steps - start)))


# ---------------------------------------------------------------------------------------------- metrics


class StepTotals:
    """Sums of `BlockLoss` over the steps between two log lines, and the tokens of these steps."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.tokens = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, out: BlockLoss) -> None:
        for name, part in vars(out).items():
            if part is not None:
                self.sums[name] = self.sums.get(name, 0) + part.detach().double()

    def means(self, accelerator: Any) -> dict[str, Any]:
        """Return the means over all processes. All processes must call this."""
        sums = {name: accelerator.reduce(part.float(), reduction="sum").tolist() for name, part in self.sums.items()}
        right, counted, blocks = (sums.get(name) for name in ("correct", "counted", "blocks"))
        weight = sums["weight"] or 1.0  # no label could be drafted
        out = {
            "loss": sums["loss"] / weight,
            "cross_entropy": sums["cross_entropy"] / weight,
            "accuracy": [round(c / n, 4) if n else None for c, n in zip(right, counted, strict=True)],
            "train_acceptance": sums["accepted"] / blocks if blocks else None,
            "tokens_per_second": self.tokens / (time.monotonic() - self.began),
        }
        if "distance" in sums:
            out["distance"] = sums["distance"] / weight
        if "selector_loss" in sums:
            recall = sums["found"] / sum(counted) if sum(counted) else None
            out |= {"selector_loss": sums["selector_loss"] / weight, "candidate_recall": recall}
        return out


class MetricsFile:
    """``metrics.jsonl`` of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    def append(self, line: dict[str, Any]) -> None:
        with one_line_errors(f"{self.path} could not be written (the checkpoints are intact)", CheckpointError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def drop_after(self, step: int) -> None:
        """Drop lines after ``step``. A run that was killed before its next checkpoint leaves such lines."""
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError):  # cut short by a kill
                kept += [line + b"\n"] if json.loads(line)["step"] <= step else []
        files.write_atomically(self.path, lambda unfinished: unfinished.write_bytes(b"".join(kept)))


_SECONDS = 10  # between lines


@contextlib.contextmanager
def progress(steps: int, shown: bool) -> Iterator[Callable[[Any, dict[str, Any] | None], None]]:
    """Yield ``show(trainer, metrics or None)``, to be called after every step: a bar on a terminal, else lines."""
    printed, text = 0.0, ""
    with bars(["steps"], shown=shown) as show_bar:

        def show(trainer: Any, metrics: dict[str, Any] | None) -> None:
            nonlocal printed, text
            text = text if metrics is None else _text(trainer.last)
            show_bar("steps", trainer.step, steps, text)
            now = time.monotonic()
            is_due = now - printed >= _SECONDS or trainer.step >= steps
            if shown and metrics is not None and is_due and not sys.stderr.isatty():
                printed, left = now, (steps - trainer.step) * trainer.seconds / max(1, trainer.step) / 60
                speed = f"{trainer.last['tokens_per_second']:,.0f} tokens/s"
                print(
                    f"step {trainer.step} of {steps}  {text}  {speed}  {left:.1f} min left", file=sys.stderr, flush=True
                )

        yield show


def _text(last: dict[str, Any]) -> str:
    parts = [f"loss {last['loss']:.3f}"]
    for name, key in (("accepted", "train_acceptance"), ("held-out", "acceptance_length")):
        if last.get(key) is not None:
            parts.append(f"{name} {last[key]:.2f}")
    return "  ".join(parts)  # with the bar, it fits 80 columns


@contextlib.contextmanager
def _first_signal() -> Iterator[list[int]]:
    """Yield a list that the first SIGINT or SIGTERM is added to. The second one acts as without this."""
    caught: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: object) -> None:
        caught.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():  # others may set no handlers
        before |= {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        restore()


# ---------------------------------------------------------------------------------------------- the loop

_SMALL_VOCAB = 8192  # tokens of the draft vocabulary that `Trainer.plan` proposes
_TRACKERS = ("tensorboard", "trackio")


def multiplies_in_bf16(device: torch.device) -> bool:
    """Return False if torch emulates products in bfloat16: with AVX2 they take 45 times as long as in float32."""
    known = torch.cpu.get_capabilities()
    return device.type != "cpu" or any(known.get(name) for name in ("avx512_bw", "bf16"))


def make_accelerator(config: TrainConfig, output: str | Path, *, cpu: bool = False, tracker: str | None = None) -> Any:
    """Return the accelerator that a `dflash_tools.train.Trainer` runs on.

    ``tracker`` is "tensorboard", "trackio" or None, and writes to ``output``. ``cpu`` uses no GPU even if there is one.

    Raises:
        ValueError: the tracker is unknown, or a package is not installed. The message names it.
    """
    if tracker not in (None, *_TRACKERS):
        raise ValueError(f"tracker must be {' or '.join(_TRACKERS)}, got {tracker!r}")
    for name, extra in (("accelerate", "'.[train]'"), (tracker, tracker)):
        if name is not None and importlib.util.find_spec(name) is None:
            raise ValueError(f"this needs the {name} package: pip install {extra}")
    from accelerate import Accelerator, PartialState

    precision = config.mixed_precision
    if precision is None:
        precision = "bf16" if multiplies_in_bf16(PartialState(cpu=cpu).device) else "no"
    return Accelerator(cpu=cpu, mixed_precision=precision, log_with=tracker, project_dir=str(output))


class Trainer:
    """Trains ``drafter`` for ``target`` on rows of tokens.

    Args:
        target: the frozen causal language model; it is not changed.
        drafter: the drafter, in float32; trained in place.
        rows: ``datasets.Dataset`` with ``input_ids`` and ``loss_mask`` (1 on tokens that the target wrote).
        config: the settings of the run.
        output: folder for the draft, checkpoints and ``metrics.jsonl``.
        heldout: rows whose prompts are answered to measure acceptance, and not trained on. None holds out
            ``eval_rows`` prompts of ``rows``, at most a tenth, with all their answers.
        features: a `dflash_tools.train.features.FeatureCache` of ``rows``; None runs the target instead.
        accelerator: from `make_accelerator`; None creates one.
        tracker: "tensorboard" or "trackio".
        quiet: print no progress to standard error.

    Raises:
        ValueError: rows and models do not match. The check comes first, and the message names the mismatch.
    """

    def __init__(  # noqa: PLR0913 - public, each documented
        self,
        target: nn.Module,
        drafter: Drafter,
        rows: Any,
        config: TrainConfig,
        output: str | Path,
        *,
        heldout: Any = None,
        features: Any = None,
        accelerator: Any = None,
        tracker: str | None = None,
        quiet: bool = False,
    ) -> None:
        # 1. Refuse models that do not match
        self.target = targets.check_target(target, spread=False)
        check_config(self.target, drafter.config)
        if targets.is_packed(self.target):
            raise ValueError("the target must be dense for training, got packed weights: load it with transformers")
        targets.Target(self.target, drafter.config.target_layer_ids)  # runs the checks for families that are not tested
        if drafter.dtype != torch.float32:
            raise ValueError(f"the drafter must be float32 for training, got {drafter.dtype}")
        if drafter.config.dflash2 is None and config.selector_weight != TrainConfig.selector_weight:
            raise ValueError("selector_weight is for DFlash 2 drafters, and this one has no selector")
        if config.l1_weight and drafter.config.draft_vocab_size is not None:
            raise ValueError("l1_weight needs a drafter with the whole vocabulary: leave out one of the two")
        self.config, self.output, self.rows, self.quiet = config, Path(output), rows, quiet
        # 2. Check all rows, and split them into training rows and held-out prompts
        text, mask = targets.text_config(self.target), drafter.config.mask_token_id
        data = MeasuredRows(rows, text, mask)
        if not data.keys:
            raise ValueError("no row has two neighboring tokens that the target wrote (loss_mask): nothing to learn")
        held = None if heldout is None else MeasuredRows(heldout, text, mask, "held-out row")
        seed = mix_seed(config.seed, 1 << 20)
        self.index, self.prompts, self.dropped = hold_out(data, config.eval_rows, seed, held)
        self.rows_digest = data.digest
        # The drafter's taps, then what the target predicts from if it teaches its distribution
        last = targets.text_config(self.target).num_hidden_layers - 1
        taps = drafter.config.target_layer_ids
        self.layer_ids = (*taps, last) if config.l1_weight and last not in taps else taps
        if features is not None:
            features.check(data.lengths, self.layer_ids)
        # 3. Set up the device and the processes
        if accelerator is None:
            cpu = next(self.target.parameters()).device.type == "cpu"
            accelerator = make_accelerator(config, self.output, cpu=cpu, tracker=tracker)
        self.accelerator, self.tracker, self.device = accelerator, tracker, accelerator.device
        self.config = config = dataclasses.replace(config, mixed_precision=accelerator.mixed_precision)
        # 4. Lay out the batches
        group = accelerator.num_processes * config.accumulate
        self.batches = Batches([data.lengths[i] for i in self.index], config.batch_tokens, group, config.seed)
        self.steps = config.steps or self.batches.count(config.epochs)
        # 5. Create the model and its optimizers
        self.gamma = config.gamma or default_gamma(drafter.config.block_size)
        self.drafter = drafter.to(self.device)
        model = TrainableDrafter(self.drafter)
        # The buffers are the packed parameters: no need to broadcast them before every forward pass.
        buffers = [name for name, _ in model.named_buffers()]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
        self.model = accelerator.prepare_model(model)
        self.optimizers = drafter_optimizers(drafter, config)
        self.features = features
        self.online = TargetFeatures(self.target, self.layer_ids)
        # 6. Start at the beginning
        self.metrics = MetricsFile(self.output)
        self._generator: Generator | None = None
        self.step = self.epoch = self.place = self.tokens = 0
        self.seconds = self._lapped = 0.0
        self.last: dict[str, Any] = {}
        self._laps: dict[str, float] | None = None

    # ------------------------------------------------------------------------------------------ the run

    def train(self) -> dict[str, Any]:
        """Run the remaining steps, write the draft to ``output``, and return the last metrics.

        Raises:
            KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM and the step that ran then. `resume` continues there.
        """
        self._begin()
        began, seconds, totals = time.monotonic(), self.seconds, StepTotals()
        shown = not self.quiet and self.accelerator.is_main_process
        with _first_signal() as caught, progress(self.steps, shown) as show:
            for step in self.remaining_steps():
                # 1. Train on one step
                logging = (self.step + 1) % self.config.log_every == 0 or self.step + 1 == self.steps
                norm, rate = self.run_step(step, totals, logging)
                self.seconds = seconds + time.monotonic() - began
                # 2. Log the steps since the last line
                if logging:
                    metrics = totals.means(self.accelerator)
                    metrics |= {"learning_rate": rate, "gradient_norm": float(norm)}
                    self._log(metrics)
                    totals = StepTotals()
                show(self, metrics if logging else None)
                # 3. Stop if asked to, evaluate, and save
                if (number := self._signal_of_any(caught)) and self.step < self.steps:
                    save_run(self)
                    if shown:
                        print(
                            f"dflash: stopped at step {self.step} of {self.steps}; to go on from there, run the same "
                            "command with --resume",
                            file=sys.stderr,
                        )
                    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
                if self.prompts and self._is_due(self.config.eval_every):
                    self._log(self.evaluate())
                if self._is_due(self.config.save_every):
                    save_run(self)
        if self.accelerator.is_main_process:
            save_draft(self.drafter, self.output)
        if self.tracker:
            self.accelerator.end_training()
        return self.last

    def _begin(self) -> None:
        """Clean up after a killed run, start the tracker, and report what is held out and what engines ignore."""
        is_main = self.accelerator.is_main_process
        if is_main:
            files.check_writable(self.output)
            remove_unfinished(self.output)
        if self.tracker:
            self.accelerator.init_trackers("dflash")
        said = engine_warnings(self.drafter.config)
        if self.dropped:
            count = f"{len(self.prompts)} held-out prompts are answered"
            said = [f"{count}, {self.dropped} rows of held-out prompts are not trained on", *said]
        for line in said if is_main and not self.quiet else ():
            print(f"dflash: {line}", file=sys.stderr)

    def _signal_of_any(self, caught: Sequence[int]) -> int:
        """Return the signal that a process has caught, 0 for none: all must stop after the same step."""
        number = max(caught, default=0)
        if self.accelerator.num_processes == 1:
            return number
        return int(self.accelerator.gather(torch.tensor([number], device=self.device)).max())

    def _is_due(self, every: int) -> bool:
        """True at the last step, and every ``every`` steps unless that is 0."""
        return self.step == self.steps or (every > 0 and self.step % every == 0)

    def remaining_steps(self) -> Iterator[list[list[int]]]:
        """Yield the micro-batches of each step that is left; `run_step` takes it."""
        while self.step < self.steps:
            steps = self.batches.epoch(self.epoch)
            while self.place < len(steps) and self.step < self.steps:
                yield steps[self.place]
            if self.place >= len(steps):
                self.epoch, self.place = self.epoch + 1, 0

    def run_step(self, group: list[list[int]], totals: StepTotals, statistics: bool) -> tuple[Tensor, float]:
        """Take one optimizer step over all processes' micro-batches. Return the gradient's norm and the rate."""
        # 1. Add up gradients of this process's micro-batches
        config, accelerator = self.config, self.accelerator
        world, rank = accelerator.num_processes, accelerator.process_index
        mine = list(range(rank, len(group), world))
        weight = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, place in enumerate(mine):
            is_last = number == len(mine) - 1
            with contextlib.nullcontext() if is_last else accelerator.no_sync(self.model):
                key = mix_seed(config.seed, self.epoch + 1, self.place * len(group) + place)
                out = self._loss([self.index[i] for i in group[place]], key, statistics)
                accelerator.backward(out.loss)
                self._lap("backward")
            weight += out.weight
            totals.add(out)
        tokens = self.batches.tokens(group)
        self.tokens, totals.tokens = self.tokens + tokens, totals.tokens + tokens
        # 2. Divide by the sum of all weights. The gradients so far are sums (on several processes, the mean of their
        #    sums); this turns them into gradients of the full batch's weighted mean.
        total = accelerator.reduce(weight, reduction="sum")
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        torch._foreach_mul_([p.grad for p in parameters], world / total.clamp(min=1e-12))  # 0 if nothing can be learned
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        # 3. Step
        rate = config.learning_rate * learning_rate(self.step, self.steps, config.warmup, config.constant)
        for optimizer in self.optimizers:
            for entry in optimizer.param_groups:
                entry["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._lap("optimizer")
        self.step, self.place = self.step + 1, self.place + 1
        return norm, rate

    def _loss(self, rows: list[int], key: int, statistics: bool) -> BlockLoss:
        """Return the loss sums of one micro-batch. ``key`` seeds its anchors and its noise."""
        # 1. Cut the rows into blocks
        config, draft = self.config, self.drafter.config
        part = self.rows[rows]
        ids, loss_mask = pad(part["input_ids"]), pad(part["loss_mask"])
        generator = torch.Generator().manual_seed(key)
        anchors, valid = sample_anchors(loss_mask, config.anchors, generator)
        blocks = make_blocks(ids, loss_mask, anchors, valid, draft.block_size, draft.mask_token_id, self.gamma)
        blocks = BatchBlocks(*(tensor.to(self.device) for tensor in blocks))
        # 2. Read the target's features and the embeddings of the blocks
        with self.accelerator.autocast():
            self._lap("data")
            found = self._features(rows, ids)
            context = found[..., : len(draft.target_layer_ids) * draft.hidden_size]
            self._lap("features")
            if config.feature_noise:
                noise = torch.Generator(self.device).manual_seed(mix_seed(key, 1))
                context = add_noise(context, len(draft.target_layer_ids), config.feature_noise, noise)
            embeds = self._in_training_dtype(F.embedding(blocks.ids, self.online.embedding_weight))
            # 3. Run the drafter and compare
            hidden = self.model(context, embeds, blocks.anchors)
            self._lap("drafter")
            teaching = {"draft_ids": self._places_of_tokens(), "is_dynamic": config.slot_weights == "dpace"}
            selecting = {"selector": self.drafter.selector, "selector_weight": config.selector_weight}
            if config.l1_weight:
                teaching["teacher"] = Teacher(self._states(found, blocks), self._target_logits, config.l1_weight)
            out = block_loss(hidden, blocks, self._logits, statistics=statistics, **teaching, **selecting)
            self._lap("loss")
            return out

    def _features(self, rows: list[int], ids: Tensor) -> Tensor:
        """Return the target's features, from the cache if there is one."""
        found = self.online(ids.to(self.device)) if self.features is None else self.features.features(rows)
        return self._in_training_dtype(found.to(self.device))

    def _states(self, features: Tensor, blocks: BatchBlocks) -> Tensor:
        """Return the states that the target predicts each slot's token from, ``[batch, anchors, block, hidden]``."""
        last = features.unflatten(-1, (len(self.layer_ids), -1))[:, :, self.layer_ids.index(max(self.layer_ids))]
        slot = torch.arange(blocks.ids.shape[2], device=last.device)
        places = (blocks.anchors[..., None] + slot - 1).clamp(0, last.shape[1] - 1)
        return last[torch.arange(len(last), device=last.device)[:, None, None], places]

    @torch.no_grad()
    def _target_logits(self, states: Tensor) -> Tensor:
        """Map the target's last hidden states to its logits."""
        logits = self.online.head(states.to(self.online.embedding_weight.dtype))
        return scale_logits(logits, *targets.logit_scale(targets.unwrap(self.target)))

    def _in_training_dtype(self, x: Tensor) -> Tensor:
        """Return ``x`` in the drafter's dtype, unless autocast chooses one."""
        return x.to(self.drafter.dtype) if self.config.mixed_precision == "no" else x

    def _logits(self, rows: Tensor) -> Tensor:
        """Map the drafter's hidden states to logits of the tokens that it can draft, scaled as the target's."""
        draft = self.drafter.config
        if "lm_head" in draft.own_parts:
            logits = F.linear(rows, self.drafter.lm_head.weight)
        else:
            is_exact = self.config.mixed_precision == "no"
            logits = self.online.head(rows.to(self.online.embedding_weight.dtype) if is_exact else rows)
        return scale_logits(logits, draft.output_multiplier, draft.final_logit_softcapping)

    def _places_of_tokens(self) -> Tensor | None:
        """Return the place of each token of the vocabulary in a reduced one, -1 for none; None if it is whole."""
        config = self.drafter.config
        if config.draft_vocab_size is None:
            return None
        places = torch.full((config.vocab_size,), -1, dtype=torch.int64, device=self.device)
        places[target_ids(self.drafter.d2t)] = torch.arange(config.draft_vocab_size, device=self.device)
        return places

    # ------------------------------------------------------------------------------------------ reports

    def _lap(self, stage: str) -> None:
        """Add the seconds since the last lap to a stage, while `plan` measures."""
        if self._laps is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        self._laps[stage] = self._laps.get(stage, 0.0) + now - self._lapped
        self._lapped = now

    def _faster_options(self, seconds: dict[str, float]) -> dict[str, float]:
        """Return options that would save a quarter of a step or more, each with the fraction of its time that is left.

        These are estimates: a backward pass takes twice its forward pass.
        """
        config, total = self.config, sum(seconds.values())
        drafted, head = (3 * seconds[stage] / total for stage in ("drafter", "loss"))
        per_row = config.anchors or min(512, math.ceil(sum(self.batches.lengths) / len(self.batches.lengths) / 8))
        found = {f"--anchors {per_row // 2}": 1 - (drafted + head) / 2} if per_row > 1 else {}
        if config.optimizer == "muon":  # its products are in bfloat16, which some processors emulate
            found["--optimizer adamw"] = 1 - seconds["optimizer"] / total
        if self.features is None:
            found["--cache-features FOLDER"] = 1 - seconds["features"] / total
        vocab = self.online.embedding_weight.shape[0]
        if self.drafter.config.draft_vocab_size is None and vocab >= 4 * _SMALL_VOCAB:
            found[f"--draft-vocab-size {_SMALL_VOCAB}"] = 1 - head * (1 - _SMALL_VOCAB / vocab)
        return {option: round(max(left, 0.0), 2) for option, left in found.items() if left <= 0.75}

    def plan(self, measured: int = 3, *, cached: bool = False) -> dict[str, Any]:
        """Estimate what `train` would do and how long it would take, from the speed of a few steps.

        Writes nothing and restores the trainer.

        Args:
            measured: steps to run, at least 2; the first warms up and is not counted.
            cached: the run is to cache the target's features, and computes them once, not in every epoch.

        Returns:
            Numbers by name. ``hours`` excludes evaluations and checkpoints; ``memory_bytes`` is the peak so far.
        """
        if self.step:
            raise ValueError(f"plan() must run before the first step, this run has done {self.step}")
        # 1. Time steps on the first batches
        steps, device = self.batches.epoch(0), self.device
        weights = {name: weight.to("cpu", copy=True) for name, weight in self.drafter.state_dict().items()}
        totals, stamps = StepTotals(), []
        for number in range(max(2, measured)):
            self.place = number % len(steps)
            self.run_step(steps[self.place], totals, False)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            stamps.append((time.monotonic(), self.tokens))
            if number == 0:
                self._laps, self._lapped = {}, time.monotonic()
        (began, before), (ended, after) = stamps[0], stamps[-1]
        tokens_per_second = (after - before) / (ended - began)
        # 2. Put counters, optimizers and weights back
        laps, self._laps = self._laps, None
        seconds = {stage: lap / (len(stamps) - 1) for stage, lap in laps.items()}
        self.step = self.place = self.tokens = 0
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.drafter.load_state_dict(weights)
        # 3. Extrapolate to the full run
        count = sum(p.numel() for p in self.drafter.parameters() if p.requires_grad)
        step_tokens = sum(self.batches.tokens(group) for group in steps) / len(steps)
        step_seconds = (ended - began) / (len(stamps) - 1)
        total = step_seconds * self.steps
        if cached and self.features is None:
            total -= seconds["features"] * max(0, self.steps - len(steps))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            "target_parameters": targets.count_weights(self.target)[0],
            "draft_parameters": count,
            "device": str(device),
            "processes": self.accelerator.num_processes,
            "rows": len(self.index),
            "row_tokens": int(self.batches.lengths.sum()),
            "heldout_prompts": len(self.prompts),
            "heldout_rows": self.dropped,
            "steps": self.steps,
            "epochs": self.steps / len(steps),
            "tokens_per_step": round(step_tokens),
            "tokens": round(step_tokens * self.steps),
            "measured_steps": len(stamps) - 1,
            "seconds_per_step": step_seconds,
            "stage_seconds": seconds,
            "faster_options": self._faster_options(seconds),
            "tokens_per_second": tokens_per_second,
            "hours": total / 3600,
            "memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak,
            "draft_bytes": 2 * count,
            # Weights and moments in float32; Muon has one moment, AdamW two.
            "checkpoint_bytes": (8 if self.config.optimizer == "muon" else 12) * count,
            "checkpoints": self.config.keep,
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Answer the held-out prompts; return the acceptance length per temperature. All processes must call this."""
        config, accelerator = self.config, self.accelerator
        # 1. Give the drafter's weights to a generator, as dflash benchmark uses it
        if self._generator is None:
            longest = max(map(len, self.prompts)) + config.eval_tokens
            positions = targets.max_positions(self.target) or longest
            dtype = next(self.target.parameters()).dtype
            copy = Drafter(self.drafter.config, dtype=dtype, device=self.device).eval()
            self._generator = Generator(self.target, copy, max_length=min(longest, positions))
        self._generator.draft.load_state_dict(self.drafter.state_dict())
        # 2. Answer this process's share of the prompts
        mine = self.prompts[accelerator.process_index :: accelerator.num_processes]
        out: dict[str, float | None] = {}
        for temperature in config.eval_temperatures:
            runner = GeneratorRunner(self._generator, Decoding(config.eval_tokens, temperature), self.device)
            lengths = [length for ids in mine for length in runner(ids).steps]
            sums = torch.tensor([sum(lengths), len(lengths)], dtype=torch.float32, device=self.device)
            tokens, steps = accelerator.reduce(sums, reduction="sum").tolist()
            name = "acceptance_length" if temperature == 0 else f"acceptance_length_t{temperature:g}"
            out[name] = tokens / steps if steps else None
        return out

    def _log(self, metrics: dict[str, Any]) -> None:
        """Write metrics to ``metrics.jsonl`` and to the tracker."""
        steps = max(1, len(self.batches.epoch(self.epoch)))
        line = {"step": self.step, "epoch": self.epoch + self.place / steps, "tokens": self.tokens}
        line |= {"seconds": round(self.seconds, 3), **metrics}
        self.last |= line
        if not self.accelerator.is_main_process:
            return
        self.metrics.append(line)
        if self.tracker:
            self.accelerator.log({k: v for k, v in line.items() if isinstance(v, (int, float))}, step=self.step)

    def resume(self) -> bool:
        """Continue from the last readable checkpoint in ``output``. Return False if there is none.

        Raises:
            ValueError: the checkpoint is of another run; the difference is named.
            CheckpointError: there are checkpoints, but none can be read.
        """
        return resume_run(self)
