"""Elsewhere than on x86-64 Linux the emulator's own tests say so and are left out."""

from __future__ import annotations

import pytest

from tests.metal.clang import unsupported


@pytest.fixture(autouse=True)
def _supported() -> None:
    if reason := unsupported():
        pytest.skip(reason)
