"""`captionrl album`: options, files, resuming."""

from __future__ import annotations

import dataclasses
import json
import os
import posixpath
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.album.durations import duration
from hf_captionrl.album.kept_files import KeptFiles, file_stamps, refuse_changed
from hf_captionrl.album.settings import AlbumSettings, CandidateOptions, check_candidate_options
from hf_captionrl.evaluation.dataset_options import CaptionerOptions, cache_dir_option
from hf_captionrl.options import option, positive

if TYPE_CHECKING:
    from hf_captionrl.album.album_result import Album
    from hf_captionrl.album.sources import AlbumSource
    from hf_captionrl.captioners.captioner import Captioner

__all__ = ["AlbumOptions", "describe"]

_SUFFIXES = (".csv", ".jsonl", ".html")


@dataclass
class AlbumOptions(AlbumSettings, CaptionerOptions):
    """Caption the images of a set so that each caption is true of its image and of no other.

    Copies of an image get one caption. Candidates come from beams, samples and the captions that exist; they are chosen for all
    images together. Without --model, the captions that exist are diagnosed: which are duplicates, generic or ambiguous.

    Outputs are written when all captions are chosen; candidates are kept in NAME.candidates.jsonl as soon as they are generated,
    and the same command continues after a crash. Images are never changed, and text files beside them are only replaced with
    --overwrite.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl album photos --model Salesforce/blip-image-captioning-base --output alt.csv --max_characters 125
          captionrl album photos --model MODEL --sidecars --trigger "ohwx dog" --drop_shared
          captionrl album photos --captions old.jsonl --output report.html
          captionrl album photos --model MODEL --adapt 10m --output alt.jsonl report.html
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
        None, metavar="FILE", help="captions that exist: .jsonl or .csv (default: those of the data, and .txt files)"
    )
    sidecar_captions: bool = option(True, help="read the .txt file beside an image as a caption that exists")
    output: list[Path] = option(
        [Path("album.jsonl")],
        metavar="FILE",
        help=".jsonl, .csv, .html, or metadata.jsonl of an image folder; several allowed",
    )
    sidecars: bool = option(False, help="also write each caption into a .txt file beside its image")
    overwrite: bool = option(False, help="start again, and replace outputs and text files beside images")
    dry_run: bool = option(False, help="say what would be written and how long it takes; write nothing")
    adapt: str | None = option(
        None,
        metavar="TIME",
        help="first finetune the captioner on this album by self-retrieval for so long, such as 90s, 10m or 1h; a held-out scorer "
        "decides whether the result is used",
    )
    held_out_scorer: str | None = option(
        None,
        metavar="NAME",
        help="dual encoder that decides about --adapt (default: scenes:siglip-held-out for embedded captioners, else "
        "google/siglip-base-patch16-224)",
    )
    group_by: Literal["folder", "album"] = option("folder", help="inside which images shared phrases are searched")
    split: str | None = option(None, metavar="SPLIT", help="of a data set (default: all)")
    image_root: str | None = option(
        None, metavar="DIR", help="folder that image paths of a list or table are relative to"
    )
    max_images: int | None = option(None, parse=positive, metavar="N", help="use only the first N images")
    page_images: int = option(2000, parse=positive, metavar="N", help="most images of the HTML page")
    cache_dir: str | None = cache_dir_option()


def describe(options: AlbumOptions) -> None:
    """Run the command."""
    seconds = None if options.adapt is None else duration(options.adapt)
    _check(options)

    from hf_captionrl.album.album_result import summary_text
    from hf_captionrl.album.sources import load_album_source, read_captions_for

    settings = {"split": options.split} if options.split else {}
    settings |= {"image_root": options.image_root} if options.image_root else {}
    source = load_album_source(options.images, sidecars=options.sidecar_captions, **settings)
    if options.max_images is not None:
        source = source.first(options.max_images)
    if options.captions is not None:
        source.captions = read_captions_for(source, options.captions)
    if options.model is None and not any(source.captions):
        raise ValueError(
            f"{options.images} has no captions, and there is no captioner. Use --model to write captions, or --captions to "
            "diagnose those of a file."
        )
    if options.dry_run:
        _dry_run(options, source)
        return
    with _Files(options, source) as files:
        start = time.monotonic()
        album = files.run(seconds)
        summary = {**album.summary(), "outputs": files.write(album), "seconds": round(time.monotonic() - start, 1)}
        summary |= files.facts
    summary["unreadable_images"] = [i.image_id for i in album.images if i.unreadable is not None][:20]
    print(json.dumps(summary) if options.json else summary_text(summary, album))


def _check(options: AlbumOptions) -> None:
    """Refuse outputs and settings that cannot work, before anything slow."""
    check_candidate_options(options)
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


class _Files:
    """The files of one run; a context manager that keeps other commands away from the output."""

    def __init__(self, options: AlbumOptions, source: AlbumSource) -> None:
        from hf_captionrl.album.outputs import check_sidecars

        self.options, self.source = options, source
        self.first = options.output[0]
        self.run_file = self.first.with_suffix(".run.json")
        self.kept = KeptFiles(self.first)
        self.targets = list(options.output)
        if options.sidecars:
            self.targets += check_sidecars(source.image_ids, source.paths)
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        from hf_captionrl.evaluation.caption_files import CaptionWriter

        self.writer = CaptionWriter(self.first.with_suffix(".candidates.jsonl"), overwrite=self.options.overwrite)
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        path = self.writer.path
        if path.is_file() and path.stat().st_size == 0:
            path.unlink()
        self.writer.close()

    def _begin(self) -> None:
        """Refuse to replace files of others; forget captions that an earlier run wrote."""
        self.continues = self.run_file.is_file() and not self.options.overwrite
        self.check_targets()
        if self.options.captions is None:
            self._restore_captions()

    def check_targets(self) -> None:
        """Refuse to replace files of others."""
        foreign = [] if self.options.overwrite else self.kept.foreign(self.targets)
        if foreign:
            raise ValueError(
                f"{len(foreign)} files exist that this command did not write, such as {str(foreign[0])!r}. Use --overwrite to "
                f"replace them (their contents are kept in {self.kept.old.name}), or --output for a file of its own."
            )

    def _restore_captions(self) -> None:
        """Captions of files that this command wrote are not captions that existed before."""
        from hf_captionrl.album.sources import sidecar_of

        captions, old = self.source.captions, self.kept.old_texts()
        metadata = Path(self.options.images) / "metadata.jsonl"
        if metadata.is_file() and self.kept.is_ours(metadata):
            captions = [[] for _ in captions]
        for row, image in enumerate(self.source.paths):
            sidecar = None if image is None else sidecar_of(image)
            if sidecar is None or not sidecar.is_file() or not self.kept.is_ours(sidecar):
                continue
            if captions[row] == [sidecar.read_text(encoding="utf-8").strip()]:
                before = old.get(self.kept.name_of(sidecar), "").strip()
                captions[row] = [before] if before else []
        self.source.captions = captions

    def _settings(self, captioner: Captioner | None) -> dict[str, Any]:
        """Settings of the candidates; others may change without generating them again."""
        from hf_captionrl.retrieval import model_fingerprint

        options = self.options
        names = [field.name for field in dataclasses.fields(CandidateOptions) if field.name != "contrastive"]
        weights = None if captioner is None else model_fingerprint(captioner.base_model)
        return {
            "images": os.path.realpath(options.images) if os.path.exists(options.images) else options.images,
            "model": options.model,
            "weights": weights,
            "prompt": None if captioner is None else captioner.prompt,
            "dtype": options.dtype,
            **{name: getattr(options, name) for name in names},
        }

    def run(self, seconds: float | None) -> Album:
        """Load the models, and describe the album."""
        from hf_captionrl.album.album import describe_album
        from hf_captionrl.album.loading import load_models
        from hf_captionrl.evaluation.write_captions import check_settings
        from hf_captionrl.io import write_json
        from hf_captionrl.reports.versions import installed_versions
        from hf_captionrl.retrieval import FeatureCache

        options, source = self.options, self.source
        captioner, scorer = load_models(options)
        if seconds is not None:
            captioner, self.facts["adapt"] = self._adapt(scorer, seconds)
        settings = self._settings(captioner)
        images = file_stamps(source.image_ids, source.paths)
        if self.continues:
            check_settings(self.run_file, settings)
            refuse_changed(json.loads(self.run_file.read_text(encoding="utf-8")).get("images", {}), images)
        self.writer.start()
        write_json(self.run_file, {"settings": settings, "versions": installed_versions(), "images": images})
        with Progress(len(source.images)) as progress:
            album = describe_album(
                source.images,
                captioner,
                scorer,
                captions=source.captions,
                image_ids=source.image_ids,
                groups=_groups(source, options),
                settings=options,
                cache=FeatureCache.for_scorer(scorer, options.cache_dir),
                journal=self.writer,
                skip_unreadable=True,
                progress=progress,
            )
        return album

    def _adapt(self, scorer: Any, seconds: float) -> tuple[Captioner, dict[str, Any]]:
        """Train an adapter, or take that of an earlier run of the same command."""
        from hf_captionrl.album.adapt import adapt_to_album
        from hf_captionrl.album.loading import load_adapted, load_held_out, load_model
        from hf_captionrl.io import write_json

        options, folder = self.options, self.first.with_suffix(".adapter")
        decision = folder / "decision.json"
        names = ("images", "model", "revision", "dtype", "scorer", "held_out_scorer", "seed")
        asked = {"seconds": seconds, **{name: getattr(options, name) for name in names}}
        if decision.is_file() and not options.overwrite:
            facts = json.loads(decision.read_text(encoding="utf-8"))
            if facts.get("asked") != asked:
                raise ValueError(
                    f"{folder} has an adapter of another command ({facts.get('asked')}). Use --overwrite to train again, or "
                    "another --output."
                )
            return load_adapted(options, folder if facts["kept"] else None), facts
        found = adapt_to_album(
            lambda: load_model(options),
            scorer,
            load_held_out(options),
            self.source.images,
            folder,
            seconds=seconds,
            cache_dir=options.cache_dir,
            seed=options.seed,
        )
        facts = {**found.facts, "asked": asked}
        write_json(decision, facts)
        return found.captioner, facts

    def write(self, album: Album) -> list[str]:
        """Write the outputs, each whole or not at all."""
        from hf_captionrl.album.outputs import write_csv, write_metadata, write_rows, write_sidecars
        from hf_captionrl.album.report_page import write_report

        written = []
        self.kept.before_writing(self.targets)
        for path in self.options.output:
            kind = path.suffix.lower()
            if path.name == "metadata.jsonl":
                write_metadata(album, self.source.paths, path)
            elif kind == ".csv":
                write_csv(album, path)
            elif kind == ".jsonl":
                write_rows(album, path)
            else:
                title = Path(self.options.images).name or "Album"
                write_report(path, album, self.source.images, title=title, max_images=self.options.page_images)
            written.append(str(path))
        if self.options.sidecars:
            number = write_sidecars(album, self.source.paths)
            written.append(f"{number} text files")
        self.kept.after_writing(self.targets)
        return written


class Progress:
    """A progress bar per stage, on a terminal; a context manager."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.stage = ""
        self.bar: Any = None

    def __call__(self, stage: str, number: int) -> None:
        from tqdm import tqdm

        if stage != self.stage:
            self.__exit__()
            self.stage = stage
            self.bar = tqdm(total=self.total, desc=stage, unit=" images", disable=None)
        self.bar.update(number)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _groups(source: AlbumSource, options: AlbumOptions) -> list[str]:
    if options.group_by == "album" or source.root is None:
        return [""] * len(source.image_ids)
    return [posixpath.dirname(image_id) for image_id in source.image_ids]


def _dry_run(options: AlbumOptions, source: AlbumSource) -> None:
    """Caption the first batch, and say what the whole album would take."""
    from hf_captionrl.album.album import describe_album
    from hf_captionrl.album.loading import load_models

    _Files(options, source).check_targets()
    captioner, scorer = load_models(options)
    number = min(options.batch_size, len(source.images))
    part = source.first(number)
    start = time.monotonic()
    captions = None if not any(part.captions) else part.captions
    if captioner is not None or captions is not None:
        describe_album(part.images, captioner, scorer, captions=captions, skip_unreadable=True, settings=options)
    seconds = (time.monotonic() - start) / number * len(source.images)
    outputs = [str(path) for path in options.output] + (["a text file per image"] if options.sidecars else [])
    facts = {"images": len(source.images), "outputs": outputs, "seconds": round(seconds, 1), "dry_run": True}
    text = f"Would write {', '.join(outputs)} for {len(source.images):,} images in about {seconds:,.0f} s. Nothing was written."
    print(json.dumps(facts) if options.json else text)
