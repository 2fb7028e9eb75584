"""Where kernels/ and models/ lie: beside qrun/ in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE if (_PACKAGE / "models").is_dir() else _PACKAGE.parent

KERNELS = _ROOT / "kernels"
MODELS = _ROOT / "models"
