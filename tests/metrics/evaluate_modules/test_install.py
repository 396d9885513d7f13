"""`evaluate` finds bare names in new processes, from any folder, offline, and with any answer of a Hub."""

import http.server
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_captionrl.hub.spaces import space_files
from hf_captionrl.metrics.evaluate_modules import MODULES, install, path
from hf_captionrl.metrics.evaluate_modules.load import class_name
from tests.metrics.evaluate_modules import warm_process
from tests.metrics.evaluate_modules.test_spaces import two_rows
from tests.offline import python_path
from tests.test_docs import blocks

LOAD = """
import os
os.environ["CAPTIONRL_NO_INSTALL"] = "1"  # only what is installed counts
import hf_captionrl.metrics.evaluate_modules as modules
modules.install()
import evaluate
metric = evaluate.load("caption_diversity")
print("div_1", metric.compute(predictions=[["a dog", "a cat"]])["div_1"], type(metric).__module__)
"""
OURS = "div_1 0.75 hf_captionrl.metrics.evaluate_modules.caption_diversity"
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
# By the first part of the path: status, body, headers.
HUB = {
    "200-page": (200, b"<!DOCTYPE html>\n<p>Sign in to this network\n", {"ETag": '"1"'}),
    "200-empty": (200, b"", {}),
    "200-foreign": (200, FOREIGN, {"ETag": '"2"'}),
    "200-bytes": (200, b"\xff\xfe\x00", {}),
    "401": (401, b"no", {}),
    "404": (404, b"no", {}),
    "503": (503, b"later", {}),
}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        first, _, rest = self.path.lstrip("/").partition("/")
        if first == "space":  # a Hub with one Space that has only the branch main
            name = rest.split("/")[2]
            found = f"/resolve/main/{name}.py" in rest
            body = space_files(name, f"me/{name}")[f"{name}.py"].encode() if found else b""
            status, headers = (200, {"ETag": '"space"'}) if found else (404, {})
        else:
            status, body, headers = HUB[first]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.server.seen.append((first, self.command, status))

    do_HEAD = do_GET  # noqa: N815 - the name http.server calls

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen = []
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


def test_every_bare_name_offline_in_a_new_process_and_folder(tmp_path):
    code = LOAD + (
        "for name in modules.MODULES:\n"
        "    metric = evaluate.load(name)\n"
        "    assert metric.name == name and metric.module_type == 'metric', metric\n"
        "    assert metric.description and metric.citation and metric.inputs_description\n"
        "print('loaded', len(modules.MODULES))\n"
    )
    bare = "import hf_captionrl.metrics, evaluate; evaluate.load('caption_diversity')"
    # The package's folder holds a package with the same name as the one in the cache.
    inside = job(tmp_path, LOAD, "inside", HF_EVALUATE_OFFLINE="1") | {"cwd": str(Path(path("emscore")).parents[1])}
    (status, said), (hidden, heard), (without, error) = warm_process.run(
        job(tmp_path, code, HF_EVALUATE_OFFLINE="1", CAPTIONRL_NO_INSTALL="1"),
        inside,
        job(tmp_path, bare, "bare", HF_EVALUATE_OFFLINE="1", CAPTIONRL_NO_INSTALL="1"),
    )
    assert status == 0, said
    assert OURS in said
    assert f"loaded {len(MODULES)}" in said
    assert hidden == 0, heard
    assert OURS in heard
    # Negative control: without the installed files nothing is found.
    assert without == 1
    assert "FileNotFoundError" in error


FRONT_DOORS = {
    "evaluate first": "import evaluate\nimport hf_captionrl\n",
    "package first": "import hf_captionrl\nimport evaluate\n",
    "a name of it": "from evaluate import load\nimport hf_captionrl\nimport evaluate\nevaluate.load = load\n",
    "a notebook": "import hf_captionrl.metrics\nfrom evaluate.loading import load\nimport evaluate\nevaluate.load = load\n",
}
KNOWN = """
import os, pathlib, sys
metric = evaluate.load("self_retrieval")
written = [p.name for p in pathlib.Path(os.environ["HF_HOME"]).rglob("*") if p.is_file()]
print("found", metric.name, type(metric).__module__.startswith("hf_captionrl."), written)
try:
    evaluate.load("no_such_metric")
except FileNotFoundError:
    print("others as before")
"""


@pytest.mark.parametrize("online", [False, True])
def test_after_the_import_alone_bare_names_are_known(hub, tmp_path, online):
    settings = {"HF_EVALUATE_OFFLINE": "1"}
    if online:  # a Hub that would return another module of this name
        settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}/200-foreign"}
    tail = KNOWN if not online else KNOWN.partition("try:")[0]
    found = warm_process.run(*[job(tmp_path, code + tail, name, **settings) for name, code in FRONT_DOORS.items()])
    for name, (status, said) in zip(FRONT_DOORS, found, strict=True):
        assert status == 0, (name, said)
        assert "found self_retrieval True []" in said, (name, said)
        assert ("others as before" in said) is not online, (name, said)
        assert "FOREIGN" not in said, name


def test_a_script_in_the_working_folder_comes_first_as_for_every_name(tmp_path):
    work = job(tmp_path, "import hf_captionrl\nimport evaluate\nevaluate.load('caption_diversity')", "own")
    own = Path(work["cwd"], "caption_diversity")
    own.mkdir()
    (own / "caption_diversity.py").write_bytes(FOREIGN)
    work["env"]["HF_EVALUATE_OFFLINE"] = "1"
    ((status, said),) = warm_process.run(work)
    assert status == 0, said
    assert "FOREIGN CODE WAS RUN" in said


@pytest.mark.slow  # a fresh process per case
def test_bare_names_with_every_answer_of_the_hub(hub, tmp_path):
    endpoint = "http://127.0.0.1:{}/{}".format
    cases = {name: endpoint(hub.server_port, name) for name in HUB}
    cases["refused"] = endpoint(9, "nobody-listens")
    found = warm_process.run(*[job(tmp_path, LOAD, name, HF_ENDPOINT=url) for name, url in cases.items()])
    for name, (status, said) in zip(cases, found, strict=True):
        assert status == 0, (name, said)
        assert OURS in said, name
        assert "FOREIGN" not in said, name
    asked = {name for name, _, _ in hub.seen}
    assert asked == set(HUB), "every case must have asked the server"


@pytest.mark.slow  # a fresh process per case
def test_cached_page_is_not_loaded(hub, tmp_path):
    # A process without the package has cached a sign-in page under the name; later the Hub is unreachable.
    before = "import evaluate\ntry:\n    evaluate.load('caption_diversity')\nexcept BaseException as error:\n    print(error)"
    home = {"HF_HOME": str(tmp_path / "home")}
    page = f"http://127.0.0.1:{hub.server_port}/200-page"
    assert warm_process.run(job(tmp_path, before, HF_ENDPOINT=page, **home))[0][0] == 0
    stored = list((tmp_path / "home").rglob("caption_diversity.py"))
    assert len(stored) == 1
    assert "Sign in" in stored[0].read_text()
    assert OURS in warm_process.run(job(tmp_path, LOAD, HF_EVALUATE_OFFLINE="1", **home))[0][1]


def test_a_pushed_space_loads_by_its_name(hub, tmp_path):
    code = """
import evaluate
for name in ("self_retrieval", "caption_faithfulness"):
    metric = evaluate.load(f"someone/{name}")
    print(metric.name, type(metric).__module__)
metric = evaluate.load("someone/self_retrieval")
print(metric.compute(predictions=["a"], references=[[1.0, 0.0]], text_features=[[1.0, 0.0]], ks=[1])["recall_at_1"])
"""
    url = f"http://127.0.0.1:{hub.server_port}/space"
    ((status, said),) = warm_process.run(job(tmp_path, code, HF_ENDPOINT=url))
    assert status == 0, said
    assert "self_retrieval hf_captionrl.metrics.evaluate_modules.self_retrieval" in said
    assert said.strip().endswith("1.0")


def test_a_file_loads_by_its_path(evaluate):
    assert evaluate.load(path("emscore")).name == "emscore"
    with pytest.raises(ValueError, match=r"no module 'bleurt'.*self_retrieval"):
        path("bleurt")


def test_install_is_complete_and_fast_when_repeated(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate.config", None)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    first = install()
    assert len(first) == len(MODULES) >= 7
    for file, name in zip(first, MODULES, strict=True):
        assert file.read_text() == f"from hf_captionrl.metrics.evaluate_modules.{name} import {class_name(name)}\n"
        assert len(file.parent.name) == 64
    assert not list(tmp_path.rglob(".tmp-*"))
    stamps = {file: file.stat().st_mtime_ns for file in first}
    assert install() == first
    assert stamps == {file: file.stat().st_mtime_ns for file in first}
    # A truncated file and a folder without its file are repaired.
    first[0].write_text("from")
    first[1].unlink()
    (first[2].parents[1] / "__init__.py").write_text("")
    assert install() == first
    assert "import" in first[0].read_text()
    assert first[1].is_file()
    assert "use_installed" in (first[2].parents[1] / "__init__.py").read_text()
    # A file in place of the folder, so that not even root can write below it.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="HF_MODULES_CACHE"):
        assert install() == []


def test_import_is_fast_and_concurrent_installs_are_safe(tmp_path):
    code = (
        "import sys, time; t = time.perf_counter(); import hf_captionrl.metrics.evaluate_modules as m; files = m.install();"
        "heavy = {'torch', 'evaluate', 'datasets', 'numpy'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy or len(files) != len(m.MODULES) or not all(f.stat().st_size for f in files) else 0)"
    )
    env = {"HF_MODULES_CACHE": str(tmp_path), "PATH": "", "PYTHONPATH": python_path(Path(__file__).parents[3])}
    running = [subprocess.Popen([sys.executable, "-W", "error", "-c", code], env=env) for _ in range(6)]
    assert [process.wait() for process in running] == [0] * 6
    assert not list(tmp_path.rglob(".tmp-*"))


EVERY = """
import json
import hf_captionrl.metrics.evaluate_modules as modules
modules.install()
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
    cases = {name: two_rows(name) for name in sorted(MODULES)}
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
        if head.startswith("# ") and "word_repetition" in head:
            file = tmp_path / head.removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    load = package / "metrics" / "evaluate_modules" / "load.py"
    before, start, after = load.read_text().partition("MODULES = (\n")
    load.write_text(f'{before}{start}    "word_repetition",\n{after}')
    ((status, said),) = warm_process.run(job(tmp_path, CODE, HF_EVALUATE_OFFLINE="1") | {"cwd": str(tmp_path)})
    assert status == 0, said
    home, *numbers = json.loads(said.split("RESULT ")[1])
    assert home == str(package / "__init__.py")
    assert numbers == pytest.approx([0.7 / 3])
