"""How much a test tries that could try more: a fixed sample in every run, and all or much more with ``-m long``."""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import HealthCheck, settings

LONG_FACTOR = 100
_profiles = {"sample": 1, "long": LONG_FACTOR}
for _name, _factor in _profiles.items():
    settings.register_profile(
        _name,
        max_examples=20 * _factor,
        derandomize=_name == "sample",  # the same examples every time; a long run draws new ones
        database=None,
        deadline=None,  # timings on a busy machine say nothing
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def use_profile(name: str) -> None:
    """Use the profile ``sample`` or ``long`` for the tests that are imported from now on."""
    settings.load_profile(name)


def examples(count: int) -> settings:
    """Return the settings of a property test that runs ``count`` examples, and many more in a long run."""
    return settings(max_examples=count * settings.default.max_examples // 20)


def is_long() -> bool:
    """Return whether this is a long run."""
    return settings.default.max_examples > 20


Value = TypeVar("Value")


def some(count: int, values: Sequence[Value]) -> Sequence[Value]:
    """Return ``count`` of the values, evenly spread, and all of them in a long run."""
    return values if is_long() else values[:: len(values) // count][:count]
