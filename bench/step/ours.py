"""This package's step, and the loop that launches and reads a step as this package's does."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from internals import Direct, ForcedStep, Replay
from torch import Tensor

from .meter import Meter
from .setting import Run, Setting, check


@dataclass(frozen=True)
class Launcher:
    """A step and how it reaches the device.

    Attributes:
        place_: sets the state to a length and the tokens accepted by the step before.
        length: of every row, advanced by the step.
        runner: launches the step.
        step: what is launched.
        kind: the key under which the runner keeps the step's graph.
        obstacle: why no graph may be captured; empty when it must be.
    """

    place_: Callable[[int, int], None]
    length: Tensor
    runner: Replay | Direct
    step: Callable[[], None]
    kind: Callable[[], Hashable]
    obstacle: str = ""


def launches(setting: Setting, launcher: Launcher) -> Run:
    """Return a run that launches one step ahead of the one it reads."""

    def run(meter: Meter, accepted: int, steps: int) -> None:
        runner = launcher.runner
        # 1. Set the state
        launcher.place_(setting.context, accepted)
        runner.start()
        # 2. Launch every step, and read the one before
        unread = 0
        for _ in range(steps):
            meter.mark(setting.waits.seconds)
            runner.launch(launcher.step, launcher.kind, launcher.obstacle)
            unread += 1
            if unread > runner.ahead:
                runner.read()
                unread -= 1
        meter.mark(setting.waits.seconds)
        while unread:
            runner.read()
            unread -= 1
        # 3. Check that it was a graph and that it emitted what it should
        if not launcher.obstacle and runner.ahead and runner.reason:
            raise RuntimeError(f"no CUDA graph: {runner.reason}")
        check(launcher.length, setting.context + accepted * steps, accepted)

    return run


def ours(setting: Setting, step: ForcedStep, obstacle: str = "") -> Run:
    """Run our step as `dflash.Generator` does; with an ``obstacle``, kernel by kernel."""
    return launches(setting, Launcher(step.place_, step.state.length, *step.launcher(), obstacle))


def another(setting: Setting, obstacle: str = "", **options) -> Run:
    """Run our step with other ``options`` of the generator, on the same caches."""
    step = setting.make_step(**options)
    step.share_(setting.ours)
    return ours(setting, step, obstacle)
