"""Where kernels/ and models/ lie (beside qrun/ in a checkout, inside it in a wheel), and caches."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE if (_PACKAGE / "models").is_dir() else _PACKAGE.parent

KERNELS = _ROOT / "kernels"
MODELS = _ROOT / "models"


def cache_dir() -> Path:
    """Where what can be made again is kept between processes: the platform's cache folder."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "qrun"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qrun"
