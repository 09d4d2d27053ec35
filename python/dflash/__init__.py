"""Lossless speculative decoding with DFlash block-diffusion drafters."""

import importlib as _importlib
import importlib.metadata as _metadata
import importlib.util as _util
import sys as _sys
import typing as _typing
import warnings as _warnings

if _typing.TYPE_CHECKING:
    from .public import *  # noqa: F403
    from .public import __all__ as __all__

__version__ = "0.1.0"

if any(_metadata.distributions(name="dflash")):
    _warnings.warn(
        "the distributions dflash and dflash-engine are both installed, and both own the import name dflash: "
        "uninstall both, then install one",
        stacklevel=2,
    )


_MOVED = {
    **{"serve": "dflash_serve", "train": "dflash_tools.train", "doctor": "dflash_tools.doctor"},
    "learn": "dflash_tools.learn (its Recorder is dflash_serve.record.AnswerRecorder, its Store dflash.answers.Store)",
    "evaluate": "dflash.loading (models, prompts, chats) and dflash_tools.measure",
    "gguf": "dflash.loading.gguf",
}


class _Moved:
    """Says where a module of earlier versions is now; asked for modules that no other finder knows."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == __name__ and module in _MOVED:
            raise ModuleNotFoundError(f"{name} is now {_MOVED[module]}", name=name)


_sys.meta_path.append(_Moved)


def __getattr__(name: str) -> object:
    """Import the public names, and with them torch and transformers, when the first of them is asked for.

    The command takes its port before, and ``import dflash`` takes no time.
    """
    if name in _MOVED:
        raise AttributeError(f"{__name__}.{name} is now {_MOVED[name]}")
    if not name.startswith("__") and _util.find_spec(f"{__name__}.{name}") is not None:
        return _importlib.import_module(f".{name}", __name__)
    if not name.startswith("__") or name == "__all__":
        public = _importlib.import_module(".public", __name__)
        globals().update({each: getattr(public, each) for each in (*public.__all__, "__all__")})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_importlib.import_module(".public", __name__).__all__})
