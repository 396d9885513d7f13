"""Finetunes a captioner on an album by self-retrieval, and keeps the result only if a held-out scorer prefers it.

Legend: M images, D features.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_captionrl.album.image_facts import read_images
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.pipelines import ChosenImages
from hf_captionrl.retrieval import FeatureCache, Scorer, nearest_neighbours
from hf_captionrl.retrieval.ranking import ranks
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.trainers.caption_generation import generate_captions
from hf_captionrl.trainers.checkpoints import has_checkpoint

__all__ = ["MOST_MEASURED", "Adapted", "adapt_to_album"]

MOST_MEASURED = 500
"""Largest number of images whose captions are used for the decision."""
_BAG = 5
_SAVE_SECONDS = 60  # between checkpoints
_MAX_DEGENERATE = 0.1
_NEIGHBOURS = 20


@dataclass(frozen=True)
class Adapted:
    """The captioner to use."""

    captioner: Captioner  # with the adapter if it was kept, else as it was loaded
    facts: dict[str, Any]  # whether it was kept and why, steps, R@1 before and after by both scorers, and a sentence


class _Clock(TrainerCallback, ExportableState):
    """Ends the training when its time is over, saves checkpoints, and shows a bar; a resumed training has the time that is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.interval = seconds, min(_SAVE_SECONDS, seconds / 5)
        self.used = 0.0
        self._images = 0
        self._before = self._start = self._saved = 0.0
        self._bar: Any = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"used": self.used}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        from tqdm import tqdm

        kept: Any = state.stateful_callbacks.get(type(self).__name__, {}) if state.global_step else {}
        self._before = self.used = float(kept.get("attributes", {}).get("used", 0.0))
        self._start = self._saved = time.monotonic()
        shape = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
        self._bar = tqdm(total=self.seconds, desc="adapting", bar_format=shape, disable=None)
        self._show(0.0, state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.monotonic()
        self.used = self._before + now - self._start
        self._images += args.train_batch_size
        self._show(self._images / max(now - self._start, 1e-9), state)
        if control.should_training_stop:  # the guard stopped, and may have loaded earlier weights
            return
        control.should_training_stop = self.used >= self.seconds
        # Also at the end: the command may be killed while the captions are measured.
        if control.should_training_stop or now - self._saved >= self.interval:
            control.should_save, self._saved = True, now

    def _show(self, rate: float, state: TrainerState) -> None:
        self._bar.set_postfix_str(f"{state.global_step} steps, {rate:.1f} images/s", refresh=False)
        self._bar.update(min(self.used, self.seconds) - self._bar.n)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._bar.close()


def adapt_to_album(
    load: Callable[[], Captioner],
    scorer: Scorer,
    held_out: Scorer,
    images: Sequence[Any],
    folder: str | os.PathLike[str],
    *,
    seconds: float,
    cache_dir: str | None = None,
    learning_rate: float = 1e-4,
    batch_size: int = 20,
    seed: int = 0,
    max_steps: int = 1_000_000,
    resume: bool = False,
) -> Adapted:
    """Train a LoRA on the images of the album for a given time; this needs no captions.

    The reward is self-retrieval among look-alikes: bags of 5, which the reward scorer builds, or random images in small albums.
    The guard stops the training if captions degenerate, and returns to the last checkpoint before that. The adapter is used if
    there is such a checkpoint and, with one caption per image from beam search, the held-out scorer ranks more images first than
    before. It is saved in either case.

    `held_out` decides and should not be the scorer; `load` is called again if the adapter is not kept. With `resume`, a training that was
    killed resumes from its last checkpoint in `folder` for the remaining time.
    """
    caches = [FeatureCache.for_scorer(one, cache_dir) for one in (scorer, held_out)]
    facts = read_images(images, scorer, cache=caches[0], skip_unreadable=True)
    first = list({key: at for at, key in reversed(list(enumerate(facts.keys)))}.values())
    first.sort()  # an image must not be its own distractor
    rows = [facts.rows[at] for at in first]
    if len(rows) < 2:
        raise ValueError(
            f"The album has {len(rows)} different images, and self-retrieval needs at least 2. Leave --adapt out."
        )
    chosen = ChosenImages(images, rows)
    features = facts.features[torch.tensor(first)]
    held_out_features = read_images(chosen, held_out, cache=caches[1]).features
    captioner = load()
    scorers = {"scorer": (scorer, features), "held_out": (held_out, held_out_features)}
    said = _captions(captioner, chosen)
    before = _measure(said, scorers)
    trainer, bags = _trainer(
        captioner, scorer, held_out, chosen, list(said.values()), features, Path(folder), learning_rate, batch_size
    )
    trainer.args.seed, trainer.args.max_steps = seed, max_steps
    trainer.add_callback(_Clock(seconds))
    with contextlib.redirect_stdout(
        sys.stderr
    ):  # the numbers that the Trainer prints are not the result of the command
        trainer.train(resume_from_checkpoint=resume and has_checkpoint(folder))
    after = _measure(_captions(captioner, chosen), scorers)
    captioner.save_pretrained(Path(folder))
    reason = _reason_against(trainer, before, after)
    rolled_back_to = None if trainer.guard is None else trainer.guard.rolled_back_to
    found = {
        "kept": reason is None,
        "reason": reason,
        "steps": trainer.state.global_step,
        "rolled_back_to": None if rolled_back_to is None else Path(rolled_back_to).name,
        "seconds": seconds,
        "bags_of": bags,
        "before": before,
        "after": after,
        "adapter": str(folder),
    }
    found["sentence"] = (
        f"Adapted in {found['steps']} steps: R@1 of the held-out scorer {before['held_out']:.3f} before, {after['held_out']:.3f} "
        f"after, of the reward scorer {before['scorer']:.3f} and {after['scorer']:.3f}. "
        + (f"The guard returned to {found['rolled_back_to']}. " if rolled_back_to else "")
        + ("The adapter is used." if reason is None else f"The adapter is not used: {reason}")
    )
    return Adapted(captioner if reason is None else load(), found)


def _trainer(
    captioner: Captioner,
    scorer: Scorer,
    held_out: Scorer,
    images: Sequence[Any],
    said: Sequence[str],
    features: Tensor,
    folder: Path,
    learning_rate: float,
    batch_size: int,
) -> tuple[SelfRetrievalTrainer, int | None]:
    number = len(images)
    uses_bags = number >= 4 * batch_size and batch_size % _BAG == 0
    args = SelfRetrievalConfig(
        str(folder),
        max_steps=1,
        learning_rate=learning_rate,
        per_device_train_batch_size=min(batch_size, number),
        do_sample=True,
        bag_schedule=str(_BAG) if uses_bags else None,
        max_completion_length=min(40, *(one.max_text_tokens - 2 for one in (scorer, held_out))),
        guard="rollback",
        save_strategy="no",  # the clock saves
        save_total_limit=3,  # the newest may have been saved when the captions had begun to degenerate
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        freeze_vision_tower=True,
    )
    column = datasets.Image(decode=False)
    encoded = [image if isinstance(image, dict) else column.encode_example(image) for image in _plain(images)]
    # Captions of the captioner before training. No reward uses them, but the guard compares lengths with them.
    captions = [[said[row % len(said)] or "-"] for row in range(number)]
    table = {"image": encoded, "image_id": [str(row) for row in range(number)], "captions": captions}
    types = {
        "image": datasets.Image(),
        "image_id": datasets.Value("string"),
        "captions": datasets.List(datasets.Value("string")),
    }
    neighbours = nearest_neighbours(features, min(_NEIGHBOURS, number - 1))[0] if uses_bags else None
    trainer = SelfRetrievalTrainer(
        captioner,
        scorer,
        args,
        train_dataset=datasets.Dataset.from_dict(table, datasets.Features(types)),
        held_out_scorer=held_out,
        neighbours=neighbours,
        peft_config=captioner.lora_config(),
    )
    return trainer, _BAG if uses_bags else None


def _plain(images: Sequence[Any]) -> list[Any]:
    return [os.fspath(image) if isinstance(image, os.PathLike) else image for image in images]


def _captions(captioner: Captioner, images: Sequence[Any]) -> dict[int, str]:
    """One caption from beam search for each of some images, by row."""
    step = max(1, len(images) // MOST_MEASURED)
    rows = list(range(0, len(images), step))[:MOST_MEASURED]
    captions = generate_captions(captioner, ChosenImages(images, rows), do_sample=False, num_beams=3)
    return dict(zip(rows, captions, strict=True))


def _measure(captions: dict[int, str], scorers: dict[str, tuple[Scorer, Tensor]]) -> dict[str, float]:
    """R@1 of captions among the album by each scorer, and the share of degenerate captions."""
    texts = list(captions.values())
    found = {"degenerate": sum(degenerate(texts)) / len(texts)}
    for name, (scorer, features) in scorers.items():
        text = scorer.text_features(spoken(texts)).float().cpu()
        found[name] = float((ranks(text, features, list(captions)) == 1).double().mean())
    return found


def _reason_against(trainer: SelfRetrievalTrainer, before: dict[str, float], after: dict[str, float]) -> str | None:
    """Why the adapter is not used; None if it is."""
    if trainer.guard is not None and trainer.guard.trips and trainer.guard.rolled_back_to is None:
        return f"the guard stopped the training: {trainer.guard.trips[0]['reason']}"
    if after["degenerate"] > max(_MAX_DEGENERATE, before["degenerate"]):
        return f"{after['degenerate']:.0%} of its captions are degenerate."
    if after["held_out"] <= before["held_out"]:
        return "the held-out scorer does not rank more images first."
    return None
