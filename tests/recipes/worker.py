"""What `accelerate launch` runs in tests: two steps of SMILE on a few scenes, whose weights and log go to the folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from safetensors.torch import save_file

from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from tests.tiny import tiny_captioner


def two_steps(folder: Path) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    args = SmileConfig(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4 // processes,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = SmileTrainer(
        tiny_captioner("git"), args, load_scenes(num_train=8, num_validation=1, num_test=0)["train"]
    )
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        save_file(
            {name: value.clone().contiguous() for name, value in weights.items()}, folder / "weights.safetensors"
        )
        log = {
            "processes": trainer.accelerator.num_processes,
            "wrapper": type(trainer.model_wrapped).__name__,
            "loss": trainer.state.log_history[0]["loss"],
        }
        (folder / "log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    two_steps(Path(sys.argv[1]))
