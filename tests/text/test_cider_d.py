import json
import random
from pathlib import Path

import pytest
import torch
from pycocoevalcap.cider.cider import Cider
from safetensors.torch import save_file

from hf_captionrl.text import cider_d, ngrams
from hf_captionrl.text.cider_d import CiderScorer, DocumentFrequencies
from hf_captionrl.text.ngrams import TokenBatch, count_ngrams, encode_words
from hf_captionrl.text.tokenize import ptb_tokenize
from tests.tolerances import assert_close, close

VECTORS = Path(__file__).parents[1] / "vectors"
CIDER = json.loads((VECTORS / "cider.json").read_text())
EXPECTED = CIDER["expected"]
CANDIDATES = [[ptb_tokenize(caption)] for caption in CIDER["raw_hyp"]]
REFERENCES = [[ptb_tokenize(caption) for caption in captions] for captions in CIDER["raw_refs"]]


def frequencies_from_counts(counts: dict[str, float], num_documents: int, *, eos: bool = False) -> DocumentFrequencies:
    """The authors' counts of n-grams, given as texts; the prefix of each is counted too."""
    split = [(tuple(ngram.split(" ")), count) for ngram, count in counts.items()]
    words = {word: i for i, word in enumerate(dict.fromkeys(word for ngram, _ in split for word in ngram))}
    keys, found = [], []
    before: dict[tuple[str, ...], int] = {(): 0}
    for order in range(1, max(len(ngram) for ngram, _ in split) + 1):
        rows = sorted(
            (before[ngram[:-1]] * len(words) + words[ngram[-1]], ngram, count)
            for ngram, count in split
            if len(ngram) == order
        )
        before = {ngram: i for i, (_, ngram, _) in enumerate(rows)}
        keys.append(torch.tensor([key for key, _, _ in rows], dtype=torch.long))
        found.append(torch.tensor([int(count) for _, _, count in rows], dtype=torch.int32))
    return DocumentFrequencies(num_documents, words, tuple(keys), tuple(found), len(words), eos)


def frequencies(name: str) -> DocumentFrequencies:
    if name == "corpus":
        return DocumentFrequencies.from_references(REFERENCES)
    if name == "eos":
        return frequencies_from_counts(CIDER["df_5000_eos"], CIDER["ref_len"], eos=True)
    return frequencies_from_counts(CIDER["df_5000"], CIDER["ref_len"])


@pytest.mark.parametrize(
    ("source", "variant", "key"),
    [
        ("corpus", "cider_d", "ciderD_corpus_df_of_these_8"),
        ("corpus", "cider_d", "pycocoevalcap_1.2_Cider_corpus"),
        ("corpus", "cider", "cider_plain_corpus_df_of_these_8"),
        ("5000", "cider_d", "ciderD_df_5000"),
        ("5000", "cider", "cider_plain_df_5000"),
        ("eos", "cider_d", "ciderD_df_5000_with_eos"),
    ],
)
def test_scores_equal_the_authors_numbers(source, variant, key):
    scores = CiderScorer(frequencies(source), variant=variant)(CANDIDATES, REFERENCES)
    assert_close(scores, EXPECTED[key]["per_image"])
    assert scores.mean().item() == close(EXPECTED[key]["mean"])


def random_corpus(seed: int, images: int = 12):
    """Ragged images: some references longer than others, empty captions, repeated words."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(9)]

    def caption(low: int) -> list[str]:
        return [rng.choice(words) for _ in range(rng.randint(low, 9))]

    references = [[caption(1) for _ in range(rng.randint(1, 4))] for _ in range(images)]
    candidates = [[caption(0) for _ in range(rng.randint(1, 3))] for _ in range(images)]
    candidates[0][0] = list(references[0][0])
    return candidates, references


@pytest.mark.parametrize("seed", range(2))
def test_scores_equal_pycocoevalcap_on_random_corpora(seed):
    candidates, references = random_corpus(seed)
    flat = [(candidate, image) for image, group in enumerate(candidates) for candidate in group]
    truth = {i: [" ".join(r) for r in references[image]] for i, (_, image) in enumerate(flat)}
    _, expected = Cider().compute_score(truth, {i: [" ".join(c)] for i, (c, _) in enumerate(flat)})
    # pycocoevalcap treats each candidate as a separate image, so its documents repeat.
    counted = DocumentFrequencies.from_references([references[image] for _, image in flat])
    assert_close(CiderScorer(counted)(candidates, references), expected)


def documents_of(counted, ngram):
    words = ngram.split(" ")
    counts = count_ngrams(encode_words([words], known=counted.words), len(words))
    return int(counted.lookup(counts)[counts.offsets[-2]])


def test_frequencies_equal_a_plain_loop():
    counted = DocumentFrequencies.from_references(REFERENCES)
    for n in range(1, 5):
        documents: dict[str, set[int]] = {}
        for image, captions in enumerate(REFERENCES):
            for words in captions:
                for i in range(len(words) - n + 1):
                    documents.setdefault(" ".join(words[i : i + n]), set()).add(image)
        assert len(counted.keys[n - 1]) == len(documents)
        assert all(documents_of(counted, ngram) == len(images) for ngram, images in list(documents.items())[:60])
    assert documents_of(counted, "a motorcycle zebra") == documents_of(counted, "zebra a motorcycle") == 0
    given = frequencies("5000")
    assert all(documents_of(given, ngram) == count for ngram, count in list(CIDER["df_5000"].items())[::17])


def test_saved_frequencies_are_equal(tmp_path):
    for counted in (frequencies("corpus"), frequencies("eos")):
        counted.save(tmp_path / "df.safetensors")
        loaded = DocumentFrequencies.load(tmp_path / "df.safetensors")
        assert (loaded.num_documents, loaded.words, loaded.eos) == (counted.num_documents, counted.words, counted.eos)
        one, other = (CiderScorer(given)(CANDIDATES, REFERENCES) for given in (loaded, counted))
        assert torch.equal(one, other)
    batch = TokenBatch(torch.tensor([5, 9, 5]), torch.tensor([2, 1]))  # of token ids, which have no words
    DocumentFrequencies.from_token_batch(batch, torch.tensor([0, 1])).save(tmp_path / "df.safetensors")
    loaded = DocumentFrequencies.load(tmp_path / "df.safetensors")
    assert loaded.words is None
    with pytest.raises(ValueError, match="token ids"):
        CiderScorer(loaded)(CANDIDATES, REFERENCES)


def test_truncated_or_other_file_raises(tmp_path):
    path = tmp_path / "df.safetensors"
    frequencies("corpus").save(path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="not a file of document frequencies"):
        DocumentFrequencies.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="format is None"):
        DocumentFrequencies.load(path)


def score_tokens(counted, images):
    """One candidate of image 0 against references of some images."""
    batch = encode_words([["a"]] * (1 + len(images)))
    return CiderScorer(counted).score_tokens(batch, torch.tensor([0]), torch.tensor(images))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda _: DocumentFrequencies.from_references(["a dog"]), "references"),
        (lambda _: DocumentFrequencies.from_references([[["a"]], []]), "references"),
        (lambda _: DocumentFrequencies.from_references([["a dog"]]), "references"),
        (lambda _: DocumentFrequencies.from_references([]), "references"),
        (lambda counted: CiderScorer(counted)(CANDIDATES, REFERENCES[:7]), "7 references"),
        (lambda counted: CiderScorer(counted, max_order=5), "max_order"),
        (lambda counted: CiderScorer(counted, sigma=0), "sigma"),
        (lambda counted: score_tokens(counted, [1]), "no reference"),
        (lambda counted: score_tokens(counted, [1, 0]), "sorted"),
    ],
)
def test_invalid_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call(frequencies("corpus"))


def test_code_for_other_devices_gives_the_same_scores(monkeypatch):
    """The CPU sorts with NumPy and a GPU with torch; this test runs the latter on the CPU."""
    candidates, references = random_corpus(3)
    counted = DocumentFrequencies.from_references(references)
    expected = CiderScorer(counted)(candidates, references)
    monkeypatch.setattr(ngrams, "_sort", torch.sort)
    monkeypatch.setattr(ngrams, "positions", lambda mask: torch.nonzero(mask).flatten())
    monkeypatch.setattr(cider_d, "positions", lambda mask: torch.nonzero(mask).flatten())
    assert_close(CiderScorer(counted)(candidates, references), expected)
    assert_close(CiderScorer(DocumentFrequencies.from_references(references))(candidates, references), expected)
