"""Neighbours on shards: exact ones equal the search in one process, compressed ones are measured."""

import json

import faiss
import numpy as np
import pyarrow as pa
import pytest
import torch

from hf_captionrl.cli import main
from hf_captionrl.cli.bags import neighbours_on_shards
from hf_captionrl.retrieval.bags import load_neighbours
from hf_captionrl.retrieval.neighbours import (
    CompressedIndex,
    build_compressed_index,
    nearest_neighbours,
    neighbour_recall,
    normalised,
)
from hf_captionrl.utils.options import EngineOptions
from hf_captionrl.utils.parts import ShardFolder
from tests.tolerances import close, within


def clusters(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(count // 20, width, generator=generator)
    return torch.randn(count, width, generator=generator) * 0.5 + centres[torch.arange(count) % len(centres)]


def test_neighbours_of_feature_shards_equal_those_of_images(tmp_path, capsys):
    few = ["--max_images", "40", "--cache_dir", str(tmp_path / "cache"), "--scorer", "scenes:clip-reward"]
    mode = ["--mode", "neighbours", "--top", "5"]
    assert main(["features", *few, "--output", str(tmp_path / "features")]) == 0
    assert main(["bags", *few, *mode, "--output", str(tmp_path / "one.safetensors")]) == 0
    shards = ["--feature_shards", str(tmp_path / "features"), "--processes", "1", "--rows_per_shard", "16"]
    assert main(["bags", *mode, *shards, "--output", str(tmp_path / "shards.safetensors")]) == 0
    one, found = load_neighbours(tmp_path / "one.safetensors"), load_neighbours(tmp_path / "shards.safetensors")
    assert (found.image_ids, found.signature, found.features) == (one.image_ids, one.signature, one.features)
    assert found.indices.tolist() == one.indices.tolist()
    assert found.similarities.flatten().tolist() == close(
        one.similarities.flatten().tolist(), dtype="float32", magnitude=1
    )
    manifest = json.loads((tmp_path / "shards.shards/manifest.json").read_text())
    assert [shard["rows"] for shard in manifest["shards"]] == [16, 16, 8]
    # The same command has nothing left to search; other settings are refused.
    capsys.readouterr()
    assert main(["bags", *mode, *shards, "--output", str(tmp_path / "shards.safetensors")]) == 0
    assert main(["bags", *mode[:3], "4", *shards, "--output", str(tmp_path / "shards.safetensors")]) == 2
    assert "written with top 5, but top is now 4" in capsys.readouterr().err
    assert main(["bags", "--processes", "2"]) == 2
    assert "--mode truematch runs in one process" in capsys.readouterr().err


def test_compressed_neighbours_are_close_to_exact_ones(tmp_path):
    features = clusters(1_200, 16)
    indices, similarities, recall = neighbours_on_shards(
        features,
        5,
        tmp_path / "shards",
        EngineOptions(rows_per_shard=500, processes=1),
        approximate=True,
        settings={},
    )
    exact = nearest_neighbours(features, 5)
    assert recall > 0.9
    assert neighbour_recall(indices, exact[0]) == within(recall, 0.05)  # a sample of 256 rows
    assert not (indices == torch.arange(len(features))[:, None]).any()
    unit = normalised(features)
    for row in (0, 500, 1_199):  # similarities are exact, and most similar first
        assert similarities[row].tolist() == close(
            (unit[indices[row]] @ unit[row]).tolist(), dtype="float32", magnitude=1
        )
        assert similarities[row].tolist() == sorted(similarities[row].tolist(), reverse=True)


def test_codes_have_eight_bits_from_10240_rows_on(tmp_path):
    unit = normalised(clusters(10_240, 16)).numpy()
    for count, bits in ((10_239, 4), (10_240, 8)):
        path = build_compressed_index(np.ascontiguousarray(unit[:count]), tmp_path / str(bits))
        assert faiss.read_index(str(path)).pq.nbits == bits
    rows = range(0, 10_240, 40)
    exact = nearest_neighbours(torch.from_numpy(unit), 5)[0][rows.start :: rows.step]
    found = CompressedIndex(tmp_path / "8", unit).search(rows, 5)[0]
    # The codes find nearly every neighbour: with 16 parts of one number each, 256 codes are finer than the differences.
    assert neighbour_recall(found, exact) > 0.95


def test_search_does_not_depend_on_the_shard(tmp_path):
    unit = normalised(clusters(1_200, 16)).numpy()
    index = CompressedIndex(build_compressed_index(unit, tmp_path / "index"), unit)
    whole = index.search(range(300), 4)[0]
    assert torch.cat([index.search(range(100), 4)[0], index.search(range(100, 300), 4)[0]]).equal(whole)
    with pytest.raises(ValueError, match="There are 600 rows, but IVF-PQ needs 640"):
        build_compressed_index(np.ascontiguousarray(unit[:600]), tmp_path / "few")


@pytest.mark.parametrize(("mode", "ending"), [("neighbours", "safetensors"), ("training", "json")])
@pytest.mark.parametrize("why", ["many", "asked"])
def test_one_process_uses_the_same_index_as_shards(tmp_path, monkeypatch, capsys, mode, ending, why):
    """Above a number of images, and with --approximate; below it, the search is exact."""
    features = torch.randn(1_200, 32, generator=torch.Generator().manual_seed(0))
    folder = ShardFolder(tmp_path / "features", {}, num_rows=1_200, rows_per_shard=1_200)
    rows = [{"image_id": f"i{row}", "image": values} for row, values in enumerate(features.tolist())]
    schema = pa.schema({"image_id": pa.string(), "image": pa.list_(pa.float32())})
    folder.write(0, rows, schema, {"scorer": "made-up@1"})
    folder.finish()
    monkeypatch.setattr("hf_captionrl.cli.bags.EXACT_ROWS", 1_199 if why == "many" else 1_200)
    more = ["--approximate"] if why == "asked" else []

    def bags(name, *options):
        sizes = ["--bag_sizes", "5"] if mode == "training" else []
        source = ["--feature_shards", str(tmp_path / "features"), "--features", "image"]
        output = tmp_path / "out" / f"{name}.{ending}"
        assert (
            main(["bags", *source, "--mode", mode, "--top", "7", *sizes, "--output", str(output), "--json", *options])
            == 0
        )
        return output, json.loads(capsys.readouterr().out)

    one, said = bags("one", *more)
    assert 0.5 < said["recall"] < 1
    assert [path.name for path in one.parent.iterdir()] == [one.name]  # the index is removed
    if mode == "neighbours":
        shards, other = bags("shards", "--processes", "1", "--rows_per_shard", "500", *more)
        assert other["recall"] == said["recall"]
        found, wanted = load_neighbours(one), load_neighbours(shards)
        assert found.indices.equal(wanted.indices)
        assert found.similarities.equal(wanted.similarities)
        assert found.image_ids == wanted.image_ids
    monkeypatch.setattr("hf_captionrl.cli.bags.EXACT_ROWS", 1_200)
    exact, said = bags("exact")
    assert "recall" not in said
    if mode == "neighbours":
        assert not load_neighbours(exact).indices.equal(found.indices)
