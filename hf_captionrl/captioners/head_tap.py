"""The head tap: the only code that accesses the output projection of a captioner.

`tap_head` gives the model a subclass of its class whose `forward` takes two more arguments. With `head_objective` the output
projection is skipped, so that `(B, T, V)` logits are never built; the objective gets the projection's input and weight and
returns a loss or per-token values, which become the model's output. With `image_features` the vision tower is skipped. All of
this happens inside `forward`, below DDP, FSDP and PEFT: a loss computed outside breaks FSDP2.

Legend: B images (or captions), G captions per image, N = B * G rows, P tokens of the prefix, T tokens of the text, V vocabulary,
D features, M image tokens, r rank.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX, linear_log_probs

logger = logging.getLogger(__name__)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in eval mode; restores the mode of each submodule."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


# --- Represents an output projection, possibly wrapped by PEFT, as a single weight -----------------------------------


def _active(module: nn.Module) -> Any:
    """The module that computes the output: PEFT's trained copy, or the base layer of a disabled or merged adapter."""
    if isinstance(module, nn.Linear):
        return module
    from peft.tuners.lora import Linear as LoraLinear
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        if module.disable_adapters or not module.active_adapters:
            return _active(module.original_module)
        return _active(module.modules_to_save[module.active_adapters[0]])
    if isinstance(module, LoraLinear) and (module.disable_adapters or module.merged or not _adapters(module)):
        return _active(module.base_layer)
    return module


def _adapters(module: Any) -> list[str]:
    return [name for name in module.active_adapters if name in module.lora_A]


def is_tappable(head: nn.Module) -> bool:
    """Whether the projection is a linear layer, possibly with LoRA or as one of PEFT's `modules_to_save`."""
    module = _active(head)
    if not isinstance(module, nn.Linear):
        from peft.tuners.lora import Linear as LoraLinear

        if type(module) is not LoraLinear or module.fan_in_fan_out:
            return False
        if any(name in module.lora_variant for name in _adapters(module)):
            return False
        module = module.base_layer
    # Quantised layers pack their weight.
    return isinstance(module, nn.Linear) and module.weight.dim() == 2 and module.weight.is_floating_point()


def head_projection(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Input `(B, T, D')`, weight `(V, D')` and bias such that `F.linear` of them equals the projection of `hidden`.

    LoRA on the head is `h W^T + s * dropout(h) A^T B^T = [h, s * dropout(h) A^T] [W, B]^T`, exact also with dropout.
    """
    module = _active(head)
    base = module if isinstance(module, nn.Linear) else module.base_layer
    weight, bias = base.weight, base.bias
    if hasattr(weight, "placements"):
        raise ValueError(
            "The output projection is a sharded DTensor. Use FSDP2 or ZeRO-3, which gather it in the model's forward, and exclude "
            "it from the tensor-parallel plan."
        )
    if base is module:
        return hidden, weight, bias
    inputs, weights = [hidden], [weight]
    for name in _adapters(module):
        lora_a, lora_b, scaling = module.lora_A[name], module.lora_B[name], module.scaling[name]
        low_rank = lora_a(module.lora_dropout[name](hidden.to(lora_a.weight.dtype))) * scaling  # (B, T, r)
        inputs.append(low_rank.to(hidden.dtype))
        weights.append(lora_b.weight.to(weight.dtype))  # (V, r)
        if lora_b.bias is not None:
            extra = lora_b.bias.to(weight.dtype) * scaling
            bias = extra if bias is None else bias + extra
    return torch.cat(inputs, -1), torch.cat(weights, -1), bias


# --- The prefix of the text, for models that read image and text as one sequence -------------------------------------
# In every family, the text of a batch is `(N, T)`, without the prefix. The prefix has one row per image: `prefix_ids` and
# `prefix_mask` `(B, P)`, padded on the left because images may differ in their number of tokens, and other inputs per
# image. The model's forward joins prefix and text, so that labels and supervised tokens are the same for all families.

PREFIX_INPUTS = ("prefix_ids", "prefix_mask")


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> dict[str, Tensor]:
    """`prefix_ids` and `prefix_mask` `(B, P)`, padded on the left."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
    return {"prefix_ids": pad(ids, padding_value=pad_id), "prefix_mask": pad(mask)}


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of different sizes to `(B, ...)`, padded with zeros at the end of each dimension."""
    sizes = torch.tensor([part.shape for part in parts]).amax(0).tolist()
    stacked = parts[0].new_zeros(len(parts), *sizes)
    for part, target in zip(parts, stacked, strict=True):
        target[tuple(map(slice, part.shape))] = part
    return stacked


def captions_per_image(rows: int, images: int) -> int:
    """G; raises if it is not an integer."""
    if rows % images:
        raise ValueError(
            f"{rows} captions cannot be divided evenly among {images} images. Pass one image per caption, or the same "
            "number of consecutive captions for each image."
        )
    return rows // images


def repeat_rows(value: Tensor, rows: int) -> Tensor:
    """One row per image `(B, ...)` -> one row per caption `(N, ...)`; captions of one image are consecutive."""
    times = captions_per_image(rows, value.size(0))
    return value if times == 1 else value.repeat_interleave(times, dim=0)


def join_prefix(inputs: dict[str, Any]) -> dict[str, Any]:
    """Put the prefix before the text: `input_ids` and `attention_mask` become `(N, P + T)`, labels stay `(N, T)`."""
    inputs = dict(inputs)
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    before, before_mask = (repeat_rows(inputs.pop(name), len(ids)) for name in PREFIX_INPUTS)
    return inputs | {"input_ids": torch.cat([before, ids], 1), "attention_mask": torch.cat([before_mask, mask], 1)}


def decoder_text(inputs: dict[str, Any]) -> dict[str, Any]:
    """Make the text the input of a decoder: `decoder_input_ids`, `decoder_attention_mask` and `labels` `(N, T - 1)`.

    The decoder reads the text without the last token, and predicts it without the first.
    """
    inputs = dict(inputs)
    if (ids := inputs.pop("input_ids", None)) is not None:
        inputs["decoder_input_ids"] = ids[:, :-1]
        if (mask := inputs.pop("attention_mask", None)) is not None:
            inputs["decoder_attention_mask"] = mask[:, :-1]
        if inputs.get("labels") is not None:
            inputs["labels"] = inputs["labels"][:, 1:].contiguous()  # the losses of T5 and BART need it
    return inputs


def split_prefix(inputs: dict[str, Any]) -> dict[str, Any]:
    """`decoder_text`, with the prefix as `input_ids` and `attention_mask` `(N, P)` of the encoder."""
    rows = len(inputs["input_ids"])
    inputs = decoder_text(inputs)
    inputs["input_ids"], inputs["attention_mask"] = (repeat_rows(inputs.pop(name), rows) for name in PREFIX_INPUTS)
    return inputs


# --- Objectives ------------------------------------------------------------------------------------------------------


@dataclass
class HeadInputs:
    """Inputs of an objective: hidden states and weight, or the full logits in the fallback; position t predicts `labels[:, t]`.

    Args:
        labels (`torch.Tensor` of shape `(B, T)`): Token ids, `IGNORE_INDEX` at unsupervised positions.
        hidden (`torch.Tensor` of shape `(B, T, D)`, *optional*): Input of the output projection.
        weight (`torch.Tensor` of shape `(V, D)`, *optional*): Weight of the output projection.
        bias (`torch.Tensor` of shape `(V,)`, *optional*): Bias of the output projection.
        softcap (`float`, *optional*): The projection is followed by `softcap * tanh(logits / softcap)`.
        logits (`torch.Tensor` of shape `(B, T, V)`, *optional*): Only in the fallback, where `hidden` is None.
    """

    labels: Tensor
    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    logits: Tensor | None = None


HeadObjective = Callable[[HeadInputs], dict[str, Tensor]]
"""Function from [`HeadInputs`] to named tensors: `loss` (a scalar) and any others."""


@dataclass(init=False)
class HeadOutput(ModelOutput):
    """The tensors that an objective returned, as a model output: `output.loss`, `output["log_probs"]`, ..."""

    loss: Tensor | None = None

    def __init__(self, values: dict[str, Any] | None = None, **named: Any) -> None:
        super().__init__()
        for name, value in {**(values or {}), **named}.items():
            self[name] = value


class LogProbsObjective:
    """Per-token log-probabilities, and optionally entropies.

    Args:
        temperature (`float`): Divides the logits, as in sampling.
        return_entropy (`bool`): Also return the entropy of each distribution.
        num_tokens (`int`, *optional*): The distribution is over the first so many ids, as in generation. None: all.
    """

    def __init__(self, temperature: float = 1.0, return_entropy: bool = False, num_tokens: int | None = None) -> None:
        self.temperature = temperature
        self.return_entropy = return_entropy
        self.num_tokens = num_tokens

    def __call__(self, head: HeadInputs) -> dict[str, Tensor]:
        """`log_probs`, and `entropy` if requested; both `(B, T)`, 0 where the label is ignored."""
        if (n := self.num_tokens) is not None:
            first = [None if each is None else each[..., :n] for each in (head.bias, head.logits)]
            head = replace(
                head, weight=None if head.weight is None else head.weight[:n], bias=first[0], logits=first[1]
            )
        if head.logits is None:
            settings: dict[str, Any] = {"bias": head.bias, "softcap": head.softcap, "temperature": self.temperature}
            hidden: Any = head.hidden
            found = linear_log_probs(hidden, head.weight, head.labels, return_entropy=self.return_entropy, **settings)
            return {"log_probs": found[0], "entropy": found[1]} if self.return_entropy else {"log_probs": found}
        supervised = head.labels != IGNORE_INDEX  # (B, T)
        log_probs = (head.logits.float() / self.temperature).log_softmax(-1)  # (B, T, V)
        target = head.labels.masked_fill(~supervised, 0).unsqueeze(-1)
        named = {"log_probs": log_probs.gather(-1, target).squeeze(-1).masked_fill(~supervised, 0.0)}
        if self.return_entropy:
            named["entropy"] = -(log_probs.exp() * log_probs).sum(-1).masked_fill(~supervised, 0.0)
        return named


def mean_cross_entropy(head: HeadInputs) -> dict[str, Tensor]:
    """Maximum likelihood as an objective: `loss`, the mean nats per supervised token."""
    if head.logits is not None:
        return {"loss": F.cross_entropy(head.logits.float().flatten(0, 1), head.labels.flatten())}
    log_probs = LogProbsObjective()(head)["log_probs"]  # (B, T)
    return {"loss": -log_probs.sum() / (head.labels != IGNORE_INDEX).sum().clamp(min=1)}


@contextmanager
def replaced_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Context in which a module has another forward. Its hooks still run: FSDP and ZeRO gather weights in them."""
    previous = {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}
    module.__dict__["forward"] = function
    try:
        yield
    finally:
        del module.__dict__["forward"]
        module.__dict__.update(previous)


@contextmanager
def bypass_vision_tower(tower: nn.Module, image_features: Tensor) -> Iterator[Tensor]:
    """Context in which the vision tower returns `image_features` `(B, M, D)`.

    Yields a placeholder `(B, 1, 1, 1)` for `pixel_values`. If generation repeats its rows, the features are repeated too.
    """

    def known(*args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        pixels = args[0] if args else kwargs["pixel_values"]
        repeats = pixels.size(0) // image_features.size(0)
        features = image_features if repeats == 1 else image_features.repeat_interleave(repeats, dim=0)
        return BaseModelOutputWithPooling(last_hidden_state=features)

    with replaced_forward(tower, known):
        yield image_features.new_zeros(image_features.size(0), 1, 1, 1)


def align(states: Tensor, labels: Tensor, shift: bool) -> tuple[Tensor, Tensor]:
    """The states that predict each label: the last ones (images precede the text), shifted by one if `shift`."""
    if states.size(1) < labels.size(1):
        raise ValueError(
            f"The model returned {states.size(1)} positions for {labels.size(1)} labels. Use captioner.collate."
        )
    states = states[:, states.size(1) - labels.size(1) :]
    return (states[:, :-1], labels[:, 1:]) if shift else (states, labels)


def floating_dtype(module: nn.Module, default: torch.dtype) -> torch.dtype:
    """Dtype of the weights of a module that are not quantized; `default` without any."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), default)


def _image_inputs(
    model: Any, family: Any, features: Tensor | None, batch: dict[str, Any], inputs: dict[str, Any]
) -> Any:
    """Context that skips the vision tower if there are features, or if several captions share an image."""
    tokens, pixels = inputs.get(family.token_argument), batch.get("pixel_values")
    rows = None if tokens is None else tokens.size(0)
    if features is None:
        if pixels is None or rows is None or family.is_native(model, batch):
            return nullcontext()
        features = family.encode(model, batch)  # (B, M, D): each image is encoded once for all its captions
    elif pixels is not None and pixels.size(0) != features.size(0):
        raise ValueError("pixel_values and image_features have different batch sizes. Pass only one of them.")
    if rows is not None and captions_per_image(rows, features.size(0)) > 1 and not model.folds_cross_attention:
        features = repeat_rows(features, rows)
    dtype = floating_dtype(family.find_vision_tower(model), features.dtype)
    return family.known_features(model, features.to(dtype), inputs)


# PEFT's wrappers of task types pass these even if the model does not take them.
_ADDED_BY_PEFT = """inputs_embeds output_attentions output_hidden_states return_dict decoder_input_ids
    decoder_attention_mask decoder_inputs_embeds""".split()


def subclass_with(cls: Any, maker: tuple[Any, ...], **members: Any) -> Any:
    """A subclass of a model's class with the same name; `maker`, a function and its arguments, makes it in another process."""

    def reduce(self: Any, protocol: Any) -> Any:  # copy and pickle find a class by its name: the original one
        reduced = super(made, self).__reduce_ex__(protocol)
        return (_new, maker, *reduced[2:]) if type(self) is made else reduced

    # transformers writes the class name to config.json, and uses the full name to find which outputs to record.
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: Any = type(cls.__name__, (cls,), {**members, **names, "__reduce_ex__": reduce})
    return made


def _new(make: Callable[..., Any], *arguments: Any) -> Any:
    made = make(*arguments)
    return made.__new__(made)


@functools.cache
def _tapped_class(cls: Any, family: Any) -> Any:
    original = cls.forward

    # generate and PEFT read the signature of the original forward.
    @functools.wraps(original)
    def forward(
        self: Any,
        *args: Any,
        head_objective: HeadObjective | None = None,
        image_features: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if args:
            if head_objective is not None or image_features is not None:
                raise TypeError("With head_objective or image_features, pass all inputs by name.")
            return original(self, *args, **kwargs)
        batch = {name: value for name, value in kwargs.items() if value is not None or name not in _ADDED_BY_PEFT}
        inputs = family.native_inputs(self, batch)
        with _image_inputs(self, family, image_features, batch, inputs):
            labels = inputs.get("labels")
            if head_objective is None:
                ids = inputs.get(family.token_argument)
                if labels is not None and ids is not None and labels.size(1) < ids.size(1):  # ids of prefix and text
                    inputs["labels"] = F.pad(labels, (ids.size(1) - labels.size(1), 0), value=IGNORE_INDEX)
                return original(self, **inputs)
            if labels is None:
                raise ValueError("A head objective needs labels. Create the batch with captioner.collate.")
            del inputs["labels"]  # without labels the model does not compute a loss
            inputs["use_cache"] = False
            head, shift = family.output_head(self), not family.is_encoder_decoder
            if not self.use_full_logits and not is_tappable(head):
                self.use_full_logits = True
                logger.warning(
                    "%s is not a single weight matrix. Using full logits, which is slower.", type(head).__name__
                )
            if self.use_full_logits:
                logits, labels = align(original(self, **inputs).logits, labels, shift)
                return HeadOutput(head_objective(HeadInputs(labels=labels, logits=logits)))
            captured: list[Tensor] = []

            def capture(hidden: Tensor) -> Tensor:
                captured.append(hidden)
                return hidden

            with replaced_forward(head, capture):
                original(self, **inputs)
            if not captured:
                raise RuntimeError(
                    f"{type(self).__name__} did not call its output projection. Set use_full_logits = True."
                )

            def compute(hidden: Tensor) -> dict[str, Tensor]:
                hidden, weight, bias = head_projection(head, hidden)
                hidden, aligned = align(hidden, labels, shift)
                return head_objective(HeadInputs(aligned, hidden, weight, bias, family.softcap(self)))

            # The objective runs as the forward of the head: if the head is sharded separately, its weight is gathered only there.
            with replaced_forward(head, compute):
                return HeadOutput(head(captured[-1]))

    def enable_input_require_grads(self: Any) -> None:
        super(made, self).enable_input_require_grads()
        # The line above makes the embeddings a leaf. BLIP and GIT modify them in place, which autograd forbids.
        self._require_grads_hooks.append(
            self.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.clone())
        )

    members = {"forward": forward, "enable_input_require_grads": enable_input_require_grads}
    flags = {"use_full_logits": False, "folds_cross_attention": False, "captioner_family": family}
    made = subclass_with(cls, (_tapped_class, cls, family), **members, **flags)
    return made


def tap_head(model: nn.Module, family: type) -> None:
    """Extend the `forward` of a model in place, as described at the top. Call this before PEFT, DDP and FSDP wrap it."""
    if getattr(model, "captioner_family", None) is not None:
        return
    if "forward" in model.__dict__:
        raise ValueError(
            f"The forward of this {type(model).__name__} has already been replaced (by accelerate's prepare, by a "
            "device_map over several devices, or by a patch). Create the captioner first, then prepare captioner.model."
        )
    model.__class__ = _tapped_class(type(model), family)  # type: ignore[arg-type]


# --- Checks the head tap against the model's own loss on the first batch ---------------------------------------------


def first_rows(batch: dict[str, Any], number: int = 2) -> dict[str, Any]:
    """The first captions of a batch with their images; the whole batch if images are not rows, or nothing is supervised."""
    images = batch.get("image_features", batch.get("pixel_values"))
    captions = len(batch["labels"])
    if images is None or captions % len(images) or not bool((batch["labels"][:number] != IGNORE_INDEX).any()):
        return batch
    per_image = captions // len(images)
    # With several captions per image, those of the first image.
    kept = {captions: number} if per_image == 1 else {captions: min(number, per_image), len(images): 1}
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    if any(len(value) not in kept for value in tensors.values()):
        return batch
    return {**batch, **{name: value[: kept[len(value)]] for name, value in tensors.items()}}
