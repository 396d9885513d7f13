"""Evaluation of a trainer's model: loss of the references, captions, their statistics, and retrieval of the images."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_utils import denumpify_detensorize, speed_metrics

from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.captioners.sharding import is_sharded
from hf_captionrl.data import CaptionDataset, evaluation_rows, frames_of, open_still
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.metrics import caption_statistics, self_retrieval
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.reports.completion_log import log_completions, print_completions
from hf_captionrl.trainers.best_metric import references_of
from hf_captionrl.trainers.caption_generation import (
    GeneratedCaptions,
    LazyImages,
    VideoFeatures,
    generate_with_ends,
)
from hf_captionrl.trainers.loaders import loader_settings

if TYPE_CHECKING:
    from hf_captionrl.trainers.caption_trainer import CaptionTrainer

__all__ = ["CaptionEvaluator"]


def _first_reference(captions: Any) -> str:
    if isinstance(captions, str):
        return captions
    return next(iter(captions or ()), "")


class CaptionEvaluator:
    """Captions data sets with the model of a [`CaptionTrainer`] and measures the captions."""

    def __init__(self, trainer: CaptionTrainer, eval_dataset: Any) -> None:
        self.trainer = trainer
        self.eval_dataset = eval_dataset
        # Keyed by the data set's id; the data set is kept alive so that its id is not reused.
        self._read_rows: dict[int, tuple[Any, datasets.Dataset]] = {}

    def named_dataset(self, dataset: Any) -> Any:
        """The data set of a name, the data set given, or the trainer's."""
        if isinstance(dataset, str):
            known = list(self.eval_dataset) if isinstance(self.eval_dataset, Mapping) else []
            if dataset not in known:
                raise ValueError(
                    f"eval_dataset is {dataset!r}, and the trainer has {known}. Use one of these names, or a data set."
                )
            return self.eval_dataset[dataset]  # type: ignore[index]
        dataset = dataset if dataset is not None else self.eval_dataset
        if dataset is None:
            raise ValueError("There are no evaluation data. Pass eval_dataset to evaluate or to the trainer.")
        return dataset

    def read_rows(self, dataset: Any) -> datasets.Dataset:
        """The data under the usual column names; the same object for the same data, so that caches find it."""
        if id(dataset) not in self._read_rows:
            # Kept alive so that the id is not reused.
            self._read_rows[id(dataset)] = (dataset, evaluation_rows(dataset))
        return self._read_rows[id(dataset)][1]

    def measure(
        self, dataset: datasets.Dataset, prefix: str, *, generate: bool = False
    ) -> tuple[list[str] | None, Any, dict[str, float]]:
        """Captions as generated, ranks of the images, and metrics with the prefix."""
        start = time.time()
        references = references_of(dataset)
        metrics: dict[str, Any] = {}
        loss = None if references is None else self.loss(dataset)
        if loss is not None:
            metrics["loss"] = loss
        captions = ranks = None
        if generate or not self.trainer.args.prediction_loss_only:
            captions, ended = self.generate(dataset)
            described, ranks = self._describe(dataset, spoken(captions))
            guard = self.trainer.guard
            metrics |= described | ({} if guard is None else guard.check_captions(captions, ended))
            if self.trainer.compute_metrics is not None and references is not None:
                metrics |= self._computed(dataset, captions, references)
        elif loss is None:
            raise ValueError(
                "prediction_loss_only is True, and the evaluation data have no captions for a loss. Use False, or "
                "data with a column 'captions'."
            )
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        batch = self.trainer.args.eval_batch_size * self.trainer.args.world_size
        steps = math.ceil(len(dataset) / batch)
        return captions, ranks, named | speed_metrics(prefix, start, num_samples=len(dataset), num_steps=steps)

    def generate_captions(self, dataset: datasets.Dataset, **generate_kwargs: Any) -> list[str]:
        """Captions of all rows, the same list on every process; `generate_kwargs` override the configured decoding."""
        return self.generate(dataset, **generate_kwargs).captions

    def generate(self, dataset: datasets.Dataset, **generate_kwargs: Any) -> GeneratedCaptions:
        """As `generate_captions`, with the captions that the length limit truncated."""
        trainer, args = self.trainer, self.trainer.args
        rows = self._shard(len(dataset))
        features = self._known_features(dataset, rows)
        settings = {
            "num_beams": args.generation_num_beams,
            "max_new_tokens": args.generation_max_new_tokens,
            **generate_kwargs,
        }
        mine = generate_with_ends(
            trainer.captioner,
            None if features is not None else LazyImages(self._pixels(dataset) or dataset, rows),
            image_features=features,
            batch_size=args.generation_batch_size or args.per_device_eval_batch_size,
            **settings,
        )
        if trainer.accelerator.num_processes == 1:
            return mine
        from accelerate.utils import gather_object

        gathered = {row: found for row, *found in gather_object(list(zip(rows, *mine, strict=True)))}
        captions, ended = zip(*(gathered[row] for row in sorted(gathered)), strict=True)
        return GeneratedCaptions(list(captions), list(ended))

    def loss(self, dataset: datasets.Dataset) -> float | None:
        """Mean nats per supervised token of one reference per image, the same in each epoch; None without references."""
        trainer, args = self.trainer, self.trainer.args
        rows = [row for row, texts in enumerate(references_of(dataset) or []) if any(t.strip() for t in texts)]
        if not rows:
            return None
        items = CaptionDataset(
            dataset,
            seed=args.seed if args.data_seed is None else args.data_seed,
            **trainer.features.inputs(trainer.captioner, dataset, args),
            resample=False,
        )
        size, number = args.per_device_eval_batch_size, len(rows)
        own = [rows[index] for index in self._shard(number)]
        batches = [own[start : start + size] for start in range(0, len(own), size)]
        # Each process runs the same number of forwards, or a sharded model would hang; extra batches are not counted.
        missing = math.ceil(math.ceil(number / trainer.accelerator.num_processes) / size) - len(batches)
        loader = DataLoader(
            items,
            batch_sampler=[*batches, *[rows[:1]] * missing],  # type: ignore[arg-type]
            collate_fn=trainer.caption_collator,
            **{
                **loader_settings(args),
                **({"persistent_workers": False} if args.dataloader_num_workers else {}),
            },
        )
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad(), evaluating(trainer.captioner.model), trainer.accelerator.autocast():
            for step, batch in enumerate(loader):
                batch = trainer._prepare_inputs(batch)
                total = float(trainer.loss_sum(batch))
                if step < len(batches):
                    sums += torch.tensor([total, float((batch["labels"] != IGNORE_INDEX).sum())], dtype=torch.float64)
        if trainer.accelerator.num_processes > 1:
            sums = trainer.accelerator.gather(sums[None].to(trainer.accelerator.device)).sum(0).cpu()
        return float(sums[0] / sums[1].clamp(min=1))

    def show_captions(self, dataset: datasets.Dataset, captions: list[str], ranks: Any | None, tag: str) -> None:
        """Print the first captions of an evaluation and send them to the trackers."""
        trainer, args = self.trainer, self.trainer.args
        shown = list(dataset.select(range(min(args.num_completions_to_print, len(dataset)))))
        rows = [
            {
                "image_id": row.get("image_id", index),
                "caption": captions[index],
                "reference": _first_reference(row.get("captions")),
                "rank": None if ranks is None else int(ranks[index]),
            }
            for index, row in enumerate(shown)
        ]
        print_completions(rows, step=trainer.state.global_step)
        log_completions(
            rows,
            [open_still(row) for row in shown],
            step=trainer.state.global_step,
            report_to=args.report_to,
            tensorboard_writer=trainer.tensorboard_writer,
            tag=tag,
        )

    def _shard(self, number: int) -> list[int]:
        """Rows of this process: every world_size-th one.

        If FSDP2 shards the model, its forward needs every process. All processes then get the same number of rows; the last
        row is repeated where rows are missing.
        """
        accelerator = self.trainer.accelerator
        rows = list(range(accelerator.process_index, number, accelerator.num_processes))
        if is_sharded(self.trainer.captioner.model):
            share = -(-number // accelerator.num_processes)
            rows += [number - 1] * (share - len(rows))
        return rows

    def _pixels(self, dataset: datasets.Dataset) -> Any:
        return self.trainer.features.pixels(self.trainer.captioner, dataset, self.trainer.args)

    def _known_features(self, dataset: datasets.Dataset, rows: Sequence[int]) -> Any:
        """Output of the frozen vision tower for some rows, by position; None where images are read."""
        trainer, args = self.trainer, self.trainer.args
        is_cached = id(dataset) in trainer.features.of_vision_tower
        if not is_cached and is_sharded(trainer.captioner.model) and args.cache_image_features:
            # While the cache is filled, processes skip what another one has stored, so their numbers of forwards differ.
            if not (number := frames_of(dataset)):
                return None
            videos = LazyImages(dataset, rows)
            return VideoFeatures(trainer.captioner, videos, number, args.frame_pooling)
        features = trainer.features.vision_tower(trainer.captioner, dataset, args)
        return None if features is None else [features[i] for i in rows]

    def _describe(self, dataset: datasets.Dataset, captions: list[str]) -> tuple[dict[str, float], Any]:
        statistics = caption_statistics(captions)
        metrics = {
            "length": float(statistics["length"]),
            "lexical_diversity": float(statistics["lexical_diversity"]),
        }
        ranks = None
        for prefix, scorer in (("reward_", self.trainer.selecting_scorer), ("", self.trainer.scorer)):
            if scorer is None:
                continue
            text = torch.as_tensor(scorer.text_features(captions)).cpu()  # where the cached features of the images are
            images = self.trainer.scorer_image_features(scorer, dataset)
            pool = self_retrieval(text, images)
            ranks = pool["ranks"]  # the last ones are those of the trainer's scorer
            metrics |= {prefix + k: float(pool[k]) for k in ("recall_at_1", "recall_at_5")}
            if len(captions) >= 100:
                random = self_retrieval(text, images, num_distractors=99)
                metrics[f"{prefix}rd100_recall_at_1"] = float(random["recall_at_1"])
        return metrics, ranks

    def _computed(self, dataset: datasets.Dataset, captions: list[str], references: list[list[str]]) -> dict[str, Any]:
        """Metrics of the user's `compute_metrics`."""
        ids = None
        if "inputs" in self.trainer.args.include_for_metrics:
            named = "image_id" in dataset.column_names
            ids = [str(i) for i in dataset["image_id"]] if named else [str(i) for i in range(len(dataset))]
        prediction = EvalPrediction(predictions=captions, label_ids=references, inputs=ids)  # type: ignore[arg-type]
        found = self.trainer.compute_metrics(prediction)
        if not isinstance(found, Mapping):
            raise TypeError(f"compute_metrics returned a {type(found).__name__}. Return a dict of names and numbers.")
        return denumpify_detensorize(dict(found))
