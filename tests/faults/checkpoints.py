"""Drafters on disk for the tests of hostile configs and files, and a child process that may not use much memory."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path

from draft_variants import config_dict, random_tensors, save_checkpoint
from process import python

from dflash import DraftConfig

# What reading a hostile file may cost: a second of a quiet machine, and machines differ.
MEGABYTES, SECONDS = 50, 15.0
TAPS = [1, 9, 17, 25, 33]


def published(**changes) -> dict:
    """Return a valid config in the published layout, with changes; dotted names reach into objects."""
    config = config_dict() | {"num_target_layers": 36, "rope_scaling": None, "sliding_window": None}
    config["dflash_config"] = {"mask_token_id": 100, "target_layer_ids": list(TAPS)}
    return _changed(config, changes)


def speculators(**changes) -> dict:
    """Return the same drafter's config in the speculators layout."""
    layer = {
        name: value
        for name, value in config_dict().items()
        if name not in ("dflash_config", "block_size", "architectures")
    }
    config = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS], "block_size": 16, "draft_vocab_size": 101,
        "mask_token_id": 100, "transformer_layer_config": layer | {"num_target_layers": 36},
    }  # fmt: skip
    return _changed(config, changes)


def _changed(config: dict, changes: dict) -> dict:
    config = json.loads(json.dumps(config))
    for path, value in changes.items():
        *outer, key = path.split(".")
        place = config
        for name in outer:
            place = place[name]
        place[key] = copy.deepcopy(value)
    return config


def save_drafter(folder: Path, config: dict | None = None) -> Path:
    """Write the weights of the valid config, and ``config`` instead of it."""
    valid = DraftConfig.from_config(published())
    return save_checkpoint(folder, published() if config is None else config, random_tensors(valid))


LOAD_DRAFT = """
import torch
from dflash import load_draft as load
"""
_CHILD = """
import json, resource, sys, time, warnings
warnings.simplefilter("ignore")
load(sys.argv[1])
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[2]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for folder in sys.argv[3:]:
    begun = time.process_time()
    try:
        load(folder)
        kind, message = "loaded", ""
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    print(json.dumps([kind, message.replace(folder, ""), time.process_time() - begun]), flush=True)
"""


def assert_refused(names: Iterable[str], found: list[tuple[str, str, float]], length: int = 1000) -> None:
    """Check that `load_in_child` found each folder refused by this name, in a short message and in time."""
    for name, (kind, message, seconds) in zip(names, found, strict=True):
        assert (kind, name in message) == ("ValueError", True), (name, kind, message)
        assert len(message) < length
        assert seconds < SECONDS, (name, seconds)


def load_in_child(good: Path, folders: list[Path], load: str = LOAD_DRAFT) -> list[tuple[str, str, float]]:
    """Load each folder in one process that has 50 MB to spare. Returns an error's type and text, and CPU seconds.

    ``load`` is code that defines a function of this name. It loads ``good`` before the memory is limited.
    """
    done = python(load + _CHILD, good, MEGABYTES, *folders)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
