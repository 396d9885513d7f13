"""The self-check of the first batch compares two rows, whatever the size of the batch."""

import pytest
import torch

from hf_captionrl.captioners.head_tap import first_rows
from tests.tiny import FAMILIES, tiny_captioner, tiny_captions, tiny_images
from tests.tolerances import resolution


def batch_of(captioner, images, captions):
    return {**captioner.encode_images(tiny_images(images)), **captioner.encode_captions(tiny_captions(captions))}


@pytest.mark.parametrize(("images", "captions", "expected"), [(6, 6, (2, 2)), (3, 12, (1, 2)), (1, 1, (1, 1))])
def test_two_captions_are_kept_with_their_images(images, captions, expected):
    batch = batch_of(tiny_captioner("blip"), images, captions)
    found = first_rows(batch)
    assert (len(found["pixel_values"]), len(found["labels"])) == expected
    for name, value in found.items():
        assert torch.equal(value, batch[name][: len(value)])
        assert len(value) == expected[name != "pixel_values"]


def test_whole_batch_is_kept_where_rows_do_not_belong_to_captions():
    batch = batch_of(tiny_captioner("blip"), 4, 4)
    patches = {**batch, "patches": torch.zeros(50, 3)}
    assert first_rows(patches) is patches
    unsupervised = {**batch, "labels": batch["labels"].clone()}
    unsupervised["labels"][:2] = -100
    assert first_rows(unsupervised) is unsupervised


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_reads_two_rows_and_notices_a_wrong_head(family):
    captioner = tiny_captioner(family)
    batch = batch_of(captioner, 5, 5)
    rows = []
    hook = captioner.output_head(captioner.base_model).register_forward_pre_hook(
        lambda module, args: rows.append(len(args[0]))
    )
    assert captioner.self_check(batch) < resolution(10)
    assert max(rows) <= 2 * batch["labels"].size(1)
    hook.remove()
    own = captioner.own_loss
    captioner.own_loss = lambda inputs: own(inputs) + 1.0
    assert captioner.self_check(batch) > 0.9
