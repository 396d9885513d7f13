"""`captionrl album`: its models, the candidates that resume it, and its files.

Beside the first output, NAME.candidates.jsonl keeps the candidates of every batch. `.captionrl.json` in the folder of the images says
which text files beside them this command wrote, so that texts of a person are told from its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import posixpath
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_captionrl.apps.album.album import Album, describe_album, generate_candidates
from hf_captionrl.apps.album.options import AlbumOptions, CandidateOptions, check_words
from hf_captionrl.apps.album.sources import (
    AlbumSource,
    load_album_source,
    read_captions_for,
    read_regular,
    sidecar_captions,
)
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.language_model_clients import (
    EndpointCaptioner,
    check_address,
    cost_sentence,
    default_device,
)
from hf_captionrl.evaluation.caption_files import table_rows
from hf_captionrl.retrieval import FeatureCache, load_scorer, model_fingerprint
from hf_captionrl.utils.io import (
    LineFile,
    atomic_write_bytes,
    counted,
    installed_versions,
    json_digest,
    to_plain,
    write_json,
)
from hf_captionrl.utils.model_files import PREFIX, model_path


def run(options: AlbumOptions) -> None:
    check_options(options)
    settings = {name: getattr(options, name) for name in ("split", "image_root") if getattr(options, name)}
    settings |= {"concept_column": options.by_concept} if options.by_concept else {}
    source = load_album_source(options.images, text_files=options.captions is None, **settings)
    if options.max_images is not None:
        source = source.first(options.max_images)
    texts = TextFiles(options, source)
    edited: dict[int, str] = {}  # what a person wrote into text files and tables of an earlier run, by row
    in_table: dict[int, str] = {}
    if options.captions is not None:
        source.captions = read_captions_for(source, options.captions)
    else:
        edited = texts.restore()
        tables = [path for path in options.output if path.suffix.lower() == ".csv" and path.is_file()]
        row_of = {image_id: row for row, image_id in enumerate(source.image_ids)}
        for _, line in (line for path in tables for line in table_rows(path)):
            if line["caption"].strip() and line["caption"] != line["suggested"] and line["image_id"] in row_of:
                in_table[row_of[line["image_id"]]] = line["caption"]
        if options.overwrite:
            edited, in_table = {}, {}
    if options.model is None:
        if not any(source.captions):
            raise ValueError(f"{options.images} has no captions. Use --model to write them, or --captions FILE.")
        options.prefer_existing = True
    start = time.monotonic()
    album, facts = describe_source(options, source, edited | in_table)
    for row in in_table:
        album.images[row] = dataclasses.replace(album.images[row], is_edited=True)
    for path in options.output:
        if path.suffix.lower() == ".html":
            album.to_html(path, source.images, title=Path(options.images).name or "Album")
        else:
            (album.to_csv if path.suffix.lower() == ".csv" else album.to_jsonl)(path)
    summary = {**album.summary(), "outputs": list(map(str, options.output)), "kept_text_files": []}
    if options.sidecars:
        number, summary["kept_text_files"] = texts.write(album)
        summary["outputs"] += [f"{number} text files"]
    summary |= {"seconds": round(time.monotonic() - start, 1), **facts}
    summary["unreadable_images"] = [i.image_id for i in album.images if i.unreadable is not None][:20]
    print(json.dumps(summary) if options.json else summary_text(summary))


def check_options(options: AlbumOptions) -> None:
    """Refuse outputs and settings that cannot work, before anything slow."""
    check_words(options)
    options.check_wording()
    options.check_endpoint("revision dtype num_beams min_new_tokens")
    if options.endpoint is not None:
        check_address(options.endpoint)
        if options.model is None:
            raise ValueError("--endpoint needs the name of the model there. Use --model.")
    if options.scorer == "none" and options.model:
        raise ValueError("--scorer none collects existing captions. Leave out --model, or --scorer.")
    for path in options.output:
        if path.suffix.lower() not in (".csv", ".jsonl", ".html"):
            raise ValueError(f"--output {str(path)!r} must end in .csv, .jsonl or .html.")
        if path.exists() and not options.overwrite and not is_own(path):
            raise ValueError(f"--output {str(path)!r} is not a file of this command. Use --overwrite or another name.")


# --- Models of the options, and candidates that an earlier run has generated -----------------------------------------


class Candidates(LineFile):
    """Candidates of finished batches, one image per line after a line with the settings, for one process at a time."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.settings, self.texts = json_digest(settings), dict[str, list[str]]()
        super().__init__(path)

    def _begin(self, data: bytes) -> None:
        lines = data.split(b"\n")[:-1]
        if not lines or json.loads(lines[0]) != {"settings": self.settings}:  # of other settings
            self.truncate(0)
            lines = []
            self.append_bytes(json.dumps({"settings": self.settings}).encode() + b"\n")
        else:
            self.truncate(sum(len(line) + 1 for line in lines))
        self.texts = {row["image"]: row["captions"] for row in map(json.loads, lines[1:])}

    def add(self, texts: dict[str, list[str]]) -> None:
        """Keep the candidates of a batch."""
        rows = ({"image": name, "captions": captions} for name, captions in texts.items())
        self.append_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
        self.texts |= texts


def describe_source(
    options: AlbumOptions, source: AlbumSource, edited: dict[int, str]
) -> tuple[Album, dict[str, Any]]:
    """The album of the options, and facts for the summary."""
    images, ids = source.images, source.image_ids
    scorer = None
    # To write the texts of a person into files takes no model.
    if options.scorer != "none" and (options.scorer or options.model or not options.sidecars):
        is_embedded = (options.model or (PREFIX if options.images == "scenes" else "")).startswith(PREFIX)
        default = "scenes:siglip-held-out" if is_embedded else "openai/clip-vit-base-patch32"
        scorer = load_scorer(model_path(options.scorer or default), device=default_device(options.device))
    cache = None if scorer is None else FeatureCache.for_scorer(scorer, options.cache_dir)
    groups = [""] * len(ids)
    if options.group_by == "folder" and source.root is not None:
        groups = [posixpath.dirname(image_id) for image_id in ids]
    album: dict[str, Any] = {"captions": source.captions, "image_ids": ids, "groups": groups, "settings": options}
    album |= {"cache": cache, "skip_unreadable": True, "edited": edited, "concepts": source.concepts}
    if options.model is None:
        return describe_album(images, None, scorer, **album), {}
    captioner: Any
    if is_endpoint := options.endpoint is not None:
        captioner = EndpointCaptioner.from_options(options, options.output[0], 0.0, samples=options.temperature)
    else:
        loading = {"revision": options.revision, "dtype": getattr(torch, options.dtype), "prompt": options.prompt}
        captioner = load_captioner(model_path(options.model), device=default_device(options.device), **loading)
    names = [field.name for field in dataclasses.fields(CandidateOptions)]
    settings = to_plain({name: getattr(options, name) for name in ("model", "revision", "dtype", *names)})
    weights = captioner.backend.revision if is_endpoint else model_fingerprint(captioner.base_model)
    settings |= {"weights": weights, "prompt": captioner.prompt}
    path = options.output[0].with_suffix(".candidates.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.overwrite:
        path.unlink(missing_ok=True)
    with captioner if is_endpoint else contextlib.nullcontext(), Candidates(path, settings) as record:
        made_by = {"settings": settings, "versions": installed_versions()}
        write_json(options.output[0].with_suffix(".run.json"), made_by)

        def generate(rows: Sequence[int], keys: Sequence[str]) -> list[list[str]]:
            # The whole batch is in the record or generated, because samples depend on it.
            names = [f"{ids[row]} {key}" for row, key in zip(rows, keys, strict=True)]
            if any(name not in record.texts for name in names):
                texts = generate_candidates(captioner, images, rows, ids, options)
                record.add(dict(zip(names, texts, strict=True)))
            return [record.texts[name] for name in names]

        made = describe_album(images, generate, scorer, **album)
        return made, {"endpoint": captioner.summary()} if is_endpoint else {}


# --- Files: what a person wrote or edited stays ----------------------------------------------------------------------


def is_own(path: Path) -> bool:
    """Whether a file is an output of this command, perhaps edited since."""
    mark = b"captionrl album" if path.suffix.lower() == ".html" else b"suggested"
    with path.open("rb") as file:
        return mark in file.read(4096)


class TextFiles:
    """Text files beside the images, and the record of those that this command wrote.

    The record has the digest of each file that was written, by its name, and the text of the person behind it: that of a file
    that --overwrite replaced, or the existing caption that a run without --model or with --prefer_existing has written.
    """

    def __init__(self, options: AlbumOptions, source: AlbumSource) -> None:
        self.options, self.source = options, source
        if options.sidecars:
            check_sidecars(source)
        files = [os.path.dirname(os.path.abspath(path)) for path in source.paths if path]
        self.folder = os.path.commonpath(files) if files else os.curdir
        self.path = Path(self.folder, ".captionrl.json")
        content = read_regular(self.path)
        self.record: dict[str, dict[str, Any]] = json.loads(content) if content else {}

    def path_of(self, image: str) -> tuple[Path, str]:
        """The text file of an image, and its name in the record."""
        path = Path(image).with_suffix(".txt")
        return path, Path(os.path.relpath(os.path.abspath(path), self.folder)).as_posix()

    def restore(self) -> dict[int, str]:
        """Texts that a person has edited since the last run, by row; captions of captioners are no existing captions."""
        edited: dict[int, str] = {}
        captions = self.source.captions
        for row, image in enumerate(self.source.paths):
            path, name = self.path_of(image or "-")
            entry = self.record.get(name)
            if image is None or entry is None or not (content := read_regular(path) or b"").strip():
                continue
            texts = sidecar_captions(path)
            if json_digest(content.decode()) != entry["digest"]:
                edited[row] = " ".join(texts)
            elif captions[row] == texts and (self.options.model is not None or entry["text"]):
                captions[row] = [entry["text"]] if entry["text"] else []
        return edited

    def write(self, album: Album) -> tuple[int, list[str]]:
        """Write the captions; returns the number of files, and the names of those that a person wrote and that are kept."""
        number, kept = 0, []
        for image, file in zip(album.images, self.source.paths, strict=True):
            if not image.caption:
                continue
            path, name = self.path_of(str(file))
            content = f"{image.caption}\n"
            data = read_regular(path)
            before = None if data is None else data.decode("utf-8", "replace")
            number += 1
            if before == content:
                continue
            entry = self.record.get(name, {"digest": None, "text": None})
            is_ours = before is not None and json_digest(before) == entry["digest"]
            is_free = is_ours and (not entry["text"] or self.options.prefer_existing)
            is_replaced = before is not None and (is_free or self.options.overwrite or not before.strip())
            if os.path.lexists(path) and not is_replaced:
                number -= 1
                kept.append(str(path))
                continue
            text = image.old if self.options.prefer_existing else None
            if text is None and before is not None:
                text = entry["text"] if is_ours else before.strip() or None
            atomic_write_bytes(path, content.encode())
            self.record[name] = {"digest": json_digest(content), "text": text}
        write_json(self.path, self.record)
        return number, kept


def check_sidecars(source: AlbumSource) -> None:
    """Refuse images that are not files or would share a text file."""
    owner: dict[Path, str] = {}
    for image_id, file in zip(source.image_ids, source.paths, strict=True):
        if file is None:
            raise ValueError(f"Image {image_id!r} is not a file, so no text file can stand beside it. Use --output.")
        if (other := owner.setdefault(target := Path(file).with_suffix(".txt"), image_id)) != image_id:
            raise ValueError(f"{other!r} and {image_id!r} would have the same text file, {str(target)!r}. Rename one.")


def summary_text(summary: dict[str, Any]) -> str:
    """The summary as sentences."""
    ranked = "Use --scorer to compare them with the images."
    if summary["compared_with"]:
        ranked = f"{summary['rank_1']:.1%} rank their image first among {summary['compared_with'] + 1:,}."
    lines = [
        f"{', '.join(summary['outputs'])}: captions of {summary['captions']:,} of {counted(summary['images'], 'image')} "
        f"in {summary['seconds']:,.0f} s.",
        f"Copies: {summary['copies']:,}. Unreadable: {summary['unreadable']:,}. "
        f"Against the constraints on length and words: {summary['against_constraints']:,}.",
        f"{summary['distinct']:.1%} of the captions are distinct. {ranked}",
    ]
    lines += [f"Shared phrases{f' in {g!r}' if g else ''}: {', '.join(p)}." for g, p in summary["shared"].items()]
    if files := summary["kept_text_files"]:
        lines.append(
            f"Texts that this command did not write ({len(files):,}) are kept: {', '.join(files[:10])}. "
            "Use --prefer_existing without --captions to use their captions, or --overwrite to replace them."
        )
    return "\n".join([*lines, *([cost_sentence(summary["endpoint"])] if "endpoint" in summary else [])])
