r"""Several captions of an image share its keys and values in cross-attention.

Legend: B images, G captions per image, N = B * G, T tokens, M image tokens, D features, H heads.

Cross-attention treats every position of a text separately: it has no causal mask, and the keys are the image's. The G
captions of an image are therefore read as one text of G * T positions, `(N, T, D) -> (B, G * T, D)`, against the image's
`(B, M, D)`: keys and values are projected, stored and cached once per image instead of once per caption. Only the
order of summation in the gradients differs.

The modules get a class of their own, as the whole model does in `captioners.head_tap`. What they do follows from the shapes
of each call alone, so it holds in the recomputation of gradient checkpointing too, and in copies, under PEFT and FSDP.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.generation.configuration_utils import GenerationMode

from hf_captionrl.captioners.head_tap import replaced_forward
from hf_captionrl.captioners.prompt_prefix import captions_an_image, repeat_rows

__all__ = ["computed_once", "fold_cross_attention", "spread_samples"]

FOLDABLE = frozenset(
    """BertCrossAttention BertGenerationCrossAttention CamembertCrossAttention Data2VecTextCrossAttention
    ElectraCrossAttention ErnieCrossAttention RobertaCrossAttention RobertaPreLayerNormCrossAttention
    RoCBertCrossAttention XLMRobertaCrossAttention XLMRobertaXLCrossAttention XmodCrossAttention
    BlipTextSelfAttention GPT2Attention
    BartAttention BlenderbotAttention BlenderbotSmallAttention MarianAttention MBartAttention PegasusAttention
    PLBartAttention TrOCRAttention""".split()
)
"""Attention classes of transformers known to treat text positions separately when they attend to an image."""

CROSS_ATTENTION_NAMES = (".crossattention", ".crossattention.self", ".encoder_attn")
"""Last parts of the names of modules that attend to the image, not to the text."""


def _folded(states: Tensor, images: int) -> Tensor:
    """`(N, T, D) -> (B, G * T, D)`."""
    return states.reshape(images, -1, states.size(-1))


def _unfolded(output: Any, rows: int, images: int) -> Any:
    """Context `(B, G * T, D) -> (N, T, D)` and attention `(B, H, G * T, M) -> (N, H, T, M)`."""
    if isinstance(output, tuple):
        return tuple(_unfolded(value, rows, images) for value in output)
    if not isinstance(output, Tensor):
        return output
    if output.dim() == 3:
        return output.reshape(rows, -1, output.size(-1))
    by_caption = output.unflatten(2, (rows // images, -1)).transpose(1, 2)  # (B, G, H, T, M)
    return by_caption.flatten(0, 1)


@functools.cache
def _folding_class(cls: Any) -> Any:
    original: Callable[..., Any] = cls.forward
    names = list(inspect.signature(original).parameters)[2:]  # behind self and hidden_states
    image_name = "encoder_hidden_states" if "encoder_hidden_states" in names else "key_value_states"
    mask_name = "encoder_attention_mask" if "encoder_attention_mask" in names else "attention_mask"

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args, strict=False))  # names only: some models pass these by position
        image = kwargs.get(image_name)
        if image is None or image.size(0) == hidden_states.size(0):
            return original(self, hidden_states, **kwargs)
        rows, images = hidden_states.size(0), image.size(0)
        captions_an_image(rows, images)  # raises if it is not an integer
        if kwargs.get(mask_name) is not None:  # it has one row per caption
            kwargs[image_name] = repeat_rows(image, rows)
            return original(self, hidden_states, **kwargs)
        return _unfolded(original(self, _folded(hidden_states, images), **kwargs), rows, images)

    def reduce(self: Any, protocol: Any) -> Any:
        # copy and pickle look up a class by name and find the module's own class.
        reduced = super(made, self).__reduce_ex__(protocol)
        return (_new_folding, (cls,), *reduced[2:]) if type(self) is made else reduced

    members = {
        "forward": forward,
        "folds_captions": True,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: Any = type(cls.__name__, (cls,), members)
    return made


def _new_folding(cls: Any) -> Any:
    made = _folding_class(cls)
    return made.__new__(made)


def fold_cross_attention(model: nn.Module) -> bool:
    """Let the cross-attention of a model take B images for N captions, in place. Call it before PEFT, DDP and FSDP."""
    found = [
        module
        for name, module in model.named_modules()
        if type(module).__name__ in FOLDABLE
        and type(module).__module__.startswith("transformers.models.")
        and name.endswith(CROSS_ATTENTION_NAMES)
    ]
    # A forward of the object's own (accelerate's hooks) would hide that of its class.
    if not found or any("forward" in module.__dict__ or getattr(module, "is_causal", False) for module in found):
        return False
    for module in found:
        if not getattr(module, "folds_captions", False):
            made: Any = _folding_class(type(module))  # type: ignore[arg-type]
            module.__class__ = made
    return True


def spread_samples(writer: Any, prompt_ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Request G samples of an image with G prompts, so that generate does not repeat the image features.

    With `num_return_sequences`, generate would repeat them, and keep the keys and values of each repetition. Beams and
    other ways to write, which reorder or combine rows, are left as they are.

    Args:
        prompt_ids (`torch.Tensor` of shape `(B, P)`): One prompt per image.

    Returns:
        `tuple`: `prompt_ids` of shape `(N, P)`, those of an image in a row, and the settings that go with them.
    """
    config = copy.deepcopy(writer.generation_config)
    given = settings.get("generation_config")
    for name, value in {**({} if given is None else given.to_dict()), **settings}.items():
        if value is not None and hasattr(config, name):
            setattr(config, name, value)
    group_size = config.num_return_sequences or 1
    mode = config.get_generation_mode(settings.get("assistant_model"))
    guided = config.guidance_scale not in (None, 1)
    if group_size == 1 or mode != GenerationMode.SAMPLE or guided or settings.get("custom_generate") is not None:
        return prompt_ids, settings
    return prompt_ids.repeat_interleave(group_size, dim=0), {**settings, "num_return_sequences": 1}


@contextmanager
def computed_once(module: nn.Module | None) -> Iterator[None]:
    """Let a module compute its output once, and return it again at each later call.

    An encoder-decoder projects the same image features again for every token that it generates.
    """
    if module is None:
        yield
        return
    original = module.forward
    outputs: list[Tensor] = []

    def first(*args: Any, **kwargs: Any) -> Tensor:
        if not outputs:
            outputs.append(original(*args, **kwargs))
        return outputs[0]

    with replaced_forward(module, first):
        yield
