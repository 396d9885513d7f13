"""The feature cache: reading and writing, and keys."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl.retrieval.feature_cache import (
    FeatureCache,
    FeatureView,
    StoreMismatchError,
    default_cache_dir,
    image_hash,
)
from tests.retrieval.cached import KEYS, Compute, make, must_not_compute, truth

# ------------------------------------------------------------------ reading and writing


@pytest.mark.parametrize("shape", [(16,), (5, 8)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_computed_once_then_mapped(tmp_path, shape, dtype):
    expected = truth(KEYS, shape, dtype)
    compute = Compute(KEYS, shape=shape, dtype=dtype)
    view = make(tmp_path).get_or_compute(KEYS, compute, batch_size=7)
    assert compute.rows == list(range(60))
    assert max(map(len, compute.calls)) == 7
    assert (view.shape, view.dtype, len(view), view.ndim) == ((60, *shape), dtype, 60, 1 + len(shape))
    np.testing.assert_array_equal(np.asarray(view), expected)

    again = make(tmp_path).get_or_compute(KEYS, must_not_compute)
    assert isinstance(again, FeatureView)
    everything = np.asarray(again)
    assert isinstance(everything.base, np.memmap)  # in the order of the file, so no copy is needed
    with pytest.raises(ValueError, match="read-only"):
        everything[0] = 0

    order = [KEYS[i] for i in (41, 3, 3, 59, 0)]
    picked = make(tmp_path).get(order)
    np.testing.assert_array_equal(np.asarray(picked), truth(order, shape, dtype))
    np.testing.assert_array_equal(picked[[4, 0]], truth([order[4], order[0]], shape, dtype))
    np.testing.assert_array_equal(picked[np.array([True, False, False, True, False])], np.asarray(picked)[[0, 3]])
    np.testing.assert_array_equal(picked[-1], expected[0])
    assert picked[[]].shape == picked[np.array([], dtype=int)].shape == (0, *shape)
    assert picked.tensor([]).shape == (0, *shape)
    np.testing.assert_array_equal(picked[1:3][1], expected[3])
    assert isinstance(picked[2].base, np.memmap)
    assert np.shares_memory(picked[1], picked[2])
    assert picked.tensor([1, 3]).equal(torch.from_numpy(expected[[3, 59]]))
    assert torch.as_tensor(picked).equal(picked.tensor())
    assert picked.tensor().dtype == torch.from_numpy(expected).dtype
    tensor = picked.tensor(0)
    tensor.zero_()  # a copy, so the file does not change
    np.testing.assert_array_equal(picked[0], expected[41])
    np.testing.assert_array_equal(np.asarray(picked, dtype=np.float64), truth(order, shape, dtype).astype(np.float64))
    with pytest.raises(IndexError, match="only the first axis"):
        picked[0, 1]
    with pytest.raises(IndexError):
        picked[5]


def test_only_missing_keys_are_computed_and_duplicates_once(tmp_path):
    cache = make(tmp_path)
    cache.get_or_compute(KEYS[:10], Compute(KEYS))
    compute = Compute(KEYS[5:15] * 2)
    view = cache.get_or_compute(KEYS[5:15] * 2, compute)
    assert compute.rows == [5, 6, 7, 8, 9]
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS[5:15] * 2))
    assert len(cache) == 15
    assert KEYS[14] in cache
    assert KEYS[15] not in cache
    assert cache.missing(KEYS[13:17]) == [2, 3]
    assert "15 rows" in repr(cache)


def test_storage_dtype_is_an_argument_and_bfloat16_becomes_float32(tmp_path):
    view = make(tmp_path, dtype="float16").get_or_compute(KEYS, Compute(KEYS))
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS).astype(np.float16))
    half = torch.from_numpy(truth(KEYS)).bfloat16()
    view = make(tmp_path).get_or_compute(KEYS, lambda rows: half[rows])
    assert view.dtype == np.float32
    assert view.tensor().equal(half.float())
    with pytest.raises(ValueError, match="dtype is 'bfloat16'"):
        make(tmp_path, dtype="bfloat16")


def test_view_pickles_as_a_file_name(tmp_path):
    view = make(tmp_path).get_or_compute(KEYS, Compute(KEYS, shape=(50, 64)))
    data = pickle.dumps(view)
    assert len(data) < 10_000 < view[0].nbytes * 60
    np.testing.assert_array_equal(np.asarray(pickle.loads(data)), truth(KEYS, (50, 64)))


def test_existing_view_stays_valid_while_the_cache_grows(tmp_path):
    cache = make(tmp_path)
    old = cache.get_or_compute(KEYS[:5], Compute(KEYS))
    cache.get_or_compute(KEYS, Compute(KEYS))
    make(tmp_path).put(["another"], truth(["another"]))
    np.testing.assert_array_equal(np.asarray(old), truth(KEYS[:5]))
    np.testing.assert_array_equal(cache.get(["another"])[0], truth(["another"])[0])  # another object wrote it


def test_processes_of_one_job_share_the_work(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    other, calls = make(tmp_path), []

    def compute(rows):
        if not calls:  # meanwhile rank 0 stores the first half
            other.put(KEYS[:30], truth(KEYS[:30]))
        calls.append(rows)
        return truth([KEYS[i] for i in rows])

    view = make(tmp_path).get_or_compute(KEYS, compute, batch_size=10)
    assert [i for call in calls for i in call] == list(
        range(30, 60)
    )  # begins in the middle, and skips rows that rank 0 has stored
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS))


def test_progress_is_shown_on_demand(tmp_path, capsys):
    make(tmp_path).get_or_compute(KEYS, Compute(KEYS), progress="encoding")
    assert "encoding: 100%" in capsys.readouterr().err
    make(tmp_path / "b").get_or_compute(KEYS, Compute(KEYS))
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------ keys


def test_image_hash_depends_on_the_pixels():
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (6, 4, 3), dtype=np.uint8))
    assert image_hash(image) == image_hash(image.copy())
    assert image_hash(image) == image_hash(image.convert("RGBA"))
    changed = image.copy()
    changed.putpixel((0, 0), tuple((v + 1) % 256 for v in image.getpixel((0, 0))))
    turned = Image.frombytes("RGB", (6, 4), image.tobytes())  # equal bytes, another size
    assert len({image_hash(image), image_hash(changed), image_hash(turned)}) == 3
    assert len(image_hash(image)) == 32


def test_models_revisions_and_data_sets_never_mix(tmp_path):
    make(tmp_path).get_or_compute(KEYS, Compute(KEYS))
    for other in (
        {"revision": "r2"},
        {"model_id": "x"},
        {"what": "tower"},
        {"namespace": "flickr"},
        {"dtype": "float16"},
    ):
        cache = make(tmp_path, **other)
        assert len(cache) == 0
        with pytest.raises(KeyError, match="'image 3' is not among the"):
            cache.get(KEYS[3:4])
    assert make(tmp_path, model_id="tiny@r1", revision="").get_or_compute(KEYS, must_not_compute).shape == (60, 16)
    with pytest.raises(ValueError, match="but both are needed"):
        make(tmp_path, revision="")
    with pytest.raises(KeyError, match=r"tiny@r2 \(2 of 2 keys.*Other revisions of this model are cached \(r1\)"):
        make(tmp_path, revision="r2").get(KEYS[:2])
    # A folder that was overwritten with that of another model is detected.
    source, target = make(tmp_path), make(tmp_path, revision="r2")
    source.directory.rename(target.directory)
    with pytest.raises(StoreMismatchError, match=r"'revision': 'r1'.*'revision': 'r2'.*never mixed"):
        make(tmp_path, revision="r2")


def test_unknown_key_raises(tmp_path):
    cache = make(tmp_path)
    cache.get_or_compute(KEYS, Compute(KEYS))
    with pytest.raises(KeyError, match=r"'no such image' is not among the 'image' features of tiny@r1 \(1 of 3 keys"):
        cache.get(["image 1", "no such image", "image 2"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.get_or_compute([], must_not_compute), "keys is empty"),
        (lambda c: c.get_or_compute("abc", must_not_compute), "is the string 'abc', but must be a list"),
        (lambda c: c.get_or_compute(["a", 3], must_not_compute), r"keys\[1\] is 3, not a non-empty string"),
        (lambda c: c.get_or_compute(["a", ""], must_not_compute), r"keys\[1\] is ''"),
        (lambda c: c.get_or_compute(["a"], must_not_compute, batch_size=0), "batch_size is 0"),
        (lambda c: c.get_or_compute(["a", "b"], lambda r: np.ones((1, 4))), r"shape \(1, 4\) for 2 keys"),
        (lambda c: c.get_or_compute(["a"], lambda r: np.ones(1)), r"shape \(1,\) for 1 keys"),
        (lambda c: c.put(["a", "b"], np.array([[1.0], [np.nan]])), r"features of 'b' are not finite in float32"),
        (lambda c: make(c.root, dtype="float16").put(["a"], np.full((1, 2), 1e6)), "'a' are not finite in float16"),
        (
            lambda c: (c.put(["a"], np.ones((1, 4))), c.put(["b"], np.ones((1, 5)))),
            r"\(4,\), not float32 rows of shape \(5,\)",
        ),
    ],
)
def test_invalid_arguments_raise(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(make(tmp_path))


def test_default_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("CAPTIONRL_CACHE", raising=False)
    assert default_cache_dir() == tmp_path / "hf" / "captionrl" / "features"
    monkeypatch.setenv("CAPTIONRL_CACHE", str(tmp_path / "own"))
    cache = FeatureCache(model_id="org/name", revision="r")
    assert cache.directory.parent == tmp_path / "own"
    assert not cache.directory.exists()  # reading makes no folders


def test_for_scorer(tmp_path):
    class Fixed:
        logit_scale, max_text_tokens, signature = 1.0, 77, "fixed@1|float32"
        model_id, cache_revision = "fixed", "abc|float32"

    assert FeatureCache.for_scorer(Fixed(), tmp_path).identity["revision"] == "abc|float32"
    del Fixed.cache_revision, Fixed.model_id  # a custom scorer only needs to follow the protocol
    assert FeatureCache.for_scorer(Fixed(), tmp_path).identity["revision"] == "fixed@1|float32"
