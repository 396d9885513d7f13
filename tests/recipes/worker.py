"""What `accelerate launch` runs in tests, in as many processes as it says: `worker.py steps|signal FOLDER`.

Two steps of SMILE on a few scenes, whose weights and log go to the folder; or a training that ends when it is told to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from safetensors.torch import save_file

from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from tests.faults.jobs import progress_of, trainer_of
from tests.tiny import tiny_captioner


def two_steps(folder: Path) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {"max_steps": 2, "per_device_train_batch_size": 4 // processes, "learning_rate": 1e-2, "optim": "sgd"}
    settings |= {"lr_scheduler_type": "constant", "max_grad_norm": 0, "logging_steps": 1, "save_strategy": "no"}
    args = SmileConfig(str(folder), **settings, report_to="none", use_cpu=True, disable_tqdm=True)
    rows = load_scenes(num_train=8, num_validation=1, num_test=0)["train"]
    trainer = SmileTrainer(tiny_captioner("git"), args, rows)
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        whole = {name: value.clone().contiguous() for name, value in weights.items()}
        save_file(whole, folder / "weights.safetensors")
        log = {"wrapper": type(trainer.model_wrapped).__name__, "loss": trainer.state.log_history[0]["loss"]}
        (folder / "log.json").write_text(json.dumps({"processes": trainer.accelerator.num_processes, **log}))


def until_signal(folder: Path) -> None:
    settings = {"save_on_signal": True, "save_steps": 5000, "max_steps": 5000, "per_device_train_batch_size": 2}
    trainer_of("smile", folder / "run", callbacks=[progress_of(folder / "steps")], **settings).train()


if __name__ == "__main__":
    {"steps": two_steps, "signal": until_signal}[sys.argv[1]](Path(sys.argv[2]))
