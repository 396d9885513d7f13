"""The embedded world: scenes whose truth is known, so that hallucination and recall are exact."""

from hf_captionrl.scenes.checker import CheckResult, Claim, check
from hf_captionrl.scenes.dataset import BAG_SIZES, bags, load_scenes, scene_stream
from hf_captionrl.scenes.grammar import full_caption
from hf_captionrl.scenes.render import render_scene
from hf_captionrl.scenes.world import Facts, Scene, sample_scene, vary_scene

__all__ = [
    "BAG_SIZES",
    "CheckResult",
    "Claim",
    "Facts",
    "Scene",
    "bags",
    "check",
    "full_caption",
    "load_scenes",
    "render_scene",
    "sample_scene",
    "scene_stream",
    "vary_scene",
]
