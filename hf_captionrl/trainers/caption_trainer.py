"""Base class of the captioning trainers."""

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
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import PredictionOutput

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
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.retrieval import Scorer
from hf_captionrl.trainers.argument_support import refuse_unsupported
from hf_captionrl.trainers.best_metric import check_best_metric, references_of
from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_evaluation import CaptionEvaluator
from hf_captionrl.trainers.devices import refuse_data_parallel
from hf_captionrl.trainers.epoch_callback import EpochCallback
from hf_captionrl.trainers.exact_resume import ExactResumeTrainer
from hf_captionrl.trainers.image_features import ImageFeatures
from hf_captionrl.trainers.policy import default_output_dir, make_policy
from hf_captionrl.trainers.training_facts import write_training_facts

__all__ = ["CaptionTrainer"]


class CaptionTrainer(ExactResumeTrainer):
    """`transformers.Trainer` for image captioners.

    It trains any [`Captioner`], draws one caption per image and epoch, encodes the images of a frozen vision tower once, and
    evaluates by generating captions and retrieving their images. It averages over supervised tokens itself, because the
    Trainer scales the gradients of several captioners by accumulation x processes (transformers #47688). Subclasses define
    the loss.

    Trainable weights are fp32. A model given by name is loaded in fp32, whatever its checkpoint holds; adapters and their
    `modules_to_save` stay in fp32 over a 16-bit base; other trainable weights in 16 bits are refused.

    Args:
        model (`Captioner`, `PreTrainedModel` or `str`, *optional*): The policy. A model or a name is passed to
            `load_captioner`. None only with `model_init`.
        args ([`CaptionConfig`], *optional*): Configuration. None: the defaults, in the folder `{model name}-{method}`.
        train_dataset (`datasets.Dataset`, *optional*): A data set that `load_captions` makes or accepts: images with captions
            under usual column names, with or without `image_id`. [`SmileTrainer`] also accepts a
            `datasets.IterableDataset`, with `max_steps`.
        eval_dataset (`datasets.Dataset` or `dict` of them, *optional*): The same, but never iterable; with several, metrics
            are named `eval_{name}_...`.
        processing_class (processor, *optional*): Processor, if `model` does not bring one.
        scorer ([`Scorer`], *optional*): Frozen image-text model for retrieval at evaluation. Without it only text statistics are
            computed.
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
        preprocess_logits_for_metrics (*optional*): Refused: captions are evaluated, not logits.

    Raises:
        TypeError: If `args` is not a configuration of this trainer.
        ValueError: If a data set lacks a column, a field is not supported, trainable weights are 16-bit, one process sees
            several GPUs, or evaluation does not compute the metric that selects the best model.
    """

    args: CaptionConfig
    config_class: ClassVar[type[CaptionConfig]] = CaptionConfig
    method_name: ClassVar[str] = "Captioning"
    """Names the output folder of a run without a configuration."""
    selecting_scorer: Scorer | None = None
    """Scorer of `reward_recall_at_1`, where `scorer` is held out and must not select."""
    whole_set_for: ClassVar[str | None] = None
    """Why every training image must be known before the first step; None if a stream is enough."""
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
        args = self._resolve_args(model, args)
        train_dataset = training_rows(train_dataset, args, whole_set_for=self.whole_set_for)
        eval_dataset = evaluation_rows(eval_dataset)
        if preprocess_logits_for_metrics is not None:
            raise ValueError(
                "preprocess_logits_for_metrics has nothing to process: evaluation generates captions, and logits are not kept. "
                "Use compute_metrics, which gets captions and references."
            )
        set_seed(args.seed)  # before an adapter draws its weights; the Trainer seeds later
        self._policy_settings = {"processor": processing_class, "peft_config": peft_config}
        self.captioner = self._first_policy(model, args, model_init, optimizers)
        refuse_data_parallel(args, self.captioner.model)
        self.scorer = scorer
        self.features = ImageFeatures()
        self.evaluator = CaptionEvaluator(self, eval_dataset)
        is_complete = compute_metrics is None and type(self).evaluate is CaptionTrainer.evaluate
        check_best_metric(self, args, eval_dataset, is_complete=is_complete)
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
            # The Trainer only asks whether there is one; `evaluate` below replaces its evaluation.
            eval_dataset=eval_dataset,
            processing_class=processing_class or self.captioner.processor,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.model_init = model_init
        # Losses are divided by num_items_in_batch; without this, the Trainer would divide by the accumulation too.
        self.model_accepts_loss_kwargs = True

    # Policy

    @classmethod
    def _resolve_args(cls, model: Any, args: Any) -> Any:
        """The configuration, checked; without one, the default configuration."""
        if args is None:
            return cls.config_class(default_output_dir(model, cls.method_name))
        if not isinstance(args, cls.config_class):
            raise TypeError(f"args is a {type(args).__name__}. Use a {cls.config_class.__name__}.")
        refuse_unsupported(args, args.field_support)  # fields may have changed since it was created
        return args

    def _first_policy(self, model: Any, args: Any, model_init: Any, optimizers: tuple[Any, Any]) -> Captioner:
        if (model is None) == (model_init is None):
            raise ValueError(
                "Pass the policy as model, or as model_init, a function that makes it. Use exactly one of them."
            )
        if model_init is not None and optimizers != (None, None):
            raise ValueError(
                "optimizers holds the weights of one model, and model_init makes another one for each train(). Use one of them."
            )
        self.model_init = model_init
        made = super().call_model_init() if model is None else model
        return make_policy(made, args, **self._policy_settings)

    def call_model_init(self, trial: Any = None) -> Any:
        made = super().call_model_init(trial)
        self.captioner = make_policy(made, self.args, **self._policy_settings)
        self._tap_checked = False
        if isinstance(self.caption_collator, CaptionCollator):
            self.caption_collator.captioner = self.captioner
        if (self.args.cache_image_features or self.args.cache_pixels) and self._train_source is not None:
            self.features.forget_inputs()  # the new tower may differ
            self.train_dataset = self._epochs.dataset = self._caption_dataset(self._train_source, self.args)
        return self.captioner.model

    # Data

    def _caption_dataset(self, dataset: Any, args: CaptionConfig, **more: Any) -> CaptionDataset | StreamedCaptions:
        if isinstance(dataset, StreamedCaptions):
            return dataset
        inputs = self.features.inputs(self.captioner, dataset, args)
        if number := frames_of(dataset):
            # Saved with the model, which must read videos in the same way later.
            self.captioner.frame_pooling, self.captioner.num_frames = args.frame_pooling, number
        seed = args.seed if args.data_seed is None else args.data_seed
        return CaptionDataset(dataset, seed=seed, **inputs, **more)

    def scorer_image_features(self, scorer: Scorer, dataset: datasets.Dataset) -> Tensor:
        """Image features of a scorer, computed once per data set; of a video the mean of its frames' features.

        Args:
            scorer ([`Scorer`]): Image-text model.
            dataset (`datasets.Dataset`): With an `image` column.

        Returns:
            `torch.Tensor` of shape `(N, D)`: Unit length, fp32.
        """
        return self.features.scorer(scorer, dataset, self.args.feature_cache_dir)

    # Loss

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count text tokens; the Trainer would count pixels where the main input is an image."""
        kind = self.args.include_num_input_tokens_seen
        if kind == "no":
            return
        number = inputs["attention_mask"].sum() if kind == "non_padding" else inputs["input_ids"].numel()
        mine = torch.as_tensor(number, device=self.args.device, dtype=torch.int64)
        self.state.num_input_tokens_seen += int(self.accelerator.gather(mine.reshape(1)).sum())

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # The Trainer has just set the whole model to training mode. With dropout, the output of a frozen tower would
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
        """Refuse a batch without supervised tokens; on the first batch of training, compare the head tap with the model's loss.

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
        """Mean over the tokens of the whole optimizer step, from a sum over tokens.

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
        """Summand of `eval_loss`: by default the cross-entropy of the references.

        Args:
            inputs (`dict`): A batch of captions with labels, on the device.

        Returns:
            `torch.Tensor`: Scalar sum over the supervised tokens, in nats.
        """
        log_probs = self.captioner.log_probs(inputs, model=self.model)
        assert isinstance(log_probs, Tensor)
        return -log_probs.sum()

    # Evaluation

    def generate_captions(self, dataset: datasets.Dataset, **generate_kwargs: Any) -> list[str]:
        """Caption a data set with the model as it is; the processes share the work.

        Args:
            dataset (`datasets.Dataset`): With an `image` column.
            generate_kwargs: Override the configured decoding, e.g. `num_beams`.

        Returns:
            `list[str]`: One caption per row, the same list on every process.
        """
        return self.evaluator.generate_captions(dataset, **generate_kwargs)

    def evaluate(
        self,
        eval_dataset: datasets.Dataset | Mapping[str, datasets.Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure the loss, caption the evaluation data, describe the captions and, with a scorer, retrieve the images.

        Args:
            eval_dataset (`datasets.Dataset`, a `dict` of them or `str`, *optional*): Instead of the trainer's, with the same
                column names; a name selects one of several. With several, keys begin with the prefix and the name.
            ignore_keys (`list[str]`, *optional*): Unused; part of the Trainer's signature.
            metric_key_prefix (`str`): Prefix of every key.

        Returns:
            `dict[str, float]`: `loss` (nats per token of one reference per image, the same one in each epoch), `length`
            (mean words), `lexical_diversity` (thousands), with a scorer `recall_at_1`, `recall_at_5` (whole pool) and, for
            100 or more images, `rd100_recall_at_1`, all fractions; then the metrics of `compute_metrics`, and `runtime`.
            Without references there is no `loss`; with `prediction_loss_only` there is nothing else.
        """
        dataset = self.evaluator.named_dataset(eval_dataset)
        if isinstance(dataset, Mapping):
            found: dict[str, float] = {}
            for name, rows in dataset.items():
                found |= self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        dataset = self.evaluator.read_rows(dataset)
        self._memory_tracker.start()
        captions, ranks, metrics = self.evaluator.measure(dataset, metric_key_prefix)
        self.log(metrics)
        if captions is not None and self.args.log_completions and self.is_world_process_zero():
            self.evaluator.show_captions(dataset, spoken(captions), ranks, f"{metric_key_prefix}_completions")
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: datasets.Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Caption a data set and measure the captions as `evaluate` does, without logging.

        Args:
            test_dataset (`datasets.Dataset`): As `eval_dataset`; references are optional.
            ignore_keys (`list[str]`, *optional*): Unused; part of the Trainer's signature.
            metric_key_prefix (`str`): Prefix of every key.

        Returns:
            `PredictionOutput`: `predictions`, one caption per image; `label_ids`, lists of references or None; `metrics`.
        """
        test_dataset = self.evaluator.read_rows(test_dataset)
        self._memory_tracker.start()
        captions, _, metrics = self.evaluator.measure(test_dataset, metric_key_prefix, generate=True)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(predictions=captions, label_ids=references_of(test_dataset), metrics=metrics)  # type: ignore[arg-type]

    @property
    def tensorboard_writer(self) -> Any | None:
        """The writer of transformers' `TensorBoardCallback`; None where nothing is reported to tensorboard."""
        callbacks = self.callback_handler.callbacks
        return next((c.tb_writer for c in callbacks if isinstance(c, TensorBoardCallback)), None)

    # Saving and loading

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Tied weights are saved once, so the other name is always missing.
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
