"""GIT."""

from __future__ import annotations

from hf_captionrl.captioners.auto import register
from hf_captionrl.captioners.base import Captioner

__all__ = ["GitCaptioner"]


@register
class GitCaptioner(Captioner):
    """GIT (`GitForCausalLM`), whose image tokens stand before the text in one sequence."""

    family = "git"
    model_types = ("git",)
    vision_path = "git.image_encoder"
    connector_paths = ("git.visual_projection",)
    language_lora = r"git\.encoder\..*\.(query|key|value|output\.dense)"
    vision_lora = r"git\.image_encoder\..*\.([qkv]_proj|fc1|fc2)"
