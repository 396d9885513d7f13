"""Loads the models of `captionrl album`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_captionrl.album.command import AlbumOptions
    from hf_captionrl.captioners.captioner import Captioner
    from hf_captionrl.retrieval import Scorer

__all__ = ["load_adapted", "load_held_out", "load_model", "load_models"]


def _device(options: AlbumOptions) -> Any:
    import torch

    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _is_embedded(options: AlbumOptions) -> bool:
    from hf_captionrl.scenes.models import PREFIX

    return (options.model or (PREFIX if options.images == "scenes" else "")).startswith(PREFIX)


def load_model(options: AlbumOptions) -> Captioner:
    """The captioner of the options."""
    import torch

    from hf_captionrl.pipelines import pipeline

    return pipeline(
        str(options.model),
        revision=options.revision,
        prompt=options.prompt,
        dtype=getattr(torch, options.dtype),
        device=_device(options),
    ).captioner


def load_adapted(options: AlbumOptions, adapter: Any | None) -> Captioner:
    """The captioner with the adapter of an earlier run, or without one."""
    if adapter is None:
        return load_model(options)
    from hf_captionrl.captioners import load_captioner

    return load_captioner(str(adapter), prompt=options.prompt, device=_device(options))


def load_models(options: AlbumOptions) -> tuple[Captioner | None, Scorer]:
    """The captioner, if there is one, and the scorer."""
    from hf_captionrl.album.space import demo_scorer

    default = demo_scorer({"": options.model or ("scenes:" if options.images == "scenes" else "")})
    if options.adapt is not None and _is_embedded(options):
        default = "scenes:clip-reward"
    captioner = None if options.model is None or options.adapt is not None else load_model(options)
    return captioner, _load_scorer(options, options.scorer or default)


def load_held_out(options: AlbumOptions) -> Scorer:
    """The scorer that decides about an adapter; refused if it is the one that rewards."""
    default = "scenes:siglip-held-out" if _is_embedded(options) else "google/siglip-base-patch16-224"
    name = options.held_out_scorer or default
    if name == options.scorer:
        raise ValueError(
            f"{name!r} both rewards and decides, and would approve of captions that only exploit it. Use another model as "
            "--held_out_scorer."
        )
    return _load_scorer(options, name)


def _load_scorer(options: AlbumOptions, name: str) -> Scorer:
    from hf_captionrl.retrieval import load_scorer
    from hf_captionrl.scenes.models import model_path

    return load_scorer(model_path(name), device=_device(options))
