"""An open_clip scorer equals the functions of its model."""

import json

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from hf_captionrl.retrieval.scorer import OpenClipScorer, Scorer, TokenScorer, load_scorer
from tests.retrieval.tiny_scorers import CAPTIONS, LIMIT, assert_unit, make_images, make_tokenizer
from tests.tolerances import assert_close


def make_open_clip(seed=0, **text):
    torch.manual_seed(seed)
    config = {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16, "head_width": 32},
        "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2, **text},
    }
    return open_clip.CLIP(**config).eval(), config


@pytest.mark.parametrize("pool", ["argmax", "eos"])
def test_open_clip_equals_encode_text_with_the_real_bpe(pool):
    model, _ = make_open_clip(pool_type=pool, eos_id=49407)
    scorer = OpenClipScorer(model, batch_size=2)
    assert scorer._trim  # short captions are not padded to the context length
    captions = [*CAPTIONS, "", "Émile's 3 cats!!!! (see www.example.org) <end>", "word " * 40]
    features = scorer.text_features(captions)
    assert_unit(features, len(captions))
    own = model.encode_text(scorer.tokenizer(captions, context_length=20), normalize=True)
    assert_close(features, own)
    assert scorer.count_truncated(captions) == 1
    assert scorer.count_truncated(["word " * 18, "word " * 19]) == 1
    assert scorer.token_ids(["word " * 40])[0][-1] == 49407
    assert scorer.count_tokens(["word " * 40, "a"]) == [42, 3]
    assert isinstance(scorer, TokenScorer)
    for caption, rows in zip(captions, scorer.token_features(captions), strict=True):
        assert len(rows) == len(scorer.token_ids([caption])[0]) <= 20
        own = scorer.text_features([caption])[0]
        assert_close(rows[-1] / rows[-1].norm(), own)
    images = make_images()
    own = model.encode_image(torch.stack([scorer.preprocess(image) for image in images]), normalize=True)
    assert_close(scorer.image_features(images), own, ulps=32)
    assert scorer.logit_scale == pytest.approx(1 / 0.07, rel=1e-5)
    assert isinstance(scorer, Scorer)
    assert isinstance(load_scorer(model), OpenClipScorer)
    if pool == "eos":
        wrong, _ = make_open_clip(pool_type="eos", eos_id=2)  # open_clip's default id, which CLIP's BPE never produces
        with pytest.raises(ValueError, match="pools at token 2, but the tokenizer ends a caption with 49407"):
            OpenClipScorer(wrong)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_open_clip_in_half_precision(dtype):
    full = OpenClipScorer(make_open_clip()[0])
    half = OpenClipScorer(make_open_clip()[0], dtype=dtype)
    assert half.fingerprint == full.fingerprint
    assert half.cache_revision != full.cache_revision
    assert_unit(half.text_features(CAPTIONS), len(CAPTIONS))
    assert (half.text_features(CAPTIONS) * full.text_features(CAPTIONS)).sum(-1).min() > 0.99
    assert (half.image_features(make_images()) * full.image_features(make_images())).sum(-1).min() > 0.99


def test_open_clip_from_a_local_folder(tmp_path):
    model, config = make_open_clip()
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    with pytest.raises(ValueError, match="cannot be loaded"):  # no weights
        load_scorer(folder)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "open_clip_model.safetensors")
    scorer = load_scorer(folder)
    assert isinstance(scorer, OpenClipScorer)
    assert scorer.signature.startswith("open_clip:tiny@")
    torch.testing.assert_close(scorer.text_features(CAPTIONS), OpenClipScorer(model).text_features(CAPTIONS))
    assert load_scorer(f"open_clip:{folder}").fingerprint == scorer.fingerprint
    assert OpenClipScorer(make_open_clip(seed=1)[0]).fingerprint != OpenClipScorer(model).fingerprint


def test_open_clip_with_full_attention_and_another_tokenizer():
    class Words:
        """A tokenizer that wraps one of transformers: fixed length, no `encode`."""

        def __init__(self):
            self.tokenizer = make_tokenizer(bos=False)

        def __call__(self, texts, context_length=LIMIT):
            kwargs = {"padding": "max_length", "truncation": True, "max_length": context_length}
            return self.tokenizer(texts, return_tensors="pt", **kwargs).input_ids

    text = {"context_length": LIMIT, "vocab_size": 32, "no_causal_mask": True, "pool_type": "last"}
    model, _ = make_open_clip(**text)
    with pytest.raises(ValueError, match="vocabulary of 32, but CLIP's has 49408"):
        OpenClipScorer(model)
    scorer = OpenClipScorer(model, tokenizer=Words())
    assert not scorer._trim
    own = model.encode_text(scorer.tokenizer(CAPTIONS), normalize=True)
    assert_close(scorer.text_features(CAPTIONS), own)
    assert scorer.count_truncated(["cat " * (LIMIT - 1), "cat " * LIMIT, "a", "cat " * 30]) == 2
    assert scorer.count_tokens(["cat " * (LIMIT - 1), "cat " * LIMIT, "a", "cat " * 30]) == [LIMIT, LIMIT + 1, 2, 31]
    assert scorer.token_ids(["a", "cat " * 30])[0] == scorer.tokenizer.tokenizer(["a"])["input_ids"][0]
    assert len(scorer.token_ids(["cat " * 30])[0]) == LIMIT

    class BeginsWithEnd(Words):
        """Like the tokenizers of OPT and GPT-2, whose only special token begins and ends a text."""

        def __call__(self, texts, context_length=LIMIT):
            rows = super().__call__(texts, context_length - 1)
            return torch.nn.functional.pad(rows, (1, 0), value=self.tokenizer.eos_token_id)

    assert OpenClipScorer(model, tokenizer=BeginsWithEnd()).count_tokens(["a cat", "cat " * 30]) == [4, 32]
    with pytest.raises(ValueError, match="not of their tokens"):
        scorer.token_features(["a"])


def test_local_weights_must_be_safetensors(tmp_path):
    model, config = make_open_clip()
    weights = {k: v.contiguous() for k, v in model.state_dict().items()}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    torch.save(weights, tmp_path / "open_clip_pytorch_model.bin")
    save_file(weights, tmp_path / "other.safetensors")  # which open_clip ignores
    for name in (f"open_clip:local-dir:{tmp_path}", f"open_clip:{tmp_path}", tmp_path):
        with pytest.raises(
            ValueError, match=r"open_clip_pytorch_model\.bin' cannot be loaded because .* not in safetensors"
        ):
            load_scorer(name)
    with pytest.raises(ValueError, match="is neither an architecture of open_clip nor a folder"):
        load_scorer(f"open_clip:local-dir:local-dir:{tmp_path}")
    save_file(weights, tmp_path / "open_clip_model.safetensors")
    scorer = load_scorer(f"open_clip:local-dir:{tmp_path}")
    assert scorer.signature.startswith(f"open_clip:{tmp_path.name}@")
    assert scorer.fingerprint == load_scorer(tmp_path).fingerprint
