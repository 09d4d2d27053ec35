"""The training loop: `Trainer`.

Every random choice in a batch is keyed by (seed, epoch, place of the micro-batch). A resumed run and a run on another
number of processes therefore make the same choices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...drafter import Drafter
from ...files import check_writable, remove_unfinished
from ...fit import check_config
from ...targets import Target, check_target, text_config
from ..checkpoint import save_draft
from ..config import TrainConfig
from ..data.batches import Batches, add_noise, mix_seed, pad_rows
from ..data.blocks import Blocks, default_gamma, make_blocks, sample_anchors
from ..data.heldout import MeasuredRows, hold_out
from ..engines import engine_warnings
from ..loss import BlockLoss, block_loss
from ..model import TargetFeatures, TrainableDrafter
from ..optimizers import drafter_optimizers, learning_rate
from . import resume
from .accelerator import make_accelerator, prepare_model
from .estimate import estimate
from .evaluation import HeldOutEvaluation
from .metrics import MetricsFile, StepTotals
from .progress import progress

__all__ = ["Trainer"]


class Trainer:
    """Trains ``drafter`` for ``target`` on rows of tokens.

    Args:
        target: the frozen causal language model; it is not changed.
        drafter: the drafter, in float32; trained in place.
        rows: ``datasets.Dataset`` with ``input_ids`` and ``loss_mask`` (1 on tokens that the target wrote).
        config: the settings of the run.
        output: folder for the draft, checkpoints and ``metrics.jsonl``.
        heldout: rows whose prompts are answered to measure acceptance. Rows that share a prompt with them are not
            trained on. None holds out ``eval_rows`` prompts of ``rows``, at most a tenth, with all their answers.
        features: a `dflash.train.data.features.FeatureCache` of ``rows``; None runs the target instead.
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
        self.target = check_target(target, spread=False)
        _check_models(self.target, drafter)
        if drafter.config.dflash2 is None and config.selector_weight != TrainConfig.selector_weight:
            raise ValueError("selector_weight is for DFlash 2 drafters, and this one has no selector")
        self.config, self.output, self.rows, self.quiet = config, Path(output), rows, quiet
        # 2. Measure the rows, and hold prompts out
        data = self._split(heldout, drafter.config.mask_token_id)
        if features is not None:
            if config.distill:
                raise ValueError("distill needs the target's own distribution: compute the features online")
            features.check(data.lengths, drafter.config.target_layer_ids)
        # 3. Set up the device and the processes
        if accelerator is None:
            cpu = next(self.target.parameters()).device.type == "cpu"
            accelerator = make_accelerator(config, self.output, cpu=cpu, tracker=tracker)
        self.accelerator, self.tracker, self.device = accelerator, tracker, accelerator.device
        # 4. Lay out the batches
        self._set_batches(data)
        # 5. Create the model and its optimizers
        self.gamma = config.gamma or default_gamma(drafter.config.block_size)
        self.drafter = drafter.to(self.device)
        self.model = prepare_model(accelerator, TrainableDrafter(self.drafter))
        self.optimizers = drafter_optimizers(drafter, config)
        self.features = features
        self.online = TargetFeatures(self.target, drafter.config.target_layer_ids, final=config.distill > 0)
        # 6. Start at the beginning
        self.metrics = MetricsFile(self.output)
        self._evaluation: HeldOutEvaluation | None = None
        self.step = self.epoch = self.place = self.tokens = 0
        self.seconds = 0.0
        self.last: dict[str, Any] = {}

    def _split(self, heldout: Any, mask_token_id: int) -> MeasuredRows:
        """Check all rows, and split them into training rows and held-out prompts."""
        config, text = self.config, text_config(self.target)
        data = MeasuredRows(self.rows, text, mask_token_id)
        if not data.usable:
            raise ValueError("no row has two neighboring tokens that the target wrote (loss_mask): nothing to learn")
        measured = None if heldout is None else MeasuredRows(heldout, text, mask_token_id, "held-out row")
        split = hold_out(self.rows, data, config.eval_rows, mix_seed(config.seed, 1 << 20), heldout, measured)
        self.index, self.prompts, self.dropped = split.index, split.prompts, split.dropped
        return data

    def _set_batches(self, data: MeasuredRows) -> None:
        """Lay out the batches, and compute the digests that identify the run."""
        config, lengths = self.config, [data.lengths[i] for i in self.index]
        group = self.accelerator.num_processes * config.accumulate
        self.batches = Batches(lengths, config.batch_tokens, group, config.seed)
        self.steps = config.steps or self.batches.count(config.epochs)
        self.data_digest = resume.data_digest(data.digest, self.index)
        self.target_digest = resume.target_digest(self.target)

    # ------------------------------------------------------------------------------------------ the run

    def train(self) -> dict[str, Any]:
        """Run the remaining steps, write the draft to ``output``, and return the last metrics."""
        self._begin()
        began, seconds, block_size = time.monotonic(), self.seconds, self.drafter.config.block_size
        totals = StepTotals(block_size)
        with self._progress() as show:
            for step in self._remaining_steps():
                # 1. Train on one step
                logging = (self.step + 1) % self.config.log_every == 0 or self.step + 1 == self.steps
                norm, rate = self.run_step(step, totals, logging)
                self.seconds = seconds + time.monotonic() - began
                # 2. Log the steps since the last line
                if logging:
                    metrics = totals.means(self.accelerator)
                    metrics |= {"learning_rate": rate, "gradient_norm": float(norm)}
                    self._log(metrics)
                    totals = StepTotals(block_size)
                show(self, metrics if logging else None)
                # 3. Evaluate and save
                if self.prompts and self._is_due(self.config.eval_every):
                    self._log(self.evaluate())
                if self._is_due(self.config.save_every):
                    self.save()
        if self.accelerator.is_main_process:
            save_draft(self.drafter, self.output)
        if self.tracker:
            self.accelerator.end_training()
        return self.last

    def _begin(self) -> None:
        """Clean up after a killed run, start the tracker, and report what is held out and what engines ignore."""
        if self.accelerator.is_main_process:
            check_writable(self.output)
            remove_unfinished(self.output)
        if self.tracker:
            self.accelerator.init_trackers("dflash")
        if self.quiet or not self.accelerator.is_main_process:
            return
        if self.dropped:
            count = f"{len(self.prompts)} held-out prompts are answered"
            print(f"dflash: {count}, {self.dropped} rows of held-out prompts are not trained on", file=sys.stderr)
        for difference in engine_warnings(self.drafter.config):
            print(f"dflash: {difference}", file=sys.stderr)

    def _is_due(self, every: int) -> bool:
        """True at the last step, and every ``every`` steps unless that is 0."""
        return self.step == self.steps or (every > 0 and self.step % every == 0)

    def _remaining_steps(self) -> Iterator[list[list[int]]]:
        while self.step < self.steps:
            steps = self.batches.epoch(self.epoch)
            while self.place < len(steps) and self.step < self.steps:
                yield steps[self.place]
            if self.place >= len(steps):
                self.epoch, self.place = self.epoch + 1, 0

    def run_step(self, group: list[list[int]], totals: StepTotals, statistics: bool) -> tuple[Tensor, float]:
        """Take one optimizer step over a group of micro-batches.

        Args:
            group: the rows of each micro-batch, of all processes.
            totals: receives the sums of this process's micro-batches.
            statistics: count correct tokens too.

        Returns:
            The gradient's norm and the learning rate.
        """
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
            weight += out.weight
            totals.add(out)
        tokens = self.batches.tokens(group)
        self.tokens, totals.tokens = self.tokens + tokens, totals.tokens + tokens
        # 2. Divide by the sum of all weights. The gradients so far are sums (on several processes, the mean of their
        #    sums); this turns them into gradients of the full batch's weighted mean.
        total = accelerator.reduce(weight, reduction="sum")
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        torch._foreach_mul_([p.grad for p in parameters], world / total)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        # 3. Step
        rate = config.learning_rate * learning_rate(self.step, self.steps, config.warmup, config.constant)
        for optimizer in self.optimizers:
            for entry in optimizer.param_groups:
                entry["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step, self.place = self.step + 1, self.place + 1
        return norm, rate

    def _loss(self, rows: list[int], key: int, statistics: bool) -> BlockLoss:
        """Return the loss sums of one micro-batch. ``key`` seeds its anchors and its noise."""
        # 1. Cut the rows into blocks
        config, draft = self.config, self.drafter.config
        ids, loss_mask = pad_rows(self.rows, rows)
        generator = torch.Generator().manual_seed(key)
        anchors, valid = sample_anchors(loss_mask, config.anchors, generator)
        blocks = make_blocks(ids, loss_mask, anchors, valid, draft.block_size, draft.mask_token_id, self.gamma)
        blocks = Blocks(*(getattr(blocks, field.name).to(self.device) for field in dataclasses.fields(blocks)))
        # 2. Read the target's features and the embeddings of the blocks
        with self.accelerator.autocast():
            context, final = self._features(rows, ids)
            if config.feature_noise:
                context = add_noise(context, len(draft.target_layer_ids), config.feature_noise, generator)
            embeds = self._in_training_dtype(F.embedding(blocks.ids, self.online.embedding_weight))
            # 3. Run the drafter and compare
            hidden = self.model(context, embeds, blocks.anchors)
            teaching = {"teacher": final, "distill": config.distill}
            selecting = {"selector": self.drafter.candidate_selector, "selector_weight": config.selector_weight}
            return block_loss(hidden, blocks, self._logits(), statistics=statistics, **teaching, **selecting)

    def _features(self, rows: list[int], ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the target's features, from the cache if there is one, and its final states for distillation."""
        if self.features is not None:
            return self._in_training_dtype(self.features.features(rows).to(self.device)), None
        context, final = self.online(ids.to(self.device))
        return self._in_training_dtype(context), final

    def _in_training_dtype(self, x: Tensor) -> Tensor:
        """Return ``x`` in the drafter's dtype, unless autocast chooses one."""
        return x.to(self.drafter.dtype) if self.config.mixed_precision == "no" else x

    def _logits(self) -> Callable[[Tensor], Tensor]:
        """Return the function from hidden states to logits. Drafter and target share multiplier and softcap."""
        dtype = self.online.embedding_weight.dtype

        def logits(rows: Tensor) -> Tensor:
            rows = rows.to(dtype) if self.config.mixed_precision == "no" else rows
            return self.drafter.logits(rows, self.online.head)

        return logits

    # ------------------------------------------------------------------------------------------ reports

    def plan(self, measured: int = 3) -> dict[str, Any]:
        """Estimate what `train` would do and how long it would take, from the speed of a few steps.

        Writes nothing and restores the trainer.

        Args:
            measured: steps to run, at least 2; the first warms up and is not counted.

        Returns:
            Numbers by name. ``hours`` excludes evaluations and checkpoints. ``memory_bytes`` is the peak memory of the
            GPU, or of the process on CPU.

        Raises:
            ValueError: the run has already taken a step.
        """
        if self.step:
            raise ValueError(f"plan() must run before the first step, this run has done {self.step}")
        return estimate(self, measured)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Answer the held-out prompts; return the acceptance length per temperature. All processes must call this."""
        config = self.config
        if self._evaluation is None:
            longest = max(map(len, self.prompts)) + config.eval_tokens
            self._evaluation = HeldOutEvaluation(self.target, self.drafter, longest, self.device)
        return self._evaluation.run(
            self.drafter, self.prompts, config.eval_tokens, config.eval_temperatures, self.accelerator
        )

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

    def _progress(self) -> contextlib.AbstractContextManager[Any]:
        if self.quiet or not self.accelerator.is_main_process:
            return contextlib.nullcontext(lambda *_: None)
        return progress(self.steps)

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write a checkpoint of this step. All processes must call this."""
        resume.save(self)

    def resume(self) -> bool:
        """Continue from the last readable checkpoint in ``output``. Return False if there is none.

        Raises:
            ValueError: the checkpoint's run has another target, other data, another schedule or another drafter.
            CheckpointError: there are checkpoints, but none can be read.
        """
        return resume.resume(self)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that must match for a checkpoint to be resumed."""
        return resume.fingerprint(self)


def _check_models(target: nn.Module, drafter: Drafter) -> None:
    check_config(target, drafter.config)
    Target(target, drafter.config.target_layer_ids)  # runs the checks for families that are not tested
    if drafter.dtype != torch.float32:
        raise ValueError(f"the drafter must be float32 for training, got {drafter.dtype}")
