"""Numbers of the token-level view, against the model's full logits and plain loops."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import hf_captionrl.scenes
from hf_captionrl.apps.explain.explain import (
    CaptionReward,
    explain_caption,
    explanation_json,
    token_pushes,
    visible_token,
    write_explanation,
    write_explanation_picture,
)
from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli import main
from hf_captionrl.losses import smile_loss
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes.truth_checker import mark_caption
from hf_captionrl.utils.io import to_plain
from hf_captionrl.utils.model_files import model_path
from tests.evaluation.test_pages import HOSTILE, Page
from tests.tiny import FAMILIES, tiny_captioner, tiny_images
from tests.tiny.chat import tiny_chat
from tests.tolerances import close, within

CAPTION = "a red house with a red fish"


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


@pytest.mark.parametrize(
    ("name", "first_token"),
    # A decoder with cross-attention, one that reads the image as a prefix, an encoder-decoder, and chat models.
    [("blip", "smile"), ("git", "mle"), ("vit-gpt2", "mle"), ("llava", "mle"), ("gemma3", "smile")],
)
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


def test_losses_equal_those_of_training_and_distributions_sum_to_1():
    captioner, image = make("clipcap"), tiny_images(1)[0]
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


def test_full_logits_and_training_mode_give_the_same_view():
    captioner, image = make("blip"), tiny_images(1)[0]
    tapped = explain_caption(captioner, image, CAPTION)
    captioner.model.train()
    next(captioner.model.children()).eval()
    before = [module.training for module in captioner.model.modules()]
    assert explain_caption(captioner, image, CAPTION) == tapped
    assert [module.training for module in captioner.model.modules()] == before
    assert all(parameter.grad is None for parameter in captioner.model.parameters())
    captioner.use_full_logits = True
    for a, b in zip(tapped.tokens, explain_caption(captioner, image, CAPTION).tokens, strict=True):
        for number in ("mle_loss", "smile_loss", "outside"):
            assert getattr(a, number) == close(getattr(b, number), dtype="float32")


@pytest.mark.parametrize("loss_type", ["grpo", "sum"])
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


def test_truncated_empty_and_nameless_texts():
    captioner, image = tiny_captioner("git"), tiny_images(1)[0]
    view = explain_caption(captioner, image, CAPTION, max_length=4)
    assert (view.complete, view.tokens[-1].is_end, len(view.tokens)) == (False, False, 3)
    with pytest.raises(ValueError, match="is empty"):
        explain_caption(captioner, image, "  ")
    # Rows of the head without a token get a name.
    captioner.model.resize_token_embeddings(len(captioner.tokenizer) + 3, mean_resizing=False)
    view = explain_caption(captioner, image, CAPTION, top_k=10**6)
    assert f"<{len(captioner.tokenizer) + 2}>" in {other.text for other in view.tokens[0].mle_top}


REWARD = CaptionReward(-0.25, -1.5, "the mean reward of 8 sampled captions", 2, 7, "scenes:clip-reward")


@pytest.fixture(scope="module")
def seen():
    """A view and its image."""
    image = tiny_images(1)[0]
    return explain_caption(tiny_captioner("blip"), image, "a red house with a red fish"), image


def test_page_has_every_number(seen, tmp_path):
    view, image = seen
    path = write_explanation(
        tmp_path / "e.html", view, image, "Title", image_name="one.png", note="By X.", reward=REWARD
    )
    page = Page(path)
    text = " ".join(page.text.split())
    _, pushes = token_pushes(view, 1.25)
    for token, push in zip(view.tokens, pushes, strict=True):
        row = f"{token.text} {token.mle_loss:.2f} {100 * token.mle_probability:.1f} % {token.smile_loss:.2f}"
        assert row in text
        assert f"{100 * token.outside:.1f} % {push:+.3f}" in text
    for said in ("Title", "By X.", "one.png", "rank 2 of 7", "A = +1.250", "-0.250 nats", view.caption, "8 sampled"):
        assert said in text
    assert f"{view.mle_loss:.2f} nats per token" in text
    assert f"{view.smile_loss:.2f} nats per token" in text
    assert text.count('(first_token="mle")') == 1
    assert page.text.count("not in the caption") > len(view.tokens), "in words, not only by colour"


def test_hostile_captions_and_tokens_are_escaped(seen, tmp_path):
    for text in HOSTILE:
        reward = CaptionReward(-1.0, 0.0, text, 1, 2, text)
        other = replace(seen[0].tokens[0].mle_top[0], text=text)
        tokens = [replace(token, text=text, mle_top=(other,), smile_top=(other,)) for token in seen[0].tokens]
        view = replace(seen[0], caption=text, subset=(text,), tokens=tuple(tokens))
        path = write_explanation(tmp_path / "e.html", view, seen[1], text, image_name=text, note=text, reward=reward)
        page = Page(path)
        tags = [tag for tag, _ in page.tags]
        assert [tags.count(tag) for tag in ("script", "link", "img", "style")] == [0, 0, 1, 1]
        assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on") or key == "style"]
        fetched = [v for _, a in page.tags for k, v in a.items() if k in ("src", "href", "srcset", "action", "data")]
        assert all(value.startswith(("data:image/png;base64,", "#token-")) for value in fetched)
        assert "49" not in re.sub(r"[\d.]+ ?%?", "", page.text)
        assert write_explanation_picture(tmp_path / "e.png", view, reward=reward).stat().st_size > 0


def test_picture_is_a_png_and_json_has_full_precision(seen, tmp_path):
    view, _ = seen
    path = write_explanation_picture(tmp_path / "e.png", view, reward=REWARD)
    shown = Image.open(io.BytesIO(path.read_bytes()))
    assert shown.format == "PNG"
    assert shown.width > 1500
    assert path.read_bytes() == write_explanation_picture(tmp_path / "again.png", view, reward=REWARD).read_bytes()
    found = json.loads(json.dumps(to_plain(explanation_json(view, REWARD))))
    assert found["mle_loss"] == view.mle_loss
    assert found["tokens"][1]["mle_top"][0]["probability"] == view.tokens[1].mle_top[0].probability
    assert found["reward"]["advantage"] == 1.25
    assert (found["reward"]["weights"], found["reward"]["pushes"]) == token_pushes(view, 1.25)


def test_invisible_tokens_are_shown():
    shown = {" pig": "pig", " ": "␣", "\n": "\\n", "\x07": "\\x07", "é": "é", "\ud83d": "\\ud83d"}
    assert {text: visible_token(text) for text in shown} == shown


CAPTION_COMMAND = "two purple trucks above a pizza in the snow"


@pytest.fixture(scope="module")
def rows():
    """The first fifteen scenes of the test split: two bags of 7 and an image of a third."""
    return hf_captionrl.scenes.load_scenes(num_train=0, num_validation=0, num_test=15)["test"]


@pytest.fixture(autouse=True)
def small_world(monkeypatch, rows):
    """Scenes are drawn in order, so a smaller split begins with the same ones."""
    monkeypatch.setattr(hf_captionrl.scenes, "load_scenes", lambda **settings: {"test": rows})


def explain(folder, *more):
    return main(["explain", "scenes:blip-mle", "scenes:test-00012", "--output_dir", str(folder), *more])


def test_page_picture_and_numbers(tmp_path, capsys):
    assert explain(tmp_path, "--caption", CAPTION_COMMAND, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [token["text"] for token in found["tokens"]] == [*CAPTION_COMMAND.split(), "[SEP]"]
    assert found["reward"] is None
    assert found["smile_loss"] < found["mle_loss"]
    assert found["tokens"][0]["whole_vocabulary"]
    assert f"{found['mle_loss']:.2f} nats per token" in re.sub("<[^>]+>", "", (tmp_path / "explain.html").read_text())
    assert Image.open(tmp_path / "explain.png").format == "PNG"
    assert explain(tmp_path, "--caption", CAPTION_COMMAND, "--first_token", "smile", "--top_k", "2", "--json") == 0
    other = json.loads(capsys.readouterr().out)
    assert not other["tokens"][0]["whole_vocabulary"]
    assert len(other["tokens"][0]["mle_top"]) == 2
    assert other["smile_loss"] < found["smile_loss"]


def scores_in_bag(captions, rows):
    """Scores of the purple trucks, which come first, and of the others of their bag, by plain loops."""
    scorer = load_scorer(model_path("scenes:clip-reward"))
    bag = [row for row in rows if row["bag_id"] == "001"]
    bag.sort(key=lambda row: row["image_id"] != "test-00012")
    texts, images = scorer.text_features(captions), scorer.image_features([row["image"] for row in bag])
    return [torch.stack([scorer.logit_scale * (text * image).sum() for image in images]).double() for text in texts]


@pytest.mark.parametrize("baseline", ["none", "greedy", "leave_one_out"])
def test_advantage_is_reward_minus_baseline(baseline, rows, tmp_path, capsys):
    options = ["--distractors", "scenes:bag", "--baseline", baseline, "--num_samples", "3", "--json"]
    assert explain(tmp_path, "--caption", CAPTION_COMMAND, *options) == 0
    found = json.loads(capsys.readouterr().out)["reward"]
    image = {row["image_id"]: row["image"] for row in rows}["test-00012"]
    captioner = load_captioner(model_path("scenes:blip-mle"))
    encoded = captioner.encode_images([image.convert("RGB")])
    others = []
    if baseline == "greedy":
        others = captioner.generate(**encoded, num_beams=1, do_sample=False, max_new_tokens=77).captions
    elif baseline == "leave_one_out":
        torch.manual_seed(0)
        others = captioner.generate(
            **encoded, do_sample=True, num_return_sequences=3, max_new_tokens=77, top_k=0, num_beams=1
        ).captions
    scores = scores_in_bag([CAPTION_COMMAND, *others], rows)
    own, *rest = [float(mine[0] - mine.exp().sum().log()) for mine in scores]
    expected = own - (sum(rest) / len(rest) if rest else 0.0)
    assert found["reward"] == close(own, magnitude=100, dtype="float32")
    assert found["advantage"] == close(expected, magnitude=100, dtype="float32")
    assert found["baseline"] == close(own - expected, magnitude=100, dtype="float32")
    assert found["pool_size"] == 7
    assert found["rank"] == sum(score >= scores[0][0] for score in scores[0])
    number = len(CAPTION_COMMAND.split()) + 1
    assert found["weights"] == within([expected / number] * number, 1e-4)


def test_greedy_caption_has_advantage_0_against_the_greedy_baseline(tmp_path, capsys):
    options = ["--distractors", "scenes:test-00000", "scenes:test-00012", "--baseline", "greedy", "--json"]
    assert explain(tmp_path, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["caption"]
    assert found["reward"]["pool_size"] == 2  # the image's copy is not its distractor
    assert found["reward"]["advantage"] == 0.0


@pytest.mark.parametrize(
    ("caption", "wrong"),
    [(CAPTION_COMMAND, []), ("two red trucks ABOVE a pizza in the rain", ["red", "in the rain"]), ("hello", [])],
)
def test_claims_of_a_scene_have_a_verdict_and_a_credit(caption, wrong, rows, tmp_path, capsys):
    facts = {row["image_id"]: row["facts"] for row in rows}["test-00012"]
    assert explain(tmp_path, "--caption", caption, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    claims, marks = found["claims"], mark_caption(caption, facts)
    assert [(c["text"], c["is_true"], c["start"], c["end"]) for c in claims["claims"]] == [
        (m.claim.text, m.verdict == "right", m.start, m.end) for m in marks
    ]
    assert [c["text"] for c in claims["claims"] if not c["is_true"]] == wrong
    precision = sum(m.verdict == "right" for m in marks) / max(len(marks), 1)
    at, expected = 0, []
    for word in caption.split():
        truths = [float(m.verdict == "right") for m in marks if m.start <= at < m.end]
        expected.append(sum(truths) / len(truths) - precision if truths else 0.0)
        at += len(word) + 1
    own = [token["text"] for token in found["tokens"]].index("[SEP]")
    if own == len(expected):  # one token per word
        assert claims["credits"] == pytest.approx([*expected, 0.0])
    else:
        assert claims["credits"] == [0.0] * len(found["tokens"])
    text = " ".join(Page(tmp_path / "explain.html").text.split())
    for mark in marks:
        assert f"{mark.claim.text}: {'true' if mark.verdict == 'right' else 'false'}, credit" in text
    assert ("no claim that can be checked" in text) == (not marks)
    assert explain(tmp_path, "--caption", caption) == 0
    said = capsys.readouterr().out
    assert all(f"{word}" in said.partition("wrong: ")[2] for word in wrong)


def test_image_files(rows, tmp_path, capsys):
    rows[0]["image"].save(tmp_path / "a<b>.png")
    command = ["explain", "scenes:clipcap-mle", str(tmp_path / "a<b>.png"), "--output_dir", str(tmp_path)]
    assert main([*command, "--distractors", "scenes:test-00003", "--scorer", "scenes:clip-reward"]) == 0
    html = (tmp_path / "explain.html").read_text()
    assert "a&lt;b&gt;.png" in html
    assert "Claims of the caption" not in html  # the truth of a file is not known
    assert str(tmp_path) not in html
    said = capsys.readouterr().out
    assert "nats per token under MLE" in said
    assert re.search(r"advantage [-+].* \(rank [12] of 2\)", said)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("scenes:test-99999", "'test-99999'"),
        ("no/such.png", "'no/such.png'"),
        ("no/such.png --distractors scenes:bag", "--distractors"),
        ("scenes:test-00000 --caption=", "--caption"),
        ("scenes:test-00000 --distractors scenes:test-00000", "--distractors"),
        ("scenes:test-00000 --caption pig --distractors scenes:bag --scorer none", "--scorer"),
    ],
)
def test_bad_input_exits_with_2_and_the_reason(more, name, tmp_path, capsys):
    assert main(["explain", "scenes:blip-mle", *more.split(), "--output_dir", str(tmp_path)]) == 2
    assert name in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
