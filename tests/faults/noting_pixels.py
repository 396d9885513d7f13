"""Prepared pixels of a folder of images, and a note of each image that was prepared."""

import functools
from pathlib import Path

import datasets

from hf_captionrl.data.images import decode_image
from tests.faults.jobs import KEYS, noted
from tests.tiny import tiny_captioner


@functools.cache
def _image_processor():
    return tiny_captioner("blip").prepared_pixels


class NotingPixels:
    """First part of an image processor that notes which image it is asked for."""

    def __init__(self, images, asked=None):
        self.parts, self.asked = _image_processor(), asked
        self.shape, self.signature = self.parts.shape, self.parts.signature
        self.paths = sorted(Path(images).iterdir(), key=lambda path: KEYS.index(path.stem))
        self.images = [decode_image(path) for path in self.paths]
        self.numbers = {image.numpy().tobytes(): number for number, image in enumerate(self.images)}

    def prepare(self, image):
        if self.asked:
            noted(self.asked, [self.numbers[image.numpy().tobytes()]])
        return self.parts.prepare(image)

    def rows(self):
        """The images as a data set."""
        return datasets.Dataset.from_dict({"image": [*map(str, self.paths)]}).cast_column("image", datasets.Image())
