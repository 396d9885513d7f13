"""From what a trainer is given as `model` to the captioner that it trains: loading, adapter, frozen tower, precision."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import load_captioner
from hf_captionrl.data import CaptionCollator
from hf_captionrl.trainers.argument_support import refuse_unsupported
from hf_captionrl.trainers.precision import require_fp32

__all__ = ["PolicyMaking", "check_model_init_kwargs", "default_output_dir", "make_policy"]

_DTYPES = ("float32", "bfloat16", "float16", "auto")


def check_model_init_kwargs(settings: Any) -> dict[str, Any] | None:
    """Refuse loading arguments that are not what `from_pretrained` takes.

    Returns:
        `dict`: The same, the dtype by its name; None stays None.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ValueError(
            f"model_init_kwargs is {settings!r}. Use a dict or JSON, for instance "
            '{"dtype": "bfloat16", "attn_implementation": "sdpa"}.'
        )
    settings = dict(settings)
    if "torch_dtype" in settings:
        settings.setdefault("dtype", settings.pop("torch_dtype"))
    dtype = settings.get("dtype")
    if isinstance(dtype, torch.dtype):
        settings["dtype"] = str(dtype).removeprefix("torch.")  # as JSON has it
    elif dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"model_init_kwargs has dtype {dtype!r}. Use one of {', '.join(map(repr, _DTYPES))}.")
    return settings


def default_output_dir(model: Any, method: str) -> str:
    """Where a run without a configuration writes, as TRL names it."""
    if isinstance(model, (str, os.PathLike)):
        name: Any = os.fspath(model)
    else:
        inner = model.base_model if isinstance(model, Captioner) else model
        name = getattr(inner, "name_or_path", "") or getattr(getattr(inner, "config", None), "model_type", "")
    # Of "scenes:blip-mle" the part after the colon, which is not allowed in every file system.
    name = os.path.basename(str(name).rstrip("/")).rpartition(":")[2]
    return f"{name or 'captioner'}-{method}"


def _loaded(model: Any, args: Any, processor: Any) -> Captioner:
    if isinstance(model, (str, os.PathLike)):
        # fp32 whatever the checkpoint is stored in, unless the user says otherwise, as TRL does.
        settings = {"dtype": "float32", **(args.model_init_kwargs or {})}
        return load_captioner(model, processor=processor, prompt=args.prompt, **settings)
    if args.model_init_kwargs:
        raise ValueError(
            f"model_init_kwargs is {args.model_init_kwargs}, but the model is a {type(model).__name__}, which is loaded "
            "already. Give the model by name, or leave model_init_kwargs out."
        )
    if isinstance(model, Captioner):
        if args.prompt is not None:
            model.prompt = args.prompt
        return model
    return load_captioner(model, processor=processor, prompt=args.prompt)


def _freeze_tower(captioner: Captioner) -> None:
    adapted = {n for n, p in captioner.model.named_parameters() if p.requires_grad}
    captioner.freeze_vision()
    if not hasattr(captioner.model, "peft_config"):
        return
    lost = sorted(adapted - {n for n, p in captioner.model.named_parameters() if p.requires_grad})
    if lost:
        raise ValueError(
            f"The adapter reaches into the vision tower ({lost[0]} and {len(lost) - 1} more), and freeze_vision_tower keeps "
            "it from learning there. Use target_modules of the language model (language_lora(model), tune='language'), or "
            "freeze_vision_tower=False."
        )


def make_policy(model: Any, args: Any, *, processor: Any = None, peft_config: Any = None) -> Captioner:
    """The captioner that a trainer trains."""
    captioner = _loaded(model, args, processor)
    if peft_config is not None:
        if isinstance(peft_config, dict):
            peft_config = captioner.lora_config(**peft_config)
        captioner.add_adapter(peft_config)
    if args.freeze_vision_tower:
        _freeze_tower(captioner)
    require_fp32(captioner.model, args)
    return captioner


class PolicyMaking:
    """The part of [`CaptionTrainer`] that makes its captioner, once or for each `train()`."""

    args: Any
    captioner: Captioner
    caption_collator: Any
    config_class: ClassVar[Any]
    method_name: ClassVar[str]
    model_init: Any
    _epochs: Any
    _features_of: dict[int, Any]
    _policy_settings: dict[str, Any]
    _tap_checked: bool
    _train_source: Any

    if TYPE_CHECKING:  # what the trainer has

        def _caption_dataset(self, dataset: Any, args: Any) -> Any: ...

    @classmethod
    def resolve_args(cls, model: Any, args: Any) -> Any:
        """The configuration, or the default one.

        Args:
            model (*optional*): The policy, whose name the default output folder bears.
            args ([`CaptionConfig`], *optional*): As given to the trainer.

        Returns:
            [`CaptionConfig`]: Checked.

        Raises:
            TypeError: If it is not a configuration of this trainer.
            ValueError: If a field has a value that is not supported.
        """
        if args is None:
            return cls.config_class(default_output_dir(model, cls.method_name))
        if not isinstance(args, cls.config_class):
            raise TypeError(f"args is a {type(args).__name__}. Use a {cls.config_class.__name__}.")
        refuse_unsupported(args, args.field_support)  # fields may have been set since it was made
        return args

    def _first_policy(self, model: Any, args: Any, model_init: Any, optimizers: tuple[Any, Any]) -> Captioner:
        if (model is None) == (model_init is None):
            raise ValueError(
                "The policy is given as model or as model_init, a function that makes it. Use exactly one of them."
            )
        if model_init is not None and optimizers != (None, None):
            raise ValueError(
                "optimizers holds the weights of one model, and model_init makes another one for each train(). Use one of them."
            )
        self.model_init = model_init
        made = super().call_model_init() if model is None else model  # type: ignore[misc]
        return make_policy(made, args, **self._policy_settings)

    def call_model_init(self, trial: Any = None) -> Any:
        """Make the policy anew, with its adapter, for another `train()`.

        Args:
            trial (*optional*): Of a hyperparameter search.

        Returns:
            `nn.Module`: The model.
        """
        made = super().call_model_init(trial)  # type: ignore[misc]
        self.captioner = make_policy(made, self.args, **self._policy_settings)
        self._tap_checked = False
        if isinstance(self.caption_collator, CaptionCollator):
            self.caption_collator.captioner = self.captioner
        if self.args.cache_image_features and self._train_source is not None:
            self._features_of.clear()  # another tower may have come
            self.train_dataset = self._epochs.dataset = self._caption_dataset(self._train_source, self.args)
        return self.captioner.model
