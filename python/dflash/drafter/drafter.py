"""The drafter: one denoising pass over a block of masks, on :mod:`dflash.ops`, from a published checkpoint.

:class:`Drafter` carries the parameter names of published checkpoints; :func:`load_draft` reads one, or takes over a
module that holds one. After the DFlash paper (arXiv 2602.06036, section 4).
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import KVCache
from ..target import rotary_table
from .config import DraftConfig

__all__ = ["Drafter", "load_draft"]


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear module whose parameters are (views of) these tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class Drafter(nn.Module):
    """The draft model. Rows of a batch never meet; no shape and no branch depends on the values of a tensor.

    The q, k and v projections are views of ``qkv_weight [layers, (heads + 2 * kv_heads) * head_dim, hidden]`` and
    ``qkv_bias``, gate and up of ``gate_up_weight [layers, 2 * intermediate, hidden]``: one GEMM a layer, and one for
    the K/V of all layers in prefill. The packed tensors are buffers outside the state dict, which keeps the names of
    published checkpoints; moves, copies and loads keep the views.

    A new drafter's parameters hold whatever memory held; they ask for no gradient. See :func:`load_draft`.

    Args:
        config: its shape and rules.
        dtype: of every parameter.
        device: of every parameter.
    """

    def __init__(
        self, config: DraftConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        layers, hidden, width = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        heads, head_dim = config.num_attention_heads, config.head_dim
        packed = (heads + 2 * config.num_kv_heads) * head_dim
        self._query = heads * head_dim

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def norm(size: int) -> nn.RMSNorm:
            module = nn.RMSNorm(size, config.rms_norm_eps, device="meta")
            module.weight = nn.Parameter(empty(size), requires_grad=False)
            return module

        self.fc = _linear(empty(hidden, len(config.target_layer_ids) * hidden))
        self.hidden_norm = norm(hidden)
        self.register_buffer("qkv_weight", empty(layers, packed, hidden), persistent=False)
        bias = empty(layers, packed) if config.attention_bias else None
        self.register_buffer("qkv_bias", bias, persistent=False)
        self.register_buffer("gate_up_weight", empty(layers, 2 * width, hidden), persistent=False)
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self.layers = nn.ModuleList()
        for index in range(layers):
            layer = nn.Module()
            layer.input_layernorm = norm(hidden)
            layer.self_attn = nn.Module()
            weights = self._split(self.qkv_weight[index])
            biases = (None,) * 3 if bias is None else self._split(bias[index])
            for name, weight, part in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
                layer.self_attn.add_module(name, _linear(weight, part))
            layer.self_attn.o_proj = _linear(empty(hidden, heads * head_dim), None if bias is None else empty(hidden))
            layer.self_attn.q_norm = norm(head_dim)
            layer.self_attn.k_norm = norm(head_dim)
            if config.attention_sinks:
                layer.self_attn.attention_sink_bias = nn.Parameter(empty(heads), requires_grad=False)
            layer.post_attention_layernorm = norm(hidden)
            layer.mlp = nn.Module()
            layer.mlp.gate_proj, layer.mlp.up_proj = map(_linear, self.gate_up_weight[index].chunk(2))
            layer.mlp.down_proj = _linear(empty(hidden, width))
            self.layers.append(layer)
        self.norm = norm(hidden)
        self._parameter_lists = self._lists()

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache for ``batch_size`` sequences of ``capacity`` positions, lookahead counted."""
        c = self.config
        rotary = rotary_table(self.inv_freq, c.rope.attention_scaling, capacity)
        sizes = (c.num_hidden_layers, batch_size, c.num_kv_heads, capacity, c.head_dim)
        return KVCache(*sizes, rotary=rotary, dtype=self.dtype, device=self.device)

    # ------------------------------------------------------------------------------------------ the forward pass

    def fuse(self, context: Tensor, num_context: Tensor) -> Tensor:
        """Context features of the tapped target states: ``hidden_norm(fc(context))``.

        Args:
            context: ``[batch, rows, taps * hidden]``, the taps in the order of ``target_layer_ids``.
            num_context: ``[batch]`` int64; rows at or past it may hold anything and come back as zeros.

        Returns:
            ``[batch, rows, hidden]``.
        """
        return ops.fuse_features(
            context, num_context, self.fc.weight, self.hidden_norm.weight, self.config.rms_norm_eps
        )

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each ``[batch, rows, head_dim / 2]`` float32, of ``positions [batch, rows]``."""
        angles = positions[..., None].float() * self.inv_freq
        scaling = self.config.rope.attention_scaling
        return angles.cos() * scaling, angles.sin() * scaling

    def inject_(self, features: Tensor, positions: Tensor, cache: KVCache) -> None:
        """Append the K/V of context rows in every layer at once (prefill).

        Args:
            features: ``[batch, rows, hidden]``, from :meth:`fuse`.
            positions: ``[batch, rows]`` int64, absolute; a negative one switches its row off.
            cache: written at ``positions``.
        """
        weight = self.qkv_weight[:, self._query :].transpose(1, 2)
        kv = torch.matmul(features.flatten(0, 1), weight)
        if self.qkv_bias is not None:
            kv = kv + self.qkv_bias[:, None, self._query :]
        cos, sin = self.rotary(positions)
        norms = torch.stack([layer.self_attn.k_norm.weight for layer in self.layers])
        ops.append_context_kv_(
            kv.unflatten(1, features.shape[:2]),
            positions, cos, sin, norms, self.config.rms_norm_eps, cache.keys, cache.values,
        )  # fmt: skip

    def forward(
        self, features: Tensor, num_context: Tensor, block_embeds: Tensor, length: Tensor, cache: KVCache
    ) -> Tensor:
        """One draft pass: append the context rows for good, the block's rows until the next pass overwrites them.

        Args:
            features: ``[batch, context_rows, hidden]``, from :meth:`fuse`. Row i stands at position
                ``length - num_context + i``; rows at or past ``num_context`` are off. Every layer takes K/V from these
                features as they are, without its input norm.
            num_context: ``[batch]`` int64.
            block_embeds: ``[batch, rows, hidden]``, scaled embeddings of the anchor and the masks, at ``length + j``.
            length: ``[batch]`` int64, the anchor's position; the cache holds ``length - num_context`` positions.
            cache: from :meth:`new_cache`; ``length + rows`` positions must fit.

        Returns:
            ``[batch, rows, hidden]`` past the final norm; row j > 0 predicts the token at ``length + j``.
        """
        config, eps = self.config, self.config.rms_norm_eps
        (batch, rows, _), context_rows = block_embeds.shape, features.shape[1]
        if features.device.type == "cpu" and ops.skinny(batch * (rows + context_rows), self.dtype):
            return self._forward_fused(features, num_context, block_embeds, length, cache)
        index = torch.arange(context_rows, device=length.device)
        before = torch.where(index < num_context[:, None], (length - num_context)[:, None] + index, -1)
        ahead = length[:, None] + torch.arange(rows, device=length.device)
        positions = torch.cat([before, ahead], 1)
        at = positions.clamp(0, cache.capacity - 1)  # rows that are off, or past the end, append nothing
        cos, sin = (table[at] for table in cache.rotary)
        scale = config.head_dim**-0.5
        linear = functools.partial(ops.linear, prefetch=True)  # parameters, which nothing in a step writes
        residual, hidden = block_embeds, ops.rms_norm(block_embeds, self.layers[0].input_layernorm.weight, eps)
        for i, layer in enumerate(self.layers):
            attention, keys, values = layer.self_attn, cache.keys[i], cache.values[i]
            bias = None if self.qkv_bias is None else self.qkv_bias[i]
            qkv = linear(torch.cat([features, hidden], 1), self.qkv_weight[i], bias)
            q = qkv.new_empty(batch, rows, config.num_attention_heads, config.head_dim)
            ops.qkv_norm_rope_append_(
                qkv, positions, cos, sin, attention.q_norm.weight, attention.k_norm.weight, eps, q, keys, values
            )
            sinks = attention.attention_sink_bias if config.attention_sinks else None
            out = ops.block_attention(
                q, keys, values, length, scale, config.causal[i], config.window[i], 0.0, sinks, None
            )
            out = linear(out.flatten(2), attention.o_proj.weight, attention.o_proj.bias)
            hidden, residual = ops.add_rms_norm(out, residual, layer.post_attention_layernorm.weight, eps)
            out = linear(ops.silu_mul(linear(hidden, self.gate_up_weight[i])), layer.mlp.down_proj.weight)
            following = self.layers[i + 1].input_layernorm if i + 1 < len(self.layers) else self.norm
            hidden, residual = ops.add_rms_norm(out, residual, following.weight, eps)
        return hidden

    def _forward_fused(
        self, features: Tensor, num_context: Tensor, block_embeds: Tensor, length: Tensor, cache: KVCache
    ) -> Tensor:
        """:meth:`forward` in one op."""
        config = self.config
        weights, head_norms, biases, sinks = self._parameter_lists
        cos, sin = cache.rotary
        out, _ = ops.decoder_layers(
            block_embeds, features, num_context, length, cos, sin, weights, head_norms, biases, sinks,
            self.norm.weight, config.rms_norm_eps, config.head_dim**-0.5, [int(c) for c in config.causal],
            list(config.window), [], cache.keys, cache.values,
        )  # fmt: skip
        return out

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Draft logits through the target's head, with the drafter's own multiplier and softcap.

        Args:
            hidden: ``[..., hidden]``, rows from :meth:`forward`.
            head: ``[..., hidden] -> [..., vocab]``, the target's.

        Returns:
            ``[..., vocab]``.
        """
        logits, cap = head(hidden), self.config.final_logit_softcapping
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        return torch.tanh(logits / cap) * cap if cap else logits

    def scale_embeddings(self, embeds: Tensor) -> Tensor:
        """The target's raw embeddings ``[..., hidden]`` as the drafter takes them: times ``input_embedding_scale``."""
        scale = self.config.input_embedding_scale
        return embeds if scale == 1.0 else embeds * scale

    # ------------------------------------------------------------------------------------------ packed parameters

    def _frequencies(self, device: torch.device | str) -> Tensor:
        return self.config.rope.inverse_frequencies(self.config.head_dim).to(device)

    def _split(self, packed: Tensor) -> tuple[Tensor, ...]:
        key = self.config.num_kv_heads * self.config.head_dim
        return packed.split([self._query, key, key])

    def _packed(self) -> Iterator[tuple[str, Tensor, dict[nn.Parameter, Tensor]]]:
        """Per fused tensor: its checkpoint name, the packed tensor, and its parameters with the view each should be."""
        for i, layer in enumerate(self.layers):
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            for kind, packed in (("weight", self.qkv_weight), ("bias", self.qkv_bias)):
                if packed is not None:
                    parameters = (getattr(projection, kind) for projection in projections)
                    views = dict(zip(parameters, self._split(packed[i]), strict=True))
                    yield f"layers.{i}.self_attn.qkv_proj.{kind}", packed[i], views
            gate, up = self.gate_up_weight[i].chunk(2)
            views = {mlp.gate_proj.weight: gate, mlp.up_proj.weight: up}
            yield f"layers.{i}.mlp.gate_up_proj.weight", self.gate_up_weight[i], views

    def _lists(self) -> tuple[list[Tensor], ...]:
        """The parameters as :func:`dflash.ops.decoder_layers` takes them."""
        config, (weights, head_norms, biases, sinks) = self.config, ([], [], [], [])
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            weights += [layer.input_layernorm.weight, *(p.weight for p in projections)]
            weights += [layer.post_attention_layernorm.weight]
            weights += [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
            head_norms += [attention.q_norm.weight, attention.k_norm.weight]
            if config.attention_bias:
                biases += [p.bias for p in projections]
            if config.attention_sinks:
                sinks.append(attention.attention_sink_bias)
        return weights, head_norms, biases, sinks

    @torch.no_grad()
    def _pack(self) -> None:
        """Make the parameters views of the packed tensors again, with the parameters' values, dtype and device."""
        for name in ("qkv_weight", "qkv_bias", "gate_up_weight"):
            packed = getattr(self, name)
            if packed is not None and (packed.dtype, packed.device) != (self.dtype, self.device):
                self._buffers[name] = torch.empty_like(packed, dtype=self.dtype, device=self.device)
        for _, _, views in self._packed():
            for parameter, view in views.items():
                if parameter.data_ptr() != view.data_ptr() or parameter.is_meta:
                    view.copy_(parameter)
                    parameter.data = view
        self._parameter_lists = self._lists()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        frequencies = self.inv_freq
        super()._apply(fn, recurse)
        if frequencies.device != self.device:
            frequencies = self._frequencies(self.device)
        self._buffers["inv_freq"] = frequencies  # float32 whatever the parameters are
        self._pack()
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self._pack()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()


# ---------------------------------------------------------------------------------------------- loading

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Other names for the same tensors, as serving engines map them.
_PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_DFLASH2_PARTS = ("attention_conv", "mlp_conv", "candidate_selector")
_REFUSED_TENSORS = {
    "lm_head": "a drafter predicts through the target's head; one of its own is not supported",
    "embed_tokens": "a drafter embeds with the target's table; one of its own is not supported",
    "d2t": "a head over part of the vocabulary is not supported",
    "t2d": "a head over part of the vocabulary is not supported",
    "mask_embedding": "a mask embedding of the drafter's own is not supported",
    "mask_hidden": "a mask embedding of the drafter's own is not supported",
}
_MASK_EMBEDDING_FILE = "mask_embedding.pt"


def load_draft(
    draft: str | os.PathLike | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> Drafter:
    """Load a DFlash drafter.

    Args:
        draft: a folder with ``config.json`` and safetensors (one file, or shards with an index), a repository of the
            Hugging Face hub, or a module with a drafter's parameter names and ``.config`` (loaded by the reference
            package or through ``AutoModel``), whose weights are copied. A :class:`Drafter` comes back as it is unless
            ``dtype`` or ``device`` asks for a change, which a copy gets.
        dtype: of the parameters; None for the checkpoint's (that of ``fc.weight``).
        device: of the parameters; None for the CPU, or the module's.
        revision: branch, tag or commit of the repository.

    Returns:
        The drafter, with parameters that ask for no gradient.

    Raises:
        FileNotFoundError: there is no such folder and no such repository within reach, or a file is missing.
        ValueError: the config or the tensors are not those of a drafter that is supported; what is wrong is named.
            Nothing has been allocated then. Or a revision came with a folder.
        TypeError: ``draft`` or ``dtype`` is of another kind.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating torch.dtype or None, got {dtype!r}")
    if isinstance(draft, nn.Module):
        return _from_module(getattr(draft, "_orig_mod", draft), dtype, device)
    if not isinstance(draft, (str, os.PathLike)):
        raise TypeError(f"draft must be a folder, a hub repository or a module, got {type(draft).__name__}")
    return _from_folder(draft_folder(draft, revision), dtype, device)


def _from_module(module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None) -> Drafter:
    if isinstance(module, Drafter):
        same_device = device is None or torch.empty(0, device=device).device == module.device
        if dtype in (None, module.dtype) and same_device:
            return module
        return copy.deepcopy(module).to(device=device, dtype=dtype)
    source, config = type(module).__name__, getattr(module, "config", None)
    if config is None:
        raise TypeError(f"draft must be a drafter with a .config, got {source} without one")
    config = config if isinstance(config, DraftConfig) else DraftConfig.from_config(config, f"{source}.config")
    tensors = module.state_dict()
    names = _match(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    first = next(tensors[given] for given, name in names.items() if name == "fc.weight")
    _floating(source, {given: str(tensors[given].dtype) for given in names if not tensors[given].is_floating_point()})
    if any(tensors[given].is_meta for given in names):
        raise ValueError(f"{source}: its parameters are on the meta device: it holds no weights")
    drafter = Drafter(config, dtype=dtype or first.dtype, device=first.device if device is None else device)
    return _fill(drafter, ((names[given], tensors[given]) for given in names))


def draft_folder(draft: str | os.PathLike, revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded if ``draft`` is a repository; raises as :func:`load_draft` does."""
    name = os.fspath(draft)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for a hub repository, but {name!r} is a folder")
        return folder
    import huggingface_hub

    wanted = ["*.json", "*.safetensors", _MASK_EMBEDDING_FILE]
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # no such name, not found, gated, offline, unreachable, nothing cached
        reason = error
    at = "" if revision is None else f" at revision {revision!r}"
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    raise FileNotFoundError(
        f"draft {name!r} is neither a folder nor a hub repository within reach{at}: {lines[0]}"
    ) from reason


def _from_folder(folder: Path, dtype: torch.dtype | None, device: torch.device | str | None) -> Drafter:
    from safetensors import safe_open

    config = DraftConfig.from_config(_json(folder / "config.json"), str(folder / "config.json"))
    if (folder / _MASK_EMBEDDING_FILE).exists():
        raise ValueError(f"{folder / _MASK_EMBEDDING_FILE}: {_REFUSED_TENSORS['mask_embedding']}")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    for path in _shards(folder):
        for name, (shape, kind) in _header(path).items():
            if name in files:
                raise ValueError(f"{folder}: tensor {name} is in {files[name].name} and in {path.name}")
            files[name], shapes[name], kinds[name] = path, shape, kind
    names = _match(config, shapes, str(folder))
    _floating(str(folder), {given: kinds[given] for given in names if kinds[given] not in _DTYPES})
    first = next(_DTYPES[kinds[given]] for given, name in names.items() if name == "fc.weight")
    drafter = Drafter(config, dtype=dtype or first, device="cpu" if device is None else device)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for path in sorted(set(files.values())):
            with safe_open(path, framework="pt") as file:
                for given in file.keys():  # noqa: SIM118 (not a mapping)
                    if given in names:
                        yield names[given], file.get_tensor(given)

    return _fill(drafter, tensors())


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} is no drafter's folder: it has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold an object, got {type(content).__name__}")
    return content


def _shards(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}")
    mapping = _json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to files")
    for name in sorted(set(mapping.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: weight_map names {name!r}, which is not a file beside it")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: shard {name}, which {index.name} names, is missing")
    return [folder / name for name in sorted(set(mapping.values()))]


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and storage type of every tensor of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file (truncated or corrupt?): {error}") from error


def _match(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> dict[str, str]:
    """Each given tensor's name in the drafter, fused ones under their fused names; raises unless all of it fits."""
    names: dict[str, str] = {}
    for given in shapes:
        name = given
        for prefix, ours in _PREFIXES:
            if name.startswith(prefix):
                name = ours + name[len(prefix) :]
        if not name.endswith("rotary_emb.inv_freq"):
            names[given] = name
    parts = [set(name.split(".")) for name in names.values()]
    second = [part for part in _DFLASH2_PARTS if any(part in words for words in parts)]
    if second:
        raise ValueError(
            f"{source}: this is a DFlash 2 drafter (tensors {', '.join(second)}), which is not supported yet: "
            "it has its own issue"
        )
    for part, why in _REFUSED_TENSORS.items():
        for given, words in zip(names, parts, strict=True):
            if part in words:
                raise ValueError(f"{source}: tensor {given} is not supported: {why}")
    skeleton = Drafter(config, device="meta")
    owners = {parameter: name for name, parameter in skeleton.named_parameters()}
    wanted = {name: (tuple(parameter.shape), {name}) for parameter, name in owners.items()}
    for fused, packed, views in skeleton._packed():
        wanted[fused] = (tuple(packed.shape), {owners[parameter] for parameter in views})
    unknown = [given for given, name in names.items() if name not in wanted]
    if unknown:
        raise ValueError(f"{source}: unknown tensors: {_list(unknown)}")
    givers: dict[str, str] = {}
    for given, name in names.items():
        for parameter in sorted(wanted[name][1]):
            if parameter in givers:
                raise ValueError(f"{source}: tensors {givers[parameter]} and {given} both hold {parameter}")
            givers[parameter] = given
    missing = [name for name in owners.values() if name not in givers]
    if missing:
        raise ValueError(f"{source}: missing tensors: {_list(missing)}")
    for given, name in names.items():
        if shapes[given] != wanted[name][0]:
            raise ValueError(
                f"{source}: tensor {given} must be {list(wanted[name][0])} by the config, got {list(shapes[given])}"
            )
    return names


def _floating(source: str, others: Mapping[str, str]) -> None:
    for name, kind in others.items():
        raise ValueError(f"{source}: tensor {name} is stored as {kind}: quantised drafters are not read")


@torch.no_grad()
def _fill(drafter: Drafter, tensors: Iterator[tuple[str, Tensor]]) -> Drafter:
    targets: dict[str, Tensor] = {name: packed for name, packed, _ in drafter._packed()}
    targets.update(drafter.named_parameters())
    for name, tensor in tensors:
        targets[name].copy_(tensor)
    return drafter.eval()


def _list(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
