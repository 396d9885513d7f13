"""`captionrl truematch lmms-eval`: a benchmark as a task folder for lmms-eval, and the functions that its task calls."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from hf_captionrl.apps.truematch.build import BAGS_FILE, DATA_FOLDER, load_truematch, write_data
from hf_captionrl.apps.truematch.options import LmmsEvalOptions
from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.data import load_captions, open_image
from hf_captionrl.data.columns import id_column
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.options import held_out_scorer_name
from hf_captionrl.metrics import self_retrieval
from hf_captionrl.metrics.suites import spoken
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.retrieval.bags import load_bags, save_bags
from hf_captionrl.utils.io import atomic_write_text, refuse_file
from hf_captionrl.utils.model_files import model_path

TASK = "captionrl_truematch"


def _task_yaml(data: Path, metrics: Sequence[str]) -> str:
    """The task; `!function` is lmms-eval's tag for a function of utils.py."""
    functions = ("doc_to_visual", "doc_to_text", "process_results")
    rows = (f"- {{metric: {m}, aggregation: !function utils.{m}, higher_is_better: true}}" for m in metrics)
    lines = [
        *(f"task: {TASK}", "output_type: generate_until", "dataset_path: parquet", "test_split: test"),
        f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(data / '*.parquet'))}}}}}",
        *(f"{name}: !function utils.{name}" for name in functions),
        *("doc_to_target: image_id", "generation_kwargs: {max_new_tokens: 64, do_sample: false}", "metric_list:"),
        *(*rows, "metadata: [{version: 1}]"),
    ]
    return "\n".join(lines) + "\n"


def write_tasks(options: LmmsEvalOptions) -> None:
    """Write the folder."""
    refuse_file(output := options.output)
    found = load_truematch(options.folder)
    scorer = held_out_scorer_name(found.manifest["source"], options.scorer)
    load_scorer(model_path(scorer))  # an error now and not after the answers of a model
    scorer = str(Path(scorer).resolve()) if Path(scorer).is_dir() else scorer  # lmms-eval may run elsewhere
    images = options if options.dataset else replace(options, dataset=found.images, split="test")
    dataset = load_split(images, quarantine_path=output / "quarantine.jsonl").dataset
    write_data(output, dataset)
    save_bags(output / BAGS_FILE, found.kept)
    metrics = [f"bag_{size}_recall_at_1" for size in sorted(found.kept.rows(list(id_column(dataset))))]
    metrics += ["pool_recall_at_1", "pool_recall_at_5"]
    lines = [
        f'"""Functions of the task {TASK}, written by `captionrl truematch lmms-eval`."""\n',
        "from pathlib import Path\n",
        "from hf_captionrl.apps.truematch.lmms_eval import task\n",
        f"_TASK = task(Path(__file__).parent, {tuple(metrics)!r}, scorer={scorer!r}, prompt={options.prompt!r})",
        *(f"{name} = _TASK.{name}" for name in ("doc_to_visual", "doc_to_text", "process_results")),
        *(f"\n\ndef {metric}(answers):\n    return _TASK.recall({metric!r}, answers)" for metric in metrics),
    ]
    atomic_write_text(output / "utils.py", "\n".join(lines) + "\n")
    atomic_write_text(output / f"{TASK}.yaml", _task_yaml((output / DATA_FOLDER).resolve(), metrics))
    said = {"output": str(output), "task": TASK, "metrics": metrics, "images": len(dataset), "scorer": scorer}
    text = f"{len(dataset):,} images. Use: python -m lmms_eval --include_path {shlex.quote(str(output))} --tasks {TASK} --model ..."
    print(json.dumps(said) if options.json else text)


class Task:
    """The functions of a task folder; data and scorer are loaded for the first metric."""

    def __init__(self, folder: Path, metrics: Sequence[str], *, scorer: str, prompt: str) -> None:
        self.folder, self.metrics, self.scorer, self.prompt = folder, metrics, scorer, prompt
        self._text = lru_cache(maxsize=1)(lambda texts: self._pool[0].text_features(spoken(texts)).float().cpu())

    def doc_to_visual(self, doc: Mapping[str, Any]) -> list[Any]:
        """The image of a row."""
        return [open_image(doc["image"])]

    def doc_to_text(self, doc: Mapping[str, Any], lmms_eval_specific_kwargs: Any = None) -> str:
        """The question about it."""
        return self.prompt

    def process_results(self, doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
        """What each metric needs of an answer."""
        return dict.fromkeys(self.metrics, (str(doc["image_id"]), results[0].strip()))

    @cached_property
    def _pool(self) -> tuple[Any, list[str], Any, dict[int, list[list[int]]]]:
        """Scorer; ids and features of all images; rows of the bags by their size."""
        dataset = load_captions(str(self.folder / DATA_FOLDER), split="test", require_captions=False)
        scorer, ids = load_scorer(model_path(self.scorer)), list(id_column(dataset))
        return scorer, ids, scorer_features(scorer, dataset), load_bags(self.folder / BAGS_FILE).rows(ids)

    def recall(self, metric: str, answers: Sequence[tuple[str, str]]) -> float:
        """Recall of the images of all answers, in bags of one size or in the whole pool."""
        _, ids, features, bags = self._pool
        where, _, key = metric.removeprefix("bag_").partition("_")
        row_of = {image_id: row for row, image_id in enumerate(ids)}
        targets = [row_of[image_id] for image_id, _ in answers]
        chosen = None
        if where != "pool":  # under --limit, bags are incomplete
            chosen = [bag for bag in bags[int(where)] if set(bag) <= set(targets)]
            if not chosen:
                return math.nan
        text = self._text(tuple(caption for _, caption in answers))  # every metric gets the same answers
        return float(self_retrieval(text, features, targets=targets, bags=chosen, num_bootstrap=0)[key])


task = cache(Task)
"""lmms-eval runs utils.py again for every function that a task names."""
