"""Ids and captions stay in Arrow: with the rows of a data set grow a few numbers per row, not Python objects.

An id as a Python string takes 49 bytes and its characters, and 8 in a list; a row of two captions more than 200.
"""

import gc
import io
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from hf_captionrl.data import ImageReader, check_captions
from hf_captionrl.evaluation.dataset_options import ids_digest, load_split
from hf_captionrl.evaluation.write_features import FeaturesOptions
from hf_captionrl.retrieval.bag_files import NeighbourFile, load_neighbours, save_neighbours
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer, SmileConfig, SmileTrainer
from tests.tiny import tiny_captioner

FEW, MANY = 20_000, 40_000
ROWS_AT_ONCE = 1000

IDS = 64
"""Bytes per row of a path that only reads ids and captions: at most eight numbers of 64 bits."""
FEATURES = 192
"""Bytes per row of a path that also keeps a feature of four numbers of each image, keyed by its file: 16 of the features and 24
of the record of each, 16 each for the digest of the key in the request and for the index, and copies while these are sorted."""


def table(start, stop):
    """Rows whose images differ in their bytes."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (10, 200, 30)).save(file, "PNG")
    numbers = range(start, stop)
    images = [{"bytes": file.getvalue() + n.to_bytes(4, "big"), "path": None} for n in numbers]
    return pa.table(
        {
            "image": pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "image_id": [f"train/{n:08d}.png" for n in numbers],
            "captions": [[f"a green thing {n}", "a photo of it"] for n in numbers],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Parquet files of several numbers of rows."""
    folder = tmp_path_factory.mktemp("rows")
    for number in (500, FEW, MANY):
        with pa.parquet.ParquetWriter(folder / f"{number}.parquet", table(0, 1).schema) as file:
            for start in range(0, number, ROWS_AT_ONCE):
                file.write_table(table(start, min(start + ROWS_AT_ONCE, number)))
    return folder


class Features:
    """Made-up features of images."""

    signature, max_text_tokens, logit_scale = "made-up@1", 77, 1.0

    def image_features(self, images):
        return torch.nn.functional.normalize(torch.ones(len(images), 4), dim=1)


def rows_of(folder, number):
    loaded = datasets.load_dataset(
        "parquet", data_files=str(folder / f"{number}.parquet"), cache_dir=str(folder / "cache"), split="train"
    )
    return loaded.cast_column("image", datasets.Image())


def load_images(folder, number):
    """What a worker of `captionrl caption` and `captionrl features` loads."""
    options = FeaturesOptions(dataset=str(folder / f"{number}.parquet"), split="all")
    split = load_split(options, quarantine_path=None)
    digest = ids_digest(split.dataset)
    split = load_split(options, quarantine_path=None, expected_ids=digest)
    reader = ImageReader(split.dataset, split="all")
    assert reader.ids[number - 1] in split.all_ids
    assert "train/none.png" not in split.all_ids
    return split, reader


def check_rows(folder, number):
    rows, report = check_captions(rows_of(folder, number), check_images=False)
    assert len(rows) == number
    assert not report.entries
    return rows


def smile(folder, number):
    config = SmileConfig(str(folder / "smile"), captions_per_image="all", report_to="none", use_cpu=True)
    trainer = SmileTrainer(tiny_captioner("blip"), config, rows_of(folder, number))
    assert len(trainer.train_dataset) == 2 * number
    return trainer


def self_retrieval(folder, number, *, bags=False):
    ranks = (torch.arange(number)[:, None] + torch.arange(1, 4)) % number
    config = SelfRetrievalConfig(
        str(folder / "rl"),
        per_device_train_batch_size=4,
        bag_schedule=2 if bags else None,
        feature_cache_dir=str(folder / f"features-{number}-{bags}"),
        allow_truncation_captions=True,
        guard="off",
        report_to="none",
        use_cpu=True,
    )
    neighbours = ranks if bags else None
    trainer = SelfRetrievalTrainer(
        tiny_captioner("blip"), Features(), config, rows_of(folder, number), neighbours=neighbours
    )
    batch = next(iter(trainer.batch_sampler))
    assert [trainer.rollouts.image_ids[row] for row in batch] == [f"train/{row:08d}.png" for row in batch]
    assert trainer.rollouts.references[batch[0]][0] == f"a green thing {batch[0]}"
    return trainer


def self_retrieval_with_bags(folder, number):
    return self_retrieval(folder, number, bags=True)


def peak(path, folder, number):
    gc.collect()
    tracemalloc.start()
    try:
        path(folder, number)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "bound"),
    [
        (load_images, IDS),
        (check_rows, IDS),
        (smile, IDS),
        (self_retrieval, FEATURES),
        (self_retrieval_with_bags, FEATURES),
    ],
)
def test_python_memory_per_row(folder, path, bound):
    path(folder, 500)  # imports, and reads the file into the cache of datasets
    for number in (FEW, MANY):
        rows_of(folder, number)
    few, many = (peak(path, folder, number) for number in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < bound


def test_bound_is_below_a_list_of_ids(folder):
    def listed(folder, number):
        return [str(name) for name in rows_of(folder, number)["image_id"]]

    few, many = (peak(listed, folder, number) for number in (500, FEW))
    assert (many - few) / (FEW - 500) > IDS


def test_neighbours_are_renumbered_for_a_column_of_ids(tmp_path):
    ids = [f"é {n}" for n in range(9)]
    ranks = (torch.arange(9)[:, None] + torch.arange(1, 3)) % 9
    path = save_neighbours(tmp_path / "n.safetensors", NeighbourFile(ranks, torch.ones(9, 2), ids, "made-up@1"))
    order = np.random.default_rng(0).permutation(9)
    column = datasets.Dataset.from_dict({"image_id": [ids[row] for row in order]})["image_id"]
    found = load_neighbours(path, image_ids=column)
    assert found.image_ids == [ids[row] for row in order]
    for row, nearest in enumerate(found.indices.tolist()):
        assert [order[other] for other in nearest] == ranks[order[row]].tolist()
