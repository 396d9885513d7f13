"""The vLLM backend with a fake engine: inputs and answers."""

import sys
import types

import pytest

from hf_captionrl.apps.boosting import visual_prompt
from hf_captionrl.captioners.language_models import Truncated, VLLMBackend
from hf_captionrl.data import open_image
from tests.boosting.doubles import scenes


def looking():
    return [visual_prompt(str(i), open_image(scenes()[i]["image"])) for i in range(3)]


def test_missing_vllm_raises_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match="pip install vllm"):
        VLLMBackend("m")


def test_vllm_gets_chats_and_images(monkeypatch, tmp_path):
    seen = {}

    class Engine:
        def __init__(self, **options):
            seen["engine"] = options

        def chat(self, chats, settings, use_tqdm):
            seen["chats"] = chats
            said = [
                types.SimpleNamespace(text=f"answer {i}", finish_reason="length" if i == 2 else "stop")
                for i in range(len(chats))
            ]
            return [types.SimpleNamespace(outputs=[one]) for one in said]

    fake = types.ModuleType("vllm")
    fake.LLM, fake.SamplingParams = Engine, lambda **options: options
    monkeypatch.setitem(sys.modules, "vllm", fake)
    backend = VLLMBackend("m", revision="abc", is_multimodal=True)
    assert dict(backend.complete(looking())) == {0: "answer 0", 1: "answer 1", 2: Truncated("answer 2")}
    assert seen["engine"]["revision"] == "abc"
    assert seen["engine"]["load_format"] == "safetensors"  # never a pickle
    assert backend.revision.startswith("abc")
    assert seen["chats"][0][-1]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    # The files of a folder are hashed, because its weights can change.
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = VLLMBackend(str(tmp_path)).revision
    assert before == VLLMBackend(str(tmp_path)).revision
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert VLLMBackend(str(tmp_path)).revision != before
