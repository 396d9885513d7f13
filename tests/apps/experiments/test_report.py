"""What the recipes share, with trainers that only count: curves, limits, and the row of the references."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from hf_captionrl.apps.experiments.report import Run, plan_runs, settings_of, train_runs
from hf_captionrl.apps.experiments.self_retrieval import SelfRetrievalRecipeConfig
from hf_captionrl.apps.experiments.self_retrieval import runs_of as self_retrieval_runs
from hf_captionrl.apps.experiments.smile import SmileArguments, SmileRecipeConfig, _first
from hf_captionrl.apps.experiments.smile import runs_of as smile_runs
from hf_captionrl.evaluation.evaluator import Evaluator, draw_references
from recipes import self_retrieval_blip, self_retrieval_clipcap
from recipes.sle_blip import SLEBlipConfig, describe_reward


class Counting:
    """A trainer whose captions get longer by `gain` words in training."""

    def __init__(self, length, gain):
        self.length, self.gain, self.evaluated = length, gain, 0
        self.state = SimpleNamespace(log_history=[])
        self.captioner = None
        self.args = SimpleNamespace(disable_tqdm=True)
        self.selection = {"step": gain} if gain > 1 else None
        self.collapsed = self.guard = None

    def evaluate(self):
        self.evaluated += 1
        return {"eval_length": float(self.length)}

    def train(self, resume_from_checkpoint=None):
        self.length += self.gain
        self.state.log_history.append({"epoch": 1.0, "eval_length": float(self.length)})

    def add_callback(self, callback):
        self.callback = callback

    def remove_callback(self, callback):
        pass

    def generate_captions(self, dataset):
        return ["word " * self.length]

    def save_model(self):
        pass

    def is_world_process_zero(self):
        return True


def fake_evaluator(**attributes):
    return SimpleNamespace(
        row=lambda name, captions, more_captions=None: {
            "name": name,
            "length": len(captions[0].split()),
            "cider_d": None,
        },
        reference_row=lambda: ({"name": "r"}, []),
        bag_images=None,
        **{"learning_curves": False, **attributes},
    )


def test_learning_curves_have_the_start_and_each_evaluation_of_test_captions(tmp_path):
    first, second = Counting(2, 3), Counting(5, 1)
    for trainer in (first, second):
        train = trainer.train

        def evaluating(resume_from_checkpoint=None, trainer=trainer, train=train):
            for step in (4, 8):
                trainer.state.global_step, trainer.state.epoch = step, step / 8
                if step == 8:
                    train()
                trainer.callback.on_evaluate(None, trainer.state, None)

        trainer.train = evaluating
    runs = [Run("XE", "XE", lambda: first), Run("SLE", "SLE", lambda: second, starts_from="XE")]
    found = train_runs(runs, fake_evaluator(learning_curves=True), None, resume=False, output_dir=tmp_path)
    assert found.curves == {
        "XE": [
            {"length": 2, "step": 0, "epoch": 0.0},
            {"length": 2, "step": 4, "epoch": 0.5},
            {"length": 5, "step": 8, "epoch": 1.0},
        ],
        "SLE": [
            {"length": 5, "step": 0, "epoch": 0.0},
            {"length": 5, "step": 4, "epoch": 0.5},
            {"length": 6, "step": 8, "epoch": 1.0},
        ],
    }


def test_a_curve_begins_at_the_captioner_that_the_run_starts_from(tmp_path):
    trainers = {"XE": Counting(2, 3), "SLE": Counting(5, 1), "SLL": Counting(5, 2), "alone": Counting(2, 7)}
    runs = [Run(name, name, lambda name=name: trainers[name]) for name in ("XE", "alone")]
    runs += [Run(name, name, lambda name=name: trainers[name], starts_from="XE") for name in ("SLE", "SLL")]
    evaluator = fake_evaluator()
    found = train_runs(runs, evaluator, None, resume=False, output_dir=tmp_path)
    curves = {name: [(p["epoch"], p["length"]) for p in points] for name, points in found.histories.items()}
    assert curves == {
        "XE": [(0.0, 2.0), (1.0, 5.0)],
        "alone": [(0.0, 2.0), (1.0, 9.0)],
        "SLE": [(0.0, 5.0), (1.0, 6.0)],
        "SLL": [(0.0, 5.0), (1.0, 7.0)],
    }
    assert found.selected == {"XE": {"step": 3}, "alone": {"step": 7}, "SLL": {"step": 2}}
    # Runs from the same captioner begin at the same point, which is looked at once.
    assert {name: trainer.evaluated for name, trainer in trainers.items()} == {"XE": 1, "SLE": 1, "SLL": 0, "alone": 0}


def test_the_limit_of_steps_is_not_that_of_the_epochs_before(tmp_path):
    config = SmileRecipeConfig(str(tmp_path), max_steps=1000, use_cpu=True)
    first = _first(config, SmileArguments(mle_epochs=2), Path(tmp_path / "first"))
    assert (first.num_train_epochs, first.max_steps) == (2, -1)
    assert config.max_steps == 1000


def values_of(config):
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    "changes", [{"cider_weight": 0.5}, {"retrieval_weight": 0, "cider_weight": 1.0}, {"beta": 0.1}]
)
def test_a_run_differs_in_what_the_list_names_and_in_nothing_else(tmp_path, changes):
    config = SelfRetrievalRecipeConfig(str(tmp_path), use_cpu=True)
    run = self_retrieval_runs(config, {"other": changes})["other"]
    assert values_of(run) == values_of(config) | changes | {"output_dir": str(tmp_path / "model-other")}


def test_every_run_with_cider_names_its_baseline():
    """CIDEr-D needs a baseline per image; nothing sets it when only the weight changes."""
    listed = 0
    for recipe, argv in (
        (self_retrieval_blip, []),
        (self_retrieval_blip, ["--row", "ndlb/scenes/hacking"]),
        (self_retrieval_clipcap, []),
    ):
        *_, bags, config = recipe.parse_args([*argv, "--use_cpu"])
        for name, changes in bags.named_variants.items():
            if changes.get("cider_weight"):
                listed += 1
                assert changes["baseline"] == "greedy", name
                assert self_retrieval_runs(config, {name: changes})[name].do_sample
    assert listed == 2


def test_the_control_of_smile_is_plain_maximum_likelihood_and_the_list_says_so(tmp_path):
    config = SmileRecipeConfig(str(tmp_path), subset="reverse", first_token="shift", use_cpu=True)
    runs = smile_runs(config, [1.0, 0.01])
    own = "SMILE (reverse subset, first token: shift)"
    mixture = "SMILE (lambda=0.01, reverse subset, first token: shift)"
    assert settings_of(runs) == {
        "MLE+MLE": {"mle_weight": 1.0, "subset": "caption", "first_token": None},
        own: {"mle_weight": 0.0, "subset": "reverse", "first_token": "shift"},
        mixture: {"mle_weight": 0.01, "subset": "reverse", "first_token": "shift"},
    }
    assert runs[own].output_dir == str(tmp_path / "model")


def test_a_run_with_an_unknown_argument_is_an_error(tmp_path):
    config = SmileRecipeConfig(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"'x' sets 'mle_wieght'.*Use one of its arguments"):
        plan_runs(config, {"x": {"mle_wieght": 1.0}}, own="x")


def evaluator_of(references):
    ids = [str(row) for row in range(len(references))]
    return Evaluator(datasets.Dataset.from_dict({"image_id": ids, "captions": references}), None, None, seed=0)


def test_a_reference_is_compared_with_the_others():
    references = [["a dog runs", "a dog runs"], ["a cat sits", "a cat sits"], ["two birds fly", "two birds fly"]]
    row, captions = evaluator_of(references).reference_row()
    assert captions == [group[0] for group in references]
    assert row["cider_d"] == pytest.approx(7.5)  # no word is the fourth of four
    assert draw_references([["a", "b"], ["c"], []], 0)[1:] == [["c"], []]


def test_a_single_reference_is_not_compared_with_itself():
    row, captions = evaluator_of([["a dog runs"], ["a cat sits", "a cat"], ["two birds fly"]]).reference_row()
    assert len(captions) == 3
    assert row["cider_d"] is None
    assert "cider_d_ci" not in row
    assert row["cider_d_reason"] == "an image has only one reference"
    assert row["length"] > 2


def test_sle_card_describes_the_reward(tmp_path):
    def said(**changes):
        return describe_reward(SLEBlipConfig(str(tmp_path), use_cpu=True, **changes))

    assert said(alpha=0.75) == (
        "0.75 times CIDEr-D with the end token, plus 0.25 times the diversity of the captions of an image (the bleu34 "
        "distance); 5 sampled captions per image; baseline 'greedy'."
    )
    other = said(alpha=0.5, diversity="multi_reference", baseline="leave_one_out", entropy_weight=0.03)
    assert ", plus 0.03 times the entropy of each word; " in other
    assert other.endswith("; baseline 'leave_one_out'.")
    assert "bleu34" not in other
    alone = said(alpha=1.0, baseline="none", cider_eos=False, cider_frequencies="batch")
    assert alone == (
        "CIDEr-D without the end token and document frequencies of the batch; 5 sampled captions per image; no baseline."
    )
