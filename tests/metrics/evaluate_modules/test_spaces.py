"""Spaces are complete; their examples and cases run, as do those of docs/metrics.md and CONTRIBUTING.md."""

import doctest
import importlib
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import yaml

from hf_captionrl.hub.spaces import space_files
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


def test_page_of_a_space_shows_its_card(name, monkeypatch, spaces):
    gradio = MagicMock()  # which only a Space has
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    monkeypatch.chdir(spaces[name])
    runpy.run_path("app.py", run_name="imported")
    assert gradio.Markdown.call_args.args[0].strip().startswith("# Metric Card")


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
