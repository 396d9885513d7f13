"""Backends and scenes shared by tests."""

import functools

import pyarrow.parquet

from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.captioners.language_model_clients import Prompt, image_url
from hf_captionrl.data import open_image
from hf_captionrl.scenes import load_scenes
from tests.apps.boosting.server import texts_of


@functools.cache
def scenes(number=12):
    return load_scenes(num_train=0, num_validation=0, num_test=number)["test"]


def facts_of(rows):
    return dict(zip(rows["image_id"][:], rows["facts"][:], strict=True))


class Counting:
    """A backend that records prompts and answers by a function (or like the backend it wraps)."""

    def __init__(self, inner, answer=None):
        self.inner, self.answer, self.asked = inner, answer, []
        self.model, self.revision, self.is_multimodal = inner.model, inner.revision, inner.is_multimodal

    def complete(self, prompts):
        for position, text in self.inner.complete(prompts):
            prompt = prompts[position]
            self.asked.append((prompt.stage, prompt.image_id, prompt.attempt))
            yield position, text if self.answer is None else self.answer(prompt, text)


def pair(rows, text=None, vision=None):
    """The two backends of the embedded world, with recorded prompts."""
    return {"text": Counting(SceneWriter(), text), "vision": Counting(SceneDescriber(facts_of(rows)), vision)}


def endpoint_answer(rows):
    """Answers of a good endpoint: rules for text, the full caption for an image."""
    seen = {
        image_url(open_image(image)): text for image, text in zip(rows["image"], rows["full_caption"], strict=True)
    }

    def answer(messages):
        text, image = texts_of(messages)
        if image is not None:
            return seen[image]
        return next(iter(SceneWriter().complete([Prompt("", "", text)])))[1]

    return answer


def content(path):
    """Rows of the file of captions."""
    return pyarrow.parquet.read_table(path).to_pylist()
