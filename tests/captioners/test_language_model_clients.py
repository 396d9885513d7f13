"""Backends: an endpoint that is slow, overloaded or broken, a captioner, models of transformers."""

import base64
import io
import json
import shutil
import time
import types

import numpy as np
import pytest
import torch
from jinja2.exceptions import TemplateError
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_captionrl.apps.boosting.prompts import blend_prompt, visual_prompt
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.captioner import start_token_settings
from hf_captionrl.captioners.language_model_clients import (
    BackendError,
    CaptionerBackend,
    HTTPBackend,
    Prompt,
    TransformersTextBackend,
    Truncated,
    chat_text,
)
from hf_captionrl.data import open_image
from hf_captionrl.utils.model_files import model_path
from hf_captionrl.utils.prompts import Backend
from tests.apps.boosting.doubles import scenes
from tests.apps.boosting.server import ChatServer, texts_of
from tests.tiny.chat import HandSet, chat_backend
from tests.tolerances import assert_close, close


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
    assert (len(server.requests), waits) == (9, [])
    assert (server.requests[0]["model"], server.requests[0]["messages"][0]["role"]) == ("m", "system")


@pytest.mark.parametrize("fault", [429, 503, "cut", "garbage", "hang"])
def test_temporary_errors_are_retried_with_longer_waits(fault):
    timeout = {"timeout_s": 0.2} if fault == "hang" else {}
    found, waits, server = ask(lambda number, messages: fault if number < 3 else "ok", backoff_s=0.5, **timeout)
    assert found == {0: "A caption of 0000."}
    assert waits == [0.5, 1.0, 2.0]
    assert len(server.requests) == 4
    found, waits, _ = ask(lambda number, messages: fault, tries=2, **timeout)
    assert (found[0].reason, waits) == ("backend_failed", [1.0])
    assert "2 tries" in found[0].detail


@pytest.mark.parametrize("part", ["drip", "drip headers", "continue"])
def test_slow_server_is_dropped_at_the_deadline(part):
    """Each byte arrives within the timeout of a read."""
    begun = time.monotonic()
    found, waits, _ = ask(lambda number, messages: "ok" if number else part, timeout_s=0.3)
    assert (found, waits) == ({0: "A caption of 0000."}, [1.0])
    assert time.monotonic() - begun < 3  # the whole answer takes six seconds


def test_retry_after_is_respected_up_to_two_minutes():
    waits_named = ["7", "9999", "²"]  # the last is a digit in Python, but not a number
    found, waits, _ = ask(lambda number, _: (429, {"Retry-After": waits_named[number]}) if number < 3 else "ok")
    assert (found[0], waits) == ("A caption of 0000.", [7.0, 120.0, 4.0])


def test_rejected_and_long_answers_do_not_affect_others():
    found, waits, _ = ask(
        lambda number, told: 400 if "0001" in str(told) else "length" if "0002" in str(told) else "ok", 3
    )
    assert (found[1].reason, waits) == ("backend_rejected", [])
    assert (found[0], found[2]) == ("A caption of 0000.", Truncated("A caption of 0002."))


@pytest.mark.parametrize("status", [401, 404, 302])
def test_wrong_key_or_address_and_redirects_stop_the_run_and_answers_in_flight_survive(status):
    answers = []
    with ChatServer(lambda messages: "A dog.") as other, ChatServer(lambda messages: "A dog.") as server:
        header = {"Location": other.url + "/chat/completions"}
        server.plan = lambda number, _: (status, header) if number == 3 else "ok"
        prompts = [blend_prompt(str(i), ["a"]) for i in range(20)]
        with pytest.raises(BackendError, match=f"HTTP {status}"):
            answers.extend(HTTPBackend(server.url, "m", concurrency=1).complete(prompts))
    assert other.requests == []
    assert len(answers) == len(server.requests) - 1 == 3


KEY = "sk-very/secret-key"


def of_parts(text):
    """A choice whose content comes in parts that split the key."""
    return {"message": {"content": [{"text": text[:9]}, {"text": text[9:]}]}}


@pytest.mark.parametrize(
    ("answer", "plan"),
    [
        (f"A dog with {KEY}.", "ok"),
        (f"A dog with {KEY}.", "length"),
        (of_parts(f"sk {KEY}."), "ok"),
        ("", f"{KEY} is no key".encode()),
        ("", (" " * 1990 + f"key {KEY}").encode()),  # a cut before the key is hidden leaves its first letters
        ("", ("x" * 190 + KEY).encode()),
        ("", b"key " + KEY.encode() + b"\x1b[2J\x1b]0;title\x07 \xe2\x80\xae"),
    ],
)
def test_what_a_server_repeats_of_the_key_reaches_no_answer_and_no_message(monkeypatch, answer, plan):
    monkeypatch.setenv("SOME_KEY", KEY)
    with ChatServer(lambda messages: answer, lambda number, messages: plan) as server:
        backend = HTTPBackend(server.url, "m", api_key_env="SOME_KEY", tries=1)
        ((_, found),) = backend.complete([blend_prompt("1", ["a"])])
        server.plan = lambda number, messages: 401
        with pytest.raises(BackendError) as error:
            list(backend.complete([blend_prompt("1", ["a"])]))
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    text = found if isinstance(found, str) else found.text if isinstance(found, Truncated) else found.detail
    assert text.isprintable()
    assert "***" in text
    for shown in (text, str(error.value), repr(backend), backend.revision):
        assert "sk-" not in shown


@pytest.mark.parametrize("key", ["", "sk-very\nsecret", "sk-sécret"])
def test_invalid_keys_and_addresses_are_refused_without_printing_them(monkeypatch, key):
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(ValueError, match=r"api_key_env.*SOME_KEY") as error:
        HTTPBackend("http://127.0.0.1:1/v1", "m", api_key_env="SOME_KEY")
    assert "cret" not in str(error.value)
    for url in ("127.0.0.1:8000", "ftp://x/v1", "http://me:pass@x/v1", "http://x/v1?key=pass"):
        with pytest.raises(ValueError, match="base_url") as error:
            HTTPBackend(url, "m")
        assert "pass" not in str(error.value).partition("Use")[0]


def test_images_are_sent_losslessly():
    image = Image.new("RGB", (9, 7), (10, 200, 30))
    with ChatServer(lambda messages: "Green.") as server:
        list(HTTPBackend(server.url, "m", is_multimodal=True).complete([visual_prompt("1", image)]))
    text, url = texts_of(server.requests[0]["messages"])
    assert text == "Briefly describe the content of the image."
    sent = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    assert (sent.size, sent.tobytes()) == ((9, 7), image.tobytes())


def looking():
    return [visual_prompt(str(i), open_image(scenes()[i]["image"])) for i in range(5)]


def test_captioner_backend_equals_the_captioner():
    backend = CaptionerBackend("scenes:blip-mle", device="cpu", batch_size=2, max_new_tokens=20)
    assert isinstance(backend, Backend)
    assert backend.is_multimodal
    found = dict(backend.complete(looking()))
    captioner = load_captioner(model_path("scenes:blip-mle"), device="cpu")
    inputs = captioner.encode_images([prompt.image for prompt in looking()])
    expected = captioner.generate(**inputs, max_new_tokens=20, num_beams=1, do_sample=False).captions
    assert [found[i] for i in range(5)] == expected
    short = CaptionerBackend("scenes:blip-mle", device="cpu", max_new_tokens=2)
    assert dict(short.complete(looking()[:1]))[0] == Truncated(" ".join(expected[0].split()[:2]))


def retrained(folder, name="scenes:blip-mle", weight=None):
    """A copy of a shipped model; one value of `weight` is modified in place."""
    if not folder.exists():
        shutil.copytree(model_path(name), folder)
    if weight is not None:
        (path,) = folder.glob("*model.safetensors")
        state = load_file(path)
        state[weight].view(-1)[0] += 0.5
        save_file(state, path, metadata={"format": "pt"})
    return str(folder)


def test_revision_covers_adapter_weights_and_prompt(tmp_path):
    retrained(tmp_path / "blip-mle")  # the base model of the adapter is this neighbouring folder
    folder = retrained(tmp_path / "adapter", "scenes:blip-sr")
    found = {CaptionerBackend(name, device="cpu").revision for name in (folder, "scenes:blip-sr")}
    assert len(found) == 1
    retrained(tmp_path / "adapter", weight=min(load_file(f"{folder}/adapter_model.safetensors")))
    found.add(CaptionerBackend(folder, device="cpu").revision)
    settings = json.loads((tmp_path / "adapter/captioner.json").read_text())
    (tmp_path / "adapter/captioner.json").write_text(json.dumps(settings | {"prompt": "two "}))
    found.add(CaptionerBackend(folder, device="cpu").revision)
    assert len(found) == 3


def text_backend(**settings):
    return TransformersTextBackend("scenes:gpt2-perplexity", device="cpu", dtype="float32", **settings)


@pytest.fixture(scope="module")
def writer():
    return text_backend(max_new_tokens=8, batch_size=2)


def test_answers_do_not_depend_on_the_batch_size(writer):
    prompts = [Prompt("blend", str(i), text) for i, text in enumerate(("two pigs", "a tree", "some large ducks on"))]
    together = dict(writer.complete(prompts))
    alone = [dict(writer.complete([prompt]))[0] for prompt in prompts]
    assert [together[i] for i in range(3)] == alone
    assert "two pigs" not in text_of(together[0])  # the answer, without the question


def text_of(answer):
    return answer.text if isinstance(answer, Truncated) else answer


def test_only_text_without_end_token_is_truncated(writer):
    found = text_of(dict(writer.complete([Prompt("blend", "1", "two pigs")]))[0])
    ids = writer._tokenizer(found)["input_ids"]
    before = writer._model.generation_config.eos_token_id
    try:
        writer._special.add(ids[2])  # as if the third token were the end
        writer._model.generation_config.eos_token_id = ids[2]
        ended = dict(writer.complete([Prompt("blend", "1", "two pigs")]))[0]
    finally:
        writer._model.generation_config.eos_token_id = before
        writer._special.discard(ids[2])
    assert isinstance(ended, str)
    assert len(ended) < len(found)
    tight = text_backend(max_new_tokens=2)
    assert isinstance(dict(tight.complete([Prompt("blend", "1", "two pigs")]))[0], Truncated)


def test_later_attempts_are_reproducible_samples(writer):
    def ask(attempt):
        return dict(writer.complete([Prompt("blend", "1", "a pig", attempt=attempt)]))[0]

    assert ask(1) == ask(1)
    assert len({ask(0), ask(1), ask(2), ask(3)}) > 1


def test_too_long_prompt_fails_without_affecting_others(writer):
    found = dict(writer.complete([Prompt("blend", "1", "a pig"), blend_prompt("2", ["a pig"] * 300)]))
    assert isinstance(found[0], str | Truncated)
    assert found[1].reason == "backend_rejected"


def test_prompts_of_models_without_a_system_role_and_without_a_template():
    class Template:  # like the first one of Mistral
        chat_template = "x"

        def apply_chat_template(self, turns, tokenize, add_generation_prompt):
            if turns[0]["role"] == "system" or turns[-1]["content"] == "broken":
                raise TemplateError("roles must alternate")
            return "|".join(f"{turn['role'][0]}:{turn['content']}" for turn in turns)

    asked = Prompt("blend", "1", "Q", "S", (("q", "a"),))
    assert chat_text(Template(), asked) == "u:S\n\nq|a:a|u:Q"
    with pytest.raises(TemplateError):  # other template errors are raised
        chat_text(Template(), Prompt("blend", "1", "broken"))
    # The layout of the paper.
    assert chat_text(object(), asked) == "S\n\nUser : q\n\nAssistant : a\n\nUser : Q\n\nAssistant :"
    # A template that writes the start token, as processors do too.
    processor = types.SimpleNamespace(chat_template="x", tokenizer=types.SimpleNamespace(bos_token="<s>"))
    assert start_token_settings(processor, "<s>USER: a") == {"add_special_tokens": False}
    assert start_token_settings(processor, "USER: a") == {}


# --- Log-probabilities of answers --------------------------------------------------------------------------------------


ANSWERS = ["Yes", "No", "0.1", "a dog sleeps"]


def log_probs(backend, prompts, answers):
    return np.array([scores for _, scores in backend.score_answers(prompts, answers)])


def whole_log_probs(backend, inputs, ids):
    """One pass over the prompt and the whole answer, without a cache."""
    length = inputs["input_ids"].shape[1]
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    longer = dict(inputs, input_ids=torch.cat([inputs["input_ids"], torch.tensor([ids])], 1))
    for name, value in inputs.items():
        # PaliGemma sees a prompt in both directions, and its answer (type 1) in one; the types of other models are 0 for text.
        types = backend._model.config.model_type == "paligemma" and name == "token_type_ids"
        if name != "input_ids" and value.shape[:2] == (1, length):
            fill = torch.full((1, len(ids)), int(types or name == "attention_mask"), dtype=value.dtype)
            longer[name] = torch.cat([value, fill], 1)
    with torch.no_grad():
        logits = backend._model(**longer).logits[0].double().log_softmax(-1)
    return sum(float(logits[length - 1 + place, token]) for place, token in enumerate(ids))


@pytest.mark.parametrize("kind", ["llava", "paligemma", "qwen2_5_vl", "gemma3", "smolvlm"])
def test_answers_after_one_pass_over_the_prompt_equal_whole_passes(kind, tmp_path):
    """With one image and with three in a prompt; positions of Qwen are of three axes, the windows of Gemma slide."""
    backend = chat_backend(kind, tmp_path)
    images = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    prompts = [Prompt("x", "1", "two dogs?", image=images[0]), Prompt("x", "2", "a dog and a cat?", image=images)]
    found = log_probs(backend, prompts, ANSWERS)
    assert found.shape == (2, 4)
    for prompt, row in zip(prompts, found, strict=True):
        inputs, (text,) = backend._encoded([prompt])
        ids = backend._answer_ids(text, int(inputs["input_ids"][0, -1]), ANSWERS)
        assert [backend._tokenizer.decode(own).strip() for own in ids] == ANSWERS
        assert len(ids[3]) > len(ids[1]) > 1  # several tokens
        expected = [whole_log_probs(backend, inputs, own) for own in ids]
        assert_close(row, expected, dtype="float32", ulps=64)
    assert np.abs(found[0] - found[1]).min() > 1e-4  # the prompt matters


def test_prompt_is_computed_once_and_16_bits_are_summed_in_more(tmp_path):
    backend = chat_backend("llava", tmp_path, dtype="bfloat16")
    hand = HandSet(backend, lambda colours, text: {"0": 3.0, ".": 2.0, "7": 1.0, "1": -2.0})
    prompt = Prompt("x", "1", "how good?", image=Image.new("RGB", (16, 16), "red"))
    (found,) = log_probs(backend, [prompt], ["0.7", "1.0", "0.77777777"])
    assert hand.forwards == 2  # the prompt, and all answers together
    # Each of 11 tokens has a probability that bf16 rounds by up to 0.02 nats at this magnitude.
    assert_close(found, [hand.log_prob(["r"], "", answer) for answer in ("0.7", "1.0", "0.77777777")], dtype="float32")


def test_text_models_have_log_probabilities_too(writer):
    found = log_probs(writer, [Prompt("x", "", "two pigs"), Prompt("x", "", "a tree")], ["on a", "left of"])
    for prompt, row in zip(("two pigs", "a tree"), found, strict=True):
        inputs, _ = writer._encoded([Prompt("x", "", prompt)])
        for answer, value in zip((" on a", " left of"), row, strict=True):
            ids = writer._tokenizer(answer, add_special_tokens=False)["input_ids"]
            assert value == close(whole_log_probs(writer, inputs, ids), dtype="float32", ulps=64)
    [(_, failure)] = writer.score_answers([blend_prompt("2", ["a pig"] * 300)], ["a"])
    assert failure.reason == "backend_rejected"


def test_several_images_are_named_by_letters():
    images = [Image.new("RGB", (2, 2)), Image.new("RGB", (3, 3))]
    with ChatServer(lambda messages: "B") as server:
        list(HTTPBackend(server.url, "m", is_multimodal=True).complete([Prompt("x", "", "Which?", image=images)]))
    parts = server.requests[0]["messages"][0]["content"]
    assert [part.get("text", "image") for part in parts] == ["Image A: ", "image", "Image B: ", "image", "Which?"]
