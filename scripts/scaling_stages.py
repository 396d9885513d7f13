"""What `scripts/scaling.py` measures: each stage is prepared for a number of rows, and returns what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["STAGES", "features_of"]

Part = Callable[[], Any]
"""What is timed. It may return a function that computes further numbers, which is not timed."""


def features_of(count: int, width: int, seed: int = 0, cluster: int = 20) -> Any:
    """Clusters of about `cluster` rows, like look-alikes. Returns `(N, D)`: float32."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(count // cluster, 1), width, generator=generator)
    return torch.randn(count, width, generator=generator).add_(
        centres[torch.randint(len(centres), (count,), generator=generator)]
    )


def _cache(count: int, folder: Path) -> tuple[Part, Part]:
    from hf_captionrl.retrieval import FeatureCache

    rows = features_of(count, 512).numpy()
    keys = [f"{n:032x}" for n in range(count)]

    def write() -> None:
        cache = FeatureCache(folder, model_id="m", revision="r")
        for start in range(0, count, 1024):
            cache.put(keys[start : start + 1024], rows[start : start + 1024])

    def read() -> None:
        view = FeatureCache(folder, model_id="m", revision="r").get(keys)
        total = 0.0
        for start in range(0, count, 1024):
            total += float(np.asarray(view[start : start + 1024]).sum())

    return write, read


def _write_features(count: int, folder: Path) -> Part:
    return _cache(count, folder)[0]


def _read_features(count: int, folder: Path) -> Part:
    write, read = _cache(count, folder)
    write()
    return read


def _exact_bags(count: int, folder: Path) -> Part:
    from hf_captionrl.retrieval.bags import training_bags
    from hf_captionrl.retrieval.neighbours import nearest_neighbours

    features = features_of(count, 256)

    def work() -> None:
        training_bags(nearest_neighbours(features, 50)[0], 7, features=features)

    return work


def _faiss_bags(count: int, folder: Path) -> Part:
    from hf_captionrl.retrieval.bags import training_bags
    from hf_captionrl.retrieval.neighbours import approximate_neighbours

    features = features_of(count, 256)

    def work() -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        training_bags(approximate_neighbours(features, 50)[0], 7, features=features)

    return work


def _compressed_neighbours(count: int, folder: Path) -> Part:
    """All images are searched in one index, as by one worker of `captionrl bags --mode neighbours --approximate`."""
    import faiss
    import torch

    from hf_captionrl.retrieval.neighbours import (
        CompressedIndex,
        build_compressed_index,
        neighbour_recall,
        normalised,
        rank_rows,
    )

    unit = normalised(features_of(count, 512, cluster=200))
    faiss.omp_set_num_threads(1)

    def work() -> Callable[[], dict[str, float]]:
        started = time.process_time()
        path = build_compressed_index(unit.numpy(), folder / "index")
        built = time.process_time()
        indices, _ = CompressedIndex(path, unit.numpy()).search(range(count), 50)
        searched = time.process_time()
        sample = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:256]

        def further() -> dict[str, float]:
            recall = neighbour_recall(indices[sample], rank_rows(unit, 50, rows=sample)[0])
            return {"build_s": built - started, "search_s": searched - built, "recall": recall}

        return further

    return work


def _retrieval(count: int, folder: Path) -> Part:
    from hf_captionrl.metrics.recall import self_retrieval

    images = features_of(count, 256)
    texts = images + features_of(count, 256, seed=1)

    def work() -> None:
        self_retrieval(texts, images, num_distractors=99, num_bootstrap=1000)

    return work


def captions_of(count: int, folder: Path) -> Any:
    """A column of six captions per image, mapped from a file; word frequencies like those of a language."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    words = [f"w{n}" for n in range(20_000)]
    schema = pa.schema({"captions": pa.list_(pa.string())})
    with pa.parquet.ParquetWriter(folder / "captions.parquet", schema) as file:
        for start in range(0, count, 1000):
            drawn = rng.zipf(1.3, size=(min(1000, count - start), 6, 10)) % len(words)
            texts = [[" ".join(words[w] for w in caption) for caption in image] for image in drawn]
            file.write_table(pa.table({"captions": texts}, schema=schema))
    return datasets.Dataset.from_parquet(str(folder / "captions.parquet"), cache_dir=str(folder / "cache"))


def _cider(count: int, folder: Path) -> Part:
    from hf_captionrl.data.columns import TEXTS, caption_column, in_arrow
    from hf_captionrl.metrics import cider_d

    column = caption_column(captions_of(count, folder))
    candidates = [group[0] for group in column]
    references = in_arrow((group[1:] for group in column), TEXTS)

    def work() -> None:
        cider_d(candidates, references)

    return work


def _tables(count: int, folder: Path) -> Part:
    """Tables of SMILE for captions with five references, and for the references; with features and ranks, which are given."""
    from hf_captionrl.evaluation.evaluator import CAPTIONS_TABLE, TABLES, Evaluator, ScoredCaptions, compare_with_first
    from hf_captionrl.evaluation.scored_captions import human_captions

    dataset = captions_of(count, folder)
    images = features_of(count, 512)
    ranks: np.ndarray = np.arange(count) % 50 + 1
    text = [features_of(count, 512, seed=seed) for seed in (1, 2)]

    def work() -> None:
        evaluator = Evaluator(dataset, None, None, seed=0)
        evaluator.image_features = images
        human = human_captions(evaluator)
        assert human is not None  # nosec B101
        sources = [ScoredCaptions("captions", human.captions, evaluator.references), human]
        for source, features in zip(sources, text, strict=True):
            source.text, source.image_ranks = features, ranks
        for table in (TABLES["smile"], CAPTIONS_TABLE):
            compare_with_first([table.compute(source, evaluator) for source in sources], seed=0)

    return work


def _boosting(count: int, folder: Path) -> Part:
    from hf_captionrl.apps.boosting import SceneDescriber, SceneWriter, boost_shard
    from hf_captionrl.scenes import load_scenes

    rows = load_scenes(num_train=count, num_validation=0, num_test=0)["train"]
    facts = dict(zip(rows["image_id"], rows["facts"], strict=True))

    def work() -> None:
        boost_shard(rows, folder, text=SceneWriter(), vision=SceneDescriber(facts))

    return work


def _boosted_file(count: int, folder: Path) -> Part:
    """The last step of `captionrl boost --embed_images`, for images of 20 kB, and its statistics."""
    import datasets

    from hf_captionrl.apps.boosting import write_boosted_captions
    from hf_captionrl.apps.boosting.boost import write_statistics
    from hf_captionrl.apps.boosting.prompts import STAGES as CAPTIONS

    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(100)]
    for path in paths:
        path.write_bytes(rng.bytes(20_000))
    columns = {
        "image": [str(paths[row % 100]) for row in range(count)],
        "image_id": [f"{row:012d}" for row in range(count)],
    }
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image(decode=False))
    caption = " ".join(["word"] * 12)
    source = {
        "model": "m",
        "revision": "r",
        "prompt_hash": "0" * 32,
        "time": "2024-01-01T00:00:00+00:00",
        "attempt": 0,
    }
    texts: dict[str, Any] = {f"{stage}_caption": caption for stage in CAPTIONS} | {
        f"{stage}_source": source for stage in CAPTIONS
    }
    texts |= {"references": [caption] * 5, "captions": [caption], "conflicts": [], "quarantine": None}

    def work() -> None:
        found = ({"row": row, "image_id": columns["image_id"][row], **texts} for row in range(count))
        write_statistics(write_boosted_captions(rows, folder, found, embed_images=True).path, None)

    return work


def _on_shards(options: Any, make: Callable[[str], Any], folder: Path) -> Part:
    """Work on all shards in this process, without loading the model."""
    from hf_captionrl.data.options import ids_digest, load_split
    from hf_captionrl.utils.parts import ShardFolder, run_stage

    rows = load_split(options, quarantine_path=None, require_captions=False).dataset
    stage = make(ids_digest(rows))
    stage.load()
    stage.load = lambda: None
    shards = ShardFolder(folder / "shards", {}, num_rows=len(rows), rows_per_shard=16 * options.batch_size)
    return lambda: run_stage(stage, shards)


def _caption_shards(count: int, folder: Path) -> Part:
    from hf_captionrl.cli.caption import CaptionOptions, CaptionStage

    options = CaptionOptions(model="scenes:blip-mle", split="train", max_images=count)
    decoding = {"do_sample": False, "num_beams": 3, "num_return_sequences": 1, "max_new_tokens": 40}
    return _on_shards(options, lambda ids: CaptionStage(options, decoding, ids), folder)


def _feature_shards(count: int, folder: Path) -> Part:
    from hf_captionrl.cli.features import FeaturesOptions, FeatureStage

    options = FeaturesOptions(features="image", split="train", max_images=count)
    return _on_shards(options, lambda ids: FeatureStage(options, ids), folder)


def _pixel_shards(count: int, folder: Path) -> Part:
    """The shards that `captionrl pixels` writes and the cache that it fills; random pixels, which do not compress."""
    import pyarrow as pa

    from hf_captionrl.cli.features import fill_cache
    from hf_captionrl.data.features import pixel_rows
    from hf_captionrl.utils.parts import ShardFolder

    per_shard, shape = 32, (384, 384, 3)
    rng = np.random.default_rng(0)
    schema = pa.schema({name: pa.string() for name in ("image_id", "key")} | {"pixels": pa.binary()})
    shards = ShardFolder(folder / "shards", {}, num_rows=count, rows_per_shard=per_shard)

    def work() -> Callable[[], dict[str, float]]:
        for shard in shards.unfinished():
            rows = [
                {"image_id": f"{row:012d}", "key": rng.bytes(16).hex(), "pixels": rng.bytes(int(np.prod(shape)))}
                for row in shards.rows(shard)
            ]
            shards.write(shard, rows, schema)
        shards.finish()
        fill_cache(pixel_rows("processor", "uint8", str(folder / "cache")), shards.folder, "pixels", shape)
        return lambda: {f"{name}_bytes": _bytes_in(folder / name) for name in ("shards", "cache")}

    return work


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


STAGES: dict[str, tuple[str, Callable[[int, Path], Part], tuple[int, int, int]]] = {
    "features_write": (
        "Features: written to the cache, 512 numbers per row",
        _write_features,
        (8_000, 32_000, 128_000),
    ),
    "features_read": ("Features: read and checked", _read_features, (8_000, 32_000, 128_000)),
    "bags_exact": ("Bags: exact neighbours of 256 numbers, bags of 7", _exact_bags, (4_000, 16_000, 64_000)),
    "bags_faiss": ("Bags: faiss instead", _faiss_bags, (4_000, 16_000, 64_000)),
    "ivf_pq": (
        "Neighbours: IVF-PQ of 512 numbers, built, and searched for 50 neighbours of every row",
        _compressed_neighbours,
        (16_000, 48_000, 144_000),
    ),
    "retrieval": ("Evaluation: ranks in the whole pool, RD100, bootstrap", _retrieval, (4_000, 16_000, 64_000)),
    "cider": ("Evaluation: CIDEr-D with five references", _cider, (4_000, 16_000, 64_000)),
    "tables": (
        "Evaluation: the tables of a file and of its references, besides features of 512 numbers",
        _tables,
        (4_000, 16_000, 64_000),
    ),
    "boosting": ("Boosting: three captions per image by rule", _boosting, (100, 400, 1_600)),
    "boosted_file": (
        "Boosting: the file of all captions, with images of 20 kB, and its statistics",
        _boosted_file,
        (1_000, 4_000, 16_000),
    ),
    "caption_shards": (
        "Captions on shards: the embedded BLIP, 3 beams, 72 pixels",
        _caption_shards,
        (128, 512, 2_048),
    ),
    "pixel_shards": (
        "Prepared pixels, 384 x 384: written to shards, and from there to the cache",
        _pixel_shards,
        (256, 512, 1_024),
    ),
    "feature_shards": ("Features on shards: the embedded CLIP", _feature_shards, (256, 1_024, 4_096)),
}
"""Description, preparation and sizes in rows, by name."""
