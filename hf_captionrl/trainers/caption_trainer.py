"""Base class of the captioning trainers.

Private overrides of transformers and TRL, which may break with their next release, and why each is needed:

| method | class | reason |
|:--|:--|:--|
| `_save_checkpoint` | ExactResumeTrainer | a checkpoint is written elsewhere and renamed when complete |
| `_init_training_state` | ExactResumeTrainer | restores states of ours; a run killed after its last step would take another one |
| `_load_from_checkpoint` | ExactResumeTrainer | names the folder for the next line |
| `_issue_warnings_after_load` | ExactResumeTrainer | LLaVA is saved under other names of weights; tied weights are saved once |
| `_save` | ExactResumeTrainer, CaptionTrainer | no pickle with the Hub's token; processor and facts beside the model |
| `_push_from_checkpoint` | ExactResumeTrainer | would upload the optimizer's pickle |
| `_prepare_inputs` | CaptionTrainer | the Trainer has just set a frozen vision tower to training mode |
| `_get_num_items_in_batch` | CaptionTrainer | counts supervised tokens over processes; see `CaptionTrainer` |
| `_determine_best_metric` | CaptionRLTrainer | a collapsed policy may have the highest recall |
| `_get_train_sampler` | SelfRetrievalGRPOTrainer | rollouts of bags |
| `_calculate_rewards` | SelfRetrievalGRPOTrainer | rewards see the images of all processes |
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from transformers import EvalPrediction, PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, set_seed
from transformers.trainer_utils import PredictionOutput, denumpify_detensorize, speed_metrics

import hf_captionrl.data as caption_data
import hf_captionrl.metrics as caption_metrics  # each metric is imported at its first use
from hf_captionrl.captioners.captioner import Captioner, is_sharded
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.captioners.pipeline import (
    ChosenImages,
    GeneratedCaptions,
    VideoFeatures,
    generate_with_ends,
    scorer_features,
    vision_tower_features,
)
from hf_captionrl.data import CaptionCollator, CaptionDataset, cached_pixels, evaluation_rows, frames_of, training_rows
from hf_captionrl.data.columns import caption_column, concept_column
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval.feature_cache import progress_bar
from hf_captionrl.retrieval.ranking import num_concepts
from hf_captionrl.trainers.caption_config import CaptionConfig, refuse_unsupported
from hf_captionrl.trainers.checkpoints import ExactResumeTrainer
from hf_captionrl.trainers.guard import UnchangedCallback, show_completions
from hf_captionrl.trainers.policy import autocast, make_policy, refuse_data_parallel

if TYPE_CHECKING:
    from hf_captionrl.retrieval import Scorer

logger = logging.getLogger(__name__)


class EpochCallback(TrainerCallback):
    """Sets the epoch of the training data, so that each epoch draws another caption of every image.

    Accelerate forwards the epoch to the sampler or to the data set, never to both, and a run resumed within an epoch on
    several processes restarts at epoch 0. This callback uses the trainer's state instead.

    Args:
        datasets ([`CaptionDataset`]): The training data, or a sampler: anything with `set_epoch`.
    """

    def __init__(self, *datasets: Any) -> None:
        self.datasets = list(datasets)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for dataset in self.datasets:  # the epoch is a sum of fractions: 0.9999999 means 1
            dataset.set_epoch(int((state.epoch or 0.0) + 1e-6))


def loader_settings(args: CaptionConfig) -> dict[str, Any]:
    """Arguments of a `DataLoader` for workers and memory."""
    settings: dict[str, Any] = {"num_workers": args.dataloader_num_workers, "pin_memory": args.dataloader_pin_memory}
    settings["in_order"] = getattr(args, "dataloader_in_order", True)  # not in all releases of transformers
    if args.dataloader_num_workers:
        settings |= {
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor or 2,
        }
    return settings


def references_of(dataset: Any) -> list[list[str]] | None:
    """The captions of each row of a data set; None if it has no captions."""
    if "captions" not in (getattr(dataset, "column_names", None) or ()):
        return None
    references = caption_column(dataset)
    return references if any(references) else None


class CaptionTrainer(ExactResumeTrainer):
    """`transformers.Trainer` for image captioners.

    It trains any [`Captioner`], draws one caption per image and epoch, and evaluates by generating captions and retrieving
    their images. It averages over supervised tokens itself, because the Trainer scales the gradients of several captioners
    by accumulation x processes (transformers #47688). Subclasses define the loss.

    Trainable weights are fp32. A model given by name is loaded in fp32, whatever its checkpoint holds; adapters and their
    `modules_to_save` stay in fp32 over a 16-bit base; other trainable weights in 16 bits are refused.

    Args:
        model (`Captioner`, `PreTrainedModel` or `str`, *optional*): The policy. A model or a name is passed to
            `load_captioner`. None only with `model_init`.
        args ([`CaptionConfig`], *optional*): Configuration. None: the defaults, in the folder `{model name}-{method}`.
        train_dataset (`datasets.Dataset`, *optional*): A data set that `load_captions` makes or accepts.
        eval_dataset (`datasets.Dataset` or `dict` of them, *optional*): As `train_dataset`; of several splits, `validation`. With
            several data sets, metrics are `eval_{name}_...`.
        processing_class (processor, *optional*): Processor, if `model` does not bring one.
        scorer ([`Scorer`], *optional*): Frozen image-text model for retrieval at evaluation.
        peft_config (`peft.PeftConfig` or `dict`, *optional*): Adapter to train: a `LoraConfig`, for instance of
            [`language_lora`]; a dict holds the arguments of `Captioner.lora_config`.
        callbacks (`list[TrainerCallback]`, *optional*): More callbacks.
        optimizers (`tuple`): Optimizer and scheduler, as for `Trainer`.
        model_init (`Callable`, *optional*): Instead of `model`: returns a value for `model`, a new one for each `train()`. It
            may take the trial of a hyperparameter search.
        compute_metrics (`Callable`, *optional*): From an `EvalPrediction` to a dict of numbers. `predictions` are the
            captions, one per image, `label_ids` lists of references.
    """

    args: CaptionConfig
    config_class: ClassVar[type[Any]] = CaptionConfig
    method_name = "Captioning"
    selecting_scorer: Scorer | None = None
    """Scorer of `reward_recall_at_1`, where `scorer` is held out and must not select."""
    whole_set_for: ClassVar[str | None] = None
    """Why no image may occur in several rows; None if it may."""
    ranks: Tensor | None = None
    """`(N,)` ranks of the images in the last evaluation with a scorer."""
    _tap_checked = False

    def __init__(
        self,
        model: Captioner | PreTrainedModel | str | None = None,
        args: CaptionConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: datasets.Dataset | Mapping[str, datasets.Dataset] | None = None,
        processing_class: Any | None = None,
        scorer: Scorer | None = None,
        peft_config: Any | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        *,
        model_init: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
    ) -> None:
        args = self._resolve_args(model, args)
        train_dataset = training_rows(train_dataset, whole_set_for=self.whole_set_for)
        eval_dataset = evaluation_rows(eval_dataset)
        if (model is None) == (model_init is None) or (model_init is not None and optimizers != (None, None)):
            raise ValueError("Pass a policy as model, or as model_init a function that makes it, without optimizers.")
        set_seed(args.seed)  # before an adapter draws its weights; the Trainer seeds later
        self.model_init = model_init
        self._policy_settings = {"processor": processing_class, "peft_config": peft_config}
        policy = super().call_model_init() if model is None else model
        self.captioner = make_policy(policy, args, **self._policy_settings)
        refuse_data_parallel(args, self.captioner.model)
        self.scorer = scorer
        self._once: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        lack = "There is no scorer" if self.scorer is None else ""
        if early := getattr(args, "early_evaluations", None):
            from hf_captionrl.trainers.dose import SMALLEST_SPLIT, DoseCallback

            self.dose = DoseCallback(self, early)
            callbacks = [*(callbacks or []), self.dose]
            if isinstance(eval_dataset, dict):
                raise ValueError(
                    "early_evaluations compare the captions of one split. Pass one data set as eval_dataset."
                )
            rows = eval_dataset or []
            if num_concepts(len(rows), concept_column(rows) if rows else None) < SMALLEST_SPLIT:
                lack = f"{SMALLEST_SPLIT} validation images are needed"
        if args.has_default_metric and lack:
            metric = args.metric_without_scorer
            args.has_default_metric, args.load_best_model_at_end = False, metric is not None
            args.metric_for_best_model = metric  # type: ignore[assignment]
            args.greater_is_better = None if metric is None else False
            if args.process_index == 0:
                last = "The run stops when captions are 1.1 times as long as the start's. Its" if early else "The"
                chosen = f"eval_{metric} selects the checkpoint" if metric else f"{last} last checkpoint is delivered"
                logger.warning("%s to select by retrieval. %s.", lack, chosen)
        self.image_rows = train_dataset
        args.max_caption_length = self._longest_caption(train_dataset, args)
        self.caption_collator = CaptionCollator(self.captioner, max_length=args.max_caption_length)
        items = None
        if train_dataset is not None:
            items = self._caption_dataset(train_dataset, args)
            self._epochs = EpochCallback(items)
            callbacks = [*(callbacks or []), self._epochs]
        self._unchanged = UnchangedCallback()
        super().__init__(
            model=self.captioner.model,
            args=args,
            data_collator=self.caption_collator,
            train_dataset=items,
            # The Trainer only asks whether there is one; `evaluate` below replaces its evaluation.
            eval_dataset=eval_dataset,
            processing_class=processing_class or self.captioner.processor,
            compute_metrics=compute_metrics,
            callbacks=[*(callbacks or []), self._unchanged],
            optimizers=optimizers,
        )
        self.model_init = model_init
        # Losses are divided by num_items_in_batch; without this, the Trainer would divide by the accumulation too.
        self.model_accepts_loss_kwargs = True

    # Policy

    @classmethod
    def _resolve_args(cls, model: Any, args: Any) -> Any:
        args = super()._resolve_args(model, args)
        refuse_unsupported(args)  # fields may have changed since it was created
        return args

    def call_model_init(self, trial: Any = None) -> Any:
        self.captioner = make_policy(super().call_model_init(trial), self.args, **self._policy_settings)
        self.caption_collator.captioner, self._tap_checked = self.captioner, False
        for key in [key for key in self._once if key[0] in ("tower", "pixels")]:
            del self._once[key]  # the new tower may differ
        if self.image_rows is not None:
            self.train_dataset = self._epochs.datasets[0] = self._caption_dataset(self.image_rows, self.args)
        return self.captioner.model

    # Data

    def _longest_caption(self, dataset: Any, args: CaptionConfig) -> int:
        """`max_caption_length`, chosen from the training captions if it is None; reports captions that lose their end token."""
        smallest = args.max_caption_length or CaptionCollator.max_length
        if dataset is None or (self.whole_set_for is not None and not getattr(args, "rl_start_epoch", 0)):
            return smallest  # there is no cross-entropy on captions
        texts = [text for group in references_of(dataset) or [] for text in group if (text or "").strip()]
        of_sample = "" if len(texts) <= 10_000 else f" of a sample of the {len(texts):,}"
        texts = random.Random(0).sample(texts, 10_000) if of_sample else texts  # of the same percentile
        batches = [texts[start : start + 256] for start in range(0, len(texts), 256)]
        rows = [self.captioner.encode_captions(batch, max_length=None)["attention_mask"].sum(1) for batch in batches]
        lengths = np.concatenate([*rows, [0] * (not rows)])
        most, positions = int(np.quantile(lengths, 0.99, method="inverted_cdf")), self.captioner.max_text_tokens
        chosen = args.max_caption_length or max(smallest, min(most, positions))
        limit = min(chosen, positions)
        if most <= limit:
            return chosen
        number = int((lengths > limit).sum())
        remedy = f"99 % need {most} tokens, the model has {positions}. Shorten them"
        remedy = remedy if most > positions else f"Use max_caption_length={most}, which covers 99 % of them"
        text = f"{number:,} of {len(texts):,} captions{of_sample} are truncated at {limit} tokens; the model never sees an end. {remedy}"
        if args.max_caption_length is None and number > len(texts) / 2:
            raise ValueError(f"{text}, or set max_caption_length to train on such captions.")
        if args.process_index == 0:
            logger.warning("%s.", text)
        return chosen

    def _cached(self, name: str, objects: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """What is computed once per data set (and scorer); they are kept alive so that their ids are not reused."""
        key = (name, *map(id, objects))
        if key not in self._once:
            self._once[key] = (objects, compute())
        return self._once[key][1]

    def _caption_dataset(self, dataset: Any, args: CaptionConfig, **more: Any) -> CaptionDataset:
        if number := frames_of(dataset):
            # Saved with the model, which must read videos in the same way later.
            self.captioner.frame_pooling, self.captioner.num_frames = args.frame_pooling, number
        return self._items(dataset, args, **more)

    def _items(self, dataset: Any, args: CaptionConfig, **more: Any) -> CaptionDataset:
        pixels, features = self._pixels(dataset, args), self._vision_tower_features(dataset, args)
        seed = args.seed if args.data_seed is None else args.data_seed
        return CaptionDataset(dataset, seed=seed, image_features=features, pixels=pixels, **more)

    def _vision_tower_features(self, dataset: datasets.Dataset, args: CaptionConfig) -> Any:
        """`(N, M, D)` output of the frozen vision tower; None where images are read in each step."""
        if not args.cache_image_features:
            if number := frames_of(dataset):
                raise ValueError(
                    f"The data are videos ({number} frames each). Set freeze_vision_tower=True and cache_image_features=True."
                )
            return None
        settings: dict[str, Any] = {"dtype": args.feature_cache_dtype, "frame_pooling": args.frame_pooling}
        return self._cached(
            "tower",
            (dataset,),
            lambda: vision_tower_features(self.captioner, dataset, cache_dir=args.feature_cache_dir, **settings),
        )

    def _pixels(self, dataset: datasets.Dataset, args: CaptionConfig) -> Any:
        """Prepared pixels of the images; None where images are read in each step, or features replace them."""
        if not args.cache_pixels:
            return None
        parts, folder = self.captioner.prepared_pixels, args.feature_cache_dir
        return self._cached("pixels", (dataset,), lambda: cached_pixels(dataset, parts, directory=folder))

    def scorer_image_features(self, scorer: Scorer, dataset: datasets.Dataset) -> Tensor:
        """Image features `(N, D)` of a scorer, fp32, computed once per data set; of a video the mean of its frames' features."""
        folder = self.args.feature_cache_dir
        return self._cached("scorer", (scorer, dataset), lambda: scorer_features(scorer, dataset, cache_dir=folder))

    # Loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # With dropout, the output of a frozen tower would differ from the cached one.
        if self.args.freeze_vision_tower:
            self.captioner.vision_tower.eval()
        return super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """Supervised tokens of one optimizer step over all its micro-batches and processes."""
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        number = torch.stack([(b["labels"] != IGNORE_INDEX).sum() for b in batch_samples]).sum().to(device)
        if self.args.world_size > 1:
            number = self.accelerator.gather(number.reshape(1)).sum()
        return number

    def check_supervised(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> None:
        """Refuse a step without supervised tokens; compare the head tap with the model's loss on the first batch of training."""
        number = (inputs["labels"] != IGNORE_INDEX).sum()
        if not (number if num_items_in_batch is None else num_items_in_batch):
            raise ValueError(
                "No token of this step is supervised. Raise max_caption_length, or check the captions with check_captions."
            )
        if number and not self._tap_checked and model.training:
            self._tap_checked = True
            with autocast(self.args):  # Accelerate's, inside the forward, is not seen by the tolerance
                self.captioner.self_check(inputs)

    def token_mean(self, total: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Mean over the tokens of the whole optimizer step, from the sum over the supervised tokens of a micro-batch.

        Its gradient, averaged over processes and summed over micro-batches, is that of the mean over all tokens, however the batch
        was split. `num_items_in_batch` are the supervised tokens of the step on all processes.
        """
        if num_items_in_batch is None:
            return total / (labels != IGNORE_INDEX).sum().clamp(min=1)
        # DDP and FSDP average over processes; undo it.
        return total / num_items_in_batch * self.accelerator.num_processes

    def loss_sum(self, inputs: dict[str, Any]) -> Tensor:
        """Summand of `eval_loss`, in nats: by default the cross-entropy of the references."""
        log_probs = self.captioner.log_probs(inputs, model=self.model)
        assert isinstance(log_probs, Tensor)
        return -log_probs.sum()

    # Evaluation

    def generate_captions(self, dataset: datasets.Dataset, **generate_kwargs: Any) -> list[str]:
        """Caption a data set with the model as it is; the processes share the work, and each gets the whole list.

        `generate_kwargs` override the configured decoding, e.g. `num_beams`.
        """
        return self._generate(dataset, **generate_kwargs).captions

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure the loss, caption the evaluation data, describe the captions and, with a scorer, retrieve the images.

        Args:
            eval_dataset (`datasets.Dataset`, a `dict` of them or `str`, *optional*): Instead of the trainer's, with the same
                column names; a name selects one of several. With several, keys begin with the prefix and the name.
            ignore_keys (`list[str]`, *optional*): Unused.
            metric_key_prefix (`str`): Prefix of every key.

        Returns:
            `dict[str, float]`: `loss` (nats per token of one reference per image, the same one in each epoch), `length`
            (mean words), `lexical_diversity` (thousands), `cider_d` (in [0, 10]), with a scorer `recall_at_1`, `recall_at_5` (whole
            pool) and, for 100 or more images, `rd100_recall_at_1`, all fractions; then the metrics of `compute_metrics`, and
            `runtime`. Without references there is neither `loss` nor `cider_d`.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, Mapping):
            dataset = self.eval_dataset.get(dataset, dataset)
        if dataset is None:
            raise ValueError("There are no evaluation data. Pass eval_dataset to evaluate or to the trainer.")
        if isinstance(dataset, Mapping):
            metrics: dict[str, float] = {}
            for name, rows in dataset.items():
                metrics |= self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        dataset = self._rows_of(dataset)
        self._memory_tracker.start()
        captions, ranks, metrics = self._measure(dataset, metric_key_prefix)
        self.ranks, self.pool_size = ranks, num_concepts(len(dataset), concept_column(dataset))
        self.log(metrics)
        if self.is_in_train:
            self._unchanged.compare(metric_key_prefix, captions, self.args, self.state)
        if self.args.log_completions and self.is_world_process_zero():
            self._show_captions(dataset, spoken(captions), ranks, f"{metric_key_prefix}_completions")
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """As `evaluate`, of the split `test` of several, without logging.

        Returns:
            `PredictionOutput`: `predictions`, one caption per image; `label_ids`, lists of references or None; `metrics`.
        """
        dataset = self._rows_of(test_dataset, "test")
        self._memory_tracker.start()
        captions, _, metrics = self._measure(dataset, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(captions, references_of(dataset), metrics)  # type: ignore[arg-type]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches with one reference per image, the same in each epoch, for `evaluation_loop`."""
        return self.get_test_dataloader(self.eval_dataset if eval_dataset is None else eval_dataset, "validation")

    def get_test_dataloader(self, test_dataset: Any, split: str = "test") -> DataLoader:
        """As `get_eval_dataloader`, of the split `test` of several."""
        data: Any = Subset(*self._reference_items(self._rows_of(test_dataset, split)))
        settings = loader_settings(self.args) | {"collate_fn": self.caption_collator}
        return self.accelerator.prepare(DataLoader(data, self.args.eval_batch_size, **settings))  # type: ignore[no-any-return]

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, None, None]:
        """`eval_loss` of a batch with references; instead of logits, `predict` gives captions."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            return self.loss_sum(inputs) / (inputs["labels"] != IGNORE_INDEX).sum(), None, None

    def _rows_of(self, dataset: Any, split: str = "validation") -> datasets.Dataset:
        """The data under the usual column names; the same object for the same data, so that caches find it."""
        return self._cached(f"rows of {split}", (dataset,), lambda: evaluation_rows(dataset, split))

    def _measure(self, dataset: datasets.Dataset, prefix: str) -> tuple[list[str], Any, dict[str, float]]:
        """Captions as generated, ranks of the images, and metrics with the prefix."""
        start = time.time()
        references = references_of(dataset)
        loss = None if references is None else self._reference_loss(dataset)
        captions, ended = self._generate(dataset)
        shown = spoken(captions)
        described, ranks = self._describe(dataset, shown)
        metrics: dict[str, Any] = {} if loss is None else {"loss": loss}
        rows = [row for row, texts in enumerate(references or []) if any(text.strip() for text in texts)]
        if references is not None and rows:
            scores = caption_metrics.cider_d([shown[row] for row in rows], [references[row] for row in rows])
            metrics["cider_d"] = float(scores["cider_d"])
        metrics |= described | ({} if self.guard is None else self.guard.check_captions(captions, ended))
        if self.compute_metrics is not None and references is not None:
            prediction = EvalPrediction(predictions=captions, label_ids=references)  # type: ignore[arg-type]
            metrics |= denumpify_detensorize(dict(self.compute_metrics(prediction)))
        metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        steps = math.ceil(len(dataset) / (self.args.eval_batch_size * self.args.world_size))
        return captions, ranks, metrics | speed_metrics(prefix, start, num_samples=len(dataset), num_steps=steps)

    def _generate(self, dataset: datasets.Dataset, **generate_kwargs: Any) -> GeneratedCaptions:
        """As `generate_captions`, with whether each caption ended before the length limit."""
        args = self.args
        rows = self._shard(len(dataset))
        features = self._known_features(dataset, rows)
        beams, longest = args.generation_num_beams, args.generation_max_new_tokens
        shown = not args.disable_tqdm and args.process_index == 0
        # Short evaluations show no bar.
        with autocast(args), progress_bar(len(rows), shown and "Captioning", "", delay=5) as bar:
            local = generate_with_ends(
                self.captioner,
                None if features is not None else ChosenImages(self._pixels(dataset, args) or dataset["image"], rows),
                image_features=features,
                batch_size=args.generation_batch_size or args.per_device_eval_batch_size,
                progress=None if bar is None else lambda done: bar.update(done - bar.n),
                **{"num_beams": beams, "max_new_tokens": longest, **generate_kwargs},
            )
        if self.accelerator.num_processes == 1:
            return local
        gathered = {row: pair for row, *pair in gather_object(list(zip(rows, *local, strict=True)))}
        captions, ended = zip(*(gathered[row] for row in sorted(gathered)), strict=True)
        return GeneratedCaptions(list(captions), list(ended))

    def _reference_loss(self, dataset: datasets.Dataset) -> float | None:
        """Mean nats per supervised token of one reference per image, the same in each epoch; None without references."""
        args = self.args
        items, rows = self._reference_items(dataset)
        if not rows:
            return None
        size, number = args.per_device_eval_batch_size, len(rows)
        local = rows[self.accelerator.process_index :: self.accelerator.num_processes]  # none twice, unlike `_shard`
        batches = [local[start : start + size] for start in range(0, len(local), size)]
        # Each process runs the same number of forwards, or a sharded model would hang; extra batches are not counted.
        missing = math.ceil(math.ceil(number / self.accelerator.num_processes) / size) - len(batches)
        loader = DataLoader(
            items,
            batch_sampler=[*batches, *[rows[:1]] * missing],  # type: ignore[arg-type]
            collate_fn=self.caption_collator,
            **loader_settings(args) | ({"persistent_workers": False} if args.dataloader_num_workers else {}),
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

    def _reference_items(self, dataset: datasets.Dataset) -> tuple[CaptionDataset, list[int]]:
        """The images with one reference each, and the rows of those that have any."""
        rows = [row for row, texts in enumerate(references_of(dataset) or []) if any(t.strip() for t in texts)]
        return self._items(dataset, self.args, resample=False), rows

    def _show_captions(self, dataset: datasets.Dataset, captions: list[str], ranks: Any | None, tag: str) -> None:
        """Print the first captions of an evaluation and send them to the trackers."""
        number = min(self.args.num_completions_to_print, len(dataset))
        rows = list(dataset.select(range(number)))
        columns = {
            "image_id": [row.get("image_id", index) for index, row in enumerate(rows)],
            "caption": captions[:number],
            "reference": [
                next(iter(texts), "") for texts in references_of(dataset.select(range(number))) or [[]] * number
            ],
        }
        columns |= {} if ranks is None else {"rank": list(map(int, ranks[:number]))}
        images = list(map(caption_data.open_still, rows))
        show_completions(columns, images, step=self.state.global_step, report_to=self.args.report_to, tag=tag)

    def _shard(self, number: int) -> list[int]:
        """Rows of this process: every world_size-th one.

        If FSDP2 shards the model, its forward needs every process. All processes then get the same number of rows; the last
        row is repeated where rows are missing.
        """
        accelerator = self.accelerator
        rows = list(range(accelerator.process_index, number, accelerator.num_processes))
        if is_sharded(self.captioner.model):
            share = -(-number // accelerator.num_processes)
            rows += [number - 1] * (share - len(rows))
        return rows

    def _known_features(self, dataset: datasets.Dataset, rows: Sequence[int]) -> Any:
        """Output of the frozen vision tower for some rows, by position; None where images are read."""
        is_cached = ("tower", id(dataset)) in self._once
        if self.args.cache_image_features and not is_cached and is_sharded(self.captioner.model):
            # While the cache is filled, processes skip what another one has stored, so their numbers of forwards differ.
            number, images = frames_of(dataset), ChosenImages(dataset["image"], rows)
            return VideoFeatures(self.captioner, images, number, self.args.frame_pooling) if number else None
        features = self._vision_tower_features(dataset, self.args)
        return None if features is None else [features[i] for i in rows]

    def _describe(self, dataset: datasets.Dataset, captions: list[str]) -> tuple[dict[str, float], Any]:
        statistics, concepts = caption_metrics.caption_statistics(captions), concept_column(dataset)
        metrics = {name: float(statistics[name]) for name in ("length", "lexical_diversity")}
        ranks = None
        for prefix, scorer in (("reward_", self.selecting_scorer), ("", self.scorer)):
            if scorer is None:
                continue
            text = torch.as_tensor(scorer.text_features(captions)).cpu()  # where the cached features of the images are
            images = self.scorer_image_features(scorer, dataset)
            pool = caption_metrics.self_retrieval(text, images, concepts=concepts)
            ranks = pool["ranks"]  # the last ones are those of the trainer's scorer
            keys = ("recall_at_1", *["recall_at_5"] * (pool["pool_size"] > 5))
            metrics |= {prefix + k: float(pool[k]) for k in keys}
            if pool["pool_size"] >= 100:
                random = caption_metrics.self_retrieval(text, images, num_distractors=99, concepts=concepts)
                metrics[f"{prefix}rd100_recall_at_1"] = float(random["recall_at_1"])
        return metrics, ranks

    # Saving

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        # Some families have an image processor and a tokenizer but no processor that joins them.
        self.captioner.save_processor(output_dir or self.args.output_dir)
