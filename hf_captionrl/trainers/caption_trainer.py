"""Base class of the captioning trainers: data, frozen towers, token counts, evaluation by captions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import datasets
import torch
from torch import Tensor
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.data import (
    CaptionCollator,
    CaptionDataset,
    StreamedCaptions,
    evaluation_rows,
    frames_of,
    training_rows,
)
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.retrieval import Scorer
from hf_captionrl.trainers.best_metric import check_best_metric
from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_evaluation import CaptionEvaluation
from hf_captionrl.trainers.caption_generation import vision_tower_features
from hf_captionrl.trainers.devices import refuse_data_parallel
from hf_captionrl.trainers.policy import PolicyMaking
from hf_captionrl.trainers.resumable import ReliableTraining
from hf_captionrl.trainers.training_facts import write_training_facts

__all__ = ["CaptionTrainer", "EpochCallback"]


class EpochCallback(TrainerCallback):
    """Tells the training data which epoch it is, so that each epoch draws its own caption of every image.

    Accelerate forwards the epoch to either the sampler or the data set, never to both, and a mid-epoch resume on several
    processes starts again at epoch 0; this callback asks the trainer's state instead.

    Args:
        dataset ([`CaptionDataset`]): The training data, or a sampler: what has `set_epoch`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the epoch.

        Args:
            args (`TrainingArguments`): Unused.
            state (`TrainerState`): Knows the epoch, as a fraction.
            control (`TrainerControl`): Unused.
            kwargs (`Any`): Unused.
        """
        # The epoch is a sum of fractions: 0.9999999 means 1.
        self.dataset.set_epoch(int((state.epoch or 0.0) + 1e-6))


class CaptionTrainer(CaptionEvaluation, PolicyMaking, ReliableTraining, Trainer):
    """`transformers.Trainer` for image captioners.

    It adapts any [`Captioner`] to the Trainer's world, draws one caption an image and epoch, encodes images of a frozen
    tower once, evaluates by generating and by finding images from what was generated, and counts supervised tokens
    itself: the Trainer scales the gradients of several captioners by accumulation x processes (transformers #47688).
    Subclasses say what the loss is.

    Trainable weights are fp32: a model given by name is loaded so whatever its checkpoint is stored in, adapters and their
    `modules_to_save` are kept so over a base in 16 bits, whoever added them, and other trainable weights in 16 bits are
    refused.

    Args:
        model (`Captioner`, `PreTrainedModel` or `str`, *optional*): The policy; what is not a captioner yet goes through
            `load_captioner`. None only with `model_init`.
        args ([`CaptionConfig`], *optional*): Configuration. None: the defaults, in the folder `{model name}-{method}`.
        train_dataset (`datasets.Dataset`, *optional*): What `load_captions` makes or accepts: images with captions under
            usual names of columns, with or without `image_id`. [`SmileTrainer`] also trains on a
            `datasets.IterableDataset`, with `max_steps`.
        eval_dataset (`datasets.Dataset` or `dict` of them, *optional*): Likewise, but never iterable; of several, metrics
            are called `eval_{name}_...`.
        processing_class (processor, *optional*): Where `model` brings none.
        scorer ([`Scorer`], *optional*): Frozen image-text model that judges retrieval at evaluation. Without it only the
            text is described.
        peft_config (`peft.PeftConfig` or `dict`, *optional*): Adapter to train: a `LoraConfig`, for instance of
            [`language_lora`]; a dict holds the arguments of `Captioner.lora_config`.
        callbacks (`list[TrainerCallback]`, *optional*): More callbacks.
        optimizers (`tuple`): Optimizer and scheduler, as for `Trainer`.
        data_collator (`Callable`, *optional*): From a list of [`CaptionItem`] to a batch, in place of a
            [`CaptionCollator`]; what it returns must hold the keys of `Captioner.collate`.
        model_init (`Callable`, *optional*): In place of `model`: makes what `model` may be, anew for each `train()`. It may
            take the trial of a hyperparameter search.
        compute_metrics (`Callable`, *optional*): From an `EvalPrediction` to a dict of numbers. `predictions` are the
            captions, one for each image, `label_ids` lists of references; with `include_for_metrics=["inputs"]` `inputs` are
            the image ids.
        preprocess_logits_for_metrics (*optional*): Refused: captions are evaluated, not logits.

    Raises:
        TypeError: If `args` is not a configuration of this trainer.
        ValueError: If a data set lacks a column, a field is not supported, trainable weights hold 16 bits, one process sees
            several GPUs, or the best model is to be chosen by a metric that evaluation does not give.
    """

    args: CaptionConfig
    config_class: ClassVar[type[CaptionConfig]] = CaptionConfig
    method_name: ClassVar[str] = "Captioning"
    """Names the output folder of a run without a configuration."""
    whole_set_for: ClassVar[str | None] = None
    """Why every training image must be known before the first step; None where a stream will do."""
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
        preprocess_logits_for_metrics: Any | None = None,
    ) -> None:
        args = self.resolve_args(model, args)
        train_dataset = training_rows(train_dataset, args, whole_set_for=self.whole_set_for)
        eval_dataset = evaluation_rows(eval_dataset)
        if preprocess_logits_for_metrics is not None:
            raise ValueError(
                "preprocess_logits_for_metrics has nothing to process: evaluation writes captions, and logits are never kept. "
                "Use compute_metrics, which gets captions and references."
            )
        set_seed(args.seed)  # before an adapter draws its weights; the Trainer itself seeds too late for that
        self._policy_settings = {"processor": processing_class, "peft_config": peft_config}
        self.captioner = self._first_policy(model, args, model_init, optimizers)
        refuse_data_parallel(args, self.captioner.model)
        self.scorer = scorer
        # By id of a data set, which is held so that the id stays its own: features of vision tower and scorer.
        self._features_of: dict[int, tuple[datasets.Dataset, Any]] = {}
        self._scorer_features_of: dict[tuple[int, int], tuple[Any, Any, Tensor]] = {}
        self._read_rows: dict[int, tuple[Any, datasets.Dataset]] = {}
        self.caption_eval_dataset = eval_dataset
        is_complete = compute_metrics is None and type(self).evaluate is CaptionEvaluation.evaluate
        check_best_metric(args, eval_dataset, has_scorer=scorer is not None, is_complete=is_complete)
        self._train_source = train_dataset
        self.caption_collator: Any = data_collator or CaptionCollator(
            self.captioner, max_length=args.max_caption_length
        )
        items = None
        if train_dataset is not None:
            items = self._caption_dataset(train_dataset, args)
            self._epochs = EpochCallback(items)
            callbacks = [*(callbacks or []), self._epochs]
        super().__init__(
            model=self.captioner.model,
            args=args,
            data_collator=self.caption_collator,
            train_dataset=items,
            # The Trainer only asks whether there is one: `evaluate` below does the work.
            eval_dataset=eval_dataset,
            processing_class=processing_class or self.captioner.processor,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.model_init = model_init
        # Losses here are divided by num_items_in_batch; declared, or the Trainer would divide by the accumulation too.
        self.model_accepts_loss_kwargs = True

    # Data

    def _caption_dataset(self, dataset: Any, args: CaptionConfig) -> CaptionDataset | StreamedCaptions:
        if isinstance(dataset, StreamedCaptions):
            return dataset
        features = self._vision_tower_features(dataset, args)
        if number := frames_of(dataset):
            # Saved with it: who captions videos with it must look at them in the same way.
            self.captioner.frame_pooling, self.captioner.num_frames = args.frame_pooling, number
        return CaptionDataset(
            dataset, seed=args.seed if args.data_seed is None else args.data_seed, image_features=features
        )

    def _vision_tower_features(self, dataset: datasets.Dataset, args: CaptionConfig) -> Any:
        """`(N, M, D)` output of the frozen vision tower, computed once for the whole run; None where images are read."""
        if not args.cache_image_features:
            if number := frames_of(dataset):
                raise ValueError(
                    f"The data are videos ({number} frames each), and features of frames are pooled once for the whole run. "
                    "Set freeze_vision_tower=True and cache_image_features=True."
                )
            return None
        if id(dataset) not in self._features_of:
            features = vision_tower_features(
                self.captioner,
                dataset,
                cache_dir=args.feature_cache_dir,
                dtype=args.feature_cache_dtype,
                frame_pooling=args.frame_pooling,
            )
            self._features_of[id(dataset)] = (dataset, features)
        return self._features_of[id(dataset)][1]

    def loader_settings(self) -> dict[str, Any]:
        """The arguments of a `DataLoader` that the configuration names.

        Returns:
            `dict`: Of workers and memory.
        """
        args = self.args
        settings: dict[str, Any] = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "in_order": args.dataloader_in_order,
        }
        if args.dataloader_num_workers:
            settings |= {
                "persistent_workers": args.dataloader_persistent_workers,
                "prefetch_factor": args.dataloader_prefetch_factor or 2,
                "multiprocessing_context": args.dataloader_multiprocessing_context,
            }
        return settings

    # Loss

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count tokens of text; the Trainer would count the pixels of models whose main input is an image."""
        kind = self.args.include_num_input_tokens_seen
        if kind == "no":
            return
        number = inputs["attention_mask"].sum() if kind == "non_padding" else inputs["input_ids"].numel()
        mine = torch.as_tensor(number, device=self.args.device, dtype=torch.int64)
        self.state.num_input_tokens_seen += int(self.accelerator.gather(mine.reshape(1)).sum())

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # The Trainer has just put the whole model into training mode. Dropout in a frozen tower would make its output
        # differ from the cached one.
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

    def check_supervised(self, model: Any, inputs: dict[str, Any]) -> None:
        """Refuse a batch that teaches nothing; on the first batch of training, compare the head tap with the model's loss.

        Args:
            model (`nn.Module`): The policy, as wrapped by accelerate.
            inputs (`dict`): A batch of captions with labels.

        Raises:
            ValueError: If no token of the batch is supervised.
        """
        if not (inputs["labels"] != IGNORE_INDEX).any():
            raise ValueError(
                "No token of this batch is supervised: every label is ignored. Are all captions empty after the prompt? "
                "Raise max_caption_length or check the captions with hf_captionrl.data.check_captions."
            )
        if not self._tap_checked and model.training:
            self._tap_checked = True
            self.captioner.self_check(inputs)

    def token_mean(self, total: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Turn a sum over tokens into the mean over the tokens of the whole optimizer step.

        Args:
            total (`torch.Tensor`): Scalar sum over the supervised tokens of this micro-batch.
            labels (`torch.Tensor` of shape `(B, T)`): Their labels.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Supervised tokens of the step on all processes.

        Returns:
            `torch.Tensor`: Scalar whose gradient, averaged over processes and summed over micro-batches, is that of the
            mean over all tokens, however the batch was split.
        """
        if num_items_in_batch is None:
            return total / (labels != IGNORE_INDEX).sum().clamp(min=1)
        # DDP and FSDP average over processes; undo it.
        return total / num_items_in_batch * self.accelerator.num_processes

    def loss_sum(self, inputs: dict[str, Any]) -> Tensor:
        """What `eval_loss` adds up: here the cross-entropy of the references.

        Args:
            inputs (`dict`): A batch of captions with labels, on the device.

        Returns:
            `torch.Tensor`: Scalar sum over the supervised tokens, in nats.
        """
        log_probs = self.captioner.log_probs(inputs, model=self.model)
        assert isinstance(log_probs, Tensor)
        return -log_probs.sum()

    # Saving and loading

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Tied weights are saved once; that the other name is missing is no news.
        tied = set(getattr(self.captioner.base_model, "all_tied_weights_keys", None) or ())
        missing = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(type(load_result)(missing, load_result.unexpected_keys))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        # Some families have an image processor and a tokenizer but no processor that joins them.
        self.captioner.save_processor(output_dir or self.args.output_dir)
        write_training_facts(self, output_dir or self.args.output_dir)


def _contract() -> None:
    """Fail at import if the private Trainer method that this module overrides has changed its arguments."""
    expected = ["self", "batch_samples", "device"]
    found = list(inspect.signature(Trainer._get_num_items_in_batch).parameters)
    if found != expected:
        raise ImportError(
            f"transformers' Trainer._get_num_items_in_batch takes {found}, not {expected}. Install the transformers "
            "version that pyproject.toml allows."
        )


_contract()
