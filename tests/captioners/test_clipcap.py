"""ClipCap as a captioner: the full stop as end token, features, adapters, and supported parts."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_captionrl.captioners import ClipCapCaptioner, load_captioner
from hf_captionrl.captioners.clipcap.assembly import assemble
from hf_captionrl.rewards import CiderReward, RewardContext, RewardData
from hf_captionrl.utils.model_files import model_path
from tests.captioners.given_draws import multinomial_of
from tests.tiny import HIDDEN, tiny_captioner, tiny_clipcap, tiny_images
from tests.tolerances import assert_close


def stopping(**settings):
    model, processor = tiny_clipcap(stop_at_period=True, **settings)
    processor.tokenizer.add_tokens(["x.y"])
    model.resize_token_embeddings(len(processor.tokenizer))
    captioner = load_captioner(model, processor=processor)
    assert isinstance(captioner, ClipCapCaptioner)
    return captioner


def test_the_end_token_is_the_full_stop():
    captioner = stopping()
    period = captioner.tokenizer.convert_tokens_to_ids(".")
    other = captioner.tokenizer.convert_tokens_to_ids("x.y")
    end = captioner.tokenizer.eos_token_id
    assert captioner.eos_token_id == period
    assert captioner.start_token_id == captioner.pad_token_id == end
    assert captioner.end_token_ids[0] == period
    assert set(captioner.end_token_ids) == {period, other, end}
    assert captioner.base_model.config.period_token_ids == list(captioner.end_token_ids[:-1])
    plain = tiny_captioner("clipcap")
    assert plain.end_token_ids == (plain.eos_token_id,) == (end,)
    # Every encoded caption ends with exactly one full stop, also if the data have none.
    batches = [captioner.encode_captions([c]) for c in ("a red cat", "a red cat.", "a red cat .  ", "a red cat...")]
    for batch in batches:
        assert torch.equal(batch["labels"], batches[0]["labels"])
    labels = batches[0]["labels"][0]
    assert labels[-1] == period
    assert (labels[1:-1] != period).all()
    assert captioner.decode(labels[None, 1:]) == ["a red cat."]
    assert "." not in plain.decode(plain.encode_captions(["a red cat"])["labels"][:, 1:])[0]
    assert captioner.encode_captions(["."])["labels"].shape == (1, 3)  # a caption of full stops only is not empty
    with pytest.raises(ValueError, match="is empty"):
        captioner.encode_captions([" "])
    with pytest.raises(TypeError, match="is 3"):
        captioner.encode_captions([3])


def test_log_probs_include_the_stop_token():
    captioner = stopping(seed=2)
    pixel_values = captioner.encode_images(tiny_images(2))["pixel_values"]
    torch.manual_seed(0)
    written = captioner.generate(
        pixel_values=pixel_values, max_new_tokens=40, do_sample=True, top_k=0, num_return_sequences=60
    )
    ends = set(captioner.end_token_ids)
    seen = set()
    for ids, mask, ended, caption in zip(written.ids, written.mask, written.ended, written.captions, strict=True):
        row = ids.tolist()
        at = next((i for i, token in enumerate(row) if token in ends), None)
        assert bool(ended) == (at is not None)
        assert int(mask.sum()) == (len(row) if at is None else at + 1)
        assert mask[: int(mask.sum())].all()
        if at is not None:
            seen.add(row[at])
            assert caption.endswith(".") or row[at] != captioner.eos_token_id
    assert len(seen) > 1  # by "." and by another token
    batch = captioner.encode_completions(written.ids, written.mask)
    got = captioner.log_probs({**batch, "pixel_values": pixel_values})
    counts = (captioner.align_labels(batch["labels"]) != -100).sum(1)
    assert torch.equal(counts, written.mask.sum(1))
    # DiscriTune: mean of log p over the tokens, including the stop token, given the prefix without start token.
    model = captioner.base_model
    with torch.no_grad():
        prefix = model.prefix_embeds(pixel_values)
        for row in range(0, 120, 7):
            tokens = written.ids[row][written.mask[row]]
            embeds = torch.cat([prefix[row // 60], model.get_input_embeddings()(tokens)])
            logits = model.language_model(inputs_embeds=embeds[None]).logits[0, model.config.prefix_length - 1 : -1]
            expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].mean()
            assert_close(got[row].sum() / counts[row], expected)


def test_stop_at_period_is_an_argument_and_is_saved(tmp_path, monkeypatch):
    tiny_captioner("clipcap").save_pretrained(tmp_path / "plain")
    assert not load_captioner(tmp_path / "plain").base_model.config.stop_at_period
    captioner = load_captioner(tmp_path / "plain", stop_at_period=True)
    assert captioner.eos_token_id == captioner.tokenizer.convert_tokens_to_ids(".")
    captioner.save_pretrained(tmp_path / "stopping")
    again = load_captioner(tmp_path / "stopping")
    assert again.end_token_ids == captioner.end_token_ids
    images = again.encode_images(tiny_images(2))["pixel_values"]
    torch.manual_seed(1)
    left = again.generate(pixel_values=images, do_sample=True, max_new_tokens=20).ids
    torch.manual_seed(1)
    monkeypatch.setattr(torch, "multinomial", multinomial_of(torch.rand(20, 2)))
    right = again.model.generate(images, do_sample=True, max_new_tokens=20)[:, 1:]  # with transformers alone
    assert left.tolist() == right.tolist()
    assert load_captioner(tmp_path / "stopping", stop_at_period=False).end_token_ids == (right.new_tensor(269).item(),)


def test_vocabulary_without_a_full_stop_raises():
    model, processor = tiny_clipcap()
    alphabet = processor.tokenizer.get_vocab()
    tokens = {("full stop" if token == "." else token): index for token, index in alphabet.items()}
    processor.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(tokens, unk_token=processor.tokenizer.eos_token)),
        eos_token=processor.tokenizer.eos_token,
        pad_token=processor.tokenizer.pad_token,
    )
    assert load_captioner(model, processor=processor).eos_token_id == model.config.text_config.eos_token_id
    model, _ = tiny_clipcap(stop_at_period=True)
    with pytest.raises(ValueError, match="no token for a full stop"):
        load_captioner(model, processor=processor)


def test_cider_counts_the_full_stop_as_the_end():
    captioner = stopping()
    references = [["a red cat.", "a cat"], ["two dog", "a dog."]]

    def encode(captions):
        labels = captioner.encode_captions(list(captions))["labels"][:, 1:]
        return labels.clamp(min=0), labels != -100

    reward = CiderReward()
    reward.prepare(
        RewardData(
            image_ids=["a", "b"],
            references=references,
            image_features=lambda scorer: None,
            encode=encode,
            eos_token_id=captioner.eos_token_id,
            device=torch.device("cpu"),
        )
    )
    ids, mask = encode(["a red cat", "a dog."])
    cut = mask.clone()
    cut[0, int(mask[0].sum()) - 1] = False
    scores = []
    for kept in (mask, cut):
        context = RewardContext(
            captions=["a red cat.", "a dog."],
            ids=ids,
            mask=kept,
            ended=torch.tensor([True, True]),
            rows=torch.arange(2),
            image_ids=["a", "b"],
            references=references,
            candidates=torch.arange(2),
            positions=torch.arange(2),
            bag_size=0,
            step=0,
        )
        scores.append(reward(context))
    assert scores[0][0] > scores[1][0]  # a complete caption scores higher than a truncated one
    assert scores[0][1] == scores[1][1]


def test_features_are_the_image_embedding():
    captioner = tiny_captioner("clipcap")
    pixel_values = captioner.encode_images(tiny_images(3))["pixel_values"]
    features = captioner.image_features(pixel_values)
    assert features.shape == (3, 1, 24)
    assert torch.equal(features[:, 0], captioner.base_model.get_image_features(pixel_values).pooler_output)
    # Features are normalised after they are cached, so that the cache works with and without normalisation.
    model, processor = tiny_clipcap(normalize_image_embeds=True)
    unit = load_captioner(model, processor=processor)
    assert unit.vision_signature() == captioner.vision_signature()
    ids = unit.generate(image_features=3.0 * features.detach(), max_new_tokens=6).ids
    assert ids.tolist() == unit.generate(pixel_values=pixel_values, max_new_tokens=6).ids.tolist()


def test_clipcap_assembled_from_shipped_parts():
    parts = (model_path("scenes:clip-reward"), model_path("scenes:gpt2-perplexity"))
    model, processor = assemble(*parts, prefix_length=4)
    captioner = load_captioner(model, processor=processor)
    # The scorer is stored in 16 bits.
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(captioner.generate(**captioner.encode_images(tiny_images(1, size=72)), max_new_tokens=3).captions) == 1
    fresh, _ = assemble(*parts, prefix_length=4, fresh_language_model=True)
    assert model.language_model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(
        fresh.vision_tower.encoder.visual_projection.weight, model.vision_tower.encoder.visual_projection.weight
    )
    assert not torch.equal(fresh.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert captioner.max_text_tokens == 64 - 4 + 1
    assert captioner.image_features(captioner.encode_images(tiny_images(1, size=72))["pixel_values"]).shape == (
        1,
        1,
        4 * HIDDEN,
    )
    with pytest.raises(ValueError, match="no token for a full stop"):
        assemble(*parts, stop_at_period=True)
