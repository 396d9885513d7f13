"""First-token shifting on a WordPiece vocabulary built in the test."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_captionrl.losses import IGNORE_INDEX, shift_first_token

VOCABULARY = ["[PAD]", "[UNK]", "[SEP]", "a", "cat", "sat", "##a", "##cat", "on"]


def tokenizer_of(model) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", sep_token="[SEP]")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    return tokenizer_of(models.WordPiece(ids, unk_token="[UNK]"))


def rows(tokenizer, *captions: str) -> torch.Tensor:
    return torch.tensor([tokenizer.convert_tokens_to_ids(caption.split()) for caption in captions])


def test_input_and_target_get_the_subword_form(tokenizer):
    ids = rows(tokenizer, "on a cat sat", "on on a [SEP]", "on sat a [PAD]", "on a [PAD] [PAD]")
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX  # a prompt of one token
    labels[1, 1] = IGNORE_INDEX  # and of two
    labels[ids == 0] = IGNORE_INDEX
    labels[3] = IGNORE_INDEX  # nothing supervised
    before = ids.clone(), labels.clone()
    new_ids, new_labels = shift_first_token(ids, labels, tokenizer)
    assert torch.equal(
        new_ids, rows(tokenizer, "on ##a cat sat", "on on ##a [SEP]", "on sat a [PAD]", "on a [PAD] [PAD]")
    )
    assert torch.equal(new_labels, torch.where(labels == IGNORE_INDEX, labels, new_ids))
    assert torch.equal(ids, before[0])
    assert torch.equal(labels, before[1])


def test_only_the_first_occurrence_is_shifted_and_input_ids_are_optional(tokenizer):
    labels = rows(tokenizer, "a cat a cat")
    new_ids, new_labels = shift_first_token(None, labels, tokenizer)
    assert new_ids is None
    assert torch.equal(new_labels, rows(tokenizer, "##a cat a cat"))


@pytest.mark.parametrize("kind", ["WordLevel", "BPE"])
def test_other_vocabularies_are_refused(kind):
    # GPT-2's vocabulary contains "##" too, so the vocabulary alone does not identify WordPiece.
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    model = models.WordLevel(ids, unk_token="[UNK]") if kind == "WordLevel" else models.BPE(ids, [], unk_token="[UNK]")
    with pytest.raises(ValueError, match="needs a WordPiece tokenizer"):
        shift_first_token(None, torch.tensor([[3, 4]]), tokenizer_of(model))


def test_aligned_labels_are_refused(tokenizer):
    ids = rows(tokenizer, "a cat sat on")
    with pytest.raises(ValueError, match="labels must equal input_ids"):
        shift_first_token(ids, ids.roll(-1, 1), tokenizer)
