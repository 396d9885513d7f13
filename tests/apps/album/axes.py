"""A scorer and images of one axis each, so that ranks are known by hand."""

import torch
from PIL import Image


class Axes:
    """The text `image 2` fits image 2, and `all` fits every image equally."""

    logit_scale, max_text_tokens, signature = 1.0, 77, "axes@1"

    def image_features(self, opened):
        return torch.stack([torch.eye(6)[image.getpixel((0, 0))[0] // 40] for image in opened])

    def text_features(self, captions):
        rows = [torch.eye(6)[int(c[-1])] if c[-1].isdigit() else torch.ones(6) / 6**0.5 for c in captions]
        return torch.stack(rows)

    def count_truncated(self, captions):
        return sum("long" in text for text in captions)


def picture(number):
    """The image of an axis, 0 to 5."""
    return Image.new("RGB", (8, 8), (40 * number, 0, 0))
