"""Iterable data: SMILE trains on them on one and two processes; trainers that need every image refuse them."""

import datasets
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_captionrl.data import CaptionDataset, StreamedCaptions
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer, SmileConfig, SmileTrainer
from tests.data.photos import embedded
from tests.processes import run_in_processes
from tests.tiny import tiny_captioner
from tests.tolerances import resolution

from .one_step import PLAIN_SGD, train, weights

WORDS = "a red cat on the tree and two small birds near house".split()


def say(number):
    return [" ".join(WORDS[k : k + 3 + number % 3]) for k in range(number % 4, number % 4 + 2)]


@pytest.fixture(scope="module")
def data():
    return embedded(16, captions_of=say)


def fit(folder, dataset, **more):
    """One plain step of a tiny captioner."""
    return weights(train(folder, dataset, captioner=tiny_captioner("blip", seed=1), **more))


def distance(a, b):
    """Largest difference relative to the largest weight."""
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


def test_workers_share_the_shards(tmp_path, data):
    items = StreamedCaptions(data.to_iterable_dataset(num_shards=4))
    loaded = list(torch.utils.data.DataLoader(items, batch_size=None, num_workers=2))
    assert sorted(item["image_id"] for item in loaded) == sorted(data["image_id"])
    assert len(fit(tmp_path, data.to_iterable_dataset(num_shards=4), dataloader_num_workers=2)) > 0


def one_of_two(output, data):
    trainer = train(
        output.parent,
        data.to_iterable_dataset(num_shards=2),
        captioner=tiny_captioner("blip", seed=1),
        per_device_train_batch_size=4,
    )
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


def test_bad_rows_of_a_stream_are_named(data):
    empty = embedded(3, captions_of=lambda n: [" "] if n == 1 else say(n)).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"train_dataset: row 1 \(image_id 'id-1'\) has no caption"):
        list(StreamedCaptions(empty))
    paths = datasets.Dataset.from_dict({"image": ["/etc/hostname"], "text": ["x"]}).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"row 0 .* holds text as its image.*image_root"):
        list(StreamedCaptions(paths))


def test_unsupported_uses_of_a_stream_are_refused(tmp_path, data, scorer):
    stream, captioner = data.to_iterable_dataset(), tiny_captioner("blip")

    def smile(train_dataset=stream, eval_dataset=None, **settings):
        config = SmileConfig(**{**PLAIN_SGD, "output_dir": str(tmp_path), **settings})
        SmileTrainer(captioner, config, train_dataset=train_dataset, eval_dataset=eval_dataset)

    def rewarded():
        config = SelfRetrievalConfig(str(tmp_path), use_cpu=True, max_steps=1)
        SelfRetrievalTrainer(captioner, scorer, config, train_dataset=stream)

    for name, call in (
        ("max_steps", lambda: smile(max_steps=-1)),
        ("cache_image_features", lambda: smile(cache_image_features=True)),
        ("captions_per_image", lambda: smile(captions_per_image="all")),
        ("eval_dataset", lambda: smile(data, stream)),
        ("rewards", rewarded),
        ("IterableDatasetDict", lambda: smile(datasets.IterableDatasetDict({"train": stream}))),
    ):
        with pytest.raises(ValueError, match=name):
            call()
