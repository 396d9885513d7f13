"""Shards on a Ray cluster of two nodes, one of whose actors is killed."""

import pytest

from hf_captionrl.cli import main
from hf_captionrl.engine import EngineOptions, ShardFolder, read_shards, run_stage
from hf_captionrl.evaluation.caption_files import read_caption_file
from tests.engine.toy import Squares, expected, pids


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each on 127.0.0.1."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Otherwise Ray replaces 127.0.0.1 by the address of the network card.
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        found = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.1"})
        try:
            found.add_node(**node, node_ip_address="127.0.0.1")
            yield found.address
        finally:
            ray.shutdown()
            found.shutdown()


@pytest.mark.slow  # a cluster takes half a minute to start; tests/engine/test_engine.py kills a process
def test_killed_actor_of_two_nodes_loses_and_repeats_no_row(cluster, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    shards = ShardFolder(tmp_path / "out", {"model": "m"}, num_rows=23, rows_per_shard=4)
    options = EngineOptions(engine="ray", address=cluster)
    seen = []
    summary = run_stage(Squares(notes, kill_at=9), shards, options, progress=seen.append)
    assert list(read_shards(tmp_path / "out")) == expected(23, 4)
    assert summary["manifest"]["rows"] == sum(seen) == 23
    assert len(pids(notes, "killed")) == 1
    assert len(pids(notes, "loaded")) >= 3  # an actor on each node, and one instead of the killed one


@pytest.mark.slow
def test_captions_of_a_cluster_equal_those_of_one_process(cluster, tmp_path):
    few = [
        "caption",
        "scenes:blip-mle",
        "--dataset",
        "scenes",
        "--max_images",
        "6",
        "--batch_size",
        "2",
        "--do_sample",
    ]
    assert main([*few, "--output", str(tmp_path / "one.jsonl")]) == 0
    engine = ["--engine", "ray", "--address", cluster, "--rows_per_shard", "2"]
    assert main([*few, "--output", str(tmp_path / "shards"), *engine]) == 0
    one, ray_captions = read_caption_file(tmp_path / "one.jsonl"), read_caption_file(tmp_path / "shards")
    assert list(ray_captions.captions.items()) == list(one.captions.items())
