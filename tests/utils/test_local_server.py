"""A server on this machine answers requests for its names only: the rule, the demo's middleware, and the names it is started with."""

import asyncio

import pytest

from hf_captionrl.apps.album.page import _OnlyFromHere
from hf_captionrl.utils.local_server import OwnHosts

HERE = "127.0.0.1:7860"


@pytest.mark.parametrize("host", [HERE, "localhost:7860", "LOCALHOST:7860", "[::1]:7860", "localhost"])
def test_own_names_are_accepted(host):
    assert OwnHosts().accepts([host])
    assert OwnHosts().accepts([host], [f"http://{host.lower()}"])


@pytest.mark.parametrize(
    "host",
    ["evil.test:7860", "127.0.0.1.evil.test", "", "10.0.0.5:7860", "a@localhost", "localhost/x", "localhost:port", "[::1",
     "localhost:99999999999999999999"],
)  # fmt: skip
def test_foreign_names_are_refused(host):
    assert not OwnHosts().accepts([host])
    assert not OwnHosts().accepts([HERE, HERE])
    assert not OwnHosts().accepts([])


@pytest.mark.parametrize(
    "origin",
    ["http://evil.test:7860", "null", "http://localhost:3000", "https://127.0.0.1", "http://127.0.0.1:7860@evil.test"],
)
def test_foreign_origins_are_refused(origin):
    assert not OwnHosts().accepts([HERE], [origin])
    assert not OwnHosts().accepts([HERE], [f"http://{HERE}", origin])


def test_additional_names_are_accepted():
    asked = OwnHosts.of("0.0.0.0", ["Studio.test"])
    assert asked.accepts(["studio.test:7860"], ["https://studio.test"])
    assert asked.accepts(["192.168.1.7:7860"], ["http://192.168.1.7:7860"])
    assert not asked.accepts(["evil.test:7860"])
    assert not OwnHosts.of("127.0.0.1").accepts(["192.168.1.7:7860"])
    # Other servers on this machine, or on one that is named, are other sites.
    assert not OwnHosts.of("localhost").accepts([HERE], ["http://127.0.0.1:9999"])
    assert OwnHosts.of("localhost").accepts([HERE], [f"http://{HERE}"])
    assert not asked.accepts(["studio.test:7860"], ["http://studio.test:9999"])
    assert not OwnHosts.of("192.168.1.7").accepts(["192.168.1.7:7860"], ["http://192.168.1.7:9999"])
    asked.add("x.share.test")
    assert asked.accepts(["x.share.test"], ["https://x.share.test"])


def answer(headers, kind="http"):
    """Messages of the demo's outermost layer, and whether the page behind it was asked."""
    sent, asked = [], []

    async def page(scope, receive, send):
        asked.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "headers": [(name.encode(), value.encode()) for name, value in headers]}
    asyncio.run(_OnlyFromHere(page, OwnHosts())(scope, None, send))
    return sent, bool(asked)


def test_demo_answers_only_requests_of_its_page():
    sent, asked = answer([("host", HERE), ("origin", f"http://{HERE}")])
    assert asked
    assert sent[0]["status"] == 200
    assert b"content-security-policy" in dict(sent[0]["headers"])
    for headers in ([("host", "evil.test")], [("host", HERE), ("origin", "http://evil.test")], []):
        sent, asked = answer(headers)
        assert not asked
        assert sent[0]["status"] == 403
        assert b"--allow_host" in sent[1]["body"]
        sent, asked = answer(headers, "websocket")
        assert not asked
        assert sent == [{"type": "websocket.close", "code": 1008}]
