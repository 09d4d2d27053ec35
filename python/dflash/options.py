"""The table of a generator's options, and which of them go together.

`OneShotOptions` and `GeneratorArguments` give each option its type, and in the same row a `Setting`: how it is
checked, its default, and the help of its command-line option. `Generator`, `generate`, `custom_generate`, the commands,
the benchmark, replays and receipts read this table. A new option is a row here and the place that acts on it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, cast

from .settings import (
    SETTINGS,
    BlockSize,
    Setting,
    TreeSize,
    WeightStorage,
    at_least,
    check_combination,
    integer_from,
    one_of,
    resolve,
    rows_of,
)

if TYPE_CHECKING:  # a slow import, and the command's help comes from this table
    from .outputs import FinishedAnswer


def _rows(name: str, value: object, _: int) -> object:
    if isinstance(value, str) and value != "auto":
        raise ValueError(f'{name} must be an integer of at least 1, "auto" or None, got {value!r}')
    return value if isinstance(value, str) else integer_from(1, name, value)


_switch = one_of(True, False, "auto")
_weights = one_of("int8", None)
_positive = at_least(1)


# -------------------------------------------------------------------------------------------------------------- table


class OneShotOptions(TypedDict, total=False):
    """The options that one-shot calls take too.

    Attributes:
        block_size: rows that a step verifies, 1 to the drafter's own (the default). Without a drafter any number, by
            default 1, or 8 with ``prompt_lookup``. ``"auto"`` chooses no drafts, or a quarter, half, three quarters or
            all of these before each step: the width that wrote most tokens per second so far at this context length. A
            step's time at each width is measured when a call begins at a new length. Cannot be combined with ``tree``
            or ``acceptance="rejection"``. Speed only. In bf16 two widths can round differently; the width depends on
            timing, so the text then can too.
        weights: ``"int8"`` to multiply by copies of the target's weights in 8 bits, with a scale per output channel:
            those of the decoder, with its experts, and of the head, on CPU. They are added to what is in memory. The
            text is exactly what that quantized target would write on its own.
        draft_weights: ``"int8"`` for the drafter's layers, its own head and what fuses the target's features, likewise,
            on GPUs too. Speed only.
        drafter_window: the last so many positions that full layers of the drafter see, besides the block; None for all.
            A drafter that was trained on short texts may accept more so, and its attention and memory stop growing with
            the context. Speed only.
        prompt_lookup: draft what followed the last ``prompt_lookup`` tokens where they stood before in prompt or
            answer, in place of the drafter's tokens (prompt lookup, `dflash.proposers.lookup`). For chains with keyed
            acceptance. None never looks. Speed only.
    """

    # fmt: off
    block_size: Annotated[BlockSize, Setting(
        _rows, of_drafts=True,
        help="Rows that a step verifies, or auto: chosen before each step; default: the drafter's.")]
    weights: Annotated[WeightStorage, Setting(
        _weights,
        help="Multiply by 8-bit copies of the target's weights (CPU); the text is the quantized target's.")]
    draft_weights: Annotated[WeightStorage, Setting(
        _weights, of_drafts=True,
        help="Multiply by 8-bit copies of the drafter's weights: changes the speed, never the text.")]
    drafter_window: Annotated[int | None, Setting(
        _positive, of_drafts=True,
        help="Let full layers of the drafter see the last so many positions only: changes the speed, never the text.")]
    prompt_lookup: Annotated[int | None, Setting(
        _positive, of_drafts=True,
        help="Draft what followed the last so many tokens where they stood before, such as 3.")]
    # fmt: on


class GeneratorArguments(OneShotOptions, total=False):
    """The keyword arguments of `dflash.Generator`; those of `OneShotOptions` too.

    Attributes:
        max_length: prompt and new tokens of a row together may not exceed this; it must be given.
        batch_size: the most rows of a call.
        denoise_steps: passes of the drafter over each block, where a call does not say
            (`dflash.call.GenerateArguments`).
        tree: rows of a tree of drafts, or ``"auto"``, where a call does not say (`dflash.call.GenerateArguments`). A
            call may also take fewer rows, or a chain; with None only chains. The caches are larger by these rows.
        compile: run the step through ``torch.compile(fullgraph=True)``, one graph per combination of rules, ways to
            accept and rows of a tree; the first step of each takes long. Hooks added to the drafter later are not seen.
            On a GPU only the target's part of the step is compiled, inside the CUDA graph.
        graph: on a GPU, replay the step as one CUDA graph: ``"auto"`` where that is possible
            (`Generator.graph_reason` says why not), True to refuse a call where it is not, False for one kernel at a
            time. Speed only.
        fused: run the layers of a Llama, Mistral, Qwen2, Qwen3, Qwen3-Next or Qwen3.5 that is exactly transformers'
            own, and experts of other families, on this package's ops instead of its modules: ``"auto"`` where the
            kernels take them (`Generator.fused_reason` says why not), True to refuse any other target, False for the
            modules. Passes of more than 256 rows (batch x block, or a prompt's chunk) use the modules of experts, on a
            GPU all. Sums are rounded in other places.
        prefill_chunk: prompt tokens per forward pass; an end of at most an eighth of that may join the pass before.
        reuse_prefix: run only what is new of a prompt whose first tokens are, row by row, those that the call before
            left in the caches: a conversation then costs its last turn. The keys of an answer were computed in blocks
            and not in a prompt, which is the same sum in another order. Weights that were moved, replaced or changed in
            place are noticed, but for writes that torch does not count (``tensor.data``, NumPy, a fused optimizer):
            call `Generator.reset` after these. It counts none of inference tensors: a target with such weights runs
            every prompt whole.
        on_answer: called with each answer that ends, a `dflash.outputs.FinishedAnswer`, before its last tokens are
            returned, but for calls with ``store=False``; `dflash_serve.record.AnswerRecorder` keeps them. Needs a
            drafter and ``tree=None``. The target's features of all positions are kept for it: ``batch_size *
            max_length`` times the taps.
    """

    max_length: Annotated[int, Setting(at_least(2))]
    batch_size: Annotated[int, Setting(_positive, 1)]
    denoise_steps: Annotated[int, Setting(_positive, 1, of_drafts=True)]
    tree: Annotated[TreeSize, Setting(SETTINGS["tree"].check, of_drafts=True, help=SETTINGS["tree"].help)]
    compile: Annotated[bool, Setting(off=False)]
    graph: Annotated[bool | Literal["auto"], Setting(_switch, "auto")]
    fused: Annotated[bool | Literal["auto"], Setting(_switch, "auto")]
    prefill_chunk: Annotated[int, Setting(_positive, 512)]
    reuse_prefix: Annotated[bool, Setting(off=True)]
    on_answer: Annotated[Callable[["FinishedAnswer"], None] | None, Setting(of_drafts=True)]


OPTIONS = rows_of(GeneratorArguments)
"""Every option by its name."""


def resolve_options(given: Mapping[str, object]) -> GeneratorArguments:
    """Return every option's checked value: the given one, else the default.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
        TypeError: a name is unknown, or a value has the wrong type.
    """
    options = cast(GeneratorArguments, resolve(given, {}, table=OPTIONS, caller="Generator"))
    for name, value in given.items():
        if value is None and (default := OPTIONS[name].off) is not None:
            raise TypeError(f"{name} must have a value, got None: leave it out for the default, {default!r}")
    check_combination(options["tree"], options["block_size"], options["denoise_steps"])
    lookup, tree = options["prompt_lookup"], options["tree"]
    if lookup is not None and tree is not None:
        raise ValueError(f"prompt_lookup={lookup} drafts chains, got tree={tree!r}: leave one of them out")
    if lookup is not None and options["block_size"] == 1:
        raise ValueError(f"prompt_lookup={lookup} needs blocks of at least 2 rows, got block_size=1")
    return options
