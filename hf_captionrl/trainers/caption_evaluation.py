"""Evaluation of a trainer's model by what it writes: captions, their statistics, and whether they find their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor
from transformers.integrations import TensorBoardCallback

from hf_captionrl.captioners.base import Captioner
from hf_captionrl.captioners.sharding import is_sharded
from hf_captionrl.data import frames_of, open_still
from hf_captionrl.metrics import caption_statistics, self_retrieval
from hf_captionrl.metrics.suites.row import spoken
from hf_captionrl.reports.completions import log_completions, print_completions
from hf_captionrl.retrieval import Scorer
from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.captioning import LazyImages, VideoFeatures, generate_captions, scorer_features

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
    caption_eval_dataset: datasets.Dataset | None
    _features_of: dict[int, tuple[datasets.Dataset, Any]]
    _scorer_features_of: dict[tuple[int, int], tuple[Any, Any, Tensor]]

    if TYPE_CHECKING:  # what the trainer has

        def _image_tower_features(self, dataset: datasets.Dataset, args: CaptionConfig) -> Any: ...

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
        features = self._image_tower_features(dataset, self.args)
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
        eval_dataset: datasets.Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Caption the evaluation data, describe the captions and, with a scorer, find the images again from them.

        Args:
            eval_dataset (`datasets.Dataset`, *optional*): Instead of the one given at construction.
            ignore_keys (`list[str]`, *optional*): Unused; part of the Trainer's signature.
            metric_key_prefix (`str`): Prefix of every key.

        Returns:
            `dict[str, float]`: `length` (mean words), `lexical_diversity` (thousands), and with a scorer `recall_at_1`,
            `recall_at_5` (whole pool) and `rd100_recall_at_1` where the pool has 100 images; fractions.

        Raises:
            ValueError: If there are no evaluation data.
        """
        dataset = eval_dataset if eval_dataset is not None else self.caption_eval_dataset
        if dataset is None:
            raise ValueError("There are no evaluation data. Pass eval_dataset to evaluate or to the trainer.")
        captions = spoken(self.generate_captions(dataset))
        statistics = caption_statistics(captions)
        metrics: dict[str, float] = {
            "length": float(statistics["length"]),
            "lexical_diversity": float(statistics["lexical_diversity"]),
        }
        ranks = None
        if self.scorer is not None:
            text = torch.as_tensor(self.scorer.text_features(captions))
            images = self.scorer_image_features(self.scorer, dataset)
            pool = self_retrieval(text, images)
            ranks = pool["ranks"]
            metrics |= {k: float(pool[k]) for k in ("recall_at_1", "recall_at_5")}
            if len(captions) >= 100:
                metrics["rd100_recall_at_1"] = float(self_retrieval(text, images, num_distractors=99)["recall_at_1"])
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        if self.args.log_completions and self.is_world_process_zero():
            self._show_captions(dataset, captions, ranks, f"{metric_key_prefix}_completions")
        control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        self.control = control
        return metrics

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
