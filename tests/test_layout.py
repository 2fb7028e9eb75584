"""The rules of the house that a reader relies on, read off the tree."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

# What lies below tests/ops and belongs to no op.
HELPERS = {"__init__", "cuda_sources", "matrices", "metal_epilogues", "metal_support", "reference"}
# What a backend, or all ops together, add to an op's own test.
MORE = {
    "cuda_addresses",
    "cuda_direct",
    "cuda_launch",
    "cuda_program",
    "cuda_tiles",
    "cpu_arm",
    "cpu_layer",
    "cpu_memory",
    "cpu_products",
    "cuda",
    "cuda_compiles",
    "epilogues_metal",
    "formats",
    "layer_metal",
    "orders_metal",
    "registers_metal",
}


def tracked() -> list[Path]:
    """Every file of the tree; outside a git checkout, every file that is no build output."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        ignored = {"build", "dist", "__pycache__"}
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(p in ignored or p.startswith(".") for p in path.relative_to(ROOT).parts)
        ]
    return [path for path in files if path.is_file()]


def names(folder: str, pattern: str) -> set[str]:
    return {p.stem for p in (ROOT / folder).glob(pattern) if not p.stem.startswith("_")}


OPS = sorted(names("qrun/ops", "*.py") - {"matrix"})


def test_kernels_and_models_are_no_packages() -> None:
    """A top-level `kernels` would shadow a package that transformers imports."""
    for folder in ("kernels", "models"):
        assert (ROOT / folder).is_dir()
        assert not list((ROOT / folder).rglob("__init__.py"))
    assert not list((ROOT / "kernels").rglob("*.py"))


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_a_name(op: str) -> None:
    assert (ROOT / "qrun" / "ops" / f"{op}.py").exists()
    assert (ROOT / "tests" / "ops" / f"test_{op}.py").exists()
    assert (ROOT / "kernels" / op / "README.md").exists()


def test_every_kernel_folder_and_op_test_is_an_op() -> None:
    kernels = {p.name for p in (ROOT / "kernels").iterdir() if p.is_dir()} - {"common"}
    assert kernels <= set(OPS)
    tests = {n.removeprefix("test_") for n in names("tests/ops", "*.py")} - HELPERS - MORE
    assert {n.removesuffix("_metal").removesuffix("_cuda") for n in tests} <= set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_contract_reference_and_byte_count(op: str) -> None:
    tree = ast.parse((ROOT / "qrun" / "ops" / f"{op}.py").read_text())
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    defined |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets}
    assert {op, f"{op}_ref", f"{op}_bytes"} <= defined
    assert ast.get_docstring(tree)


def test_nothing_names_the_machine_it_was_written_on() -> None:
    # Spelled in two halves, so that this file passes as well.
    forbidden = ["/wo" + "rk/", "/ro" + "ot/", "/tmp/" + "w/", "/ho" + "me/"]
    for path in tracked():
        if path.suffix in (".png", ".so", ".gguf"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for word in forbidden:
            assert word not in text, f"{path.relative_to(ROOT)} names {word}"


def anchors(text: str) -> set[str]:
    """Of a text's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_texts_lead_somewhere() -> None:
    for path in tracked():
        if path.suffix != ".md":
            continue
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text()):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), f"{path.relative_to(ROOT)}: {link}"
            assert not anchor or anchor in anchors(target.read_text()), link


def imports(path: Path) -> set[str]:
    """Modules that a file imports at its top level."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_arrows_go_down_only() -> None:
    """Models know blocks, not ops, files or backends; ops know no model."""
    for path in (ROOT / "models").glob("*.py"):
        for module in imports(path):
            assert not module.startswith(("qrun.checkpoint", "qrun.loader", "qrun.ops._"))
    upper = ("cli", "generation", "loader", "tokenizer", "weights", "cache", "layers", "blocks")
    for path in (ROOT / "qrun" / "ops").glob("*.py"):
        for module in imports(path):
            assert not module.startswith(tuple(f"qrun.{name}" for name in upper)), path


def test_nobody_changes_the_default_device() -> None:
    """It is the process's: other threads would find themselves on it."""
    for path in [*(ROOT / "qrun").rglob("*.py"), *(ROOT / "models").glob("*.py")]:
        for word in ("mx.stream(", "mx.set_default_device(", "mx.set_default_stream("):
            assert word not in path.read_text(), f"{path}: {word}"


def test_no_file_bears_a_public_name() -> None:
    """Importing qrun.NAME as a module would put the module in the function's place."""
    import qrun

    assert not set(qrun.__all__) & names("qrun", "*.py")


def test_modules_say_what_they_are() -> None:
    for folder in ("qrun", "models", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if tree.body and not path.name.startswith("test_"):
                assert ast.get_docstring(tree), path


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_versions_agree() -> None:
    import qrun

    project = pyproject()
    assert project["project"]["version"] == qrun.__version__
    pins = set(re.findall(r"mlx(?:\[\w+\])?==([\d.]+)", (ROOT / "pyproject.toml").read_text()))
    assert len(pins) == 1
    assert pins.pop() in (ROOT / "qrun" / "hardware.py").read_text()


def test_the_package_holds_kernels_and_models_inside_qrun() -> None:
    """The wheel's map: nothing but qrun at the top."""
    build = pyproject()["tool"]["scikit-build"]
    packages = build["wheel"]["packages"]
    assert packages == {"qrun": "qrun", "qrun/kernels": "kernels", "qrun/models": "models"}
    assert all(target.split("/")[0] == "qrun" for target in packages)


def test_where_qrun_is_installed_kernels_and_models_stay_inside(
    python: Callable[..., str],
) -> None:
    """Importing qrun and its models leaves no top-level module of those names."""
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]\n"
        "import qrun\n"
        "from qrun.paths import MODELS\n"
        "from qrun.loader import model_file\n"
        "model_file('llama', 'config.json')\n"
        "print(sorted({'kernels', 'models', 'llama'} & set(sys.modules)), MODELS.is_dir())\n"
    )
    assert python(code) == "[] True\n"
