"""Write the op x backend table into README.md and kernels/README.md, from what lies in kernels/.

Usage: python scripts/op_table.py [--check]; with --check nothing is written, an old table fails.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = (ROOT / "README.md", ROOT / "kernels" / "README.md")
BEGIN, END = "<!-- ops: made by scripts/op_table.py -->", "<!-- end of ops -->"
# What runs where an op has no file of its own, if it is not a composition of MLX's ops.
OTHERWISE = {
    ("attend", "CPU"): "rope, sdpa",
    ("attend", "Metal"): "rope, sdpa",
    ("gather_qmm", "CUDA"): "qmv, qmm",
    ("gemm", "CUDA"): "qmv, MLX",
}
BACKENDS = {"CPU": "*.cpp", "Metal": "*.metal", "CUDA": "*.cuh"}


def table() -> str:
    """One row an op: its first docstring line, and which backends have a kernel of ours."""
    lines = ["| op | what | " + " | ".join(BACKENDS) + " |", "|---|---|" + "---|" * len(BACKENDS)]
    for path in sorted((ROOT / "qrun" / "ops").glob("[a-z]*.py")):
        folder = ROOT / "kernels" / path.stem
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        what = doc.splitlines()[0].partition(": ")[2].rstrip(".")
        if not doc.startswith(path.stem + ":"):
            continue  # a helper of the ops, not an op
        own = [
            "own" if any(folder.glob(glob)) else OTHERWISE.get((path.stem, backend), "MLX")
            for backend, glob in BACKENDS.items()
        ]
        lines.append(f"| `{path.stem}` | {what} | " + " | ".join(own) + " |")
    return "\n".join(lines)


def replaced(text: str) -> str:
    """The file with the table between its marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> None:
    """Write, or with --check compare."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        new = replaced(text)
        if "--check" in sys.argv[1:] and new != text:
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run python scripts/op_table.py")
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
