"""A Hub for tests, and a check that its tokens are never written or printed."""

from __future__ import annotations

import contextlib
import functools
import logging

import jinja2
import pytest

from tests.hub.server import READ, WRITE, WRONG, HubServer


@contextlib.contextmanager
def running_hub(cache):
    """A Hub for the real client in this process, without waits between attempts."""
    import huggingface_hub.utils._http as client_http
    import transformers.utils.hub
    from huggingface_hub import constants, hf_api

    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(hf_api.api, "endpoint", server.url)  # of the functions without an HfApi, which peft calls
        patch.setattr(transformers.utils.hub, "_hf_api", None)  # made once, of the place that was the Hub then
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache / "cache"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(client_http.time, "sleep", lambda seconds: None)
        client_http.close_session()
        yield server
        client_http.close_session()


def holders_of_tokens(server, folder):
    """Names of files, on the Hub and in a folder, that contain a token."""
    tokens = [token.encode() for token in (WRITE, READ, WRONG)]
    found = [str(path) for path in folder.rglob("*") if path.is_file() and has(path.read_bytes(), tokens)]
    for repo in server.repos.values():
        for commit in repo.commits.values():
            found += [f"{repo.repo_id}: {n}" for n, data in commit.files.items() if has(data, tokens)]
            found += [f"{repo.repo_id}: message"] if has(commit.title.encode(), tokens) else []
    return found


def has(data, tokens):
    return any(token in data for token in tokens)


@pytest.fixture
def hub(tmp_path, caplog, capfd):
    """`running_hub`, with a search for tokens in all files and output at the end."""
    caplog.set_level(logging.DEBUG)
    with running_hub(tmp_path) as server:
        yield server
        assert holders_of_tokens(server, tmp_path) == []
        said = [*capfd.readouterr(), caplog.text, *(f"{r.msg!r} {r.args!r}" for r in caplog.records)]
        assert not any(token in text for token in (WRITE, READ, WRONG) for text in said)


@pytest.fixture(autouse=True)
def every_name_of_a_template_is_passed(monkeypatch):
    """The Hub's client renders nothing for a name that is missing; here it raises."""
    monkeypatch.setattr(jinja2, "Template", functools.partial(jinja2.Template, undefined=jinja2.StrictUndefined))
