"""Evaluation of a trainer's model by what it writes: captions, their statistics, and whether they find their images."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import PredictionOutput, denumpify_detensorize, speed_metrics

from hf_captionrl.captioners.base import Captioner
from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.captioners.sharding import is_sharded
from hf_captionrl.data import CaptionDataset, evaluation_rows, frames_of, open_still
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.metrics import caption_statistics, self_retrieval
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.reports.completion_log import log_completions, print_completions
from hf_captionrl.retrieval import Scorer
from hf_captionrl.trainers.best_metric import references_of
from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_generation import LazyImages, VideoFeatures, generate_captions, scorer_features

__all__ = ["CaptionEvaluation"]


def _first_reference(captions: Any) -> str:
    if isinstance(captions, str):
        return captions
    return next(iter(captions or ()), "")


class CaptionEvaluation:
    """The part of [`CaptionTrainer`] that captions data sets and measures what was written."""

    args: CaptionConfig
    captioner: Captioner
    accelerator: Any
    callback_handler: Any
    state: Any
    scorer: Scorer | None
    caption_collator: Any
    caption_eval_dataset: datasets.Dataset | Mapping[str, datasets.Dataset] | None
    compute_metrics: Any
    _features_of: dict[int, tuple[datasets.Dataset, Any]]
    _memory_tracker: Any
    _read_rows: dict[int, tuple[Any, datasets.Dataset]]
    _scorer_features_of: dict[tuple[int, int], tuple[Any, Any, Tensor]]

    if TYPE_CHECKING:  # what the trainer has

        def _vision_tower_features(self, dataset: datasets.Dataset, args: CaptionConfig) -> Any: ...

        def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]: ...

        def loader_settings(self) -> dict[str, Any]: ...

        def loss_sum(self, inputs: dict[str, Any]) -> Tensor: ...

        def is_world_process_zero(self) -> bool: ...

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...

    def _shard(self, number: int) -> list[int]:
        """Rows of this process: every world_size-th one.

        Where FSDP2 shards the model, its forward needs every process. All get the same number of rows then, the last of
        them twice where rows are missing.
        """
        rows = list(range(self.accelerator.process_index, number, self.accelerator.num_processes))
        if is_sharded(self.captioner.model):
            share = -(-number // self.accelerator.num_processes)
            rows += [number - 1] * (share - len(rows))
        return rows

    def _known_features(self, dataset: datasets.Dataset, rows: Sequence[int]) -> Any:
        """Output of the frozen vision tower for some rows, indexable by their position; None where images are read."""
        cached = self._features_of.get(id(dataset))
        if cached is None and is_sharded(self.captioner.model) and self.args.cache_image_features:
            # Processes that fill the cache skip what another one has stored, so their numbers of forwards differ.
            if not (number := frames_of(dataset)):
                return None
            videos = LazyImages(dataset, rows)
            return VideoFeatures(self.captioner, videos, number, self.args.frame_pooling)
        features = self._vision_tower_features(dataset, self.args)
        return None if features is None else [features[i] for i in rows]

    def generate_captions(self, dataset: datasets.Dataset, **generate_kwargs: Any) -> list[str]:
        """Caption a data set with the model as it is, shared among the processes.

        Args:
            dataset (`datasets.Dataset`): With an `image` column.
            generate_kwargs: Override the configured decoding, e.g. `num_beams`.

        Returns:
            `list[str]`: One caption a row, the same list on every process.
        """
        rows = self._shard(len(dataset))
        features = self._known_features(dataset, rows)
        settings = {
            "num_beams": self.args.generation_num_beams,
            "max_new_tokens": self.args.generation_max_new_tokens,
            **generate_kwargs,
        }
        mine = generate_captions(
            self.captioner,
            None if features is not None else LazyImages(dataset, rows),
            image_features=features,
            batch_size=self.args.generation_batch_size or self.args.per_device_eval_batch_size,
            **settings,
        )
        if self.accelerator.num_processes == 1:
            return mine
        from accelerate.utils import gather_object

        pairs = gather_object(list(zip(rows, mine, strict=True)))
        return [caption for _, caption in sorted(dict(pairs).items())]

    def scorer_image_features(self, scorer: Scorer, dataset: datasets.Dataset) -> Tensor:
        """Image features of a scorer, computed once a data set; of a video the mean of its frames', at unit length.

        Args:
            scorer ([`Scorer`]): Who looks at the images.
            dataset (`datasets.Dataset`): With an `image` column.

        Returns:
            `torch.Tensor` of shape `(N, D)`: Unit length, fp32.
        """
        key = (id(scorer), id(dataset))
        if key not in self._scorer_features_of:
            features = scorer_features(scorer, dataset, cache_dir=self.args.feature_cache_dir)
            # Scorer and data set are held so that their ids stay their own.
            self._scorer_features_of[key] = (scorer, dataset, features)
        return self._scorer_features_of[key][2]

    def evaluate(
        self,
        eval_dataset: datasets.Dataset | Mapping[str, datasets.Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure the loss, caption the evaluation data, describe the captions and, with a scorer, find the images again.

        Args:
            eval_dataset (`datasets.Dataset`, a `dict` of them or `str`, *optional*): Instead of the one given at construction,
                with the same names of columns; a name picks one of several. Of several, keys begin with the prefix and the name.
            ignore_keys (`list[str]`, *optional*): Unused; part of the Trainer's signature.
            metric_key_prefix (`str`): Prefix of every key.

        Returns:
            `dict[str, float]`: `loss` (nats per token of the references, one of each image, the same in each epoch), `length`
            (mean words), `lexical_diversity` (thousands), with a scorer `recall_at_1`, `recall_at_5` (whole pool) and
            `rd100_recall_at_1` where the pool has 100 images, fractions; then what `compute_metrics` gives, and `runtime`.
            Without references there is no `loss`, with `prediction_loss_only` nothing else.

        Raises:
            ValueError: If there are no evaluation data.
        """
        dataset = self._named_eval_dataset(eval_dataset)
        if isinstance(dataset, Mapping):
            found: dict[str, float] = {}
            for name, rows in dataset.items():
                found |= self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        dataset = self._rows_as_read(dataset)
        self._memory_tracker.start()
        start = time.time()
        captions, ranks, metrics = self._measure(dataset, metric_key_prefix)
        metrics |= self._speed(metric_key_prefix, start, len(dataset))
        self.log(metrics)
        if captions is not None and self.args.log_completions and self.is_world_process_zero():
            self._show_captions(dataset, spoken(captions), ranks, f"{metric_key_prefix}_completions")
        control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        self.control = control
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: datasets.Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Caption a data set and measure the captions as `evaluate` does, without logging.

        Args:
            test_dataset (`datasets.Dataset`): As `eval_dataset` at construction; with captions the loss and `compute_metrics` are
                computed too.
            ignore_keys (`list[str]`, *optional*): Unused; part of the Trainer's signature.
            metric_key_prefix (`str`): Prefix of every key.

        Returns:
            `PredictionOutput`: `predictions`, one caption an image; `label_ids`, lists of references or None; `metrics`.
        """
        test_dataset = self._rows_as_read(test_dataset)
        self._memory_tracker.start()
        start = time.time()
        captions, _, metrics = self._measure(test_dataset, metric_key_prefix, writes=True)
        metrics |= self._speed(metric_key_prefix, start, len(test_dataset))
        control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        self.control = control
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(predictions=captions, label_ids=references_of(test_dataset), metrics=metrics)  # type: ignore[arg-type]

    def _rows_as_read(self, dataset: Any) -> datasets.Dataset:
        """Images and captions under the names that are read here; of the same data the same object, for the caches."""
        if id(dataset) not in self._read_rows:
            # Held so that the id stays its own.
            self._read_rows[id(dataset)] = (dataset, evaluation_rows(dataset))
        return self._read_rows[id(dataset)][1]

    def _named_eval_dataset(self, dataset: Any) -> Any:
        if isinstance(dataset, str):
            known = list(self.caption_eval_dataset) if isinstance(self.caption_eval_dataset, Mapping) else []
            if dataset not in known:
                raise ValueError(
                    f"eval_dataset is {dataset!r}, and the trainer has {known}. Use one of them, or a data set."
                )
            return self.caption_eval_dataset[dataset]  # type: ignore[index]
        dataset = dataset if dataset is not None else self.caption_eval_dataset
        if dataset is None:
            raise ValueError("There are no evaluation data. Pass eval_dataset to evaluate or to the trainer.")
        return dataset

    def _measure(
        self, dataset: datasets.Dataset, prefix: str, *, writes: bool = False
    ) -> tuple[list[str] | None, Any, dict[str, float]]:
        """Captions as written, ranks of the images, and metrics under the prefix."""
        references = references_of(dataset)
        metrics: dict[str, Any] = {}
        loss = None if references is None else self.evaluation_loss(dataset)
        if loss is not None:
            metrics["loss"] = loss
        captions = ranks = None
        if writes or not self.args.prediction_loss_only:
            captions = self.generate_captions(dataset)
            described, ranks = self._describe(dataset, spoken(captions))
            metrics |= described
            if self.compute_metrics is not None and references is not None:
                metrics |= self._computed(dataset, captions, references, prefix)
        elif loss is None:
            raise ValueError(
                "prediction_loss_only is True, and the evaluation data have no captions to measure a loss on. Use False, or "
                "data with a column 'captions'."
            )
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        return captions, ranks, named

    def _describe(self, dataset: datasets.Dataset, captions: list[str]) -> tuple[dict[str, float], Any]:
        statistics = caption_statistics(captions)
        metrics = {
            "length": float(statistics["length"]),
            "lexical_diversity": float(statistics["lexical_diversity"]),
        }
        if self.scorer is None:
            return metrics, None
        text = torch.as_tensor(self.scorer.text_features(captions))
        images = self.scorer_image_features(self.scorer, dataset)
        pool = self_retrieval(text, images)
        metrics |= {k: float(pool[k]) for k in ("recall_at_1", "recall_at_5")}
        if len(captions) >= 100:
            metrics["rd100_recall_at_1"] = float(self_retrieval(text, images, num_distractors=99)["recall_at_1"])
        return metrics, pool["ranks"]

    def _computed(
        self, dataset: datasets.Dataset, captions: list[str], references: list[list[str]], prefix: str
    ) -> dict[str, Any]:
        """What the user's `compute_metrics` gives."""
        ids = None
        if "inputs" in self.args.include_for_metrics:
            named = "image_id" in dataset.column_names
            ids = [str(i) for i in dataset["image_id"]] if named else [str(i) for i in range(len(dataset))]
        prediction = EvalPrediction(predictions=captions, label_ids=references, inputs=ids)  # type: ignore[arg-type]
        found = self.compute_metrics(prediction)
        if not isinstance(found, Mapping):
            raise TypeError(f"compute_metrics returned a {type(found).__name__}. Return a dict of names and numbers.")
        return denumpify_detensorize(dict(found))

    def _speed(self, prefix: str, start: float, number: int) -> dict[str, float]:
        batch = self.args.eval_batch_size * self.args.world_size
        return speed_metrics(prefix, start, num_samples=number, num_steps=math.ceil(number / batch))

    def evaluation_loss(self, dataset: datasets.Dataset) -> float | None:
        """Mean loss per supervised token of one reference of each image, the same one whatever the epoch.

        Args:
            dataset (`datasets.Dataset`): Images with captions.

        Returns:
            `float`: In nats; None where no image has a caption.
        """
        rows = [row for row, texts in enumerate(references_of(dataset) or []) if any(t.strip() for t in texts)]
        if not rows:
            return None
        items = CaptionDataset(
            dataset,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            image_features=self._vision_tower_features(dataset, self.args),
            resample=False,
        )
        size, number = self.args.per_device_eval_batch_size, len(rows)
        own = [rows[index] for index in self._shard(number)]
        batches = [own[start : start + size] for start in range(0, len(own), size)]
        # Each process runs equally many forwards, or a sharded model would wait for ever: the rest counts for nothing.
        missing = math.ceil(math.ceil(number / self.accelerator.num_processes) / size) - len(batches)
        loader = DataLoader(
            items,
            batch_sampler=[*batches, *[rows[:1]] * missing],  # type: ignore[arg-type]
            collate_fn=self.caption_collator,
            **{
                **self.loader_settings(),
                **({"persistent_workers": False} if self.args.dataloader_num_workers else {}),
            },
        )
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad(), evaluating(self.captioner.model), self.accelerator.autocast():
            for step, batch in enumerate(loader):
                batch = self._prepare_inputs(batch)
                total = float(self.loss_sum(batch))
                if step < len(batches):
                    sums += torch.tensor([total, float((batch["labels"] != IGNORE_INDEX).sum())], dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.gather(sums[None].to(self.accelerator.device)).sum(0).cpu()
        return float(sums[0] / sums[1].clamp(min=1))

    def _show_captions(self, dataset: datasets.Dataset, captions: list[str], ranks: Any | None, tag: str) -> None:
        """The first captions of an evaluation, on the terminal and in the trackers."""
        shown = list(dataset.select(range(min(self.args.num_completions_to_print, len(dataset)))))
        rows = [
            {
                "image_id": row.get("image_id", index),
                "caption": captions[index],
                "reference": _first_reference(row.get("captions")),
                "rank": None if ranks is None else int(ranks[index]),
            }
            for index, row in enumerate(shown)
        ]
        print_completions(rows, step=self.state.global_step)
        log_completions(
            rows,
            [open_still(row) for row in shown],
            step=self.state.global_step,
            report_to=self.args.report_to,
            tensorboard_writer=self.tensorboard_writer,
            tag=tag,
        )

    @property
    def tensorboard_writer(self) -> Any | None:
        """The writer of transformers' `TensorBoardCallback`; None where nothing is reported to tensorboard."""
        callbacks = self.callback_handler.callbacks
        return next((c.tb_writer for c in callbacks if isinstance(c, TensorBoardCallback)), None)
