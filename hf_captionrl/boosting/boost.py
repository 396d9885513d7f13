"""`captionrl boost`: blend references, describe images, combine both; on shards, and resumable."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.dataset_options import ids_digest, load_split, source_settings

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.boosting.options import BoostOptions

__all__ = ["boost", "write_statistics"]

SHARDS_FOLDER = "shards"
"""Folder of the shards, in the output."""

_CHECKED_ROWS = 1024
_CAPTION_COLUMNS = {"blend_caption": "BlendCap", "visual_caption": "VisualCap", "holistic_caption": "HolisticCap"}


def _load(arguments: BoostOptions) -> datasets.Dataset:
    """The images; up to a thousand of them are checked, so that a wrong folder is found before any question."""
    from hf_captionrl.boosting.rows import checked_rows

    loaded = load_split(arguments, quarantine_path=None)
    number, total = len(loaded.all_ids), sum(loaded.sizes.values())
    if number < total and arguments.dataset != "scenes":
        print(
            f"captionrl boost: {number} of {total} images are boosted: split {arguments.split!r}. Use --split train for "
            "captions to train on, or --split all for every image.",
            file=sys.stderr,
        )
    rows = loaded.dataset
    step = max(1, len(rows) // _CHECKED_ROWS)
    checked_rows(
        rows.select(range(0, len(rows), step)), check_images="header", max_bad_fraction=arguments.max_bad_fraction
    )
    return rows


def _settings(arguments: BoostOptions, dataset: datasets.Dataset) -> dict[str, Any]:
    """Settings of the captions; the answers of other models stay in the journals."""
    data = {"images": ids_digest(dataset), "references": ids_digest(dataset, "captions")}
    names = ("text", "vision", "text_revision", "vision_revision", "max_new_tokens", "seed", "max_words")
    scenes = ("error_rate", "mention_rate")
    return source_settings(arguments) | data | {name: getattr(arguments, name) for name in names + scenes}


def write_statistics(path: Path, tokenizer: str | None) -> dict[str, Any]:
    """Write Table 9 (statistics.json) and Figure 4 (lengths.png) beside the captions."""
    from hf_captionrl.boosting.boosted_file import CaptionsOf
    from hf_captionrl.boosting.caption_statistics import source_statistics, write_source_histogram
    from hf_captionrl.io import write_json

    columns = {"references": "references"} | {shown: name for name, shown in _CAPTION_COLUMNS.items()}
    sources = {shown: CaptionsOf(path, name) for shown, name in columns.items()}
    count = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        from hf_captionrl.scenes.models import model_path

        loaded = AutoTokenizer.from_pretrained(model_path(tokenizer), trust_remote_code=False)
        count = lambda texts: [len(ids) for ids in loaded(texts)["input_ids"]]  # noqa: E731
    found = source_statistics(sources, count_tokens=count)
    write_json(path.parent / "statistics.json", found)
    write_source_histogram(path.parent / "lengths.png", sources)
    return found


def boost(arguments: BoostOptions) -> None:
    """Boost the captions, shard by shard, and write them into one file."""
    arguments.check_engine()  # before anything slow
    if arguments.embed_images and arguments.no_images:
        raise ValueError("--embed_images stores the images and --no_images leaves them out. Use one of them.")
    output = arguments.output
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {str(output)!r} is a file. Name a folder.")
    tokenizer = arguments.tokenizer or ("scenes:siglip-held-out" if arguments.dataset == "scenes" else None)

    from tqdm import tqdm

    from hf_captionrl.boosting.backends import check_backend
    from hf_captionrl.boosting.boost_stage import BoostStage, reopen_shards
    from hf_captionrl.boosting.boosted_file import write_boosted_captions
    from hf_captionrl.boosting.card import write_boosted
    from hf_captionrl.engine import ShardFolder, read_shards, run_stage

    dataset = _load(arguments)
    for role in ("text", "vision"):
        check_backend(arguments, role, dataset)
    number, ids = len(dataset), ids_digest(dataset)
    shards = ShardFolder(
        output / SHARDS_FOLDER,
        _settings(arguments, dataset),
        num_rows=number,
        rows_per_shard=arguments.rows_per_shard or 64 * arguments.rows_at_once,
        overwrite=arguments.overwrite,
    )
    reopen_shards(shards, arguments.retry_quarantined)
    resumed = number - sum(len(shards.rows(shard)) for shard in shards.unfinished())
    # A progress bar only on a terminal.
    with tqdm(total=number, initial=resumed, unit=" rows", disable=None) as progress:
        done = run_stage(BoostStage(arguments, ids), shards, arguments, progress=progress.update)
    summary: dict[str, Any] = {"output": str(output), "rows": number, "resumed": resumed, "shards": done["shards"]}
    if done["manifest"] is None:
        summary["captions"] = None  # another launched process is the last
    else:
        written = write_boosted_captions(
            dataset,
            output,
            read_shards(shards.folder),
            embed_images=arguments.embed_images,
            with_images=not arguments.no_images,
        )
        summary["captions"] = asdict(written) | {"path": str(written.path)}
        summary["statistics"] = write_statistics(written.path, tokenizer)
        summary["card"] = str(write_boosted(arguments, written, done["manifest"]["made_by"]))
    if arguments.json:
        print(json.dumps(summary))
    elif summary["captions"]:
        print(
            f"{written.path}: {written.rows} captions, {written.conflicts} of which contradict their BlendCap; "
            f"{written.quarantined} rows in quarantine."
        )
