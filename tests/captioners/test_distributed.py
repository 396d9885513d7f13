"""DDP and FSDP2 in two real processes (gloo) give the same gradient as one process."""

import json

import pytest

from tests.captioners.distributed_worker import CASES, FAULT, compare
from tests.processes import run_in_processes
from tests.tolerances import resolution


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("distributed")
    run_in_processes(2, compare, str(folder / "results.json"), folder=folder)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_gradient_loss_and_captions_equal_one_process(results, case):
    result = results[" ".join(case)]
    assert "traceback" not in result, result["traceback"]
    assert result["gradient_error"] < resolution(1, ulps=64)
    assert result["loss_error"] < resolution(5)
    assert result["same_names"]
    assert result["same_captions"]


def test_planted_fault_is_detected(results):
    assert results[" ".join(FAULT)]["gradient_error"] > 1e-3
