"""What a run was measured on and with."""

import argparse
import os
import platform
import shlex
import sys

import harness
import torch
import transformers

import dflash
from dflash import ops


def header(arguments: argparse.Namespace) -> dict:
    """Return the header of the JSON file."""
    return {
        "command": "python " + shlex.join(sys.argv),
        "commit": harness.commit(),
        "machine": {
            "processor": harness.processor(),
            "processors": os.cpu_count(),
            "architecture": platform.machine(),
        },
        "isa": ops.isa(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dflash-engine": dflash.__version__,
        },
        "dtype": arguments.dtype,
        "temperature": arguments.temperature,
        "busy_processes": arguments.busy,
        "new_tokens_at_most": arguments.new,
    }
