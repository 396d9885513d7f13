"""`captionrl boost`: blend references, describe images, combine both; sharded and resumable."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.dataset_options import load_split

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.boosting.options import BoostOptions
    from hf_captionrl.language_models import Backend

__all__ = ["boost"]

_CAPTION_COLUMNS = {"blend_caption": "BlendCap", "visual_caption": "VisualCap", "holistic_caption": "HolisticCap"}


def _shard(text: str) -> tuple[int, int]:
    """Shard and number of shards, counting the processes of `accelerate launch` or torchrun on this machine."""
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise ValueError(f"--shard {text!r} must be I/N with I from 0 to N-1, such as 0/8.")
    # Only the environment is read: processes that do not wait for each other cannot hang when one fails.
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return int(index) * world + rank, int(number) * world


def _device() -> str | None:
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return None
    import torch

    return f"cuda:{rank}" if torch.cuda.is_available() else "cpu"


def _backend(arguments: BoostOptions, role: str, dataset: datasets.Dataset) -> Backend:
    """The backend that `--text` or `--vision` names."""
    from hf_captionrl import language_models
    from hf_captionrl.boosting.scene_backends import SceneDescriber, SceneWriter

    vision = role == "vision"
    spec = getattr(arguments, role) or ("scenes" if arguments.dataset == "scenes" else "")
    kind, _, name = spec.partition(":")
    if kind == "scenes" and not name:
        if "facts" not in dataset.column_names:
            raise ValueError(f"--{role} scenes needs the column 'facts', which embedded scenes have. Name a model.")
        if not vision:
            return SceneWriter()
        facts = dict(zip(dataset["image_id"][:], dataset["facts"][:], strict=True))
        rates = {"error_rate": arguments.error_rate, "mention_rate": arguments.mention_rate}
        return SceneDescriber(facts, **rates, seed=arguments.seed)
    kinds = ("transformers", "vllm", "openai", *(("captioner",) if vision else ()))
    if kind not in kinds or not name:
        raise ValueError(
            f"--{role} is {spec!r}. Use 'scenes', or one of {', '.join(kinds)} with a name after a colon."
        )
    revision = getattr(arguments, f"{role}_revision")
    if kind == "openai":
        url = getattr(arguments, f"{role}_url") or arguments.text_url
        if not url:
            raise ValueError(
                f"--{role} {spec!r} needs an address. Pass one, such as --{role}_url http://127.0.0.1:8000/v1."
            )
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
        device=_device(),
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
    )


def _load(arguments: BoostOptions) -> datasets.Dataset:
    """The images, unchecked: each shard checks its rows, so only their images must exist."""
    loaded = load_split(arguments, quarantine_path=None)
    number, total = len(loaded.all_ids), sum(loaded.sizes.values())
    if number < total and arguments.dataset != "scenes":
        print(
            f"captionrl boost: {number} of {total} images are boosted: split {arguments.split!r}. Use --split train for "
            "captions to train on, or --split all for every image.",
            file=sys.stderr,
        )
    return loaded.dataset


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
    """Boost the captions of a shard; the shard that finishes last merges."""
    shard, num_shards = _shard(arguments.shard)  # before anything slow
    if arguments.embed_images and arguments.no_images:
        raise ValueError("--embed_images stores the images and --no_images leaves them out. Use one of them.")
    output = arguments.output
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {str(output)!r} is a file. Name a folder.")
    tokenizer = arguments.tokenizer or ("scenes:siglip-held-out" if arguments.dataset == "scenes" else None)

    from tqdm import tqdm

    from hf_captionrl.boosting.card import write_boosted
    from hf_captionrl.boosting.merging import UnfinishedError, merge_journals
    from hf_captionrl.boosting.shards import boost_shard

    dataset = _load(arguments)
    text, vision = _backend(arguments, "text", dataset), _backend(arguments, "vision", dataset)
    summary: dict[str, Any] = {"output": str(output), "shard": shard, "num_shards": num_shards}
    if not arguments.merge:
        # A progress bar only on a terminal.
        with tqdm(total=len(range(shard, len(dataset), num_shards)), unit=" rows", disable=None) as progress:
            report = boost_shard(
                dataset,
                output,
                text=text,
                vision=vision,
                shard=shard,
                num_shards=num_shards,
                attempts=arguments.attempts,
                max_words=arguments.max_words,
                rows_at_once=arguments.rows_at_once,
                max_bad_fraction=arguments.max_bad_fraction,
                max_failures=arguments.max_failures,
                retry_quarantined=arguments.retry_quarantined,
                progress=progress.update,
            )
        summary |= asdict(report)
    try:
        merged = merge_journals(
            dataset,
            output,
            text=text,
            vision=vision,
            embed_images=arguments.embed_images,
            with_images=not arguments.no_images,
            exact_facts=arguments.dataset == "scenes",
        )
    except UnfinishedError as error:
        if arguments.merge:
            raise
        print(f"captionrl boost: shard {shard} of {num_shards} is finished. {error}", file=sys.stderr)
        summary["merged"] = None
    else:
        summary["merged"] = asdict(merged) | {"path": str(merged.path)}
        summary["statistics"] = _write_statistics(merged.path, tokenizer)
        summary["card"] = str(write_boosted(arguments, merged, text, vision))
    if arguments.json:
        print(json.dumps(summary))
    elif summary["merged"]:
        print(
            f"{merged.path}: {merged.rows} captions, {merged.conflicts} of which contradict their BlendCap; "
            f"{merged.quarantined} rows in quarantine."
        )
