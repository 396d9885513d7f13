"""`captionrl album`: options, files and resuming."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import posixpath
import shutil
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.candidates import MOST_MEASURED
from hf_captionrl.apps.album.model_work import stage_progress
from hf_captionrl.apps.album.options import AlbumOptions
from hf_captionrl.apps.album.settings import CandidateOptions, check_candidate_options, duration
from hf_captionrl.apps.album.sources import (
    AlbumSource,
    ImageFacts,
    copy_threshold,
    joined_facts,
    opened_chunks,
    read_images,
)
from hf_captionrl.captioners.pipeline import ChosenImages
from hf_captionrl.cli.features import rows_per_shard
from hf_captionrl.metrics.suites import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer
from hf_captionrl.utils.io import LineFile, json_digest, to_plain, write_json
from hf_captionrl.utils.options import EngineOptions
from hf_captionrl.utils.parts import (
    MANIFEST,
    ShardFolder,
    Stage,
    launched,
    read_manifest,
    read_shard,
    read_tables,
    refuse_other_settings,
    run_stage,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.apps.album.result import Album
    from hf_captionrl.captioners.captioner import Captioner


# --- Loads the models of `captionrl album` ---------------------------------------------------------------------------


def _device(options: AlbumOptions) -> Any:
    import torch

    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _is_embedded(options: AlbumOptions) -> bool:
    from hf_captionrl.utils.model_files import PREFIX

    return (options.model or (PREFIX if options.images == "scenes" else "")).startswith(PREFIX)


def load_model(options: AlbumOptions) -> Captioner:
    """The captioner of the options."""
    import torch

    from hf_captionrl.captioners.pipeline import pipeline

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
    from hf_captionrl.apps.album.sources import load_album_source

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
    from hf_captionrl.utils.model_files import model_path

    names = _scorer_name(options), _held_out_name(options)
    places = [os.path.realpath(place) if os.path.exists(place) else place for place in map(model_path, names)]
    if places[0] == places[1]:
        raise ValueError(
            f"--adapt has {names[0]!r} as --scorer and {names[1]!r} as --held_out_scorer. One scorer cannot reward captions and "
            "decide about them: it would approve of captions that only exploit it. Use another model as --held_out_scorer."
        )


def _scorer_name(options: AlbumOptions) -> str:
    from hf_captionrl.hub.spaces import demo_scorer

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
    from hf_captionrl.utils.model_files import model_path

    return load_scorer(model_path(name), device=_device(options))


# --- Records which files this command has written and what they contained before, so that no other file is lost ------


class KeptFiles:
    """The record beside the first output.

    `NAME.files.json` has the digest of each file that was written, None while it is being written. A file with another content was
    not written by this command: it is replaced only after its content has been appended to `NAME.old.jsonl`.
    """

    def __init__(self, first: Path) -> None:
        self.folder = first.parent
        self.record = first.with_suffix(".files.json")
        self.old = first.with_suffix(".old.jsonl")
        self._digests: dict[str, str | None] = {}
        if self.record.is_file():
            self._digests = json.loads(self.record.read_text(encoding="utf-8"))

    def is_ours(self, path: Path) -> bool:
        """Whether this command wrote the file as it is."""
        name = self.name_of(path)
        return name in self._digests and self._digests[name] in (None, file_digest(path))

    def foreign(self, paths: Iterable[Path]) -> list[Path]:
        """The files that exist and were not written by this command."""
        return [path for path in paths if path.exists() and not self.is_ours(path)]

    def before_writing(self, paths: Iterable[Path]) -> None:
        """Keep the contents of files that this command did not write, then record that all these files are about to be written."""
        paths = list(paths)
        lines = []
        for path in self.foreign(paths):
            content = path.read_bytes()
            try:
                kept = {"text": content.decode("utf-8")}
            except UnicodeDecodeError:
                kept = {"base64": base64.b64encode(content).decode()}
            lines.append(json.dumps({"file": self.name_of(path), **kept}, ensure_ascii=False) + "\n")
        if lines:
            with LineFile(self.old) as file:
                file.truncate(len(self._old_lines()))  # a full disk may have left an incomplete line
                file.append_bytes("".join(lines).encode("utf-8"))
        self._digests |= {self.name_of(path): None for path in paths}
        write_json(self.record, self._digests)

    def after_writing(self, paths: Iterable[Path]) -> None:
        """Record what was written; a file that was not written is forgotten."""
        for path in paths:
            self._digests.pop(self.name_of(path), None)
            if path.is_file():
                self._digests[self.name_of(path)] = file_digest(path)
        write_json(self.record, self._digests)

    def old_texts(self) -> dict[str, str]:
        """The earliest text of each replaced file, by `name_of`."""
        found: dict[str, str] = {}
        # Only a line feed ends a line: texts may contain other separators.
        for line in self._old_lines().split(b"\n")[:-1]:
            entry = json.loads(line)
            found.setdefault(entry["file"], entry.get("text", ""))
        return found

    def _old_lines(self) -> bytes:
        """The complete lines of the file of old contents."""
        data = self.old.read_bytes() if self.old.is_file() else b""
        return data[: data.rfind(b"\n") + 1]

    def name_of(self, path: Path) -> str:
        """A file's name in the record, relative to the first output."""
        return Path(os.path.relpath(os.path.abspath(path), os.path.abspath(self.folder))).as_posix()


def file_digest(path: Path) -> str:
    """Digest of the content of a file."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


# --- Rows that stages have computed for the images of an album: a repeated command computes only the missing ones ----
# NAME.shards/images-1b2c.../       hashes, small pictures, features
#     NAME.shards/candidates-3d4e.../   captions and their features
#
# A folder contains the shards of the ids that were in no finished folder when it was created; its name is a digest of these ids.
# The same command therefore finds its unfinished folder again. If images are added, only these are written to a new folder.

_TABLES = 4
"""Largest number of shards in memory. The shards of added images may alternate with others."""


class KeptRows:
    """Rows of one kind; the column `id` names them.

    Folders with other `settings` are left alone.
    """

    def __init__(self, folder: Path, kind: str, settings: Mapping[str, Any]) -> None:
        self.folder, self.kind = folder, kind
        self.settings: dict[str, Any] = to_plain(dict(settings))
        self.made_by: dict[str, Any] | None = None
        self._files: list[Path] = []
        self._place: dict[str, tuple[int, int]] = {}
        self._read: OrderedDict[int, Any] = OrderedDict()
        for path in sorted(folder.glob(f"{kind}-*/{MANIFEST}")):
            manifest = read_manifest(path.parent)
            is_same = self.settings.items() <= manifest["settings"].items()
            shards = [path.parent / shard["file"] for shard in manifest.get("shards", ())]
            if is_same and shards and all(shard.is_file() for shard in shards):
                self._add(path.parent, manifest)

    def _add(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.made_by = manifest["made_by"]
        for shard, table in zip(manifest["shards"], read_tables(folder, ["id"]), strict=True):
            at = len(self._files)
            self._files.append(folder / shard["file"])
            self._place |= {name: (at, row) for row, name in enumerate(table["id"].to_pylist())}

    def complete(
        self,
        ids: Sequence[str],
        make_stage: Callable[[list[int]], Stage],
        options: EngineOptions,
        rows_per_shard: int,
        progress: Callable[[int], Any] | None = None,
    ) -> None:
        """Compute the rows that are missing."""
        asked = [at for at, name in enumerate(ids) if name not in self._place]
        if progress is not None and len(asked) < len(ids):
            progress(len(ids) - len(asked))
        if not asked:
            if options.engine is None and options.processes == 1:
                make_stage([]).load()  # other models are refused, too, if there is nothing to compute
            return
        folder = self.folder / f"{self.kind}-{json_digest([self.settings, [ids[at] for at in asked]])}"
        shards = ShardFolder(folder, self.settings, num_rows=len(asked), rows_per_shard=rows_per_shard)
        self._add(folder, run_stage(make_stage(asked), shards, options, progress=progress)["manifest"])

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """All shards."""
        for path in self._files:
            yield read_shard(path, columns)

    def row(self, name: str) -> tuple[pa.Table, int]:
        """The shard that has a row, and its number there."""
        file, row = self._place[name]
        if file not in self._read:
            self._read[file] = read_shard(self._files[file])
            if len(self._read) > _TABLES:
                self._read.popitem(last=False)
        self._read.move_to_end(file)
        return self._read[file], row


class KeptRow(NamedTuple):
    """A row of a finished shard."""

    value: Any
    written: int  # when its shard was written, in nanoseconds
    ended: int | None  # when the last shard of its folder was written; None if some are missing


def kept_rows(folder: Path, kind: str, settings: Mapping[str, Any], column: str) -> dict[str, KeptRow]:
    """A column of the rows of all finished shards, also those of unfinished folders, by id."""
    found: dict[str, KeptRow] = {}
    wanted = to_plain(dict(settings))
    for path in sorted(folder.glob(f"{kind}-*/{MANIFEST}")):
        manifest = read_manifest(path.parent)
        if not wanted.items() <= manifest["settings"].items():
            continue
        ended = path.stat().st_mtime_ns if "shards" in manifest else None
        for shard in sorted(path.parent.glob("part-*.parquet")):
            table = read_shard(shard, list(dict.fromkeys(["id", column])))
            written = shard.stat().st_mtime_ns
            values = zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True)
            found |= {name: KeptRow(value, written, ended) for name, value in values}
    return found


def remove_kept(folder: Path, kinds: Sequence[str]) -> None:
    """Remove the shards of these kinds, and folders that are then empty."""
    for kind in kinds:
        for part in folder.glob(f"{kind}-*"):
            for file in (*part.glob("part-*.parquet"), part / MANIFEST):
                file.unlink(missing_ok=True)
            if part.is_dir() and not any(part.iterdir()):
                part.rmdir()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


# --- What the processes of an album compute: facts of images, candidates, answers to contrastive prompts -------------
# Legend: B images of a batch, G captions of an image, D features.


class _AlbumStage(Stage):
    """A stage on some images of an album.

    Rows that other models made in an earlier run are refused.
    """

    def __init__(
        self, models: AlbumModels, ids: Sequence[str], images: Sequence[str], made_by: Mapping[str, Any] | None
    ) -> None:
        self.models, self.ids, self.images, self.expected = models, list(ids), list(images), made_by

    def load(self) -> None:
        self._rows = self.models.rows_of(self.images)
        if self.expected is not None:
            refuse_other_settings(self.expected, to_plain(self.made_by()))

    def batches(self, rows: range) -> Iterator[range]:
        """Batches start at fixed rows: the result does not depend on the size of the shards."""
        size = self.models.options.batch_size
        for start in range(rows.start, rows.stop, size):
            yield range(start, min(start + size, rows.stop))


class ReadStage(_AlbumStage):
    """Hash, small picture and features of each image, or the `reason` why it cannot be read."""

    def load(self) -> None:
        from hf_captionrl.retrieval import FeatureCache

        super().load()
        # The stage only reads the cache: otherwise the features of an image would depend on which process is the first.
        self._cache: FeatureCache = FeatureCache.for_scorer(self.models.scorer, self.models.options.cache_dir)

    def made_by(self) -> dict[str, Any]:
        return {"scorer": self.models.scorer.signature}

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        columns = {"id": pa.string(), "key": pa.string(), "picture": pa.binary(), "features": pa.list_(pa.float32())}
        return pa.schema({**columns, "reason": pa.string()})

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        from hf_captionrl.apps.album.sources import read_chunks

        found: dict[int, dict[str, Any]] = {}
        unreadable: dict[int, str] = {}
        for batch in self.batches(rows):
            for facts in read_chunks(
                self.models.source.images,
                self._rows[batch.start : batch.stop],
                self.models.scorer,
                cache=self._cache,
                batch_size=len(batch),
                unreadable=unreadable,
            ):
                values = zip(facts.rows, facts.keys, facts.pictures, facts.features.numpy(), strict=True)
                for row, key, picture, features in values:
                    found[row] = {"key": key, "picture": picture.tobytes(), "features": features}
        album_rows = self._rows[rows.start : rows.stop]
        return [
            {"id": self.ids[row], **(found.get(at) or {"reason": unreadable[at]})}
            for row, at in zip(rows, album_rows, strict=True)
        ]


class _TextStage(_AlbumStage):
    """Captions of each image and their features, `(G * D,)`; the column `scorer` names the scorer."""

    def made_by(self) -> dict[str, Any]:
        from hf_captionrl.retrieval import model_fingerprint

        captioner = self.models.captioner
        return {"weights": model_fingerprint(captioner.base_model), "prompt": captioner.prompt}

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        columns = {"id": pa.string(), "captions": pa.list_(pa.string()), "features": pa.list_(pa.float32())}
        return pa.schema({**columns, "scorer": pa.string()})

    @abstractmethod
    def captions(self, batch: range) -> list[list[str]]:
        """Captions of a batch."""

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        from hf_captionrl.metrics.suites import spoken

        scorer = self.models.scorer
        found = []
        for batch in self.batches(rows):
            groups = self.captions(batch)
            flat = spoken([text for texts in groups for text in texts])
            features = scorer.text_features(flat).float().cpu().numpy()  # (B * G, D)
            at = 0
            for row, texts in zip(batch, groups, strict=True):
                mine = features[at : at + len(texts)].reshape(-1)
                at += len(texts)
                found.append({"id": self.ids[row], "captions": texts, "features": mine, "scorer": scorer.signature})
        return found


class CandidateStage(_TextStage):
    """Candidates from beam search and sampling."""

    def __init__(
        self,
        models: AlbumModels,
        ids: Sequence[str],
        images: Sequence[str],
        made_by: Mapping[str, Any] | None,
        similar: Sequence[Sequence[int]] | None,
    ) -> None:
        super().__init__(models, ids, images, made_by)
        self.similar = similar

    def captions(self, batch: range) -> list[list[str]]:
        from hf_captionrl.apps.album.candidates import generate_candidates

        part = slice(batch.start, batch.stop)
        source = self.models.source
        return generate_candidates(
            self.models.captioner,
            source.images,
            source.image_ids,
            self.models.options,
            rows=self._rows[part],
            similar=None if self.similar is None else self.similar[part],
        )


class AnswerStage(_TextStage):
    """Answers to contrastive prompts."""

    def __init__(
        self,
        models: AlbumModels,
        ids: Sequence[str],
        images: Sequence[str],
        made_by: Mapping[str, Any] | None,
        said: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(models, ids, images, made_by)
        self.said = said

    def captions(self, batch: range) -> list[list[str]]:
        from hf_captionrl.apps.album.candidates import contrastive_answers

        part = slice(batch.start, batch.stop)
        images, options = self.models.source.images, self.models.options
        return contrastive_answers(self.models.captioner, images, self._rows[part], self.said[part], options)


# --- The parts of `captionrl album` that need models, on shards: in this process, in several, or on a Ray cluster ----
# Legend: S candidates of all images, G captions of an image, D features.

KINDS = ("images", "candidates", "answers")
"""Kinds of rows that [`ShardWork`] keeps."""
BATCHES_PER_SHARD = 4
"""The default. A killed command loses at most this many batches per process."""


class ShardWork:
    """An `AlbumWork` whose results are kept in shards. The result equals that of one process, row by row.

    Rows are named by the image and its content, so that an image that was replaced is read and captioned again.

    `progress` is called with the name of a stage and the number of images finished since the last call.
    """

    def __init__(
        self,
        models: AlbumModels,
        folder: Path,
        settings: Mapping[str, Any],
        progress: Callable[[str, int], Any] | None = None,
    ) -> None:
        options = models.options
        self.models, self.folder, self.settings, self.progress = models, folder, dict(settings), progress
        self.writes_captions = options.model is not None
        # Without --processes and --engine, the models of this process are used.
        number = options.processes or (1 if options.engine is None else None)
        self.engine = EngineOptions(engine=options.engine, processes=number, address=options.address)
        self.per_shard = rows_per_shard(options, BATCHES_PER_SHARD)
        self._texts: list[tuple[KeptRows, dict[int, str]]] = []
        self._keys: dict[int, str] = {}

    def facts(self) -> ImageFacts:
        scorer, source = self.models.scorer, self.models.source
        stamps = source.stamps(stage_progress(self.progress, "checking"))
        ids = [f"{name} {stamp}" for name, stamp in zip(source.image_ids, stamps, strict=True)]
        kept = KeptRows(self.folder, "images", {"images": self.settings["images"], "scorer": scorer.signature})

        def stage(asked: list[int]) -> ReadStage:
            names, images = [ids[row] for row in asked], [source.image_ids[row] for row in asked]
            return ReadStage(self.models, names, images, kept.made_by)

        kept.complete(ids, stage, self.engine, self.per_shard, stage_progress(self.progress, "reading"))
        facts = _facts(kept, {name: row for row, name in enumerate(ids)})
        cache = self._cache()
        if cache.missing(facts.keys):
            cache.put(facts.keys, facts.features)
        self._keys = dict(zip(facts.rows, facts.keys, strict=True))
        return facts

    def _cache(self) -> FeatureCache:
        return FeatureCache.for_scorer(self.models.scorer, self.models.options.cache_dir)

    def copy_threshold(self, facts: ImageFacts) -> float:
        return copy_threshold(self.models.source.images, facts, self.models.scorer, self._cache())

    def candidates(self, rows: Sequence[int], similar: Sequence[Sequence[int]] | None) -> list[list[str]]:
        images = [self.models.source.image_ids[row] for row in rows]
        ids = [f"{name} {self._keys[row]}" for name, row in zip(images, rows, strict=True)]
        kept = KeptRows(self.folder, "candidates", self.settings)

        def stage(asked: list[int]) -> CandidateStage:
            others = None if similar is None else [similar[at] for at in asked]
            names, mine = [ids[at] for at in asked], [images[at] for at in asked]
            return CandidateStage(self.models, names, mine, kept.made_by, others)

        kept.complete(ids, stage, self.engine, self.per_shard, stage_progress(self.progress, "captioning"))
        return self._captions(kept, rows, ids)

    def answers(self, rows: Sequence[int], said: Sequence[Sequence[str]]) -> list[list[str]]:
        images = [self.models.source.image_ids[row] for row in rows]
        # An answer is kept for its image and prompt: another prompt is asked again.
        keys = [self._keys[row] for row in rows]
        ids = [f"{name} {json_digest([key, *mine])}" for name, key, mine in zip(images, keys, said, strict=True)]
        kept = KeptRows(self.folder, "answers", self.settings)

        def stage(asked: list[int]) -> AnswerStage:
            names, mine = [ids[at] for at in asked], [images[at] for at in asked]
            return AnswerStage(self.models, names, mine, kept.made_by, [said[at] for at in asked])

        kept.complete(ids, stage, self.engine, self.per_shard, stage_progress(self.progress, "contrastive prompts"))
        return self._captions(kept, rows, ids)

    def _captions(self, kept: KeptRows, rows: Sequence[int], ids: Sequence[str]) -> list[list[str]]:
        self._texts.append((kept, dict(zip(rows, ids, strict=True))))
        texts: dict[str, list[str]] = {}
        for table in kept.tables(("id", "captions")):
            texts |= zip(table["id"].to_pylist(), table["captions"].to_pylist(), strict=True)
        return [texts[name] for name in ids]

    def text_features(self, rows: Sequence[int], candidates: Sequence[Sequence[str]]) -> KeptTexts:
        places = [[(kept, names[row]) for kept, names in self._texts] for row in rows]
        return KeptTexts(self.models.scorer, candidates, places)


class KeptTexts:
    """Features of candidates.

    They are read from the shards of a stage; those of edited and existing captions are computed.
    """

    def __init__(
        self,
        scorer: Scorer,
        candidates: Sequence[Sequence[str]],
        places: Sequence[Sequence[tuple[KeptRows, str]]],
    ) -> None:
        self.scorer, self.places = scorer, places
        self.captions = spoken([text for texts in candidates for text in texts])
        self._owner = np.arange(len(candidates)).repeat([len(texts) for texts in candidates])
        self._last: tuple[int, dict[str, np.ndarray]] = -1, {}

    def __getitem__(self, rows: Any) -> Tensor:
        wanted = np.asarray(rows)
        texts = [self.captions[row] for row in wanted.tolist()]
        found = [self._of(owner).get(text) for owner, text in zip(self._owner[wanted].tolist(), texts, strict=True)]
        missing = [at for at, features in enumerate(found) if features is None]
        if missing:
            new = self.scorer.text_features([texts[at] for at in missing]).float().cpu().numpy()
            for at, features in zip(missing, new, strict=True):
                found[at] = features
        return torch.from_numpy(np.stack(found))  # type: ignore[arg-type]

    def _of(self, owner: int) -> dict[str, np.ndarray]:
        """Kept features of the captions of an image."""
        if self._last[0] != owner:
            features: dict[str, np.ndarray] = {}
            for kept, name in self.places[owner]:
                table, row = kept.row(name)
                captions = table["captions"][row].as_py()
                if captions and table["scorer"][row].as_py() == self.scorer.signature:
                    numbers = table["features"][row].values.to_numpy().reshape(len(captions), -1)  # (G, D)
                    features |= zip(spoken(captions), numbers, strict=True)
            self._last = owner, features
        return self._last[1]


def _facts(kept: KeptRows, row_of: Mapping[str, int]) -> ImageFacts:
    """The facts of an album in its order; equal images get bit-equal features."""
    found: dict[int, tuple[str, bytes, np.ndarray]] = {}
    unreadable: dict[int, str] = {}
    for table in kept.tables(("id", "key", "picture", "features", "reason")):
        columns = (table[name].to_pylist() for name in ("id", "key", "picture", "reason"))
        for at, (name, key, picture, reason) in enumerate(zip(*columns, strict=True)):
            if name not in row_of:
                continue
            if reason is None:
                found[row_of[name]] = key, picture, table["features"][at].values.to_numpy()
            else:
                unreadable[row_of[name]] = reason
    if not found:
        return joined_facts([], unreadable)
    rows = sorted(found)
    first: dict[str, np.ndarray] = {}
    for row in rows:
        first.setdefault(found[row][0], found[row][2])
    keys = [found[row][0] for row in rows]
    pictures = np.stack([np.frombuffer(found[row][1], np.uint8) for row in rows])
    return ImageFacts(rows, keys, pictures, torch.from_numpy(np.stack([first[key] for key in keys])), unreadable)


# --- One run of `captionrl album`: its files, its locks, and resuming ------------------------------------------------


class _Reservation(LineFile):
    """Keeps other commands away from an output."""

    busy = "Wait until it ends, or use another --output without --sidecars."


class AlbumRun:
    """One run of the command and its files; a context manager that keeps other commands away from the outputs."""

    def __init__(self, options: AlbumOptions, source: AlbumSource, training_seconds: float | None) -> None:
        from hf_captionrl.apps.album.result import check_sidecars

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
        from hf_captionrl.apps.album.sources import sidecar_of

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
        from hf_captionrl.apps.album.album import AlbumEngine
        from hf_captionrl.cli.caption import check_settings
        from hf_captionrl.metrics.table import installed_versions
        from hf_captionrl.utils.io import write_json

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
        from hf_captionrl.apps.album.candidates import adapt_to_album
        from hf_captionrl.utils.io import write_json

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
        from hf_captionrl.apps.album.page import write_report
        from hf_captionrl.apps.album.result import write_metadata, write_sidecars

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


# --- `captionrl album --dry_run`: what would be written, and how long it would take ----------------------------------


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


# --- `captionrl album`: options, files and resuming ------------------------------------------------------------------

_SUFFIXES = (".csv", ".jsonl", ".html")


def describe(options: AlbumOptions) -> None:
    """Run the command."""
    seconds = None if options.adapt is None else duration(options.adapt)
    _check(options)

    from hf_captionrl.apps.album.result import summary_text
    from hf_captionrl.apps.album.sources import read_captions_for

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
    from hf_captionrl.apps.album.candidates import load_language_identifier
    from hf_captionrl.cli.features import rows_per_shard

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
