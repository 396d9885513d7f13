"""Services and servers on 24 scenes."""

import pytest

from hf_captionrl.apps.serving.options import ServeOptions
from hf_captionrl.apps.serving.server import RewardServer, RewardService
from tests.tiny import wordlevel_tokenizer

ALL = ["self_retrieval", "cider", "diversity", "repetition", "length:max_tokens=3", "truncation"]
CAPTIONS = ["two small pigs", "two pigs pigs pigs at the top", "a red car", "a duck", "on a blue background", "a bus"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Folder of a word-level tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    wordlevel_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def options(cache):
    def make(*rewards, **more):
        settings = {"dataset": "scenes", "split": "test", "max_images": 24, "cache_dir": cache, "port": 0}
        return ServeOptions(reward=list(rewards), **{**settings, **more})

    return make


@pytest.fixture(scope="session")
def service(options):
    """The rewards that need no tokens of a policy."""
    return RewardService(options(), ALL[:5])


@pytest.fixture(scope="session")
def server(service, options):
    with RewardServer(service, options(max_body=200_000, max_captions=50, max_pixels=500_000)) as running:
        yield running


@pytest.fixture(scope="session")
def ids(service):
    """Two captions for each of three images."""
    return [image_id for image_id in service.image_ids[:3] for _ in range(2)]
