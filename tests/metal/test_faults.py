"""Every seeded fault is caught: its kind and its line, in every order, optimized and literal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.metal import MetalError, metal_kernel, settings
from tests.metal.faults import FAULTS, HEADER, IDS, Fault, X


def launch(fault: Fault, **changes: Any) -> Any:
    kernel = metal_kernel(
        name="fault",
        input_names=["x"],
        output_names=["out"],
        source=fault.body,
        header=HEADER + '#line 1 "header"\n' + fault.header,
        atomic_outputs=fault.atomic,
        **changes,
    )
    return kernel(
        inputs=[X],
        output_shapes=[fault.out],
        output_dtypes=[np.float32],
        grid=fault.grid,
        threadgroup=fault.group,
        init_value=fault.init,
    )


def marked(fault: Fault) -> set[str]:
    found = set()
    for file, text in (("body", fault.body), ("header", fault.header)):
        found |= {f"{file}:{n}" for n, s in enumerate(text.split("\n"), 1) if "//!" in s}
    return found


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_seeded_fault_is_caught(fault: Fault, order: str) -> None:
    with settings.use(seconds=1), pytest.raises(MetalError) as caught:
        launch(fault, order=order, seed=1)
    report = caught.value.report
    found = [f for f in report if f.kind == fault.kind]
    assert found, caught.value
    if lines := marked(fault):
        # An endless loop is stopped wherever it is, perhaps where the line is not known: then the
        # finding names the file alone.
        files = {line.split(":")[0] for line in lines} if fault.kind == "endless" else set[str]()
        assert {f.where for f in found} & (lines | files), caught.value
    if fault.buffer:
        assert {f.buffer for f in found} == {fault.buffer}
    # What comes early may also find nothing there yet; no other kind may be reported.
    assert {f.kind for f in report} <= {fault.kind, "uninitialised read"}, caught.value


def test_a_masked_read_that_the_optimizer_removes_is_seen_literally() -> None:
    body = IDS + "float v = x[i * 8]; //!\nout[i] = i * 8 < 256 ? v : 0;"
    fault = Fault("masked", "out of bounds", body)
    assert not launch(fault).report
    with settings.use(literal=True), pytest.raises(MetalError) as caught:
        launch(fault)
    assert [f.where for f in caught.value.report] == ["body:2"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_faults_are_caught_literally_too(fault: Fault) -> None:
    with settings.use(literal=True):
        test_a_seeded_fault_is_caught(fault, "random")


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.right is not None], ids=lambda f: f.name)
def test_numbers_alone_would_not_show_it(fault: Fault, order: str) -> None:
    out = launch(fault, order=order, seed=1, check=False)
    assert out.report
    assert (out[0].ravel() == fault.right).all()


def test_there_are_many_faults_and_some_give_right_numbers() -> None:
    assert len(FAULTS) >= 40
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    assert sum(f.right is not None for f in FAULTS) >= 8
