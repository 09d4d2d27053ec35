#!/usr/bin/env bash
# gguf 0.19.0 has no NaN in MXFP4, where the standard and torch have one.
#
# A block of MXFP4 has a scale of 8 bits, E8M0: 2 ** (code - 127). OCP's "Microscaling Formats (MX)", version 1.0,
# section 5.4.1, makes code 255 NaN, and so does torch.float8_e8m0fnu. Expected: every value of such a block is NaN.
# Seen: gguf's dequantize takes it for 2 ** 128, so 0.5 becomes 2 ** 127, and 1 infinity. A block that means "not a
# number" passes a check for NaN. Exits with 1 if that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 gguf==0.19.0 numpy
cat >"$folder/find.py" <<'PYTHON'
import sys

import gguf
import numpy as np
import torch

block = np.array([[255, *[0x21] * 16]], np.uint8)  # the scale, then codes 1 and 2: 0.5 and 1
values = gguf.quants.dequantize(block, gguf.GGMLQuantizationType.MXFP4)
scale = torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
print(f"torch {torch.__version__} reads the scale as {scale.item()}")
print(f"gguf reads 0.5 and 1 times the scale as {values[0, 0]:g} and {values[0, 16]:g}")
is_as_seen = bool(scale.isnan()) and values[0, 0] == 2.0**127 and np.isposinf(values[0, 16])
sys.exit(not is_as_seen)
PYTHON
"$folder/venv/bin/python" "$folder/find.py" 2>/dev/null
