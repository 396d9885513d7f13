"""Prompt, labels, end token and truncation."""

import pytest
import torch

from hf_captionrl.captioners.captioner import completion_mask
from hf_captionrl.losses import IGNORE_INDEX
from tests.captioners.test_decoding import multinomial_of
from tests.tiny import FAMILIES, tiny_captioner, tiny_captions, tiny_images, tiny_model


@pytest.mark.parametrize("prompt", ["", "a picture of ", "the red cat\n"])
@pytest.mark.parametrize("family", ["blip", "vit-gpt2"])
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


def test_long_captions_are_truncated_without_an_end_token():
    captioner = tiny_captioner("vit-gpt2", prompt="a ")
    batch = captioner.encode_captions(["red cat " * 30], max_length=9)
    assert batch["labels"].shape == (1, 9)
    assert batch["input_ids"][0, -1] != captioner.eos_token_id
    assert (batch["labels"][0, 2:] == batch["input_ids"][0, 2:]).all()


def test_invalid_captions_raise():
    captioner = tiny_captioner("blip", prompt="a picture of a red cat ")
    with pytest.raises(ValueError, match=r"takes 7 tokens.*max_length \(7\)"):
        captioner.encode_captions(["dog"], max_length=7)
    assert captioner.encode_captions(["dog"], max_length=8)["labels"].tolist()[0][:7] == [IGNORE_INDEX] * 7
    with pytest.raises(ValueError, match=r"Caption 0 .* is empty"):
        captioner.encode_captions([" \n"])


def test_completion_mask():
    ids = torch.tensor([[7, 3, 0, 0], [7, 8, 9, 8], [3, 0, 0, 0], [7, 8, 0, 0], [7, 0, 8, 3]])
    mask, ended = completion_mask(ids, end_ids=[3], pad_id=0)
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert mask.long().tolist() == expected
    assert ended.tolist() == [True, False, True, False, True]
    mask, ended = completion_mask(torch.tensor([[7, 5, 5], [7, 7, 7]]), end_ids=[5], pad_id=5)
    assert mask.long().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert ended.tolist() == [True, False]


DECODINGS = {
    "greedy": {},
    "beams of one image": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
}


def own_generate(family, model, processor, pixel_values, prompt, **kwargs):
    """The original `generate`, used as in its documentation."""
    ids = processor.tokenizer(prompt, add_special_tokens=False).input_ids
    if family == "blip":
        row = [processor.tokenizer.cls_token_id, *ids, processor.tokenizer.sep_token_id]
        prompt_ids = torch.tensor([row] * pixel_values.size(0))
        return model.generate(pixel_values, input_ids=prompt_ids, **kwargs)[:, len(ids) + 1 :]
    tokenizer, name = processor.tokenizer, "input_ids" if family in ("git", "clipcap") else "decoder_input_ids"
    starts = {"git": tokenizer.cls_token_id, "clipcap": tokenizer.bos_token_id}
    start = starts.get(family, getattr(model.config, "decoder_start_token_id", None))
    kwargs[name] = torch.tensor([[start, *ids]] * pixel_values.size(0))
    return model.generate(pixel_values=pixel_values, **kwargs)[:, len(ids) + 1 :]


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_the_original(family, decoding, monkeypatch):
    prompt = "a picture of"
    captioner = tiny_captioner(family, prompt=prompt)
    untouched, processor = tiny_model(family)
    pixel_values = captioner.encode_images(tiny_images(3))["pixel_values"]
    kwargs = DECODINGS[decoding]
    N = 3 * kwargs.get("num_return_sequences", 1)
    torch.manual_seed(7)
    with monkeypatch.context() as patch:
        if kwargs.get("do_sample"):
            patch.setattr(torch, "multinomial", multinomial_of(torch.rand(6, N)))
        expected = own_generate(family, untouched, processor, pixel_values, prompt, max_new_tokens=6, **kwargs)
    torch.manual_seed(7)
    got = captioner.generate(pixel_values=pixel_values, max_new_tokens=6, **kwargs)
    torch.manual_seed(7)
    features = captioner.image_features(pixel_values).detach()
    cached = captioner.generate(image_features=features, max_new_tokens=6, **kwargs)
    assert got.ids.tolist() == expected.tolist() == cached.ids.tolist()
    assert got.captions == cached.captions
    assert len(got.captions) == len(got.ids) == len(got.ended) == len(got.mask) == N
    assert len(set(got.captions)) > 1  # captions depend on the images
    labels = captioner.encode_completions(got.ids)["labels"]
    assert torch.equal(labels[labels != IGNORE_INDEX], got.ids[got.mask])
    for caption, ids, mask, ended in zip(got.captions, got.ids, got.mask, got.ended, strict=True):
        assert not caption.startswith(prompt)
        assert not any(token in caption for token in captioner.tokenizer.all_special_tokens)
        assert caption == caption.strip()
        assert bool(ended) == (captioner.eos_token_id in ids.tolist())
        assert not ended or ids[mask][-1] == captioner.eos_token_id


def test_train_mode_is_restored_and_invalid_inputs_raise():
    captioner = tiny_captioner("blip")
    captioner.model.train()
    captioner.vision_tower.eval()
    captioner.generate(pixel_values=captioner.encode_images(tiny_images(1))["pixel_values"], max_new_tokens=2)
    assert captioner.model.training
    assert not captioner.vision_tower.training
    batch = captioner.collate(tiny_images(2), tiny_captions(2))
    with pytest.raises(ValueError, match="different batch sizes"):
        captioner.model(**batch, image_features=torch.zeros(1, 5, 32))


@pytest.mark.parametrize("family", ["vit-bert", "clipcap"])
def test_max_new_tokens_is_limited_by_the_models_positions(family):
    captioner = tiny_captioner(family, prompt="a cat ")
    head = captioner.output_head(captioner.base_model)
    with torch.no_grad():  # captions never end
        head.weight[captioner.eos_token_id] = 0
        if head.bias is not None:
            head.bias[captioner.eos_token_id] = -1e4
    batch = captioner.collate(tiny_images(2), ["red cat " * 100] * 2, max_length=500)
    assert batch["labels"].size(1) == captioner.max_text_tokens == 64
    captioner.log_probs(batch)
    written = captioner.generate(pixel_values=batch["pixel_values"], max_new_tokens=500)
    assert written.ids.size(1) == 64 - len(captioner.prompt_ids())
    assert not written.ended.any()


def test_vision_signature_depends_on_weights_and_image_processor():
    left, right, other = tiny_captioner("git"), tiny_captioner("git"), tiny_captioner("git", seed=1)
    assert left.vision_signature() == right.vision_signature()
    assert left.vision_signature() != other.vision_signature()
    right.image_processor.image_mean = [0.4, 0.5, 0.5]
    assert left.vision_signature() != right.vision_signature()
    with torch.no_grad():
        left.base_model.output.weight.add_(1.0)
    assert left.vision_signature() == tiny_captioner("git").vision_signature()
