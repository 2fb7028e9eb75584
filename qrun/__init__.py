"""qrun: run 4-bit language models at the speed of the machine's memory.

>>> import qrun
>>> model = qrun.load("path/to/model")
>>> print(qrun.generate(model, "Why is the sky blue?", max_tokens=64).text)

Importing this package does nothing else: MLX is loaded on the first use of a name below.
"""

from __future__ import annotations

from qrun.errors import (
    BackendError,
    CheckpointError,
    ModelNotFoundError,
    NonFiniteError,
    PromptTooLongError,
    QrunError,
    UsageError,
)

TYPE_CHECKING = False  # `typing` costs as much as Python's own start
if TYPE_CHECKING:
    from typing import Any

    from qrun.generation import Generation, Piece, generate, stream
    from qrun.loader import LoadedModel, load
    from qrun.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CheckpointError",
    "Generation",
    "LoadedModel",
    "ModelNotFoundError",
    "NonFiniteError",
    "Piece",
    "PromptTooLongError",
    "QrunError",
    "Sampling",
    "UsageError",
    "generate",
    "load",
    "stream",
]

_HOME = {
    "Generation": "generation",
    "LoadedModel": "loader",
    "Piece": "generation",
    "Sampling": "sampling",
    "generate": "generation",
    "load": "loader",
    "stream": "generation",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qrun' has no attribute {name!r}")
    from importlib import import_module

    from qrun.hardware import require_mlx

    require_mlx()
    # No file here bears a public name: importing a submodule would put the module in its place.
    value = getattr(import_module(f"qrun.{_HOME[name]}"), name)
    globals()[name] = value
    return value
