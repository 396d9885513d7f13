"""The configurations of recipes/accelerate are what they say; tests/apps/boosting launches one."""

from __future__ import annotations

from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy

FOLDER = Path(__file__).parents[2] / "recipes" / "accelerate"
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


def test_fsdp_is_version_2_and_resharded(monkeypatch):
    config = load_config_from_file(str(FOLDER / "fsdp2.yaml")).fsdp_config
    for name, value in config.items():
        monkeypatch.setenv(name.upper(), str(value).lower() if isinstance(value, bool) else str(value))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)
