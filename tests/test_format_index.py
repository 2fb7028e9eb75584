"""tests/FORMAT.md: each fact about checkpoints names tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FACT = re.compile(r"\* ([A-Z]\d+)\. (.+?)((?: `test_\w+\.py::test_\w+`)+)")
LINES = [line for line in (TESTS / "FORMAT.md").read_text().splitlines() if line.startswith("* ")]


@cache
def defined_in(name: str) -> set[str]:
    tree = ast.parse((TESTS / name).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("line", LINES)
def test_a_fact_names_tests_that_exist(line: str) -> None:
    found = FACT.fullmatch(line)
    assert found is not None, line
    for name, test in re.findall(r"`(\w+\.py)::(\w+)`", found[3]):
        assert test in defined_in(name), f"{found[1]}: {name} has no {test}"


def test_facts_are_numbered() -> None:
    numbers = [line.split(".")[0].removeprefix("* ") for line in LINES]
    sections = sorted({n[0] for n in numbers})
    want = [f"{s}{i + 1}" for s in sections for i in range(sum(n[0] == s for n in numbers))]
    assert sorted(numbers) == sorted(want)
