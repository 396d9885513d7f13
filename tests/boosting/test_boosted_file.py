"""The Parquet file of boosted captions: written in blocks, equal to a data set that is written at once."""

import io
import json
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from hf_captionrl.apps.boosting import boost as boosted_file
from hf_captionrl.apps.boosting import write_boosted_captions
from hf_captionrl.apps.boosting.boost import write_statistics
from hf_captionrl.apps.boosting.prompts import STAGES

STRING = datasets.Value("string")
SOURCE = dict.fromkeys(("model", "revision", "prompt_hash", "time"), STRING) | {"attempt": datasets.Value("int32")}
TEXTS = datasets.List(STRING)


def png(number, size=0):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (number % 256, 200, 30)).save(file, "PNG")
    return file.getvalue() + bytes(size)


def row_of(number):
    """A finished row, as in the shards; every seventh is in quarantine and every fifth has a conflict."""
    bad = json.dumps({"row": number, "reason": "answer_empty"}) if number % 7 == 3 else None
    row = {"row": number, "image_id": f"{number:05d}", "quarantine": bad, "references": [f"a thing {number}", "two"]}
    row |= {"captions": [f"a holistic thing {number}"], "conflicts": ["colour"] if number % 5 == 0 else []}
    for stage in STAGES:
        row[f"{stage}_caption"] = f"{stage} {number} été"
        row[f"{stage}_source"] = dict.fromkeys(("model", "revision", "prompt_hash", "time"), f"{stage}-{number}")
        row[f"{stage}_source"] |= {"attempt": number % 3}
    return row


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """250 rows: images embedded with and without a path, files, and a column of captions that is replaced."""
    folder = tmp_path_factory.mktemp("files")
    images = []
    for number in range(250):
        path = folder / f"{number}.png"
        path.write_bytes(png(number))
        name = None if number % 3 else "/somewhere/else.png"
        images.append({"bytes": png(number), "path": name} if number % 2 else {"bytes": None, "path": str(path)})
    columns = {
        "image": images,
        "image_id": [f"{n:05d}" for n in range(250)],
        "captions": [[f"{n}"] for n in range(250)],
    }
    features = {"image": datasets.Image(), "image_id": STRING, "captions": TEXTS, "split": datasets.Value("int8")}
    columns["split"] = [n % 100 for n in range(250)]
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def at_once(dataset, done, embed_images, with_images):
    """The table of a data set that holds all rows, written by `datasets`."""
    file = io.BytesIO()
    rows = dataset.cast_column("image", datasets.Image(decode=False)).select([row["row"] for row in done])
    columns = {"image_id": rows["image_id"][:], "split": rows["split"][:]}
    features = {name: dataset.features[name] for name in columns}
    if with_images:
        features["image"], columns["image"] = datasets.Image(), []
        for image in rows["image"]:
            path, data = image["path"], image["bytes"]
            if data is None and embed_images:
                with open(path, "rb") as source:
                    data = source.read()
            columns["image"].append({"bytes": data, "path": path.split("/")[-1] if data and path else path})
    features |= {"references": TEXTS, "captions": TEXTS, "conflicts": TEXTS}
    for stage in STAGES:
        features |= {f"{stage}_caption": STRING, f"{stage}_source": SOURCE}
    columns |= {name: [row[name] for row in done] for name in features if name not in columns}
    columns = {name: columns[name] for name in features}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(file)
    return pa.parquet.ParquetFile(pa.BufferReader(file.getvalue())).read()


@pytest.mark.parametrize(("embed_images", "with_images"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_blocks_equal_a_file_that_is_written_at_once(
    tmp_path, monkeypatch, mixed, embed_images, with_images, is_shuffled
):
    monkeypatch.setattr(boosted_file, "_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(boosted_file, "_GROUP_BYTES", 20_000)
    dataset = mixed.shuffle(seed=3) if is_shuffled else mixed
    found = [row_of(number) for number in range(250)]
    options = {"embed_images": embed_images, "with_images": with_images}
    written = write_boosted_captions(dataset, tmp_path, iter(found), **options)
    done = [row for row in found if row["row"] % 7 != 3]
    expected = at_once(dataset, done, embed_images, with_images)
    with pa.parquet.ParquetFile(written.path) as file:
        assert file.metadata.num_row_groups > 3
        table = file.read()
    assert table.schema.equals(expected.schema, check_metadata=True)
    assert table.to_pylist() == expected.to_pylist()
    lines = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == list(range(3, 250, 7))
    assert (written.rows, written.quarantined) == (len(done), 250 - len(done))
    assert written.conflicts == sum(row["row"] % 5 == 0 for row in done)
    again = write_boosted_captions(dataset, tmp_path / "again", iter(found), **options)
    assert again.path.read_bytes() == written.path.read_bytes()


def test_error_in_the_middle_keeps_the_old_files(tmp_path, mixed):
    write_boosted_captions(mixed, tmp_path, map(row_of, range(100)))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def broken():
        yield from map(row_of, range(150))
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write_boosted_captions(mixed, tmp_path, broken())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match="All 250 rows are in quarantine"):
        write_boosted_captions(mixed, tmp_path, [row_of(3)])
    assert (tmp_path / "captions.parquet").read_bytes() == before["captions.parquet"]
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 1
    assert len(list(tmp_path.iterdir())) == 2  # no temporary file


def peak(function):
    """Largest memory of Python objects and of Arrow during a call. In bytes."""
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(boosted_file, "_GROUP_BYTES", 2**20)

    def write(number):
        path = tmp_path / f"{number}.parquet"
        schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "image_id": pa.string()})
        with pa.parquet.ParquetWriter(path, schema) as file:
            for start in range(0, number, 100):
                images = [{"bytes": png(n, 5000), "path": None} for n in range(start, start + 100)]
                ids = [f"{n:05d}" for n in range(start, start + 100)]
                file.write_table(pa.table({"image": images, "image_id": ids}, schema=schema))
        rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
        rows = rows.cast_column("image", datasets.Image())

        def both():
            written = write_boosted_captions(rows, tmp_path / str(number), map(row_of, range(number)))
            write_statistics(written.path, None)

        return peak(both)

    write(200)  # imports
    few, many = write(1000), write(3000)
    # 72 bytes for numbers of words, and the rest for the list of row groups in the footer of the file.
    assert (many - few) / 2000 < 400


def test_statistics_of_a_file_equal_those_of_lists(tmp_path, monkeypatch, mixed):
    from hf_captionrl.apps.boosting.conflicts import source_statistics

    written = write_boosted_captions(mixed, tmp_path, map(row_of, range(250)))
    monkeypatch.setattr(boosted_file, "_ROWS_OF_TEXT", 7)
    monkeypatch.setattr("hf_captionrl.metrics.words._AT_ONCE", 5)
    found = write_statistics(written.path, None)
    done = [row for row in map(row_of, range(250)) if row["quarantine"] is None]
    lists = {"references": [text for row in done for text in row["references"]]}
    lists |= {
        name: [row[column] for row in done]
        for name, column in (
            ("BlendCap", "blend_caption"),
            ("VisualCap", "visual_caption"),
            ("HolisticCap", "holistic_caption"),
        )
    }
    assert found == source_statistics(lists)
    assert found["references"]["captions"] == 2 * len(done)
    # By hand: "a thing 12" and "two" have 3 and 1 words; the vocabulary is "a", "thing", "two" and the numbers.
    assert found["references"]["mean_words"] == 2.0
    assert found["references"]["vocabulary"] == 3 + len(done)
    assert json.loads((tmp_path / "statistics.json").read_text()) == found
