"""What the recipes share, with trainers that only count: curves, limits, the row of the references, and what is printed."""

import dataclasses
from types import SimpleNamespace

import datasets
import pytest
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

from hf_captionrl.apps.experiments.report import Run, _Printer, _Progress, fold_logs, train_runs
from hf_captionrl.apps.experiments.self_retrieval import SelfRetrievalRecipeConfig
from hf_captionrl.apps.experiments.self_retrieval import runs_of as self_retrieval_runs
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.evaluation.options import EvaluationArguments


class Counting:
    """A trainer of two evaluations, whose captions get longer by `gain` words before the second one."""

    def __init__(self, length, gain):
        self.length, self.gain, self.evaluated = length, gain, 0
        self.state = SimpleNamespace(log_history=[])
        self.captioner = self.callback = None
        self.args = SimpleNamespace(
            generation_num_beams=1,
            disable_tqdm=True,
            output_dir="nowhere",
            save_total_limit=None,
            overwrite_output_dir=False,
        )
        self.selection = {"step": gain} if gain > 1 else None
        self.collapsed = self.guard = self.dose = None

    def evaluate(self):
        self.evaluated += 1
        return {"eval_length": float(self.length)}

    def train(self, resume_from_checkpoint=None):
        for step in (4, 8):
            self.length += self.gain if step == 8 else 0
            self.state.global_step, self.state.epoch = step, step / 8
            self.state.log_history.append({"epoch": step / 8, "step": step, "eval_length": float(self.length)})
            self.callback.on_evaluate(None, self.state, None)

    def add_callback(self, callback):
        self.callback = callback

    def remove_callback(self, callback):
        pass

    def pop_callback(self, callback):
        pass

    scorer = None

    def generate_captions(self, dataset, num_beams=1):
        return ["word " * self.length]

    def save_model(self):
        pass

    def is_world_process_zero(self):
        return True


def test_curves_begin_at_the_captioner_that_the_run_starts_from(tmp_path):
    evaluator = SimpleNamespace(
        row=lambda name, captions, more_captions=None: {"name": name, "length": len(captions[0].split())},
        reference_row=lambda: ({"name": "r"}, []),
        bag_images=None,
        arguments=EvaluationArguments(learning_curves=True),
    )
    trainers = {"XE": Counting(2, 3), "alone": Counting(2, 7), "SLE": Counting(5, 1), "SLL": Counting(5, 2)}
    starts = {"XE": "MLE", "alone": "MLE", "SLE": "XE", "SLL": "XE"}
    configs = {name: SelfRetrievalRecipeConfig(str(tmp_path / name), use_cpu=True) for name in starts}
    runs = [Run(n, configs[n], lambda config, n=n: trainers[n], start) for n, start in starts.items()]
    found = train_runs(runs, evaluator, {"test": None})
    for curves in (found.histories, found.curves):
        assert {name: [(p["epoch"], p["length"]) for p in points] for name, points in curves.items()} == {
            "XE": [(0.0, 2), (0.5, 2), (1.0, 5)],
            "alone": [(0.0, 2), (0.5, 2), (1.0, 9)],
            "SLE": [(0.0, 5), (0.5, 5), (1.0, 6)],
            "SLL": [(0.0, 5), (0.5, 5), (1.0, 7)],
        }
    assert [point["step"] for point in found.curves["SLE"]] == [0, 4, 8]
    assert found.selected == {"XE": {"step": 3}, "alone": {"step": 7}, "SLL": {"step": 2}}
    # Runs from the same captioner begin at the same point, which is looked at once.
    assert {name: trainer.evaluated for name, trainer in trainers.items()} == {"XE": 1, "SLE": 1, "SLL": 0, "alone": 0}


def test_logs_are_shown_without_speeds_and_no_wider_than_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    numbers = {f"eval_metric_{n}": n / 7 for n in range(9)}
    progress, printed = _Progress(), []
    args = SimpleNamespace(disable_tqdm=False)
    progress.on_log(args, SimpleNamespace(global_step=3), None, numbers)  # outside of training
    progress.training_bar = SimpleNamespace(write=printed.append)
    speeds = {"eval_runtime": 2.0, "eval_samples_per_second": 1.0, "total_flos": 1e9}
    logs = numbers | speeds | {"note": "text", "epoch": 0}
    progress.on_log(args, SimpleNamespace(global_step=3), None, logs)
    args.disable_tqdm = True  # as `captionrl train` does
    for is_main, max_steps in ((True, 9), (False, 9), (True, 0)):
        state = SimpleNamespace(global_step=3, is_local_process_zero=is_main, max_steps=max_steps)
        _Printer().on_log(args, state, None, logs)
    assert capsys.readouterr().out == f"{printed[0]}\n"
    expected = ["step", "3:", *(f"eval_metric_{n}={n / 7:.4g}," for n in range(9)), "note=text,", "epoch=0"]
    assert [text.split() for text in printed] == [expected]
    assert max(map(len, printed[0].splitlines())) <= 80


@pytest.mark.parametrize(("theirs", "ours"), [(ProgressCallback, _Progress), (PrinterCallback, _Printer)])
def test_the_printing_of_transformers_is_replaced_once_also_when_asked_twice(theirs, ours):
    handler = CallbackHandler([theirs()], None, None, None, None)
    for _ in range(2):
        fold_logs(handler)
        assert [type(callback) for callback in handler.callbacks if not isinstance(callback, DefaultFlowCallback)] == [
            ours
        ]


def test_a_run_differs_in_what_the_list_names_and_in_nothing_else(tmp_path):
    config = SelfRetrievalRecipeConfig(str(tmp_path), use_cpu=True)
    changes = {"retrieval_weight": 0, "cider_weight": 1.0}
    run = self_retrieval_runs(config, {"other": changes})["other"]
    values, others = ({f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for c in (config, run))
    assert others == values | changes | {"output_dir": str(tmp_path / "model-other")}


def reference_row(references):
    ids = [str(row) for row in range(len(references))]
    dataset = datasets.Dataset.from_dict({"image_id": ids, "captions": references})
    return Evaluator(dataset, None, None, seed=0).reference_row()


def test_a_reference_is_compared_with_the_others_and_not_with_itself():
    row, captions = reference_row([["a dog runs"] * 2, ["a cat sits"] * 2, ["two birds fly"] * 2])
    assert captions == ["a dog runs", "a cat sits", "two birds fly"]
    assert row["cider_d"] == pytest.approx(7.5)  # no word is the fourth of four
    row, captions = reference_row([["a dog runs"], ["a cat sits", "a cat"], ["two birds fly"]])
    assert len(captions) == 3
    assert row["cider_d"] is None
    assert "cider_d_ci" not in row
    assert row["cider_d_reason"] == "an image has only one reference"
    assert row["length"] > 2
