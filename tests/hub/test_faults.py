"""The Hub and the disk fail at every step: nothing is lost, and repeating the push completes it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_captionrl.cli import main
from hf_captionrl.hub import PushError, folder_contents, push_folder, read_push_state
from tests.hub.conftest import holders_of_tokens
from tests.hub.folders import publishable
from tests.hub.server import READ, WRITE, WRONG
from tests.offline import python_path

ROOT = Path(__file__).parents[2]
PLACES = [
    "POST /api/repos/create",
    "GET /api/models/",
    "POST /api/validate-yaml",
    "POST .*/preupload/",
    "POST .*/objects/batch",
    "PUT /lfs/upload/",
    "POST /lfs/verify",
    "POST .*/commit/",
]


@pytest.fixture
def folder(tmp_path):
    return publishable(tmp_path / "smile")


def hashes(folder):
    """Content of a folder, except for files that a push may write."""
    ours = ("README.md", "push_state.json")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in ours]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def push(folder, repo_id="smile", **kwargs):
    waits = []
    try:
        return push_folder(folder, repo_id, **{"token": WRITE, "sleep": waits.append, **kwargs})
    finally:
        assert waits == sorted(waits)


def assert_complete(hub, folder, repo_id="tester/smile"):
    files = hub.repo(repo_id).files
    for name in folder_contents(folder).published:
        assert files[name] == (folder / name).read_bytes(), name
    assert set(files) == {*folder_contents(folder).published, ".gitattributes"}
    assert hub.repo(repo_id).branches["main"] == list(hub.repo(repo_id).commits)[-1]


def test_push_uploads_all_files_and_a_second_push_changes_nothing(hub, folder):
    before = hashes(folder)
    address = push(folder)
    assert_complete(hub, folder)
    repo = hub.repo("tester/smile")
    assert repo.private
    assert address.endswith(repo.branches["main"])
    assert hashes(folder) == before
    assert len(repo.commits) == 3  # initial commit, the files, the pinned card
    first = list(repo.commits)[1]
    assert f'load_captioner("tester/smile", revision="{first}")' in repo.files["README.md"].decode()
    push(folder)
    assert len(repo.commits) == 3
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b" ")
    push(folder)
    assert_complete(hub, folder)
    assert f'revision="{list(repo.commits)[3]}"' in repo.files["README.md"].decode()
    assert first not in repo.files["README.md"].decode()


@pytest.mark.parametrize("action", [500, 429, "cut"])
@pytest.mark.parametrize("place", PLACES)
def test_transient_fault_is_retried(hub, folder, place, action):
    before, fault = hashes(folder), hub.fail(place, action, times=2)
    push(folder)
    assert fault.hits == 2
    assert_complete(hub, folder)
    assert hashes(folder) == before


@pytest.mark.parametrize("place", PLACES[2:])
def test_lost_response_causes_no_second_commit(hub, folder, place):
    fault = hub.fail(place, "lost", times=1)
    push(folder)
    assert fault.hits == 1
    assert_complete(hub, folder)
    assert len(hub.repo("tester/smile").commits) == 3


@pytest.mark.parametrize("action", [500, 429, "cut"])
@pytest.mark.parametrize("place", ["POST /api/repos/create", "PUT /lfs/upload/", "POST .*/commit/"])
def test_permanent_fault_loses_nothing_and_the_push_can_be_repeated(hub, folder, place, action, monkeypatch, capfd):
    before = hashes(folder)
    hub.fail(place, action)
    with pytest.raises(PushError, match=r"Nothing is lost.*captionrl push") as error:
        push(folder, attempts=2)
    assert error.value.__cause__ is None
    assert hashes(folder) == before
    state = read_push_state(folder)
    assert (state["state"], state["repo_id"]) == ("failed", "smile")
    assert str(action) in state["reason"] or action == "cut"
    hub.end_fault()
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert main(["push", str(folder)]) == 0
    assert_complete(hub, folder)
    assert read_push_state(folder)["state"] == "pushed"


def test_uploaded_weights_are_not_sent_again(hub, folder):
    hub.fail("POST .*/commit/", 500)
    with pytest.raises(PushError):
        push(folder, attempts=2)
    hub.end_fault()
    push(folder)
    assert sum(path.startswith("/lfs/upload/") for _, path, _ in hub.requests) == 1


@pytest.mark.parametrize(
    ("token", "message"),
    [(WRONG, "does not accept the token"), (READ, "may not write to 'smile'"), (None, "there is none")],
)
def test_push_without_a_usable_token_is_refused(hub, folder, token, message):
    before = hashes(folder)
    with pytest.raises(PermissionError, match=message) as error:
        push_folder(folder, "smile", token=token, sleep=lambda s: pytest.fail("waiting does not correct a token"))
    assert token is None or token not in str(error.value)
    assert hashes(folder) == before
    assert hub.repos == {}
    push(folder)
    assert_complete(hub, folder)


def test_name_of_another_owner_raises(hub, folder):
    with pytest.raises(PermissionError, match="may not write to 'google/smile'"):
        push(folder, "google/smile")


def test_other_content_is_only_overwritten_on_request(hub, folder, monkeypatch, capfd):
    repo = hub.add("tester/smile", {"README.md": b"A thesis.", "thesis.tex": b"...", "old.safetensors": b"0"})
    with pytest.raises(FileExistsError, match=r"has other content \(README.md, old.safetensors, thesis.tex\)"):
        push(folder)
    assert repo.files["README.md"] == b"A thesis."
    assert len(repo.commits) == 1
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert main(["push", str(folder)]) == 2
    assert "--overwrite" in capfd.readouterr().err
    assert main(["push", str(folder), "--overwrite"]) == 0
    assert repo.files["thesis.tex"] == b"..."
    assert "old.safetensors" not in repo.files  # it would be loaded with the new weights
    assert not repo.private  # the visibility of an existing repository does not change


def test_public_repositories_and_branches_on_request(hub, folder):
    push(folder, private=False, revision="v1")
    repo = hub.repo("tester/smile")
    assert not repo.private
    assert "model.safetensors" in repo.at("v1").files
    assert set(repo.files) == {".gitattributes"}
    assert main(["push", str(folder), "--dry_run"]) == 0


def test_offline_mode_raises(hub, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from huggingface_hub.utils import close_session

    close_session()  # the client reads the setting once per session
    with pytest.raises(PushError, match="HF_HUB_OFFLINE is set"):
        push_folder(folder, "smile", token=WRITE, sleep=lambda s: pytest.fail("waiting does not help"))


FULL_DISK = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # no file can grow
from hf_captionrl.hub import push_folder
print(push_folder(sys.argv[1], "smile"))
"""


def test_full_disk_does_not_prevent_the_push(hub, folder, tmp_path):
    before = hashes(folder)
    run = fresh_process(["-c", FULL_DISK, str(folder)], hub, tmp_path / "home", WRITE)
    assert run.returncode == 0, run.stderr
    assert "README.md" in hub.repo("tester/smile").files
    assert hashes(folder) == before
    assert read_push_state(folder) == {}
    assert not [path for path in folder.iterdir() if path.name.startswith(".tmp")]
    card = (folder / "README.md").read_bytes()
    assert b'revision="main"' in card  # not changed, because the disk is full
    push(folder)
    assert_complete(hub, folder)


def fresh_process(command, hub, home, token, stdin=None):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "PYTHONPATH": python_path(ROOT), "NO_PROXY": "*"}
    environment |= {"HF_DATASETS_OFFLINE": "0", "HF_EVALUATE_OFFLINE": "0", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    home.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(
        [sys.executable, *command], input=stdin, env=environment, cwd=home, capture_output=True, text=True, check=False
    )
    assert token not in run.stdout + run.stderr
    return run


def test_the_scan_finds_a_token(hub, tmp_path):
    """Negative control of the check that `hub` runs at the end of each test."""
    hub.add("tester/leak", {"a.json": json.dumps({"token": READ}).encode()})
    (tmp_path / "note.txt").write_text(f"mine is {WRITE}")
    assert holders_of_tokens(hub, tmp_path) == [str(tmp_path / "note.txt"), "tester/leak: a.json"]
    hub.repos.clear()
    (tmp_path / "note.txt").unlink()
