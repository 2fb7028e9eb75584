"""Where kernels/ and models/ lie: inside qrun/ in a wheel, beside it in a checkout."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "kernels").is_dir() else HERE.parent
KERNELS = ROOT / "kernels"
MODELS = ROOT / "models"
