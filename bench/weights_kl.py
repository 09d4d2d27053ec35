"""How far rounding weights or rows moves the distribution of the next token, here and in llama.cpp.

    python bench/weights_kl.py MODEL.gguf --prompts FILE.jsonl [--count N] [--length N] [--threads N]
    python bench/weights_kl.py MODEL.gguf --prompts FILE.jsonl --files Q4_0 Q4_K_M Q6_K Q8_0

Prints the KL divergence from the file's values in float32: its mean per position with the standard error, and how often
the most probable token is the same. The first ``count`` prompts of at least ``length`` tokens are cut to ``length``. As
in `llama-perplexity --kl-divergence`, which answers for llama.cpp, the positions of their second halves count, all but
the last. Everyone gets the same token ids and is compared with the same file.

With --files, llama.cpp makes a file of each of these mixes from the model, and each is compared with its own values:
what remains is how rows are rounded.

"emulated" multiplies in float32 by operands that were rounded with one scale per so many elements of a weight and of a
row. int8 has one per channel and 64, Q8_0 of llama.cpp one per 32 and 32.
"""

import argparse
import copy
import dataclasses
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import llama_server
import numpy as np
import torch
from internals import prompt_logits
from torch import Tensor, nn

from dflash import ops
from dflash.loading import Pretrained, prompt_ids
from dflash.targets import machine_name
from dflash_tools.measure.datasets import load_conversations

_RANGE = 16.0  # of log probabilities below the largest that llama.cpp's format keeps
_HEADER = 4  # of its uint16 per position: two floats, scale and smallest
_KINDS = ("F32", "BF16", "Q8_0")  # of llama.cpp
_SCALES = ((0, 32), (64, 64), (32, 32))  # elements that share one, of a weight (0: a whole channel) and of a row

Predict = Callable[[Tensor, int], Tensor]  # ids [length], count -> logits [count, vocab] of the last tokens
Divergence = tuple[float, float, float]  # mean, its standard error, share of equal choices


class Reference:
    """Log probabilities of all compared positions, in a file as llama-perplexity reads it.

    Args:
        file: written.
        prompts: ids, all of one length.
        predict: the model that others are compared with.
    """

    def __init__(self, file: Path, prompts: Sequence[Sequence[int]], predict: Predict) -> None:
        self.file, self.prompts = file, list(map(torch.tensor, prompts))
        self.length = len(prompts[0])
        self._count = self.length - self.length // 2
        with file.open("wb") as out:
            for number, logits in enumerate(self._logits(predict)):
                if number == 0:
                    self.vocab = logits.shape[1]
                    out.write(b"_logits_" + struct.pack("<Iii", self.length, self.vocab, len(prompts)))
                    self._start = out.write(np.array(prompts, np.int32).tobytes()) + 20
                most, least = logits.amax(1, keepdim=True), logits.amin(1, keepdim=True)
                least = torch.maximum(least, most - _RANGE)
                scale = (most - least) / 65535
                record = np.zeros(self._shape[1:], np.uint16)
                header = torch.cat([scale, least - logits.logsumexp(1, keepdim=True)], 1)
                record[:, :_HEADER] = header.numpy().view(np.uint16)
                steps = ((logits - least) / scale).round_().clamp_(min=0)
                record[:, _HEADER : _HEADER + self.vocab] = steps.numpy().astype(np.uint16)
                record.tofile(out)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.prompts), self._count - 1, 2 * ((self.vocab + 1) // 2) + _HEADER

    def _logits(self, predict: Predict) -> Iterator[Tensor]:
        """Yield the logits of each prompt's compared positions."""
        for ids in self.prompts:
            yield predict(ids, self._count)[:-1].float()

    def compare(self, predict: Predict) -> Divergence:
        """Return how far a model is from the reference."""
        found, same = [], []
        records = np.memmap(self.file, np.uint16, "r", self._start, self._shape)
        for record, logits in zip(records, self._logits(predict), strict=True):
            header = torch.from_numpy(record[:, :_HEADER].copy().view(np.float32))
            steps = torch.from_numpy(record[:, _HEADER : _HEADER + self.vocab].astype(np.float32))
            expected = steps * header[:, :1] + header[:, 1:]
            weight = torch.where(expected > -_RANGE, expected.exp(), 0)
            found.append((weight * (expected - logits.log_softmax(1))).sum(1))
            same.append(expected.argmax(1) == logits.argmax(1))
        every = torch.cat(found)
        return float(every.mean()), float(every.std() / len(every) ** 0.5), float(torch.cat(same).float().mean())

    def compare_llama(self, program: Path, model: Path, threads: int) -> Divergence:
        """Return what llama-perplexity finds for a GGUF file."""
        sizes = ["-c", self.length, "-b", 8 * self.length, "-t", threads]
        command = [program, "-m", model, *sizes, "--kl-divergence", "--kl-divergence-base", self.file]
        said = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
        mean, error = re.search(r"Mean +KLD: +(\S+) ± +(\S+)", said).groups()
        return float(mean), float(error), float(re.search(r"Same top p: +(\S+)", said)[1]) / 100


def unpacked(file: Path) -> nn.Module:
    """Return the model that a file stands for, in float32."""
    return dataclasses.replace(Pretrained(str(file)), keeps_blocks=False).load_target(torch.float32)


def rounded(x: Tensor, group: int) -> Tensor:
    """Return ``x`` with every ``group`` adjacent elements in 8 bits of a scale of their own."""
    groups = nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales.clamp(min=1e-30)).round_() * scales).flatten(-2)[..., : x.shape[-1]]


def emulated(model: nn.Module, weight: int, row: int) -> Predict:
    """Return the model with the operands of its linear layers rounded."""
    own = copy.deepcopy(model)
    head = own.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)  # not the embedding's any more
    for module in own.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(rounded(module.weight, weight or module.in_features))
            module.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0], row))
    return lambda ids, count: own(ids[None], logits_to_keep=count).logits[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--prompts", required=True, help="JSON lines, as for dflash benchmark --dataset")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--files", nargs="+", default=[], help="mixes of llama.cpp, such as Q4_K_M")
    parser.add_argument("--build", type=Path, default=llama_server.BUILD, help="where llama.cpp is built")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # 1. The prompts
    files, length = Pretrained(str(arguments.model)), arguments.length
    tokenizer, conversations = files.load_tokenizer(), load_conversations(arguments.prompts)
    texts = (prompt_ids(tokenizer, {"prompt": conversation.turns[0]}, bos=True) for conversation in conversations)
    prompts = [ids[:length] for ids in texts if len(ids) >= length][: arguments.count]
    machine = f"{machine_name(torch.device('cpu'))}, {ops.isa()}"
    print(f"{machine}, {arguments.model.name}, {len(prompts)} prompts of {length} tokens")
    print(f"{'':<40}KL divergence        same choice")

    def report(name: str, found: Divergence) -> None:
        print(f"{name:<38}{found[0]:9.5f} ± {found[1]:.5f}  {found[2]:7.2%}", flush=True)

    # 2. One model after the other, so that few are in memory
    programs = llama_server.build(arguments.build)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:

        def in_llama(name: str, file: Path, reference: Reference) -> None:
            report(name, reference.compare_llama(programs / "llama-perplexity", file, arguments.threads))

        for kind in arguments.files:
            file = llama_server.quantized(programs, arguments.model, kind, Path(folder), pure=False)
            reference = Reference(Path(folder) / "logits", prompts, prompt_logits(unpacked(file)))
            report(f"dflash {kind}", reference.compare(prompt_logits(Pretrained(str(file)).load_target(torch.float32))))
            in_llama(f"llama.cpp {kind}", file, reference)
            file.unlink()
        if arguments.files:
            return
        model = unpacked(arguments.model)
        reference = Reference(Path(folder) / "logits", prompts, prompt_logits(model))
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            report(f"dflash packed, {name}", reference.compare(prompt_logits(files.load_target(dtype))))
        in_llama("llama.cpp, the same file", arguments.model, reference)
        report("dflash int8, float32", reference.compare(prompt_logits(model, "int8")))
        for weight, row in _SCALES:
            name = f"emulated, a scale per {weight or 'channel'} and {row}"
            report(name, reference.compare(emulated(model, weight, row)))
        model = model.bfloat16()
        report("dflash bfloat16", reference.compare(prompt_logits(model)))
        report("dflash int8, bfloat16", reference.compare(prompt_logits(model, "int8")))
        del model
        for kind in _KINDS:
            file = llama_server.quantized(programs, arguments.model, kind, Path(folder))
            in_llama(f"llama.cpp {kind}", file, reference)
            file.unlink()


if __name__ == "__main__":
    main()
