"""`evaluate` finds bare names in new processes, from any folder, offline and online."""

import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest

from hf_captionrl.metrics.evaluate_modules import path
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from tests.metrics.evaluate_modules import warm_process
from tests.metrics.evaluate_modules.test_spaces import two_rows
from tests.test_docs import blocks

FOREIGN = b"""
import datasets
import evaluate
class CaptionDiversity(evaluate.Metric):
    def _info(self):
        print("FOREIGN CODE WAS RUN")
        features = datasets.Features({"predictions": datasets.Sequence(datasets.Value("string"))})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)
    def _compute(self, predictions):
        return {"div_1": -1.0}
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Another module under every name."""

    def do_GET(self):
        self.send_response(200)
        for name, value in {"ETag": '"1"', "Content-Length": str(len(FOREIGN))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(FOREIGN)

    do_HEAD = do_GET  # noqa: N815 - the name http.server calls

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def job(tmp_path, code, name="run", **env):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    # HF_UPDATE_DOWNLOAD_COUNTS: otherwise evaluate sends download counts.
    env = {"HF_HOME": str(tmp_path / f"{name}-home"), "HF_UPDATE_DOWNLOAD_COUNTS": "0"} | env
    return {"code": code, "cwd": str(folder), "env": env}


FRONT_DOORS = {
    "evaluate first": "import evaluate\nimport hf_captionrl\n",
    "package first": "import hf_captionrl\nimport evaluate\n",
    "a name of it": "from evaluate import load\nimport hf_captionrl\nimport evaluate\nevaluate.load = load\n",
    "a notebook": "import hf_captionrl.metrics\nfrom evaluate.loading import load\nimport evaluate\nevaluate.load = load\n",
}
KNOWN = """
import os, pathlib
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
for name in DESCRIPTIONS:
    metric = evaluate.load(name)
    assert metric.name == name and type(metric).__module__.startswith("hf_captionrl."), metric
    assert metric.description and metric.citation and metric.inputs_description
print("written", [p.name for p in pathlib.Path(os.environ["HF_HOME"]).rglob("*") if p.is_file()])
try:
    evaluate.load("no_such_metric")
except FileNotFoundError:
    print("others as before")
"""


@pytest.mark.parametrize("online", [False, True])
def test_after_the_import_alone_bare_names_are_known(hub, tmp_path, online):
    settings = {"HF_EVALUATE_OFFLINE": "1"}
    if online:  # a Hub that would return another module of this name
        settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    tail = KNOWN if not online else KNOWN.partition("try:")[0]
    jobs = {name: job(tmp_path, code + tail, name, **settings) for name, code in FRONT_DOORS.items()}
    # Negative control: a process that does not import the package does not know them.
    jobs["bare"] = job(tmp_path, "import evaluate\nevaluate.load('caption_diversity')", "bare", **settings)
    *found, (_, bare) = warm_process.run(*jobs.values())
    for name, (status, output) in zip(FRONT_DOORS, found, strict=True):
        assert status == 0, (name, output)
        assert "written []" in output, (name, output)
        assert ("others as before" in output) is not online, (name, output)
        assert "FOREIGN" not in output, name
    assert ("FOREIGN" if online else "FileNotFoundError") in bare


def test_a_script_in_the_working_folder_comes_first_as_for_every_name(tmp_path):
    work = job(tmp_path, "import hf_captionrl\nimport evaluate\nevaluate.load('caption_diversity')", "own")
    folder = Path(work["cwd"], "caption_diversity")
    folder.mkdir()
    (folder / "caption_diversity.py").write_bytes(FOREIGN)
    work["env"]["HF_EVALUATE_OFFLINE"] = "1"
    ((status, output),) = warm_process.run(work)
    assert status == 0, output
    assert "FOREIGN CODE WAS RUN" in output


def test_a_file_loads_by_its_path(evaluate):
    assert evaluate.load(path("clip_score")).name == "clip_score"
    with pytest.raises(ValueError, match=r"no module 'bleurt'.*self_retrieval"):
        path("bleurt")


EVERY = """
import json
import hf_captionrl
import evaluate
found = {{}}
for name, case in json.loads({cases!r}).items():
    columns = {{key: case.pop(key) for key in ("predictions", "references") if key in case}}
    metric = evaluate.load(name, num_process=2, process_id={process}, experiment_id=name, cache_dir={cache!r})
    half = slice(0, 1) if {process} == 0 else slice(1, None)
    metric.add_batch(**{{key: rows[half] for key, rows in columns.items()}})
    found[name] = metric.compute(**case)
print("RESULT", json.dumps(found))
"""


def test_two_processes_equal_one_for_every_module(tmp_path, evaluate):
    cases = {name: two_rows(name) for name in DESCRIPTIONS}
    codes = [EVERY.format(cases=json.dumps(cases), process=n, cache=str(tmp_path / "cache")) for n in (0, 1)]
    jobs = [job(tmp_path, code, f"every-{n}", HF_EVALUATE_OFFLINE="1") for n, code in enumerate(codes)]
    (first, said), (second, said_second) = warm_process.run(*jobs)
    assert (first, second) == (0, 0), said + said_second
    found = json.loads(said.split("RESULT ")[1])
    assert set(json.loads(said_second.split("RESULT ")[1]).values()) == {None}
    for name, case in cases.items():
        alone = json.loads(json.dumps(evaluate.load(name).compute(**case)))
        assert found[name] == alone, name
        half = {key: rows[:1] if isinstance(rows, list) else rows for key, rows in case.items()}
        if name not in ("self_retrieval", "caption_diversity"):  # half of the processes have other arguments
            assert evaluate.load(name).compute(**half) != alone, "the second process counts"


CODE = """
import json
import pytest
assert pytest.main(["-q", "-p", "no:cacheprovider", "tests/metrics/test_word_repetition.py"]) == 0
import hf_captionrl
import evaluate
captions = ["a dog and a cat", "two red kites", "red red"]
found = evaluate.load("word_repetition").compute(predictions=captions)["word_repetition"]
print("RESULT", json.dumps([hf_captionrl.__file__, found]))
"""


def test_metric_example_works_as_printed(tmp_path):
    """In a copy of the package: linked, and copied where files are added."""
    root, package = Path(__file__).parents[3], tmp_path / "hf_captionrl"
    package.mkdir()
    for entry in (root / "hf_captionrl").iterdir():
        if entry.name == "metrics":
            shutil.copytree(entry, package / entry.name)
        elif entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for block in blocks(root / "CONTRIBUTING.md", "python"):
        head, _, text = block.partition("\n")
        if head.startswith("# ") and ("word_repetition" in head or "descriptions.py" in head):
            file = tmp_path / head.removeprefix("# ").removesuffix(", at the end")
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as stream:
                stream.write(text)
    ((status, output),) = warm_process.run(job(tmp_path, CODE, HF_EVALUATE_OFFLINE="1") | {"cwd": str(tmp_path)})
    assert status == 0, output
    home, number = json.loads(output.split("RESULT ")[1])
    assert home == str(package / "__init__.py")
    assert number == pytest.approx(0.7 / 3)
