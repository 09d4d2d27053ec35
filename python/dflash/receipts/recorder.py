"""Makes the receipt of one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from ..call import Call, GenerateArguments, TargetDefaults
from ..options import GeneratorOptions
from ..outputs import GenerateOutput, StreamEvent
from ..settings import SETTINGS
from ..targets import check_target
from ..terminal import listed
from .receipt import Fingerprints, Receipt, RecordedAnswer, RecordedSettings

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Recorder:
    """Makes the receipt of one call of `dflash.generate`, `dflash.stream` or a `Generator`.

    >>> recorder = dflash.Recorder(target, ids, tokenizer=tokenizer, temperature=1.0, max_new_tokens=200)
    >>> output = dflash.generate(target, draft, ids, return_dict_in_generate=True, **recorder.arguments)
    >>> recorder.receipt(output).write("receipt.json")

    With `dflash.stream`, `add` every event, then ask for the receipt.

    Args:
        target: the target of the call.
        ids: ``[batch, length]`` int64 or int32 prompts.
        fingerprints: of the target and its tokenizer, if they are known already. Otherwise they are computed when the
            receipt is asked for.
        arguments: those of the call, see `dflash.call.GenerateArguments`. With ``tokenizer`` the receipt has its
            fingerprints too.

    Attributes:
        arguments: what to pass to the call: the same, with a seed for every row.

    Raises:
        ValueError: the answer could not be checked: ``acceptance="rejection"``, Python processors or criteria, several
            grammars, or rules larger than a receipt may state; or the call itself is wrong.
        TypeError: an argument is unknown or has the wrong type.
    """

    def __init__(
        self,
        target: nn.Module,
        ids: Tensor,
        *,
        fingerprints: Fingerprints | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> None:
        target = check_target(target)
        call = Call.resolve(TargetDefaults.of(target), ids, arguments)
        _check_verifiable(call, arguments)
        self._settings = RecordedSettings.of(call)
        rows = len(call.prompts)
        self._seeds = call.sampling.seeds(rows)  # drawn now if the call names none
        self.arguments = cast("GenerateArguments", {**arguments, "seed": self._seeds})
        self._target, self._fingerprints, self._tokenizer = target, fingerprints, arguments.get("tokenizer")
        self._prompts: list[list[int]] = [prompt.tolist() for prompt in call.prompts]
        self._width = call.ids.shape[1]
        self._answers: list[list[int]] = [[] for _ in range(rows)]
        self._reasons: list[str | None] = [None] * rows
        self._block_size, self._weights = 1, None

    def add(self, event: StreamEvent) -> None:
        """Add an event of `dflash.stream`."""
        for answer, new in zip(self._answers, event.ids, strict=True):
            answer.extend(new)
        self._reasons, self._block_size = list(event.finish_reasons), event.statistics.block_size
        self._weights = event.statistics.weights

    def receipt(self, output: GenerateOutput | None = None) -> Receipt:
        """Return the receipt.

        Args:
            output: of `dflash.generate`; None if the events of a stream were added.

        Raises:
            ValueError: the call has not ended, or ``output`` has another number of rows.
        """
        if output is not None:
            rows = zip(output.sequences[:, self._width :].tolist(), output.statistics.num_new_tokens, strict=True)
            self._answers = [row[:count] for row, count in rows]
            self._reasons, self._block_size = list(output.finish_reasons), output.statistics.block_size
            self._weights = output.statistics.weights
        if None in self._reasons or len(self._answers) != len(self._prompts):
            raise ValueError(f"a receipt needs all {len(self._prompts)} answers of the call, and these to their end")
        parts = zip(self._prompts, self._answers, self._seeds, self._reasons, strict=True)
        answers = (RecordedAnswer(tuple(prompt), tuple(ids), seed, str(reason)) for prompt, ids, seed, reason in parts)
        fingerprints = self._fingerprints or Fingerprints.of(self._target, self._tokenizer)
        shapes = self._block_size, len(self._prompts), GeneratorOptions.prefill_chunk
        return Receipt(tuple(answers), self._settings, fingerprints, *shapes, self._weights)


def _check_verifiable(call: Call, arguments: GenerateArguments) -> None:
    """Raise ValueError if the text is not a function of seed, weights and what a receipt states."""
    if call.acceptance == "rejection":
        raise ValueError(
            'a receipt needs acceptance="keyed", got "rejection", whose text depends on the drafter and could not be '
            "derived again"
        )
    if call.host_rules is not None:
        raise ValueError(
            "a receipt cannot state logits_processor and stopping_criteria, which are Python code: use the rules of "
            "dflash.call.GenerateArguments"
        )
    unknown = [name for name, value in arguments.items() if not SETTINGS[name].receipt and value is not None]
    if unknown:
        raise ValueError(f"a receipt cannot state {listed(unknown)} yet")
