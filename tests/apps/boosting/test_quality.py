"""The statistics of caption sources."""

import numpy as np
import pytest

from hf_captionrl.apps.boosting import source_statistics, write_source_histogram


def test_statistics_equal_word_counts(tmp_path):
    sources = {"a": ["a dog", "a big dog, running"], "b": ["one two three"]}
    found = source_statistics(sources, count_tokens=lambda texts: [len(text) for text in texts])
    assert found["a"]["mean_words"] == 3
    assert found["a"]["std_words"] == 1
    assert found["a"]["max_words"] == 4
    assert found["a"]["vocabulary"] == 4
    assert found["b"]["vocabulary"] == 3
    assert found["a"]["captions"] == 2
    assert found["a"]["percentiles_words"]["95"] == pytest.approx(np.percentile([2, 4], 95))
    assert found["b"]["mean_tokens"] == 13
    assert write_source_histogram(tmp_path / "x.png", sources).read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="empty"):
        source_statistics({"a": []})
