"""`smile_loss` equals a plain loop and the authors' numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertTokenizerFast

from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss, shift_first_token, smile_loss
from tests.losses.conftest import Head, loop_smile
from tests.tiny import bpe_tokenizer, wordpiece_tokenizer
from tests.tolerances import assert_close, close

VECTORS = Path(__file__).parents[1] / "vectors"


@pytest.fixture(scope="module")
def vectors() -> dict:
    """The authors' batch, aligned: logits (3, 10, 40), labels (3, 10) after a prompt of 4 tokens."""
    meta = json.loads((VECTORS / "smile_loss.json").read_text())
    arrays = np.load(VECTORS / "smile_loss.npz")
    ids = torch.tensor(meta["input_ids"])
    prompt = meta["prompt_length"]
    labels = ids.masked_fill(ids == meta["pad_id"], IGNORE_INDEX)
    labels[:, :prompt] = IGNORE_INDEX
    return {
        "expected": meta["expected"],
        "pad_id": meta["pad_id"],
        "prompt": prompt,
        "logits": torch.from_numpy(arrays["logits"]),
        "labels": labels,
        "gradient": torch.from_numpy(arrays["grad_smile_wrt_logits"]),
    }


def both(vectors: dict, *, whole: bool = True, **options) -> list[torch.Tensor]:
    """Value of the reference and of the fused loss; with the identity as head, logits are hidden states."""
    logits, labels = vectors["logits"][:, :-1], vectors["labels"][:, 1:]
    if not whole:
        logits, labels = logits[:, vectors["prompt"] - 1 :], labels[:, vectors["prompt"] - 1 :]
    fused = fused_smile_loss(logits, torch.eye(logits.size(-1)), labels, **options)
    return [smile_loss(logits, labels, **options), fused]


VALUES = [
    ("smile_first_token_mle", {}),
    ("smile_no_first_token_mle", {"first_token": "smile"}),
    ("blip_block_demonstrative_md", {"first_token": "smile"}),
    ("t5_block_demonstrative_md", {}),
    ("reverse_with_first_token_mle", {"subset": "reverse", "pad_token_id": 0}),
    ("mle_label_smoothing_0.0", {"mle_weight": 1.0}),
    ("mle_label_smoothing_0.1", {"mle_weight": 1.0, "mle_label_smoothing": 0.1}),
    ("mix_lambda_0.01_(0.01*mle_ls0.1+0.99*smile)", {"mle_weight": 0.01, "mle_label_smoothing": 0.1}),
    (
        "mix_half_reverse_half_mle_ls0.1",
        {"subset": "reverse", "pad_token_id": 0, "mle_weight": 0.5, "mle_label_smoothing": 0.1},
    ),
]


@pytest.mark.parametrize(("name", "options"), VALUES, ids=[name for name, _ in VALUES])
def test_authors_values(vectors, name, options):
    for value in both(vectors, **options):
        assert value.item() == close(vectors["expected"][name], dtype="float32")


def test_authors_random_subset(vectors):
    ids = torch.tensor(vectors["expected"]["random_indices"])  # (3, 10, 10), per position
    for value in both(vectors, whole=False, subset="random", random_ids=ids, pad_token_id=0):
        assert value.item() == close(vectors["expected"]["random_demonstrative_md"], dtype="float32")
        # The released file masks with the wrong variable, so that its "random" equals SMILE.
        assert abs(value.item() - vectors["expected"]["random_as_shipped_commented_code"]) > 0.1


def test_authors_per_token_losses(vectors):
    for value in both(vectors, whole=False, reduction="none"):
        assert_close(value, torch.tensor(vectors["expected"]["smile_per_token"]))


def test_authors_gradient(vectors):
    vectors = vectors | {"logits": vectors["logits"].clone().requires_grad_()}
    for value in both(vectors):
        (gradient,) = torch.autograd.grad(value, vectors["logits"])
        assert_close(gradient, vectors["gradient"], ulps=32)


# Labels and duplicates among them.
RANDOM_IDS = torch.tensor([[1, 3, 3, 20], [0, 5, 6, 7], [1, 2, 3, 4], [6, 22, 10, 10]])
PER_POSITION = (RANDOM_IDS.roll(1, 0).unsqueeze(1) + torch.arange(7).view(1, 7, 1)) % 23
OPTIONS = [
    {},
    {"first_token": "smile"},
    {"mle_weight": 0.3, "mle_label_smoothing": 0.1},
    {"mle_weight": 1.0, "mle_label_smoothing": 0.2},
    {"subset": "reverse"},
    {"subset": "reverse", "first_token": "smile", "pad_token_id": 1},
    {"subset": "reverse", "mle_weight": 0.5, "mle_label_smoothing": 0.1, "pad_token_id": 0},
    {"subset": "random", "random_ids": RANDOM_IDS, "first_token": "mle", "mle_weight": 0.2},
    {"subset": "random", "random_ids": RANDOM_IDS, "first_token": "smile", "pad_token_id": 0},
    {"subset": "random", "random_ids": PER_POSITION, "first_token": "smile"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[str(i) for i in range(len(OPTIONS))])
def test_equals_a_plain_loop(head: Head, options):
    logits = (head.hidden @ head.weight.T + head.bias).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    weights = torch.linspace(-1, 1, head.labels.numel()).view_as(head.labels)
    losses = smile_loss(logits, head.labels, reduction="none", **options)
    expected = loop_smile(twin, head.labels, **options)
    assert_close(losses, expected)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_close(logits.grad, twin.grad, ulps=32)


def test_random_subset_of_the_paper_has_no_first_token_mle(head: Head):
    def loss(**options):
        return smile_loss(head.hidden @ head.weight.T, head.labels, subset="random", random_ids=RANDOM_IDS, **options)

    assert loss() == loss(first_token="smile") != loss(first_token="mle")


@pytest.mark.parametrize("draw", ["sequence", "position"])
def test_generator_determines_the_random_ids_of_both_functions(head: Head, draw):
    def value(function, seed):
        generator = torch.Generator().manual_seed(seed)
        return function(subset="random", random_draw=draw, generator=generator, reduction="none")

    def reference(**options):
        return smile_loss(head.hidden @ head.weight.T, head.labels, **options)

    def fused(**options):
        return fused_smile_loss(head.hidden, head.weight, head.labels, **options)

    torch.testing.assert_close(value(reference, 1), value(fused, 1))
    assert torch.equal(value(reference, 1), value(reference, 1))
    assert not torch.equal(value(reference, 1), value(reference, 2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"labels": torch.full((4, 7), IGNORE_INDEX)}, "labels"),
        ({"labels": torch.zeros(4, 6, dtype=torch.long)}, "labels"),
        ({"labels": torch.full((4, 7), 23)}, "labels contain 23"),
        ({"subset": "captions"}, "subset"),
        ({"first_token": "none"}, "first_token"),
        ({"mle_weight": 1.5}, "mle_weight"),
        ({"mle_label_smoothing": 1.0}, "mle_label_smoothing"),
        ({"reduction": "avg"}, "reduction"),
        ({"subset": "random", "num_random": 0}, "num_random"),
        ({"subset": "random", "random_ids": torch.zeros(3, 2, dtype=torch.long)}, r"random_ids \(3, 2\)"),
        ({"subset": "random", "random_ids": torch.full((4, 2), 23)}, "random_ids contain 23"),
    ],
)
def test_invalid_arguments_raise(head: Head, change, name):
    arguments = {"logits": head.hidden @ head.weight.T, "labels": head.labels} | change
    with pytest.raises(ValueError, match=name):
        smile_loss(**arguments)


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizerFast:
    return wordpiece_tokenizer()


def rows(tokenizer, *captions: str) -> torch.Tensor:
    return torch.tensor([tokenizer.convert_tokens_to_ids(caption.split()) for caption in captions])


def test_input_and_target_get_the_subword_form(tokenizer):
    ids = rows(tokenizer, "on a cat dog", "on on a [SEP]", "on dog a [PAD]", "on a [PAD] [PAD]")
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX  # a prompt of one token
    labels[1, 1] = IGNORE_INDEX  # and of two
    labels[ids == 0] = IGNORE_INDEX
    labels[3] = IGNORE_INDEX  # nothing supervised
    before = ids.clone(), labels.clone()
    new_ids, new_labels = shift_first_token(ids, labels, tokenizer)
    expected = rows(tokenizer, "on ##a cat dog", "on on ##a [SEP]", "on dog a [PAD]", "on a [PAD] [PAD]")
    assert torch.equal(new_ids, expected)
    assert torch.equal(new_labels, torch.where(labels == IGNORE_INDEX, labels, new_ids))
    assert torch.equal(ids, before[0])
    assert torch.equal(labels, before[1])


def test_only_the_first_occurrence_is_shifted_and_input_ids_are_optional(tokenizer):
    labels = rows(tokenizer, "a cat a cat")
    new_ids, new_labels = shift_first_token(None, labels, tokenizer)
    assert new_ids is None
    assert torch.equal(new_labels, rows(tokenizer, "##a cat a cat"))


def test_other_vocabularies_and_aligned_labels_are_refused(tokenizer):
    # GPT-2's vocabulary contains "##" too, so the vocabulary alone does not identify WordPiece.
    other = bpe_tokenizer()
    other.add_tokens(["##a"])
    with pytest.raises(ValueError, match="WordPiece"):
        shift_first_token(None, torch.tensor([[3, 4]]), other)
    ids = rows(tokenizer, "a cat dog on")
    with pytest.raises(ValueError, match="input_ids"):
        shift_first_token(ids, ids.roll(-1, 1), tokenizer)
