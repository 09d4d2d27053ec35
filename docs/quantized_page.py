"""The prose of docs/quantized.md, for docs/make_quantized.py."""

HEAD = """# Quantized targets

A target that another library has quantized and loaded runs as it is: the copy uses the library's own layers on the same
memory, and the text is the one that the quantized model writes. The tests compare:

- **Greedy, fp32** (the table): token for token equal to `generate(do_sample=False)` of the same quantized model. The
  model is the target of the [trained pair](demo-pair.md) inside the package, whose margins are wide. If activations are
  rounded to 8 bits, a last-bit difference in attention can move a value by a whole rounding step, so a near-tie may
  fall the other way, as in bf16.
- **bf16**: bit for bit the text of one-token mode at the same shapes (`Generator(target, None, block_size=16)`), with
  all drafts accepted, with some, and with none (`tests/quantized`).
- **Rows**: an outlier in one row leaves the bits of the other rows unchanged in every method that runs, and changes
  them in every method that is refused (`tests/quantized`).
- **Memory shared**: "all" means that a generator adds no weights, scales or codes to those of the model.

Quantize the target only; drafters are loaded in their own dtype. `fused=True` and `weights="int8"`,
by which this package [quantizes a target itself](weights.md), are refused for what another library has loaded.

Recurrent targets such as Qwen3.5 run quantized in the same way: `tests/quantized` compares one with torchao, quanto and
compressed-tensors. On CPUs with AVX512-BF16, bitsandbytes nf4 fails at the first pass of a layer unless its inputs are
a multiple of 64 and its outputs a multiple of 32. Gated DeltaNets have two layers with one output per head; unless the
heads are a multiple of 32, load with `llm_int8_skip_modules=["in_proj_a", "in_proj_b", "lm_head"]`.

## Folders on a CPU

`dflash.load_target(FOLDER)` and every command read these checkpoints themselves on a CPU, without the library. Weights
that stay packed are multiplied as those of [GGUF files](files.md#the-text): rows are rounded to 8 bits, 32 elements by
one scale. Scales that a checkpoint has for its inputs are left out. What becomes dense is counted in a warning.

| folder | float32, bfloat16 | the same values, bit for bit |
| --- | --- | --- |
| AWQ: gemm layout, 4 bits | packed | autoawq 0.2.9 |
| GPTQ: 4 and 8 bits, zero points of v1 and v2, `desc_act` | packed | GPTQModel 7.7.0 |
| compressed-tensors: int4, int8; groups, channels, `weight_g_idx` | packed | compressed-tensors 0.20.0 |
| MXFP4: gpt-oss, compressed-tensors | packed | transformers, compressed-tensors |
| MLX: 4 and 8 bits in groups of 32, 64 and 128, MXFP4; per layer | packed | mlx 0.32.4, in float32 |
| MLX: 2, 3, 5 and 6 bits, MXFP8, NVFP4 | dense | mlx 0.32.4, in float32 |
| FP8: in blocks, per channel or tensor | dense | transformers, compressed-tensors |
| NVFP4 | dense | compressed-tensors |
| bitsandbytes, torchao, quanto | read by transformers and the library | |
| AWQ and GPTQ in other layouts or bits, sparse weights | refused by name | |
| Model-Optimizer in integers or with AWQ (`quant_algo`) | refused by name | |
| `kv_cache_scheme`, `transform_config`, `pre_quant_scale` | refused by name | |

`tests/quantized` compares; GPTQ, and `weight_g_idx` with compressed-tensors 0.12.2, were compared by hand. FP8 and
NVFP4 of Model-Optimizer are read by their published layout, and were not compared with the library. A hub id that says
so only in `hf_quant_config.json` is recognized, or refused, before its weights are downloaded.

Folders of [mlx-community](https://huggingface.co/mlx-community) open by their names. Bits and groups of a layer follow
from its tensors, and experts stay stacked as MLX has them. A weight of 4 bits takes 5 bits of memory, or 6 in groups of
32, because its scale and its minimum are kept in float32. In bfloat16 MLX on a CPU rounds `scale * code` before it adds
the minimum. Here the sum is rounded once, so the last bit of a weight may differ. Families whose other tensors MLX
changes too, such as Qwen3-Next and gpt-oss, are refused by name.

Groups and inputs that are not multiples of 32 make a layer dense, as do a `g_idx` with groups of several sizes, and
experts of one layer that are stored in several ways or orders. Experts of Qwen's mixtures and of gpt-oss stay packed;
so do embeddings. Columns of one group lie next to each other in memory: where a `g_idx` reorders them, rows are
reordered once for all weights of the same order, and the layers run op by op. The head is dense in most of these
checkpoints, so text is that of one-token decoding at the same block size. A checkpoint in float16 runs in float32
unless `dtype` says otherwise. float16, `dflash train` and `dflash learn` make all of it dense.

Under a PEFT adapter transformers loads these with the library, except for MLX's, which it cannot read, and
Model-Optimizer's, whose scales it leaves out: they are read here, and become dense.

## Folders on a GPU

`dflash.load_target(FOLDER, device="cuda")` and every command read MLX, AWQ, GPTQ and the `pack-quantized` integers of
compressed-tensors themselves, if the [CUDA kernels](weights.md#on-gpus) run. Linear layers stay packed, in float16 or
bfloat16. They become dense, with a warning, if their groups are not multiples of 32 columns, their features not a
multiple of 8, or their scales more than the kernels hold. Experts of MLX stay packed; its embeddings become dense, and
so does all of Model-Optimizer. Other experts, adapters, float32 and all other libraries are loaded by transformers.

A value is `(code - zero point) * scale`, rounded once to the dtype of the model: in the checkpoint's own dtype that is
what the library computes. A float16 checkpoint in bfloat16 keeps its float16 scales; they are not rounded first. The
path has not run on a GPU.

Every tensor of a folder, quantized or not, must have a place in the model or be known to change nothing (`inv_freq`,
heads that draft, scales of a cache in 8 bits, towers for other inputs than text). Else the error names it.

## Models of other libraries
"""

NOTES = {
    "bitsandbytes nf4": "on CPUs with AVX512-BF16 the layers are packed at their first pass and compute in bf16",
    "bitsandbytes nf4, double": "as above; the packing undoes the double quantization",
    "bitsandbytes int8, threshold 0": "`llm_int8_threshold=0.0`; one scale per row",
    "bitsandbytes int8, threshold 6": "the default: all rows decide together which columns are outliers",
    "torchao int8 weights": "",
    "torchao fp8 weights": "",
    "torchao intx weights": "4 bits in int8",
    "torchao int8 dynamic, per row": "the default granularity; one scale per row",
    "torchao int8 dynamic, per tensor": "one scale for all rows",
    "quanto int8": "transformers cannot save it",
    "quanto int4": "transformers cannot save it",
    "quanto fp8": "transformers cannot save it",
    "compressed-tensors W8A8, per token": "decompressed when a generator is made, as at the model's first pass",
    "compressed-tensors W8A8, per tensor": "dynamic scales; one for all rows",
    "compressed-tensors W4A16": "decompressed, as above",
    "compressed-tensors FP8, dynamic": "decompressed, as above; one scale per row",
    "compressed-tensors FP8, static": "decompressed, as above; scales from calibration do not depend on rows",
    "torchao int4 weights": "needs mslk, or a GPU",
    "torchao fp8 dynamic": "needs a GPU of compute capability 8.9",
    "FP8, fine-grained, on the fly": "needs a GPU",
    "NVFP4": "needs the kernels package and a GPU of compute capability 10.0; on the fly only",
    "HQQ": "needs hqq, not installed here; transformers 5.23 cannot quantize with it yet",
}

BELOW = """## Refused by name

- **One scale for all rows.** Dynamic activation scales per tensor (torchao `PerTensor()`, compressed-tensors' strategy
  `"tensor"`, `torch.ao`'s `quantize_dynamic`): a row's numbers then depend on the 15 other rows of a block. Scales per
  row and static scales run.
- **Outliers found over all rows.** bitsandbytes int8 with a threshold. Load it with `llm_int8_threshold=0.0`, or change
  `llm_int8_threshold` in the `quantization_config` of a saved checkpoint's `config.json`.
- **Caches of keys and values quantized by compressed-tensors** (`kv_cache_scheme`): dflash runs its own cache.

## Memory

The copy shares parameters and buffers, tensors in attributes of modules, and the state objects of bitsandbytes
(`quant_state`, `CB`). Their layers move tensors between parameter and state at the first pass. With two states, an int8
target would lose its scales. Weights that a library makes at the first pass (compressed-tensors, GPTQModel) are made in
your model before the copy is made, and then shared.

On random weights of Qwen3-0.6B's shape with 8 layers in bf16, one thread of an AMD EPYC, torch 2.13.0:

| method | model | held by the copy only | resident memory | before states were shared |
| --- | --- | --- | --- | --- |
| bitsandbytes nf4, double | 96 MiB | 0.0 MiB | +44 MiB | 2.0 MiB held twice, +56 MiB |
| bitsandbytes int8, threshold 0 | 152 MiB | 0.0 MiB | +49 MiB | the scales were lost |
| compressed-tensors W4A16 | 280 MiB | 0.0 MiB | +378 MiB | 240 MiB held twice, +603 MiB |

    python bench/quantized_memory.py METHOD --layers 8

Resident memory counts a generator and its first answer. For compressed-tensors it includes the decompressed weights of
the model itself, which transformers' own first pass makes too, so no memory is saved.

## GPTQ

GPTQModel's dependencies ask for a newer torch. Install it without them to try it by hand:

```bash
pip install -r tests/quantized/requirements.txt datasets
pip install --no-deps gptqmodel==7.7.0 optimum==2.3.0 defuser==0.0.28 pypcre logbar tokenicer device-smi threadpoolctl
python bench/try_gptq.py
```

The script quantizes the pair's target to 4 bits (group size 64), loads it and compares as above. 8 of 8 answers were
equal in fp32 and in bf16 (`TorchCpuAvx512Linear`), with all memory shared. GPTQModel replaces functions of transformers
when it is imported. dflash recognizes those that change nothing for models without their own code.
"""
