"""One run of `captionrl album`: its files, its locks, and resuming."""

from __future__ import annotations

import dataclasses
import json
import os
import posixpath
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hf_captionrl.album.kept_files import KeptFiles, file_digest
from hf_captionrl.album.settings import CandidateOptions
from hf_captionrl.engine import refuse_other_settings
from hf_captionrl.io import LineFile, to_plain

if TYPE_CHECKING:
    from hf_captionrl.album.album_result import Album
    from hf_captionrl.album.options import AlbumOptions
    from hf_captionrl.album.sources import AlbumSource
    from hf_captionrl.retrieval import Scorer

__all__ = ["AlbumRun"]


class _Reservation(LineFile):
    """Keeps other commands away from an output."""

    busy = "Wait until it ends, or use another --output without --sidecars."


class AlbumRun:
    """One run of the command and its files; a context manager that keeps other commands away from the outputs."""

    def __init__(self, options: AlbumOptions, source: AlbumSource, training_seconds: float | None) -> None:
        from hf_captionrl.album.outputs import check_sidecars

        self.options, self.source, self.training_seconds = options, source, training_seconds
        self.first = options.output[0]
        self.run_file = self.first.with_suffix(".run.json")
        self.shards = self.first.with_suffix(".shards")
        self.adapter = self.first.with_suffix(".adapter")
        self.kept = KeptFiles(self.first)
        self.targets = list(options.output)
        if options.sidecars:
            self.targets += check_sidecars(source.image_ids, source.paths)
        self.facts: dict[str, Any] = {}
        self._open: list[LineFile] = []

    def __enter__(self) -> Self:
        try:
            self._lock()
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open:
            if file.path.is_file() and file.path.stat().st_size == 0:
                file.path.unlink()
            file.close()
        self._open.clear()

    def _lock(self) -> None:
        """Reserve every output by `NAME.lock`, and the text files beside the images by a lock in their folder."""
        paths = {os.path.abspath(path): path for path in (p.with_suffix(".lock") for p in self.options.output)}
        if self.options.sidecars:
            folder = os.path.commonpath([os.path.abspath(Path(path).parent) for path in self.source.paths if path])
            self._open.append(_Reservation(Path(folder, ".captionrl.lock")))
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open.append(_Reservation(path))

    def _begin(self) -> None:
        """Refuse to replace files that this command did not write; forget captions that an earlier run wrote."""
        self.continues = self.run_file.is_file() and not self.options.overwrite
        self.check_targets()
        if self.options.captions is None:
            self._restore_captions()

    def check_targets(self) -> None:
        """Refuse to replace files that this command did not write."""
        foreign = [] if self.options.overwrite else self.kept.foreign(self.targets)
        if foreign:
            raise ValueError(
                f"{len(foreign)} files exist that this command did not write, such as {str(foreign[0])!r}. Use --overwrite to "
                f"replace them (their contents are kept in {self.kept.old.name}), or another --output."
            )

    def _restore_captions(self) -> None:
        """Replace captions that this command wrote by those that existed before."""
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

    def candidate_settings(self, adapter: Path | None) -> dict[str, Any]:
        """Settings that affect the candidates. Other settings may change without a new generation. The shards compare weights."""
        options = self.options
        names = [field.name for field in dataclasses.fields(CandidateOptions) if field.name != "contrastive"]
        return {
            "images": os.path.realpath(options.images) if os.path.exists(options.images) else options.images,
            "adapter": None if adapter is None else file_digest(adapter / "adapter_model.safetensors"),
            **{name: getattr(options, name) for name in ("model", "revision", "prompt", "dtype", *names)},
        }

    def describe(self) -> Album:
        """Load the models, and describe the album."""
        from hf_captionrl.album.album import AlbumEngine
        from hf_captionrl.album.kept_rows import remove_kept
        from hf_captionrl.album.loading import AlbumModels
        from hf_captionrl.album.model_work_on_shards import KINDS, ShardWork
        from hf_captionrl.evaluation.write_captions import check_settings
        from hf_captionrl.io import write_json
        from hf_captionrl.reports.versions import installed_versions

        options, source = self.options, self.source
        models = AlbumModels(options, source)
        if self.training_seconds is not None:
            self.facts["adapt"] = self._adapt(models.scorer, self.training_seconds)
            models.adapter = self.adapter.absolute() if self.facts["adapt"]["kept"] else None
        settings = self.candidate_settings(models.adapter)
        if self.continues:
            check_settings(self.run_file, settings)
        elif options.overwrite:
            remove_kept(self.shards, KINDS)
        write_json(self.run_file, {"settings": settings, "versions": installed_versions()})
        with Progress(len(source.images)) as progress:
            work = ShardWork(models, self.shards, settings, progress)
            groups = _groups(source, options)
            engine = AlbumEngine(
                source.images, source.image_ids, source.captions, work, models.scorer, options, groups, progress
            )
            return engine.describe(diagnose_only=options.model is None)

    def _adapt(self, scorer: Scorer, seconds: float) -> dict[str, Any]:
        """Train an adapter in this process, or use that of an earlier run of the same command; return the decision."""
        from hf_captionrl.album.adapt_captioner import adapt_to_album
        from hf_captionrl.album.loading import load_held_out, load_model
        from hf_captionrl.io import write_json

        options = self.options
        facts = self.earlier_adapter()
        if facts is not None:
            self._refuse_other_adapter(facts.get("asked"))
            return facts
        record = self.adapter / "asked.json"
        if options.overwrite:
            self._remove_checkpoints()
        elif record.is_file():
            self._refuse_other_adapter(json.loads(record.read_text(encoding="utf-8")))
        write_json(record, self._asked())
        found = adapt_to_album(
            lambda: load_model(options),
            scorer,
            load_held_out(options),
            self.source.images,
            self.adapter,
            seconds=seconds,
            cache_dir=options.cache_dir,
            seed=options.seed,
            resume=True,
        )
        facts = {**found.facts, "asked": self._asked()}
        write_json(self.adapter / "decision.json", facts)
        self._remove_checkpoints()
        # Every process loads the weights from the file: same data type, same captions.
        return facts

    def earlier_adapter(self) -> dict[str, Any] | None:
        """The decision of an earlier run about its adapter."""
        decision = self.adapter / "decision.json"
        if self.options.overwrite or not decision.is_file():
            return None
        return json.loads(decision.read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def _asked(self) -> dict[str, Any]:
        """Settings that an adapter depends on."""
        names = "images split image_root max_images model revision prompt dtype scorer held_out_scorer seed".split()
        return {"seconds": self.training_seconds, **{name: getattr(self.options, name) for name in names}}

    def _refuse_other_adapter(self, asked: Mapping[str, Any] | None) -> None:
        remedy = f"{self.adapter} has an adapter of that command. Use --overwrite to train again, or another --output."
        refuse_other_settings(asked or {}, to_plain(self._asked()), remedy)

    def _remove_checkpoints(self) -> None:
        for checkpoint in self.adapter.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)

    def write(self, album: Album) -> list[str]:
        """Write the outputs, each atomically."""
        self.kept.before_writing(self.targets)
        try:
            return self._write_outputs(album)
        finally:
            # Also after a failure: a file that is edited before the command is repeated must not count as written by it.
            self.kept.after_writing(self.targets)

    def _write_outputs(self, album: Album) -> list[str]:
        from hf_captionrl.album.outputs import write_metadata, write_sidecars
        from hf_captionrl.album.report_page import write_report

        written = []
        for path in self.options.output:
            kind = path.suffix.lower()
            if path.name == "metadata.jsonl":
                write_metadata(album, self.source.paths, path)
            elif kind == ".csv":
                album.to_csv(path)
            elif kind == ".jsonl":
                album.to_jsonl(path)
            else:
                title = Path(self.options.images).name or "Album"
                with Progress(min(len(album.images), self.options.page_images)) as progress:
                    write_report(
                        path,
                        album,
                        self.source.images,
                        title=title,
                        max_images=self.options.page_images,
                        progress=lambda number, bar=progress: bar("writing the page", number),  # type: ignore[misc]
                    )
            written.append(str(path))
        if self.options.sidecars:
            number = write_sidecars(album, self.source.paths)
            written.append(f"{number} text files")
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
