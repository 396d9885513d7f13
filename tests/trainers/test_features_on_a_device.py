"""A scorer on a GPU gives features there; those of images come from the cache, on the CPU."""

import torch

from hf_captionrl.evaluation.evaluator import Evaluator
from tests.trainers.test_evaluation import make


class OnAnotherDevice(torch.Tensor):
    """Refuses every operation but the copy to the CPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.cpu:
            raise AssertionError(f"{func} of a tensor on another device")
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].clone().as_subclass(torch.Tensor)


def on_another_device(monkeypatch, scorer):
    plain = scorer.text_features
    monkeypatch.setattr(scorer, "text_features", lambda texts: plain(texts).as_subclass(OnAnotherDevice))


def test_evaluator_of_recipes(monkeypatch, scenes, scorer, held_out_scorer, tmp_path):
    rows = scenes["validation"]
    captions = [texts[0] for texts in rows["captions"]]
    evaluator = Evaluator(rows, held_out_scorer, None, seed=0, cache_dir=str(tmp_path), reward_scorer=scorer)
    expected = evaluator.row("x", captions)
    for each in (scorer, held_out_scorer):
        on_another_device(monkeypatch, each)
    assert evaluator.row("x", captions) == expected
    assert expected["pool_recall_at_1"] > 0


def test_evaluation_of_trainers(monkeypatch, scenes, scorer, tmp_path):
    trainer = make(tmp_path / "out", scenes, trainer_arguments={"scorer": scorer})
    expected = trainer.evaluate()
    on_another_device(monkeypatch, scorer)
    found = trainer.evaluate()
    times = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert {k: v for k, v in found.items() if k not in times} == {k: v for k, v in expected.items() if k not in times}
    assert "eval_recall_at_1" in found
