"""`captionrl album --dry_run`: what would be written, and how long it would take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hf_captionrl.album.adapt_captioner import MOST_MEASURED
from hf_captionrl.album.album import describe_album
from hf_captionrl.album.image_facts import joined_facts, opened_chunks, read_images
from hf_captionrl.album.kept_rows import kept_rows
from hf_captionrl.album.loading import AlbumModels
from hf_captionrl.album.sources import AlbumSource
from hf_captionrl.pipelines import ChosenImages

if TYPE_CHECKING:
    from hf_captionrl.album.album_run import AlbumRun

__all__ = ["dry_run", "dry_run_text"]


def dry_run(run: AlbumRun) -> dict[str, Any]:
    """Caption the first readable images, and estimate the time for those that no earlier run has finished."""
    options, source = run.options, run.source
    run.check_targets()
    models = AlbumModels(options, source)
    number = len(source.images)
    unread, undescribed = _unfinished(run, models)
    # What is computed is not written anywhere; the adapter does not change how long captioning takes.
    seconds = 0.0
    to_train = run.training_seconds is not None and run.earlier_adapter() is None
    if unread or undescribed or to_train:
        reading, describing = _seconds_per_image(models, source)
        seconds = (reading * unread + describing * undescribed) / (options.processes or 1)
        if to_train:
            # Captions before and after the training decide about the adapter.
            seconds += float(run.training_seconds or 0) + 2 * describing * min(MOST_MEASURED, number)
    return {
        "images": number,
        "finished": number - max(unread, undescribed),
        "outputs": [str(path) for path in options.output] + (["a text file per image"] if options.sidecars else []),
        "processes": options.processes or 1,
        "seconds": round(seconds, 1),
        "dry_run": True,
    }


def dry_run_text(facts: dict[str, Any]) -> str:
    """The facts as a sentence."""
    done = f", of which an earlier run has finished {facts['finished']:,}," if facts["finished"] else ""
    text = f"Would write {', '.join(facts['outputs'])} for {facts['images']:,} images{done} in about {facts['seconds']:,.0f} s"
    text += f" with {facts['processes']} processes" if facts["processes"] > 1 else ""
    return f"{text}. Nothing was written."


def _unfinished(run: AlbumRun, models: AlbumModels) -> tuple[int, int]:
    """Numbers of images that must be read, and captioned or compared."""
    options, source = run.options, run.source
    number = len(source.images)
    if options.overwrite:
        return number, number
    facts = run.earlier_adapter()
    adapter = run.adapter.absolute() if facts is not None and facts["kept"] else None
    settings = run.candidate_settings(adapter)
    read = kept_rows(run.shards, "images", {"images": settings["images"], "scorer": models.scorer.signature}, "key")
    names = [f"{name} {stamp}" for name, stamp in zip(source.image_ids, source.stamps(), strict=True)]
    unread = sum(name not in read for name in names)
    if options.model is None or (run.training_seconds is not None and facts is None):
        return unread, number
    captioned = kept_rows(run.shards, "candidates", settings, "id")
    # Copies are captioned once. All images that were read before a stage of captions ended are captioned, or are copies.
    ended = max((entry.ended for entry in captioned.values() if entry.ended is not None), default=0)
    pixels = {name.rpartition(" ")[2] for name in captioned}
    entries = (read.get(name) for name in names)
    done = sum(e is not None and (e.value is None or e.value in pixels or e.written <= ended) for e in entries)
    return unread, number - done


def _seconds_per_image(models: AlbumModels, source: AlbumSource) -> tuple[float, float]:
    """Seconds for reading an image, and for captioning and comparing it, measured on the first readable images."""
    options = models.options
    rows: list[int] = []
    unreadable: dict[int, str] = {}
    for chunk, _ in opened_chunks(source.images, range(len(source.images)), options.batch_size, unreadable):
        rows += chunk
        if len(rows) >= options.batch_size:
            break
    if not rows:
        joined_facts([], unreadable)  # raises
    rows = rows[: options.batch_size]
    images = ChosenImages(source.images, rows)
    captioner, scorer = (None if options.model is None else models.captioner), models.scorer
    start = time.monotonic()
    read_images(images, scorer, batch_size=options.batch_size)
    reading = (time.monotonic() - start) / len(rows)
    captions = [source.captions[row] for row in rows]
    start = time.monotonic()
    if captioner is not None or any(captions):
        describe_album(images, captioner, scorer, captions=captions, settings=options)
    both = (time.monotonic() - start) / len(rows)
    return reading, max(both - reading, 0.0)
