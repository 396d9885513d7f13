"""Measures memory and time of features, bags, evaluation and boosting at three sizes of the data.

    python scripts/scaling.py          # about seven CPU minutes; writes docs/results/scaling.json and docs/scaling.md
    python scripts/scaling.py --render # the tables from existing numbers

Each size runs in a separate process with one thread. Time is the CPU time of the process. Memory is the peak of its
resident set minus its value after the input was created (Linux counts and resets the peak). The exponent is the slope
of a line through the logarithms: 1 means that twice the data takes twice as much.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl.io import write_json  # noqa: E402
from hf_captionrl.reports.versions import installed_versions  # noqa: E402
from scripts.page_sections import write_section  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "scaling.json"
PAGE = ROOT / "docs" / "scaling.md"
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

    from hf_captionrl.retrieval.compressed_index import CompressedIndex, build_compressed_index
    from hf_captionrl.retrieval.neighbours import neighbour_recall, normalised, rank_rows

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
    from hf_captionrl.metrics.self_retrieval_recall import self_retrieval

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
    from hf_captionrl.data.arrow_columns import MappedRows, caption_column
    from hf_captionrl.metrics import cider_d

    column = caption_column(captions_of(count, folder))
    candidates = [group[0] for group in column]
    references = MappedRows(column, lambda _, group: group[1:])

    def work() -> None:
        cider_d(candidates, references)

    return work


def _tables(count: int, folder: Path) -> Part:
    """Tables of SMILE for captions with five references, and for the references; with features and ranks, which are given."""
    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.evaluation.paper_tables import CAPTIONS_TABLE, TABLES, ScoredCaptions, compare_with_first
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
    from hf_captionrl.boosting import SceneDescriber, SceneWriter, boost_shard
    from hf_captionrl.scenes import load_scenes

    rows = load_scenes(num_train=count, num_validation=0, num_test=0)["train"]
    facts = dict(zip(rows["image_id"], rows["facts"], strict=True))

    def work() -> None:
        boost_shard(rows, folder, text=SceneWriter(), vision=SceneDescriber(facts))

    return work


def _boosted_file(count: int, folder: Path) -> Part:
    """The last step of `captionrl boost --embed_images`, for images of 20 kB, and its statistics."""
    import datasets

    from hf_captionrl.boosting import write_boosted_captions
    from hf_captionrl.boosting.boost import write_statistics
    from hf_captionrl.boosting.prompts import STAGES as CAPTIONS

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
    from hf_captionrl.engine import ShardFolder, run_stage
    from hf_captionrl.evaluation.dataset_options import ids_digest, load_split

    rows = load_split(options, quarantine_path=None, require_captions=False).dataset
    stage = make(ids_digest(rows))
    stage.load()
    stage.load = lambda: None
    shards = ShardFolder(folder / "shards", {}, num_rows=len(rows), rows_per_shard=16 * options.batch_size)
    return lambda: run_stage(stage, shards)


def _caption_shards(count: int, folder: Path) -> Part:
    from hf_captionrl.evaluation.caption_options import CaptionOptions
    from hf_captionrl.evaluation.caption_stage import CaptionStage

    options = CaptionOptions(model="scenes:blip-mle", split="train", max_images=count)
    decoding = {"do_sample": False, "num_beams": 3, "num_return_sequences": 1, "max_new_tokens": 40}
    return _on_shards(options, lambda ids: CaptionStage(options, decoding, ids), folder)


def _feature_shards(count: int, folder: Path) -> Part:
    from hf_captionrl.evaluation.write_features import FeaturesOptions, FeatureStage

    options = FeaturesOptions(features="image", split="train", max_images=count)
    return _on_shards(options, lambda ids: FeatureStage(options, ids), folder)


def _pixel_shards(count: int, folder: Path) -> Part:
    """The shards that `captionrl pixels` writes and the cache that it fills; random pixels, which do not compress."""
    import pyarrow as pa

    from hf_captionrl.data.pixel_cache import pixel_rows
    from hf_captionrl.engine import ShardFolder
    from hf_captionrl.evaluation.cached_rows import fill_cache

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


def memory_mib(what: str) -> float:
    """A number of this process from `/proc/self/status`. In MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024


def _child(stage: str, count: int, answers: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = STAGES[stage][1](count, Path(folder))
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
            held, started = memory_mib("VmRSS"), time.process_time()
            further = work()
            seconds = time.process_time() - started
            found = {"rows": count, "cpu_s": seconds, "peak_mib": max(memory_mib("VmHWM") - held, 0.0)}
            answers.put(found | (further() if callable(further) else {}))
    except Exception as error:  # the parent says it
        answers.put({"rows": count, "error": f"{type(error).__name__}: {error}"})


def measure(stage: str, count: int) -> dict[str, Any]:
    """Measure one size of one stage in a separate process. Returns `rows`, `cpu_s` and `peak_mib`."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_child, args=(stage, count, answers))
    process.start()
    process.join()
    if process.exitcode or answers.empty():
        raise RuntimeError(f"{stage} at {count} rows ended with {process.exitcode}. Run it with fewer rows.")
    answer = answers.get()
    if "error" in answer:
        raise RuntimeError(f"{stage} at {count} rows: {answer['error']}.")
    return answer


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms.

    `values` are above 0.
    """
    if min(*sizes, *values) <= 0 or len(set(sizes)) < 2:
        raise ValueError(f"sizes {list(sizes)} and values {list(values)} must be above 0, and sizes differ.")
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def render(results: Mapping[str, Any]) -> str:
    """The table of the page."""
    lines = [
        "| | rows | CPU s | peak MiB | time ~ rows^e | memory ~ rows^e |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, runs in results["stages"].items():
        rows, seconds = [run["rows"] for run in runs], [run["cpu_s"] for run in runs]
        memory = [max(run["peak_mib"], 0.1) for run in runs]
        cells = [
            " / ".join(f"{n:,}" for n in rows),
            " / ".join(f"{s:.2f}" for s in seconds),
            " / ".join(f"{m:.0f}" for m in memory),
            f"{exponent(rows, seconds):.2f}",
            f"{exponent(rows, memory):.2f}",
        ]
        lines.append(f"| {STAGES[name][0]} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        f"{run['rows']:,} rows: {run['build_s']:.1f} s to build, {1000 * run['search_s'] / run['rows']:.2f} ms per search, "
        f"recall {run['recall']:.3f}"
        for run in results["stages"].get("ivf_pq", ())
    ]
    lines += ["", f"IVF-PQ, in clusters of 200 rows: {'; '.join(parts)}."] if parts else []
    for run in results["stages"].get("pixel_shards", ())[-1:]:
        kilobytes = [run[name] / run["rows"] / 1000 for name in ("shards_bytes", "cache_bytes")]
        lines += [
            "",
            f"Prepared pixels, 384 x 384, per image: {kilobytes[0]:.1f} kB in the shards and {kilobytes[1]:.1f} kB in the cache.",
        ]
    return "\n".join(lines) + f"\n\nOne thread of a CPU. {versions}.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the numbers, render the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing, render existing numbers")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=list(STAGES),
        help="stages to measure; others keep their numbers",
    )
    args = parser.parse_args(argv)
    if not args.render:
        before = json.loads(RESULTS.read_text(encoding="utf-8"))["stages"] if RESULTS.is_file() else {}
        found = {name: runs for name, runs in before.items() if name not in args.stages}
        versions = installed_versions()
        kept = {name: versions[name] for name in ("python", "torch", "datasets") if name in versions}
        for name in args.stages:
            found[name] = [measure(name, count) for count in STAGES[name][2]]
            print(
                name,
                [(run["rows"], round(run["cpu_s"], 2), round(run["peak_mib"])) for run in found[name]],
                flush=True,
            )
            # After each stage, so that an interrupted run keeps finished stages.
            write_json(RESULTS, {"stages": {name: found[name] for name in STAGES if name in found}, "versions": kept})
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    write_section(PAGE, "scaling", render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
