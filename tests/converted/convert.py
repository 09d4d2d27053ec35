"""Convert model folders to GGUF by llama.cpp's own converter, in one process: ``convert.py SOURCE OUTTYPE FOLDER...``.

Each folder gets ``model.OUTTYPE.gguf``, or ``error.txt``. Vocabularies are tiny, and not of a kind that it knows. A
last argument ``mtp`` keeps heads for drafts.
"""

import json
import pathlib
import sys
import traceback

source, kind, *folders = sys.argv[1:]
keeps_heads = folders[-1] == "mtp"
sys.path[:0] = [source, f"{source}/gguf-py"]

import conversion.base as base  # noqa: E402
import convert_hf_to_gguf  # noqa: E402


def read_vocabulary(model):
    vocabulary = json.loads((model.dir_model / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    model.gguf_writer.add_token_merges(["a b"])  # llama.cpp loads no such vocabulary without any
    return tokens, [base.gguf.TokenType.NORMAL] * len(tokens), "default"


def find(*names, own=convert_hf_to_gguf.get_model_class, **options):
    made = own(*names, **options)
    made.set_vocab, made.no_mtp = base.TextModel._set_vocab_gpt2, not keeps_heads
    return made


base.TextModel.get_vocab_base = read_vocabulary
convert_hf_to_gguf.get_model_class = find
for folder in map(pathlib.Path, folders[:-1] if keeps_heads else folders):
    sys.argv = ["convert", str(folder), "--outfile", str(folder / f"model.{kind}.gguf"), "--outtype", kind]
    sys.argv += ["--model-name", "tiny"]  # llama.cpp looks for words of Phi-3's vocabulary in a model of that name
    try:
        convert_hf_to_gguf.main()
    except (Exception, SystemExit):
        (folder / "error.txt").write_text(traceback.format_exc())
