"""Every op's bench in one process, one table.

python bench/bench_all.py [--only rms_norm select_tokens] [--threads 1] [--json rows.json] [...]
"""

import importlib

import harness
import torch

from dflash import ops

# Of any release.
OPS = sorted({name.rstrip("_") for name in vars(ops) if name[0] != "_" and hasattr(torch.ops.dflash, name)})


def main() -> None:
    """Measure the ops that the command line names."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=OPS, default=OPS, metavar="OP", help="of " + ", ".join(OPS))
    arguments = parser.parse_args()
    benches = {op: importlib.import_module(f"bench_{op}").cases for op in arguments.only}
    harness.finish(benches, parser, arguments)


if __name__ == "__main__":
    main()
