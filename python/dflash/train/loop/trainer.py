"""The training loop: batches, steps, evaluation in the real loop, checkpoints.

Every random choice of a batch is keyed by (seed, epoch, place of the micro-batch), so a resumed run and one with
another number of processes make the same choices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...drafter import Drafter
from ...generator import Generator, check_config
from ...target import Target, describe_config, sample_digest, text_config, unwrap
from ..checkpoint import CheckpointError, checkpoints, load_checkpoint, read_progress, save_checkpoint, save_draft
from ..config import TrainConfig
from ..data.batches import Batches, _collate, _fold
from ..data.blocks import default_gamma, make_blocks, sample_anchors
from ..data.heldout import Measured, split
from ..loss import BlockLoss, block_loss
from ..model import TargetFeatures, TrainableDrafter
from ..optimizers import _optimizers, learning_rate
from .metrics import _cut, _Meter, _peak_memory

__all__ = ["Batches", "TrainConfig", "Trainer", "learning_rate", "make_accelerator"]

_PLACE = ("step", "epoch", "place", "tokens", "seconds")  # of a run, in its checkpoints
_TRACKERS = ("tensorboard", "trackio")


def make_accelerator(config: TrainConfig, output: str | Path, *, cpu: bool = False, tracker: str | None = None) -> Any:
    """The accelerator that a :class:`Trainer` runs on.

    Args:
        config: its mixed precision is taken.
        output: where a tracker writes.
        cpu: stay off devices that are there.
        tracker: "tensorboard", "trackio" or None.

    Raises:
        ValueError: the tracker is unknown, or a package is not installed; it is named.
    """
    if tracker not in (None, *_TRACKERS):
        raise ValueError(f"tracker must be {' or '.join(_TRACKERS)}, got {tracker!r}")
    for name, extra in (("accelerate", "'.[train]'"), (tracker, tracker)):
        if name is not None and importlib.util.find_spec(name) is None:
            raise ValueError(f"this needs the {name} package: pip install {extra}")
    from accelerate import Accelerator

    return Accelerator(cpu=cpu, mixed_precision=config.mixed_precision, log_with=tracker, project_dir=str(output))


class Trainer:
    """Trains ``drafter`` for ``target`` on rows of tokens.

    Args:
        target: the frozen causal language model; not touched.
        drafter: float32; trained in place.
        rows: ``datasets.Dataset`` with ``input_ids`` and ``loss_mask`` (1 on tokens that the target wrote).
        config: how.
        output: folder for the draft, checkpoints and ``metrics.jsonl``.
        heldout: rows like ``rows`` whose prompts are answered in the real loop; rows that share a prompt with them are
            not trained on. None takes ``eval_rows`` prompts, a tenth at most, and all their answers off ``rows``.
        features: a :class:`~dflash.train.features.FeatureCache` of ``rows``; None computes the features.
        accelerator: from accelerate; None makes one (:func:`make_accelerator`).
        tracker: "tensorboard" or "trackio".
        quiet: no progress on standard error.

    Raises:
        ValueError: rows and models do not fit; named before any work is done.
    """

    def __init__(
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
        if features is not None and config.distill:
            raise ValueError("distill needs the target's own distribution: compute the features online")
        target = unwrap(target)
        draft = drafter.config
        check_config(target, draft)
        Target(target, draft.target_layer_ids)  # refuses what the engine cannot run
        if drafter.dtype != torch.float32:
            raise ValueError(f"a drafter is trained in float32, got {drafter.dtype}")
        self.config, self.output, self.target = config, Path(output), target
        self.rows, self.quiet = rows, quiet
        text = text_config(target)
        data = Measured(rows, text, draft.mask_token_id)
        if not data.usable:
            raise ValueError("no row has two neighbouring tokens that the target wrote (loss_mask): nothing to learn")
        if features is not None:
            _check_features(features, data.lengths, draft)
        asked = None if heldout is None else Measured(heldout, text, draft.mask_token_id, "held-out row")
        part = split(rows, data, config.eval_rows, _fold(config.seed, 1 << 20), heldout, asked)
        self.index, self.prompts, self.dropped = part.index, part.prompts, part.dropped
        if accelerator is None:
            cpu = next(target.parameters()).device.type == "cpu"
            accelerator = make_accelerator(config, self.output, cpu=cpu, tracker=tracker)
        self.accelerator, self.tracker, self.device = accelerator, tracker, accelerator.device
        world = accelerator.num_processes
        lengths = [data.lengths[i] for i in self.index]
        self.batches = Batches(lengths, config.batch_tokens, world * config.accumulate, config.seed)
        self._digest = hashlib.sha256(data.digest.encode() + array("q", self.index).tobytes()).hexdigest()[:16]
        described = f"{describe_config(target)} {sample_digest(target)}".encode()
        self._target_digest = hashlib.sha256(described).hexdigest()[:16]
        self.steps = config.steps or self.batches.count(config.epochs)
        self.gamma = config.gamma or default_gamma(draft.block_size)
        self.drafter = drafter.to(self.device)
        self.trainable = TrainableDrafter(self.drafter)
        # The buffers are the packed parameters, which need no broadcast of their own before every forward pass.
        buffers = [name for name, _ in self.trainable.named_buffers()]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.trainable, buffers)
        self.model = accelerator.prepare_model(self.trainable)
        self.optimizers = _optimizers(drafter, config)
        self.features = features
        self.online = TargetFeatures(target, draft.target_layer_ids, final=config.distill > 0)
        self._evaluator: Generator | None = None
        self.step = self.epoch = self.place = self.tokens = 0
        self.seconds = 0.0
        self.last: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------ the run

    def train(self) -> dict[str, Any]:
        """Run to the end from where the trainer stands; returns the last metrics. Writes the draft to ``output``."""
        config = self.config
        main = self.accelerator.is_main_process
        if self.tracker:
            self.accelerator.init_trackers("dflash")
        if main and not self.quiet and self.dropped:
            count = f"{len(self.prompts)} held-out prompts are answered"
            print(f"dflash: {count}, {self.dropped} rows of held-out prompts are not trained on", file=sys.stderr)
        began, seconds = time.monotonic(), self.seconds
        waiting = _Meter(self.drafter.config.block_size)
        with self._progress() as show:
            for step in self._remaining():
                logging = (self.step + 1) % config.log_every == 0 or self.step + 1 == self.steps
                norm, rate = self._step(step, waiting, logging)
                self.seconds = seconds + time.monotonic() - began
                if logging:
                    metrics = waiting.read(self.accelerator)
                    metrics |= {"learning_rate": rate, "gradient_norm": float(norm)}
                    self._log(metrics)
                    show(self, metrics)
                    waiting = _Meter(self.drafter.config.block_size)
                else:
                    show(self, None)
                last = self.step == self.steps
                if self.prompts and (last or (config.eval_every and self.step % config.eval_every == 0)):
                    self._log(self.evaluate())
                if last or (config.save_every and self.step % config.save_every == 0):
                    self.save()
        if main:
            save_draft(self.drafter, self.output)
        if self.tracker:
            self.accelerator.end_training()
        return self.last

    def _remaining(self) -> Iterator[list[list[int]]]:
        while self.step < self.steps:
            steps = self.batches.epoch(self.epoch)
            while self.place < len(steps) and self.step < self.steps:
                yield steps[self.place]
            if self.place >= len(steps):
                self.epoch, self.place = self.epoch + 1, 0

    def _step(self, group: list[list[int]], meter: _Meter, statistics: bool) -> tuple[Tensor, float]:
        """One optimizer step over a group of micro-batches; returns the gradient's norm and the learning rate."""
        config, accelerator = self.config, self.accelerator
        world, rank = accelerator.num_processes, accelerator.process_index
        mine = list(range(rank, len(group), world))
        weight = torch.zeros((), device=self.device)
        for number, place in enumerate(mine):
            sync = number == len(mine) - 1
            with contextlib.nullcontext() if sync else accelerator.no_sync(self.model):
                key = _fold(config.seed, self.epoch + 1, self.place * len(group) + place)
                out = self._loss([self.index[i] for i in group[place]], key, statistics)
                accelerator.backward(out.loss)
            weight += out.weight
            meter.add(out)
        tokens = int(self.batches.lengths[[row for rows in group for row in rows]].sum())
        self.tokens, meter.tokens = self.tokens + tokens, meter.tokens + tokens
        # Gradients are sums so far (means over processes of sums, where there are several): one division by the sum
        # of all weights makes them those of the whole batch's weighted mean.
        total = accelerator.reduce(weight, reduction="sum")
        scale = world / total
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        torch._foreach_mul_([p.grad for p in parameters], scale)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        share = learning_rate(self.step, self.steps, config.warmup, config.constant)
        for optimizer in self.optimizers:
            for entry in optimizer.param_groups:
                entry["lr"] = config.learning_rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step, self.place = self.step + 1, self.place + 1
        return norm, config.learning_rate * share

    def _loss(self, rows: list[int], key: int, statistics: bool) -> BlockLoss:
        """The loss sums of one micro-batch."""
        config, draft, device = self.config, self.drafter.config, self.device
        ids, loss_mask = _collate(self.rows, rows)
        generator = torch.Generator().manual_seed(key)
        anchors, valid = sample_anchors(loss_mask, config.anchors, generator)
        blocks = make_blocks(ids, loss_mask, anchors, valid, draft.block_size, draft.mask_token_id, self.gamma)
        blocks = type(blocks)(*(getattr(blocks, f.name).to(device) for f in dataclasses.fields(blocks)))
        ids = ids.to(device)
        with self.accelerator.autocast():
            if self.features is None:
                context, final = self.online(ids)
            else:
                context, final = self.features.features(rows).to(device), None
            if config.mixed_precision == "no":
                context = context.to(self.drafter.dtype)
            if config.feature_noise:
                context = self._noisy(context, generator)
            embedding = self.online.embedding_weight
            embeds = F.embedding(blocks.ids, embedding)
            if config.mixed_precision == "no":
                embeds = embeds.to(self.drafter.dtype)
            hidden = self.model(context, embeds, blocks.anchors)

            def logits(rows: Tensor) -> Tensor:  # the drafter's multiplier and softcap are the target's
                if config.mixed_precision == "no":
                    rows = rows.to(embedding.dtype)
                return self.drafter.logits(rows, self.online.head)

            return block_loss(hidden, blocks, logits, teacher=final, distill=config.distill, statistics=statistics)

    def _noisy(self, context: Tensor, generator: torch.Generator) -> Tensor:
        """Each tap with uniform noise of up to ``feature_noise`` times its root mean square."""
        taps = context.unflatten(-1, (len(self.drafter.config.target_layer_ids), -1))
        size = taps.float().square().mean(-1, keepdim=True).sqrt() * self.config.feature_noise
        noise = torch.empty(taps.shape).uniform_(-1, 1, generator=generator).to(taps.device)
        return (taps + noise * size).to(context.dtype).flatten(-2)

    # ------------------------------------------------------------------------------------------ what it tells

    def plan(self, measured: int = 3) -> dict[str, Any]:
        """What :meth:`train` would do, and how long it would take by steps that are run for it on this data.

        Writes nothing and leaves the trainer as it was.

        Args:
            measured: steps to run, at least 2; the first warms up and is not counted.

        Returns:
            Numbers by name. ``hours`` leaves evaluations and checkpoints out; ``memory_bytes`` is the peak of the
            device's memory, on CPU of the process.
        """
        if self.step:
            raise ValueError(f"a run is planned before its first step, this one has done {self.step}")
        first, cuda = self.batches.epoch(0), self.device.type == "cuda"
        row_tokens = int(self.batches.lengths.sum())
        step_tokens = sum(int(self.batches.lengths[rows].sum()) for group in first for rows in group) / len(first)
        weights = [p.detach().to("cpu", copy=True) for p in self.drafter.parameters()]
        meter, stamps = _Meter(self.drafter.config.block_size), []
        for number in range(max(2, measured)):
            self.place = number % len(first)
            self._step(first[self.place], meter, False)
            if cuda:
                torch.cuda.synchronize(self.device)
            stamps.append((time.monotonic(), self.tokens))
        (began, before), (ended, after) = stamps[0], stamps[-1]
        self.step = self.place = self.tokens = 0
        for optimizer in self.optimizers:
            optimizer.state.clear()
        with torch.no_grad():
            for parameter, weight in zip(self.drafter.parameters(), weights, strict=True):
                parameter.copy_(weight)
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else _peak_memory()
        count = sum(p.numel() for p in self.drafter.parameters())
        tokens, rate = step_tokens * self.steps, (after - before) / (ended - began)
        return {
            "target_parameters": sum(p.numel() for p in self.target.parameters()),
            "draft_parameters": count,
            "device": str(self.device),
            "processes": self.accelerator.num_processes,
            "rows": len(self.index),
            "row_tokens": row_tokens,
            "heldout_prompts": len(self.prompts),
            "heldout_rows": self.dropped,
            "steps": self.steps,
            "epochs": self.steps / len(first),
            "tokens_per_step": round(step_tokens),
            "tokens": round(tokens),
            "measured_steps": len(stamps) - 1,
            "seconds_per_step": (ended - began) / (len(stamps) - 1),
            "tokens_per_second": rate,
            "hours": tokens / rate / 3600,
            "memory_bytes": peak,
            "draft_bytes": 2 * count,
            # Weights and moments in float32; Muon has one moment, AdamW two.
            "checkpoint_bytes": (8 if self.config.optimizer == "muon" else 12) * count,
            "checkpoints": self.config.keep,
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Answer the held-out prompts with :class:`dflash.Generator` and measure the acceptance length.

        The processes share the prompts; all must call this.
        """
        config, accelerator = self.config, self.accelerator
        if self._evaluator is None:
            dtype = next(self.target.parameters()).dtype
            copy = Drafter(self.drafter.config, dtype=dtype, device=self.device).eval()
            longest = max(map(len, self.prompts)) + config.eval_tokens
            limit = getattr(text_config(self.target), "max_position_embeddings", None) or longest
            self._evaluator = Generator(self.target, copy, max_length=min(longest, limit))
        generator = self._evaluator
        generator.draft.load_state_dict(self.drafter.state_dict())
        out: dict[str, Any] = {}
        for temperature in config.eval_temperatures:
            lengths: list[int] = []
            for prompt in self.prompts[accelerator.process_index :: accelerator.num_processes]:
                room = min(config.eval_tokens, generator.max_length - len(prompt))
                answer = generator.generate(
                    torch.tensor([prompt], device=self.device),
                    max_new_tokens=room,
                    temperature=temperature,
                    top_k=0,  # as dflash benchmark: the temperature alone, whatever the generation_config says
                    top_p=1.0,
                    min_p=0.0,
                    seed=0,
                    return_dict_in_generate=True,
                )
                lengths += answer.statistics.acceptance_lengths[0]
            sums = torch.tensor([sum(lengths), len(lengths)], dtype=torch.float32, device=self.device)
            tokens, steps = accelerator.reduce(sums, reduction="sum").tolist()
            name = "acceptance_length" if temperature == 0 else f"acceptance_length_t{temperature:g}"
            out[name] = tokens / steps if steps else None
        return out

    def _log(self, metrics: dict[str, Any]) -> None:
        """To ``metrics.jsonl``, and the tracker."""
        steps = max(1, len(self.batches.epoch(self.epoch)))
        line = {"step": self.step, "epoch": self.epoch + self.place / steps, "tokens": self.tokens}
        line |= {"seconds": round(self.seconds, 3), **metrics}
        self.last |= line
        if not self.accelerator.is_main_process:
            return
        path = self.output / "metrics.jsonl"
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise CheckpointError(f"{path} could not be written ({error}); the checkpoints are whole") from error
        if self.tracker:
            self.accelerator.log({k: v for k, v in line.items() if isinstance(v, (int, float))}, step=self.step)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Any]:
        if self.quiet or not self.accelerator.is_main_process:
            yield lambda *_: None
            return
        from .progress import progress

        with progress(self.steps) as show:
            yield show

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write a checkpoint of this step."""
        if self.accelerator.is_main_process:
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            state = {"optimizers": states, "random": torch.get_rng_state()}
            progress = {name: getattr(self, name) for name in (*_PLACE, "steps")}
            progress |= {"fingerprint": self.fingerprint(), "last": self.last}
            save_checkpoint(self.output / "checkpoints", self.step, self.drafter, state, progress, self.config.keep)
        self.accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Go on from the last checkpoint under ``output`` that can be read; False if there is none at all.

        Raises:
            ValueError: it is of a run with another target, other data, another schedule or another drafter.
            CheckpointError: there are checkpoints, and none can be read.
        """
        main, damaged = self.accelerator.is_main_process, []
        found = checkpoints(self.output / "checkpoints")
        for path in reversed(found):
            try:
                state, progress = self._read(path)
                break
            except CheckpointError as error:
                damaged.append(error)
                if main and path != found[0]:
                    print(f"dflash: {error}; the one before it is tried", file=sys.stderr)
        else:
            if damaged:
                raise damaged[0]
            if main:
                _cut(self.output / "metrics.jsonl", 0)
            return False
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["random"])
        for name in _PLACE:
            setattr(self, name, progress[name])
        self.last = progress["last"]
        if main:
            _cut(self.output / "metrics.jsonl", self.step)
        return True

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """A checkpoint of this run: its state and progress; its weights are the drafter's then."""
        progress = read_progress(path)
        if not progress.keys() >= {*_PLACE, "fingerprint", "last"}:
            raise CheckpointError(f"checkpoint {path} is not one of dflash train; move that folder elsewhere")
        mine, theirs = self.fingerprint(), progress["fingerprint"]
        for name, value in mine.items():
            if name in theirs and theirs[name] != value:
                raise ValueError(f"{path} is of another run: its {name} is {theirs[name]}, this one's is {value}")
        state, progress = load_checkpoint(path, self.drafter)
        if "optimizers" not in state:
            raise CheckpointError(f"checkpoint {path} is of an older dflash; move that folder elsewhere")
        return state, progress

    def fingerprint(self) -> dict[str, Any]:
        """What has to be the same for a resumed run to be the same run."""
        config, free = dataclasses.asdict(self.config), ("keep", "log_every", "save_every", "eval_every")
        config = {k: v for k, v in config.items() if k not in free and not k.startswith("eval_")}
        config |= {"rows": len(self.index), "row_tokens": int(self.batches.lengths.sum()), "data": self._digest}
        config |= {"micro_batches": self.batches.group, "steps": self.steps}
        config.pop("accumulate")  # processes times accumulation is what counts
        config |= {"target": self._target_digest, "target's dtype": str(next(self.target.parameters()).dtype)}
        config["features"] = "of the running target" if self.features is None else f"cached in {self.features.dtype}"
        draft = json.loads(json.dumps(dataclasses.asdict(self.drafter.config)))
        return {**config, "drafter": draft}


def _check_features(features: Any, lengths: list[int], draft: Any) -> None:
    """Raise unless a cache of features is of rows of these lengths and of the drafter's taps."""
    if list(features.lengths) != lengths:
        raise ValueError(f"{features.folder} holds features of other rows")
    if tuple(features.target_layer_ids) != draft.target_layer_ids:
        raise ValueError(
            f"{features.folder} holds features of layers {list(features.target_layer_ids)}, the drafter taps "
            f"{list(draft.target_layer_ids)}"
        )
