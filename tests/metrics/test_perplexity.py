import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_captionrl.metrics import caption_perplexity
from hf_captionrl.metrics.perplexity import CaptionLosses, caption_losses, perplexity_of
from tests.tolerances import close

WORDS = ["<unk>", "<bos>", "a", "dog", "cat", "runs", "red", "big"]
CAPTIONS = ["a dog runs", "a big red cat", "dog", "a red red red dog runs"]


@pytest.fixture(scope="module")
def language_model():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.3, embd_pdrop=0.3)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>")
    return GPT2LMHeadModel(config), wrapped


def plain_nats(model, ids):
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return [-float(logits[t - 1, ids[t]]) for t in range(1, len(ids))]


@pytest.mark.parametrize("bos", ["tokenizer", "prepend"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_perplexity_equals_a_plain_loop(language_model, bos, batch_size):
    model, tokenizer = language_model
    start = [1] if bos == "prepend" else []
    nats = [plain_nats(model, start + tokenizer(caption)["input_ids"]) for caption in CAPTIONS]
    model.train()
    result = caption_perplexity(CAPTIONS, model, tokenizer, bos=bos, batch_size=batch_size)
    assert model.training  # unchanged, but scored without dropout
    total = sum(map(len, nats))
    assert result["num_tokens"] == total
    assert result["perplexity"] == pytest.approx(math.exp(sum(map(sum, nats)) / total), rel=1e-5)
    assert result["nats"] == pytest.approx([sum(row) for row in nats], rel=1e-5)
    assert result["tokens"].tolist() == [len(row) for row in nats]
    own = [math.exp(sum(row) / len(row)) for row in nats if row]
    assert result["mean_perplexity"] == pytest.approx(sum(own) / len(own), rel=1e-5)
    assert math.isnan(result["per_sample"][2]) == (bos == "tokenizer")  # "dog" alone has no context
    assert f"average:micro|bos:{bos}" in result["signature"]


def test_perplexity_equals_the_loss_of_transformers(language_model):
    model, tokenizer = language_model
    model.eval()
    ids = torch.tensor([tokenizer(CAPTIONS[1])["input_ids"]])
    expected = math.exp(model(input_ids=ids, labels=ids).loss.item())
    assert caption_perplexity(CAPTIONS[1:2], model, tokenizer)["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_long_captions_are_truncated_and_counted(language_model):
    model, tokenizer = language_model
    result = caption_perplexity(["a dog " * 20, "a dog"], model, tokenizer)
    assert result["num_truncated"] == 1
    assert result["num_tokens"] == 15 + 1
    assert caption_perplexity(["a dog runs"], model, tokenizer, max_length=2)["num_tokens"] == 1


def test_signature_contains_no_local_path(language_model, tmp_path, monkeypatch):
    model, tokenizer = language_model
    (tmp_path / "judge").mkdir()
    for path, name in ((str(tmp_path / "judge"), "judge"), ("org/gpt2", "org/gpt2")):
        monkeypatch.setattr(model.config, "_name_or_path", path)
        assert f"|model:{name}|" in caption_perplexity(["a dog"], model, tokenizer)["signature"]


def test_losses_of_blocks_are_those_of_the_whole_list(language_model):
    model, tokenizer = language_model
    blocks = [["dog", "cat"], ["a dog runs"], ["a big red cat", "dog"]]  # nothing can be scored in the first
    parts = [caption_losses(block, model, tokenizer) for block in blocks]
    assert parts[0].nats.tolist() == parts[0].tokens.tolist() == [0, 0]
    joined = CaptionLosses(torch.cat([part.nats for part in parts]), torch.cat([part.tokens for part in parts]), None)
    whole = caption_perplexity([caption for block in blocks for caption in block], model, tokenizer)
    found = perplexity_of(joined, model)
    assert found["tokens"].tolist() == whole["tokens"].tolist() == [0, 0, 2, 3, 0]
    assert found["perplexity"] == close(whole["perplexity"], dtype="float32")
    assert found["signature"] == whole["signature"]


def test_bad_input_names_the_index(language_model):
    model, tokenizer = language_model
    with pytest.raises(ValueError, match=r"captions\[1\] is empty"):
        caption_perplexity(["a", ""], model, tokenizer)
    with pytest.raises(ValueError, match="No caption has a second token"):
        caption_perplexity(["dog"], model, tokenizer)
    with pytest.raises(ValueError, match="bos must be"):
        caption_perplexity(["a dog"], model, tokenizer, bos="never")  # type: ignore[arg-type]
    for option in ({"batch_size": 0}, {"max_length": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            caption_perplexity(["a dog"], model, tokenizer, **option)
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="<unk>")
    with pytest.raises(ValueError, match="needs a tokenizer with a BOS token"):
        caption_perplexity(["a dog"], model, without, bos="prepend")
