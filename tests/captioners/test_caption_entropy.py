"""Entropy along given captions equals that of the full logits, position by position."""

import pytest
import torch

from hf_captionrl.captioners.prompts import caption_entropy
from tests.tiny import FAMILIES, tiny_captioner, tiny_captions, tiny_images
from tests.tolerances import close


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
