"""Tiny random models with vision towers, and prompts with pictures as their processors make them."""

import torch
from families import _COMMON, _GDN, _KIMI_VISION, _MLA, _MOE, FAMILIES
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

IMAGE, VIDEO, BEGIN, END = 5, 6, 7, 8  # ids of the placeholder and of the tokens around it
_QWEN = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64, "in_channels": 3,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
_GEMMA4_VISION = {
    "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_CONFIGS = {
    "qwen3_5": (_GDN, {"vision_config": _QWEN, **_QWEN_IDS}),
    "qwen3_vl": (
        {"rope_parameters": _MROPE}, {"vision_config": {**_QWEN, "deepstack_visual_indexes": [0, 1]}, **_QWEN_IDS},
    ),
    "gemma3": (FAMILIES["gemma3"][1], {
        "vision_config": _SIGLIP, "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": BEGIN,
        "eoi_token_index": END,
    }),
    "gemma4": ({**FAMILIES["gemma4"][1], "use_bidirectional_attention": "vision"}, {
        "vision_config": _GEMMA4_VISION, "audio_config": None, "image_token_id": IMAGE, "video_token_id": VIDEO,
        "boi_token_id": BEGIN, "eoi_token_id": END,
    }),
    "kimi_k25": ({**_MOE, **_MLA}, {
        "vision_config": {**_KIMI_VISION, "patch_size": 4, "projection_hidden_size": 32}, "projection_hidden_size": 32,
        "image_token_id": IMAGE, "video_token_id": VIDEO,
    }),
}  # fmt: skip
FAMILIES_WITH_PICTURES = list(_CONFIGS)


def make_picture_target(family: str, seed: int = 0):
    """Return a tiny random model that takes pictures."""
    torch.manual_seed(seed)
    text, fields = _CONFIGS[family]
    config = CONFIG_MAPPING[family](text_config={**_COMMON, **text}, **fields)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in key:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
    model.generation_config.max_length = model.generation_config.eos_token_id = None
    return model.eval()


def picture_prompts(family: str, shapes: list[tuple[int, int, int]], seed: int = 0):
    """Return ids, mask and pictures of prompts padded on the left.

    ``shapes`` has, per prompt, the tokens before its picture, and the picture's rows and columns of patches.
    """
    g = torch.Generator().manual_seed(seed)

    def words(count):
        return torch.randint(20, 90, (count,), generator=g).tolist()

    prompts, kinds, pixels, grids, places = [], [], [], [], []
    for before, rows, columns in shapes:
        if family == "gemma3":
            rows = columns = 4
            pixels.append(torch.randn(1, 3, 16, 16, generator=g))
        elif family == "kimi_k25":
            pixels.append(torch.randn(rows * columns, 3, 4, 4, generator=g))
        else:
            pixels.append(torch.randn(rows * columns, 3 * 4 * 4 * (1 if family == "gemma4" else 2), generator=g))
        grids.append([1, rows, columns])
        places.append(torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1))
        count = rows * columns // 4
        prompts.append([*words(before), BEGIN, *[IMAGE] * count, END, *words(3)])
        kinds.append([0] * (before + 1) + [1] * count + [0] * 4)
    width = max(map(len, prompts))

    def padded(values, filler):
        return torch.tensor([[filler] * (width - len(row)) + row for row in values])

    ids, mask = padded(prompts, 0), padded([[1] * len(row) for row in prompts], 0)
    kinds = padded(kinds, 0)
    if family == "gemma3":
        return ids, mask, {"pixel_values": torch.cat(pixels), "token_type_ids": kinds}
    if family == "gemma4":
        return ids, mask, {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True), "mm_token_type_ids": kinds,
            "image_position_ids": torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1),
        }  # fmt: skip
    pictures = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return ids, mask, pictures if family == "kimi_k25" else {**pictures, "mm_token_type_ids": kinds}
