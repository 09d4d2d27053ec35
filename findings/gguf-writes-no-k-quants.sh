#!/usr/bin/env bash
# gguf 0.19.0 reads 15 types of weights that it does not write, all K-quants and IQ types among them.
#
# `gguf.quants` has `quantize` and `dequantize` side by side. Expected: Q4_K, the type of most files, can be written, or
# the error names the type and where to go. Seen: `quantize` raises NotImplementedError without a word for Q2_K to Q6_K,
# IQ1 to IQ4 and NVFP4, but writes MXFP4 and the ternary types; a tool in Python that makes K-quants needs llama.cpp's
# own program. Exits with 1 if that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q gguf==0.19.0 numpy==2.2.6
cat >"$folder/find.py" <<'PYTHON'
import sys
from importlib.metadata import version

import gguf
import numpy as np


def works(call, *arguments) -> str | None:
    """None, or the words of a NotImplementedError."""
    try:
        call(*arguments)
    except NotImplementedError as error:
        return str(error)


values, read_only = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256), {}
for kind, (columns, size) in gguf.GGML_QUANT_SIZES.items():
    blocks = np.zeros((1, 256 // columns * size), np.uint8)
    if works(gguf.quants.dequantize, blocks, kind) is None:
        words = works(gguf.quants.quantize, values, kind)
        if words is not None:
            read_only[kind.name] = words
print(f"gguf {version('gguf')}: read, not written: {', '.join(read_only)}; words: {set(read_only.values())}")
k_quants = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
sys.exit(not (k_quants < read_only.keys() and not any(read_only.values())))
PYTHON
"$folder/venv/bin/python" "$folder/find.py"
