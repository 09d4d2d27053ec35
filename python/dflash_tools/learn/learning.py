"""Train a drafter on a machine's own answers (`learn`), and adopt it if replays (`Replayer`) show that it is better."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dflash import DraftConfig, Drafter, Generator, load_draft
from dflash.internals import RUNNING, Prefill, RecordedSettings, Store, StoredAnswer, files, resolve, targets

from ..config import LearnOptions, TrainConfig
from ..measure.datasets import import_datasets
from ..train.batches import Batches
from ..train.checkpoint import save_draft, save_run
from ..train.features import FeatureCache, TargetFeatures, cache_features
from ..train.model import check_trainable
from ..train.trainer import StepTotals, Trainer, multiplies_in_bf16

LEAST_ANSWERS = 50
_HELD = 10  # one in so many answers, the newest, is not learned from
_GENERAL = 48  # general answers that are replayed
_BASE_ROWS = 2000  # general rows that are learned from, at most
_SHARES = 1.0, 0.5  # of what was learned that are judged (weight averaging, WiSE-FT, arXiv 2109.01903)
_LORA_FROM = 2 * 10**8  # weights of a drafter from which on only LoRA is trained
SAVE_EVERY, _POLL = 60.0, 0.05  # seconds


Say = Callable[[str], None]


def learn(
    store: Store, target: nn.Module, draft: Drafter, base: Any, options: LearnOptions | None = None,
    *, say: Say = lambda _: None,
) -> CandidateGains:  # fmt: skip
    """Train the drafter that is served on the answers of ``store``, and have it adopted if it is better.

    Half of each step are general answers, so that the drafter forgets nothing. The newest tenth of the own answers, and
    48 general ones, are not learned from: both drafters are replayed on them (`judge`). While a
    server on this machine runs requests, training waits. A run that was stopped continues with the same answers.

    Args:
        store: of the target's answers.
        target: the target, in the dtype in which it is served.
        draft: the drafter that the server was started with, likewise.
        base: ``datasets.Dataset`` of general answers of the target, ``input_ids`` and ``loss_mask``.
        options: how it learns.
        say: gets a line now and then.

    Returns:
        What the replay found; the store has the drafter if it is adopted.

    Raises:
        ValueError: there are fewer than 50 answers, they are another target's, another learner is at work, or the
            drafter cannot be trained.
    """
    options = options or LearnOptions()
    check_trainable(draft.config)
    store.open_for(target, draft.config.target_layer_ids)
    with store.used_by("learner"), store.requests() as requests:

        def wait() -> None:
            while requests.run_elsewhere:
                time.sleep(_POLL)

        return _learn(store, target, draft, base, options, wait, say)


def _learn(
    store: Store, target: nn.Module, draft: Drafter, base: Any, options: LearnOptions, wait: Callable[[], None],
    say: Say,
) -> CandidateGains:  # fmt: skip
    # 1. Read the answers of this run, which stay whatever the server drops meanwhile
    run, own = _Run.begin(store, repr((options, draft.config, _digest(base)))), []
    for path in sorted((run.folder / "answers").glob("*.safetensors")):
        try:
            own.append(store.read(path, targets.text_config(target).vocab_size))
        except ValueError as error:  # a damaged file
            say(f"left out: {error}")
    held = max(1, len(own) // _HELD)
    served = draft
    if run.served:
        served = load_draft(store.drafter_folder(run.served), dtype=draft.dtype, device=draft.device)
    base, rows = _split_base(base, served.config)
    general = _general_answers(rows, target, served, wait)
    # 2. Replay the held-out answers with the drafter that is served
    longest = max(answer.prompt_length + answer.settings.max_new_tokens for answer in [*own, *general])
    fresh = own[-held:], general

    def replay(drafter: Drafter) -> tuple[Steps, Steps]:
        replayer, found = Replayer(target, drafter, max_length=longest, **options.replay), []
        for answers in fresh:
            found.append([])
            for answer in answers:
                wait()
                found[-1].append(replayer(answer))
        return found[0], found[1]

    # What is forgotten is counted from the first drafter on: many small losses must not add up.
    before = replay(served)
    if served is not draft:
        before = before[0], replay(draft)[1]
    say(f"{len(own)} answers, the newest {held} are for the test; {len(base)} general ones are learned with them")
    # 3. Train, leaving out answers to prompts of the test if there are others
    candidate = Drafter(served.config, dtype=torch.float32, device=served.device)
    candidate.load_state_dict(served.state_dict())
    asked = {prompt_of(answer) for answer in own[-held:]}
    known = [answer for answer in own[:-held] if prompt_of(answer) not in asked] or own[:-held]
    _train(run, target, candidate, known, base, options, wait, say)
    # 4. Judge it as it would be served, and its mean with the drafter before, which forgets less
    number, learned = store.drafters().last + 1, {name: x.clone() for name, x in candidate.state_dict().items()}
    floats = {name: x for name, x in learned.items() if x.is_floating_point()}
    folder, found = store.drafter_folder(number), {}

    def write(share: float) -> Drafter:
        mixed = {name: torch.lerp(served.state_dict()[name].to(x), x, share) for name, x in floats.items()}
        candidate.load_state_dict(learned | mixed)
        return load_draft(save_draft(candidate, folder), dtype=draft.dtype, device=draft.device)

    for share in _SHARES:
        found[share] = judge(before, replay(write(share)))
        say(f"{share:.0%} of what was learned: {found[share].own.gain:+.1%}, general {found[share].general.gain:+.1%}")
    share, verdict = max(found.items(), key=lambda each: (each[1].is_adopted, each[1].own.gain))
    write(share)
    # 5. Adopt or drop it
    with store.changing_drafters() as drafters:
        drafters.last = number
        is_adopted = verdict.is_adopted and drafters.adopted == run.served  # it may have been rolled back meanwhile
        if is_adopted:
            drafters.before, drafters.adopted = run.served, number
        kept = {drafters.before, drafters.adopted}
    for old in folder.parent.iterdir():
        if old.name.isdecimal() and old.is_dir() and int(old.name) not in kept:
            shutil.rmtree(old)
    about = {"drafter": number, "from": run.served, "answers": len(own), "share": share, "adopted": is_adopted}
    about |= {"own": verdict.own._asdict(), "general": verdict.general._asdict()}
    reports = store.folder / "reports.jsonl"
    earlier = reports.read_bytes() if reports.exists() else b""
    store.write(reports, earlier + json.dumps(about).encode() + b"\n")
    _Run.delete(store.run_folder)
    return verdict


def prompt_of(answer: StoredAnswer) -> tuple[int, ...]:
    """Return the ids of an answer's prompt."""
    return tuple(answer.ids[: answer.prompt_length].tolist())


# ---------------------------------------------------------------------------------------------- replays


class Replayer:
    """Counts the tokens that each step would have emitted, had a drafter been served when an answer was written.

    The target's choices at all positions, and its hidden states there, do not depend on the drafter: both are recorded.
    So one pass of the drafter per step is all that is run, by the code that serves, and the counts are those of
    serving with the same seed, at a fixed ``block_size``.

    Args:
        target: whose embeddings and head the drafter shares; no pass of it is run.
        draft: the drafter; its weights may be written between two answers.
        max_length: tokens of the longest prompt, with all that its answer might have had (``max_new_tokens``).
        options: ``block_size``, ``denoise_steps``, ``prompt_lookup``, ``prefill_chunk``, ``drafter_window`` and
            ``draft_weights`` of the generator.

    Raises:
        ValueError: as `dflash.Generator`; or blocks have one row.
    """

    def __init__(self, target: nn.Module, draft: Drafter, *, max_length: int, **options: object) -> None:
        self._generator = Generator(target, draft, max_length=max_length, reuse_prefix=False, **options)
        if self._generator.draft is None:
            raise ValueError("a replay needs blocks of at least 2 rows, got block_size=1")

    @torch.no_grad()
    def __call__(self, answer: StoredAnswer) -> list[int]:
        """Return the tokens that each step emits."""
        return self._generator.lock.run(self._replay, answer)

    def _replay(self, answer: StoredAnswer) -> list[int]:
        generator, engine, state = self._generator, self._generator.engine, self._generator.state
        ids, features = answer.ids.to(engine.target.device), answer.features.to(engine.target.device)
        # 1. The row as it stands after the prompt, whose pass chose the first new token.
        own = {"seed": answer.seed, "draft_sharpness": answer.draft_sharpness, "tree": None}
        prompt, end = ids[: answer.prompt_length], len(ids)
        call = generator.resolve_call(prompt[None], {**answer.settings.arguments(), **own})
        engine.refresh()
        engine.configure(call)
        prefill = Prefill(engine, call, [0], chunk=generator.prefill_chunk)
        for start, stop, *_ in prefill.chunks:
            count, positions = torch.tensor([stop - start]), torch.arange(start, stop)[None]
            fused = engine.draft.fuse(features[None, start:stop], count.to(ids.device))
            engine.draft.inject_(fused, positions.to(ids.device), state.draft_cache)
        state.tokens[0, len(prompt)], state.length[0], state.done[0] = ids[len(prompt)], len(prompt), RUNNING
        # 2. One pass of the drafter per step; what was written says how much of it is accepted.
        state.is_readable = engine.target.device.type == "cpu"
        lengths: list[int] = []
        try:
            while (at := int(state.length[0])) < end - 1:
                block = engine.proposer.propose(state)
                rows = block.ids.shape[1]
                known, seen = ids[at + 1 : at + 1 + rows], features[at : at + rows]
                state.features(block)[0, : len(seen)] = seen
                choices = torch.zeros_like(block.ids)
                choices[0, : len(known)] = known
                engine.commit_(block, choices)
                # A stop string has cut the text: what a step emitted after it does not count.
                lengths.append(min(int(state.length[0]), end - 1) - at)
        finally:
            state.is_readable = False
            state.vacate_(slice(0, 1))
        return lengths


# ---------------------------------------------------------------------------------------------- the verdict

LEAST_GAIN, MOST_LOSS = 0.02, 0.02
_DRAWS = 4000

Steps = Sequence[Sequence[int]]
"""Per answer, the tokens that each step emitted."""


class Gain(NamedTuple):
    """How many more tokens per step one drafter has than another, on the same answers.

    Attributes:
        before, after: tokens per step.
        gain: ``after / before - 1``.
        low, high: its 95 % interval, by bootstrap over answers (Efron, 1979).
        answers: how many were replayed.
    """

    before: float
    after: float
    gain: float
    low: float
    high: float
    answers: int

    @classmethod
    def of(cls, before: Steps, after: Steps) -> Gain:
        """Compare two drafters on the same answers.

        Raises:
            ValueError: no answer has a step.
        """
        pairs = [(len(one), len(other), sum(one)) for one, other in zip(before, after, strict=True) if one]
        if not pairs:
            raise ValueError("no answer has more than one token: nothing can be compared")
        counts = torch.tensor(pairs, dtype=torch.float64)  # [answers, 3]: steps before and after, tokens
        draws = torch.randint(len(pairs), (_DRAWS, len(pairs)), generator=torch.Generator().manual_seed(0))
        sums = counts[draws].sum(1)
        low, high = (sums[:, 0] / sums[:, 1] - 1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        steps, fewer, tokens = counts.sum(0).tolist()
        return cls(tokens / steps, tokens / fewer, steps / fewer - 1, low, high, len(pairs))

    def __str__(self) -> str:
        change = f"{self.gain:+.1%} ({self.low:+.1%} to {self.high:+.1%})"
        return f"{self.before:.2f} to {self.after:.2f} tokens per step, {change}, {self.answers} answers"


class CandidateGains(NamedTuple):
    """Gains of a candidate.

    Attributes:
        own: its gain on the newest of the machine's own answers, which it has not learned from.
        general: that on general answers.
    """

    own: Gain
    general: Gain

    @property
    def is_adopted(self) -> bool:
        return self.own.low > LEAST_GAIN and self.general.gain > -MOST_LOSS

    def __str__(self) -> str:
        """Return a report whose first sentence says it all."""
        word = "Adopted" if self.is_adopted else "Not adopted"
        gains = f"{self.own.gain:+.1%} tokens per step on new answers, {self.general.gain:+.1%} on general ones"
        rule = f"surely above {LEAST_GAIN:+.0%} on new answers, and above {-MOST_LOSS:+.0%} on general ones"
        details = f"  new answers: {self.own}\n  general: {self.general}"
        return f"{word}: {gains}.\n{details}\n(Adopted if {rule}.)"


def judge(before: tuple[Steps, Steps], after: tuple[Steps, Steps]) -> CandidateGains:
    """Compare a candidate with the drafter before it; each is the steps of own answers and of general ones."""
    return CandidateGains(Gain.of(before[0], after[0]), Gain.of(before[1], after[1]))


# ---------------------------------------------------------------------------------------------- data


@dataclass
class _Run:
    """Links to a run's answers, and the drafter and the settings that it began with. Kept until the run has ended."""

    folder: Path
    served: int
    options: str
    steps: int | None = None

    @classmethod
    def begin(cls, store: Store, options: str) -> _Run:
        """Continue the run that was stopped, or begin one with all answers in the store."""
        folder, wanted = store.run_folder, (store.drafters().adopted, options)
        with contextlib.suppress(ValueError, TypeError):  # there is none, or another version's
            run = cls(folder, **files.read_json(folder / "run.json"))
            if (run.served, run.options) == wanted:
                return run
        cls.delete(folder)
        answers = store.answers()
        if len(answers) < LEAST_ANSWERS:
            raise ValueError(f"there must be at least {LEAST_ANSWERS} answers to learn from, there are {len(answers)}")
        (folder / "answers").mkdir(parents=True)
        for path in answers:
            with contextlib.suppress(FileNotFoundError):  # the server has dropped it just now
                try:
                    os.link(path, folder / "answers" / path.name)
                except OSError:  # a file system without links
                    shutil.copy2(path, folder / "answers" / path.name)
        run = cls(folder, *wanted)
        run.write()
        return run

    @staticmethod
    def delete(folder: Path) -> None:
        """Delete a run. What says that its answers are whole goes first."""
        (folder / "run.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def write(self) -> None:
        """Write what the next process needs to continue."""
        content = {"served": self.served, "options": self.options, "steps": self.steps}
        Store.write(self.folder / "run.json", json.dumps(content).encode())


def _split_base(base: Any, config: DraftConfig) -> tuple[Any, list[dict[str, Any]]]:
    """Return rows to learn from, and general answers to replay, of other prompts. The mask token cannot be learned."""
    least, mask_token = config.block_size, config.mask_token_id
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, (ids, mask) in enumerate(zip(base["input_ids"], base["loss_mask"], strict=True)):
        if 1 in mask:
            groups.setdefault(tuple(ids[: mask.index(1)]), []).append(place)
    chosen = list(groups.values())[:: max(1, len(groups) // _GENERAL)][:_GENERAL]
    rows = [base[places[0]] for places in chosen]
    rows = [row for row in rows if _end_of_answer(row) - row["loss_mask"].index(1) > least]
    if len(groups) < 2 * _GENERAL or not rows:
        wanted = f"to at least {2 * _GENERAL} prompts, with more than {least} tokens each"
        got = f"{len(groups)} prompts, and {len(rows)} answers of that length among {len(chosen)}"
        raise ValueError(f"the general answers must be {wanted}; got {got}")
    replayed = {place for places in chosen for place in places}
    taught = (itertools.compress(*row) for row in zip(base["input_ids"], base["loss_mask"], strict=True))
    left = [
        place for place, (ids, mask) in enumerate(zip(taught, base["loss_mask"], strict=True))
        if place not in replayed and sum(mask) > 1 and mask_token not in ids
    ]  # fmt: skip
    return base.select(left[:_BASE_ROWS]), rows


def _digest(base: Any) -> str:
    digest = hashlib.sha256()
    for row in zip(base["input_ids"], base["loss_mask"], strict=True):  # the repr of a column shows five rows
        digest.update(repr(row).encode())
    return digest.hexdigest()[:16]


def _end_of_answer(row: Mapping[str, Any]) -> int:
    """Return where the first answer of a row ends; a conversation has more."""
    mask, start = row["loss_mask"], row["loss_mask"].index(1)
    return start + [*mask[start:], 0].index(0)


@torch.no_grad()
def _general_answers(
    rows: Sequence[Mapping[str, Any]], target: nn.Module, draft: Drafter, wait: Callable[[], None]
) -> list[StoredAnswer]:
    """Return general answers in the form of recorded ones, greedy, with features of one pass over each."""
    compute, found = TargetFeatures(target, draft.config.target_layer_ids), []
    for row in rows:
        wait()
        ids, start = torch.tensor(row["input_ids"][: _end_of_answer(row)]), row["loss_mask"].index(1)
        features = compute(ids[None, :-1].to(draft.device))[0].cpu()
        values = resolve({"max_new_tokens": len(ids) - start, "stop_token_ids": []}, {}, draft.config.vocab_size)
        settings = RecordedSettings(**{name: values[name] for name in RecordedSettings.__dataclass_fields__})
        nothing = torch.empty(0)
        found.append(StoredAnswer(ids, start, features, nothing, nothing, settings, 0, 1.0, ()))
    return found


class _Features:
    """Features of a run's rows, own answers and then general ones, as `Trainer` asks a `FeatureCache` for them."""

    dtype = torch.bfloat16

    def __init__(self, own: Sequence[StoredAnswer], base: FeatureCache) -> None:
        self._own, self._base = own, base

    def check(self, lengths: Sequence[int], target_layer_ids: Sequence[int]) -> None:
        """Raise ValueError unless these are features of such rows."""
        self._base.check(lengths[len(self._own) :], target_layer_ids)

    def features(self, rows: Sequence[int]) -> Tensor:
        """Return ``[batch, length, taps * hidden]`` of some rows, padded with 0 on the right."""
        if rows[0] >= len(self._own):
            return self._base.features([row - len(self._own) for row in rows])
        # The last token's are never read: no anchor stands there.
        found = [self._own[row].features.to(self.dtype) for row in rows]
        found = [torch.cat([one, one.new_zeros(1, one.shape[1])]) for one in found]
        return nn.utils.rnn.pad_sequence(found, batch_first=True)


class _Halves(Batches):
    """Steps of two micro-batches: own answers, and as many tokens of general ones."""

    def __init__(self, lengths: Sequence[int], count: int, batch_tokens: int, seed: int) -> None:
        super().__init__(lengths, batch_tokens, 2, seed)
        self._parts = Batches(lengths[:count], batch_tokens, 1, seed), Batches(lengths[count:], batch_tokens, 1, seed)
        self._own = count

    def _draw(self, epoch: int) -> list[list[list[int]]]:
        own, general = (part.epoch(epoch) for part in self._parts)
        offset = [[row + self._own for row in rows] for (rows,) in general]
        return [[rows, offset[place % len(offset)]] for place, (rows,) in enumerate(own)]


# ---------------------------------------------------------------------------------------------- training


def _train(
    run: _Run, target: nn.Module, candidate: Drafter, own: Sequence[StoredAnswer], base: Any,
    options: LearnOptions, wait: Callable[[], None], say: Say,
) -> None:  # fmt: skip
    """Train a drafter in place for the given minutes or steps, while no request runs."""
    # 1. Make rows, own answers first. An answer of one token teaches nothing, and the mask token cannot be drafted
    mask = candidate.config.mask_token_id
    own = [answer for answer in own if len(written := answer.ids[answer.prompt_length :]) > 1 and mask not in written]
    ids = [answer.ids.tolist() for answer in own]
    masks = [[0] * answer.prompt_length + [1] * (len(answer.ids) - answer.prompt_length) for answer in own]
    datasets = import_datasets()
    rows = datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": masks}, base.features)
    layers = candidate.config.target_layer_ids
    say(f"the target runs over {len(base)} general answers, once")
    compute, device = TargetFeatures(target, layers), candidate.device

    def computed(ids: Tensor) -> Tensor:
        wait()
        with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_in_bf16(device)):
            return compute(ids)

    folder = run.folder.parent / f"base-{_digest(base)}"
    for other in folder.parent.glob("base-*"):
        if other != folder and other.is_dir():
            shutil.rmtree(other)
    kept = cache_features(target, computed, base, layers, folder)
    assert kept is not None
    # 2. Make the trainer, for as many steps as fit into the minutes
    count = sum(parameter.numel() for parameter in candidate.parameters())
    rank = options.rank if options.rank is not None else 64 if count > _LORA_FROM else 0
    if rank:
        add_lora_(candidate, rank, options.seed)

    def trainer_of(steps: int) -> Trainer:
        config = TrainConfig(
            steps=steps, batch_tokens=options.batch_tokens, accumulate=2, learning_rate=options.learning_rate,
            slot_weights="dpace", eval_rows=0, seed=options.seed, keep=1, constant=0.5,
        )  # fmt: skip
        joined = datasets.concatenate_datasets([rows, base])
        made = Trainer(target, candidate, joined, config, run.folder, features=_Features(own, kept), quiet=True)
        made.batches = _Halves([len(row) for row in joined["input_ids"]], len(own), options.batch_tokens, options.seed)
        return made

    run.steps = run.steps or options.steps
    if run.steps is None:
        wait()
        plan = trainer_of(1).plan()
        run.steps = max(1, math.floor(60 * options.minutes / plan["seconds_per_step"]))
        run.write()
    trainer = trainer_of(run.steps)
    try:
        trainer.resume()
    except ValueError as error:  # another release, or another processor, trains in another way
        say(f"from the first step again: {error}")
    going_on = f", from step {trainer.step}" if trainer.step else ""
    say(f"{run.steps} steps of {2 * options.batch_tokens} tokens{going_on}")
    saved = shown = time.monotonic()
    totals = StepTotals()
    for group in trainer.remaining_steps():
        wait()
        began = time.monotonic()
        trainer.run_step(group, totals, True)
        trainer.seconds += (now := time.monotonic()) - began
        if now - saved > SAVE_EVERY:
            save_run(trainer)
            saved = now
        if now - shown > SAVE_EVERY / 2 or trainer.step == trainer.steps:
            loss, totals, shown = totals.means(trainer.accelerator)["loss"], StepTotals(), now
            say(f"step {trainer.step} of {trainer.steps}, {trainer.seconds / 60:.1f} min: loss {loss:.3f}")
        if options.steps is None and trainer.seconds > 66 * options.minutes:  # the machine is slower than it was
            break
    if rank:
        merge_lora_(candidate)


class _LowRank(nn.Module):
    """A weight plus a product of two small matrices (LoRA, arXiv 2106.09685)."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        self.down, self.up = nn.Parameter(down.to(weight)), nn.Parameter(weight.new_zeros(outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def _linears(drafter: Drafter) -> Iterator[nn.Linear]:
    for part in (drafter.fc, drafter.layers):
        yield from (module for module in part.modules() if isinstance(module, nn.Linear))


def add_lora_(drafter: Drafter, rank: int, seed: int = 0) -> None:
    """Train only matrices of ``rank``, one pair next to each weight of the layers and of ``fc``."""
    generator = torch.Generator().manual_seed(seed)
    drafter.requires_grad_(False)
    for module in list(_linears(drafter)):
        parametrize.register_parametrization(module, "weight", _LowRank(module.weight, rank, generator))


@torch.no_grad()
def merge_lora_(drafter: Drafter) -> None:
    """Add the matrices of `add_lora_` to the weights, and train these again."""
    for module in list(_linears(drafter)):
        parametrize.remove_parametrizations(module, "weight")
    drafter.requires_grad_(True)
