"""The endpoint backend with a real server that is slow, overloaded or broken."""

import base64
import io
import time

import pytest
from PIL import Image

from hf_captionrl.apps.boosting import blend_prompt, visual_prompt
from hf_captionrl.captioners.language_models import BackendError, Failure, HTTPBackend, Truncated
from tests.boosting.server import ChatServer, texts_of


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


def ask(plan, number=1, **options):
    """Answers to some prompts, the waits, and the server."""
    waits = []
    with ChatServer(lambda messages: f"A caption of {texts_of(messages)[0][-4:]}.", plan) as server:
        backend = HTTPBackend(server.url, "m", sleep=waits.append, **options)
        found = dict(backend.complete([blend_prompt(str(i), [f"dog {i:04d}"]) for i in range(number)]))
    return found, waits, server


def test_answers_have_the_position_of_their_prompt():
    found, waits, server = ask(lambda number, messages: "ok", 9, concurrency=4)
    assert found == {i: f"A caption of {i:04d}." for i in range(9)}
    assert len(server.requests) == 9
    assert waits == []
    assert server.requests[0]["model"] == "m"
    assert server.requests[0]["messages"][0]["role"] == "system"


@pytest.mark.parametrize("fault", [429, 500, 503, "cut", "garbage"])
def test_temporary_errors_are_retried_with_longer_waits(fault):
    found, waits, server = ask(lambda number, messages: fault if number < 3 else "ok", backoff_s=0.5)
    assert found == {0: "A caption of 0000."}
    assert waits == [0.5, 1.0, 2.0]
    assert len(server.requests) == 4


def test_timeout_is_retried():
    found, waits, _ = ask(lambda number, messages: "ok" if number else "hang", timeout_s=0.2)
    assert found == {0: "A caption of 0000."}
    assert waits == [1.0]


def test_slow_server_is_dropped_at_the_deadline():
    """Each byte arrives within the timeout of a read."""
    begun = time.monotonic()
    found, waits, _ = ask(lambda number, messages: "ok" if number else "drip", timeout_s=0.3)
    assert found == {0: "A caption of 0000."}
    assert waits == [1.0]
    assert time.monotonic() - begun < 3  # the whole answer takes six seconds


def test_answer_at_the_length_limit_is_truncated():
    found, waits, _ = ask(lambda number, messages: "length")
    assert found == {0: Truncated("A caption of 0000.")}
    assert waits == []


def test_retry_after_is_respected_up_to_two_minutes():
    waits_named = ["7", "9999", "²"]  # the last is a digit in Python, but not a number
    found, waits, _ = ask(lambda number, _: (429, {"Retry-After": waits_named[number]}) if number < 3 else "ok")
    assert waits == [7.0, 120.0, 4.0]
    assert found[0] == "A caption of 0000."


def test_last_try_returns_a_failure():
    found, waits, server = ask(lambda number, messages: 500, tries=3)
    assert isinstance(found[0], Failure)
    assert found[0].reason == "backend_failed"
    assert "3 tries" in found[0].detail
    assert "500" in found[0].detail
    assert len(server.requests) == 3
    assert len(waits) == 2


def test_unreachable_server_is_a_failure():
    with ChatServer(str) as server:
        url = server.url
    backend = HTTPBackend(url, "m", tries=2, sleep=lambda _: None)
    assert dict(backend.complete([blend_prompt("1", ["a"])]))[0].reason == "backend_failed"


def test_rejected_prompt_does_not_affect_others():
    found, waits, _ = ask(lambda number, messages: 400 if "0001" in str(messages) else "ok", 3)
    assert found[1].reason == "backend_rejected"
    assert waits == []
    assert found[0] == "A caption of 0000."
    assert found[2] == "A caption of 0002."


@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_wrong_key_or_address_stops_the_run(status):
    with pytest.raises(BackendError, match=f"HTTP {status}"):
        ask(lambda number, messages: status, 50, concurrency=1)


def test_answers_in_flight_survive_a_fatal_error():
    found = []
    with ChatServer(lambda messages: "A dog.", lambda number, _: 401 if number == 3 else "ok") as server:
        backend = HTTPBackend(server.url, "m", concurrency=1)
        with pytest.raises(BackendError):
            found.extend(backend.complete([blend_prompt(str(i), ["a"]) for i in range(20)]))
    assert 4 <= len(server.requests) < 20
    assert len(found) == len(server.requests) - 1


def test_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    with ChatServer(str, lambda number, messages: 500) as server:
        backend = HTTPBackend(server.url, "m", api_key_env="SOME_KEY", tries=1, sleep=lambda _: None)
        failure = dict(backend.complete([blend_prompt("1", ["a"])]))[0]
        server.plan = lambda number, messages: 401
        with pytest.raises(BackendError) as error:
            list(backend.complete([blend_prompt("1", ["a"])]))
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "***" in failure.detail
    for text in (failure.detail, str(error.value), repr(backend), backend.revision):
        assert "secret" not in text


def test_redirects_are_not_followed():
    with ChatServer(lambda messages: "A dog.") as other, pytest.raises(BackendError, match="HTTP 302"):
        ask(lambda number, messages: (302, {"Location": other.url + "/chat/completions"}))
    assert other.requests == []


def test_empty_key_variable_raises(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(BackendError, match="SOME_KEY is empty"):
        HTTPBackend("http://127.0.0.1:1/v1", "m", api_key_env="SOME_KEY")


@pytest.mark.parametrize("key", ["sk-very\nsecret", "sk-very secret", "sk-sécret", "sk-\x7fsecret"])
def test_invalid_key_raises_without_printing_it(monkeypatch, key):
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(BackendError, match="SOME_KEY contains") as error:
        HTTPBackend("http://127.0.0.1:1/v1", "m", api_key_env="SOME_KEY")
    assert "cret" not in str(error.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x/v1", "http://me:pass@x/v1", "http://x/v1?key=1"])
def test_invalid_or_secret_addresses_raise(url):
    with pytest.raises(ValueError, match="base_url"):
        HTTPBackend(url, "m")


def test_images_are_sent_losslessly():
    image = Image.new("RGB", (9, 7), (10, 200, 30))
    with ChatServer(lambda messages: "Green.") as server:
        list(HTTPBackend(server.url, "m", is_multimodal=True).complete([visual_prompt("1", image)]))
    text, url = texts_of(server.requests[0]["messages"])
    assert text == "Briefly describe the content of the image."
    assert url.startswith("data:image/png;base64,")
    sent = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert sent.size == (9, 7)
    assert sent.tobytes() == image.tobytes()
