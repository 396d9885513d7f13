"""Local models: tiny shipped ones through transformers, and vLLM's door."""

import sys
import types

import pytest
from jinja2.exceptions import TemplateError

from hf_captionrl.boosting import (
    Backend,
    CaptionerBackend,
    Failure,
    SceneWriter,
    TransformersTextBackend,
    TransformersVisionBackend,
    VLLMBackend,
    blend_prompt,
    boost_shard,
    visual_prompt,
)
from hf_captionrl.boosting.model_backends import chat_text
from hf_captionrl.boosting.prompts import Prompt
from hf_captionrl.captioners import load_captioner
from hf_captionrl.data import open_image
from hf_captionrl.scenes.models import model_path
from tests.boosting.doubles import scenes


def looking():
    return [visual_prompt(str(i), open_image(scenes()[i]["image"])) for i in range(5)]


def test_a_captioner_describes_as_it_does_elsewhere():
    backend = CaptionerBackend("scenes:blip-mle", device="cpu", batch_size=2, max_new_tokens=20)
    assert isinstance(backend, Backend)
    assert backend.sees_images
    found = dict(backend.complete(looking()))
    captioner = load_captioner(model_path("scenes:blip-mle"), device="cpu")
    inputs = captioner.encode_images([prompt.image for prompt in looking()])
    expected = captioner.generate(**inputs, max_new_tokens=20, num_beams=1, do_sample=False).captions
    assert [found[i] for i in range(5)] == expected


def test_a_captioner_runs_the_pipeline(tmp_path):
    vision = CaptionerBackend("scenes:blip-mle", device="cpu")
    report = boost_shard(scenes(), tmp_path, text=SceneWriter(), vision=vision)
    assert report.done == 12


def test_a_vision_model_without_a_chat_template_is_given_the_prompt():
    backend = TransformersVisionBackend(
        "scenes:blip-mle", device="cpu", dtype="float32", batch_size=2, max_new_tokens=12
    )
    found = dict(backend.complete(looking()))
    assert sorted(found) == list(range(5))
    assert all(isinstance(text, str) for text in found.values())


@pytest.fixture(scope="module")
def writer():
    return TransformersTextBackend(
        "scenes:gpt2-perplexity", device="cpu", dtype="float32", max_new_tokens=8, batch_size=2
    )


def test_a_language_model_continues_the_same_in_any_batch(writer):
    prompts = [Prompt("blend", str(i), text) for i, text in enumerate(("two pigs", "a tree", "some large ducks on"))]
    together = dict(writer.complete(prompts))
    alone = [dict(writer.complete([prompt]))[0] for prompt in prompts]
    assert [together[i] for i in range(3)] == alone
    assert "two pigs" not in together[0]  # the answer, without the question


def test_a_later_attempt_is_drawn_the_same_each_time_and_unlike_the_first(writer):
    def ask(attempt):
        prompt = Prompt("blend", "1", "a pig", attempt=attempt)
        return dict(writer.complete([prompt]))[0]

    assert ask(1) == ask(1)
    assert len({ask(0), ask(1), ask(2), ask(3)}) > 1


def test_a_prompt_longer_than_the_model_s_context_fails_alone(writer):
    prompts = [Prompt("blend", "1", "a pig"), blend_prompt("2", ["a pig"] * 300)]
    found = dict(writer.complete(prompts))
    assert isinstance(found[0], str)
    assert isinstance(found[1], Failure)
    assert found[1].reason == "backend_rejected"


class Template:
    """A tokenizer's chat template that knows no system role, as Mistral's first one."""

    chat_template = "x"

    def __init__(self, broken=False):
        self.broken = broken

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        if self.broken or turns[0]["role"] == "system":
            raise TemplateError("roles must alternate")
        return "|".join(f"{turn['role'][0]}:{turn['content']}" for turn in turns)


def test_a_template_without_a_system_role_gets_the_instruction_in_the_first_question():
    text = chat_text(Template(), Prompt("blend", "1", "Q", "S", (("q", "a"),)))
    assert text == "u:S\n\nq|a:a|u:Q"
    with pytest.raises(TemplateError):  # a template that is broken otherwise is not hidden
        chat_text(Template(broken=True), Prompt("blend", "1", "Q"))


def test_a_model_without_a_template_gets_the_paper_s_layout():
    text = chat_text(object(), Prompt("blend", "1", "Q", "S", (("q", "a"),)))
    assert text == "S\n\nUser : q\n\nAssistant : a\n\nUser : Q\n\nAssistant :"


def test_without_vllm_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match="pip install vllm"):
        VLLMBackend("m")


def test_vllm_is_given_chats_and_images(monkeypatch):
    seen = {}

    class Engine:
        def __init__(self, **options):
            seen["engine"] = options

        def chat(self, chats, settings, use_tqdm):
            seen["chats"] = chats
            return [
                types.SimpleNamespace(outputs=[types.SimpleNamespace(text=f"answer {i}")]) for i in range(len(chats))
            ]

    fake = types.ModuleType("vllm")
    fake.LLM, fake.SamplingParams = Engine, lambda **options: options
    monkeypatch.setitem(sys.modules, "vllm", fake)
    backend = VLLMBackend("m", revision="abc", sees_images=True)
    assert dict(backend.complete(looking()[:2])) == {0: "answer 0", 1: "answer 1"}
    assert seen["engine"]["revision"] == "abc"
    assert backend.revision.startswith("abc")
    assert seen["chats"][0][-1]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
