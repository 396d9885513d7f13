"""The embedded world: scenes whose truth is known, so that hallucination and recall are exact."""

from hf_captionrl.scenes.dataset import BAG_SIZES, bags, load_moving_scenes, load_scenes
from hf_captionrl.scenes.grammar import full_caption
from hf_captionrl.scenes.moving_world import Clip, MovingFacts, sample_clip
from hf_captionrl.scenes.render import render_clip, render_scene
from hf_captionrl.scenes.truth_checker import CheckResult, Claim, check
from hf_captionrl.scenes.world import Facts, Scene, sample_look_alikes, sample_scene, vary_scene

__all__ = [
    "BAG_SIZES",
    "CheckResult",
    "Claim",
    "Clip",
    "Facts",
    "MovingFacts",
    "Scene",
    "bags",
    "check",
    "full_caption",
    "load_moving_scenes",
    "load_scenes",
    "render_clip",
    "render_scene",
    "sample_clip",
    "sample_look_alikes",
    "sample_scene",
    "vary_scene",
]
