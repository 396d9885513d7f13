"""Shares the keys and values of an image in cross-attention among its captions.

Legend: B images, G captions per image, N = B * G, T tokens, M image tokens, D features, H heads.

Cross-attention processes each position of a text separately: it has no causal mask, and its keys come from the image.
The G captions of an image are therefore folded into one text of G * T positions, `(N, T, D) -> (B, G * T, D)`, which
attends to the image's `(B, M, D)`: keys and values are projected, stored and cached once per image instead of once per
caption. Only the order of summation in the gradients differs.

The modules get a subclass of their class, like the whole model in `captioners.head_tap`. Its forward depends only on the
shapes of each call, so that it also works in copies, under PEFT and FSDP, and when gradient checkpointing recomputes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_captionrl.captioners.head_tap import captions_per_image, repeat_rows, replaced_forward, subclass_with

FOLDABLE = frozenset(
    """BertCrossAttention BertGenerationCrossAttention CamembertCrossAttention Data2VecTextCrossAttention
    ElectraCrossAttention ErnieCrossAttention RobertaCrossAttention RobertaPreLayerNormCrossAttention
    RoCBertCrossAttention XLMRobertaCrossAttention XLMRobertaXLCrossAttention XmodCrossAttention
    BlipTextSelfAttention GPT2Attention
    BartAttention BlenderbotAttention BlenderbotSmallAttention MarianAttention MBartAttention PegasusAttention
    PLBartAttention TrOCRAttention""".split()
)
"""Attention classes of transformers whose cross-attention processes text positions separately."""

CROSS_ATTENTION_NAMES = (".crossattention", ".crossattention.self", ".encoder_attn")
"""Endings of the names of modules that attend to the image, not to the text."""


def _unfolded(output: Any, rows: int, images: int) -> Any:
    """Context `(B, G * T, D) -> (N, T, D)` and attention `(B, H, G * T, M) -> (N, H, T, M)`."""
    if isinstance(output, tuple):
        return tuple(_unfolded(value, rows, images) for value in output)
    if not isinstance(output, Tensor):
        return output
    if output.dim() == 3:
        return output.reshape(rows, -1, output.size(-1))
    return output.unflatten(2, (rows // images, -1)).transpose(1, 2).flatten(0, 1)  # (B, G, H, T, M) -> (N, H, T, M)


@functools.cache
def _folding_class(cls: Any) -> Any:
    original: Callable[..., Any] = cls.forward
    names = list(inspect.signature(original).parameters)[2:]  # after self and hidden_states
    image_name = "encoder_hidden_states" if "encoder_hidden_states" in names else "key_value_states"
    mask_name = "encoder_attention_mask" if "encoder_attention_mask" in names else "attention_mask"

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args, strict=False))  # some models pass these by position
        image = kwargs.get(image_name)
        if image is None or image.size(0) == hidden_states.size(0):
            return original(self, hidden_states, **kwargs)
        rows, images = hidden_states.size(0), image.size(0)
        captions_per_image(rows, images)  # raises if it is not an integer
        if kwargs.get(mask_name) is not None:  # it has one row per caption
            kwargs[image_name] = repeat_rows(image, rows)
            return original(self, hidden_states, **kwargs)
        folded = hidden_states.reshape(images, -1, hidden_states.size(-1))  # (N, T, D) -> (B, G * T, D)
        return _unfolded(original(self, folded, **kwargs), rows, images)

    return subclass_with(cls, (_folding_class, cls), forward=forward, folds_captions=True)


def fold_cross_attention(model: nn.Module) -> bool:
    """Let the cross-attention of a model accept B images for N captions, in place. Call it before PEFT, DDP and FSDP."""
    found = [
        module
        for name, module in model.named_modules()
        if type(module).__name__ in FOLDABLE
        and type(module).__module__.startswith("transformers.models.")
        and name.endswith(CROSS_ATTENTION_NAMES)
    ]
    # An instance attribute `forward` (from accelerate's hooks) would hide the forward of the class.
    if not found or any("forward" in module.__dict__ or getattr(module, "is_causal", False) for module in found):
        return False
    for module in found:
        if not getattr(module, "folds_captions", False):
            module.__class__ = _folding_class(type(module))  # type: ignore[arg-type]
    return True


@contextmanager
def computed_once(module: nn.Module | None) -> Iterator[None]:
    """Context in which a module computes its output once per number of rows and then returns it again.

    Without it, an encoder-decoder projects the same image features again for every generated token.
    """
    if module is None:
        yield
        return
    original = module.forward
    outputs: dict[int, Tensor] = {}

    def first(states: Tensor) -> Tensor:
        if len(states) not in outputs:
            outputs.clear()  # images whose captions are finished leave the batch
            outputs[len(states)] = original(states)
        return outputs[len(states)]

    with replaced_forward(module, first):
        yield
