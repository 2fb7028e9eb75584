"""What config.json says of quantization. What the files hold counts; this is compared with it."""

from __future__ import annotations

from typing import Any, Literal, cast

from qrun.config import UPDATE, Config
from qrun.errors import CheckpointError
from qrun.quantization import MODES, Quantization

WRAPPER = "language_model."  # in front of every name where text is one part of several


class Declared:
    """What config.json says of quantization: a global entry, and entries per module path."""

    def __init__(self, config: Config) -> None:
        # Ours alone is called `quantization`; under the other name any software's may stand, with
        # bits and group_size that mean another format.
        level = config.level("quantization")
        if level is None:
            level = config.level("quantization_config")
            method = "mlx" if level is None else level.str("quant_method", "mlx")
            if level is not None and method != "mlx":
                raise CheckpointError(
                    f"{level.where}: quantization method {method!r:.80} is not supported",
                    hint="qrun reads MLX's formats: affine, mxfp4, nvfp4, mxfp8",
                )
        self.default: Quantization | None = None
        self.layers: dict[str, Quantization | Literal[False]] = {}
        if level is None:
            return
        self.default = _spec(level)
        for key, value in level.values.items():
            name = key.removeprefix(WRAPPER)
            if isinstance(value, dict):
                where = f"{level.where}: {key}"
                entry = Config(cast("dict[str, Any]", value), where)
                if "bits" in entry or "group_size" in entry or "mode" in entry:
                    self.layers[name] = _spec(entry)
            elif value is False:
                self.layers[name] = False

    def of(self, path: str) -> Quantization | Literal[False] | None:
        """The entry for a module; False: dense; None: config.json says nothing."""
        return self.layers.get(path.removeprefix(WRAPPER), self.default)


def _spec(level: Config) -> Quantization:
    """An entry's spec; missing numbers are the mode's defaults."""
    mode = level.str("mode", "affine")
    if mode not in MODES:
        known = ", ".join(MODES)
        raise CheckpointError(
            f"{level.where}: unknown mode {mode!r:.80} (known: {known})", hint=UPDATE
        )
    group, bits = MODES[mode]
    try:
        return Quantization(level.int("bits", bits), level.int("group_size", group), mode)
    except ValueError as error:
        raise CheckpointError(f"{level.where}: {error}", hint=UPDATE) from None
