"""Loads the models of `captionrl album`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_captionrl.album.options import AlbumOptions
    from hf_captionrl.album.sources import AlbumSource
    from hf_captionrl.captioners.captioner import Captioner
    from hf_captionrl.retrieval import Scorer

__all__ = ["AlbumModels", "check_scorers", "load_adapted", "load_held_out", "load_model", "load_source"]


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
    base = load_model(options)
    if adapter is None:
        return base
    from hf_captionrl.captioners import load_captioner

    return load_captioner(str(adapter), base_model=base, prompt=options.prompt, device=_device(options))


def load_source(options: AlbumOptions, *, sidecars: bool) -> AlbumSource:
    """The images of the options."""
    from hf_captionrl.album.kept_files import KeptFiles
    from hf_captionrl.album.sources import load_album_source

    settings = {"split": options.split} if options.split else {}
    settings |= {"image_root": options.image_root} if options.image_root else {}
    # Metadata that an earlier run wrote lack images without a caption and images that were added since.
    metadata = Path(options.images) / "metadata.jsonl"
    is_own = bool(options.output) and metadata.is_file() and KeptFiles(options.output[0]).is_ours(metadata)
    source = load_album_source(options.images, sidecars=sidecars, ignore_metadata=is_own, **settings)
    return source if options.max_images is None else source.first(options.max_images)


class AlbumModels:
    """Images and models of an album, each loaded on first use; other processes load them again."""

    def __init__(self, options: AlbumOptions, source: AlbumSource | None = None, adapter: Path | None = None) -> None:
        self.options, self.adapter = options, adapter
        if source is not None:
            self.source = source

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "adapter": self.adapter}

    @cached_property
    def source(self) -> AlbumSource:
        """The images."""
        return load_source(self.options, sidecars=False)

    @cached_property
    def captioner(self) -> Captioner:
        """The captioner, with the adapter."""
        return load_adapted(self.options, self.adapter)

    @cached_property
    def scorer(self) -> Scorer:
        """The scorer that compares captions and images."""
        return _load_scorer(self.options, _scorer_name(self.options))

    def rows_of(self, image_ids: Sequence[str]) -> list[int]:
        """Rows of some images; an error if this process finds other images than the process that started it."""
        row_of = {image_id: row for row, image_id in enumerate(self.source.image_ids)}
        missing = [image_id for image_id in image_ids if image_id not in row_of]
        if missing:
            raise ValueError(
                f"{self.options.images!r} has other images in this process than in the one that started it: {missing[0]!r} is "
                "missing. Use a path that all machines share, and leave the images unchanged while the command runs."
            )
        return [row_of[image_id] for image_id in image_ids]


def load_held_out(options: AlbumOptions) -> Scorer:
    """The scorer that decides about an adapter."""
    return _load_scorer(options, _held_out_name(options))


def check_scorers(options: AlbumOptions) -> None:
    """Refuse --adapt with one scorer that rewards and decides, by its name or by default."""
    if options.adapt is None:
        return
    from hf_captionrl.scenes.models import model_path

    names = _scorer_name(options), _held_out_name(options)
    places = [os.path.realpath(place) if os.path.exists(place) else place for place in map(model_path, names)]
    if places[0] == places[1]:
        raise ValueError(
            f"--adapt has {names[0]!r} as --scorer and {names[1]!r} as --held_out_scorer. One scorer cannot reward captions and "
            "decide about them: it would approve of captions that only exploit it. Use another model as --held_out_scorer."
        )


def _scorer_name(options: AlbumOptions) -> str:
    from hf_captionrl.album.hub_space import demo_scorer

    if options.scorer is not None:
        return options.scorer
    if options.adapt is not None and _is_embedded(options):
        return "scenes:clip-reward"
    return demo_scorer({"": options.model or ("scenes:" if options.images == "scenes" else "")})


def _held_out_name(options: AlbumOptions) -> str:
    default = "scenes:siglip-held-out" if _is_embedded(options) else "google/siglip-base-patch16-224"
    return options.held_out_scorer or default


def _load_scorer(options: AlbumOptions, name: str) -> Scorer:
    from hf_captionrl.retrieval import load_scorer
    from hf_captionrl.scenes.models import model_path

    return load_scorer(model_path(name), device=_device(options))
