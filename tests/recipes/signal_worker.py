"""Run by `accelerate launch`: a training that ends when it is told to."""

import sys
from pathlib import Path

from tests.faults.jobs import progress_of, trainer_of

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = {"save_on_signal": True, "save_steps": 5000, "max_steps": 5000, "per_device_train_batch_size": 2}
    trainer_of("smile", folder / "run", callbacks=[progress_of(folder / "steps")], **settings).train()
