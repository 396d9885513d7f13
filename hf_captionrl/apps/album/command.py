"""`captionrl album`: its models, the parts that resume it, its files, and the estimate of its time.

The work of the models is kept in parts beside the first output, NAME:

    NAME.shards/images-1b2c.../       hashes, small pictures and features of images, or why they cannot be read
    NAME.shards/candidates-3d4e.../   captions; so are the answers to contrastive prompts

A folder contains the parts of the images that no finished folder had when it was created; its name is a digest of their names.
The same command therefore finds its unfinished folder again. If images are added, only these are written to a new folder.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import posixpath
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tqdm

from hf_captionrl.apps.album.album import STAGES, Album, AlbumSteps, AlbumWork, describe_album, first_text
from hf_captionrl.apps.album.candidates import MOST_MEASURED, adapt_to_album, check_captioner
from hf_captionrl.apps.album.options import AlbumOptions, CandidateOptions, check_words, duration
from hf_captionrl.apps.album.page import write_report
from hf_captionrl.apps.album.phrases import load_language_identifier
from hf_captionrl.apps.album.sources import (
    AlbumSource,
    load_album_source,
    opened_chunks,
    read_captions_for,
    read_images,
    read_regular,
    sidecar_captions,
    sidecar_of,
)
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.language_models import EndpointCaptioner, check_address, cost_sentence, default_device
from hf_captionrl.captioners.pipeline import ChosenImages
from hf_captionrl.captioners.prompts import ImagePrompts
from hf_captionrl.cli.features import rows_per_shard
from hf_captionrl.data.images import decorative_rows
from hf_captionrl.retrieval import FeatureCache, Scorer, load_scorer, model_fingerprint
from hf_captionrl.utils.io import (
    LineFile,
    atomic_write_bytes,
    installed_versions,
    json_digest,
    to_plain,
    write_json,
    write_jsonl,
)
from hf_captionrl.utils.model_files import PREFIX, model_path
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


def run(options: AlbumOptions) -> None:
    check_options(options)
    source = load_source(options, sidecars=options.sidecar_captions and options.captions is None)
    if options.captions is not None:
        source.captions = read_captions_for(source, options.captions)
    if options.model is None and not any(source.captions):
        raise ValueError(
            f"{options.images} has no captions, and there is no captioner. Use --model to write captions, or --captions to "
            "diagnose those of a file."
        )
    files = AlbumFiles(options, source)
    if options.dry_run:
        files.check()
        facts = dry_run(options, source)
        done = f", of which an earlier run has finished {facts['finished']:,}," if facts["finished"] else ""
        shared = f" with {facts['processes']} processes" if facts["processes"] > 1 else ""
        text = f"Would write {', '.join(facts['outputs'])} for {facts['images']:,} images{done} in about "
        text += f"{facts['seconds']:,.0f} s{shared}. Nothing was written."
        print(json.dumps(facts) if options.json else text)
        return
    with files.reserved():
        files.check()
        if options.captions is None:
            files.restore_captions()
        start = time.monotonic()
        with Progress(len(source.images)) as progress:
            album, facts = describe_source(options, source, progress)
            summary = {**album.summary(), **files.write(album, progress)}
    summary |= {"seconds": round(time.monotonic() - start, 1), **facts}
    summary["unreadable_images"] = [i.image_id for i in album.images if i.unreadable is not None][:20]
    print(json.dumps(summary) if options.json else summary_text(summary, album))


def check_options(options: AlbumOptions) -> None:
    """Refuse outputs and settings that cannot work, before anything slow."""
    check_words(options)
    if options.adapt is not None:
        duration(options.adapt)
        names = scorer_names(options)
        if len({os.path.realpath(place) if os.path.exists(place) else place for place in map(model_path, names)}) == 1:
            raise ValueError(
                f"--adapt has {names[0]!r} as --scorer and {names[1]!r} as --held_out_scorer. One scorer cannot reward captions "
                "and decide about them: it would approve of captions that only exploit it. Use another --held_out_scorer."
            )
    options.check_wording()
    options.check_endpoint(
        "revision dtype num_beams rationality min_new_tokens adapt engine processes address dry_run"
    )
    if options.endpoint is not None:
        check_address(options.endpoint)
        if options.model is None:
            raise ValueError("--endpoint needs the name of the model there. Use --model.")
        if options.decoding == "rsa" or (options.num_samples == 0 and options.choice != "first"):
            raise ValueError(
                f"--endpoint has no beams, and with --decoding {options.decoding} and --num_samples {options.num_samples} nothing could "
                "be chosen. Use --decoding beam and --num_samples 7, for example, or --choice first."
            )
    if options.scorer == "none" and options.model:
        raise ValueError("--scorer none collects existing captions. Leave out --model, or --scorer.")
    if options.language not in ("auto", "any"):
        load_language_identifier(options.language)
    options.check_engine()
    if options.rows_per_shard is not None:
        rows_per_shard(options)
    if launched()[1] > 1:
        raise ValueError(
            f"{launched()[1]} processes were launched, and each would choose all captions. Use --processes or --engine ray instead "
            "of `accelerate launch`."
        )
    if options.captions_per_image > 1 and options.prefer_existing and options.model is not None:
        raise ValueError(
            f"--captions_per_image {options.captions_per_image} is for captions that are chosen, and --prefer_existing keeps one as it is. "
            "Use one of them."
        )
    for path in options.output:
        if path.suffix.lower() not in (".csv", ".jsonl", ".html") or path.is_dir():
            raise ValueError(f"--output {str(path)!r} must be a file that ends in .csv, .jsonl or .html.")
    if len(set(options.output)) < len(options.output):
        raise ValueError(
            f"--output names a file twice: {[str(path) for path in options.output]}. Use different files."
        )
    if options.model is None and options.adapt is not None:
        raise ValueError("--adapt finetunes a captioner, and there is none. Use --model.")


class Progress(contextlib.ExitStack):
    """A progress bar per step, on a terminal; a context manager."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total, self.stage = total, ""

    def __call__(self, stage: str, number: int) -> None:
        if stage != self.stage:
            self.close()
            bar = tqdm.tqdm(total=self.total, desc=stage, unit=" images", disable=None)
            self.stage, self.bar = stage, self.enter_context(bar)
        self.bar.update(number)


# --- Images and models of the options --------------------------------------------------------------------------------


def load_source(options: AlbumOptions, *, sidecars: bool) -> AlbumSource:
    """The images of the options."""
    # Metadata that an earlier run wrote lack images without a caption and images that were added since.
    metadata = Path(options.images) / "metadata.jsonl"
    is_own = bool(options.output) and metadata.is_file() and OwnFiles(options.output[0]).is_ours(metadata)
    settings = {name: getattr(options, name) for name in ("split", "image_root") if getattr(options, name)}
    source = load_album_source(
        options.images,
        sidecars=sidecars,
        ignore_metadata=is_own,
        extension=options.caption_extension,
        by_line=options.captions_per_image > 1,
        **settings,
    )
    return source if options.max_images is None else source.first(options.max_images)


def load_model(options: AlbumOptions, adapter: Path | None = None) -> Any:
    """The captioner of the options, with the adapter of an earlier run or without one."""
    if options.endpoint is not None:
        return EndpointCaptioner.from_options(options, options.output[0], 0.0, samples=options.temperature)
    settings: dict[str, Any] = {"prompt": options.prompt, "device": default_device(options.device)}
    dtype = getattr(torch, options.dtype)
    base = load_captioner(model_path(str(options.model)), revision=options.revision, dtype=dtype, **settings)
    return base if adapter is None else load_captioner(str(adapter), base_model=base, **settings)


def scorer_names(options: AlbumOptions) -> tuple[str, str]:
    """The scorer that compares captions and images, and the one that decides about --adapt."""
    if (options.model or (PREFIX if options.images == "scenes" else "")).startswith(PREFIX):
        held_out = "scenes:siglip-held-out"
        scorer = held_out if options.adapt is None else "scenes:clip-reward"
    else:
        scorer, held_out = "openai/clip-vit-base-patch32", "google/siglip-base-patch16-224"
    return options.scorer or scorer, options.held_out_scorer or held_out


class KeptWork(AlbumWork):
    """The work of the models of the options, kept in parts: by this process, by several, or on a Ray cluster.

    Rows are named by the image and its content, so that an image that was replaced is read and captioned again. Other processes
    get the options, and load images and models again.
    """

    def __init__(
        self,
        options: AlbumOptions,
        source: AlbumSource | None = None,
        adapter: Path | None = None,
        progress: Callable[[str, int], Any] | None = None,
    ) -> None:
        self.options = self.settings = options
        self.adapter, self.progress, self.skip_unreadable = adapter, progress, True
        self.folder = options.output[0].with_suffix(".shards")
        self._keys: dict[int, str] = {}  # hashes of the pixels, by row
        if source is not None:
            self.source = source

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.options, None, self.adapter)

    images = property(lambda self: self.source.images)  # type: ignore[assignment]
    image_ids = property(lambda self: self.source.image_ids)  # type: ignore[assignment]
    writes_captions = property(lambda self: self.options.model is not None)  # type: ignore[assignment]

    @property
    def compares_images(self) -> bool:
        # To write the texts of a person into files takes no model.
        options = self.options
        compares = options.scorer is not None or options.model is not None or not options.sidecars
        return compares and options.scorer != "none"

    @cached_property
    def source(self) -> AlbumSource:
        return load_source(self.options, sidecars=False)

    @cached_property
    def captioner(self) -> Any:  # type: ignore[override]
        return load_model(self.options, self.adapter)

    @cached_property
    def prompts(self) -> ImagePrompts:  # type: ignore[override]
        wording = {"do_not_mention": self.options.do_not_mention, "max_context": self.options.max_context}
        return ImagePrompts.read(self.options.prompts, self.image_ids, **wording)

    @cached_property
    def decorative(self) -> dict[int, str]:  # type: ignore[override]
        return decorative_rows(self.image_ids, self.images, self.options.decorative, self.options.decorative_size)

    def close(self) -> None:
        """Close the answers of an endpoint."""
        if self.options.endpoint is not None and "captioner" in vars(self):
            self.captioner.close()

    @cached_property
    def scorer(self) -> Scorer:  # type: ignore[override]
        return load_scorer(scorer_names(self.options)[0], device=default_device(self.options.device))

    @cached_property
    def cache(self) -> FeatureCache:  # type: ignore[override]
        return FeatureCache.for_scorer(self.scorer, self.options.cache_dir)

    def kept_settings(self, step: str) -> dict[str, Any]:
        """Settings that affect the parts. Settings of the choice may change without a new generation."""
        options = self.options
        images = os.path.realpath(options.images) if os.path.exists(options.images) else options.images
        if step == "images":
            return {"images": images, "scorer": self.scorer.signature}
        new = ("do_not_mention", "min_new_tokens", "endpoint")  # of which a run without them has no record
        names = [f.name for f in dataclasses.fields(CandidateOptions) if f.name not in ("contrastive", *new)]
        settings = {
            "images": images,
            "adapter": self.adapter and content_digest((self.adapter / "adapter_model.safetensors").read_bytes()),
            **{name: getattr(options, name) for name in ("model", "revision", "prompt", "dtype", *names)},
        }
        settings |= {name: value for name in new if (value := getattr(options, name))}
        if options.prompts is not None and self.prompts.rows:
            settings |= {"prompts": content_digest(options.prompts.read_bytes()), "max_context": options.max_context}
        return to_plain(settings)  # type: ignore[no-any-return]

    def kept_folders(self, step: str) -> list[tuple[Path, bool]]:
        """Folders of parts that were made with these settings, and whether all their parts exist."""
        settings = self.kept_settings(step)
        found = []
        for path in sorted(self.folder.glob(f"{step}-*/{MANIFEST}")):
            manifest = read_manifest(path.parent)
            if settings.items() <= manifest["settings"].items():
                shards = manifest.get("shards", ())
                is_finished = bool(shards) and all((path.parent / shard["file"]).is_file() for shard in shards)
                found.append((path.parent, is_finished))
        return found

    def image_names(self) -> list[str]:
        """Names of the images as they are now, with size and time of a file or the hash of its bytes."""
        stamps = self.source.stamps(lambda number: self.report("checking", number))
        return [f"{name} {stamp}" for name, stamp in zip(self.image_ids, stamps, strict=True)]

    def compute(self, step: str, rows: Sequence[int], extra: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """The results of a step; only those that no earlier run has kept are computed."""
        if step == "images":
            present = self.image_names()
            names = [present[row] for row in rows]
        else:
            # An answer is kept for its image and prompt: another prompt is asked again.
            keys = [self._keys[row] for row in rows]
            if step == "answers" and extra is not None:
                keys = [json_digest([key, *said]) for key, said in zip(keys, extra, strict=True)]
            names = [f"{self.image_ids[row]} {key}" for row, key in zip(rows, keys, strict=True)]
        finished = [folder for folder, is_finished in self.kept_folders(step) if is_finished]
        wanted = set(names)
        found: dict[str, dict[str, Any]] = {}
        for folder in finished:
            found |= {name: one for name, one in kept_rows(folder) if name in wanted}
        missing = [at for at, name in enumerate(names) if name not in found]
        self.report(step, len(rows) - len(missing))
        stage = AlbumStage(
            self,
            step,
            [names[at] for at in missing],
            [self.image_ids[rows[at]] for at in missing],
            None if extra is None else [extra[at] for at in missing],
            read_manifest(finished[-1])["made_by"] if finished else None,
        )
        options = self.options
        # Without --processes and --engine, the models of this process are used.
        number = options.processes or (1 if options.engine is None else None)
        if missing:
            settings = self.kept_settings(step)
            folder = self.folder / f"{step}-{json_digest([settings, stage.names])}"
            per_shard = options.rows_per_shard or BATCHES_PER_SHARD * options.batch_size
            parts = ShardFolder(folder, settings, num_rows=len(missing), rows_per_shard=per_shard)
            engine = EngineOptions(engine=options.engine, processes=number, address=options.address)
            run_stage(stage, parts, engine, progress=lambda count: self.report(step, count))
            found |= kept_rows(folder)
        elif number == 1:
            stage.load()  # other models are refused, too, if there is nothing to compute
        if step == "images":
            self._keys = {
                row: found[name]["key"] for row, name in zip(rows, names, strict=True) if "key" in found[name]
            }
        return [found[name] for name in names]


BATCHES_PER_SHARD = 4
"""The default. A killed command loses at most this many batches per process."""


def kept_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and values of the rows of a finished folder of parts."""
    for table in read_tables(folder):
        for cells in zip(*table.columns, strict=True):
            one = {
                name: cell.values.to_numpy() if name == "features" else cell.as_py()
                for name, cell in zip(table.column_names, cells, strict=True)
                if cell.is_valid
            }
            if "picture" in one:
                one["picture"] = np.frombuffer(one["picture"], np.uint8)
            yield one.pop("id"), one


@dataclasses.dataclass
class AlbumStage(Stage):
    """A step for some images of an album, in one of the processes. Rows that other models made in an earlier run are refused."""

    work: KeptWork
    step: str
    names: list[str]  # of the rows
    images: list[str]  # ids of their images
    extra: list[Any] | None
    expected: dict[str, Any] | None  # `made_by` of the earlier run

    def load(self) -> None:
        row_of = {image_id: row for row, image_id in enumerate(self.work.image_ids)}
        missing = [image_id for image_id in self.images if image_id not in row_of]
        if missing:
            raise ValueError(
                f"{self.work.options.images!r} has other images in this process than in the one that started it: "
                f"{missing[0]!r} is missing. Use a path that all machines share, and leave the images unchanged."
            )
        self.rows = [row_of[image_id] for image_id in self.images]
        if self.expected is not None:
            refuse_other_settings(self.expected, to_plain(self.made_by()))

    def made_by(self) -> dict[str, Any]:
        if self.step == "images":
            return {"scorer": self.work.scorer.signature}
        captioner = self.work.captioner
        if self.work.options.endpoint is not None:
            return {"weights": captioner.backend.revision, "prompt": captioner.prompt}
        return {"weights": model_fingerprint(captioner.base_model), "prompt": captioner.prompt}

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        if self.step != "images":
            scores = {} if self.work.options.endpoint is None else {"scores": pa.list_(pa.float64())}
            return pa.schema({"id": pa.string(), "captions": pa.list_(pa.string()), **scores})
        columns = {"id": pa.string(), "key": pa.string(), "picture": pa.binary(), "features": pa.list_(pa.float32())}
        return pa.schema({**columns, "reason": pa.string()})

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        part = slice(rows.start, rows.stop)
        extra = None if self.extra is None else self.extra[part]
        # `run_stage` reports finished parts.
        self.work.progress, progress = None, self.work.progress
        found = AlbumWork.compute(self.work, self.step, self.rows[part], extra)
        self.work.progress = progress
        for one in found:
            if "picture" in one:
                one["picture"] = one["picture"].tobytes()
        return [{"id": name, **one} for name, one in zip(self.names[part], found, strict=True)]


# --- One run: adapter, settings, album -------------------------------------------------------------------------------


def describe_source(
    options: AlbumOptions, source: AlbumSource, progress: Callable[[str, int], Any] | None = None
) -> tuple[Album, dict[str, Any]]:
    """The album of the options, and facts for the summary."""
    work = KeptWork(options, source, progress=progress)
    facts: dict[str, Any] = {}
    if options.adapt is not None:
        facts["adapt"] = adapt(options, source, work.scorer)
        work.adapter = adapter_folder(options).absolute() if facts["adapt"]["kept"] else None
    if options.model is not None:  # else the work of a model stays as it is
        settings = work.kept_settings("candidates")
        for step in STAGES if options.overwrite else ("candidates",):
            for manifest in work.folder.glob(f"{step}-*/{MANIFEST}"):
                if options.overwrite:
                    shutil.rmtree(manifest.parent)
                else:
                    before = read_manifest(manifest.parent)["settings"]
                    size = {name: before.get(name) for name in ("num_rows", "rows_per_shard")}
                    refuse_other_settings(before, settings | size)
        if options.engine is None and (options.processes or 1) == 1:  # refused before the images are read
            check_captioner(work.captioner, work.prompts, options)
    groups = [""] * len(source.image_ids)
    if options.group_by == "folder" and source.root is not None:
        groups = [posixpath.dirname(image_id) for image_id in source.image_ids]
    with contextlib.closing(work):
        album = AlbumSteps(work, source.captions, groups).album(options.model is None)
        if options.endpoint is not None:
            facts["endpoint"] = work.captioner.summary()
    if options.model is not None:
        record = options.output[0].with_suffix(".run.json")
        write_json(record, {"settings": settings, "versions": installed_versions()})
    return album, facts


def adapter_folder(options: AlbumOptions) -> Path:
    """Folder of the adapter, its checkpoints and the decision about it."""
    return options.output[0].with_suffix(".adapter")


def adapt(options: AlbumOptions, source: AlbumSource, scorer: Scorer) -> dict[str, Any]:
    """Train an adapter in this process, or use that of an earlier run of the same command; return the decision."""
    folder, seconds = adapter_folder(options), duration(options.adapt or "")
    names = "images split image_root max_images model revision prompt dtype scorer held_out_scorer seed".split()
    asked = to_plain({"seconds": seconds, **{name: getattr(options, name) for name in names}})
    if earlier := decision_of(options):
        remedy = f"{folder} has an adapter of that command. Use --overwrite to train again, or another --output."
        refuse_other_settings(earlier.get("asked", {}), asked, remedy)
        if "kept" in earlier:
            return earlier
    elif options.overwrite:
        remove_checkpoints(folder)
    write_json(folder / "decision.json", {"asked": asked})
    facts = adapt_to_album(
        load_model(options),
        scorer,
        load_scorer(scorer_names(options)[1], device=default_device(options.device)),
        source.images,
        folder,
        seconds=seconds,
        cache_dir=options.cache_dir,
        seed=options.seed,
    )
    write_json(folder / "decision.json", facts | {"asked": asked})
    remove_checkpoints(folder)
    return facts


def remove_checkpoints(folder: Path) -> None:
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def decision_of(options: AlbumOptions) -> dict[str, Any]:
    """What an earlier run asked and, if its training ended, decided about its adapter; empty without one."""
    decision = adapter_folder(options) / "decision.json"
    if options.overwrite or not decision.is_file():
        return {}
    return json.loads(decision.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


# --- Files: written atomically, and never over a file of somebody else -----------------------------------------------


def content_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


Entry = str | dict[str, str]
"""The digest of a file, or its digest and the text of the person behind it."""


class OwnFiles:
    """The record beside the first output of what this command has written.

    `NAME.files.json` has the digest of each file that was written; that of a person's text, which a run without --model or with
    --prefer_existing has written, stands beside the text itself: `{"digest": ..., "text": ...}`. A file with another content was
    not written by this command: it is replaced only after its content has been appended to `NAME.old.jsonl`. The records of
    other outputs in the same folder count, too.
    """

    def __init__(self, first: Path) -> None:
        self.folder = os.path.abspath(first.parent)
        self.record, self.old = first.with_suffix(".files.json"), first.with_suffix(".old.jsonl")
        # By name; two entries if a run was killed while it replaced the file.
        self._written: dict[str, list[Entry]] = {}
        self._others: list[dict[str, list[Entry]]] = []
        for path in sorted({self.record, *Path(self.folder).glob("*.files.json")}):
            if path.is_file():
                with contextlib.suppress(ValueError, AttributeError):  # a file of somebody else
                    entries = json.loads(path.read_text(encoding="utf-8")).items()
                    found = {name: entry if isinstance(entry, list) else [entry] for name, entry in entries}
                    if os.path.abspath(path) == os.path.abspath(self.record):
                        self._written = found
                    else:
                        self._others.append(found)

    def name_of(self, path: Path) -> str:
        """A file's name in the record, relative to the first output."""
        return Path(os.path.relpath(os.path.abspath(path), self.folder)).as_posix()

    def entry(self, path: Path) -> Entry | None:
        """What the records say of a file as it is; None if this command did not write it."""
        content, name = read_regular(path), self.name_of(path)
        if content is None:
            return None
        entries = (entry for record in (self._written, *self._others) for entry in record.get(name, ()))
        digest = content_digest(content)
        return next((e for e in entries if (e["digest"] if isinstance(e, dict) else e) == digest), None)

    def is_ours(self, path: Path) -> bool:
        """Whether this command wrote the file as it is."""
        return self.entry(path) is not None

    def write(self, contents: dict[Path, bytes], persons: dict[Path, str] | None = None) -> None:
        """Write files that have not their content yet, and record them; `persons` are texts of persons behind some contents.

        Old contents that this command did not write, and texts of persons, are kept in `NAME.old.jsonl`.
        """
        persons = persons or {}
        lines, new = _whole_lines(self.old), dict(self._written)
        contents = {path: content for path, content in contents.items() if read_regular(path) != content}
        for path, content in contents.items():
            entry, before, name = self.entry(path), read_regular(path), self.name_of(path)
            if before is not None and (entry is None or (isinstance(entry, dict) and path not in persons)):
                try:
                    kept = {"text": before.decode("utf-8")}
                except UnicodeDecodeError:
                    kept = {"base64": base64.b64encode(before).decode()}
                lines.append(json.dumps({"file": name, **kept}, ensure_ascii=False).encode())
            digest = content_digest(content)
            new[name] = [{"digest": digest, "text": persons[path]}] if path in persons else [digest]
        if lines:
            atomic_write_bytes(self.old, b"\n".join([*lines, b""]))
        # If the command is killed now, each file has its old content or its new one.
        write_json(self.record, {name: [*entries, *self._written.get(name, ())] for name, entries in new.items()})
        for path, content in contents.items():
            atomic_write_bytes(path, content)
        self._written = new
        write_json(self.record, new)

    def old_texts(self) -> dict[str, str]:
        """The earliest text of each replaced file, by `name_of`; also of files that other outputs of the folder replaced."""
        found: dict[str, str] = {}
        for path in [*sorted(Path(self.folder).glob("*.old.jsonl")), self.old]:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a file of somebody else
                entries = map(json.loads, reversed(_whole_lines(path)))
                found |= {entry["file"]: entry.get("text", "") for entry in entries}
        return found


def _whole_lines(path: Path) -> list[bytes]:
    # Only a line feed ends a line: texts may contain other separators.
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


class _Reservation(LineFile):
    busy = "Wait until it ends, or use another --output without --sidecars."


class AlbumFiles:
    """The outputs of one run."""

    def __init__(self, options: AlbumOptions, source: AlbumSource) -> None:
        self.options, self.source, self.own = options, source, OwnFiles(options.output[0])
        if options.sidecars:
            sidecar_paths(source, options.caption_extension)
        if None in source.paths and any(path.name == "metadata.jsonl" for path in options.output):
            raise ValueError(
                f"--output metadata.jsonl names files, and {options.images!r} has images that are none. Use another name."
            )

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Reserve every output by `NAME.lock`, and the files beside the images by a lock in their folder."""
        paths = [Path(path) for path in {os.path.abspath(p.with_suffix(".lock")): None for p in self.options.output}]
        if self.options.sidecars:
            folder = os.path.commonpath([os.path.abspath(Path(path).parent) for path in self.source.paths if path])
            paths.append(Path(folder, ".captionrl.lock"))

        def remove(lock: Path) -> None:
            if lock.is_file() and lock.stat().st_size == 0:
                lock.unlink()

        with contextlib.ExitStack() as stack:
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(_Reservation(Path(os.path.relpath(path))))
                stack.callback(remove, lock.path)
            yield

    def check(self) -> None:
        """Refuse to replace outputs that this command did not write."""
        foreign = [path for path in self.options.output if os.path.lexists(path) and not self.own.is_ours(path)]
        if foreign and not self.options.overwrite:
            raise ValueError(
                f"{len(foreign)} files exist that this command did not write, such as {str(foreign[0])!r}. Use --overwrite to "
                f"replace them (their contents are kept in {self.own.old.name}), or another --output."
            )

    def restore_captions(self) -> None:
        """Replace captions that this command wrote by the texts of persons behind them; without --model, those of captioners stay."""
        captions, old = self.source.captions, self.own.old_texts()
        by_line = self.options.captions_per_image > 1
        for row, image in enumerate(self.source.paths):
            if image is None:
                continue
            sidecar = sidecar_of(image, self.options.caption_extension)
            entry = self.own.entry(sidecar)
            if entry is None or captions[row] != sidecar_captions(sidecar, by_line=by_line):
                continue
            if isinstance(entry, dict):
                captions[row] = entry["text"].splitlines() if by_line else [entry["text"]]
            elif self.options.model is not None:
                before = old.get(self.own.name_of(sidecar), "").strip()
                captions[row] = (before.splitlines() if by_line else [before]) if before else []

    def write(self, album: Album, progress: Callable[[str, int], Any]) -> dict[str, Any]:
        """Write the outputs, each atomically; returns their names, and the text files that were kept."""
        options, source = self.options, self.source
        contents: dict[Path, bytes] = {}
        with tempfile.TemporaryDirectory(prefix="captionrl-album-") as folder:
            for number, path in enumerate(options.output):
                made = Path(folder, f"{number}{path.suffix}")
                if path.name == "metadata.jsonl":
                    write_jsonl(made, self._metadata(album, path))
                elif path.suffix.lower() == ".html":
                    write_report(
                        made,
                        album,
                        source.images,
                        title=Path(options.images).name or "Album",
                        max_images=options.page_images,
                        progress=lambda number: progress("writing the page", number),
                    )
                else:
                    (album.to_csv if path.suffix.lower() == ".csv" else album.to_jsonl)(made)
                contents[path] = made.read_bytes()
        written = [str(path) for path in options.output]
        persons: dict[Path, str] = {}
        kept: list[str] = []
        number = 0
        for row, (file, image) in enumerate(zip(source.paths if options.sidecars else (), album.images, strict=False)):
            target = sidecar_of(str(file), options.caption_extension)
            lines = [image, *image.further][: options.captions_per_image]
            content = "".join(f"{one.caption}\n" for one in lines if one.caption).encode()
            is_given = first_text(source.captions[row]) is not None
            is_cleared = bool(source.captions[row]) and not is_given and target.is_file()
            if not content and not is_cleared:
                continue
            if is_cleared or (is_given and (options.model is None or options.prefer_existing)):
                persons[target] = "\n".join(one.old or "" for one in lines)
            if read_regular(target) == content or self._may_write(target, persons):
                contents[target] = content
                number += 1
            else:
                kept.append(str(target))
        written += [f"{number} text files"] * options.sidecars
        self.own.write(contents, persons)
        return {"outputs": written, "kept_text_files": kept}

    def _may_write(self, target: Path, persons: dict[Path, str]) -> bool:
        """Whether a file beside an image is missing, or is a regular file that may be replaced."""
        entry = self.own.entry(target)
        is_ours = isinstance(entry, str) or (entry is not None and target in persons)
        text = read_regular(target)
        is_replaced = text is not None and (is_ours or self.options.overwrite or not text.strip())
        return is_replaced or not os.path.lexists(target)

    def _metadata(self, album: Album, path: Path) -> Iterator[dict[str, str]]:
        """Rows of the metadata of an image folder: `file_name`, relative to the file, and `text`."""
        for image, file in zip(album.images, self.source.paths, strict=True):
            if image.caption:
                name = os.path.relpath(os.path.abspath(str(file)), os.path.abspath(path.parent))
                yield {"file_name": Path(name).as_posix(), "text": image.caption}


def sidecar_paths(source: AlbumSource, extension: str = ".txt") -> list[Path]:
    """The text file beside each image; refuses images that are not files or would share a text file."""
    owner: dict[Path, str] = {}
    for image_id, file in zip(source.image_ids, source.paths, strict=True):
        if file is None:
            raise ValueError(f"Image {image_id!r} is not a file, so no text file can stand beside it. Use --output.")
        if (other := owner.setdefault(target := sidecar_of(file, extension), image_id)) != image_id:
            raise ValueError(
                f"{other!r} and {image_id!r} would have the same text file, {str(target)!r}. Rename one of them."
            )
    return list(owner)


def summary_text(summary: dict[str, Any], album: Album) -> str:
    """The summary as sentences."""
    ranked = "Use --scorer to compare them with the images."
    if album.compares_images:
        ranked = f"{summary['rank_1']:.1%} rank their image first among {album.num_compared:,}; copies are left out."
    lines = [
        f"{', '.join(summary['outputs'])}: captions of {summary['captions']:,} of {summary['images']:,} images in "
        f"{summary['seconds']:,.0f} s.",
        f"Of {summary['texts']:,} captions, {summary['distinct']:.1%} are distinct{', and' if album.compares_images else '.'} {ranked}",
    ]
    cosine = f"(cosine of at least {album.copy_threshold:.3f})"
    copies = f"{summary['copies']:,} images are copies {cosine} and share captions."
    if album.compares_images:
        lines.append(copies if summary["copies"] else f"No images are copies {cosine}.")
    if summary["problems"]:
        problems = ", ".join(f"{number:,} {name}" for name, number in summary["problems"].items())
        lines.append(f"Problems: {problems}.")
    for fact in album.shared:
        if fact.shared:
            name = f" in {fact.group!r}" if fact.group else ""
            varying = ", ".join(word for word, _ in fact.varying[:8])
            lines.append(f"Shared{name}: {', '.join(fact.shared)}. Varying: {varying}.")
    if summary.get("texts_possible_more") or summary.get("rank_1_possible_more"):
        lines.append(
            f"A better choice could give at most {summary['texts_possible_more']:,} more images a distinct text and "
            f"{summary['rank_1_possible_more']:,} more rank 1. Use a larger --max_component to search longer."
        )
    if kept := summary.get("kept_text_files"):
        lines.append(
            f"{len(kept):,} files have other texts that this command did not write, and are kept: {', '.join(kept[:10])}"
            f"{', ...' if len(kept) > 10 else ''}. Use --prefer_existing without --captions to use their captions, or --overwrite to "
            "replace them."
        )
    if summary["unreadable_images"]:
        lines.append(f"{summary['unreadable']:,} images cannot be read, such as {summary['unreadable_images'][0]!r}.")
    if summary["decorative"]:
        lines.append(
            f"{summary['decorative']:,} images are decorative by the rules of the command and have the empty caption."
        )
    if "adapt" in summary:
        lines.append(summary["adapt"]["sentence"])
    if "endpoint" in summary:
        lines.append(cost_sentence(summary["endpoint"]))
    return "\n".join(lines)


# --- --dry_run -------------------------------------------------------------------------------------------------------


def dry_run(options: AlbumOptions, source: AlbumSource) -> dict[str, Any]:
    """Caption the first readable images, and estimate the time for those that no earlier run has finished; writes nothing."""
    work, number = KeptWork(options, source), len(source.images)
    earlier = {"kept": False} if options.adapt is None else decision_of(options)
    to_train = "kept" not in earlier
    if earlier.get("kept"):
        work.adapter = adapter_folder(options).absolute()
    is_new = options.overwrite or not work.compares_images
    unread, undescribed = (number, number) if is_new else _unfinished(work, to_train)
    if options.prefer_existing:
        undescribed = min(undescribed, sum(first_text(texts) is None for texts in source.captions))
    seconds = 0.0
    if work.compares_images and (unread or undescribed or to_train):
        reading, describing = seconds_per_image(work)  # the adapter does not change how long captioning takes
        seconds = (reading * unread + describing * undescribed) / (options.processes or 1)
        if to_train:  # captions before and after the training decide about the adapter
            seconds += duration(options.adapt or "") + 2 * describing * min(MOST_MEASURED, number)
    return {
        "images": number,
        "finished": number - max(unread, undescribed),
        "outputs": [str(path) for path in options.output] + (["a text file per image"] if options.sidecars else []),
        "processes": options.processes or 1,
        "seconds": round(seconds, 1),
        "dry_run": True,
    }


def _unfinished(work: KeptWork, to_train: bool) -> tuple[int, int]:
    """Numbers of images that must be read, and captioned or compared."""
    read: dict[str, tuple[str | None, int]] = {}  # hash of the pixels, and time of writing
    for folder, _ in work.kept_folders("images"):
        for file in folder.glob("part-*.parquet"):
            written = file.stat().st_mtime_ns
            read |= {row["id"]: (row["key"], written) for row in read_shard(file, ["id", "key"]).to_pylist()}
    names = work.image_names()
    unread = sum(name not in read for name in names)
    if not work.writes_captions or to_train:
        return unread, len(names)
    pixels: set[str] = set()
    ended = 0
    for folder, is_finished in work.kept_folders("candidates"):
        for file in folder.glob("part-*.parquet"):
            pixels |= {name.rpartition(" ")[2] for name in read_shard(file, ["id"])["id"].to_pylist()}
        if is_finished:
            ended = max(ended, (folder / MANIFEST).stat().st_mtime_ns)
    # Copies are captioned once. All images that were read before a step of captions ended are captioned, or are copies.
    done = sum(key is None or key in pixels or time <= ended for key, time in (read[n] for n in names if n in read))
    return unread, len(names) - done


def seconds_per_image(work: KeptWork) -> tuple[float, float]:
    """Seconds for reading an image, and for captioning and comparing it, measured on the first readable images."""
    options, source = work.options, work.source
    chunks = opened_chunks(source.images, range(len(source.images)), options.batch_size, {})
    rows = list(islice((row for chunk, _ in chunks for row in chunk), options.batch_size))
    images = ChosenImages(source.images, rows)
    captions = [[] if options.prefer_existing else source.captions[row] for row in rows]
    captioner, scorer = work.captioner if work.writes_captions else None, work.scorer
    start = time.monotonic()
    read_images(images, scorer, batch_size=options.batch_size)
    reading = (time.monotonic() - start) / len(rows)
    start = time.monotonic()
    if captioner is not None or any(captions):
        describe_album(images, captioner, scorer, captions=captions, settings=options)
    return reading, max((time.monotonic() - start) / len(rows) - reading, 0.0)
