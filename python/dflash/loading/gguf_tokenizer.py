"""Tokenizers of GGUF files: one id per token of the file, texts split as llama.cpp does (src/llama-vocab.cpp)."""

from __future__ import annotations

from typing import Any

from ..terminal import listed, named, printable
from .gguf import GgufFile

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SHORT|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SHORT|"
_CASED_END = _END.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASES = r"[\p{Lu}\p{Ll}\p{Lt}&&[^" + "\u10d0-\u10ff\U0001d400-\U0001d7ff]]"  # but Georgian and mathematical letters
# How text is split before merges, one expression after the other, by what ``tokenizer.ggml.pre`` says
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("", "default"), (r"[\p{P}$+<=>^~|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys((
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe",
        "chatglm-bpe", "glm4", "glm5",
    ), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"), (_QWEN2,)),
    "qwen35": (_QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")),
    "seed-coder": (
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (_CASED.replace("SHORT", "") + r"\p{N}|" + _CASED_END,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (
        _CASED.replace("SHORT", f"{_SHORT}?") + r"\p{N}{1,3}|" + _CASED_END,
    )),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?{_CASES}+", r"\s?[!-/:-~！-／：-～‘-‟" + "\u3000-。]+", r"\s+$", _CJK, r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), (r"\p{N}{1,3}", _HAN, _MARKED)),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _WORDS, "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", _WORDS),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "granite-docling"), (_WORDS,)
    ),
}  # fmt: skip
_WHOLE = (*[name for name, splits in _SPLITS.items() if splits == (_LLAMA3,)][:8], "glm4", "glm5", "tekken", "minicpm5")
_BEGINS = (*_WHOLE[:8], "tekken")  # a text begins with BOS if the file does not say
_CONTROL, _OWN = (2, 3), 4  # types of tokens: unknown and control ones, and those that users defined
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPM_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def load_tokenizer(file: GgufFile) -> Any:
    """Return the tokenizer of a file, of transformers' plain class.

    Raises:
        ValueError: the file has none, or one of a kind that is not known.
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    kind, pre, tokens, where = keys.get("model"), keys.get("pre", ""), keys.get("tokens"), printable(file.path)
    if not tokens:
        raise ValueError(f"{where} has no tokenizer: tokenizer.ggml.tokens is missing")
    if kind not in ("gpt2", "llama", "gemma4") or (kind == "gpt2" and pre not in _SPLITS):
        name, known = ("pre", list(_SPLITS)[1:]) if kind == "gpt2" else ("model", ["gpt2", "llama", "gemma4"])
        raise ValueError(
            f"{where}: tokenizer.ggml.{name} must be one of {listed(known)}, got {named(str(keys.get(name)))}: "
            "take the model's safetensors"
        )
    tokenizer = _byte_level(keys, pre) if kind == "gpt2" else _sentence_pieces(file, keys)
    # 1. Tokens that are found in a text before it is split
    skips_spaces = kind == "llama" and file.architecture == "phi3"  # after these, as in Phi-3's own tokenizer
    given = [
        AddedToken(
            text, normalized=False, special=type in _CONTROL,
            rstrip=skips_spaces and type in _CONTROL and text not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for text, type in zip(tokens, keys.get("token_type") or [1] * len(tokens), strict=True)
        if text and (type in _CONTROL or type == _OWN)
    ]  # fmt: skip
    tokenizer.add_tokens(given)
    # 2. What a text begins and ends with
    usual = _SPM_IDS if kind == "llama" else {}
    ids = {name: keys.get(f"{name}_token_id", usual.get(name)) for name in _NAMES.values()}
    adds = {"bos": keys.get("add_bos_token", kind == "llama" or (kind == "gpt2" and pre in _BEGINS))}
    adds["eos"] = keys.get("add_eos_token", False)
    added = {name: tokens[ids[name]] for name in adds if adds[name] and ids[name] is not None}
    if added:
        template = [token for token in (added.get("bos"), "$A", added.get("eos")) if token is not None]
        pairs = [(token, ids[name]) for name, token in added.items()]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    # 3. As transformers has it
    special = {name: tokens[ids[key]] for name, key in _NAMES.items() if ids[key] is not None}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    made.chat_template = _template(file)
    return made


def _byte_level(keys: dict[str, Any], pre: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(keys["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in keys.get("merges", ())]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(file: GgufFile, keys: dict[str, Any]) -> Any:
    """Return a tokenizer that merges what is likely, over a text whose spaces are written as U+2581."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    tokens, kinds = keys["tokens"], keys.get("token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if merges := [tuple(merge[1:].split(" ", 1)) for merge in keys.get("merges", ())]:
        merges = [(merge[0] + first, second) for merge, (first, second) in zip(keys["merges"], merges, strict=True)]
    else:
        is_piece = [kind in (1, _OWN) for kind in kinds] if kinds else [True] * len(tokens)
        # Of Gemma the order of tokens says what is merged first
        scores = [-i for i in range(len(tokens))] if file.architecture.startswith("gemma") else keys["scores"]
        pieces = {token: index for token, index in vocabulary.items() if is_piece[index]}
        merges = generate_merges(pieces, {token: scores[index] for token, index in pieces.items()})
    unknown = tokens[keys.get("unknown_token_id", 0)]
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer, begins = Tokenizer(model), keys.get("add_space_prefix", keys["model"] == "llama")
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if begins else spaces
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *strip])
    return tokenizer


def _template(file: GgufFile) -> str | dict[str, str] | None:
    """Return the chat template, or if the file has several, all by name."""
    prefix = "tokenizer.chat_template"
    own = file.metadata.get(prefix)
    named = {key.removeprefix(f"{prefix}."): v for key, v in file.metadata.items() if key.startswith(f"{prefix}.")}
    return {"default": own, **named} if own and named else own
