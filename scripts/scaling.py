"""Measures memory and time of features, bags, evaluation and boosting at three sizes of the data.

    python scripts/scaling.py                      # about five CPU minutes; writes docs/results/scaling.json
    python scripts/scaling.py --stages bags_faiss  # others keep their numbers

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl.io import write_json  # noqa: E402
from hf_captionrl.reports.versions import installed_versions  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "scaling.json"


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


def _read_features(count: int, folder: Path) -> Part:
    write, read = _cache(count, folder)
    write()
    return read


def _bags(count: int, search: str) -> Part:
    from hf_captionrl.retrieval import neighbours
    from hf_captionrl.retrieval.bags import training_bags

    features = features_of(count, 256)

    def work() -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        training_bags(getattr(neighbours, search)(features, 50)[0], 7, features=features)

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
    from hf_captionrl.metrics import cider_d

    groups = list(captions_of(count, folder)["captions"])
    candidates, references = [group[0] for group in groups], [group[1:] for group in groups]

    def work() -> None:
        cider_d(candidates, references)

    return work


def _boosting(count: int, folder: Path) -> Part:
    from hf_captionrl.boosting import SceneDescriber, SceneWriter, boost_shard
    from hf_captionrl.scenes import load_scenes

    rows = load_scenes(num_train=count, num_validation=0, num_test=0)["train"]
    facts = dict(zip(rows["image_id"], rows["facts"], strict=True))

    def work() -> None:
        boost_shard(rows, folder, text=SceneWriter(), vision=SceneDescriber(facts))

    return work


STAGES: dict[str, tuple[str, Callable[[int, Path], Part], tuple[int, int, int]]] = {
    "features_write": (
        "Features: written to the cache, 512 numbers per row",
        lambda count, folder: _cache(count, folder)[0],
        (8_000, 32_000, 128_000),
    ),
    "features_read": ("Features: read and checked", _read_features, (8_000, 32_000, 128_000)),
    "bags_exact": (
        "Bags: exact neighbours of 256 numbers, bags of 7",
        lambda count, folder: _bags(count, "nearest_neighbours"),
        (4_000, 16_000, 64_000),
    ),
    "bags_faiss": (
        "Bags: faiss instead",
        lambda count, folder: _bags(count, "approximate_neighbours"),
        (4_000, 16_000, 64_000),
    ),
    "ivf_pq": (
        "Neighbours: IVF-PQ of 512 numbers, built, and searched for 50 neighbours of every row",
        _compressed_neighbours,
        (16_000, 48_000, 144_000),
    ),
    "retrieval": ("Evaluation: ranks in the whole pool, RD100, bootstrap", _retrieval, (4_000, 16_000, 64_000)),
    "cider": ("Evaluation: CIDEr-D with five references", _cider, (4_000, 16_000, 64_000)),
    "boosting": ("Boosting: three captions per image by rule", _boosting, (100, 400, 1_600)),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the numbers after each stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="(default: all)")
    args = parser.parse_args(argv)
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["stages"] if RESULTS.is_file() else {}
    versions = installed_versions()
    kept = {name: versions[name] for name in ("python", "torch", "datasets") if name in versions}
    for name in args.stages:
        title, _, sizes = STAGES[name]
        found[name] = runs = [measure(name, count) for count in sizes]
        write_json(RESULTS, {"stages": found, "versions": kept})
        slopes = [exponent(sizes, [max(run[key], 0.1) for run in runs]) for key in ("cpu_s", "peak_mib")]
        print(f"{title}: time ~ rows^{slopes[0]:.2f}, memory ~ rows^{slopes[1]:.2f}")
        print(
            *(f"  {run['rows']:,} rows: {run['cpu_s']:.2f} CPU s, {run['peak_mib']:.0f} MiB" for run in runs), sep="\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
