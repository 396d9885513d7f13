"""Numbers of the token-level view, against the model's full logits and plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from hf_captionrl.apps.explain.explain import explain_caption, token_pushes
from hf_captionrl.captioners import load_captioner
from hf_captionrl.losses import smile_loss
from tests.tiny import FAMILIES, tiny_captioner, tiny_images
from tests.tiny.chat import tiny_chat
from tests.tolerances import close, within

CAPTION = "a red house with a red fish"
NAMES = [*FAMILIES, "llava", "gemma3"]


def make(name):
    if name in FAMILIES:
        return tiny_captioner(name)
    model, processor = tiny_chat(name)
    return load_captioner(model, processor=processor)


def own_logits(captioner, image, caption):
    """The model's logits of the supervised tokens `(T, V)`, and these tokens: no tap, no objective."""
    batch = captioner.collate([image], [caption], max_length=77)
    labels = batch.pop("labels")
    kept = labels[0, 1:] != -100
    with torch.no_grad():
        if captioner.is_encoder_decoder:
            logits = captioner.model(
                pixel_values=batch["pixel_values"], decoder_input_ids=batch["input_ids"][:, :-1]
            ).logits
        else:
            logits = captioner.model(**batch).logits[:, -labels.size(1) : -1]
    return logits[0, kept].double(), labels[0, 1:][kept].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first_token", ["mle", "smile"])
def test_numbers_equal_those_of_the_models_logits(name, first_token):
    captioner, image = make(name), tiny_images(1)[0]
    view = explain_caption(captioner, image, CAPTION, first_token=first_token, top_k=4)
    logits, ids = own_logits(captioner, image, CAPTION)
    assert [token.token_id for token in view.tokens] == ids
    assert view.tokens[-1].is_end
    assert view.complete
    subset = sorted(set(ids))
    assert len(view.subset) == len(subset) < len(ids)
    for t, token in enumerate(view.tokens):
        scores = logits[t].tolist()
        total = math.fsum(math.exp(z) for z in scores)
        among = math.fsum(math.exp(scores[i]) for i in subset)
        whole = t == 0 and first_token == "mle"
        assert token.whole_vocabulary == whole
        expected = math.exp(scores[ids[t]]) / total
        assert token.mle_probability == close(expected, ulps=32, dtype="float32")
        assert token.mle_loss == close(-math.log(expected), dtype="float32")
        smile = expected if whole else math.exp(scores[ids[t]]) / among
        assert token.smile_probability == close(smile, ulps=64, dtype="float32")
        assert token.smile_loss == close(-math.log(smile), dtype="float32")
        assert token.outside == close(1 - among / total, ulps=32, dtype="float32")
        entropy = -math.fsum(math.exp(z) / total * (z - math.log(total)) for z in scores)
        assert token.entropy == close(entropy, dtype="float32")
        if not whole:
            # SMILE's loss is lower by the probability of words outside the caption.
            assert token.mle_loss - token.smile_loss == close(
                -math.log1p(-token.outside), ulps=64, magnitude=5, dtype="float32"
            )
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        assert [other.token_id for other in token.mle_top] == order[:4]
        inside = order if whole else [i for i in order if i in subset]
        assert [other.token_id for other in token.smile_top] == inside[:4]
        for other in (*token.mle_top, *token.smile_top):
            assert other.in_subset == (other.token_id in subset)
            assert other.text
        for other in token.smile_top:
            share = math.exp(scores[other.token_id]) / (total if whole else among)
            assert other.probability == close(share, ulps=32, dtype="float32")


@pytest.mark.parametrize("name", ["blip", "clipcap"])
def test_losses_equal_those_of_training_and_distributions_sum_to_1(name):
    captioner, image = make(name), tiny_images(1)[0]
    view = explain_caption(captioner, image, CAPTION, top_k=10**6)
    logits, ids = own_logits(captioner, image, CAPTION)
    labels = torch.tensor([ids])
    assert view.smile_loss == close(float(smile_loss(logits[None], labels)), dtype="float32")
    assert view.mle_loss == close(float(F.cross_entropy(logits, labels[0])), dtype="float32")
    assert view.mle_loss == close(captioner.own_loss(captioner.collate([image], [CAPTION])).item(), dtype="float32")
    assert view.log_prob == pytest.approx(-view.mle_loss * len(ids))
    # Negative control: another subset gives another loss.
    assert view.smile_loss != within(float(smile_loss(logits[None], labels, first_token="smile")), 1e-3)
    for token in view.tokens:
        assert math.fsum(other.probability for other in token.mle_top) == pytest.approx(1)
        assert math.fsum(other.probability for other in token.smile_top) == pytest.approx(1)
        inside = math.fsum(other.probability for other in token.mle_top if other.in_subset)
        assert inside + token.outside == pytest.approx(1)


@pytest.mark.parametrize("name", ["blip", "clipcap"])
def test_full_logits_give_the_same_view(name):
    captioner, image = make(name), tiny_images(1)[0]
    tapped = explain_caption(captioner, image, CAPTION)
    captioner.use_full_logits = True
    full = explain_caption(captioner, image, CAPTION)
    for a, b in zip(tapped.tokens, full.tokens, strict=True):
        assert a.mle_loss == close(b.mle_loss, dtype="float32")
        assert a.smile_loss == close(b.smile_loss, dtype="float32")
        assert a.outside == close(b.outside, dtype="float32")


def test_model_state_does_not_change():
    captioner, image = tiny_captioner("blip"), tiny_images(1)[0]
    quiet = explain_caption(captioner, image, CAPTION)
    captioner.model.train()
    captioner.model.text_decoder.eval()
    before = [module.training for module in captioner.model.modules()]
    assert explain_caption(captioner, image, CAPTION) == quiet
    assert [module.training for module in captioner.model.modules()] == before
    assert all(parameter.grad is None for parameter in captioner.model.parameters())


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "sum"])
def test_pushes_equal_the_gradient_at_the_logits_of_the_tokens(loss_type):
    captioner, image = tiny_captioner("blip"), tiny_images(1)[0]
    view = explain_caption(captioner, image, CAPTION)
    logits, ids = own_logits(captioner, image, CAPTION)
    advantage = -1.7
    weights, pushes = token_pushes(view, advantage, loss_type=loss_type)
    logits.requires_grad_()
    log_probs = logits.log_softmax(-1)[range(len(ids)), ids]
    # REINFORCE by hand: the loss is -A log p(caption).
    (-advantage * (log_probs.sum() if loss_type == "sum" else log_probs.mean())).backward()
    assert logits.grad is not None
    for t, token in enumerate(ids):
        assert weights[t] == pytest.approx(advantage if loss_type == "sum" else advantage / len(ids))
        assert pushes[t] == close(-float(logits.grad[t, token]), dtype="float32")
        assert pushes[t] < 0


def test_truncated_caption_has_no_end_token():
    view = explain_caption(tiny_captioner("blip"), tiny_images(1)[0], CAPTION, max_length=4)
    assert not view.complete
    assert not view.tokens[-1].is_end
    assert len(view.tokens) == 3


def test_rows_of_the_head_without_a_token_get_a_name():
    captioner = tiny_captioner("git")
    captioner.model.resize_token_embeddings(len(captioner.tokenizer) + 3, mean_resizing=False)
    view = explain_caption(captioner, tiny_images(1)[0], CAPTION, top_k=10**6)
    texts = {other.text for other in view.tokens[0].mle_top}
    assert f"<{len(captioner.tokenizer) + 2}>" in texts


@pytest.mark.parametrize(("caption", "options", "message"), [("  ", {}, "is empty"), (CAPTION, {"top_k": 0}, "top_k")])
def test_bad_input_is_refused(caption, options, message):
    with pytest.raises(ValueError, match=message):
        explain_caption(tiny_captioner("blip"), tiny_images(1)[0], caption, **options)
