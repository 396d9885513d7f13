"""`captionrl album`: options, files and resuming."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from hf_captionrl.album.durations import duration
from hf_captionrl.album.options import AlbumOptions
from hf_captionrl.album.settings import check_candidate_options
from hf_captionrl.engine import launched

if TYPE_CHECKING:
    from hf_captionrl.album.sources import AlbumSource

__all__ = ["describe"]

_SUFFIXES = (".csv", ".jsonl", ".html")


def describe(options: AlbumOptions) -> None:
    """Run the command."""
    seconds = None if options.adapt is None else duration(options.adapt)
    _check(options)

    from hf_captionrl.album.album_result import summary_text
    from hf_captionrl.album.album_run import AlbumRun
    from hf_captionrl.album.loading import check_scorers, load_source
    from hf_captionrl.album.sources import read_captions_for

    check_scorers(options)
    source = load_source(options, sidecars=options.sidecar_captions)
    if options.captions is not None:
        source.captions = read_captions_for(source, options.captions)
    if options.model is None and not any(source.captions):
        raise ValueError(
            f"{options.images} has no captions, and there is no captioner. Use --model to write captions, or --captions to "
            "diagnose those of a file."
        )
    if options.dry_run:
        _dry_run(options, source, seconds)
        return
    with AlbumRun(options, source, seconds) as run:
        start = time.monotonic()
        album = run.describe()
        summary = {**album.summary(), "outputs": run.write(album), "seconds": round(time.monotonic() - start, 1)}
        summary |= run.facts
    summary["unreadable_images"] = [i.image_id for i in album.images if i.unreadable is not None][:20]
    print(json.dumps(summary) if options.json else summary_text(summary, album))


def _check(options: AlbumOptions) -> None:
    """Refuse outputs and settings that cannot work, before anything slow."""
    from hf_captionrl.album.caption_language import load_language_identifier
    from hf_captionrl.evaluation.image_stage import rows_per_shard

    check_candidate_options(options)
    if options.language not in ("auto", "any"):
        load_language_identifier(options.language)
    options.check_engine()
    rows_per_shard(options)
    if launched()[1] > 1:
        raise ValueError(
            f"{launched()[1]} processes were launched, and each would choose all captions. Use --processes or --engine ray instead "
            "of `accelerate launch`."
        )
    for path in options.output:
        if path.suffix.lower() not in _SUFFIXES:
            raise ValueError(f"--output {str(path)!r} must end in {', '.join(_SUFFIXES)}. Use one of these suffixes.")
        if path.is_dir():
            raise ValueError(f"--output {str(path)!r} is a folder. Use a file, such as album.csv.")
    if len(set(options.output)) < len(options.output):
        raise ValueError(
            f"--output names a file twice: {[str(path) for path in options.output]}. Use different files."
        )
    if options.model is None:
        needs = [name for name in ("adapt", "sidecars", "drop_shared", "trigger") if getattr(options, name)]
        if needs:
            raise ValueError(
                f"--{needs[0]} changes captions, but without --model they are only diagnosed. Use --model."
            )


def _dry_run(options: AlbumOptions, source: AlbumSource, training_seconds: float | None) -> None:
    """Caption the first batch, and print an estimate for the whole album."""
    from hf_captionrl.album.album import describe_album
    from hf_captionrl.album.album_run import AlbumRun
    from hf_captionrl.album.loading import AlbumModels

    run = AlbumRun(options, source, training_seconds)
    run.check_targets()
    models = AlbumModels(options, source)
    # The adapter does not change how long captioning takes.
    captioner, scorer = (None if options.model is None else models.captioner), models.scorer
    number = min(options.batch_size, len(source.images))
    part = source.first(number)
    start = time.monotonic()
    captions = None if not any(part.captions) else part.captions
    if captioner is not None or captions is not None:
        describe_album(part.images, captioner, scorer, captions=captions, skip_unreadable=True, settings=options)
    per_image = (time.monotonic() - start) / number
    processes = options.processes or 1
    seconds = per_image * len(source.images) / processes
    if training_seconds is not None and run.earlier_adapter() is None:
        from hf_captionrl.album.adapt_captioner import MOST_MEASURED

        # Captions before and after the training decide about the adapter.
        seconds += training_seconds + 2 * per_image * min(MOST_MEASURED, len(source.images))
    outputs = [str(path) for path in options.output] + (["a text file per image"] if options.sidecars else [])
    facts = {"images": len(source.images), "outputs": outputs, "processes": processes, "seconds": round(seconds, 1)}
    text = f"Would write {', '.join(outputs)} for {len(source.images):,} images in about {seconds:,.0f} s"
    text += f" with {processes} processes. Nothing was written." if processes > 1 else ". Nothing was written."
    print(json.dumps(facts | {"dry_run": True}) if options.json else text)
