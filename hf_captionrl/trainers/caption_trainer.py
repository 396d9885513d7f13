"""Base class of the captioning trainers.

Private overrides of transformers and TRL, which may break with their next release, and why each is needed:

| method | class | reason |
|:--|:--|:--|
| `_save_checkpoint` | ExactResumeTrainer | a checkpoint is written elsewhere and renamed when complete |
| `_init_training_state` | ExactResumeTrainer | restores states of ours; a run killed after its last step would take another one |
| `_load_from_checkpoint` | ExactResumeTrainer | names the folder for the next line |
| `_load_best_model` | ExactResumeTrainer | a broken file would end a finished training with an error, and lose its weights |
| `_issue_warnings_after_load` | ExactResumeTrainer | LLaVA is saved under other names of weights; tied weights are saved once |
| `_save` | ExactResumeTrainer, CaptionTrainer | no pickle with the Hub's token; processor and facts beside the model |
| `_push_from_checkpoint` | ExactResumeTrainer | would upload the optimizer's pickle |
| `_track_num_input_tokens` | CaptionTrainer | would count pixels |
| `_prepare_inputs` | CaptionTrainer | the Trainer has just set a frozen vision tower to training mode |
| `_get_num_items_in_batch` | CaptionTrainer | counts supervised tokens over processes; see `CaptionTrainer` |
| `_determine_best_metric` | CaptionRLTrainer | a collapsed policy may have the highest recall |
| `_get_train_sampler` | SelfRetrievalGRPOTrainer | rollouts of bags |
| `_calculate_rewards` | SelfRetrievalGRPOTrainer | rewards see the images of all processes |
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import PredictionOutput, denumpify_detensorize, speed_metrics

import hf_captionrl.data as caption_data
import hf_captionrl.metrics as caption_metrics  # each metric is imported at its first use
from hf_captionrl.captioners.captioner import Captioner, is_sharded
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.captioners.pipeline import (
    GeneratedCaptions,
    LazyImages,
    VideoFeatures,
    generate_with_ends,
    scorer_features,
    vision_tower_features,
)
from hf_captionrl.data import (
    CaptionCollator,
    CaptionDataset,
    cached_pixels,
    evaluation_rows,
    frames_of,
    training_rows,
)
from hf_captionrl.data.columns import caption_column
from hf_captionrl.data.features import image_hashes
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval.feature_cache import progress_bar
from hf_captionrl.trainers.caption_config import CaptionConfig, refuse_unsupported
from hf_captionrl.trainers.checkpoints import ExactResumeTrainer
from hf_captionrl.trainers.guard import UnchangedCallback, log_completions, print_completions
from hf_captionrl.trainers.policy import autocast, make_policy, refuse_data_parallel

if TYPE_CHECKING:
    from hf_captionrl.retrieval import Scorer

logger = logging.getLogger(__name__)


class EpochCallback(TrainerCallback):
    """Sets the epoch of the training data, so that each epoch draws another caption of every image.

    Accelerate forwards the epoch to the sampler or to the data set, never to both, and a run resumed within an epoch on
    several processes restarts at epoch 0. This callback uses the trainer's state instead.

    Args:
        dataset ([`CaptionDataset`]): The training data, or a sampler: anything with `set_epoch`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The epoch is a sum of fractions: 0.9999999 means 1.
        self.dataset.set_epoch(int((state.epoch or 0.0) + 1e-6))


def loader_settings(args: CaptionConfig) -> dict[str, Any]:
    """Arguments of a `DataLoader` for workers and memory."""
    settings: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory,
        # Older releases of transformers do not have this field, nor that of the context.
        "in_order": getattr(args, "dataloader_in_order", True),
    }
    if args.dataloader_num_workers:
        settings |= {
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor or 2,
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
        }
    return settings


def references_of(dataset: Any) -> list[list[str]] | None:
    """The captions of each row of a data set; None if it has no captions."""
    if "captions" not in (getattr(dataset, "column_names", None) or ()):
        return None
    found = caption_column(dataset)
    return found if any(found) else None


def check_best_metric(
    args: CaptionConfig, sets: Mapping[str, Any], has_scorer: bool, has_selecting_scorer: bool
) -> None:
    """Refuse a metric for the best model that evaluation of these sets, by name, does not compute, before training."""
    wanted = str(args.metric_for_best_model or "").removeprefix("eval_")
    if args.has_default_metric and not has_scorer:
        return  # the trainer chooses another
    used = args.load_best_model_at_end or args.save_strategy == "best"
    if not wanted or not (used or args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")):
        return
    known = []
    for name, rows in sets.items():
        own = ["loss"] if "captions" in (getattr(rows, "column_names", None) or ()) else []
        if not args.prediction_loss_only:
            own += ["length", "lexical_diversity", *(["cider_d"] if own else [])]
            for prefix in (*([""] if has_scorer else []), *(["reward_"] if has_selecting_scorer else [])):
                own += [f"{prefix}recall_at_1", f"{prefix}recall_at_5"]
                own += [f"{prefix}rd100_recall_at_1"] if rows is not None and len(rows) >= 100 else []
            own += ["degenerate", "clipped_ratio"] if getattr(args, "guard", "off") != "off" else []
        own += ["runtime", "samples_per_second", "steps_per_second"]
        known += [f"{name}_{metric}" if name else metric for metric in own]
    if wanted not in known:
        raise ValueError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, which evaluation does not compute. Use one of "
            f"{', '.join(known)}, pass the scorer that recall needs, compute it in compute_metrics, or leave "
            "metric_for_best_model out, as --scorer none alone does."
        )


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
        data_collator (`Callable`, *optional*): From a list of [`CaptionItem`] to a batch, instead of a
            [`CaptionCollator`]; the batch must have the keys of `Captioner.collate`.
        model_init (`Callable`, *optional*): Instead of `model`: returns a value for `model`, a new one for each `train()`. It
            may take the trial of a hyperparameter search.
        compute_metrics (`Callable`, *optional*): From an `EvalPrediction` to a dict of numbers. `predictions` are the
            captions, one per image, `label_ids` lists of references; with `include_for_metrics=["inputs"]`, `inputs` are
            the image ids.
    """

    args: CaptionConfig
    config_class: ClassVar[type[Any]] = CaptionConfig
    method_name = "Captioning"
    selecting_scorer: Scorer | None = None
    """Scorer of `reward_recall_at_1`, where `scorer` is held out and must not select."""
    start_metrics: Mapping[str, float] = MappingProxyType({})
    """Evaluation of the captioner before training, if it was measured: what the warning of invented details compares with."""
    whole_set_for: ClassVar[str | None] = None
    """Why no image may occur in several rows; None if it may."""
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
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        model_init: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: None = None,
    ) -> None:
        if preprocess_logits_for_metrics is not None:
            raise ValueError(
                "preprocess_logits_for_metrics gets no logits: captions are generated. Use compute_metrics."
            )
        args = self._resolve_args(model, args)
        train_dataset = training_rows(train_dataset, whole_set_for=self.whole_set_for)
        eval_dataset = evaluation_rows(eval_dataset)
        if (model is None) == (model_init is None) or (model_init is not None and optimizers != (None, None)):
            raise ValueError(
                "Pass the policy as model, or as model_init a function that makes it, without optimizers."
            )
        set_seed(args.seed)  # before an adapter draws its weights; the Trainer seeds later
        self._policy_settings = {"processor": processing_class, "peft_config": peft_config}
        self.model_init = model_init
        made = super().call_model_init() if model is None else model
        self.captioner = make_policy(made, args, **self._policy_settings)
        refuse_data_parallel(args, self.captioner.model)
        self.scorer = scorer
        self._once: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        if compute_metrics is None and type(self).evaluate is CaptionTrainer.evaluate:
            if args.has_default_metric and self.scorer is None:
                self._select_without_scorer(args)
            sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
            check_best_metric(args, sets, self.scorer is not None, self.selecting_scorer is not None)
        self._train_source = train_dataset
        self.caption_collator: Any = data_collator or CaptionCollator(
            self.captioner, max_length=args.max_caption_length
        )
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

    @staticmethod
    def _select_without_scorer(args: CaptionConfig) -> None:
        metric = args.metric_without_scorer
        args.has_default_metric, args.load_best_model_at_end = False, metric is not None
        args.metric_for_best_model = metric  # type: ignore[assignment]
        args.greater_is_better = None if metric is None else False
        if args.process_index == 0:
            chosen = "The last checkpoint is delivered" if metric is None else f"eval_{metric} selects the checkpoint"
            logger.warning(
                "There is no scorer to select by retrieval. %s; metric_for_best_model names another.", chosen
            )

    # Policy

    @classmethod
    def _resolve_args(cls, model: Any, args: Any) -> Any:
        args = super()._resolve_args(model, args)
        refuse_unsupported(args)  # fields may have changed since it was created
        return args

    def call_model_init(self, trial: Any = None) -> Any:
        made = super().call_model_init(trial)
        self.captioner = make_policy(made, self.args, **self._policy_settings)
        self._tap_checked = False
        if isinstance(self.caption_collator, CaptionCollator):
            self.caption_collator.captioner = self.captioner
        if (self.args.cache_image_features or self.args.cache_pixels) and self._train_source is not None:
            for key in [key for key in self._once if key[0] in ("tower", "pixels")]:
                del self._once[key]  # the new tower may differ
            self.train_dataset = self._epochs.dataset = self._caption_dataset(self._train_source, self.args)
        return self.captioner.model

    # Data

    def _kept(self, name: str, objects: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """What is computed once per data set (and scorer); they are kept alive so that their ids are not reused."""
        key = (name, *map(id, objects))
        if key not in self._once:
            self._once[key] = (objects, compute())
        return self._once[key][1]

    def _caption_dataset(self, dataset: Any, args: CaptionConfig, **more: Any) -> CaptionDataset:
        pixels, features = self._pixels(dataset, args), self._vision_tower_features(dataset, args)
        if number := frames_of(dataset):
            # Saved with the model, which must read videos in the same way later.
            self.captioner.frame_pooling, self.captioner.num_frames = args.frame_pooling, number
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
        return self._kept(
            "tower",
            (dataset,),
            lambda: vision_tower_features(self.captioner, dataset, cache_dir=args.feature_cache_dir, **settings),
        )

    def _pixels(self, dataset: datasets.Dataset, args: CaptionConfig) -> Any:
        """Prepared pixels of the images; None where images are read in each step, or features replace them."""
        if not args.cache_pixels:
            return None
        parts, folder = self.captioner.prepared_pixels, args.feature_cache_dir
        return self._kept("pixels", (dataset,), lambda: cached_pixels(dataset, parts, directory=folder))

    def scorer_image_features(self, scorer: Scorer, dataset: datasets.Dataset) -> Tensor:
        """Image features `(N, D)` of a scorer, fp32, computed once per data set; of a video the mean of its frames' features."""
        folder = self.args.feature_cache_dir
        return self._kept("scorer", (scorer, dataset), lambda: scorer_features(scorer, dataset, cache_dir=folder))

    def training_image_hashes(self) -> list[str]:
        rows = self._train_source
        if not isinstance(rows, datasets.Dataset):
            return []
        return self._kept("hashes", (rows,), lambda: image_hashes(rows))

    # Loss

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count text tokens; the Trainer would count pixels where the main input is an image."""
        kind = self.args.include_num_input_tokens_seen
        if kind == "no":
            return
        rows = (inputs["labels"] != IGNORE_INDEX).any(1)  # (B,): not those that only fill the last batch of an epoch
        tokens = inputs["attention_mask"] if kind == "non_padding" else torch.ones_like(inputs["input_ids"])
        mine = tokens[rows].sum().to(self.args.device, torch.int64)
        self.state.num_input_tokens_seen += int(self.accelerator.gather(mine.reshape(1)).sum())

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
            (mean words), `lexical_diversity` (thousands), `cider_d` (in [0, 10]), with a scorer `recall_at_1`, `recall_at_5` (whole pool) and, for
            100 or more images, `rd100_recall_at_1`, all fractions; then the metrics of `compute_metrics`, and `runtime`.
            Without references there is neither `loss` nor `cider_d`; with `prediction_loss_only` there is nothing else.
        """
        dataset = self._evaluated(eval_dataset)
        if isinstance(dataset, Mapping):
            found: dict[str, float] = {}
            for name, rows in dataset.items():
                found |= self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        dataset = self._rows_of(dataset)
        self._memory_tracker.start()
        captions, ranks, metrics = self._measure(dataset, metric_key_prefix)
        self.log(metrics)
        self._warn_of_runaway(dataset, metrics, metric_key_prefix)
        if captions is not None:
            self._unchanged.compare(metric_key_prefix, captions, self.args, self.state, is_training=self.is_in_train)
        if captions is not None and self.args.log_completions and self.is_world_process_zero():
            self._show_captions(dataset, spoken(captions), ranks, f"{metric_key_prefix}_completions")
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def _evaluated(self, eval_dataset: Any) -> Any:
        """The data that an argument `eval_dataset` means."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, Mapping):
            if dataset not in self.eval_dataset:
                raise ValueError(f"eval_dataset is {dataset!r}. Use one of {list(self.eval_dataset)}, or a data set.")
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ValueError("There are no evaluation data. Pass eval_dataset to evaluate or to the trainer.")
        return dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of one data set, of which `evaluate` measures the loss: one reference per image, the same in each epoch."""
        dataset = self._evaluated(eval_dataset)
        if isinstance(dataset, Mapping):
            raise ValueError(f"There are several evaluation data. Pass as eval_dataset one of {list(dataset)}.")
        # The Trainer's own method would keep the first data set's workers for all.
        return self._reference_loader(self._rows_of(dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As `get_eval_dataloader`, of the split `test` of several."""
        return self._reference_loader(self._rows_of(test_dataset, "test"))

    def _reference_loader(self, dataset: datasets.Dataset) -> DataLoader:
        items, rows = self._reference_items(dataset)
        return super().get_test_dataloader(Subset(items, rows))

    def _warn_of_runaway(self, dataset: datasets.Dataset, metrics: Mapping[str, float], prefix: str) -> None:
        """Warn where captions outgrow the references while fewer find their image: detail that is not in the image."""
        recall, length = (metrics.get(f"{prefix}_{name}") for name in ("recall_at_1", "length"))
        seen = [entry for entry in (self.start_metrics, *self.state.log_history) if f"{prefix}_recall_at_1" in entry]
        words = [len(text.split()) for texts in references_of(dataset) or [] for text in texts]
        if recall is None or length is None or not seen or not words or not self.is_world_process_zero():
            return
        best, human = max(seen, key=lambda entry: entry[f"{prefix}_recall_at_1"]), sum(words) / len(words)
        if length > 1.25 * human and recall < 0.8 * best[f"{prefix}_recall_at_1"]:
            logger.warning(
                "Captions have %.1f words, the references %.1f, and R@1 fell from %.3f at step %d to %.3f: the captions invent "
                "details. Keep that checkpoint (metric_for_best_model='recall_at_1'), and use a lower learning_rate, a higher "
                "mle_weight, or a stronger start.",
                *(length, human, best[f"{prefix}_recall_at_1"], best.get("step", 0), recall),
            )

    def predict(
        self, test_dataset: datasets.Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Caption a data set and measure the captions as `evaluate` does, without logging.

        Args:
            test_dataset (`datasets.Dataset`): As `eval_dataset`, but of several splits `test`; references are optional.
            ignore_keys (`list[str]`, *optional*): Unused; part of the Trainer's signature.
            metric_key_prefix (`str`): Prefix of every key.

        Returns:
            `PredictionOutput`: `predictions`, one caption per image; `label_ids`, lists of references or None; `metrics`.
        """
        test_dataset = self._rows_of(test_dataset, "test")
        self._memory_tracker.start()
        captions, _, metrics = self._measure(test_dataset, metric_key_prefix, generate=True)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(predictions=captions, label_ids=references_of(test_dataset), metrics=metrics)  # type: ignore[arg-type]

    @property
    def tensorboard_writer(self) -> Any | None:
        """The writer of transformers' `TensorBoardCallback`; None where nothing is reported to tensorboard."""
        callbacks = self.callback_handler.callbacks
        return next((c.tb_writer for c in callbacks if isinstance(c, TensorBoardCallback)), None)

    def _rows_of(self, dataset: Any, split: str = "validation") -> datasets.Dataset:
        """The data under the usual column names; the same object for the same data, so that caches find it."""
        name = "rows" if isinstance(dataset, datasets.Dataset) else f"rows of {split}"
        return self._kept(name, (dataset,), lambda: evaluation_rows(dataset, split))

    def _measure(
        self, dataset: datasets.Dataset, prefix: str, *, generate: bool = False
    ) -> tuple[list[str] | None, Any, dict[str, float]]:
        """Captions as generated, ranks of the images, and metrics with the prefix."""
        start = time.time()
        references = references_of(dataset)
        loss = None if references is None else self._reference_loss(dataset)
        metrics: dict[str, Any] = {} if loss is None else {"loss": loss}
        captions = ranks = None
        if generate or not self.args.prediction_loss_only:
            captions, ended = self._generate(dataset)
            shown = spoken(captions)
            described, ranks = self._describe(dataset, shown)
            rows = [row for row, texts in enumerate(references or []) if any(text.strip() for text in texts)]
            if references is not None and rows:
                found = caption_metrics.cider_d([shown[row] for row in rows], [references[row] for row in rows])
                metrics["cider_d"] = float(found["cider_d"])
            metrics |= described | ({} if self.guard is None else self.guard.check_captions(captions, ended))
            if self.compute_metrics is not None and references is not None:
                metrics |= self._computed(dataset, captions, references)
        elif loss is None:
            raise ValueError(
                "prediction_loss_only is True, and the evaluation data have no column 'captions'. Use False."
            )
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        batch = self.args.eval_batch_size * self.args.world_size
        steps = math.ceil(len(dataset) / batch)
        return captions, ranks, named | speed_metrics(prefix, start, num_samples=len(dataset), num_steps=steps)

    def _generate(self, dataset: datasets.Dataset, **generate_kwargs: Any) -> GeneratedCaptions:
        """As `generate_captions`, with whether each caption ended before the length limit."""
        args = self.args
        rows = self._shard(len(dataset))
        features = self._known_features(dataset, rows)
        beams, longest = args.generation_num_beams, args.generation_max_new_tokens
        shown = not args.disable_tqdm and args.process_index == 0
        # Short evaluations show no bar.
        with autocast(args), progress_bar(len(rows), shown and "Captioning", "", delay=5) as bar:
            mine = generate_with_ends(
                self.captioner,
                None if features is not None else LazyImages(self._pixels(dataset, args) or dataset, rows),
                image_features=features,
                batch_size=args.generation_batch_size or args.per_device_eval_batch_size,
                progress=None if bar is None else lambda done: bar.update(done - bar.n),
                **{"num_beams": beams, "max_new_tokens": longest, **generate_kwargs},
            )
        if self.accelerator.num_processes == 1:
            return mine
        gathered = {row: found for row, *found in gather_object(list(zip(rows, *mine, strict=True)))}
        captions, ended = zip(*(gathered[row] for row in sorted(gathered)), strict=True)
        return GeneratedCaptions(list(captions), list(ended))

    def _reference_loss(self, dataset: datasets.Dataset) -> float | None:
        """Mean nats per supervised token of one reference per image, the same in each epoch; None without references."""
        args = self.args
        items, rows = self._reference_items(dataset)
        if not rows:
            return None
        size, number = args.per_device_eval_batch_size, len(rows)
        own = rows[self.accelerator.process_index :: self.accelerator.num_processes]  # none twice, unlike `_shard`
        batches = [own[start : start + size] for start in range(0, len(own), size)]
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
        args = self.args
        rows = [row for row, texts in enumerate(references_of(dataset) or []) if any(t.strip() for t in texts)]
        pixels, features = self._pixels(dataset, args), self._vision_tower_features(dataset, args)
        seed = args.seed if args.data_seed is None else args.data_seed
        return CaptionDataset(dataset, seed=seed, pixels=pixels, image_features=features, resample=False), rows

    def _show_captions(self, dataset: datasets.Dataset, captions: list[str], ranks: Any | None, tag: str) -> None:
        """Print the first captions of an evaluation and send them to the trackers."""
        step = self.state.global_step
        first = dataset.select(range(min(self.args.num_completions_to_print, len(dataset))))
        shown, references = list(first), references_of(first) or [[]] * len(first)
        rows = [
            {
                "image_id": row.get("image_id", index),
                "caption": captions[index],
                "reference": next(iter(references[index]), ""),
                "rank": None if ranks is None else int(ranks[index]),
            }
            for index, row in enumerate(shown)
        ]
        print_completions(rows, step=step)
        images, writer = [caption_data.open_still(row) for row in shown], self.tensorboard_writer
        log_completions(rows, images, step=step, report_to=self.args.report_to, tensorboard_writer=writer, tag=tag)

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
            number, images = frames_of(dataset), LazyImages(dataset, rows)
            return VideoFeatures(self.captioner, images, number, self.args.frame_pooling) if number else None
        features = self._vision_tower_features(dataset, self.args)
        return None if features is None else [features[i] for i in rows]

    def _describe(self, dataset: datasets.Dataset, captions: list[str]) -> tuple[dict[str, float], Any]:
        statistics = caption_metrics.caption_statistics(captions)
        metrics = {name: float(statistics[name]) for name in ("length", "lexical_diversity")}
        ranks = None
        for prefix, scorer in (("reward_", self.selecting_scorer), ("", self.scorer)):
            if scorer is None:
                continue
            text = torch.as_tensor(scorer.text_features(captions)).cpu()  # where the cached features of the images are
            images = self.scorer_image_features(scorer, dataset)
            pool = caption_metrics.self_retrieval(text, images)
            ranks = pool["ranks"]  # the last ones are those of the trainer's scorer
            metrics |= {prefix + k: float(pool[k]) for k in ("recall_at_1", "recall_at_5")}
            if len(captions) >= 100:
                random = caption_metrics.self_retrieval(text, images, num_distractors=99)
                metrics[f"{prefix}rd100_recall_at_1"] = float(random["recall_at_1"])
        return metrics, ranks

    def _computed(self, dataset: datasets.Dataset, captions: list[str], references: list[list[str]]) -> dict[str, Any]:
        """Metrics of the user's `compute_metrics`."""
        ids = None
        if "inputs" in self.args.include_for_metrics:
            ids = list(map(str, dataset["image_id"] if "image_id" in dataset.column_names else range(len(dataset))))
        prediction = EvalPrediction(predictions=captions, label_ids=references, inputs=ids)  # type: ignore[arg-type]
        found = self.compute_metrics(prediction)
        if not isinstance(found, Mapping):
            raise TypeError(f"compute_metrics returned a {type(found).__name__}. Return a dict of names and numbers.")
        return denumpify_detensorize(dict(found))

    # Saving

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        # Some families have an image processor and a tokenizer but no processor that joins them.
        self.captioner.save_processor(output_dir or self.args.output_dir)
