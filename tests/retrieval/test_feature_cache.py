"""The feature cache: reading and writing, keys, kills, damaged files, a full disk."""

import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import zlib

import datasets
import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from hf_captionrl.data.columns import id_column
from hf_captionrl.retrieval import feature_cache as features_module
from hf_captionrl.retrieval.feature_cache import (
    FeatureCache,
    FeatureView,
    RowLookup,
    default_cache_dir,
    image_hash,
)

KEYS = [f"image {i}" for i in range(60)]


def truth(keys, shape=(16,), dtype=np.float32):
    """The features of keys, in place of a model's."""
    size = int(np.prod(shape))
    rows = [np.random.default_rng(zlib.crc32(key.encode())).standard_normal(size) for key in keys]
    return np.stack(rows).reshape(-1, *shape).astype(dtype)


class Compute:
    """A model that records the requested rows."""

    def __init__(self, keys, **kwargs):
        self.keys, self.kwargs, self.calls = keys, kwargs, []

    def __call__(self, rows):
        self.calls.append(list(rows))
        return torch.from_numpy(truth([self.keys[i] for i in rows], **self.kwargs))

    @property
    def rows(self):
        return sorted(i for call in self.calls for i in call)


def must_not_compute(rows):
    raise AssertionError(f"{rows} were computed although they are cached")


def make(directory, **kwargs):
    return FeatureCache(directory, **{"model_id": "tiny", "revision": "r1", **kwargs})


# ------------------------------------------------------------------ reading and writing


@pytest.mark.parametrize(("shape", "dtype"), [((16,), np.float32), ((5, 8), np.float16)])
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
    assert picked[[]].shape == picked.tensor([]).shape == (0, *shape)
    np.testing.assert_array_equal(picked[1:3][1], expected[3])
    assert isinstance(picked[2].base, np.memmap)
    assert picked.tensor([1, 3]).equal(torch.from_numpy(expected[[3, 59]]))
    assert torch.as_tensor(picked).equal(picked.tensor())
    assert picked.tensor().dtype == torch.from_numpy(expected).dtype
    tensor = picked.tensor(0)
    tensor.zero_()  # a copy, so the file does not change
    np.testing.assert_array_equal(picked[0], expected[41])
    np.testing.assert_array_equal(np.asarray(picked, dtype=np.float64), truth(order, shape, dtype).astype(np.float64))


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
    with pytest.raises(KeyError, match=r"'image 15' is not among the 'image' features of tiny@r1 \(2 of 4 keys"):
        cache.get(KEYS[13:17])


def test_storage_dtype_is_an_argument_and_bfloat16_becomes_float32(tmp_path):
    view = make(tmp_path, dtype="float16").get_or_compute(KEYS, Compute(KEYS))
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS).astype(np.float16))
    half = torch.from_numpy(truth(KEYS)).bfloat16()
    assert make(tmp_path).get_or_compute(KEYS, lambda rows: half[rows]).tensor().equal(half.float())


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
    # Begins in the middle, and skips rows that rank 0 has stored.
    assert [i for call in calls for i in call] == list(range(30, 60))
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS))


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
    others = {"revision": "r2", "model_id": "x", "what": "tower", "dtype": "float16"}
    for other in ({name: value} for name, value in others.items()):
        cache = make(tmp_path, **other)
        assert len(cache) == 0
        with pytest.raises(KeyError, match="'image 3' is not among the"):
            cache.get(KEYS[3:4])
    assert make(tmp_path, model_id="tiny@r1", revision="").get_or_compute(KEYS, must_not_compute).shape == (60, 16)
    # A folder that was overwritten with that of another model is detected.
    source, target = make(tmp_path), make(tmp_path, revision="r2")
    source.directory.rename(target.directory)
    with pytest.raises(ValueError, match="never mixed"):
        make(tmp_path, revision="r2").missing(KEYS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.get_or_compute([], must_not_compute), "keys"),
        (lambda c: c.get_or_compute(["a", "b"], lambda r: np.ones((1, 4))), r"\(1, 4\) for 2 keys"),
        (lambda c: c.put(["a", "b"], np.array([[1.0], [np.nan]])), "'b' are not finite in float32"),
        (lambda c: make(c.root, dtype="float16").put(["a"], np.full((1, 2), 1e6)), "'a' are not finite in float16"),
        (lambda c: (c.put(["a"], np.ones((1, 4))), c.put(["b"], np.ones((1, 5)))), r"\(5,\)"),
        (lambda c: make(c.root, dtype="bfloat16"), "dtype"),
        (lambda c: make(c.root, revision=""), "revision"),
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


# ------------------------------------------------------------------ killed


def assert_valid(directory, keys=KEYS):
    """All cached rows are correct, and the others can be added. Returns the number of cached rows."""
    cache = make(directory)
    there = [key for key in keys if key in cache]
    if there:
        np.testing.assert_array_equal(np.asarray(cache.get(there)), truth(there))
    compute = Compute(keys)
    np.testing.assert_array_equal(np.asarray(cache.get_or_compute(keys, compute)), truth(keys))
    assert len(compute.rows) == len(keys) - len(there)
    np.testing.assert_array_equal(np.asarray(make(directory).get_or_compute(keys, must_not_compute)), truth(keys))
    return len(there)


def forked(function):
    """Start a real process that runs a function."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


def ended(process):
    """Exit status of a process: 0, 1 after an exception, or minus the signal that killed it."""
    process.join()
    return process.exitcode


def write_slowly(directory, keys=KEYS, batch_size=8):
    features_module._FLUSH_BYTES = 0  # every batch; in the forked process only
    return make(directory).get_or_compute(keys, lambda rows: truth([keys[i] for i in rows]), batch_size=batch_size)


def write_and_die(directory, steps):
    """Kill this process at the n-th step of writing: around a write, a flush or a rename."""
    left = steps

    def step():
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepping(function):
        def call(*args, **kwargs):
            step()
            result = function(*args, **kwargs)
            step()
            return result

        return call

    pwrite = os.pwrite
    os.pwrite = stepping(lambda descriptor, data, offset: pwrite(descriptor, data[: len(data) // 2 + 1], offset))
    os.fsync, os.replace = stepping(os.fsync), stepping(os.replace)
    write_slowly(directory, batch_size=30)


def test_killed_at_every_step_of_writing_leaves_a_valid_cache(tmp_path):
    there = []
    for steps in range(200):
        directory = tmp_path / str(steps)
        died = ended(forked(lambda d=directory, s=steps: write_and_die(d, s)))
        there.append(assert_valid(directory))
        if not died:
            break
        assert died == -signal.SIGKILL
    assert steps > 20
    assert there == sorted(there)  # complete rows are kept
    assert {0, 30, 60} <= set(there)


def test_concurrent_writers_lose_no_rows(tmp_path):
    chosen = [[KEYS[i] for i in np.random.default_rng(seed).permutation(60)[:45]] for seed in range(4)]
    start = multiprocessing.get_context("fork").Barrier(4)

    def write(mine):
        start.wait(timeout=60)
        write_slowly(tmp_path, mine, batch_size=2)

    assert [ended(process) for process in [forked(lambda mine=mine: write(mine)) for mine in chosen]] == [0] * 4
    wanted = {key for mine in chosen for key in mine}
    cache = make(tmp_path)
    assert {key for key in KEYS if key in cache} == wanted
    np.testing.assert_array_equal(np.asarray(cache.get(sorted(wanted))), truth(sorted(wanted)))
    # One row per key: slower processes did not append a second one.
    assert len(cache) == len(wanted)


# ------------------------------------------------------------------ deleted, replaced and truncated files


@pytest.mark.parametrize("damage", ["no rows", "fewer rows", "another meta", "no JSON", "no keys"])
def test_deleted_and_replaced_files_never_give_other_rows(tmp_path, damage):
    make(tmp_path).get_or_compute(KEYS, Compute(KEYS))
    cache = make(tmp_path)
    folder = cache.directory
    view, (rows,), (keys,), meta = cache.get(KEYS), folder.glob("rows-*"), folder.glob("keys-*"), folder / "meta.json"
    if damage == "fewer rows":
        rows.rename(tmp_path / "moved")  # the open view maps its rows
        rows.write_bytes((tmp_path / "moved").read_bytes()[: 64 * 50 + 30])
    elif damage == "another meta":  # its rows have another number and order
        other = make(tmp_path / "other")
        other.get_or_compute(KEYS[30:], lambda found: truth(KEYS[30:])[found])
        (other.directory / "meta.json").replace(meta)
    elif damage == "no JSON":
        meta.write_bytes(b"x" * 5000)
    else:
        {"no rows": rows, "no keys": keys}[damage].unlink()
    assert cache.missing(KEYS) == list(range(60))
    again = cache.get_or_compute(KEYS[::-1], lambda found: truth(KEYS[::-1])[found])
    np.testing.assert_array_equal(np.asarray(again), truth(KEYS[::-1]))
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS))
    np.testing.assert_array_equal(np.asarray(make(tmp_path).get_or_compute(KEYS, must_not_compute)), truth(KEYS))


def test_a_cache_that_is_deleted_and_refilled_while_open_never_gives_other_rows(tmp_path):
    cache = make(tmp_path)
    view = cache.get_or_compute(KEYS, Compute(KEYS))
    sent = pickle.dumps(view)
    shutil.rmtree(cache.directory)
    assert ended(forked(lambda: make(tmp_path).get_or_compute(KEYS[::-1], Compute(KEYS[::-1])))) == 0
    np.testing.assert_array_equal(np.asarray(cache.get(KEYS)), truth(KEYS))
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS))
    with pytest.raises(FileNotFoundError):  # in a worker that starts now
        pickle.loads(sent)


def test_a_file_of_rows_that_is_deleted_during_a_write_does_not_come_back_with_zeros(tmp_path, monkeypatch):
    cache, write = make(tmp_path), features_module._write
    cache.put(["zeros"], np.zeros((1, 16), np.float32))

    def deleted(path, rows, offset):
        path.unlink()
        write(path, rows, offset)

    monkeypatch.setattr(features_module, "_write", deleted)
    with pytest.raises(OSError, match="cannot be cached"):
        cache.put(KEYS, truth(KEYS))
    assert make(tmp_path).missing(KEYS) == list(range(60))


# ------------------------------------------------------------------ nowhere to write


def test_where_nothing_can_be_written_the_error_names_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot be cached in .*CAPTIONRL_CACHE"):
        make(tmp_path / "file").get_or_compute(KEYS, Compute(KEYS))
    monkeypatch.setattr(features_module, "_LOCK_SECONDS", 0.1)
    cache = make(tmp_path)
    cache.get_or_compute(KEYS[:5], Compute(KEYS))
    with FileLock(cache.directory / ".lock"), pytest.raises(OSError, match="cannot be cached"):
        cache.get_or_compute(KEYS, Compute(KEYS))
    assert cache.missing(KEYS[:6]) == [5]


def test_full_disk_damages_no_rows(tmp_path):
    def fill():
        write_slowly(tmp_path, KEYS[:20])
        # A file-size limit behaves like a full disk: it accepts a part, then raises an error.
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 37 + 11, 64 * 37 + 11))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(OSError, match="cannot be cached"):
            write_slowly(tmp_path)

    assert ended(forked(fill)) == 0
    assert assert_valid(tmp_path) == 36  # four batches of eight and the twenty before, as far as there was room


def test_rows_are_written_during_the_computation(tmp_path, monkeypatch):
    monkeypatch.setattr(features_module, "_FLUSH_BYTES", 64 * 20)
    stored = []

    def compute(rows):
        stored.append(len(make(tmp_path)))
        if len(stored) == 6:
            raise RuntimeError("the model failed")
        return truth([KEYS[i] for i in rows])

    with pytest.raises(RuntimeError, match="the model failed"):
        make(tmp_path).get_or_compute(KEYS, compute, batch_size=10)
    assert stored == [0, 0, 20, 20, 40, 40]
    assert len(make(tmp_path)) == 40  # earlier rows are kept


def test_rows_of_names_are_the_first():
    draw = random.Random(0)
    many, asked = ([f"é {draw.randrange(different)}" for _ in range(300)] for different in (120, 400))
    for ids in (many, [], ["a"], ["b", "a", "b", "a", "b"], id_column(datasets.Dataset.from_dict({"image_id": many}))):
        row_of = {image_id: row for row, image_id in reversed(list(enumerate(ids)))}  # the first of equal ids
        lookup, names = RowLookup(ids), [*asked, "", "é", "a"]
        assert lookup.rows(names).tolist() == [row_of.get(name, -1) for name in names]
        assert lookup.missing(names) == [name for name in names if name not in row_of]
        assert lookup.rows([]).tolist() == []
