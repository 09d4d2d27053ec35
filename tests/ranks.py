"""What each rank of tests/test_tensor_parallel.py runs: calls on a spread target; writes down what became of each.

    torchrun --standalone --nproc-per-node 2 tests/ranks.py MODELS OUT

MODELS holds the models as folders. Each rank writes ``OUT/<rank>.json``, a value per line of `main`.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from baseline import left_padded, prompt
from families import Cheat, make_draft, make_target
from tiny_tokenizers import byte_level
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import dflash
from dflash.targets import structural_copy, transformers_version
from dflash_tools.train import TargetFeatures

RANK = int(os.environ.get("RANK", "0"))
VOCAB = 98
NEW = 24
SPREADS_EXPERTS = transformers_version() >= (5, 19)  # whole ones, by an option of its own
SPREADS_EMBEDDINGS = transformers_version() >= (5, 21)
FAMILIES = ("gemma3", "qwen3_moe", "deepseek_v3")
PROMPTS = [prompt(1), prompt(17), prompt(60)]
IDS, MASK = left_padded(PROMPTS)
TURN = torch.cat([PROMPTS[1], prompt(5)])
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": [1, 2, 3], "repetition_penalty": 1.2},
    "rejection": {"temperature": 1.0, "seed": 3, "acceptance": "rejection"},
    "denoised": {"temperature": 0.7, "seed": 4, "denoise_steps": 2},
    "tree": {"temperature": 1.0, "seed": 5, "tree": 33},
    "tree of any size": {"tree": "auto"},
}


def make(name: str, **changes: Any) -> PreTrainedModel:
    """Return the whole model that both sides know by its family's name."""
    return make_target(name, **{"vocab_size": VOCAB} | changes)


def spread(folder: Path, dtype: torch.dtype = torch.float32, **parallel: Any) -> PreTrainedModel:
    config = DistributedConfig(**{"tp_size": 2} | parallel)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=dtype)
    model.generation_config.max_length = None
    return model


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or what it raises."""
    try:
        result = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return result.tolist() if isinstance(result, torch.Tensor) else result


def differs(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Leave rank 0's scores alone; turn those of the others round."""
    return scores if RANK == 0 else -scores


def stops(ids: torch.Tensor, _scores: None) -> bool:
    """End a row after 30 tokens on rank 0, after two on the others."""
    return ids.shape[1] >= (30 if RANK == 0 else 19)


class Keeper:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, ids: torch.Tensor) -> None:
        self.tokens += ids.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def texts(model: PreTrainedModel, draft: dflash.Drafter) -> dict[str, Any]:
    """Return the texts that one process writes too."""
    one, done = TURN[None], {}
    for name, call in CALLS.items():
        call = {"attention_mask": MASK, "max_new_tokens": NEW, **call}
        done[name] = attempt(lambda call=call: dflash.generate(model, draft, IDS, **call))
    done["alone"] = attempt(lambda: dflash.generate(model, None, one, max_new_tokens=NEW, **CALLS["sampled"]))
    # A conversation: the second call finds the first one's caches.
    generator = dflash.Generator(model, draft, max_length=128)
    first = generator.generate(PROMPTS[1][None], max_new_tokens=NEW)
    longer = torch.cat([first, prompt(4)[None]], 1)
    output = generator.generate(longer, max_new_tokens=NEW, return_dict_in_generate=True)
    done["second turn"] = [output.sequences.tolist(), output.statistics.num_prefilled_tokens]
    events = list(generator.stream(one, max_new_tokens=NEW, **CALLS["sampled"]))
    done["stream"] = [[event.ids, event.accepted] for event in events]
    done["abandoned stream"] = next(generator.stream(one, max_new_tokens=NEW)).ids
    done["after it"] = attempt(lambda: generator.generate(one, max_new_tokens=NEW))
    words = {"stop_strings": ["ab", "cd"], "tokenizer": byte_level(VOCAB), **CALLS["sampled"]}
    done["stop strings"] = attempt(lambda: generator.generate(one, max_new_tokens=60, **words))
    keeper = Keeper() if RANK == 0 else None
    done["streamer of rank 0"] = attempt(lambda: generator.generate(one, max_new_tokens=NEW, streamer=keeper))
    return done


def rank_0_decides(model: PreTrainedModel, draft: dflash.Drafter) -> dict[str, Any]:
    """Return the texts of ranks that would differ if they were on their own."""
    one, done = TURN[None], {}
    torch.manual_seed(RANK)
    done["no seed"] = attempt(lambda: dflash.generate(model, draft, one, max_new_tokens=NEW, temperature=1.0))
    drafted = Cheat(model, draft, max_length=128)
    drafted.script = torch.nn.functional.pad(dflash.generate(model, None, one, max_new_tokens=60), (0, 64))
    drafted.spoil = 7 - 3 * RANK  # of the right drafts, rank 0 spoils every seventh, rank 1 every fourth
    output = drafted.generate(one, max_new_tokens=60, return_dict_in_generate=True)
    done["other drafts"] = [output.sequences.tolist(), output.statistics.acceptance_lengths]
    host = {"logits_processor": [differs], "stopping_criteria": [stops]}
    done["processors"] = attempt(lambda: drafted.generate(one, max_new_tokens=NEW, **host))
    choose = drafted.engine.keyed.choose
    drafted.engine.keyed.choose = lambda *given: (choose(*given) + RANK) % VOCAB
    done["other choices"] = attempt(lambda: drafted.generate(one, max_new_tokens=NEW))
    return done


def state_of(model: PreTrainedModel) -> list[Any]:
    modules = [(name, sorted(vars(module)), id(vars(module).get("forward"))) for name, module in model.named_modules()]
    return [modules, [(id(tensor), tensor._version) for tensor in model.parameters()], model.config.to_json_string()]


@torch.no_grad()
def copy_runs_itself(model: PreTrainedModel) -> bool:
    """Return whether a weight that only a copy has counts in the copy, and only there."""
    copied, before = structural_copy(model), model(TURN[None]).logits
    norm, linear = copied.model.layers[0].self_attn.q_norm, copied.model.layers[1].mlp.up_proj
    same = torch.equal(copied(TURN[None]).logits, before)
    for module in (norm, linear):
        logits = copied(TURN[None]).logits
        module.weight = torch.nn.Parameter(module.weight * 2, requires_grad=False)
        same &= not torch.equal(copied(TURN[None]).logits, logits)
    return same and torch.equal(model(TURN[None]).logits, before)


def embeddings(model: PreTrainedModel, draft: dflash.Drafter) -> dict[str, bool]:
    """Return whether the gathered table is kept, follows changes on one rank, and is made again for a new weight."""
    generator = dflash.Generator(model, draft, max_length=128)
    weight, target = model.get_input_embeddings().weight, generator.engine.target
    table = target.embedding_weight
    kept = torch.equal(table, weight.full_tensor())
    generator.generate(TURN[None], max_new_tokens=4)
    kept &= target.embedding_weight is table
    with torch.no_grad():
        weight.to_local().mul_(2.0 if RANK else 1.0)
    generator.generate(TURN[None], max_new_tokens=4)
    changed = target.embedding_weight is table and torch.equal(table, weight.full_tensor())
    with torch.no_grad():
        weight.to_local().mul_(0.5 if RANK else 1.0)
    replaced = torch.nn.Parameter(weight.detach() * 1, requires_grad=False)
    model.get_input_embeddings().weight = replaced
    refused = attempt(lambda: generator.generate(TURN[None], max_new_tokens=4))
    again = dflash.Generator(model, draft, max_length=128).engine.target.embedding_weight
    new = again is not table and torch.equal(again, replaced.full_tensor())
    return {"kept": kept, "changed": changed, "replaced": new and "were replaced since" in refused}


def refusals(models: Path, model: PreTrainedModel, draft: dflash.Drafter) -> dict[str, Any]:
    """Return what is said of models and calls that cannot be run."""
    one, done = TURN[None], {}
    for name in ("3 heads", "1 key head"):
        odd = spread(models / name)
        done[name] = attempt(lambda odd=odd: dflash.generate(odd, None, one, max_new_tokens=4))
    for option in ("fused", "compile", "graph"):
        done[option] = attempt(lambda option=option: dflash.Generator(model, max_length=64, **{option: True}))
    if SPREADS_EXPERTS:
        experts = spread(models / "qwen3_moe", ep_size=2)
        done["experts"] = attempt(lambda: dflash.generate(experts, None, one, max_new_tokens=4))
    cut = spread(models / "qwen3", tp_plan={"lm_head": "colwise"})
    done["cut head"] = attempt(lambda: dflash.generate(cut, None, one, max_new_tokens=4))
    done["training"] = attempt(lambda: TargetFeatures(model, (0,)))
    done["other weights"] = attempt(
        lambda: dflash.generate(spread(models / ("other" if RANK else "qwen3")), None, one, max_new_tokens=4)
    )
    done["other prompts"] = attempt(lambda: dflash.generate(model, draft, one + RANK, max_new_tokens=4))
    done["other seeds"] = attempt(lambda: dflash.generate(model, draft, one, temperature=1.0, seed=RANK))
    done["other calls"] = attempt(
        lambda: dflash.Generator(model, max_length=64) if RANK else dflash.generate(model, draft, one)
    )
    two = [dflash.Generator(each, max_length=64) for each in (model, spread(models / "other"))]
    done["other target"] = attempt(lambda: two[RANK].generate(one, max_new_tokens=4))
    done["after them"] = attempt(lambda: dflash.generate(model, draft, one, max_new_tokens=NEW))
    return done


def main(models: Path, out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))  # ranks that wait for each other fail
    whole, model = make("qwen3"), spread(models / "qwen3")
    draft = make_draft(whole)
    before = state_of(model)
    done = {"texts": texts(model, draft), "decided": rank_0_decides(model, draft)}
    done["own copy"] = copy_runs_itself(model)
    done["unchanged"] = before == state_of(model)
    call = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    door = {"custom_generate": dflash.custom_generate, "draft": draft}
    done["door"] = attempt(lambda: model.generate(IDS, attention_mask=MASK, **call, **door))
    half = spread(models / "qwen3", torch.bfloat16)
    pair = half, make_draft(whole.to(torch.bfloat16))
    done["bfloat16"] = attempt(lambda: dflash.generate(*pair, IDS, attention_mask=MASK, max_new_tokens=60))
    for name in FAMILIES:
        family = spread(models / name)
        drafter = make_draft(make(name))
        done[name] = attempt(
            lambda f=family, d=drafter: dflash.generate(f, d, IDS, attention_mask=MASK, max_new_tokens=NEW)
        )
    done["refusals"] = refusals(models, model, draft)
    if SPREADS_EMBEDDINGS:
        done["embeddings"] = embeddings(model, draft)
    (out / f"{RANK}.json").write_text(json.dumps(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
