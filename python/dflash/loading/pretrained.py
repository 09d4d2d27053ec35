"""Load targets and tokenizers with transformers. Their own Python code runs only if the caller allows it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..files import read_json
from ..targets import is_packed
from ..terminal import listed, named, printable, shortened
from .fill import packed_for
from .folder import check_all_used, check_target_config, check_target_size, check_target_weights, read_headers
from .gguf import GgufFile, find_gguf, read_gguf
from .gguf_architectures import read_config
from .gguf_target import load_weights
from .gguf_tokenizer import load_tokenizer
from .quantized import QuantizedFolder, Scheme, read_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "adapter_config.json"
_PROBES = (  # spaces, digits, capitals, marks, accents, scripts: vocabularies split these in their own ways
    *("Hello world", " a", "a  b\n\n c\t", "1234567 3.14", "I'm DON'T", "na\u00efve Stra\u00dfe"),
    "\u6771\u4eac \u05e9",
    *("x\u0301 \ufb01", "\U0001f642", "f(x)=[x]; // y"),
)
_JSON_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Pretrained:
    """A target and its tokenizer, as files that transformers loads. Never asks whether code in them may run.

    Methods raise ``ValueError`` for files that are broken or need code that may not run, ``OSError`` if there are none.

    Attributes:
        name: a folder, a hub id, or a GGUF file as `dflash.loading.gguf.find_gguf` takes it.
        trust_remote_code: run the Python code that comes with them, with the rights of this process.
        advice: what to do about code that may not run, for the error.
        local_files_only: download nothing.
        pictures: load the vision tower too.
        keeps_blocks: leave weights of GGUF files and quantized folders packed where kernels read them; else they
            become dense.
    """

    name: str | os.PathLike
    trust_remote_code: bool = False
    advice: str = "it would have your rights, so read it first, then allow it with --trust-remote-code"
    local_files_only: bool = False
    pictures: bool = False
    keeps_blocks: bool = True

    @functools.cached_property
    def gguf(self) -> GgufFile | None:
        """The GGUF file that holds it all, checked; None if there is none."""
        path = find_gguf(self.name, local_files_only=self.local_files_only)
        if path is None:
            return None
        if (file := read_gguf(path)).is_draft:
            what = f"is a DFlash drafter ({file.architecture}), not a target: give it as draft"
            raise ValueError(f"{printable(path)} {what}")
        _require("accelerate", f"{printable(self.name)} needs the accelerate package: pip install '.[gguf]'")
        if self.pictures:
            raise ValueError(f"{printable(path)} has no vision tower that is read here: leave --pictures out")
        return file

    def load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if self.gguf is not None:
            with self._readable_errors():
                return load_tokenizer(self.gguf)
        tokenizer = self._load(AutoTokenizer)
        if type(tokenizer) is not PreTrainedTokenizerFast and (path := self.find("tokenizer.json")) is not None:
            with self._readable_errors():
                _compare_tokenizers(tokenizer, path)
        return tokenizer

    def load_processor(self) -> Any:
        """Load what makes text and pictures to inputs of the model."""
        from transformers import AutoProcessor

        _require("PIL", "pictures need the pillow package: pip install '.[pictures]'")
        processor = self._load(AutoProcessor)
        if not hasattr(processor, "image_processor"):
            raise ValueError(f"{printable(self.name)} has no processor of pictures: leave --pictures out")
        return processor

    @property
    def _model_class(self) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        return AutoModelForImageTextToText if self.pictures else AutoModelForCausalLM

    def load_config(self) -> Any:
        """Load the config, and refuse one that would have transformers download kernels and run them."""
        from transformers import AutoConfig

        if self.gguf is not None:
            with self._readable_errors(), self._quiet():
                return read_config(self.gguf)
        model = self._base() or self
        config = model._load(AutoConfig)
        if getattr(config, "quantization_config", None) is None and hasattr(config, "quantization"):
            config.quantization_config = config.quantization  # the older of MLX's two keys
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        for kernel in (getattr(part, "_attn_implementation", None) for part in parts):
            if isinstance(kernel, str) and "/" in kernel:
                raise ValueError(
                    f"{printable(model.name)}: attn_implementation in config.json asks for code from the hub, "
                    f"{shortened(kernel)}: remove the key, attention does not need it"
                )
        return config

    def load_target(self, dtype: Any, device: Any = "cpu") -> Any:
        """Load the target, in eval mode. Weights that are missing are refused, where transformers draws random ones."""
        config, base = self.load_config(), self._base()
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        # 1. Judge the files before transformers allocates anything
        is_cpu, scheme, folder = torch.device(device).type == "cpu", None, (base or self).folder
        if self.gguf is not None:
            files, dtype = [self.gguf.path], self.gguf.dtype if dtype == "auto" else dtype
        else:
            said = (base or self).find("hf_quant_config.json")
            stored = _stored_dtype(config, is_cpu) if dtype == "auto" else dtype
            packs = bool(self.packs(stored, device))
            scheme = read_scheme(config, said, folder, is_cpu=is_cpu, packs=packs, is_adapted=base is not None)
            if scheme is not None:
                _require("accelerate", f"{printable(self.name)} needs the accelerate package: pip install '.[gguf]'")
                folder = self._download()
            files = [] if folder is None else check_target_weights(folder)
            dtype = stored if scheme is not None else dtype
        # 2. Read weights that stay packed, or that transformers would not read right, if all fit their places
        if self.gguf is not None or (scheme is not None and files and all(x.suffix == ".safetensors" for x in files)):
            with self._readable_errors():  # the device may be full
                return self._load_stored(config, scheme, files, dtype, self.packs(dtype, device)).to(device)
        # 3. All others
        if files:
            is_quantized = scheme is not None or hasattr(config, "quantization_config")
            check_target_size(self.load_empty_target(config), files, is_quantized=is_quantized)
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # its own error names no tensor
        target, found = self._load(self._model_class, config=config, dtype=dtype, **options)
        if other := [f"{name} {[*shape]} instead of {[*ours]}" for name, shape, ours in found["mismatched_keys"]]:
            raise ValueError(
                f"{printable(self.name)}: tensors have other shapes than config.json says: {listed(other)}"
            )
        if names := found["unexpected_keys"]:
            headers = read_headers([file for file in files if file.suffix == ".safetensors"])
            check_all_used(target, {name: headers.get(name, "") for name in names}, self.name)
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"{printable(self.name)} has no weights for {listed(missing)}: its files are incomplete, or "
                "config.json belongs to another model"
            )
        with self._readable_errors():  # the device may be full
            return target.to(device).eval()

    def packs(self, dtype: Any, device: Any) -> str:
        """Return the type of device for which weights in few bits stay so, with rows of ``dtype``; empty if none."""
        return packed_for(dtype, device) if self.keeps_blocks else ""

    def _load_stored(
        self, config: Any, scheme: Scheme | None, files: Sequence[Path], dtype: torch.dtype, packs: str
    ) -> Any:
        """Build the target without memory for its weights, and give it those of the files."""
        from accelerate import init_empty_weights
        from transformers import GenerationConfig

        config, path, where = copy.deepcopy(config), self.name, self.name
        config.__dict__.pop("quantization_config", None)
        with self._quiet():
            with init_empty_weights(include_buffers=False):
                target = self._model_class.from_config(config, dtype=dtype, trust_remote_code=self.trust_remote_code)
            if self.gguf is None:
                QuantizedFolder(self.name, read_headers(files), scheme, target, packs).load()
            else:
                load_weights(target, self.gguf, packs=packs)
                self.gguf.__dict__.pop("_bytes", None)  # the mapped file: copies of the target must not hold it
                path, where = self.gguf.path, self.gguf.path.parent
                target.name_or_path = str(path)
            target.generation_config = GenerationConfig.from_model_config(target.config)
            with contextlib.suppress(OSError):  # of the folder, as transformers does
                found = GenerationConfig.from_pretrained(where, local_files_only=self.local_files_only)
                target.generation_config = found
        if is_packed(target):
            target.save_pretrained = functools.partial(_refuse_to_save, printable(path))
        return target.eval()

    def load_empty_target(self, config: Any = None) -> Any:
        """Build the target from its config, on the meta device and without its weights."""
        config = copy.deepcopy(self.load_config() if config is None else config)
        with torch.device("meta"), self._readable_errors():
            return self._model_class.from_config(config, trust_remote_code=self.trust_remote_code)

    def load_stop_token_ids(self, config: Any) -> list[int]:
        """Return the stop tokens of the generation_config, else of the text ``config``."""
        from transformers import GenerationConfig

        stops = getattr(config, "eos_token_id", None)
        with contextlib.suppress(OSError), self._readable_errors():  # there may be no generation_config
            stops = GenerationConfig.from_pretrained(self.name, local_files_only=self.local_files_only).eos_token_id
        return [] if stops is None else list(stops) if isinstance(stops, list | tuple) else [stops]

    def _load(self, loader: Any, **options: Any) -> Any:
        if (folder := self.folder) is not None:  # check the JSON files first, so that an error names the file
            check_target_config(folder)
            for path in filter(Path.is_file, (folder / name for name in _JSON_FILES)):
                read_json(path)
        options |= {"trust_remote_code": self.trust_remote_code, "local_files_only": self.local_files_only}
        with self._readable_errors(), self._quiet():
            return loader.from_pretrained(self.name, **options)

    @property
    def folder(self) -> Path | None:
        """Return the local folder, of a hub id its snapshot so far. None for a GGUF file, or if there is none."""
        if self.gguf is not None:
            return None
        if Path(self.name).is_dir():
            return Path(self.name)
        found = self.find("config.json") or self.find(_ADAPTER)
        return None if found is None else found.parent

    def find(self, name: str) -> Path | None:
        """Return a file of the folder, or of the hub id, from which it is downloaded. None if there is none."""
        from transformers.utils import cached_file

        with contextlib.suppress(OSError, ValueError, TypeError):
            return Path(cached_file(self.name, name, local_files_only=self.local_files_only))
        return None

    def _download(self) -> Path:
        """Return a folder with all weights: a local one, or the snapshot of a hub id."""
        if Path(self.name).is_dir():
            return Path(self.name)
        from huggingface_hub import snapshot_download

        patterns = {"allow_patterns": ["*.safetensors", "*.json"], "ignore_patterns": ["*/*"]}
        return Path(snapshot_download(str(self.name), local_files_only=self.local_files_only, **patterns))

    def _base(self) -> Pretrained | None:
        """Return the model that these files adapt if they are those of a PEFT adapter only, else None."""
        folder = self.folder
        if folder is None or (folder / "config.json").is_file() or not (folder / _ADAPTER).is_file():
            return None
        name = read_json(folder / _ADAPTER).get("base_model_name_or_path")
        if not isinstance(name, str):
            where = printable(folder / _ADAPTER)
            raise ValueError(f"{where}: base_model_name_or_path must be a name, got {shortened(name)}")
        _require("peft", f"{printable(self.name)} is an adapter of {named(name)}: pip install peft")
        return dataclasses.replace(self, name=name)

    @contextlib.contextmanager
    def _readable_errors(self) -> Iterator[None]:
        """Turn what transformers and its libraries raise for these files into errors of the documented types."""
        from safetensors import SafetensorError

        name = printable(self.name)
        try:
            yield
        except (ValueError, TypeError, OSError) as error:
            if "trust_remote_code" not in str(error):
                if isinstance(error, OSError) or str(self.name) in str(error):
                    raise
                raise ValueError(f"{name} cannot be loaded: {error}") from error
            raise ValueError(f"{name} needs Python code of its own, which is not run unasked: {self.advice}") from error
        except SafetensorError as error:
            raise ValueError(f"{name}: its weights are truncated or corrupt: {error}") from error
        except Exception as error:  # of a broken file: tokenizers raises bare Exceptions, transformers KeyErrors
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ValueError(f"{name} cannot be loaded: {reason}") from error

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Silence transformers' reports on a checkpoint: they print names of its tensors, which may steer a terminal.

        Progress bars are for downloads.
        """
        from transformers.utils import logging

        with contextlib.ExitStack() as stack:
            stack.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
            if self.local_files_only and logging.is_progress_bar_enabled():
                stack.callback(logging.enable_progress_bar)
                logging.disable_progress_bar()
            yield


def _compare_tokenizers(tokenizer: Any, path: Path) -> None:
    """Warn of a text for which the tokenizer's class makes other ids than its tokenizer.json does."""
    from tokenizers import Tokenizer

    file = Tokenizer.from_file(str(path))
    file.no_padding()
    file.no_truncation()
    for text in _PROBES:
        ours: object = "an error"
        theirs = ours
        with contextlib.suppress(Exception):  # of a text that a vocabulary cannot express
            ours = tokenizer.encode(text, add_special_tokens=False)
        with contextlib.suppress(Exception):
            theirs = file.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            warnings.warn(
                f"{printable(path)} makes {theirs} of {text!r}, and the class {type(tokenizer).__name__}, which is "
                f"used, makes {ours}: if the file is right, write PreTrainedTokenizerFast as tokenizer_class into "
                "tokenizer_config.json",
                stacklevel=3,
            )
            return


def _require(package: str, advice: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(advice)


def _refuse_to_save(path: str, *_: object, **_options: object) -> None:
    raise ValueError(f"a target with packed weights cannot be saved: its file is {path}")


def _stored_dtype(config: Any, is_cpu: bool) -> torch.dtype:
    """Return the dtype of "auto" for a quantized folder. Kernels of CPUs do not take float16, and float32 holds it."""
    text = config.get_text_config(decoder=True)
    found = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.bfloat16
    return torch.float32 if is_cpu and found == torch.float16 else found


def load_target(
    name: str | os.PathLike, *, dtype: torch.dtype | Literal["auto"] = "auto", device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """Load a target for `dflash.generate`, in eval mode.

    On a CPU the weights of a GGUF file stay in its blocks (``docs/files.md`` has the types): the file is mapped and
    packed tensor by tensor. Folders in AWQ, GPTQ, MLX, compressed-tensors' integers and MXFP4 stay packed too; those in
    FP8 and NVFP4 become dense, with a warning (``docs/quantized.md``). In float16 all become dense. On a GPU linear
    layers in MLX, AWQ, GPTQ, compressed-tensors' integers and GGUF files stay packed, and experts of MLX and GGUF
    (``docs/weights.md``).
    Targets to train for must be dense: load these with transformers.

    Args:
        name: a GGUF file, a folder, a hub id, or ``owner/name:FILE.gguf`` on the hub.
        dtype: of the activations and of all weights that are not packed; "auto" for that of the files, bfloat16 for
            quantized GGUF files, on a CPU float32 for quantized folders in float16.
        device: where it runs.
        trust_remote_code: run the Python code that comes with it, with the rights of this process.

    Raises:
        ValueError: a file is broken, a tensor has no place in the model, weights are stored in a way that cannot be
            read, or the files need Python code that may not run.
        OSError: there is no such file.
    """
    return Pretrained(name, trust_remote_code).load_target(dtype, device)
