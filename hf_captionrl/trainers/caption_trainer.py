"""The ground that every captioning trainer stands on: data, frozen towers, counting, evaluation by what is written."""

from __future__ import annotations

import inspect
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from hf_captionrl.captioners.auto import load_captioner
from hf_captionrl.captioners.base import Captioner
from hf_captionrl.data import CaptionCollator, CaptionDataset, frames_of
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.retrieval import Scorer
from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_evaluation import CaptionEvaluation
from hf_captionrl.trainers.captioning import image_tower_features
from hf_captionrl.trainers.devices import refuse_data_parallel
from hf_captionrl.trainers.reliable import ReliableTraining
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


class CaptionTrainer(CaptionEvaluation, ReliableTraining, Trainer):
    """`transformers.Trainer` for image captioners.

    It adapts any [`Captioner`] to the Trainer's world, draws one caption an image and epoch, encodes images of a frozen
    tower once, evaluates by generating and by finding images from what was generated, and counts supervised tokens
    itself: the Trainer scales the gradients of several captioners by accumulation x processes (transformers #47688).
    Subclasses say what the loss is.

    Args:
        model (`Captioner`, `PreTrainedModel` or `str`): The policy; what is not a captioner yet goes through
            `load_captioner`.
        args ([`CaptionConfig`]): Configuration.
        train_dataset (`datasets.Dataset`, *optional*): Columns `image`, `image_id` and `captions` (a list a row).
        eval_dataset (`datasets.Dataset`, *optional*): Likewise.
        processing_class (processor, *optional*): Where `model` brings none.
        scorer ([`Scorer`], *optional*): Frozen image-text model that judges retrieval at evaluation. Without it only the
            text is described.
        peft_config (`dict` or `peft.PeftConfig`, *optional*): Adapter to train; a dict holds the arguments of
            `Captioner.add_lora`.
        callbacks (`list[TrainerCallback]`, *optional*): More callbacks.
        optimizers (`tuple`): Optimizer and scheduler, as for `Trainer`.

    Raises:
        ValueError: If a data set lacks a column, one process sees several GPUs, or the best model is to be chosen by retrieval without a scorer.
    """

    args: CaptionConfig
    _tap_checked = False

    def __init__(
        self,
        model: Captioner | PreTrainedModel | str,
        args: CaptionConfig,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: datasets.Dataset | None = None,
        processing_class: Any | None = None,
        scorer: Scorer | None = None,
        peft_config: Any | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        set_seed(args.seed)  # before an adapter draws its weights; the Trainer itself seeds too late for that
        if isinstance(model, Captioner):
            self.captioner = model
            if args.prompt is not None:
                self.captioner.prompt = args.prompt
        else:
            self.captioner = load_captioner(model, processor=processing_class, prompt=args.prompt)
        refuse_data_parallel(args, self.captioner.model)
        self.scorer = scorer
        if args.load_best_model_at_end and "recall_at" in str(args.metric_for_best_model) and scorer is None:
            raise ValueError(
                f"The best model is chosen by {args.metric_for_best_model!r}, which needs a scorer. "
                "Pass scorer=load_scorer(...), or choose another metric_for_best_model."
            )
        if peft_config is not None:
            if (
                args.freeze_image_tower
                and isinstance(peft_config, dict)
                and peft_config.get("tune") in ("vision", "both")
            ):
                raise ValueError(
                    f"tune={peft_config['tune']!r} puts an adapter into the image tower, and freeze_image_tower keeps it from "
                    "learning. Use tune='language', or freeze_image_tower=False."
                )
            self._add_adapter(peft_config)
        if args.freeze_image_tower:
            self.captioner.freeze_vision()
        # By id of a data set, which is held so that the id stays its own: features of image tower and scorer.
        self._features_of: dict[int, tuple[datasets.Dataset, Any]] = {}
        self._scorer_features_of: dict[tuple[int, int], tuple[Any, Any, Tensor]] = {}
        self.caption_eval_dataset = eval_dataset
        items = None
        if train_dataset is not None:
            items = self._caption_dataset(train_dataset, args)
            callbacks = [*(callbacks or []), EpochCallback(items)]
        super().__init__(
            model=self.captioner.model,
            args=args,
            data_collator=CaptionCollator(self.captioner, max_length=args.max_caption_length),
            train_dataset=items,
            # The Trainer only asks whether there is one: `evaluate` below does the work.
            eval_dataset=eval_dataset,
            processing_class=processing_class or self.captioner.processor,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        # Losses here are divided by num_items_in_batch; declared, or the Trainer would divide by the accumulation too.
        self.model_accepts_loss_kwargs = True

    def _add_adapter(self, peft_config: Any) -> None:
        if isinstance(peft_config, dict):
            self.captioner.add_lora(**peft_config)
        else:
            from peft import get_peft_model

            self.captioner.model = get_peft_model(self.captioner.model, peft_config)

    # Data

    def _caption_dataset(self, dataset: datasets.Dataset, args: CaptionConfig) -> CaptionDataset:
        missing = [c for c in ("image", "image_id", "captions") if c not in dataset.column_names]
        if missing:
            raise ValueError(
                f"The training data lack the column(s) {missing}; there are {dataset.column_names}. "
                "Load them with hf_captionrl.data.load_captions, which names the columns so."
            )
        features = self._image_tower_features(dataset, args)
        if number := frames_of(dataset):
            # Saved with it: who captions videos with it must look at them in the same way.
            self.captioner.frame_pooling, self.captioner.num_frames = args.frame_pooling, number
        return CaptionDataset(
            dataset, seed=args.seed if args.data_seed is None else args.data_seed, image_features=features
        )

    def _image_tower_features(self, dataset: datasets.Dataset, args: CaptionConfig) -> Any:
        """`(N, M, D)` output of the frozen image tower, computed once for the whole run; None where images are read."""
        if not args.cache_image_features:
            if number := frames_of(dataset):
                raise ValueError(
                    f"The data are videos ({number} frames each), and features of frames are pooled once for the whole run. "
                    "Set freeze_image_tower=True and cache_image_features=True."
                )
            return None
        if id(dataset) not in self._features_of:
            features = image_tower_features(
                self.captioner,
                dataset,
                cache_dir=args.feature_cache_dir,
                dtype=args.feature_cache_dtype,
                frame_pooling=args.frame_pooling,
            )
            self._features_of[id(dataset)] = (dataset, features)
        return self._features_of[id(dataset)][1]

    # Loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # The Trainer has just put the whole model into training mode. Dropout in a frozen tower would make its output
        # differ from the cached one.
        if self.args.freeze_image_tower:
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
