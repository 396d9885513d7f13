"""Measures time and memory of features, neighbours and evaluation at three sizes of the data: docs/results/scaling.json.

    python scripts/scaling.py                      # about five CPU minutes
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
    rows = torch.randn(count, width, generator=generator)
    return rows.add_(centres[torch.randint(len(centres), (count,), generator=generator)])


def _features(count: int, folder: Path, *, reading: bool) -> Part:
    from hf_captionrl.retrieval import FeatureCache

    rows, keys = features_of(count, 512).numpy(), [f"{n:032x}" for n in range(count)]

    def write() -> None:
        cache = FeatureCache(folder, model_id="m", revision="r")
        for start in range(0, count, 1024):
            cache.put(keys[start : start + 1024], rows[start : start + 1024])

    def read() -> None:
        view = FeatureCache(folder, model_id="m", revision="r").get(keys)
        for start in range(0, count, 1024):
            np.asarray(view[start : start + 1024]).sum()

    if reading:
        write()
    return read if reading else write


def _bags(count: int, folder: Path, *, search: str) -> Part:
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
        times = {"build_s": built - started, "search_s": time.process_time() - built}
        sample = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:256]
        return lambda: times | {"recall": neighbour_recall(indices[sample], rank_rows(unit, 50, rows=sample)[0])}

    return work


def _retrieval(count: int, folder: Path) -> Part:
    from hf_captionrl.metrics import self_retrieval

    images = features_of(count, 256)
    texts = images + features_of(count, 256, seed=1)
    return lambda: self_retrieval(texts, images, num_distractors=99, num_bootstrap=1000)


def _cider(count: int, folder: Path) -> Part:
    from hf_captionrl.metrics import cider_d

    # Word frequencies like those of a language.
    drawn = np.random.default_rng(0).zipf(1.3, size=(count, 6, 10)) % 20_000
    groups = [[" ".join(f"w{word}" for word in caption) for caption in image] for image in drawn]
    captions, references = [group[0] for group in groups], [group[1:] for group in groups]
    return lambda: cider_d(captions, references)


_SIZES = (4_000, 16_000, 64_000)
STAGES: dict[str, tuple[Callable[[int, Path], Part], tuple[int, int, int]]] = {
    "features_write": (lambda count, folder: _features(count, folder, reading=False), (8_000, 32_000, 128_000)),
    "features_read": (lambda count, folder: _features(count, folder, reading=True), (8_000, 32_000, 128_000)),
    "bags_exact": (lambda count, folder: _bags(count, folder, search="nearest_neighbours"), _SIZES),
    "bags_faiss": (lambda count, folder: _bags(count, folder, search="approximate_neighbours"), _SIZES),
    "ivf_pq": (_compressed_neighbours, (16_000, 48_000, 144_000)),
    "retrieval": (_retrieval, _SIZES),
    "cider": (_cider, _SIZES),
}
"""What prepares the timed part of a stage for a number of rows, and the measured sizes."""


def memory_mib(what: str) -> float:
    """A number of this process from `/proc/self/status`. In MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024


def _child(stage: str, count: int, answers: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = STAGES[stage][0](count, Path(folder))
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
            held, started = memory_mib("VmRSS"), time.process_time()
            further = work()
            seconds = time.process_time() - started
            found = {"rows": count, "cpu_s": seconds, "peak_mib": max(memory_mib("VmHWM") - held, 0.0)}
            answers.put(found | (further() if callable(further) else {}))
    except Exception as error:  # the parent says it
        answers.put({"error": f"{type(error).__name__}: {error}"})


def measure(stage: str, count: int) -> dict[str, Any]:
    """Measure one size of one stage in a separate process. Returns `rows`, `cpu_s` and `peak_mib`."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_child, args=(stage, count, answers))
    process.start()
    process.join()
    answer = {"error": f"exit code {process.exitcode}"} if answers.empty() else answers.get()
    if "error" in answer:
        raise RuntimeError(f"{stage} at {count} rows: {answer['error']}.")
    return answer


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms of sizes and values, which are above 0."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the numbers after each stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="(default: all)")
    args = parser.parse_args(argv)
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["stages"] if RESULTS.is_file() else {}
    for name in args.stages:
        sizes = STAGES[name][1]
        found[name] = runs = [measure(name, count) for count in sizes]
        write_json(RESULTS, {"stages": found, "versions": installed_versions()})
        slopes = [exponent(sizes, [max(run[key], 0.1) for run in runs]) for key in ("cpu_s", "peak_mib")]
        print(f"{name}: time ~ rows^{slopes[0]:.2f}, memory ~ rows^{slopes[1]:.2f}: {runs}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
