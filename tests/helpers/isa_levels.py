"""The instruction set levels of native sampling, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from forerun import _native

ISA_LEVELS = range(_native.sampling_max_isa_level() + 1)


def at_level(level: int) -> Iterator[int]:
    """For a fixture to yield from: sampling runs at this level, and afterwards at the one before."""
    before = _native.sampling_isa_level()
    _native.sampling_set_isa_level(level)
    yield level
    _native.sampling_set_isa_level(before)
