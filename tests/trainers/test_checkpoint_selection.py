"""The selected checkpoint is printed and stored with the model, with its ties."""

import json

import torch
from safetensors.torch import load_file

from hf_captionrl.captioners import load_captioner
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.trainers.checkpoints import SELECTION_FILE
from tests.tiny import tiny_captioner


class Evaluated(SmileTrainer):
    """Evaluations with given values."""

    def evaluate(self, *args, **kwargs):
        metrics = {"eval_score": self.values[self.state.global_step]}
        self.log(metrics)
        return metrics


def trained(folder, values, resume=False, **settings):
    """One evaluation and checkpoint per step; the value of step 0 is that before training."""
    arguments = {
        "max_steps": len(values) - 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
    scenes = load_scenes(num_train=4, num_validation=1, num_test=0)
    trainer = Evaluated(
        tiny_captioner("blip"), SmileConfig(str(folder), **arguments), scenes["train"], scenes["validation"]
    )
    trainer.values = values
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def test_selection_is_printed_and_stored_with_the_model(tmp_path, capsys):
    trainer = trained(tmp_path, [9.0, 0.25, 0.5, 0.5, 0.125, 0.5], eval_on_start=True)
    expected = {
        "step": 2,
        "metric": "eval_score",
        "value": 0.5,
        "greater_is_better": True,
        "evaluations": 5,
        "ties": [3, 5],
        "tie_rule": "earliest",
    }
    said = "Selected checkpoint-2: eval_score = 0.5, the highest of 5 evaluations; 2 tied (steps 3, 5): the earliest is taken."
    assert capsys.readouterr().out.splitlines().count(said) == 1
    assert trainer.selection == expected
    trainer.save_model()
    assert json.loads((tmp_path / SELECTION_FILE).read_text()) == expected
    kept, best, last = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path, tmp_path / "checkpoint-2", tmp_path / "checkpoint-5")
    )
    assert all(torch.equal(kept[name], best[name]) for name in best)
    assert any(not torch.equal(kept[name], last[name]) for name in last)
    assert not (tmp_path / "checkpoint-2" / SELECTION_FILE).exists()
    load_captioner(str(tmp_path))


def test_lowest_value_without_ties(tmp_path, capsys):
    trained(tmp_path, [0.0, 3.0, 1.0, 2.0], greater_is_better=False)
    assert "Selected checkpoint-2: eval_score = 1, the lowest of 3 evaluations; no ties." in capsys.readouterr().out


def test_resumed_run_counts_the_evaluations_before(tmp_path, capsys):
    trained(tmp_path, [0.0, 3.0, 1.0])
    capsys.readouterr()
    trainer = trained(tmp_path, [0.0, 3.0, 1.0, 3.0], resume=True)
    assert (trainer.selection["step"], trainer.selection["evaluations"], trainer.selection["ties"]) == (1, 3, [3])


def test_nothing_is_selected_by_default(tmp_path, capsys):
    trainer = trained(tmp_path, [0.0, 1.0, 2.0], load_best_model_at_end=False)
    trainer.save_model()
    assert trainer.selection is None
    assert "elected" not in capsys.readouterr().out
    assert not (tmp_path / SELECTION_FILE).exists()


def test_report_of_a_recipe_contains_the_selection(tmp_path):
    from hf_captionrl.metrics.table import write_results
    from tests.evaluation.test_table import COLUMNS, make_row

    write_results(
        tmp_path, [make_row()], columns=COLUMNS, seed=0, config={}, more={"selected": {"SMILE": {"step": 2}}}
    )
    assert json.loads((tmp_path / "results.json").read_text())["selected"] == {"SMILE": {"step": 2}}
    write_results(tmp_path, [make_row()], columns=COLUMNS, seed=0, config={}, more={"selected": {}})
    assert "selected" not in json.loads((tmp_path / "results.json").read_text())


def test_best_checkpoint_is_reported_if_not_loaded(tmp_path, capsys):
    settings = {"load_best_model_at_end": False, "save_strategy": "best"}
    trainer = trained(tmp_path, [0.0, 1.0, 3.0, 2.0], **settings)
    assert (trainer.selection["step"], trainer.selection["value"]) == (2, 3.0)
    assert trainer.selection["kept_instead"] == "load_best_model_at_end is False, and the weights of step 3 are kept"
    assert "Best was checkpoint-2: eval_score = 3" in capsys.readouterr().out
    trainer.save_model()
    assert json.loads((tmp_path / SELECTION_FILE).read_text()) == trainer.selection
    trainer = trained(tmp_path / "last", [0.0, 1.0, 2.0], **settings)
    assert "Selected checkpoint-2: eval_score = 2, the highest of 2" in capsys.readouterr().out
    assert "kept_instead" not in trainer.selection
