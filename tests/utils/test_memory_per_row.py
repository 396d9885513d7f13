"""Ids and captions stay in Arrow: with the rows of a data set grow a few numbers per row, not Python objects.

An id as a Python string takes 49 bytes and its characters, and 8 in a list; a row of two captions more than 200.
"""

import gc
import io
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from hf_captionrl.cli.features import FeaturesOptions
from hf_captionrl.data import ImageReader
from hf_captionrl.data.options import ids_digest, load_split
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from tests.tiny import tiny_captioner

FEW, MANY = 20_000, 40_000
ROWS_AT_ONCE = 1000

IDS = 72
"""Bytes per row of a path that only reads ids and captions: at most nine numbers of 64 bits."""


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
    """Data sets on disk of several numbers of rows."""
    folder = tmp_path_factory.mktemp("rows")
    for number in (500, FEW, MANY):
        with pa.parquet.ParquetWriter(folder / f"{number}.parquet", table(0, 1).schema) as file:
            for start in range(0, number, ROWS_AT_ONCE):
                file.write_table(table(start, min(start + ROWS_AT_ONCE, number)))
        loaded = datasets.Dataset.from_parquet(str(folder / f"{number}.parquet"), cache_dir=str(folder / "cache"))
        loaded.cast_column("image", datasets.Image()).save_to_disk(folder / str(number))
    return folder


def rows_of(folder, number):
    return datasets.load_from_disk(folder / str(number))


def load_images(folder, number):
    """What a worker of `captionrl caption` loads."""
    split = load_split(FeaturesOptions(dataset=str(folder / str(number)), split="all"), quarantine_path=None)
    assert len(ids_digest(split.dataset)) == 32
    reader = ImageReader(split.dataset, split="all")
    assert reader.ids[number - 1] in split.all_ids
    assert "train/none.png" not in split.all_ids
    return split, reader


def smile(folder, number):
    config = SmileConfig(str(folder / "smile"), captions_per_image="all", report_to="none", use_cpu=True)
    trainer = SmileTrainer(tiny_captioner("blip"), config, rows_of(folder, number))
    assert len(trainer.train_dataset) == 2 * number
    return trainer


def peak(path, folder, number):
    gc.collect()
    tracemalloc.start()
    try:
        path(folder, number)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bytes_per_row(path, folder, few, many):
    path(folder, 500)  # imports
    return (peak(path, folder, many) - peak(path, folder, few)) / (many - few)


@pytest.mark.slow
@pytest.mark.parametrize("path", [load_images, smile])
def test_python_memory_per_row_of_ids_and_captions(folder, path):
    assert bytes_per_row(path, folder, FEW, MANY) < IDS


@pytest.mark.slow
def test_bound_is_below_a_list_of_ids(folder):
    def listed(folder, number):
        return [str(name) for name in rows_of(folder, number)["image_id"]]

    assert bytes_per_row(listed, folder, FEW, MANY) > IDS
