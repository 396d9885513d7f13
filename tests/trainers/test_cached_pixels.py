"""Training from cached pixels: the same bits as from images, without opening one."""

import pytest
import torch
from PIL import Image

from hf_captionrl.data.video import VIDEO_FRAMES
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer, SmileConfig, SmileTrainer
from tests.tiny import tiny_captioner

from .one_step import PLAIN_SGD, tiny_trainer, weights

SETTINGS = {
    **PLAIN_SGD,
    "freeze_vision_tower": False,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "generation_num_beams": 1,
    "generation_max_new_tokens": 6,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "report_to": "none",
}


def trainer_of(kind, folder, scenes, scorer=None, **settings):
    settings = {**SETTINGS, "feature_cache_dir": str(folder / "cache"), **settings}
    data = {"train_dataset": scenes["train"], "eval_dataset": scenes["validation"]}
    if kind == "smile":
        return SmileTrainer(tiny_captioner("blip"), SmileConfig(str(folder / "out"), **settings), **data)
    config = CaptionRLConfig(str(folder / "out"), **settings, num_generations=2, max_completion_length=6, guard="off")
    return CaptionRLTrainer(tiny_captioner("git"), ["self_retrieval"], config, scorer=scorer, **data)


def outcome(trainer):
    """Losses of the steps and of the evaluation, captions, and weights."""
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 2
    captions = trainer.generate_captions(trainer.eval_dataset)
    return losses, trainer.evaluate()["eval_loss"], captions, weights(trainer)


@pytest.mark.parametrize("kind", ["smile", "caption-rl"])
def test_losses_captions_and_weights_are_equal_to_the_last_bit(tmp_path, scenes, scorer, kind):
    plain = outcome(trainer_of(kind, tmp_path / "plain", scenes, scorer))
    decoded = outcome(trainer_of(kind, tmp_path / "decoded", scenes, scorer, image_decoder="torchvision"))
    cached = outcome(trainer_of(kind, tmp_path / "cached", scenes, scorer, cache_pixels=True))
    for found in (decoded, cached):
        assert found[:3] == plain[:3]
        assert all(torch.equal(value, plain[3][name]) for name, value in found[3].items())
    assert list((tmp_path / "cached" / "cache").glob("pixels_uint8-*"))
    assert not list((tmp_path / "plain").glob("cache/pixels*"))


def test_a_run_with_a_warm_cache_opens_no_image(tmp_path, scenes, monkeypatch):
    cold = outcome(trainer_of("smile", tmp_path, scenes, cache_pixels="uint8"))
    jpeg = outcome(trainer_of("smile", tmp_path, scenes, cache_pixels="jpeg"))
    assert jpeg[0][0] != cold[0][0]
    assert jpeg[0][0] == pytest.approx(cold[0][0], rel=0.02)

    def refuse(*args, **kwargs):
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", refuse)
    warm = outcome(trainer_of("smile", tmp_path, scenes, cache_pixels="uint8", dataloader_num_workers=1))
    assert warm[:3] == cold[:3]
    with pytest.raises(Exception, match="an image was opened"):
        outcome(trainer_of("smile", tmp_path / "plain", scenes))


def test_cache_pixels_is_a_switch_or_a_form(tmp_path):
    expected = {True: "uint8", "true": "uint8", False: None, "false": None, None: None, "jpeg": "jpeg"}
    assert {value: SmileConfig(str(tmp_path), cache_pixels=value).cache_pixels for value in expected} == expected
    with pytest.raises(ValueError, match="cache_pixels and cache_image_features"):
        SmileConfig(str(tmp_path), cache_pixels=True, cache_image_features=True, freeze_vision_tower=True)


def test_streams_and_videos_are_refused(tmp_path, scenes):
    config = SmileConfig(str(tmp_path), **SETTINGS, cache_pixels=True, feature_cache_dir=str(tmp_path / "cache"))
    decoding = SmileConfig(str(tmp_path), **SETTINGS, image_decoder="torchvision")
    stream = scenes["train"].to_iterable_dataset()
    videos = scenes["train"].add_column(VIDEO_FRAMES, [4] * len(scenes["train"]))
    for name, args, data in (
        ("cache_pixels", config, stream),
        ("image_decoder", decoding, stream),
        ("videos .*cache_pixels", config, videos),
    ):
        with pytest.raises(ValueError, match=name):
            SmileTrainer(tiny_captioner("blip"), args, data)


class OnAnotherDevice(torch.Tensor):
    """Refuses every operation but the copy to the CPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.cpu:
            raise AssertionError(f"{func} of a tensor on another device")
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].clone().as_subclass(torch.Tensor)


def test_evaluations_compare_features_of_a_scorer_on_another_device(monkeypatch, scenes, held_out_scorer, tmp_path):
    rows = scenes["validation"]
    captions = [texts[0] for texts in rows["captions"]]
    evaluator = Evaluator(rows, held_out_scorer, None, seed=0, cache_dir=str(tmp_path))
    trainer = tiny_trainer(tmp_path / "out", scenes, trainer_arguments={"scorer": held_out_scorer})

    def found():
        metrics = trainer.evaluate()
        times = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
        return {k: v for k, v in metrics.items() if k not in times} | evaluator.row("x", captions)

    expected, plain = found(), held_out_scorer.text_features
    assert {"eval_recall_at_1", "pool_recall_at_1"} <= expected.keys()
    monkeypatch.setattr(held_out_scorer, "text_features", lambda texts: plain(texts).as_subclass(OnAnotherDevice))
    assert found() == expected
