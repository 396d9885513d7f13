"""The task folder for lmms-eval: its layout, its functions on rows, its numbers against `truematch evaluate`, the installed package."""

import importlib.util
import json
import math

import datasets
import pytest
import yaml

from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.retrieval.bags import load_bags
from hf_captionrl.utils.model_files import model_path
from tests.apps.truematch.conftest import truematch


@pytest.fixture(scope="module")
def tasks(built, tmp_path_factory):
    """The folder that the command wrote."""
    folder = tmp_path_factory.mktemp("lmms") / "tasks"
    assert truematch("lmms-eval", built, "--output", folder, "--prompt", "What is it?") == 0
    return folder


class Loader(yaml.SafeLoader):
    """Reads `!function utils.name` as that function, as lmms-eval does: the file is run for every function."""


def of_utils(loader, node):
    module, _, name = loader.construct_scalar(node).partition(".")
    spec = importlib.util.spec_from_file_location(module, loader.folder / f"{module}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return getattr(found, name)


Loader.add_constructor("!function", of_utils)


@pytest.fixture(scope="module")
def task(tasks):
    loader = Loader((tasks / "captionrl_truematch.yaml").read_text())
    loader.folder = tasks
    return loader.get_data()


def rows_of(task):
    return datasets.load_dataset(task["dataset_path"], **task["dataset_kwargs"], split=task["test_split"])


def test_layout(task, scenes):
    """Keys of lmms-eval's tasks; the data are those of the benchmark."""
    known = {"task", "output_type", "dataset_path", "dataset_kwargs", "test_split", "generation_kwargs", "metric_list"}
    assert set(task) == known | {"doc_to_visual", "doc_to_text", "doc_to_target", "process_results", "metadata"}
    assert (task["task"], task["output_type"]) == ("captionrl_truematch", "generate_until")
    rows = rows_of(task)
    assert rows["image_id"][:] == scenes["image_id"][:]
    assert task["doc_to_target"] in rows.column_names
    names = [metric["metric"] for metric in task["metric_list"]]
    assert names == [*(f"bag_{k}_recall_at_1" for k in (3, 5, 7)), "pool_recall_at_1", "pool_recall_at_5"]
    assert all(
        metric["higher_is_better"] is True and callable(metric["aggregation"]) for metric in task["metric_list"]
    )


def test_functions_on_two_rows(task):
    for row in rows_of(task).select([0, 7]):
        (image,) = task["doc_to_visual"](row)
        assert (image.mode, image.size) == ("RGB", row["image"].size)
        assert task["doc_to_text"](row) == task["doc_to_text"](row, lmms_eval_specific_kwargs=None) == "What is it?"
        found = task["process_results"](row, [" a pig "])
        assert set(found) == {metric["metric"] for metric in task["metric_list"]}
        assert set(found.values()) == {(row["image_id"], "a pig")}


def test_numbers_are_those_of_truematch_evaluate(task, built, scenes, cache, tmp_path, monkeypatch):
    """Answers in another order; the scorer is loaded once."""
    monkeypatch.setenv("CAPTIONRL_CACHE", cache)
    captions = dict(zip(scenes["image_id"], (texts[0] for texts in scenes["captions"]), strict=True))
    lines = [json.dumps({"image_id": i, "caption": c}) + "\n" for i, c in captions.items()]
    (tmp_path / "first.jsonl").write_text("".join(lines))
    given = ["--captions", tmp_path / "first.jsonl", "--output_dir", tmp_path / "out", "--cache_dir", cache]
    assert truematch("evaluate", built, *given) == 0
    row = json.loads((tmp_path / "out" / "results.json").read_text())["rows"][0]
    answers = list(captions.items())[::-1]
    found = {metric["metric"]: metric["aggregation"](answers) for metric in task["metric_list"]}
    for size in (3, 5, 7):
        assert found[f"bag_{size}_recall_at_1"] == pytest.approx(row[f"bag_{size}_recall_at_1"], abs=1e-12)
    scorer = load_scorer(model_path("scenes:siglip-held-out"))
    images = scorer.image_features([open_image(image) for image in scenes["image"]])
    rows = [scorer.text_features([caption])[0] @ images.T for caption in captions.values()]
    better = [int((row > row[own]).sum()) for own, row in enumerate(rows)]
    for k in (1, 5):
        assert found[f"pool_recall_at_{k}"] == sum(count < k for count in better) / len(better)
    limited = {metric["metric"]: metric["aggregation"](answers[-9:]) for metric in task["metric_list"]}
    known = {image_id for image_id, _ in answers[-9:]}
    complete = {len(bag) for bag in load_bags(built / "kept.json").bags if known.issuperset(bag)}
    assert {size for size in (3, 5, 7) if not math.isnan(limited[f"bag_{size}_recall_at_1"])} == complete != set()


def test_an_unknown_benchmark(tmp_path, capsys):
    assert main(["truematch", "lmms-eval", str(tmp_path / "gone")]) == 2
    assert "truematch build" in capsys.readouterr().err


def test_bad_options_are_refused_before_anything_is_written(built, tmp_path, capsys):
    (file := tmp_path / "file").touch()
    for given, named in (
        (["--output", file], "--output"),
        (["--output", tmp_path / "out", "--scorer", file], "scorer"),
    ):
        assert truematch("lmms-eval", built, *given) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_installed_package(tasks, scenes, cache, monkeypatch):
    """Run with lmms-eval 0.7.3, from its index of tasks to the metrics, with references as answers."""
    pytest.importorskip("lmms_eval.tasks", reason="lmms-eval is not installed")
    from lmms_eval.tasks import TaskManager, get_task_dict

    monkeypatch.setenv("CAPTIONRL_CACHE", cache)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = get_task_dict(["captionrl_truematch"], manager)["captionrl_truematch"]
    values = {name: [] for name in found.aggregation()}
    for doc, texts in zip(found.test_docs(), scenes["captions"], strict=True):
        assert found.doc_to_visual(doc)[0].mode == "RGB"
        assert found.doc_to_text(doc) == "What is it?"
        for name, value in found.process_results(doc, [texts[0]]).items():
            values[name].append(value)
    recalls = {name: found.aggregation()[name](answers) for name, answers in values.items()}
    assert 1 >= recalls["pool_recall_at_5"] >= recalls["pool_recall_at_1"] > 0
