"""SMILE for text: supervised fine-tuning of a causal language model on TRL's `SFTTrainer`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from trl import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from hf_captionrl.trainers.devices import refuse_data_parallel
from hf_captionrl.trainers.exact_resume import ExactResumeTrainer
from hf_captionrl.trainers.policy import default_output_dir
from hf_captionrl.trainers.precision import require_fp32
from hf_captionrl.trainers.smile_sft_config import SmileSFTConfig
from hf_captionrl.trainers.smile_sft_head import add_smile_head, plain_head_for_checks, uses_trl_head
from hf_captionrl.trainers.smile_sft_segments import sentence_ends

__all__ = ["SmileSFTTrainer"]

_OF_FULL_LOGITS = ("entropy", "mean_token_accuracy")


class SmileSFTTrainer(ExactResumeTrainer, SFTTrainer):
    """`trl.SFTTrainer` whose loss chooses each token from the words of its document, sentence or window.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-4 and appendix B.

    Data, packing, labels, adapters and averaging are TRL's, and with `mle_weight=1` also the loss. A subset holds only
    the supervised tokens, including the end token, and no words of the prompt. An adapter on the output projection is
    allowed if `model` is a loaded model. TRL's entropy and token accuracy need the whole vocabulary, so they are logged
    only where TRL's head computes the loss, at `mle_weight=1`.

    Trainable weights are fp32: TRL loads a model given by name in fp32, adapters and their `modules_to_save` stay in fp32
    over a 16-bit base (also in QLoRA, which TRL trains in bf16), and other trainable 16-bit weights are refused.

    Args:
        model (`PreTrainedModel`, `PeftModel` or `str`): The causal language model, or its name.
        args ([`SmileSFTConfig`], *optional*): Configuration. None: the defaults, in `{model name}-SMILE`.
        kwargs (`Any`): As for `trl.SFTTrainer`: `train_dataset`, `eval_dataset`, `processing_class`, `peft_config`, ...

    Raises:
        TypeError: If `args` is not a [`SmileSFTConfig`].
        ValueError: If `compute_loss_func` is given beside a `mle_weight` below 1, the output projection cannot be read, or
            trainable weights are 16-bit.

    Example:
        >>> trainer = SmileSFTTrainer(model, SmileSFTConfig("out"), train_dataset=rows)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names = ("trl", "sft", "smile")
    args: SmileSFTConfig

    def __init__(self, model: PreTrainedModel | Any, args: SmileSFTConfig | None = None, **kwargs: Any) -> None:
        if not isinstance(args, SmileSFTConfig):
            if args is not None:
                raise TypeError(f"args is a {type(args).__name__}. Pass a SmileSFTConfig.")
            args = SmileSFTConfig(default_output_dir(model, "SMILE"))
        if kwargs.get("compute_loss_func") is not None and args.mle_weight < 1.0:
            raise ValueError(
                "compute_loss_func replaces the loss, and with it SMILE. Leave it out, or set mle_weight=1."
            )
        refuse_data_parallel(args, model)
        self._load_safely(args, by_name=isinstance(model, str), model=model)
        with plain_head_for_checks(model):
            super().__init__(model, args, **kwargs)
        require_fp32(self.model, args)
        base = self.accelerator.unwrap_model(self.model)
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        ends = None
        if args.subset_scope == "sentence" and args.mle_weight < 1.0:
            tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
            ends = sentence_ends(tokenizer, base.get_output_embeddings().weight.size(0))
        self._base = base
        add_smile_head(base, args, FusedCausalLMOutput, ends=ends, packed=self.padding_free)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not uses_trl_head(self._base.get_output_embeddings(), self.args.mle_weight):
            for name in _OF_FULL_LOGITS:
                self._metrics["train" if self.model.training else "eval"].pop(name, None)
        return result
