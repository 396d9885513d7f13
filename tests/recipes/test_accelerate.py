"""The configurations of recipes/accelerate are what they say; tests/apps/boosting launches one."""

from __future__ import annotations

from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

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
        if name == "fsdp2":
            settings = {
                key: config.fsdp_config[f"fsdp_{key}"]
                for key in ("version", "reshard_after_forward", "offload_params")
            }
            assert settings == {"version": 2, "reshard_after_forward": True, "offload_params": False}
