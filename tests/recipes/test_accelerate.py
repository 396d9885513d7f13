"""The configurations of recipes/accelerate are what they say, and DDP ends with the weights of one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from tests.faults.warm_process import IN_TIME, wait_until
from tests.offline import python_path
from tests.tolerances import assert_close, close

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "accelerate"
WORKER = Path(__file__).with_name("worker.py")
MEANT = {
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
}


def test_accelerate_reads_distributed_type_precision_and_stage():
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(MEANT)
    for name, kind in MEANT.items():
        config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
        assert (config.distributed_type, config.mixed_precision) == (kind, "bf16")
        if name.startswith("zero"):
            assert config.deepspeed_config["zero_stage"] == int(name[-1])
        if name == "fsdp2":
            settings = {
                key: config.fsdp_config[f"fsdp_{key}"]
                for key in ("version", "reshard_after_forward", "offload_params")
            }
            assert settings == {"version": 2, "reshard_after_forward": True, "offload_params": False}


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT), "ACCELERATE_USE_CPU": "true"}


def train(folder: Path, *launcher: str) -> tuple[dict[str, torch.Tensor], dict]:
    folder.mkdir()
    command = [sys.executable, *launcher, str(WORKER), "steps", str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "weights.safetensors"), json.loads((folder / "log.json").read_text())


@pytest.mark.slow  # tests/invariance holds forked processes against one
def test_ddp_launched_with_its_file_ends_with_the_weights_of_one_process(tmp_path):
    config = yaml.safe_load((FOLDER / "ddp.yaml").read_text())
    config |= {"num_processes": 2, "use_cpu": True, "mixed_precision": "no"}  # all that a machine without GPUs needs
    (tmp_path / "ddp.yaml").write_text(yaml.safe_dump(config))
    one, alone = train(tmp_path / "one")
    two, together = train(
        tmp_path / "two", "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "ddp.yaml")
    )
    assert (alone["processes"], together["processes"]) == (1, 2)
    assert together["wrapper"] == "DistributedDataParallel"
    assert one.keys() == two.keys()
    for name in one:
        assert_close(two[name], one[name], ulps=32, magnitude=0.5, msg=name)
    assert together["loss"] == close(alone["loss"], dtype="float32")


@pytest.mark.slow
def test_sigterm_to_the_launcher_of_two_processes_saves_and_ends_in_time(tmp_path):
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    more = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [sys.executable, *launch, *more, str(WORKER), "signal", str(tmp_path)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as launcher:
        try:
            wait_until((tmp_path / "steps").exists, timeout=120)
            began = time.monotonic()
            launcher.terminate()
            said, _ = launcher.communicate(timeout=60)
            waited = time.monotonic() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert "Stopped after step" in said, said[-3000:]
    assert waited < IN_TIME
    assert len(list((tmp_path / "run").glob("checkpoint-*/rng_state_1.pth"))) == 1
    assert launcher.returncode != 0  # torchrun's status: its processes ended with 0
