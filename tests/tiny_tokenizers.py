"""Small tokenizers of the kinds that make streaming hard: half characters, byte fallback, cleaned spaces."""

import itertools
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def byte_level(size: int = 97) -> PreTrainedTokenizerFast:
    """Like GPT-2's: a token is a run of bytes, so a character may spread over several tokens."""
    shown = bytes_to_unicode()
    letters = "abcdefghij \n"
    pieces = ["<eos>", "<mask>"]
    pieces += ["".join(shown[b] for b in letter.encode()) for letter in letters]
    for text in ("é", "€", "😀"):
        pieces += [shown[b] for b in text.encode()]
    pieces += ["".join(shown[b] for b in text.encode()) for text in ("é", " 😀", "a€")]
    pieces += [shown[ord(a)] + shown[ord(b)] for a, b in itertools.product("abcdefgh ", "abcdefghij")]
    vocabulary = {piece: index for index, piece in enumerate(list(dict.fromkeys(pieces))[:size])}
    assert len(vocabulary) == size
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<mask>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Like Llama 2's: a metaspace, and ``<0xNN>`` tokens that only decode as complete characters."""
    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefgh.", "▁a", "▁bc", "▁d", "ef", "é"]
    tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def word_pieces() -> PreTrainedTokenizerFast:
    """Like BERT's: ``##`` joins a piece to the one before, and spaces before punctuation are cleaned up."""
    pieces = ["[UNK]", "<eos>", *"abcd", "##e", "##fg", ".", ",", "!", "?", "'", "n't", "'s", "'re", "s", "t"]
    tokenizer = Tokenizer(WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", clean_up_tokenization_spaces=True
    )


def random_tokenizer(chance: random.Random) -> PreTrainedTokenizerFast:
    """One of the kinds above, with random pieces, with or without byte tokens, cleaning and a stripped first space."""
    kind = chance.choice([BPE, models.Unigram, WordPiece, byte_level])
    if kind is byte_level:
        return byte_level()
    pieces = ["".join(chance.choices("abcd.,!?' né€", k=chance.randint(1, 4))) for _ in range(30)]
    if kind is WordPiece:
        pieces = [chance.choice(["", "##"]) + piece.replace(" ", "") for piece in pieces] + ["n't", "'s", "'", "."]
    has_bytes = kind is BPE or (kind is models.Unigram and chance.random() < 0.5)
    tokens = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256 * has_bytes)), "▁"]
    tokens = [*dict.fromkeys(tokens + [piece.replace(" ", "▁") for piece in pieces if piece])]
    vocabulary = {piece: index for index, piece in enumerate(tokens)}
    if kind is BPE:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    elif kind is WordPiece:
        tokenizer = Tokenizer(WordPiece(vocab=vocabulary, unk_token="<unk>"))
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=chance.random() < 0.3)
    else:
        tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in tokens], 0))
    if kind is not WordPiece:
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts[: chance.choice([3, 4])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=kind is not BPE and chance.random() < 0.7,
    )  # fmt: skip


def words() -> PreTrainedTokenizerFast:
    """One token per word: streaming never has to hold text back."""
    pieces = {f"w{index}": index for index in range(97)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(pieces, unk_token="w0")))


_TURNS = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> <line> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def spoken(template: str | None = _TURNS) -> PreTrainedTokenizerFast:
    """One token per word, ``<end>`` to stop, and chat turns that end with ``<end> <line>``."""
    marks = ["<unk>", "<end>", "<bos>", "<line>", "<user>", "<assistant>", "<system>"]
    pieces = {piece: index for index, piece in enumerate([*marks, *(f"w{index}" for index in range(len(marks), 97))])}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    out = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", bos_token="<bos>", pad_token="<end>"
    )
    out.chat_template = template
    return out
