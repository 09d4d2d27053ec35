"""The tensors of GGUF targets: weights that stay packed, and what llama.cpp's converter changed in them, undone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..ops import BLOCKS, PackedWeight
from ..terminal import listed, named, printable
from .fill import by_module, fill_module, tie_head
from .gguf import PLAIN, GgufFile, require_gguf
from .gguf_architectures import Architecture, find_architecture

# Parameters that are several tensors, or whose names gguf's table lacks: the first names that a file has count.
_LAYER = r"model\.layers\.(\d+)\.(?:\w+\.)*"
_NAMES = [
    (re.compile(_LAYER + pattern), names)
    for pattern, names in {
        r"experts\.gate_up_proj": [("ffn_gate_up_exps.weight",), ("ffn_gate_exps.weight", "ffn_up_exps.weight")],
        r"experts\.down_proj": [("ffn_down_exps.weight",)],
        r"experts\.gate_up_proj_bias": [("ffn_gate_exps.bias", "ffn_up_exps.bias")],
        r"experts\.down_proj_bias": [("ffn_down_exps.bias",)],
        r"router\.weight": [("ffn_gate_inp.weight",)],
        r"router\.scale": [("ffn_gate_inp.scale",)],
        r"router\.per_expert_scale": [("ffn_down_exps.scale",)],
        r"gate\.e_score_correction_bias": [("exp_probs_b.bias",)],
        r"dt_bias": [("ssm_dt.bias",)],
        r"in_proj_qkvz\.weight": [("attn_qkv.weight", "attn_gate.weight")],
        r"kv_b_proj\.weight": [("attn_kv_b.weight",), ("attn_k_b.weight", "attn_v_b.weight")],
        r"eh_proj\.weight": [("nextn.eh_proj.weight",)],
        r"enorm\.weight": [("nextn.enorm.weight",)],
        r"hnorm\.weight": [("nextn.hnorm.weight",)],
        r"shared_head\.norm\.weight": [("nextn.shared_head_norm.weight",)],
        r"input_linear\.weight": [("ffn_up_shexp.weight",)],
        r"output_linear\.weight": [("ffn_down_shexp.weight",)],
    }.items()
]
# Read with the config, tables that follow from it, and factors of activations that llama.cpp does not apply
_UNUSED = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight|.*\.input_scale")


class _Part(NamedTuple):
    """The tensors of a file that are a parameter, one above the other.

    Types that become Q8_0 when it is packed are added to ``changed``.
    """

    names: tuple[str, ...]
    file: GgufFile
    row: Architecture
    config: Any
    changed: set[str]

    def change(self, table: Mapping[str, Any]) -> Any:
        return next((change for end, change in table.items() if self.names[0].endswith(end)), None)

    @property
    def kinds(self) -> set[str]:
        return {self.file.kind(name) for name in self.names}

    @property
    def axis(self) -> int:
        """Where the tensors are joined."""
        return -1 if self.names[0].endswith(".bias") or len(self.file.shapes[self.names[0]]) < 2 else -2

    @property
    def shape(self) -> torch.Size:
        shape = list(self.file.shapes[self.names[0]])
        shape[self.axis] = sum(self.file.shapes[name][self.axis] for name in self.names)
        return torch.Size(shape)

    @property
    def scales(self) -> list[str]:
        """Names of the factors that the converter took out of NVFP4 tensors."""
        found = (f"{name.removesuffix('.weight')}.scale" for name in self.names if self.file.kind(name) == "NVFP4")
        return [name for name in found if name in self.file.shapes]

    def order(self, table: Mapping[str, Any], size: int) -> Tensor | None:
        """Return the order of rows or columns, if the model has another than the file."""
        change = self.change(table)
        order = None if change is None else change(self.config, size)
        return None if order is None or torch.equal(order, torch.arange(size)) else order

    def dense(self) -> Tensor:
        """Return the parameter in float32."""
        tensors = []
        for name in self.names:
            values, scale = self.file.tensor(name).float(), f"{name.removesuffix('.weight')}.scale"
            if scale in self.scales:
                factor = self.file.tensor(scale).float()
                values *= factor.view(-1, *[1] * (values.dim() - 1))
            tensors.append(values)
        change = self.change(self.row.values)
        made = torch.cat(tensors, self.axis) if change is None else change(*tensors, self.config)
        if (order := self.order(self.row.rows, made.shape[0])) is not None:
            made = made[order]
        if (order := self.order(self.row.columns, made.shape[-1])) is not None:
            made = made[..., order]
        return made

    def pack(self) -> PackedWeight | None:
        """Return the weight in blocks; None if it is dense.

        Tensors that no format holds, or that change on the way, become Q8_0.
        """
        if self.kinds <= PLAIN.keys():
            return None
        (kind, *others), change = self.kinds, self.change(self.row.values)
        if not others and kind in BLOCKS and change is None and not self.scales:
            every = [self.file.rows(name) for name in self.names]
            rows = every[0] if len(every) == 1 else np.concatenate(every, self.axis)  # the file's own memory, or a copy
            if (order := self.order(self.row.rows, rows.shape[0])) is not None:
                rows = rows[order.numpy()]
            order = self.order(self.row.columns, self.shape[-1])
            if order is not None and (blocks := _order_of_blocks(order, kind)) is not None:
                rows, order = rows.reshape(len(rows), len(blocks), -1)[:, blocks].reshape(rows.shape), None
            packed = PackedWeight.of_blocks(_tensor_of(rows), BLOCKS[kind], self.shape[-1])
            for name in self.names:
                self.file.give_back(name)
            return packed if order is None else packed._replace(order=order.argsort())
        values = self.dense()
        if values.shape[-1] % 32:
            return None
        self.changed.update(self.kinds - PLAIN.keys())
        gguf = require_gguf()
        rows = gguf.quants.quantize(values.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
        return PackedWeight.of_blocks(_tensor_of(rows), BLOCKS["Q8_0"], values.shape[-1])


def _order_of_blocks(order: Tensor, kind: str) -> np.ndarray | None:
    """Return the order of a row's blocks, if an order of columns keeps each of them whole."""
    gguf = require_gguf()
    size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = order.view(-1, size)
    is_whole = torch.equal(blocks, blocks[:, :1] // size * size + torch.arange(size))
    return (blocks[:, 0] // size).numpy() if is_whole else None


def _tensor_of(rows: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mapped file cannot be written, and is not
        return torch.from_numpy(np.ascontiguousarray(rows))


def load_weights(model: nn.Module, file: GgufFile, *, packs: str, draft_block: int | None = None) -> None:
    """Give an empty model the tensors of a file.

    The file is mapped, and each tensor packed as it is read, so that memory holds the packed weights and one tensor.

    Args:
        model: its parameters on the meta device, its buffers real.
        file: what it is loaded from; its config is from `read_config`.
        packs: from `packed_for`: leave the weights of linear layers, embeddings and experts in few bits for a device.
        draft_block: the block of the file that a model of one layer is, a head for drafts; None for all of the file.

    Raises:
        ValueError: a tensor of the file has no place in the model, or a parameter of the model none in the file.
    """
    # Nothing is loaded unless all tensors have a place, and fit
    changed = set[str]()
    for path, weights in by_module(_parts_of(model, file, draft_block, changed)).items():
        fill_module(model, path, weights, packs)
    tie_head(model)
    if changed:
        what = f"some weights of type {listed(sorted(changed))} take 8.5 bits each in memory, as Q8_0"
        warnings.warn(f"{printable(file.path)}: {what}", stacklevel=2)


def _parts_of(model: nn.Module, file: GgufFile, draft_block: int | None, changed: set[str]) -> dict[str, _Part]:
    """Return the tensors of each parameter, and of each buffer that is saved."""
    gguf, row, config = require_gguf(), find_architecture(file), model.config.get_text_config()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    num_blocks = config.num_hidden_layers if draft_block is None else draft_block + 1
    table = gguf.get_tensor_name_map(kinds[file.architecture], num_blocks)
    where, parts, missing = printable(file.path), {}, []
    tied = "lm_head.weight" if config.tie_word_embeddings else None
    for name, like in model.state_dict().items():
        stored = name if draft_block is None else _name_in_block(name, draft_block)
        if name == tied or not stored:
            continue
        base, _, end = stored.rpartition(".")
        whole = table.get_name(stored)
        choices = [(f"{table.get_name(base)}.{end}",), (f"{whole}.weight",), (f"{whole}",)]
        for pattern, names in _NAMES:
            if match := pattern.fullmatch(stored):
                choices = [tuple(f"blk.{match[1]}.{each}" for each in group) for group in names]
        names = next((group for group in choices if all(each in file.shapes for each in group)), None)
        if names is None:
            missing.append(name)
            continue
        part = parts[name] = _Part(names, file, row, config, changed)
        _check_shape(part, like, model.get_submodule(name.rpartition(".")[0]))
    # What is left over would be lost without a word
    used = {each for part in parts.values() for each in (*part.names, *part.scales)}
    blocks = re.compile(r"blk\.(\d+)\.")
    for name in file.shapes.keys() - used if draft_block is None else ():
        block = blocks.match(name)
        first_unused = config.num_hidden_layers  # blocks for drafting follow; some layers have others' keys and values
        if re.search(r"attn_(k|v|k_norm)\.weight", name):
            first_unused -= getattr(config, "num_kv_shared_layers", 0)
        if not _UNUSED.fullmatch(name) and not (block and int(block[1]) >= first_unused):
            raise ValueError(f"{where}: tensor {named(name)} has no place in {type(model).__name__}")
    if missing:
        raise ValueError(f"{where} has no tensors for {listed(sorted(missing))}: it is incomplete")
    return parts


def head_places(block: int) -> dict[str, str]:
    """Return how names begin in a head for drafts, a model of one layer, by how they do in a model with all layers."""
    layer = f"model.layers.{block}."
    joins = {f"{layer}{join}.": f"{join}." for join in ("eh_proj", "enorm", "hnorm")}
    return {**joins, f"{layer}shared_head.norm.": "model.norm.", layer: "model.layers.0."}


def _name_in_block(name: str, block: int) -> str:
    """Return what a tensor of a head for drafts is called in a model with all layers; empty for the target's own."""
    places = head_places(block).items()
    return next((start + name.removeprefix(own) for start, own in places if name.startswith(own)), "")


def _check_shape(part: _Part, like: Tensor, module: nn.Module) -> None:
    shape, expected = ([size for size in each if size != 1] for each in (part.shape, like.shape))
    is_rearranged = getattr(module, "is_transposed", False) or (len(part.names) > 1 and part.change(part.row.values))
    total = sum(np.prod(part.file.shapes[name]) for name in part.names)
    if total != like.numel() or (not is_rearranged and shape != expected):
        raise ValueError(
            f"{printable(part.file.path)}: tensor {named(part.names[0])} must be {list(like.shape)} as the file's keys "
            f"say, got {list(part.shape)}"
        )
