"""Scorers on tiny random models equal the original models, called with one caption at a time."""

import json
import logging
import pickle

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPModel,
    GemmaTokenizer,
    PreTrainedTokenizerFast,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    Siglip2Processor,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
)
from transformers.utils.logging import warning_once

from hf_captionrl.retrieval.open_clip_scorer import OpenClipScorer
from hf_captionrl.retrieval.scorer import HFScorer, Scorer, TokenScorer, load_scorer
from tests.retrieval.tiny_scorers import CAPTIONS, LIMIT, WORDS, assert_unit, make_clip, make_images, make_tokenizer
from tests.tolerances import assert_close


def make_siglip():
    # T5's convention in SigLIP: no BOS, padding and EOS are the same token.
    vocabulary = {word: i for i, word in enumerate(["<bos>", "<eos>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<bos>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    special = {"eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<bos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=LIMIT, **special)
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": len(WORDS) + 2, "max_position_embeddings": LIMIT, "projection_size": 16}
    config = SiglipConfig(text_config=small | words, vision_config={**small, "image_size": 32, "patch_size": 16})
    images = SiglipImageProcessor(size={"height": 32, "width": 32})
    return SiglipModel(config).eval(), SiglipProcessor(image_processor=images, tokenizer=tokenizer)


def test_only_the_default_token_ids_of_siglip_are_no_warning(caplog):
    warning_once.cache_clear()
    log = logging.getLogger("transformers")  # which does not propagate
    log.addHandler(caplog.handler)
    try:
        repr(make_siglip()[0].config)
        assert "31999" not in caplog.text
        assert f"between 0 and {len(WORDS) + 1}), got 49407" in caplog.text  # of its own vocabulary
    finally:
        log.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def clip():
    model, processor = make_clip()
    return HFScorer(model, processor, batch_size=2)


def test_clip_equals_the_model_called_with_full_padding_one_caption_at_a_time(clip):
    features = clip.text_features(CAPTIONS)
    assert_unit(features, len(CAPTIONS))
    for caption, row in zip(CAPTIONS, features, strict=True):
        inputs = clip.tokenizer([caption], padding="max_length", max_length=LIMIT, return_tensors="pt")
        own = clip.model.get_text_features(**inputs).pooler_output[0]
        assert_close(row, own / own.norm())
    assert features[0].equal(features[4])  # equal captions, bit-equal features
    assert len({tuple(row.round(decimals=4).tolist()) for row in features}) == 4


def test_images_equal_the_model_called_one_by_one_in_any_mode(clip):
    images = make_images()
    features = clip.image_features([images[0], images[1].convert("RGBA"), images[2].convert("L")])
    assert_unit(features, 3)
    for image, row in zip([images[0], images[1], images[2].convert("L").convert("RGB")], features, strict=True):
        pixels = clip.image_processor(images=image, return_tensors="pt").pixel_values
        own = clip.model.get_image_features(pixel_values=pixels).pooler_output[0]
        assert_close(row, own / own.norm())


def test_scorer_protocol_and_attributes(clip):
    assert isinstance(clip, Scorer)
    assert clip.logit_scale == pytest.approx(100.0, rel=1e-6)
    assert clip.max_text_tokens == LIMIT
    name, dtype, text, padding, library = clip.signature.split("|")
    assert name == f"CLIPModel@{clip.fingerprint[:12]}"
    assert (dtype, text, padding) == ("float32", f"text:{LIMIT}", "pad:longest")
    assert library.startswith("transformers:")
    assert not any(parameter.requires_grad for parameter in clip.model.parameters())
    assert not clip.model.training
    assert clip.text_features([]).shape == (0, 8)
    assert clip.image_features([]).shape == (0, 8)
    assert clip.text_features([""]).shape == (1, 8)
    assert load_scorer(clip) is clip
    copy = pickle.loads(pickle.dumps(clip))
    assert copy.text_features(CAPTIONS).equal(clip.text_features(CAPTIONS))


def test_truncated_caption_keeps_eos_and_is_counted(clip):
    fits = " ".join(["cat"] * (LIMIT - 2))
    long = fits + " dog dog dog"
    assert clip.count_truncated([fits, long, "a"]) == 1
    assert clip.count_truncated([]) == 0
    assert clip.text_features([long]).equal(clip.text_features([fits]))


def test_token_counts_ids_and_features(clip):
    assert isinstance(clip, TokenScorer)
    assert clip.count_tokens([*CAPTIONS, "cat " * 30]) == [5, 3, 11, 7, 5, 32]
    assert clip.count_tokens([]) == clip.token_features([]) == []
    features = clip.token_features([*CAPTIONS, "cat " * 30])
    assert [row.shape for row in features] == [(n, 8) for n in (5, 3, 11, 7, 5, LIMIT)]
    for caption, rows in zip(CAPTIONS, features, strict=False):
        # One caption at a time, with the parts of the model.
        inputs = clip.tokenizer([caption], return_tensors="pt")
        own = clip.model.text_projection(clip.model.text_model(**inputs).last_hidden_state)[0]
        assert_close(rows, own)
        assert_close(rows[-1] / rows[-1].norm(), clip.text_features([caption])[0])


def test_half_weights_give_fp32_unit_features_and_the_exact_scale(clip):
    full = clip.text_features(CAPTIONS)
    model, processor = make_clip()
    scorer = HFScorer(model, processor, dtype=torch.bfloat16)
    assert next(scorer.model.parameters()).dtype == scorer.dtype == torch.bfloat16
    # bf16 rounds ln(100) to 4.59 or 4.62: after the cast, the scale would be 99 or 102.
    assert scorer.logit_scale == pytest.approx(100.0, rel=1e-6)
    half = scorer.text_features(CAPTIONS)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # of a trainer
        assert clip.text_features(CAPTIONS).equal(full)
    assert_unit(half, len(CAPTIONS))
    assert_unit(scorer.image_features(make_images()), 3)
    assert (half * full).sum(-1).min() > 0.99
    assert "|bfloat16|" in scorer.signature
    assert scorer.cache_revision.split("|")[0] == scorer.fingerprint


def test_siglip_is_padded_to_the_full_length_without_a_mask():
    model, processor = make_siglip()
    scorer = HFScorer(model, processor)
    assert scorer.padding == "max_length"
    features = scorer.text_features(CAPTIONS)
    for caption, row in zip(CAPTIONS, features, strict=True):
        ids = scorer.tokenizer([caption], padding="max_length", max_length=LIMIT, return_tensors="pt")["input_ids"]
        own = model.get_text_features(input_ids=ids).pooler_output[0]  # no mask, as in training
        assert_close(row, own / own.norm())
    # Control: with the shortest padding or with the mask, the features differ.
    short = HFScorer(model, processor)
    short.padding = "longest"
    assert (short.text_features(CAPTIONS) - features).abs().max() > 1e-3
    inputs = scorer.tokenizer(CAPTIONS, padding="max_length", max_length=LIMIT, return_tensors="pt")
    masked = model.get_text_features(**inputs).pooler_output
    assert (masked / masked.norm(dim=-1, keepdim=True) - features).abs().max() > 1e-3
    assert_unit(scorer.image_features(make_images()), 3)
    assert scorer.count_truncated(["cat " * LIMIT, "cat " * (LIMIT - 1)]) == 1
    assert scorer.count_tokens(["a cat", "cat " * 40]) == [3, 41]


LETTERS = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *"adogADOG"])}


def similarity(scorer):
    features = scorer.text_features(["A Dog", "a dog"])
    return float(features[0] @ features[1])


@pytest.mark.parametrize("naflex", [False, True])
def test_siglip_2_reads_lower_case_and_images_of_any_shape(tmp_path, naflex):
    model, processor = make_siglip()
    processor.tokenizer = gemma = GemmaTokenizer(vocab=LETTERS, merges=[], model_max_length=LIMIT)
    if naflex:
        settings = {f"{part}_config": getattr(model.config, f"{part}_config").to_dict() for part in ("text", "vision")}
        settings["vision_config"] |= {"num_patches": 16, "patch_size": 8}
        model = Siglip2Model(Siglip2Config(**settings)).eval()
        processor = Siglip2Processor(Siglip2ImageProcessor(patch_size=8, max_num_patches=16), gemma)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    scorer = load_scorer(tmp_path)
    assert similarity(scorer) == pytest.approx(1)
    # The tokenizer of siglip2 lowers the text itself.
    assert (scorer.canonical_text, "|case:lower|" in scorer.signature) == (("", False) if naflex else ("lower", True))
    for image, row in zip(make_images(), scorer.image_features(make_images()), strict=True):
        own = model.get_image_features(**scorer.image_processor(images=image, return_tensors="pt")).pooler_output[0]
        assert_close(row, own / own.norm())
    scorer.tokenizer, scorer.canonical_text = gemma, ""  # control
    assert similarity(scorer) < 0.999


def test_a_cased_clip_with_long_text_is_read_as_it_is():
    model, processor = make_clip(make_tokenizer(("<bos>", "<pad>"), last=("A", "Dog", "<eos>")))
    model.config.text_config.max_position_embeddings = 248
    processor.tokenizer.model_max_length = 77  # LongCLIP keeps CLIP's tokenizer
    scorer = HFScorer(CLIPModel(model.config).eval(), processor)
    assert similarity(scorer) < 0.999
    assert "case:" not in scorer.signature
    captions = ["A Dog", "red cat " * 100, "red cat " * 99 + "red dog", "cat " * 300]
    assert (scorer.max_text_tokens, scorer.count_truncated(captions)) == (248, 1)
    for caption, row in zip(captions[:3], scorer.text_features(captions), strict=False):
        own = scorer.model.get_text_features(**processor.tokenizer([caption], return_tensors="pt")).pooler_output[0]
        assert_close(row, own / own.norm())
    assert OpenClipScorer(make_open_clip(context_length=248)[0]).max_text_tokens == 248


def test_a_tower_that_needs_remote_code_is_refused(tmp_path):
    code = {"AutoConfig": "configuration_clip.JinaCLIPConfig", "AutoModel": "modeling_clip.JinaCLIPModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "jina_clip", "auto_map": code}))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"auto_map.*never executed"):
        load_scorer(tmp_path)


def test_legacy_pooling_raises_unless_eos_is_the_highest_id():
    low_eos = make_tokenizer(("<bos>", "<pad>", "<eos>"))  # EOS is 2, "zebra" the highest id
    model, processor = make_clip(low_eos)
    with pytest.raises(ValueError, match="2 means the highest id"):
        HFScorer(model, processor)
    # OpenAI's checkpoints have 2 too, but EOS (49407) is the highest id, so nothing is ignored.
    model, processor = make_clip(eos=2)
    fine = HFScorer(model, processor).text_features(["a zebra on the mat", "a zebra under the big dog"])
    assert (fine[0] - fine[1]).abs().max() > 1e-3


def test_revision_is_equal_for_folder_and_model_and_changes_with_a_weight(tmp_path):
    model, processor = make_clip()
    model.save_pretrained(tmp_path / "tiny_clip")
    processor.save_pretrained(tmp_path / "tiny_clip")
    loaded = load_scorer(tmp_path / "tiny_clip")
    assert isinstance(loaded, HFScorer)
    assert loaded.signature.startswith("tiny_clip@")
    assert str(tmp_path) not in loaded.signature
    assert loaded.fingerprint == HFScorer(model, processor).fingerprint
    assert loaded.fingerprint == load_scorer(tmp_path / "tiny_clip", dtype="bfloat16").fingerprint
    assert loaded.text_features(CAPTIONS).equal(HFScorer(model, processor).text_features(CAPTIONS))

    other, _ = make_clip()
    with torch.no_grad():
        other.text_projection.weight[0, 0] += 1e-6
    assert HFScorer(other, processor).fingerprint != loaded.fingerprint
    other, _ = make_clip()
    other.config.vision_config.hidden_act = "gelu"
    assert HFScorer(other, processor).fingerprint != loaded.fingerprint
    _, processor = make_clip()
    processor.image_processor.image_mean = [0.5, 0.5, 0.5]
    assert HFScorer(make_clip()[0], processor).fingerprint != loaded.fingerprint


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.text_features("a cat"), "captions"),
        (lambda s: HFScorer(s.model, s.tokenizer), "image_processor"),
        (lambda s: load_scorer(s.model, processor=make_clip()[1], dtype="int8"), "dtype"),
        (lambda s: HFScorer(*make_clip(eos=7)), "position 0 would be pooled"),
        (lambda s: load_scorer(torch.nn.Linear(1, 1)), "get_text_features"),
        (lambda s: load_scorer(42), "42"),
        (lambda s: load_scorer("open_clip:ViT-B-3"), "'ViT-B-3' is neither an architecture.*Similar names: ViT-B-32"),
        (lambda s: load_scorer("open_clip:ViT-B-32"), "does not specify weights.*laion2b_s34b_b79k"),
        (lambda s: load_scorer("./nowhere"), r"The scorer .*nowhere' is not a folder.*open_clip:NAME@TAG"),
    ],
)
def test_invalid_arguments_raise(clip, call, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(clip)


def test_features_that_are_not_finite_raise():
    model, processor = make_clip()
    with torch.no_grad():
        model.text_model.embeddings.token_embedding.weight[processor.tokenizer.vocab["zebra"]] = float("nan")
    scorer = HFScorer(model, processor)
    with pytest.raises(ValueError, match="features of caption 1 have norm nan"):
        scorer.text_features(["a cat", "a zebra"])
    with torch.no_grad():
        model.visual_projection.weight.zero_()
    with pytest.raises(ValueError, match=r"features of image 0 have norm 0\.0"):
        scorer.image_features(make_images(1))


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
    assert scorer.count_tokens(["word " * 40, "a"]) == [42, 3]
    assert isinstance(scorer, TokenScorer)
    for caption, rows in zip(captions, scorer.token_features(captions), strict=True):
        assert len(rows) == min(scorer.count_tokens([caption])[0], 20)
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
    scorer = OpenClipScorer(model, tokenizer=Words())
    assert not scorer._trim
    own = model.encode_text(scorer.tokenizer(CAPTIONS), normalize=True)
    assert_close(scorer.text_features(CAPTIONS), own)
    assert scorer.count_truncated(["cat " * (LIMIT - 1), "cat " * LIMIT, "a", "cat " * 30]) == 2
    assert scorer.count_tokens(["cat " * (LIMIT - 1), "cat " * LIMIT, "a", "cat " * 30]) == [LIMIT, LIMIT + 1, 2, 31]


def test_open_clip_from_a_local_folder_whose_weights_must_be_safetensors(tmp_path):
    model, config = make_open_clip()
    weights = {k: v.contiguous() for k, v in model.state_dict().items()}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    with pytest.raises(ValueError, match="cannot be loaded"):  # no weights
        load_scorer(tmp_path)
    torch.save(weights, tmp_path / "open_clip_pytorch_model.bin")
    save_file(weights, tmp_path / "other.safetensors")  # which open_clip ignores
    for name in (f"open_clip:local-dir:{tmp_path}", f"open_clip:{tmp_path}", tmp_path):
        with pytest.raises(ValueError, match=r"open_clip_pytorch_model\.bin' cannot be .* not in safetensors"):
            load_scorer(name)
    save_file(weights, tmp_path / "open_clip_model.safetensors")
    expected, other = OpenClipScorer(model), OpenClipScorer(make_open_clip(seed=1)[0])
    for name in (f"open_clip:local-dir:{tmp_path}", f"open_clip:{tmp_path}", tmp_path):
        scorer = load_scorer(name)
        assert scorer.signature.startswith(f"open_clip:{tmp_path.name}@")
        assert scorer.fingerprint == load_scorer(tmp_path).fingerprint != other.fingerprint
    torch.testing.assert_close(scorer.text_features(CAPTIONS), expected.text_features(CAPTIONS))
