"""Training data: cached pixels give the bits of images in memory, or are refused."""

import pytest
import torch
from PIL import Image

from hf_captionrl.data.columns import VIDEO_FRAMES
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer, SelfRetrievalTrainer, SmileConfig, SmileTrainer
from tests.data.photos import embedded
from tests.tiny import tiny_captioner
from tests.trainers.one_step import PLAIN_SGD, tiny_trainer, weights

WORDS = "a red cat on the tree and two small birds near house".split()


def say(number):
    return [" ".join(WORDS[k : k + 3 + number % 3]) for k in range(number % 4, number % 4 + 2)]


@pytest.fixture(scope="module")
def data():
    return embedded(16, captions_of=say)


def test_streams_and_pixels_of_videos_are_refused(tmp_path, data):
    videos = data.add_column(VIDEO_FRAMES, [4] * len(data))
    for rows, settings, message in (
        (data.to_iterable_dataset(), {}, "IterableDataset"),
        (videos, {"cache_pixels": True}, "videos.*cache_pixels"),
    ):
        config = SmileConfig(str(tmp_path), feature_cache_dir=str(tmp_path / "cache"), **PLAIN_SGD, **settings)
        with pytest.raises(ValueError, match=message):
            SmileTrainer(tiny_captioner("blip"), config, train_dataset=rows)


# The longest caption, in training data and in rollouts


def chosen(folder, *numbers, **settings):
    """`max_caption_length` for 32 captions with these numbers of words in turn, and how many of 16 in a batch have an end."""
    say = lambda i: ["cat " * numbers[(2 * i + k) % len(numbers)] for k in (0, 1)]  # noqa: E731
    config = SmileConfig(str(folder), **PLAIN_SGD, **settings)
    trainer = SmileTrainer(tiny_captioner("blip"), config, embedded(16, captions_of=say))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(16)])
    last = batch["input_ids"][range(16), batch["attention_mask"].sum(1) - 1]
    return trainer.args.max_caption_length, int((last == trainer.captioner.eos_token_id).sum())


def test_the_longest_caption_is_the_99th_percentile_and_truncated_captions_are_counted(tmp_path, caplog):
    assert chosen(tmp_path, 5) == (40, 16)
    assert chosen(tmp_path, 45) == (47, 16)  # with start and end token
    assert chosen(tmp_path, *[5] * 31, 58) == (60, 16)
    assert not caplog.records
    # Control: the former default, which is not refused where it was set.
    assert chosen(tmp_path, 45, max_caption_length=40) == (40, 0)
    assert "32 of 32 captions are truncated at 40 tokens; the model never sees an end" in caplog.text
    assert "max_caption_length=47" in caplog.text
    # The model has 64 positions.
    assert chosen(tmp_path, 45, 45, 70, 70, 45, 45)[0] == 64
    assert "captions are truncated at 64 tokens" in caplog.text
    with pytest.raises(ValueError, match="max_caption_length"):
        chosen(tmp_path, 70)


def test_the_longest_completion_is_what_the_reward_scorer_reads(tmp_path, scenes, scorer):
    settings = {**PLAIN_SGD, "guard": "off", "per_device_train_batch_size": 8}
    for cls, more, longest in ((CaptionRLTrainer, {}, 40), (SelfRetrievalTrainer, {"scorer": scorer}, 38)):
        more |= {"reward_funcs": None if more else "cider", "train_dataset": scenes["train"]}
        args = cls(tiny_captioner("git"), args=cls.config_class(str(tmp_path), **settings), **more).args
        assert (args.max_completion_length, args.max_caption_length) == (longest, 40)
    settings["max_caption_length"] = 60  # longer captions, of which the scorer reads 38 tokens
    for cls, more, longest in (
        (CaptionRLTrainer, {"reward_funcs": "cider"}, 60),
        (SelfRetrievalTrainer, {"scorer": scorer}, 38),
    ):
        args = cls.config_class(str(tmp_path), **settings)
        trainer = cls(tiny_captioner("git"), args=args, train_dataset=scenes["train"], **more)
        assert trainer.args.max_completion_length == longest


# Cached pixels: the same bits as from images, without opening one

SETTINGS = {**PLAIN_SGD, "freeze_vision_tower": False, "max_steps": 2, "per_device_train_batch_size": 4}
SETTINGS |= {"generation_num_beams": 1, "generation_max_new_tokens": 6}
SETTINGS |= {"logging_strategy": "steps", "logging_steps": 1, "report_to": "none"}


def trainer_of(kind, folder, scenes, scorer=None, **settings):
    settings = {**SETTINGS, "feature_cache_dir": str(folder / "cache"), **settings}
    if kind == "smile":
        return tiny_trainer(folder / "out", scenes, **settings)
    data = {"train_dataset": scenes["train"], "eval_dataset": scenes["validation"]}
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
    cached = outcome(trainer_of(kind, tmp_path / "cached", scenes, scorer, cache_pixels=True))
    assert cached[:3] == plain[:3]
    assert all(torch.equal(value, plain[3][name]) for name, value in cached[3].items())
    assert list((tmp_path / "cached" / "cache").glob("pixels_uint8-*"))
    assert not list((tmp_path / "plain").glob("cache/pixels*"))


def test_a_run_with_a_warm_cache_opens_no_image(tmp_path, scenes, monkeypatch):
    cold = outcome(trainer_of("smile", tmp_path, scenes, cache_pixels=True))

    def refuse(*args, **kwargs):
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", refuse)
    warm = outcome(trainer_of("smile", tmp_path, scenes, cache_pixels=True, dataloader_num_workers=1))
    assert warm[:3] == cold[:3]
    with pytest.raises(Exception, match="an image was opened"):
        outcome(trainer_of("smile", tmp_path / "plain", scenes))
