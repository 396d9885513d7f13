"""Measures the cost of `--deterministic`: alternating steps with and without it, in one process.

    OMP_NUM_THREADS=1 python scripts/deterministic_cost.py --steps 60

writes `docs/results/deterministic.json` and its table in `docs/reproducibility.md`. Every other step is deterministic,
so that other load of the machine affects both kinds equally. The first two steps of a trainer are discarded.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.apps.experiments.arguments import enable_determinism
from hf_captionrl.captioners import load_captioner
from hf_captionrl.metrics import bootstrap_interval
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer, SmileConfig, SmileTrainer
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.model_files import model_path
from scripts.page_sections import write_section

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reproducibility.md"
RESULTS = ROOT / "docs" / "results" / "deterministic.json"
BATCH = 8
WARM_UP = 2


class InTurn(TrainerCallback):
    """Makes every other step deterministic and measures each, in CPU seconds, or wall time on a GPU."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self._start = 0.0

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Switch."""
        torch.use_deterministic_algorithms(state.global_step % 2 == 1, warn_only=True)
        self._start = self._now()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the time."""
        if state.global_step > WARM_UP:
            self.seconds[state.global_step % 2 == 0].append(self._now() - self._start)


def measure(kind: str, steps: int) -> dict[str, Any]:
    """Time the steps of a trainer on the embedded world.

    Returns the median milliseconds of a step without and with, the ratio of their sums and its 95 % interval.
    """
    in_turn = InTurn()
    data = load_scenes(num_train=64, num_validation=1, num_test=0)["train"]
    captioner = load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"max_steps": steps, "per_device_train_batch_size": BATCH, "save_strategy": "no"}
        settings |= {"report_to": "none", "disable_tqdm": True, "freeze_vision_tower": True, "learning_rate": 1e-5}
        settings |= {"feature_cache_dir": f"{folder}/cache", "use_cpu": not torch.cuda.is_available()}
        trainer: Any
        if kind == "smile":
            trainer = SmileTrainer(captioner, SmileConfig(folder, **settings), data, callbacks=[in_turn])
        else:
            args = SelfRetrievalConfig(folder, max_completion_length=20, guard="off", **settings)
            scorer = load_scorer(model_path("scenes:clip-reward"))
            trainer = SelfRetrievalTrainer(captioner, scorer, args, data, callbacks=[in_turn])
        trainer.train()
    torch.use_deterministic_algorithms(False)
    without, with_ = in_turn.seconds[False], in_turn.seconds[True]
    low, high = bootstrap_interval(with_, weights=without)
    return {
        "step": kind,
        "steps_each": len(with_),
        "without_ms": 1000 * float(np.median(without)),
        "with_ms": 1000 * float(np.median(with_)),
        "ratio": sum(with_) / sum(without),
        "ratio_interval": [low, high],
    }


def table(found: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    threads = found["command"].split("OMP_NUM_THREADS=")[-1].split()[0]
    device = f"{found['device']}, threads: {threads}" if found["device"].startswith("CPU") else found["device"]
    lines = ["| step | device | without | with | ratio, 95 % interval |", "|:--|:--|--:|--:|:--|"]
    for row in found["rows"]:
        low, high = row["ratio_interval"]
        times = f"{row['without_ms']:.1f} ms | {row['with_ms']:.1f} ms"
        name = row["step"].replace("_", "-").replace("smile", "SMILE")
        lines.append(f"| {name} | {device} | {times} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) |")
    if found["device"].startswith("CPU"):
        lines.append("| both | GPU | not run | not run | not run |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="Steps of each trainer, half of them deterministic.")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page_only", action="store_true", help="Write the page from existing results.")
    arguments = parser.parse_args(argv)
    if not arguments.page_only:
        _measure_all(arguments)
    if arguments.output.resolve() == RESULTS:  # other outputs do not update the page
        write_section(PAGE, "deterministic", table(json.loads(RESULTS.read_text(encoding="utf-8"))))
    return arguments.output


def _measure_all(arguments: argparse.Namespace) -> None:
    enable_determinism()  # cuBLAS reads its workspace once, so both kinds of steps share it
    found = {
        "command": f"OMP_NUM_THREADS={torch.get_num_threads()} python scripts/deterministic_cost.py --steps {arguments.steps}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        "clock": "wall" if torch.cuda.is_available() else "CPU time",
        "torch": torch.__version__,
        "batch": BATCH,
        "rows": [measure(kind, arguments.steps) for kind in ("smile", "self_retrieval")],
    }
    write_json(arguments.output, found)
    for row in found["rows"]:
        print(row)


if __name__ == "__main__":
    main()
