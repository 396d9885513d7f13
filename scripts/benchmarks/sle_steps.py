r"""How long SLETrainer's step takes, and how much of it its rewards."""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image
from transformers import TrainerCallback

from hf_captionrl.captioners import Captioner
from hf_captionrl.trainers import SLEConfig, SLETrainer


class _StepClock(TrainerCallback):
    """CPU seconds of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start."""
        self._since = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        self.seconds.append(time.process_time() - self._since)


def time_steps(
    captioner: Captioner, dataset: datasets.Dataset, *, num_images: int, steps: int, tokens: int | None, frozen: bool
) -> dict[str, Any]:
    """CPU seconds of SLETrainer's step, the first one left out: it makes the optimizer's state.

    Returns the median `seconds`, `reward_seconds` within them, and all `values`.
    """
    clock, rewarded = _StepClock(), []
    with tempfile.TemporaryDirectory() as folder:
        args = SLEConfig(
            folder,
            per_device_train_batch_size=num_images,
            max_steps=steps + 1,
            max_completion_length=tokens or 30,
            generation_kwargs={"min_new_tokens": tokens} if tokens else None,
            freeze_vision_tower=frozen,
            cache_image_features=frozen,
            feature_cache_dir=str(Path(folder) / "cache"),
            guard="off",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            learning_rate=1e-7,
        )
        trainer = SLETrainer(captioner, args, dataset, callbacks=[clock])
        rewards = trainer.rewards

        class _Timed:
            def __getattr__(self, name: str) -> Any:
                return getattr(rewards, name)

            def __call__(self, *arguments: Any, **keywords: Any) -> Any:
                start = time.process_time()
                found = rewards(*arguments, **keywords)
                rewarded.append(time.process_time() - start)
                return found

        trainer.rewards = _Timed()  # type: ignore[assignment]
        trainer.train()
    calls = len(rewarded) // (steps + 1)  # sampled and greedy captions
    of_step = [sum(rewarded[i : i + calls]) for i in range(0, len(rewarded), calls)]
    return {
        "num_images": num_images,
        "seconds": statistics.median(clock.seconds[1:]),
        "reward_seconds": statistics.median(of_step[1:]),
        "values": clock.seconds[1:],
    }


def made_up_data(number: int, image_size: int, seed: int) -> tuple[datasets.Dataset, list[str]]:
    """Noise with captions, and words enough for BLIP's vocabulary. Returns the data set, and 40,000 words."""
    rng, choice = np.random.default_rng(seed), random.Random(seed)
    words = ["".join(choice.choices("abcdefghijklmnopqrstuvwxyz", k=choice.randint(3, 9))) for _ in range(40_000)]
    captions = [[" ".join(choice.choices(words, k=12)) for _ in range(5)] for _ in range(number)]
    pixels = rng.integers(0, 256, (number, image_size, image_size, 3), dtype=np.uint8)
    columns = {
        "image": [Image.fromarray(one) for one in pixels],
        "image_id": [str(i) for i in range(number)],
        "captions": captions,
    }
    return datasets.Dataset.from_dict(columns), words
