"""Trains with captions of a policy that is several updates old, as asynchronous generation does.

    OMP_NUM_THREADS=1 python scripts/stale_policies.py

writes `docs/results/stale_policies.json` and its table in `docs/self_retrieval.md`. Every run is the one of
`recipes/self_retrieval_blip.py` with a bank of distractors; only the weights that write the captions differ. With the ratio, the
loss has the clipped ratio of the present policy to the one that wrote the caption, otherwise every caption counts as if the present
policy had written it. Finished runs are kept in `--runs_dir`, and the same command continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a program, only scripts/ is on the path

from hf_captionrl import SelfRetrievalTrainer, load_captioner, load_captions, load_scorer  # noqa: E402
from hf_captionrl.metrics.table import installed_versions  # noqa: E402
from hf_captionrl.trainers.rollout import token_log_probs  # noqa: E402
from hf_captionrl.utils.io import write_json  # noqa: E402
from hf_captionrl.utils.model_files import model_path  # noqa: E402
from recipes.self_retrieval_blip import parse_args  # noqa: E402
from scripts.page_sections import write_section  # noqa: E402
from scripts.run_seeds import aggregate  # noqa: E402

PAGE = ROOT / "docs" / "self_retrieval.md"
RESULTS = ROOT / "docs" / "results" / "stale_policies.json"
SETTINGS = ((0, False), (2, False), (2, True), (8, False), (8, True))
"""Updates between the policy that writes and the one that is trained, and whether the loss has their ratio."""

COLUMNS = {
    "eval_rd100_recall_at_1": "R@1 RD100, held-out ↑",
    "eval_reward_rd100_recall_at_1": "R@1 RD100, reward scorer ↑",
    "eval_length": "words",
}


class StaleTrainer(SelfRetrievalTrainer):
    """Captions are written by the policy of `updates` steps ago, or by the first one."""

    def __init__(self, *args: Any, updates: int, uses_ratio: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uses_ratio = uses_ratio
        self.past: deque[dict[str, torch.Tensor]] = deque(maxlen=updates + 1)

    def begin_step(self) -> None:
        self.past.append(_trained(self.model))
        with policy(self.model, self.past[0]):
            super().begin_step()
            if self.uses_ratio:
                for inputs in self._step_inputs:
                    with torch.no_grad():
                        inputs["old_log_probs"] = token_log_probs(self.captioner, inputs, self.args)[0]


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


@contextmanager
def policy(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """The model with other weights."""
    parameters = dict(model.named_parameters())
    present = _trained(model)

    def load(values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)

    load(weights)
    try:
        yield
    finally:
        load(present)


def train(folder: Path, *, updates: int, uses_ratio: bool, seed: int, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """One run; numbers of its last step on the test split."""
    *_, config = parse_args(["--use_cpu", "--seed", str(seed), "--output_dir", str(folder), *arguments])
    args = replace(
        config,
        bag_schedule=None,
        distractor_scope="bank",
        guard="off",
        eval_strategy="no",
        save_strategy="no",
        load_best_model_at_end=False,
        metric_for_best_model=None,
        disable_tqdm=True,
    )
    trainer = StaleTrainer(
        load_captioner(model_path("scenes:blip-mle")),
        load_scorer(model_path("scenes:clip-reward")),
        args,
        load_captions("scenes", split="train"),
        load_captions("scenes", split="test"),
        held_out_scorer=load_scorer(model_path("scenes:siglip-held-out")),
        updates=updates,
        uses_ratio=uses_ratio,
    )
    trainer.train()
    found = trainer.evaluate()
    return {name: float(found[name]) for name in COLUMNS}


def name_of(updates: int, uses_ratio: bool) -> str:
    """Name of a setting."""
    return f"{updates} updates{', ratio' if uses_ratio else ''}"


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [f"| captions written by a policy | {' | '.join(COLUMNS.values())} |", "|:--|" + "--:|" * len(COLUMNS)]
    for row in found["rows"]:
        cells = [f"{row[name]['mean']:.3f} ±{row[name]['standard_error']:.3f}" for name in COLUMNS]
        lines.append(f"| {row['name'].replace('updates', 'updates old')} | {' | '.join(cells)} |")
    seeds = ", ".join(map(str, found["seeds"]))
    return "\n".join([*lines, "", f"Mean and standard error over seeds {seeds}. Made by `{found['command']}`."])


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the result and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs_dir", type=Path, default=ROOT / "outputs" / "stale_policies")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs = []
    for seed in arguments.seeds:
        rows = []
        for updates, uses_ratio in SETTINGS:
            name = name_of(updates, uses_ratio)
            path = arguments.runs_dir / f"{name.replace(', ', '-').replace(' ', '-')}-seed-{seed}.json"
            if not path.is_file():
                found = train(path.with_suffix(""), updates=updates, uses_ratio=uses_ratio, seed=seed)
                write_json(path, {"name": name, **found})
            rows.append(json.loads(path.read_text(encoding="utf-8")))
        runs.append(rows)
    found = {
        "command": "OMP_NUM_THREADS=1 python scripts/stale_policies.py",
        "seeds": arguments.seeds,
        "rows": aggregate(runs),
        "versions": installed_versions(),
    }
    write_json(RESULTS, found)
    write_section(PAGE, "stale_policies", table(found))
    print(table(found))


if __name__ == "__main__":
    main()
