"""Spaces are complete; their examples and cases run, as do those of docs/metrics.md and CONTRIBUTING.md."""

import doctest
import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import yaml

from hf_captionrl.hub.spaces import build_page, compute_from_json, space_files
from hf_captionrl.metrics.evaluate_modules import class_name, path
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from tests.test_docs import blocks
from tests.tolerances import within


@pytest.fixture(params=sorted(DESCRIPTIONS))
def name(request):
    return request.param


def two_rows(name):
    """A case of a module with two rows or more; a single row is changed and repeated."""
    cases = DESCRIPTIONS[name].cases
    cases = [{key: value for key, value in case.items() if key != "result"} for case in cases]
    case = next((case for case in cases if len(case["predictions"]) > 1), cases[0])
    if len(case["predictions"]) == 1:
        case = {key: value * 2 if isinstance(value, list) else value for key, value in case.items()}
        case["predictions"] = [case["predictions"][0], "a dog sleeps"]
    return case


def module_of(name):
    return importlib.import_module(f"hf_captionrl.metrics.evaluate_modules.{name}")


def test_example_runs(name, evaluate):
    runner, text = doctest.DocTestRunner(), evaluate.load(name).inputs_description
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert len(test.examples) >= 5
    said = []
    found = runner.run(test, out=said.append)
    assert found.failed == 0, "".join(said)


@pytest.fixture(scope="module")
def spaces(tmp_path_factory):
    """The Spaces of all metrics, as they are pushed."""
    folder = tmp_path_factory.mktemp("spaces")
    for name in DESCRIPTIONS:
        (folder / name).mkdir()
        for file, text in space_files(name, f"me/{name}").items():
            (folder / name / file).write_text(text)
    return {name: folder / name for name in DESCRIPTIONS}


def test_cases_hold(name, evaluate):
    cases = DESCRIPTIONS[name].cases
    metric = evaluate.load(name)
    for case in cases:
        found = metric.compute(**{key: value for key, value in case.items() if key != "result"})
        assert case["result"]
        assert isinstance(found["per_sample"], dict)
        assert found["per_sample"]
        # The mean of a number that is one of single samples is the number.
        for key in {"clip_score", "cider_d", "recall_at_1", "div_1", "f"} & set(found) & set(found["per_sample"]):
            assert np.mean(found["per_sample"][key]) == pytest.approx(found[key])
        for key, value in case["result"].items():
            assert found[key] == within(value, 1e-6, dtype="float64"), key  # written with six digits
        # A wrong number is detected.
        number = next(iter(case["result"].values()))
        assert number + 1e-4 != within(number, 1e-6, dtype="float64")


def test_card_is_what_the_hub_accepts(name, spaces):
    _, front, body = (spaces[name] / "README.md").read_text().split("---\n", 2)
    meta = yaml.safe_load(front)
    assert (meta["sdk"], meta["app_file"], meta["license"]) == ("gradio", "app.py", "apache-2.0")
    assert set(meta["tags"]) >= {"evaluate", "metric"}
    assert len(meta["short_description"]) <= 60, "the Hub's limit"
    module = getattr(module_of(name), class_name(name))
    for argument in module.arguments():
        assert re.search(rf"\b{argument}\b", body), argument
    assert (spaces[name] / "requirements.txt").read_text().startswith("hf-captionrl")


def test_evaluate_can_parse_the_module(name, evaluate, spaces):
    # Its parser reads line by line: `import a, b` and a class imported from evaluate would break it.
    for file in (Path(path(name)), spaces[name] / f"{name}.py"):
        libraries = {imported for kind, imported, _, _ in evaluate.loading.get_imports(str(file)) if kind == "library"}
        assert "hf_captionrl" in libraries
    kinds = [o for o in vars(module_of(name)).values() if isinstance(o, type) and issubclass(o, evaluate.Metric)]
    assert [kind.__name__ for kind in kinds] == [class_name(name)]


def test_page_of_a_space_computes_its_example(name, evaluate, monkeypatch, spaces):
    gradio = MagicMock(Error=type("Error", (Exception,), {}))  # which only a Space has
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    runpy.run_path(str(spaces[name] / "app.py"), run_name="imported")
    build_page(name)
    clicked = gradio.Button().click.call_args.args[0]
    assert clicked(gradio.Code.call_args.kwargs["value"])["signature"]
    with pytest.raises(gradio.Error, match="not JSON"):
        clicked("{")
    assert "gradio" not in module_of(name).__dict__


@pytest.mark.parametrize(
    ("name", "given", "named"),
    [
        ("caption_nlg", {"references": [["a"]], "which": ["meteor"]}, "'which'"),
        ("caption_nlg", {"references": [["a"]], "java": "/bin/false"}, "'java'"),
        ("caption_nlg", {"references": [[{"path": "/etc/hosts"}]]}, "does not open files, but references"),
        ("caption_nlg", {"predictions": [{"bytes": "R0lG"}], "references": [["a"]]}, "open files, but predictions"),
        ("caption_perplexity", {"model": "/etc"}, "not '/etc'"),
        ("self_retrieval", {"image_features": {"a": {"path": "/etc/hosts"}}}, "not open files, but image_features"),
        ("self_retrieval", {"image_features": "/etc/hosts"}, "not '/etc/hosts'"),
        ("self_retrieval", {"num_bootstrap": 10**9}, "not 1000000000"),
    ],
)
def test_page_accepts_data_and_the_options_of_its_examples(name, given, named):
    metric, declared = MagicMock(), DESCRIPTIONS[name]
    with pytest.raises(ValueError, match=named):
        compute_from_json(metric, json.dumps({"predictions": ["a"]} | given), declared)
    assert not metric.compute.called
    own = {key: value for key, value in declared.cases[0].items() if key != "result"} | {"predictions": ["another"]}
    compute_from_json(metric, json.dumps(own), declared)
    assert metric.compute.called


PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_examples_run_one_after_another(evaluate, capsys):
    names: dict = {}
    for number, block in enumerate(blocks(PAGE, "python")):
        exec(compile(block, f"docs/metrics.md, example {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "[1, 2]" in printed
    assert "metric:self_retrieval|variant:pool|pool:300|ties:against" in printed
    assert "df:given|documents:3" in printed
    assert names["tested"]["p_value"] < 0.05
    with pytest.raises(NameError):
        exec("nobody_wrote_this", names)
