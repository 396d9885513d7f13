"""Features of videos from those of their frames."""

import datasets
import numpy as np
import pytest
import torch

from hf_captionrl.data import (
    CaptionDataset,
    cached_features,
    frames_of,
    load_captions,
    pool_frames,
    sample_frames,
    video_hash,
)
from hf_captionrl.retrieval import FeatureCache
from tests.data.films import COLOURS, make_tgif, middles
from tests.tolerances import assert_close, within


class Encoder:
    """Mean colour of an image, at two positions, with a count of the images seen."""

    def __init__(self):
        self.seen = 0

    def __call__(self, images):
        self.seen += len(images)
        means = torch.stack([torch.tensor(np.asarray(image).reshape(-1, 3).mean(0)) for image in images]).float()
        return torch.stack([means, 255 - means], 1)  # (B, 2, 3)


def test_features_of_a_video_are_the_mean_over_its_frames(tmp_path):
    ds = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=4)
    encode = Encoder()

    def cache():
        return FeatureCache(tmp_path / "cache", model_id="m", revision="r", what="vision_tower")

    features = cached_features(cache(), ds, encode, batch_size=9, progress=False)
    assert features.shape == (4, 2, 3)
    assert encode.seen == 4 * 4
    for n in range(4):
        shown = np.mean([COLOURS[(n + k) % 7] for k in middles([50, 50, 100 + 10 * n], 4)], axis=0)
        assert np.asarray(features[n][0]) == within(shown, 2)
        assert np.asarray(features[n][1]) == within(255 - shown, 2)
    # Keyed by content and number of frames: a copy is not encoded again, another number is.
    cached_features(cache(), ds, encode, progress=False)
    assert encode.seen == 16
    other = load_captions("tgif", data_dir=tmp_path, num_frames=1)
    single = cached_features(cache(), other, encode, progress=False)
    assert encode.seen == 20
    assert not np.allclose(np.asarray(single[0]), np.asarray(features[0]))
    assert video_hash(tmp_path / "gifs" / "t0.gif") == video_hash((tmp_path / "gifs" / "t0.gif").read_bytes())
    assert video_hash(tmp_path / "gifs" / "t0.gif") != video_hash(tmp_path / "gifs" / "t1.gif")


def test_scorer_features_of_videos_have_unit_length(tmp_path):
    ds = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=3)

    def encode(images):
        return torch.nn.functional.normalize(Encoder()(images)[:, 0], dim=-1)

    cache = FeatureCache(tmp_path / "cache", model_id="m", revision="r")
    found = cached_features(cache, ds, encode, progress=False, unit_length=True).tensor()
    for n in range(4):
        mean = encode(sample_frames(ds[n]["image"], 3)).mean(0)
        assert mean.norm() < 0.999
        torch.testing.assert_close(found[n], mean / mean.norm())


def test_videos_without_features_are_refused(tmp_path):
    ds = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=4)
    with pytest.raises(ValueError, match=r"holds videos.*cache_image_features=True"):
        CaptionDataset(ds)
    item = CaptionDataset(ds, image_features=torch.ones(4, 2, 3))[0]
    assert item["image"] is None
    assert item["image_features"].shape == (2, 3)
    mixed = datasets.concatenate_datasets([ds, load_captions("tgif", data_dir=tmp_path, num_frames=2)])
    with pytest.raises(ValueError, match="the same number of frames"):
        frames_of(mixed)


def test_concatenated_frames_have_other_cache_keys_than_means(tmp_path):
    ds = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=3)
    encode = Encoder()
    cache = FeatureCache(tmp_path / "cache", model_id="m", revision="r", what="frames")
    joined = cached_features(cache, ds, encode, progress=False, pooling="concat")
    assert joined.shape == (4, 3 * 2, 3)
    for n in range(4):
        alone = [Encoder()([frame])[0] for frame in sample_frames(ds[n]["image"], 3)]
        np.testing.assert_allclose(np.asarray(joined[n]), torch.cat(alone).numpy(), rtol=1e-6)
    marked = cached_features(cache, ds, encode, progress=False, pooling="ordered")
    assert encode.seen == 2 * 4 * 3  # another key
    for n in range(4):
        for f in range(3):
            code = [np.sin(f), np.cos(f), np.sin(f * 10000 ** (-2 / 3))]
            for m in range(2):
                added = np.asarray(marked[n])[2 * f + m] - np.asarray(joined[n])[2 * f + m]
                assert_close(added, code, ulps=512)
    cached_features(cache, ds, encode, progress=False, pooling="concat")
    assert encode.seen == 24
    with pytest.raises(ValueError, match="Use another `what`"):
        cached_features(cache, ds, encode, progress=False)  # means have another shape


def test_concatenation_is_refused_for_scorers(tmp_path):
    features = torch.arange(24.0).reshape(6, 4)
    assert torch.equal(pool_frames(features, 3, "concat"), features.reshape(2, 3, 4))
    assert torch.equal(pool_frames(features, 3), features.reshape(2, 3, 4).mean(1))
