"""Rewards behind HTTP: equal to plain loops and bit-identical to those in process; requests that are refused; the end of a server."""

import base64
import io
import json
import pickle
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from trl import GRPOConfig, GRPOTrainer

from hf_captionrl.apps.serving.client import RemoteReward
from hf_captionrl.apps.serving.server import RewardServer, RewardService, parse_reward
from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from hf_captionrl.metrics import cider_d
from hf_captionrl.rewards import REWARDS
from hf_captionrl.scenes import check, load_scenes
from tests.apps.serving.conftest import ALL, CAPTIONS
from tests.processes import Forked
from tests.tiny.chat import tiny_chat
from tests.tolerances import assert_close


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(24))


def log_probs(scorer, captions, images, image_of):
    """Log-softmax of each caption's image among the images, one caption at a time."""
    features = scorer.image_features([open_image(image) for image in images])
    rows = [scorer.text_features([caption])[0] @ features.T * scorer.logit_scale for caption in captions]
    return [float(row.log_softmax(0)[own]) for row, own in zip(rows, image_of, strict=True)]


def test_every_reward_equals_a_loop(service, scenes):
    names = list(service.image_ids[:3])
    found = service.score(CAPTIONS, names, [0, 0, 1, 1, 2, 2])
    parts = found["parts"]
    expected = log_probs(service.scorer, CAPTIONS, scenes["image"][:3], [0, 0, 1, 1, 2, 2])
    assert_close(torch.tensor(parts["self_retrieval"]), expected, dtype="float32", magnitude=100)
    references = [list(texts) for texts in scenes["captions"]]
    for first in (0, 1):  # one caption per image at a time; the documents are all 24 images
        texts = [*CAPTIONS[first::2], *(row[0] for row in references[3:])]
        of_all = cider_d(texts, references, eos=True)["per_sample"][:3]
        assert_close(torch.tensor(parts["cider"][first::2]), of_all, dtype="float32", magnitude=10)
    assert parts["length"] == pytest.approx([-1 / 3, -5 / 3, -1 / 3, 0, -2 / 3, 0])  # tokens beyond 3, of 3
    assert parts["repetition"] == pytest.approx(
        [0, -1 / 7, 0, 0, 0, 0]
    )  # "pigs pigs" twice among the 7 pairs of words
    assert all(0 < value < 1.1 for value in parts["diversity"])
    assert found["rewards"] == pytest.approx([sum(values) for values in zip(*parts.values(), strict=True)], rel=1e-12)
    assert {name for name in REWARDS if parse_reward(name).name != name} == set()


def test_rewards_that_read_columns_of_the_data(options, scenes):
    made = RewardService(options(), ["claim_f1:score=precision", "question_oracle"])
    found = made.score(CAPTIONS, list(made.image_ids[:3]), [0, 0, 1, 1, 2, 2])["parts"]
    for row, (caption, value) in enumerate(zip(CAPTIONS, found["claim_precision"], strict=True)):
        truth = check(caption, scenes[row // 2]["facts"])
        assert value == len(truth.right) / max(len(truth.right) + len(truth.wrong), 1)
    assert len(set(found["claim_precision"])) > 1 < len(set(found["question_oracle"]))
    with pytest.raises(ValueError, match="'claim_precision' needs images of --dataset"):
        made.score(["a"], [files()[3]], [0])


def test_weights_groups_and_some_rewards(options, cache):
    made = RewardService(options(reward_weights=[2.0, 0.5]), ["length:max_tokens=1", "diversity"])
    names = list(made.image_ids[:2])
    both = made.score(["a b", "a b", "c d", "e f g"], names, [0, 0, 1, 1])
    assert both["parts"]["length"] == [-2, -2, -2, -3]
    assert both["parts"]["diversity"][:2] == [0, 0] != both["parts"]["diversity"][2:]
    assert both["rewards"] == [2 * a + 0.5 * b for a, b in zip(*both["parts"].values(), strict=True)]
    one = made.score(["a b", "c"], names, [1, 0], only=["length"])
    assert one == {"rewards": [-4, -2], "parts": {"length": [-2, -1]}}
    uneven = made.score(["a b", "a b", "c"], names, [0, 0, 1], only=["length"])
    assert uneven["rewards"] == [-4, -4, -2]
    with pytest.raises(ValueError, match="num_generations=1"):
        made.score(["a b", "a b", "c"], names, [0, 0, 1])


def test_tokens_of_the_policy(options, tokenizer):
    made = RewardService(options(tokenizer=tokenizer), ["truncation", "length:max_tokens=2"])
    with RewardServer(made, options()) as running:
        remote, columns = RemoteReward(running.address, send_ids=True), {"image_id": list(made.image_ids[:2])}
        ids = [[5, 6, 7, made._end], [5, 6]]  # the second caption has no end token
        found = remote.score(["a cat is", "a cat"], columns["image_id"], [0, 1], ids)
        assert found["parts"] == {"truncation": [0, -1], "length": [-1, 0]}
        assert made(["a cat is", "a cat"], completion_ids=ids, **columns) == found["rewards"]
        assert remote(["a cat is", "a cat"], completion_ids=ids, **columns) == found["rewards"]
        with pytest.raises(ValueError, match="truncation"):
            RemoteReward(running.address)(["a", "b"], completion_ids=ids, **columns)


def files():
    """Images as data sets have them: PIL images, a transparent one, the bytes of a JPEG, TRL's lists."""
    rng = np.random.default_rng(0)
    pixels = [Image.fromarray(rng.integers(0, 255, (40, 30 + n, 4), dtype=np.uint8)) for n in range(3)]
    jpeg = io.BytesIO()
    pixels[0].convert("RGB").save(jpeg, "JPEG")
    return [[pixels[1]], [pixels[1]], {"bytes": jpeg.getvalue(), "path": None}, pixels[2].convert("L")]


def test_numbers_over_http_are_bit_identical(service, server, ids, options):
    remote = RemoteReward(server.address)
    there, here = remote(CAPTIONS, image_id=ids), service(CAPTIONS, image_id=ids)
    assert [value.hex() for value in there] == [value.hex() for value in here]
    names = list(dict.fromkeys(ids))
    assert (
        remote.score(CAPTIONS, names, [0, 0, 1, 1, 2, 2])["parts"]
        == service.score(CAPTIONS, names, [0, 0, 1, 1, 2, 2])["parts"]
    )
    # The answer does not depend on other requests, and other images are other distractors.
    assert remote(CAPTIONS[::-1], image_id=ids) != there
    fewer, more = (service.score(CAPTIONS[:2], names[:n], [0, 0], only=["self_retrieval"])["rewards"] for n in (2, 3))
    assert fewer[0] > more[0]
    assert fewer[1] > more[1]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: remote(CAPTIONS, image_id=ids), range(12))) == [there] * 12
    assert pickle.loads(pickle.dumps(remote))(CAPTIONS, image_id=ids) == there
    chat = [[{"role": "assistant", "content": f" {caption} "}] for caption in CAPTIONS]
    assert remote(chat, image_id=ids, prompts=["?"] * 6, trainer_state=None) == there

    local = RewardService(
        options(dataset="", scorer="scenes:clip-reward"), ["self_retrieval", "length"], column="images"
    )
    with RewardServer(local, options(dataset="")) as running:
        images = RemoteReward(running.address, column="images")
        found = images(CAPTIONS[:4], images=files())
    assert found == local(CAPTIONS[:4], images=files())
    one = [value[0] if isinstance(value, list) else value for value in files()]
    expected = log_probs(local.scorer, CAPTIONS[:4], one[1:], [0, 0, 1, 2])
    assert_close(torch.tensor(found), expected, dtype="float32", magnitude=100)


def test_a_run_of_grpo_ends_in_the_same_weights(service, server, scenes, tmp_path):
    data = scenes.select_columns(["image", "image_id"])
    data = data.add_column("prompt", [[{"role": "user", "content": "What is it?"}]] * len(data))

    def weights(reward):
        model, processor = tiny_chat("llava")
        args = GRPOConfig(
            str(tmp_path),
            per_device_train_batch_size=8,
            num_generations=2,
            max_completion_length=6,
            max_steps=2,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=data, processing_class=processor)
        trainer.train()
        return trainer.model.state_dict()

    here, there = weights(service), weights(RemoteReward(server.address))
    other = weights(RemoteReward(server.address, rewards=["length"]))
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert not all(torch.equal(here[name], other[name]) for name in here)


def png(size=(8, 8), kind="PNG"):
    Image.new("RGB", size).save(buffer := io.BytesIO(), kind)
    return base64.b64encode(buffer.getvalue()).decode()


GOOD = {
    "version": 1,
    "captions": ["a", "b"],
    "images": [{"id": "test-00000"}, {"id": "test-00001"}],
    "image_of": [0, 1],
}
GOOD |= {"rewards": ["length", "self_retrieval"]}
LENGTH = {"rewards": ["length"], "captions": ["a"], "image_of": [0]}
BAD = [
    ("{", 400, "JSON"),
    (b"\xff\xfe", 400, "JSON"),
    ("[" * 100_000, 400, "JSON"),
    ("[1]", 400, "version"),
    ({"version": 2}, 400, "version"),
    ({"version": True}, 400, "version"),
    ({"version": 1.0}, 400, "version"),
    (json.dumps(GOOD | {"image_of": [0, float("nan")]}), 400, "NaN"),
    (json.dumps(GOOD).replace("[0, 1]", "[0, -Infinity]"), 400, "Infinity"),
    ({"path": "/etc/passwd"}, 400, "'path'"),
    ({"captions": "a"}, 400, "captions"),
    ({"captions": []}, 400, "captions"),
    ({"captions": ["a", None]}, 400, "captions"),
    ({"captions": ["a"] * 51}, 413, "--max_captions"),
    ({"images": ["test-00000"]}, 400, "images"),
    ({"images": [{"id": "test-00000"}, {"data": png()}]}, 400, "images"),
    ({"images": [{"path": "/etc/passwd"}, {"path": "x"}]}, 400, "images"),
    ({"images": [{"id": 0}, {"id": 1}]}, 400, "images"),
    ({"images": [{"id": "test-00000"}, {"id": "test-00000"}]}, 422, "twice"),
    ({"images": [{"id": "test-00000"}, {"id": "../../etc/passwd"}]}, 422, "--dataset"),
    ({"image_of": [0, 2]}, 400, "image_of"),
    ({"image_of": [0, -1]}, 400, "image_of"),
    ({"image_of": [0, True]}, 400, "image_of"),
    ({"image_of": [0]}, 400, "image_of"),
    ({"rewards": ["meteor"]}, 422, "'meteor'"),
    ({"completion_ids": [[1], [2]]}, 422, "--tokenizer"),
    ({"completion_ids": [[1], ["2"]]}, 400, "completion_ids"),
    (GOOD | LENGTH | {"rewards": ["self_retrieval"], "images": [{"id": "test-00000"}]}, 422, "distractors"),
    (GOOD | LENGTH | {"images": [{"data": "not base64!"}]}, 400, "images[0]"),
    (GOOD | LENGTH | {"images": [{"data": base64.b64encode(b"GIF of nothing").decode()}]}, 422, "images[0]"),
    (GOOD | LENGTH | {"images": [{"data": png((64, 64), "JPEG")[:400]}]}, 422, "images[0]"),
    (GOOD | LENGTH | {"images": [{"data": png((800, 800))}]}, 413, "--max_pixels"),
    (GOOD | LENGTH | {"images": [{"data": png((500, 500), "JPEG")}] * 3}, 413, "images[2]"),
    (GOOD | LENGTH | {"rewards": ["cider"], "images": [{"data": png()}]}, 422, "'cider'"),
    (GOOD | {"captions": ["a" * 200_000, "b"]}, 413, "--max_body"),
]


@pytest.mark.parametrize(("body", "status", "named"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_are_refused_in_one_line(server, body, status, named):
    content = body if isinstance(body, (str, bytes)) else json.dumps(GOOD | body)
    found = httpx.post(f"{server.address}/rewards", content=content, headers={"Content-Type": "application/json"})
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert named in error
    assert "\n" not in error
    assert set(found.json()) == {"version", "error"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("GET", "/rewards", {}, 404),
        ("POST", "/health", {}, 404),
        ("POST", "/rewards", {"Content-Type": "text/plain"}, 415),
        ("POST", "/rewards", None, 411),  # a stream without a length
        ("POST", "/rewards", {"Host": "rebound.example"}, 403),
        ("POST", "/rewards", {"Origin": "https://elsewhere.example"}, 403),
        ("GET", "/health", {"Host": "rebound.example"}, 403),
        ("POST", "/rewards", {}, 200),
    ],
)
def test_requests_of_other_kinds(server, method, path, headers, status):
    content = iter([b"{}"]) if headers is None else json.dumps(GOOD)
    given = {"Content-Type": "application/json"} | (headers or {})
    found = httpx.Client().request(method, server.address + path, content=content, headers=given)
    assert found.status_code == status
    assert ("error" in found.json()) == (status != 200)


def test_health_and_schema(server):
    health = httpx.get(f"{server.address}/health").json()
    assert health["rewards"] == ["self_retrieval", "cider", "diversity", "repetition", "length"]
    assert (health["version"], health["status"], health["images"]) == (1, "ok", 24)
    schema = httpx.get(f"{server.address}/schema").json()
    properties = schema["request"]["properties"]
    assert set(GOOD) | {"completion_ids"} == set(properties)
    assert set(schema["request"]["required"]) == set(GOOD) - {"rewards"}
    assert properties["captions"]["maxItems"] == schema["limits"]["max_captions"] == 50
    assert properties["rewards"]["items"]["enum"] == health["rewards"]


@pytest.mark.parametrize(
    ("settings", "rewards", "named"),
    [
        ({}, ["meteor"], "'meteor'"),
        ({}, ["length:max_token=3"], "max_token"),
        ({}, ["length:max_tokens=0"], "max_tokens"),
        ({}, ["length:max_tokens=[1"], "length"),
        ({}, ["length:max_tokens"], "FIELD=VALUE"),
        ({}, ["length", "length:max_tokens=3"], "length"),
        ({"reward_weights": [1.0, 2.0]}, ["length"], "weights"),
        ({"dataset": ""}, ["self_retrieval"], "--scorer"),
        ({"dataset": ""}, ["cider"], "--dataset"),
        ({}, ["self_retrieval:distractor_scope=bank,bank_size=500"], "bank_size"),
        ({"tokenizer": "scenes:nowhere"}, ["length"], "scenes:nowhere"),
    ],
)
def test_bad_options_are_refused(options, settings, rewards, named):
    with pytest.raises(ValueError, match=named):
        RewardService(options(**settings), rewards)


def test_a_bank_rewards_single_images(options):
    made = RewardService(options(), ["self_retrieval:distractor_scope=bank,bank_size=20"])
    first, second = ([(f"a {word} pig",), (made.image_ids[row],), (0,)] for word, row in (("red", 0), ("blue", 1)))
    alone = [made.score(*first)["rewards"][0], made.score(*second)["rewards"][0]]
    together = made.score(["a red pig", "a blue pig"], list(made.image_ids[:2]), [0, 1])["rewards"]
    assert_close(torch.tensor(together), alone, dtype="float32", magnitude=100)
    near = RewardService(options(), ["self_retrieval:distractor_scope=bank,bank_images=nearest,bank_size=5"])
    assert near.score(["a red pig"], [made.image_ids[0]], [0])["rewards"][0] < 0
    with pytest.raises(ValueError, match="--dataset"):  # an image without neighbours
        near.score(["a red pig"], [files()[3]], [0])
    assert parse_reward("self_retrieval:similarity_scale=2.5,reward_kind=cosine").scale == 2.5


def test_another_host_is_said_and_takes_addresses_only(options, capsys, monkeypatch):
    monkeypatch.setattr(RewardServer, "serve", lambda self: self._server.server_close())
    assert main(["serve-rewards", "--reward", "length", "--port", "0"]) == 0
    assert "password" not in capsys.readouterr().err
    assert main(["serve-rewards", "--reward", "length", "--host", "0.0.0.0", "--port", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "--host 0.0.0.0" in err
    assert json.loads(out)["address"].startswith("http://0.0.0.0:")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve-rewards", "--reward", "length", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port" in capsys.readouterr().err


def test_clients_that_hang_up_or_stall_leave_no_traceback(service, options, monkeypatch, capfd):
    monkeypatch.setattr(RewardServer, "timeout_s", 0.5)
    head = "POST /rewards HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    body = json.dumps(GOOD)
    with RewardServer(service, options(max_body=1000)) as running:
        for sent in ("POST /rew", head.format(900) + "{", head.format(2000) + "{", head.format(len(body)) + body):
            with socket.create_connection(("127.0.0.1", running.port)) as client:
                client.sendall(sent.encode())
                time.sleep(0.05)
                # Closing then sends a reset.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for length in (900, 2000):
            with socket.create_connection(("127.0.0.1", running.port)) as client:
                client.sendall((head.format(length) + "{").encode())
                assert b" 408 " in client.recv(100)
        assert RemoteReward(running.address, rewards=["length"])(["a"], image_id=["test-00000"]) == [0]
    assert "Traceback" not in capfd.readouterr().err


def answers(address):
    """Whether a server accepts connections."""
    try:
        return httpx.get(f"{address}/health", timeout=1).is_success
    except httpx.TransportError:
        return False


def test_sigterm_ends_a_process_after_the_request_that_has_begun(service, ids, cache):
    """The second half of a body arrives after the signal."""
    argv = ["serve-rewards", "--reward", *ALL[:5], "--dataset", "scenes", "--split", "test", "--max_images", "24"]
    with Forked(main, [*argv, "--cache_dir", cache, "--port", "0", "--json"]) as process:
        address = json.loads(process.stdout.readline())["address"]
        assert RemoteReward(address)(CAPTIONS, image_id=ids) == service(CAPTIONS, image_id=ids)
        body = json.dumps(GOOD).encode()
        head = f"POST /rewards HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", urlsplit(address).port)) as begun:
            begun.sendall(head.encode() + body[:20])
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            while answers(address):  # until the port is closed
                time.sleep(0.05)
            begun.sendall(body[20:])
            answer = b"".join(iter(lambda: begun.recv(65536), b""))
        assert b"200 OK" in answer
        assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["rewards"]) == 2
        assert process.wait() == 0


def answering(monkeypatch, *answers, **settings):
    """A client whose requests are answered in turn; the requests, and the seconds that it waits."""
    seen, waits, queue = [], [], list(answers)

    def answer(request):
        seen.append(request)
        found = queue.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(time, "sleep", waits.append)
    reward = RemoteReward("http://127.0.0.1:1", **settings)
    reward.__dict__["_client"] = httpx.Client(transport=httpx.MockTransport(answer))
    return reward, seen, waits


DROPPED, REFUSED = httpx.RemoteProtocolError("dropped"), httpx.ConnectError("refused")
ANSWER = httpx.Response(200, json={"version": 1, "rewards": [0.1], "parts": {}})


def test_connections_are_repeated_and_answers_are_not(monkeypatch):
    reward, seen, waits = answering(monkeypatch, DROPPED, REFUSED, ANSWER, backoff_s=2.0)
    assert reward(["a"], image_id=["x"]) == [0.1]
    assert (len(seen), waits) == (3, [2.0, 4.0])


@pytest.mark.parametrize(
    ("answers", "kind", "named", "requests"),
    [
        ([REFUSED] * 5, ConnectionError, "serve-rewards", 5),
        ([httpx.ReadTimeout("slow")], ConnectionError, "timeout_s", 1),
        ([httpx.Response(422, json={"version": 1, "error": "no image 'x'"})], ValueError, "no image 'x'", 1),
        ([httpx.Response(429, json={"version": 1, "error": "busy"})], ValueError, "busy", 1),
        ([httpx.Response(500, json={"version": 1, "error": "a bug"})], ConnectionError, "a bug", 1),
        ([httpx.Response(200, text="<html>")], ConnectionError, "url", 1),
        ([httpx.Response(200, json={"version": 2, "rewards": [0.1]})], ConnectionError, "version 1", 1),
        ([httpx.Response(200, json={"version": 1, "rewards": []})], ConnectionError, "url", 1),
    ],
)
def test_failures_of_a_server(monkeypatch, answers, kind, named, requests):
    reward, seen, _ = answering(monkeypatch, *answers)
    with pytest.raises(kind, match=named):
        reward(["a"], image_id=["x"])
    assert len(seen) == requests


def test_bad_arguments_of_the_client():
    with pytest.raises(ValueError, match="url"):
        RemoteReward("127.0.0.1:8787")
    with pytest.raises(ValueError, match="column"):
        RemoteReward("http://127.0.0.1:1", column="picture")(["a"], image=[files()[0]])
