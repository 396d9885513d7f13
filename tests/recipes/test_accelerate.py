"""The configurations of recipes/accelerate are what they say, and DDP ends with the weights of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy

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


@pytest.mark.parametrize("name", MEANT)
def test_accelerate_reads_distributed_type_precision_and_stage(name):
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(MEANT)
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert config.distributed_type == MEANT[name]
    assert config.mixed_precision == "bf16"
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[-1])


def test_fsdp_is_version_2_and_resharded(monkeypatch):
    config = load_config_from_file(str(FOLDER / "fsdp2.yaml")).fsdp_config
    for name, value in config.items():
        monkeypatch.setenv(name.upper(), str(value).lower() if isinstance(value, bool) else str(value))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT), "ACCELERATE_USE_CPU": "true"}


def train(folder: Path, *launcher: str) -> tuple[dict[str, torch.Tensor], dict]:
    folder.mkdir()
    command = [sys.executable, *launcher, str(WORKER), str(folder)]
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
