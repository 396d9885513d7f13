"""Parts on a Ray cluster of two nodes, one of whose actors is killed."""

import pytest

from hf_captionrl.cli import main
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.options import EngineOptions
from hf_captionrl.utils.parts import read_parts
from tests.trainers.test_evaluation import searching
from tests.utils.toy import Squares, expected, pids, run, two_nodes


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as address:
        yield address


@pytest.mark.slow  # a cluster takes half a minute to start; tests/utils/test_engine.py kills a process
def test_killed_actor_of_two_nodes_loses_and_repeats_no_row(cluster, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    run(tmp_path / "out", Squares(notes, kill_at=9), EngineOptions(engine="ray", address=cluster), rows_per_part=4)
    assert list(read_parts(tmp_path / "out")) == expected(23, 4)
    assert len(pids(notes, "killed")) == 1
    assert len(pids(notes, "loaded")) >= 3  # an actor on each node, and one instead of the killed one


@pytest.mark.slow
def test_actor_that_always_dies_stops_the_run_and_the_same_command_resumes(cluster, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    options = EngineOptions(engine="ray", address=cluster)
    with pytest.raises(RuntimeError, match=r"A worker died again and again.* use fewer --processes"):
        run(tmp_path / "out", Squares(notes, kill_at=0, times=99), options, rows_per_part=12)
    assert len(pids(notes, "killed")) == 4
    run(tmp_path / "out", Squares(notes), options, rows_per_part=12)
    assert list(read_parts(tmp_path / "out")) == expected(23, 12)


@pytest.mark.slow
def test_sampled_captions_of_a_cluster_equal_those_of_one_process(cluster, tmp_path, monkeypatch):
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
    captions = []
    for name, engine in (("one", ["--processes", "1"]), ("ray", ["--engine", "ray", "--address", cluster])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)  # where the actors start, too
        assert main([*few, "--output", "out", "--rows_per_shard", "2", *engine]) == 0
        captions.append(read_caption_file("out").captions)
    assert captions[0] == captions[1]
    assert len(captions[0]) == 6


@pytest.mark.slow
def test_trials_of_a_hyperparameter_search_run_side_by_side(cluster, tmp_path):
    import ray

    scenes = load_scenes(num_train=16, num_validation=12, num_test=0)
    rates = (0.5, 0.1)
    ray.init(cluster, log_to_driver=False)
    try:
        best = searching("smile", tmp_path, scenes, None).hyperparameter_search(
            hp_space=lambda _: {"learning_rate": ray.tune.grid_search(list(rates))},
            n_trials=1,
            backend="ray",
            compute_objective=lambda metrics: metrics["eval_loss"],
            storage_path=str(tmp_path / "ray"),
            verbose=0,
        )
    finally:
        ray.shutdown()
    losses = {}
    for rate in rates:
        alone = searching("smile", tmp_path / f"{rate}", scenes, None, learning_rate=rate)
        alone.train()
        losses[rate] = alone.evaluate()["eval_loss"]
    assert best.hyperparameters["learning_rate"] == min(losses, key=losses.get)
    assert best.objective == min(losses.values())
    assert len(list(tmp_path.glob("run-*/checkpoint-1"))) == 2
