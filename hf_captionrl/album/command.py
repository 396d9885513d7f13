"""`captionrl album`: options, files and resuming."""

from __future__ import annotations

import json
import time

from hf_captionrl.album.durations import duration
from hf_captionrl.album.options import AlbumOptions
from hf_captionrl.album.settings import check_candidate_options
from hf_captionrl.engine import launched

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
        from hf_captionrl.album.dry_run import dry_run, dry_run_text

        facts = dry_run(AlbumRun(options, source, seconds))
        print(json.dumps(facts) if options.json else dry_run_text(facts))
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
