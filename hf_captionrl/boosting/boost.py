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
    from hf_captionrl.language_models import Backend

__all__ = ["boost", "load_backend"]

SHARDS_FOLDER = "shards"
"""Folder of the shards, in the output."""

_CHECKED_ROWS = 1024
_CAPTION_COLUMNS = {"blend_caption": "BlendCap", "visual_caption": "VisualCap", "holistic_caption": "HolisticCap"}


def check_backend(arguments: BoostOptions, role: str, dataset: datasets.Dataset) -> tuple[str, str]:
    """Kind and name of the backend that `--text` or `--vision` names; checked before a model is loaded."""
    spec = getattr(arguments, role) or ("scenes" if arguments.dataset == "scenes" else "")
    kind, _, name = spec.partition(":")
    kinds = ("transformers", "vllm", "openai", *(("captioner",) if role == "vision" else ()))
    if kind == "scenes" and not name:
        if "facts" not in dataset.column_names:
            raise ValueError(f"--{role} scenes needs the column 'facts', which embedded scenes have. Name a model.")
    elif kind not in kinds or not name:
        raise ValueError(
            f"--{role} is {spec!r}. Use 'scenes', or one of {', '.join(kinds)} with a name after a colon."
        )
    elif kind == "openai" and not (getattr(arguments, f"{role}_url") or arguments.text_url):
        raise ValueError(
            f"--{role} {spec!r} needs an address. Pass one, such as --{role}_url http://127.0.0.1:8000/v1."
        )
    return kind, name


def load_backend(arguments: BoostOptions, role: str, dataset: datasets.Dataset) -> Backend:
    """The backend that `--text` or `--vision` names."""
    from hf_captionrl import language_models
    from hf_captionrl.boosting.scene_backends import SceneDescriber, SceneWriter

    kind, name = check_backend(arguments, role, dataset)
    vision = role == "vision"
    if kind == "scenes":
        if not vision:
            return SceneWriter()
        facts = dict(zip(dataset["image_id"][:], dataset["facts"][:], strict=True))
        rates = {"error_rate": arguments.error_rate, "mention_rate": arguments.mention_rate}
        return SceneDescriber(facts, **rates, seed=arguments.seed)
    revision = getattr(arguments, f"{role}_revision")
    if kind == "openai":
        url = getattr(arguments, f"{role}_url") or arguments.text_url
        return language_models.HTTPBackend(
            url,
            name,
            revision=revision or "",
            api_key_env=arguments.api_key_env,
            sees_images=vision,
            max_new_tokens=arguments.max_new_tokens,
            seed=arguments.seed,
            concurrency=arguments.concurrency,
            timeout_s=arguments.timeout_s,
            tries=arguments.tries,
            backoff_s=arguments.backoff_s,
        )
    if kind == "vllm":
        return language_models.VLLMBackend(
            name, revision=revision, sees_images=vision, max_new_tokens=arguments.max_new_tokens, seed=arguments.seed
        )
    make: Any = language_models.TransformersVisionBackend if vision else language_models.TransformersTextBackend
    if kind == "captioner":
        make = language_models.CaptionerBackend
    return make(
        name,
        revision=revision,
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
    )


def _load(arguments: BoostOptions) -> datasets.Dataset:
    """The images; up to a thousand of them are checked, so that a wrong folder is found before any question."""
    from hf_captionrl.boosting.shards import checked_rows

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


def _settings(arguments: BoostOptions, ids: str) -> dict[str, Any]:
    """Settings of the captions; the answers of other models stay in the journals."""
    names = ("text", "vision", "text_revision", "vision_revision", "max_new_tokens", "seed", "max_words")
    scenes = ("error_rate", "mention_rate")
    return source_settings(arguments) | {"images": ids} | {name: getattr(arguments, name) for name in names + scenes}


def _write_statistics(path: Path, tokenizer: str | None) -> dict[str, Any]:
    """Write Table 9 (statistics.json) and Figure 4 (lengths.png) beside the captions."""
    import pyarrow.parquet

    from hf_captionrl.boosting.caption_statistics import source_statistics, write_source_histogram
    from hf_captionrl.io import write_json

    table = pyarrow.parquet.read_table(path, columns=["references", *_CAPTION_COLUMNS]).to_pydict()
    sources = {"references": [caption for group in table["references"] for caption in group]}
    sources |= {shown: table[name] for name, shown in _CAPTION_COLUMNS.items()}
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
        _settings(arguments, ids),
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
        summary["statistics"] = _write_statistics(written.path, tokenizer)
        summary["card"] = str(write_boosted(arguments, written, done["manifest"]["made_by"]))
    if arguments.json:
        print(json.dumps(summary))
    elif summary["captions"]:
        print(
            f"{written.path}: {written.rows} captions, {written.conflicts} of which contradict their BlendCap; "
            f"{written.quarantined} rows in quarantine."
        )
