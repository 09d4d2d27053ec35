"""Settings of the workshop's runs. Their fields are options of its commands."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dflash.light import checked

if TYPE_CHECKING:
    from .measure.datasets import Conversation

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # settings that rows name only if they are on


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. A field's description is its help text on the command line.

    ``optimizer="muon"`` (Jordan et al., 2024) scales its updates to AdamW's, so the same learning rate suits both.
    """

    PANELS: ClassVar = {"epochs": "Training", "log_every": "Evaluations and checkpoints"}

    epochs: Annotated[int, "Passes over the data."] = 6
    steps: Annotated[int | None, "Training steps; replaces epochs."] = None
    batch_tokens: Annotated[int, "Tokens per micro-batch, padding included."] = 4096
    accumulate: Annotated[int, "Micro-batches per process and step."] = 1
    anchors: Annotated[int | None, "Blocks per row, at most; default: one per 8 tokens to learn, up to 512."] = None
    gamma: Annotated[float | None, "Decay of the slot weights within a block; default: set by the block size."] = None
    slot_weights: Annotated[str, "Weights within a block: decay, or dpace, which follow the drafter's progress."] = (
        "decay"
    )
    optimizer: Annotated[str, "adamw, or muon for matrices and AdamW for the rest."] = "adamw"
    learning_rate: Annotated[float, "Peak learning rate."] = 6e-4
    weight_decay: Annotated[float, "Weight decay of the matrices."] = 0.0
    clip: Annotated[float, "Gradient norm limit."] = 1.0
    warmup: Annotated[float, "Fraction of the run that warms up the learning rate."] = 0.04
    constant: Annotated[float, "Fraction of the run after which the learning rate decays."] = 1 / 3
    selector_weight: Annotated[float, "Weight of the selector's loss (DFlash 2)."] = 1.0
    l1_weight: Annotated[float, "Share in the loss of the distance to the target's distribution (DSpark: 0.9)."] = 0.0
    feature_noise: Annotated[float, "Uniform noise on the features, relative to their size."] = 0.05
    seed: Annotated[int, "The same seed trains the same drafter."] = 0
    mixed_precision: Annotated[str | None, "bf16 or no; default: bf16 where the processor multiplies in it."] = None
    log_every: Annotated[int, "Steps between lines of metrics."] = 10
    eval_every: Annotated[int, "Steps between evaluations; 0: only at the end."] = 500
    save_every: Annotated[int, "Steps between checkpoints; 0: only at the end."] = 500
    eval_rows: Annotated[int, "Held-out prompts to answer."] = 32
    eval_tokens: Annotated[int, "New tokens per held-out prompt."] = 128
    eval_temperatures: Annotated[tuple[float, ...], "Temperatures of the held-out answers, as in 0,1."] = (0.0,)
    keep: Annotated[int, "Checkpoints to keep."] = 3

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, wanted: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

        least = dict.fromkeys(("epochs", "steps", "batch_tokens", "accumulate", "anchors", "keep", "log_every"), 1)
        least |= dict.fromkeys(("eval_every", "save_every", "eval_rows", "weight_decay", "feature_noise"), 0)
        for name, low in (least | {"selector_weight": 0, "eval_tokens": 2}).items():
            check(name, (value := getattr(self, name)) is None or value >= low, f"at least {low}")
        for name in ("learning_rate", "clip", "gamma"):
            check(name, (value := getattr(self, name)) is None or value > 0, "above 0")
        for name in ("warmup", "constant", "l1_weight"):
            check(name, 0 <= getattr(self, name) <= 1, "in 0 .. 1")
        for name, *allowed in ("slot_weights", "decay", "dpace"), ("optimizer", "adamw", "muon"):
            check(name, getattr(self, name) in allowed, '"{}" or "{}"'.format(*allowed))
        check("mixed_precision", self.mixed_precision in (None, "no", "bf16"), '"no" or "bf16"')
        check("gamma", self.gamma is None or self.slot_weights == "decay", "left out with slot_weights dpace")


@dataclass(frozen=True)
class RegenerateConfig:
    """Sampling settings of a run. Most fields are options of ``dflash regenerate``, with these texts as help.

    Each prompt is answered once at temperature 0, greedily, and ``samples`` times at every other temperature. A
    response's seed is a hash of the run's, the prompt's line and the sample's number.
    """

    temperatures: tuple[float, ...] = (0.0,)
    samples: Annotated[int, "Responses per prompt at each positive temperature."] = 1
    seed: Annotated[int, "The same seed writes the same responses."] = 0
    max_new_tokens: Annotated[int, "New tokens at most."] = 1024
    top_k: Annotated[int, "Keep the k best tokens; 0 is off."] = 0
    top_p: Annotated[float, "Keep the most probable tokens up to this mass."] = 1.0
    min_p: Annotated[float, "Drop tokens this much less probable than the best."] = 0.0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures must be one or more distinct values, got {list(self.temperatures)}")
        for temperature in self.temperatures:
            checked("temperature", temperature)
        for name in ("max_new_tokens", "seed", *OFF):
            checked(name, getattr(self, name))


@dataclass(frozen=True)
class LearnOptions:
    """How a drafter learns. The texts are the help of the command's options.

    The same number of steps learns the same. `Replayer` takes the options ``replay``.
    """

    minutes: Annotated[float, "Minutes of training, pauses not counted."] = 30.0
    steps: Annotated[int | None, "Training steps; replaces the minutes."] = None
    rank: Annotated[int | None, "Rank of LoRA; 0: all weights; default: 64 above 200 M weights, else 0."] = None
    learning_rate: Annotated[float, "Peak learning rate."] = 3e-4
    batch_tokens: Annotated[int, "Tokens of own answers per step, and as many of general ones."] = 1024
    seed: Annotated[int, "Seed of the order, the anchors and the noise."] = 0
    replay: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("minutes", "learning_rate", "batch_tokens"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        for name, least in (("steps", 1), ("rank", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class Decoding:
    """How prompts are answered, as for `dflash.generate`, with top-k, top-p and min-p off.

    The texts are the help of the commands' options.
    """

    max_new_tokens: Annotated[int, "New tokens at most."] = 512
    temperature: Annotated[float, "0 is greedy; top-k, top-p and min-p are off."] = 0.0
    seed: Annotated[int, "The same seed writes the same text."] = 0
    draft_sharpness: Annotated[float, "See dflash.generate; of chains."] = 1.0
    tree: Annotated[int | Literal["auto"] | None, "Rows of draft trees, measured next to chains."] = None


@dataclass(frozen=True)
class BenchmarkConfig(Decoding):
    """How prompts are asked and answered. The texts are the help of the command's options."""

    padded: Annotated[bool, "One-token decoding at the block's shapes: equal bit for bit in bf16 too."] = False
    raw: Annotated[bool, "Continue the text itself, without a chat template."] = False
    bos: Annotated[bool, "Put the tokenizer's BOS token before a raw prompt."] = False
    thinking: Annotated[bool | None, "The chat template's enable_thinking; None does not pass it."] = None
    turns: Annotated[str, "first, or all: the whole conversation of a prompt."] = "first"
    compile: Annotated[bool, "Compile the steps; the start takes long."] = False
    generator: dict[str, Any] = field(default_factory=dict)  # further options of `dflash.Generator`

    def check(self, tokenizer: Any) -> None:
        """Raise ``ValueError`` for settings that do not fit the tokenizer. The engine checks the others."""
        from dflash.internals import check_encoding

        if self.turns not in ("first", "all"):
            raise ValueError(f"--turns must be first or all, got {self.turns!r}")
        options = {"--turns all": self.turns == "all", "--no-thinking": self.thinking is not None}
        check_encoding(tokenizer, self.raw, self.bos, options)

    def asked(self, conversation: Conversation) -> Sequence[str]:
        """Return the turns of a conversation that are asked."""
        return conversation.turns if self.turns == "all" else conversation.turns[:1]

    def encode(self, tokenizer: Any, messages: Sequence[str], history: Sequence[dict[str, str]] = ()) -> list[int]:
        """Encode ``messages``, by the user and the model in turn, as token ids; ``history`` comes before them."""
        from dflash.internals import prompt_ids

        if history and self.raw:
            raise ValueError("--raw continues a text, and a prompt is a conversation")
        said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
        is_chat = history or (tokenizer.chat_template is not None and not self.raw)
        prompt: dict[str, Any] = {"messages": [*history, *said]} if is_chat else {"prompt": messages[-1]}
        template = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return prompt_ids(tokenizer, prompt, raw=self.raw, bos=self.bos, template=template)


def is_first_process() -> bool:
    """True in the first of the processes that ``accelerate launch`` starts."""
    return os.environ.get("RANK", "0") == "0"


def numbers(option: str, text: str, kind: type) -> tuple:
    """Return the numbers in an option's text; raises ValueError."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas between them, got {text!r}") from None
