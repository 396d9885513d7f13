"""`captionrl album`: options, files and resuming."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from hf_captionrl.album.durations import duration
from hf_captionrl.album.settings import AlbumSettings, check_candidate_options
from hf_captionrl.engine import EngineOptions, launched
from hf_captionrl.evaluation.dataset_options import CaptionerOptions, cache_dir_option
from hf_captionrl.options import option, positive

if TYPE_CHECKING:
    from hf_captionrl.album.sources import AlbumSource

__all__ = ["AlbumOptions", "describe"]

_SUFFIXES = (".csv", ".jsonl", ".html")


@dataclass
class AlbumOptions(EngineOptions, AlbumSettings, CaptionerOptions):
    """Caption the images of a set so that each caption is true of its image and of no other.

    Copies of an image get one caption. Candidates come from beams, samples and existing captions; they are chosen for all
    images together. Without --model, existing captions are diagnosed: which are duplicates, generic or ambiguous.

    Outputs are written when all captions are chosen. Candidates and features are kept in the Parquet shards of NAME.shards, and
    the same command skips finished shards, also after a crash. With --processes or --engine, several processes write them.
    Images are never changed, and text files beside them are only replaced with --overwrite.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl album photos --model Salesforce/blip-image-captioning-base --output alt.csv --max_characters 125
          captionrl album photos --model MODEL --sidecars --trigger "ohwx dog" --drop_shared
          captionrl album photos --captions old.jsonl --output report.html
          captionrl album photos --model MODEL --adapt 10m --output alt.jsonl report.html
          captionrl album photos --model MODEL --output alt.csv --processes 8
          captionrl album photos --model MODEL --output /shared/alt.csv --engine ray --address auto
    """

    images: str = option(
        positional=True,
        metavar="IMAGES",
        help="a folder with its subfolders, a list of files (.txt), a table (.jsonl, .csv, .parquet), 'scenes', or a data set "
        "on the Hub",
    )
    model: str | None = option(
        None, metavar="MODEL", help="captioner: a folder, a name on the Hub, or scenes:blip-mle; none only diagnoses"
    )
    scorer: str | None = option(
        None,
        metavar="NAME",
        help="dual encoder that compares captions and images (default: scenes:siglip-held-out for embedded captioners, "
        "scenes:clip-reward with --adapt, else openai/clip-vit-base-patch32)",
    )
    captions: Path | None = option(
        None, metavar="FILE", help="existing captions: .jsonl or .csv (default: those of the data, and .txt files)"
    )
    sidecar_captions: bool = option(True, help="read the .txt file beside an image as an existing caption")
    output: list[Path] = option(
        [Path("album.jsonl")],
        metavar="FILE",
        help=".jsonl, .csv, .html, or metadata.jsonl of an image folder; several allowed",
    )
    sidecars: bool = option(False, help="also write each caption into a .txt file beside its image")
    overwrite: bool = option(False, help="start again, and replace outputs and text files beside images")
    dry_run: bool = option(False, help="print what would be written and how long it would take; write nothing")
    adapt: str | None = option(
        None,
        metavar="TIME",
        help="first finetune the captioner on this album by self-retrieval for this time, such as 90s, 10m or 1h; a held-out scorer "
        "decides whether the result is used",
    )
    held_out_scorer: str | None = option(
        None,
        metavar="NAME",
        help="dual encoder that decides about --adapt (default: scenes:siglip-held-out for embedded captioners, else "
        "google/siglip-base-patch16-224)",
    )
    group_by: Literal["folder", "album"] = option(
        "folder", help="images among which shared phrases are searched: each folder, or the whole album"
    )
    split: str | None = option(None, metavar="SPLIT", help="split of a data set (default: all)")
    image_root: str | None = option(
        None, metavar="DIR", help="folder that image paths of a list or table are relative to"
    )
    max_images: int | None = option(None, parse=positive, metavar="N", help="use only the first N images")
    page_images: int = option(2000, parse=positive, metavar="N", help="most images of the HTML page")
    cache_dir: str | None = cache_dir_option()
    rows_per_shard: int | None = option(
        None, parse=positive, metavar="N", group="engine", help="images per Parquet file (default: 4 batches)"
    )

    @property
    def uses_shards(self) -> bool:
        """Always."""
        return True


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
    from hf_captionrl.evaluation.image_stage import rows_per_shard

    check_candidate_options(options)
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
        from hf_captionrl.album.adapt import MOST_MEASURED

        # Captions before and after the training decide about the adapter.
        seconds += training_seconds + 2 * per_image * min(MOST_MEASURED, len(source.images))
    outputs = [str(path) for path in options.output] + (["a text file per image"] if options.sidecars else [])
    facts = {"images": len(source.images), "outputs": outputs, "processes": processes, "seconds": round(seconds, 1)}
    text = f"Would write {', '.join(outputs)} for {len(source.images):,} images in about {seconds:,.0f} s"
    text += f" with {processes} processes. Nothing was written." if processes > 1 else ". Nothing was written."
    print(json.dumps(facts | {"dry_run": True}) if options.json else text)
