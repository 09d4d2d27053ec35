"""Peers with a loop of their own, steered through the target's forward: the reference package and transformers."""

import functools
import math
from collections.abc import Callable

import torch
from peers import native_drafter, reference_drafter
from random_pair import BLOCK
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from .meter import Meter
from .setting import Run, Setting, check


class _Enough(Exception):
    """Leaves a peer's loop."""


def foreign(setting: Setting, loop: Callable[[Tensor, int], object]) -> Run:
    """Return a run of a loop that calls the target itself.

    The target's forward is replaced while the loop runs. The first call, the prompt's, fills the loop's cache with
    random numbers instead of running. Every later call marks the start of a step, runs, and gets infinities written
    into its logits.

    Args:
        setting: context and batch.
        loop: ``loop(prompt [1, context], new tokens at most)``.
    """
    target = setting.peers_target
    prompt = torch.randint(target.config.vocab_size, (1, setting.context), device=target.device)

    def run(meter: Meter, accepted: int, steps: int) -> None:
        forward, starts = target.forward, []

        @functools.wraps(forward)
        def steered(input_ids: Tensor, **options) -> CausalLMOutputWithPast:
            if input_ids.shape[1] == setting.context:
                cache = options.get("cache", options.get("past_key_values"))  # the second before transformers 5.24
                return _random_prompt(target, input_ids, cache)
            meter.mark(setting.waits.seconds)
            starts.append(options["position_ids"][0, 0])
            if len(starts) > steps:
                raise _Enough
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
    """Return random numbers shaped like the output for ``ids [1, n]``, and fill ``cache`` with others."""
    config, weight = target.config, target.lm_head.weight
    random = functools.partial(torch.randn, dtype=weight.dtype, device=weight.device)
    for index in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, ids.shape[1], config.head_dim)
        cache.update(random(shape), random(shape), index)
    hidden = random(1, ids.shape[1], config.hidden_size)
    name = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
    return CausalLMOutputWithPast(
        logits=random(1, 1, weight.shape[0]),
        hidden_states=(hidden,) * (config.num_hidden_layers + 1),
        **{name: cache},
    )


def reference(setting: Setting) -> Run:
    """Run the reference package's loop over its own drafter, with the pair's weights."""
    package, model = reference_drafter(setting.pair.draft_config, setting.pair.drafter.state_dict())
    return foreign(setting, lambda ids, new: package.dflash_generate(model, setting.peers_target, ids, new, None))


def native(setting: Setting) -> Run:
    """Run transformers' own DFlash loop over its own drafter class, with the pair's weights."""
    model = native_drafter(setting.pair.draft_config, setting.pair.drafter.state_dict())

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
