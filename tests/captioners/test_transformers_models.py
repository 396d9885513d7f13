"""Backends of transformers with tiny shipped models: answers, revisions, truncation."""

import json
import shutil
import types

import pytest
import torch
from jinja2.exceptions import TemplateError
from transformers import BatchFeature

from hf_captionrl.apps.boosting import SceneWriter, blend_prompt, boost_shard, visual_prompt
from hf_captionrl.apps.boosting.boost import read_journals
from hf_captionrl.apps.boosting.prompts import VISUAL_PROMPT, answer_fault, clean_answer
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.language_models import (
    Backend,
    CaptionerBackend,
    Failure,
    Prompt,
    TransformersTextBackend,
    TransformersVisionBackend,
    Truncated,
    _continuation,
    chat_text,
)
from hf_captionrl.data import open_image
from hf_captionrl.utils.model_files import model_path
from tests.apps.boosting.doubles import scenes


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


def test_captioner_backend_in_boosting(tmp_path):
    vision = CaptionerBackend("scenes:blip-mle", device="cpu")
    found = boost_shard(scenes(), tmp_path, text=SceneWriter(), vision=vision)
    assert [row["quarantine"] for row in found] == [None] * 12


def retrained(folder, name="scenes:blip-mle", weight=None):
    """A copy of a shipped model; one value of `weight` is modified in place."""
    if not folder.exists():
        shutil.copytree(model_path(name), folder)
    if weight is not None:
        from safetensors.torch import load_file, save_file

        (path,) = folder.glob("*model.safetensors")
        state = load_file(path)
        state[weight].view(-1)[0] += 0.5
        save_file(state, path, metadata={"format": "pt"})
    return str(folder)


def test_captioner_trained_further_is_asked_again(tmp_path):
    rows = scenes()

    def boosted():
        vision = CaptionerBackend(retrained(tmp_path / "model"), device="cpu", max_new_tokens=20)
        before = len(read_journals(tmp_path / "out"))
        found = boost_shard(rows, tmp_path / "out", text=SceneWriter(), vision=vision, rows_at_once=4)
        assert [row["quarantine"] for row in found] == [None] * 12
        return len(read_journals(tmp_path / "out")) - before, vision.revision

    first, before = boosted()
    again, same = boosted()
    assert first >= 36
    assert again == 0
    assert same == before
    assert len(before.partition(";")[0]) == 12  # a hash, because there is no commit
    retrained(tmp_path / "model", weight="text_decoder.cls.predictions.bias")
    asked, after = boosted()
    assert after != before
    assert asked >= 12


def test_revision_covers_adapter_weights_and_prompt(tmp_path):
    retrained(tmp_path / "blip-mle")  # the base model of the adapter is this neighbouring folder
    folder = retrained(tmp_path / "adapter", "scenes:blip-sr")
    names = sorted(load_weights(folder))
    found = {
        CaptionerBackend(folder, device="cpu").revision,
        CaptionerBackend("scenes:blip-sr", device="cpu").revision,
    }
    assert len(found) == 1
    retrained(tmp_path / "adapter", weight=names[0])
    found.add(CaptionerBackend(folder, device="cpu").revision)
    settings = json.loads((tmp_path / "adapter/captioner.json").read_text())
    (tmp_path / "adapter/captioner.json").write_text(json.dumps(settings | {"prompt": "two "}))
    found.add(CaptionerBackend(folder, device="cpu").revision)
    assert len(found) == 3


def load_weights(folder):
    from safetensors.torch import load_file

    return load_file(f"{folder}/adapter_model.safetensors")


@pytest.fixture(scope="module")
def viewer():
    return TransformersVisionBackend("scenes:blip-mle", device="cpu", dtype="float32", batch_size=2, max_new_tokens=40)


def test_repeated_prompt_is_removed_from_the_answer(viewer):
    """BLIP repeats the prompt with another first token and without its last."""
    prompts = looking()
    end = viewer._tokenizer.sep_token_id
    # This tiny model has learned no prompt, and would end at once.
    viewer._model.text_decoder.generation_config.begin_suppress_tokens = [end]
    found = dict(viewer.complete(prompts))
    assert sorted(found) == list(range(5))
    for position, prompt in enumerate(prompts):
        text = found[position]
        assert isinstance(text, str)
        assert "describe" not in text.lower()
        assert "[" not in text
        fault = answer_fault(clean_answer(text), prompt)
        assert fault is None or fault[0] == "answer_empty", (
            fault
        )  # this tiny model generates no answer for some images
    # Expected: the complete output of BLIP, decoded.
    inputs = viewer._processor(images=[prompts[0].image], text=[VISUAL_PROMPT], return_tensors="pt")
    with torch.no_grad():
        whole = viewer._model.generate(**inputs, max_new_tokens=40, do_sample=False, num_beams=1)
    said = viewer._tokenizer.decode(whole[0])
    expected = f"[DEC] briefly describe the content of the image [UNK] {found[0]} [SEP]"
    assert said.split() == expected.split()  # the answer may be empty
    assert any(found.values())


def test_start_token_of_the_template_is_not_repeated():
    told = []

    class Processor:
        chat_template = "x"
        tokenizer = types.SimpleNamespace(bos_token="<s>")
        start = "<s>"

        def apply_chat_template(self, turns, tokenize, add_generation_prompt):
            return self.start + turns[0]["content"][1]["text"]

        def __call__(self, **options):
            told.append(options.get("add_special_tokens"))
            return BatchFeature({})

    class Backend(TransformersVisionBackend):
        def __init__(self):
            self._processor, self._template, self._device, self._batch_size = Processor(), "x", "cpu", 2
            self._max_new_tokens = 9

        def _generate(self, inputs, prompts, max_new_tokens):
            return ["a pig"] * len(prompts)

    backend = Backend()
    list(backend.complete(looking()[:1]))
    backend._processor.start = "USER: "
    list(backend.complete(looking()[:1]))
    assert told == [False, None]


def test_prompt_is_removed_in_every_layout():
    special = {0, 1, 2}
    for row in (
        [5, 6, 7, 8, 9, 2, 0],  # a chat model: every token again
        [1, 5, 6, 7, 8, 9, 2, 0],  # BLIP: another first token
        [1, 8, 9, 2, 0],  # InstructBLIP: only the answer
    ):
        assert [token for token in _continuation(row, [5, 6, 7], special) if token not in special] == [8, 9]
    assert _continuation([1, 5, 6, 8, 9], [5, 6, 7], special) == [5, 6, 8, 9]  # another text, not the prompt


@pytest.fixture(scope="module")
def writer():
    return TransformersTextBackend(
        "scenes:gpt2-perplexity", device="cpu", dtype="float32", max_new_tokens=8, batch_size=2
    )


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
    tight = TransformersTextBackend("scenes:gpt2-perplexity", device="cpu", dtype="float32", max_new_tokens=2)
    assert isinstance(dict(tight.complete([Prompt("blend", "1", "two pigs")]))[0], Truncated)


def test_later_attempts_are_reproducible_samples(writer):
    def ask(attempt):
        prompt = Prompt("blend", "1", "a pig", attempt=attempt)
        return dict(writer.complete([prompt]))[0]

    assert ask(1) == ask(1)
    assert len({ask(0), ask(1), ask(2), ask(3)}) > 1


def test_too_long_prompt_fails_without_affecting_others(writer):
    prompts = [Prompt("blend", "1", "a pig"), blend_prompt("2", ["a pig"] * 300)]
    found = dict(writer.complete(prompts))
    assert isinstance(found[0], str | Truncated)
    assert isinstance(found[1], Failure)
    assert found[1].reason == "backend_rejected"


class Template:
    """A chat template without a system role, like the first one of Mistral."""

    chat_template = "x"

    def __init__(self, broken=False):
        self.broken = broken

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        if self.broken or turns[0]["role"] == "system":
            raise TemplateError("roles must alternate")
        return "|".join(f"{turn['role'][0]}:{turn['content']}" for turn in turns)


def test_template_without_system_role_gets_instruction_in_first_question():
    text = chat_text(Template(), Prompt("blend", "1", "Q", "S", (("q", "a"),)))
    assert text == "u:S\n\nq|a:a|u:Q"
    with pytest.raises(TemplateError):  # other template errors are raised
        chat_text(Template(broken=True), Prompt("blend", "1", "Q"))


def test_model_without_template_gets_the_layout_of_the_paper():
    text = chat_text(object(), Prompt("blend", "1", "Q", "S", (("q", "a"),)))
    assert text == "S\n\nUser : q\n\nAssistant : a\n\nUser : Q\n\nAssistant :"
