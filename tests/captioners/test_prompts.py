"""Prompts of images, words that captions must not contain, and shortest captions."""

import json

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.prompts import forbidden_tokens, mentions, prompt_without
from hf_captionrl.cli import main
from hf_captionrl.utils.model_files import model_path
from tests.captioners.models import captioner_of
from tests.tiny.chat import chat_tokenizer


@pytest.fixture(scope="module")
def captioner():
    return load_captioner(model_path("scenes:blip-mle"), device="cpu")


def caption(path, *more):
    command = ["caption", "scenes:blip-mle", "--output", str(path), "--max_images", "12", "--max_new_tokens", "16"]
    assert main([*command, *more]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [text for line in lines for text in line.get("captions", [line["caption"]])]


@pytest.mark.parametrize(
    "how",
    [
        ["--num_beams", "1"],  # the own loop
        ["--num_beams", "3", "--num_return_sequences", "3"],
        ["--do_sample", "--num_return_sequences", "3"],
    ],
)
def test_no_caption_contains_a_forbidden_word_and_all_are_long_enough(tmp_path, captioner, how):
    free = caption(tmp_path / "free.jsonl", *how)
    words = ["A", "two", "red"]  # "A" stands for "a", too
    assert all(any(mentions(text, [word]) for text in free) for word in words)
    lengths = [len(captioner.tokenizer(text, add_special_tokens=False).input_ids) for text in free]
    least = min(max(lengths), 14)
    assert min(lengths) < least
    found = caption(tmp_path / "kept.jsonl", *how, "--do_not_mention", *words, "--min_new_tokens", str(least))
    assert not any(mentions(text, words) for text in found)
    ids = [captioner.tokenizer(text, add_special_tokens=False).input_ids for text in found]
    assert min(map(len, ids)) >= least - 1  # the loop counts tokens, and decoding may join two


def spelling_tokenizer():
    """One token per character, and one for the space before a word, as SentencePiece has."""
    vocabulary = {letter: at for at, letter in enumerate('▁?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",')}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.mark.parametrize(
    "make",
    [
        lambda captioner: captioner.tokenizer,
        lambda _: chat_tokenizer(("<image>",)),
        lambda _: spelling_tokenizer(),
    ],
)
def test_every_spelling_of_a_word_has_its_tokens(captioner, make):
    tokenizer = make(captioner)

    def encoded(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    def found(ids, forbidden):
        return any(ids[at : at + len(one)] == one for one in forbidden for at in range(len(ids)))

    forbidden = forbidden_tokens(tokenizer, ["red"])
    for word in ("red", "Red", "RED"):
        for text in (f"{word} pig", f"a {word} pig", f'a "{word}" pig', f"a pig, {word}"):
            assert found(encoded(text), forbidden), text
    for text in ("a blue pig", "two dogs on the left"):
        assert not found(encoded(text), forbidden), text
    assert forbidden_tokens(tokenizer, []) == []


def test_chat_models_are_told_the_words():
    captioner = captioner_of("llava", prompt="a pig")
    with prompt_without(captioner, ["red", "[INST]"]):
        assert captioner.prompt == 'a pig\nDo not mention: "red", "\\u005bINST]".'
    assert captioner.prompt == "a pig"
