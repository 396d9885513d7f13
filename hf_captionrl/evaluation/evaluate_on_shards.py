"""The parts of `captionrl evaluate` whose cost grows with the rows, as stages on shards."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_captionrl.data import frames_of
from hf_captionrl.data.arrow_columns import id_column, select_rows
from hf_captionrl.data.source_keys import source_keys
from hf_captionrl.engine import ShardFolder, Stage, launched, read_shards, run_stage
from hf_captionrl.evaluation.cached_rows import fill_cache
from hf_captionrl.evaluation.caption_scores import BLOCK, ScoreStage, empty_column, write_inputs
from hf_captionrl.evaluation.dataset_options import DatasetOptions, LoadedSplit, ids_digest
from hf_captionrl.evaluation.evaluation_models import held_out_scorer_name
from hf_captionrl.evaluation.image_stage import rows_per_shard
from hf_captionrl.evaluation.scored_captions import add_scores
from hf_captionrl.evaluation.write_features import FeaturesOptions, FeatureStage
from hf_captionrl.io import json_digest, to_plain
from hf_captionrl.retrieval import FeatureCache, TokenScorer, model_fingerprint
from hf_captionrl.retrieval.row_lookup import RowLookup

if TYPE_CHECKING:
    from hf_captionrl.evaluation.evaluate_options import EvaluateOptions
    from hf_captionrl.evaluation.paper_tables import ScoredCaptions

__all__ = ["cache_image_features", "check_shards", "score_on_shards"]

_BLOCKS = 16
_KEYS_AT_ONCE = 4096
_DTYPES = {"text": np.float32, "clip_text": np.float32, "nats": np.float64}


def check_shards(arguments: EvaluateOptions) -> None:
    """Refuse options that do not fit, before anything slow."""
    arguments.check_engine()
    if arguments.uses_shards and launched()[1] > 1:
        raise ValueError(
            f"{launched()[1]} processes were launched, but one process writes the tables. Use --processes instead of `accelerate launch`."
        )
    _per_shard(arguments)


def _per_shard(arguments: EvaluateOptions) -> int:
    return rows_per_shard(arguments, _BLOCKS, BLOCK)


def _digest(value: Any) -> str:
    """Digest of an array, or of a value that JSON can represent."""
    if isinstance(value, np.ndarray):
        return hashlib.blake2b(np.ascontiguousarray(value), digest_size=8).hexdigest()
    return json_digest(to_plain(value))


def _shards(
    arguments: EvaluateOptions, kind: str, settings: Mapping[str, Any], rows: int, per_shard: int
) -> ShardFolder:
    """The folder of a stage. Its name depends on the settings, so other captions or models have other folders."""
    name = f"{kind}-{_digest({**settings, 'rows_per_shard': per_shard})}"
    return ShardFolder(arguments.output_dir / "shards" / name, settings, num_rows=rows, rows_per_shard=per_shard)


def _work(stage: Stage, shards: ShardFolder, arguments: EvaluateOptions) -> None:
    from tqdm import tqdm

    with tqdm(total=len(shards.unfinished()), unit=" shards", disable=None) as progress:
        run_stage(stage, shards, arguments, progress=lambda rows: progress.update(1))


def cache_image_features(arguments: EvaluateOptions, split: LoadedSplit, scorer: Any) -> None:
    """Put the image features that the cache lacks into it, in the batches that one process would compute."""
    if frames_of(split.dataset):
        return
    cache = FeatureCache.for_scorer(scorer, arguments.cache_dir)
    keys = source_keys(split.dataset, cache.root)
    rows = rows_to_encode(cache, keys)
    if not len(rows):
        return
    missing = select_rows(split.dataset, rows)
    options = FeaturesOptions(
        **{field.name: getattr(arguments, field.name) for field in fields(DatasetOptions)},
        scorer=held_out_scorer_name(arguments.dataset, arguments.scorer),
        features="image",
    )
    images = hashlib.blake2b(digest_size=8)
    for row in rows:
        images.update(keys[row].encode())
    settings = {"scorer": scorer.signature, "images": images.hexdigest()}
    shards = _shards(arguments, "images", settings, len(rows), _per_shard(arguments))
    # Bad rows are not among the images here, but they are when another process loads them.
    stage = FeatureStage(options, ids_digest(missing), only=split.all_ids.rows(id_column(missing)))
    _work(stage, shards, arguments)
    fill_cache(cache, shards.folder, "image")


def rows_to_encode(cache: FeatureCache, keys: Sequence[str]) -> np.ndarray:
    """Rows whose features are not in the cache, ascending; of rows with one key only the first."""
    starts = range(0, len(keys), _KEYS_AT_ONCE)
    parts = [start + np.array(cache.missing(keys[start : start + _KEYS_AT_ONCE]), np.int64) for start in starts]
    missing = np.concatenate(parts)
    return missing[RowLookup(keys).first_rows()[missing] == missing]


def score_on_shards(
    arguments: EvaluateOptions,
    sources: Sequence[ScoredCaptions],
    scorer: Any,
    language_model: tuple[Any, Any] | None,
    *,
    clip_prefix: str,
    pools: Mapping[str, Any],
) -> None:
    """The same as `score_sources`, on shards of captions."""
    captions = [source.first for source in sources]
    columns = [*pools]
    if scorer is not None:
        columns += [
            "text",
            *(["clip_text"] if clip_prefix else []),
            *(["tokens"] if isinstance(scorer, TokenScorer) else []),
        ]
    if language_model is not None:
        columns += ["nats", "scored_tokens"]
    if not columns:
        return
    per_shard = _per_shard(arguments)
    rows_per_source = -(-len(captions[0]) // per_shard) * per_shard
    settings = {
        "captions": _digest(captions),
        "pools": {name: _digest(np.asarray(features)) for name, features in pools.items()},
        "scorer": None if scorer is None else scorer.signature,
        "language_model": None if language_model is None else model_fingerprint(language_model[0]),
        "clip_prefix": clip_prefix,
        "columns": columns,
    }
    shards = _shards(arguments, "captions", settings, len(sources) * rows_per_source, per_shard)
    if shards.unfinished():
        write_inputs(shards.folder, captions, pools)
    models = (arguments.dataset, arguments.scorer, arguments.language_model)
    _work(ScoreStage(shards.folder, rows_per_source, models, clip_prefix, columns), shards, arguments)
    rows = read_shards(shards.folder)
    for source in sources:
        add_scores(
            source, _columns(rows, len(source.captions), arguments.output_dir), scorer, language_model, clip_prefix
        )


def _columns(rows: Iterator[dict[str, Any]], number: int, folder: Path) -> dict[str, np.ndarray]:
    """Columns of the next rows."""
    found: dict[str, np.ndarray] = {}
    for at, row in enumerate(itertools.islice(rows, number)):
        for name, value in row.items():
            if at == 0:
                found[name] = empty_column((number, *np.shape(value)), _DTYPES.get(name, np.int64), folder)
            found[name][at] = value
    return found
