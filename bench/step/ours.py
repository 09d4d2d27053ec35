"""Our step."""

from dflash.engine.runner import Direct, Replay

from .forced import ForcedGenerator
from .meter import Meter
from .setting import Run, Setting, check


def ours(setting: Setting, generator: ForcedGenerator, obstacle: str = "", graph: bool = True) -> Run:
    """Our step, launched and read as the loop of :class:`dflash.Generator` does."""
    return launches(setting, generator, generator._runner, generator.step, generator._kind(), obstacle, graph)


def launches(
    setting: Setting, state: ForcedGenerator, runner: Replay | Direct, step, kind, obstacle, graph: bool
) -> Run:
    def run(meter: Meter, accepted: int, steps: int) -> None:
        state.place_(setting.context, accepted)
        runner.start()
        unread = 0
        for _ in range(steps):
            meter.mark(setting.waits.seconds)
            runner.launch(step, kind, obstacle)
            unread += 1
            if unread > runner.ahead:
                runner.read()
                unread -= 1
        meter.mark(setting.waits.seconds)
        while unread:
            runner.read()
            unread -= 1
        if graph and runner.ahead and runner.reason:
            raise RuntimeError(f"no CUDA graph: {runner.reason}")
        check(state.length, setting.context + accepted * steps, accepted)

    return run


def another(setting: Setting, obstacle: str = "", graph: bool = True, **options) -> Run:
    """Our step with other ``options`` of the generator, on the same caches."""
    generator, shared = setting.make_generator(**options), setting.generator
    generator.tokens, generator.context = shared.tokens, shared.context
    generator.target_cache, generator.draft_cache = shared.target_cache, shared.draft_cache
    return ours(setting, generator, obstacle, graph)
