"""Entropy along given captions equals that of the full logits, position by position."""

import datasets
import numpy as np
import pytest
import torch

from hf_captionrl import load_scorer
from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.candidates import contrastive_answers
from hf_captionrl.apps.album.options import AlbumSettings
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.prompts import caption_entropy, contrastive_prompt, encode_with_prompts
from hf_captionrl.trainers.trl_grpo import _prompts
from hf_captionrl.utils.model_files import model_path
from tests.tiny import FAMILIES, tiny_captioner, tiny_captions, tiny_images
from tests.tiny.chat import tiny_chat
from tests.tolerances import assert_close, close


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_loop_over_positions(family):
    captioner = tiny_captioner(family)
    images, captions = tiny_images(5), tiny_captions(5)
    found = caption_entropy(captioner, images, captions, batch_size=2)
    captioner.model.eval()
    expected = []
    for image, caption in zip(images, captions, strict=True):
        batch = captioner.collate([image], [caption])
        with torch.no_grad():
            logits = captioner.model(**{k: v for k, v in batch.items() if k != "labels"}).logits[0].double()
        labels = captioner.align_labels(batch["labels"])[0]
        logits = logits[-len(batch["labels"][0]) :]  # a prefix of image vectors comes first
        values = []
        for position, label in enumerate(labels):
            if label != -100:
                p = logits[position].softmax(-1)
                values.append(-float((p * p.log()).sum()))
        expected.append(sum(values) / len(values))
    assert found["per_sample"] == close(expected, dtype="float32", ulps=64)
    assert found["entropy"] == close(sum(expected) / 5, dtype="float32", ulps=64)
    with pytest.raises(ValueError, match=r"5 images and 4 captions. Pass one caption per image"):
        caption_entropy(captioner, images, captions[:4])


@pytest.fixture(scope="module")
def captioner():
    model, processor = tiny_chat("llava")
    return load_captioner(model, processor=processor)


def test_prompt_names_the_captions_of_similar_images():
    found = contrastive_prompt("Describe it.", ["a red dog", "a red dog", "two\ncats", " "])
    assert found == (
        "Describe it.\nSimilar images are described like this:\n- a red dog\n- two cats\n"
        "Say what is different here, in one sentence."
    )
    assert contrastive_prompt("Describe it.", [""]) == "Describe it."


def test_prompts_per_image_equal_one_captioner_per_prompt(captioner):
    images, prompts, own = tiny_images(2), ["the cat", "a dog and a red car on the left"], captioner.prompt
    both = captioner.generate(**encode_with_prompts(captioner, images, prompts), do_sample=False, max_new_tokens=5)
    assert captioner.prompt == own
    for row, prompt in enumerate(prompts):
        alone = encode_with_prompts(captioner, images[row : row + 1], [prompt])
        captioner.prompt = prompt
        expected = captioner.encode_images(images[row : row + 1])
        captioner.prompt = own
        assert alone["prefix_ids"].tolist() == expected["prefix_ids"].tolist()
        assert_close(alone["pixel_values"], expected["pixel_values"])
        single = captioner.generate(**expected, do_sample=False, max_new_tokens=5)
        assert both.captions[row] == single.captions[0]
    with pytest.raises(ValueError, match="chat model"):
        encode_with_prompts(tiny_captioner("blip"), images, prompts)


def test_candidates_of_the_contrastive_prompt(captioner):
    images, said = tiny_images(3), [["a cat"], ["a house"], ["a red dog"]]
    options = AlbumSettings(num_beams=2, max_new_tokens=4, contrastive=True, num_distractors=1, batch_size=2)
    found = contrastive_answers(captioner, images, range(3), said, options)
    assert contrastive_answers(captioner, images, [2], said[2:], options) == found[2:]
    assert [len(mine) for mine in found] == [2, 2, 2]
    prompt = contrastive_prompt(captioner.prompt, ["a cat"])
    inputs = encode_with_prompts(captioner, images[:1], [prompt])
    alone = captioner.generate(**inputs, do_sample=False, num_beams=2, num_return_sequences=2, max_new_tokens=4)
    assert found[0] == alone.captions


def test_answers_are_edited_like_all_candidates(captioner):
    scorer = load_scorer(model_path("scenes:siglip-held-out"), device="cpu")
    settings = {"num_beams": 1, "num_samples": 0, "max_new_tokens": 4, "contrastive": True, "copy_threshold": 2}
    found = describe_album(tiny_images(3), captioner, scorer, trigger="ohwx", **settings)
    # The captioner is told the captions without the trigger.
    assert all(image.caption == "" or image.caption.startswith("ohwx") for image in found.images)


def test_grpo_has_the_same_prompt():
    class Arguments:
        prompt, contrastive_distractors = "Describe it.", 2

    rows = datasets.Dataset.from_dict({"captions": [["a dog", "x"], ["a cat"], [], ["a car"]]})
    neighbours = np.array([[1, 3, 2], [0, 2, 3], [3, 1, 0], [2, 0, 1]])
    found = _prompts(rows, Arguments, neighbours)
    assert found[0] == contrastive_prompt("Describe it.", ["a cat", "a car"])
    assert found[3] == contrastive_prompt("Describe it.", ["a dog"])
    with pytest.raises(ValueError, match="no neighbours"):
        _prompts(rows, Arguments, None)
    Arguments.contrastive_distractors = 0
    assert _prompts(rows, Arguments, None) == ["Describe it."] * 4
