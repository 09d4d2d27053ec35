"""Foreign loops."""

import functools
import math
from collections.abc import Callable

import torch
from peers import native_drafter, reference_package
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_outputs import CausalLMOutputWithPast

from .meter import Meter
from .pair import BLOCK
from .setting import Run, Setting, check


class _Enough(Exception):
    """Leaves a peer's loop."""


def foreign(setting: Setting, loop: Callable[[Tensor, int], object]) -> Run:
    """A loop that calls the target itself, from its prompt on: ``loop(prompt [1, context], new tokens at most)``.

    The target's forward is steered from outside while it runs: the first call, the prompt's, fills the loop's cache
    with random numbers instead of running; every later one runs, marks the begin of a step, and has infinities put in
    its logits.
    """
    target = setting.peers_target
    prompt = torch.randint(setting.generator.vocab_size, (1, setting.context), device=target.device)

    def run(meter: Meter, accepted: int, steps: int) -> None:
        forward, starts = target.forward, []

        @functools.wraps(forward)
        def steered(input_ids: Tensor, **options) -> CausalLMOutputWithPast:
            if input_ids.shape[1] == setting.context:
                return _random_prompt(target, input_ids, options["past_key_values"])
            if len(starts) == steps:
                meter.mark(setting.waits.seconds)
                starts.append(options["position_ids"][0, 0])
                raise _Enough
            meter.mark(setting.waits.seconds)
            starts.append(options["position_ids"][0, 0])
            output = forward(input_ids=input_ids, **options)
            choices = setting.forced(input_ids, input_ids)
            output.logits.scatter_(2, choices[..., None], math.inf)
            return output

        target.forward = steered
        try:
            loop(prompt, BLOCK * (steps + 3))
            raise RuntimeError("its loop ended too early")
        except _Enough:
            pass
        finally:
            del target.forward
        check(torch.stack(starts).diff(), accepted, accepted)

    return run


def _random_prompt(target: nn.Module, ids: Tensor, cache) -> CausalLMOutputWithPast:
    """What a forward of ``ids [1, n]`` gives, in random numbers, and ``cache`` filled with others."""
    config, weight = target.config, target.lm_head.weight
    random = functools.partial(torch.randn, dtype=weight.dtype, device=weight.device)
    for index in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, ids.shape[1], config.head_dim)
        cache.update(random(shape), random(shape), index)
    hidden = random(1, ids.shape[1], config.hidden_size)
    return CausalLMOutputWithPast(
        logits=random(1, 1, weight.shape[0]),
        past_key_values=cache,
        hidden_states=(hidden,) * (config.num_hidden_layers + 1),
    )


def reference(setting: Setting) -> Run:
    package = reference_package()
    if package is None:
        raise ValueError("there is no .peers/dflash/model.py")
    with torch.device(setting.target.device):
        model = package.DFlashDraftModel(Qwen3Config(**setting.draft_config)).eval()
    model.load_state_dict(setting.drafter.state_dict(), assign=True)
    return foreign(setting, lambda ids, new: package.dflash_generate(model, setting.peers_target, ids, new, None))


def native(setting: Setting) -> Run:
    model = native_drafter(setting.draft_config, setting.drafter.state_dict())

    def loop(ids: Tensor, new: int) -> None:
        setting.peers_target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
            assistant_model=model,
            speculation_type="dflash",
        )

    return foreign(setting, loop)
