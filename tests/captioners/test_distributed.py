"""Two real processes over gloo: DDP and FSDP2 give the gradient of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.captioners.distributed_worker import CASES, FAULT
from tests.offline import python_path

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("distributed") / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(WORKER)]
    root = str(WORKER.parents[2])
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(root)}
    done = subprocess.run(
        [*command, str(file)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_gradient_loss_and_captions_are_those_of_one_process(results, case):
    result = results[" ".join(case)]
    assert "traceback" not in result, result["traceback"]
    assert result["gradient_error"] < 1e-5
    assert result["loss_error"] < 1e-5
    assert result["same_names"]
    assert result["same_captions"]


def test_a_planted_fault_is_seen(results):
    assert results[" ".join(FAULT)]["gradient_error"] > 1e-3
