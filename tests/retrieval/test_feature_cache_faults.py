"""A feature cache that is killed, damaged or not writable loses only the damaged rows."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from hf_captionrl.retrieval import feature_cache as features_module
from hf_captionrl.retrieval import feature_cache as row_store
from tests.retrieval.cached import KEYS, Compute, make, must_not_compute, truth

CHILD = f"""
import os, signal, sys, zlib
import numpy as np
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from hf_captionrl.retrieval import feature_cache, row_store

def truth(keys):
    return np.stack([np.random.default_rng(zlib.crc32(k.encode())).standard_normal(16) for k in keys]).astype("f4")

def run(directory, keys, compute=None, batch_size=8):
    feature_cache._FLUSH_BYTES = 0  # write every batch
    cache = feature_cache.FeatureCache(directory, model_id="tiny", revision="r1")
    return cache.get_or_compute(keys, compute or (lambda rows: truth([keys[i] for i in rows])), batch_size=batch_size)

directory, keys = sys.argv[1], [f"image {{i}}" for i in range(60)]
"""


def child(script, *arguments, **kwargs):
    code = CHILD + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.PIPE, **kwargs)


def finish(process):
    _, error = process.communicate(timeout=60)
    return process.returncode, error.decode()


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


# ------------------------------------------------------------------ killed, at once


def forked(function):
    """Start a real process that runs a function; returns its id."""
    number = os.fork()
    if number:
        return number
    try:
        function()
    finally:
        os._exit(0)


def ended(number):
    """Exit status of a process: 0, or the signal that killed it."""
    return os.WTERMSIG(os.waitpid(number, 0)[1])


def write_slowly(directory, batch_size=8):
    features_module._FLUSH_BYTES = 0  # every batch; in the forked process only
    make(directory).get_or_compute(KEYS, lambda rows: truth([KEYS[i] for i in rows]), batch_size=batch_size)


def write_and_die(directory, steps):
    """Kill this process at the n-th step of writing: between two system calls, or after half of the bytes."""
    left, whole = steps, row_store._write_all

    def step():
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def halves(descriptor, data, offset):
        data = memoryview(data).cast("B")
        half = len(data) // 2 + 1
        whole(descriptor, data[:half], offset)
        step()
        whole(descriptor, data[half:], offset + half)

    def wrap(original):
        def wrapped(*args, **kwargs):
            step()
            result = original(*args, **kwargs)
            step()
            return result

        return wrapped

    row_store._write_all = halves
    for name in ("fsync", "ftruncate", "replace"):
        setattr(os, name, wrap(getattr(os, name)))
    write_slowly(directory)


def test_killed_at_every_step_of_writing_leaves_a_valid_cache(tmp_path):
    there = []
    for steps in range(200):
        directory = tmp_path / str(steps)
        died = ended(forked(lambda d=directory, s=steps: write_and_die(d, s)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is damaged, so there are no warnings
            there.append(assert_valid(directory))
        if not died:
            break
        assert died == signal.SIGKILL
    assert steps > 60  # 5 for meta.json, 8 for each of the 8 batches
    assert there == sorted(there)  # complete rows are kept
    # A half-written index still contains its first rows; each complete batch also occurred.
    assert {*range(0, 60, 8), 60} <= set(there)


@pytest.mark.slow  # the test above kills at every step
def test_repeated_kills_at_random_times_still_finish(tmp_path):
    rng, kills, count = np.random.default_rng(0), 0, 0
    for _ in range(60):
        number = forked(lambda: write_slowly(tmp_path, batch_size=2))
        time.sleep(rng.uniform(0, 0.02))
        os.kill(number, signal.SIGKILL)
        kills += ended(number) == signal.SIGKILL
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = make(tmp_path)
            there = [key for key in KEYS if key in cache]
            if there:
                np.testing.assert_array_equal(np.asarray(cache.get(there)), truth(there))
        assert len(there) >= count  # no rows are lost
        count = len(there)
    assert kills
    assert_valid(tmp_path)


def test_writer_killed_with_the_lock_does_not_block_others(tmp_path):
    assert ended(forked(lambda: write_and_die(tmp_path, 8))) == signal.SIGKILL
    begun = time.monotonic()
    make(tmp_path).put(["new"], truth(["new"]))
    assert time.monotonic() - begun < 5


def test_concurrent_writers_lose_no_rows(tmp_path):
    script = """
    mine = [keys[i] for i in np.random.default_rng(int(sys.argv[2])).permutation(60)[:45]]
    print("ready", flush=True)
    sys.stdin.readline()
    run(directory, mine, batch_size=2)
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [child(script, tmp_path, seed, **pipes) for seed in range(4)]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        code, error = finish(process)
        assert code == 0, error
    wanted = set()
    for seed in range(4):
        wanted |= {KEYS[i] for i in np.random.default_rng(seed).permutation(60)[:45]}
    cache = make(tmp_path)
    assert sorted(key for key in KEYS if key in cache) == sorted(wanted)
    np.testing.assert_array_equal(np.asarray(cache.get(sorted(wanted))), truth(sorted(wanted)))
    # One record per key: slower processes did not append a second one.
    assert (cache.directory / "index.bin").stat().st_size == 24 * len(wanted)


# ------------------------------------------------------------------ damaged


def damage(path, offset, value=0x10):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ value]))


def recovers(directory, expected_rows, match, **kwargs):
    """There is one warning, exactly these rows are computed again, and later requests have no warning."""
    compute = Compute(KEYS)
    with pytest.warns(UserWarning, match=match):
        view = make(directory, **kwargs).get_or_compute(KEYS, compute)
    assert compute.rows == expected_rows
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view = make(directory, **kwargs).get_or_compute(KEYS, must_not_compute)
        np.testing.assert_array_equal(np.asarray(view), truth(KEYS))


def filled(tmp_path):
    cache = make(tmp_path)
    cache.get_or_compute(KEYS, Compute(KEYS))
    return cache.directory


def test_flipped_bit_in_a_row_loses_only_that_row(tmp_path):
    damage(filled(tmp_path) / "data.bin", 17 * 64 + 5)
    recovers(tmp_path, [17], "1 of 60 cached features .* damaged")


def test_flipped_bit_in_the_index_loses_only_that_row(tmp_path):
    for offset in (3, 18, 22):  # in the key, in the row's checksum, in the record's checksum
        damage(filled(tmp_path / str(offset)) / "index.bin", 20 * 24 + offset)
        recovers(tmp_path / str(offset), [20], "1 index records are wrong")


def test_swapped_records_are_detected(tmp_path):
    path = filled(tmp_path) / "index.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[24:48] + raw[:24] + raw[48:])
    recovers(tmp_path, [0, 1], "2 index records are wrong")


def test_truncated_file_loses_only_its_last_rows(tmp_path):
    path = filled(tmp_path / "data") / "data.bin"
    os.truncate(path, 64 * 50 + 30)
    recovers(tmp_path / "data", list(range(50, 60)), "10 rows are missing")
    path = filled(tmp_path / "gone") / "data.bin"
    path.unlink()
    assert make(tmp_path / "gone").missing(KEYS) == list(range(60))
    path = filled(tmp_path / "index") / "index.bin"
    os.truncate(path, 24 * 50 + 10)
    compute = Compute(KEYS)
    np.testing.assert_array_equal(np.asarray(make(tmp_path / "index").get_or_compute(KEYS, compute)), truth(KEYS))
    assert compute.rows == list(range(50, 60))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"dtype": "float32"}', None])
def test_damaged_meta_rebuilds_the_cache(tmp_path, content):
    path = filled(tmp_path) / "meta.json"
    if content is None:
        content = path.read_bytes().replace(b"16", b"32")  # valid JSON with another shape
    path.write_bytes(content)
    recovers(tmp_path, list(range(60)), r"meta\.json is damaged")


def test_large_requests_are_checked_while_they_are_read(tmp_path):
    damage(filled(tmp_path) / "data.bin", 17 * 64 + 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view = make(tmp_path, verify_bytes=100).get_or_compute(KEYS, must_not_compute)  # nothing has been read yet
    view = pickle.loads(pickle.dumps(view))  # as in a data loader's worker
    np.testing.assert_array_equal(view[[16, 18]], truth(["image 16", "image 18"]))
    with pytest.raises(OSError, match=r"features of 'image 17' \(row 17\) are damaged.*Run again"):
        view[10:20][[6, 7]]
    compute = Compute(KEYS)  # it was dropped, so the next run computes it
    again = make(tmp_path, verify_bytes=100).get_or_compute(KEYS, compute)
    assert compute.rows == [17]
    np.testing.assert_array_equal(np.asarray(again), truth(KEYS))


def test_emptied_folder_is_filled_again(tmp_path):
    cache = make(tmp_path)
    cache.get_or_compute(KEYS, Compute(KEYS))
    for name in ("index.bin", "data.bin", "meta.json"):
        (cache.directory / name).unlink()
    view = cache.get_or_compute(KEYS[:7], Compute(KEYS))
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS[:7]))
    np.testing.assert_array_equal(np.asarray(make(tmp_path).get(KEYS[:7])), truth(KEYS[:7]))


# ------------------------------------------------------------------ nowhere to write


def test_folder_that_is_not_writable_falls_back_to_memory(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = make(tmp_path / "file")
    compute = Compute(KEYS)
    with pytest.warns(UserWarning, match=r"cannot be cached in .*kept in memory.*CAPTIONRL_CACHE") as said:
        view = cache.get_or_compute(KEYS, compute, batch_size=5)
    assert len(said) == 1
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS))
    np.testing.assert_array_equal(np.asarray(cache.get(KEYS[::-1])), truth(KEYS[::-1]))
    np.testing.assert_array_equal(view[3], truth(KEYS)[3])
    np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(view))), truth(KEYS))
    cache.get_or_compute(KEYS, must_not_compute)
    with pytest.raises(KeyError, match="'z' is not among"):
        cache.get(["z"])


def test_full_disk_falls_back_to_memory_and_damages_no_rows(tmp_path):
    # A file-size limit behaves like a full disk: it accepts a part, then raises an error.
    script = """
    import resource, warnings
    run(directory, keys[:20])
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 37 + 11, 64 * 37 + 11))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        view = run(directory, keys)
    assert len(said) == 1 and "kept in memory" in str(said[0].message), said
    order = [50, 0, 59, 19, 20]
    assert (view[order] == truth([keys[i] for i in order])).all()  # from disk and from memory
    assert (np.asarray(view) == truth(keys)).all() and view[50].shape == (16,)
    """
    code, error = finish(child(script, tmp_path))
    assert code == 0, error
    assert assert_valid(tmp_path) in range(20, 37)


def test_lock_that_is_never_released_falls_back_to_memory(tmp_path):
    from filelock import FileLock

    cache = make(tmp_path)
    cache.get_or_compute(KEYS[:5], Compute(KEYS))
    cache._store.lock_timeout_s = 0.1
    with FileLock(cache.directory / "lock"), pytest.warns(UserWarning, match="kept in memory"):
        view = cache.get_or_compute(KEYS, Compute(KEYS))
    np.testing.assert_array_equal(np.asarray(view), truth(KEYS))


def test_rows_are_written_during_the_computation(tmp_path, monkeypatch):
    monkeypatch.setattr(features_module, "_FLUSH_BYTES", 64 * 20)
    stored = []

    def compute(rows):
        stored.append(len(make(tmp_path)))
        return truth([KEYS[i] for i in rows])

    make(tmp_path).get_or_compute(KEYS, compute, batch_size=10)
    assert stored == [0, 0, 20, 20, 40, 40]
    with pytest.raises(RuntimeError, match="the model failed"):  # earlier rows are kept
        make(tmp_path / "b").get_or_compute(KEYS, failing_at(3), batch_size=10)
    assert len(make(tmp_path / "b")) == 20


def failing_at(call):
    calls = iter(range(call + 1))

    def compute(rows):
        if next(calls) == call:
            raise RuntimeError("the model failed")
        return truth([KEYS[i] for i in rows])

    return compute
