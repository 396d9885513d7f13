"""Training data: streams, cached pixels and decoders give the bits of images in memory, or are refused."""

import datasets
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_captionrl.data import CaptionDataset, StreamedCaptions
from hf_captionrl.data.columns import VIDEO_FRAMES
from hf_captionrl.trainers import (
    CaptionRLConfig,
    CaptionRLTrainer,
    SelfRetrievalConfig,
    SelfRetrievalTrainer,
    SmileConfig,
    SmileTrainer,
)
from tests.data.photos import embedded
from tests.processes import run_in_processes
from tests.tiny import tiny_captioner
from tests.tolerances import resolution
from tests.trainers.one_step import PLAIN_SGD, tiny_trainer, train, weights

WORDS = "a red cat on the tree and two small birds near house".split()


def say(number):
    return [" ".join(WORDS[k : k + 3 + number % 3]) for k in range(number % 4, number % 4 + 2)]


@pytest.fixture(scope="module")
def data():
    return embedded(16, captions_of=say)


def fit(folder, dataset, **more):
    return weights(train(folder, dataset, captioner=tiny_captioner("blip", seed=1), **more))


def distance(a, b):
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).abs().max() / a[n].abs().max().clamp(min=1e-3)).item() for n in a)


def test_a_stream_trains_as_the_same_rows_in_memory(tmp_path, data):
    whole = fit(tmp_path / "whole", data, per_device_train_batch_size=16)
    stream = data.to_iterable_dataset(num_shards=3)
    assert isinstance(stream, datasets.IterableDataset)
    streamed = fit(tmp_path / "stream", stream, per_device_train_batch_size=16)
    assert distance(whole, streamed) < resolution(1.0)
    start = dict(tiny_captioner("blip", seed=1).model.named_parameters())
    assert distance({n: v.detach() for n, v in start.items()}, streamed) > 1e-3  # the weights changed
    accumulated = fit(tmp_path / "split", stream, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    assert distance(whole, accumulated) < resolution(1.0, ulps=512)


def one_of_two(output, data):
    given = {"captioner": tiny_captioner("blip", seed=1), "per_device_train_batch_size": 4}
    trainer = train(output.parent, data.to_iterable_dataset(num_shards=2), **given)
    if trainer.accelerator.is_main_process:
        save_file(weights(trainer), output)


def test_two_processes_give_the_gradient_of_one(tmp_path, data):
    alone = fit(tmp_path / "alone", data.to_iterable_dataset(num_shards=2), per_device_train_batch_size=8)
    run_in_processes(2, one_of_two, tmp_path / "weights.safetensors", data, folder=tmp_path)
    assert distance(alone, load_file(tmp_path / "weights.safetensors")) < resolution(1.0, ulps=512)


def test_each_epoch_draws_captions_as_in_memory(data):
    items, memory = StreamedCaptions(data.to_iterable_dataset(), seed=5), CaptionDataset(data, seed=5)
    drawn = []
    for epoch in range(3):
        items.set_epoch(epoch)
        memory.set_epoch(epoch)
        drawn.append([item["caption"] for item in items])
        assert drawn[-1] == [memory[row]["caption"] for row in range(len(memory))]
    assert len({tuple(captions) for captions in drawn}) == 3


def test_columns_of_a_stream_are_found(data):
    raw = data.rename_column("captions", "sentences").remove_columns("image_id")
    items = list(StreamedCaptions(raw.to_iterable_dataset()))
    assert [item["image_id"] for item in items] == [str(n) for n in range(16)]
    assert all(item["caption"] in say(n) for n, item in enumerate(items))

    def rows():
        for n in range(3):
            yield {"img": Image.new("RGB", (8, 8)), "text": f"cat {n}"}

    unknown = datasets.IterableDataset.from_generator(rows)
    assert unknown.features is None
    assert [item["caption"] for item in StreamedCaptions(unknown)] == ["cat 0", "cat 1", "cat 2"]
    both = raw.add_column("text", ["x"] * 16).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"caption_column could be any of \['text', 'sentences'\]"):
        StreamedCaptions(both)
    with pytest.raises(ValueError, match="no column 'image'"):
        StreamedCaptions(raw.remove_columns("image").to_iterable_dataset())


def test_unsupported_uses_of_streams_and_videos_are_refused(tmp_path, data, scorer):
    stream, captioner = data.to_iterable_dataset(), tiny_captioner("blip")
    videos = data.add_column(VIDEO_FRAMES, [4] * len(data))

    def smile(train_dataset=stream, eval_dataset=None, **settings):
        paths = {"output_dir": str(tmp_path), "feature_cache_dir": str(tmp_path / "cache")}
        config = SmileConfig(**{**PLAIN_SGD, **paths, **settings})
        SmileTrainer(captioner, config, train_dataset=train_dataset, eval_dataset=eval_dataset)

    def rewarded():
        config = SelfRetrievalConfig(str(tmp_path), use_cpu=True, max_steps=1)
        SelfRetrievalTrainer(captioner, scorer, config, train_dataset=stream)

    for name, call in (
        ("max_steps", lambda: smile(max_steps=-1)),
        ("cache_image_features", lambda: smile(cache_image_features=True)),
        ("cache_pixels", lambda: smile(cache_pixels=True)),
        ("image_decoder", lambda: smile(image_decoder="torchvision")),
        ("captions_per_image", lambda: smile(captions_per_image="all")),
        ("eval_dataset", lambda: smile(data, stream)),
        ("rewards", rewarded),
        ("IterableDatasetDict", lambda: smile(datasets.IterableDatasetDict({"train": stream}))),
        ("videos .*cache_pixels", lambda: smile(videos, cache_pixels=True)),
    ):
        with pytest.raises(ValueError, match=name):
            call()


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
