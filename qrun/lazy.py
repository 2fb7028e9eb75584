"""Packages loaded as far as they are used.

numpy comes once something is computed with it: a greedy text does without its 70 ms and 12 MB.

>>> from qrun.lazy import np, npt
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
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

__all__ = ["bare", "np", "npt"]


def bare(package: str) -> None:
    """Let modules of a package be imported without its __init__, and what that brings along.

    The __init__ runs, as always, once anybody asks the package for a name that is no module.
    """
    spec = find_spec(package)
    if package in sys.modules or spec is None or spec.loader is None:
        return
    module, loader = module_from_spec(spec), spec.loader

    def whole(name: str) -> Any:
        if name.startswith("__") or find_spec(f"{package}.{name}"):
            raise AttributeError(name)
        del module.__dict__["__getattr__"]
        loader.exec_module(module)
        return getattr(module, name)

    module.__dict__["__getattr__"] = whole
    sys.modules[package] = module
