"""Prompt, labels, end token and truncation."""

import pytest
import torch

from hf_captionrl.captioners.captioner import completion_mask
from hf_captionrl.losses import IGNORE_INDEX, shift_first_token
from tests.tiny import FAMILIES, tiny_captioner, tiny_images


@pytest.mark.parametrize("prompt", ["", "a picture of ", "a picture of", "the red cat\n"])
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_the_caption_and_its_end(family, prompt):
    captioner = tiny_captioner(family, prompt=prompt)
    captions = ["a red cat", "cat", "two dog on the cat"]
    batch = captioner.encode_captions(captions, max_length=60)
    for row, caption in enumerate(captions):
        ids, labels = batch["input_ids"][row], batch["labels"][row]
        length = int(batch["attention_mask"][row].sum())
        assert ids[0] == captioner.start_token_id
        assert labels[0] == IGNORE_INDEX
        assert ids[length - 1] == labels[length - 1] == captioner.eos_token_id
        assert (ids[length:] == captioner.pad_token_id).all()
        assert (labels[length:] == IGNORE_INDEX).all()
        supervised = labels[:length] != IGNORE_INDEX
        first = int(supervised.long().argmax())
        assert supervised[first:].all()
        assert (ids[:length][supervised] == labels[:length][supervised]).all()
        text = captioner.tokenizer.decode(ids[1:first].tolist()).strip()
        assert text == prompt.strip()
        assert captioner.decode(labels[first:length].unsqueeze(0)) == [caption]


def test_bpe_prompt_ids_equal_those_in_training():
    captioner = tiny_captioner("vit-gpt2", prompt="a picture of ")
    ids = captioner.encode_captions(["cat red"], max_length=60)["input_ids"][0].tolist()
    whole = captioner.tokenizer("a picture of cat red").input_ids
    assert ids[1:-1] == whole  # " cat" is one token, including the space
    captioner.prompt = "a c"  # the tokenizer would merge "a c" and "at"
    batch = captioner.encode_captions(["cat"], max_length=60)
    assert captioner.decode(batch["labels"][batch["labels"] != IGNORE_INDEX].unsqueeze(0)) == ["cat"]


@pytest.mark.parametrize("family", FAMILIES)
def test_long_captions_are_truncated_without_an_end_token(family):
    captioner = tiny_captioner(family, prompt="a ")
    batch = captioner.encode_captions(["red cat " * 30], max_length=9)
    assert batch["labels"].shape == (1, 9)
    assert batch["input_ids"][0, -1] != captioner.eos_token_id
    assert (batch["labels"][0, 2:] == batch["input_ids"][0, 2:]).all()


def test_invalid_captions_raise():
    captioner = tiny_captioner("blip", prompt="a picture of a red cat ")
    with pytest.raises(ValueError, match=r"takes 7 tokens.*max_length \(7\)"):
        captioner.encode_captions(["dog"], max_length=7)
    assert captioner.encode_captions(["dog"], max_length=8)["labels"].tolist()[0][:7] == [IGNORE_INDEX] * 7
    with pytest.raises(TypeError, match="Caption 1 is 3"):
        captioner.encode_captions(["dog", 3])
    with pytest.raises(ValueError, match=r"Caption 0 .* is empty"):
        captioner.encode_captions([" \n"])
    with pytest.raises(ValueError, match="no captions"):
        captioner.encode_captions([])
    with pytest.raises(ValueError, match="either images or image_features"):
        captioner.collate(None, ["dog"])
    with pytest.raises(ValueError, match="either images or image_features"):
        captioner.collate(tiny_images(1), ["dog"], image_features=torch.zeros(1, 2, 3))


@pytest.mark.parametrize("family", ["blip", "vit-bert"])
def test_first_token_shifting_works_with_every_family(family):
    captioner = tiny_captioner(family, prompt="a picture of ")
    batch = captioner.encode_captions(["red cat"])
    ids, labels = shift_first_token(batch["input_ids"], batch["labels"], captioner.tokenizer)
    assert captioner.tokenizer.convert_ids_to_tokens(ids[0].tolist())[4:6] == ["##red", "cat"]
    assert (labels[0, 4:] == ids[0, 4:]).all()


def test_completion_mask():
    ids = torch.tensor([[7, 3, 0, 0], [7, 8, 9, 8], [3, 0, 0, 0], [7, 8, 0, 0], [7, 0, 8, 3]])
    mask, ended = completion_mask(ids, end_ids=[3], pad_id=0)
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert mask.long().tolist() == expected
    assert ended.tolist() == [True, False, True, False, True]
    mask, ended = completion_mask(torch.tensor([[7, 5, 5], [7, 7, 7]]), end_ids=[5], pad_id=5)
    assert mask.long().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert ended.tolist() == [True, False]
