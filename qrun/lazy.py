"""numpy, loaded once something is computed with it: a greedy text does without its 70 ms and 12 MB.

>>> from qrun.lazy import np, npt
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:

    class _Module:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(import_module(self._name), attribute)
            setattr(self, attribute, value)  # not asked for again
            return value

    np, npt = _Module("numpy"), _Module("numpy.typing")

__all__ = ["np", "npt"]
