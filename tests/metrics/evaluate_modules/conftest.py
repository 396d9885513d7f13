"""The modules as users load them, and a few scenes with the held-out scorer."""

import pytest

from hf_captionrl.metrics.evaluate_modules.inputs import resolve_scorer
from hf_captionrl.scenes import load_scenes

SCORER = "scenes:clip-reward"


@pytest.fixture(scope="session")
def evaluate(tmp_path_factory):
    """`evaluate`, offline and with separate caches."""
    import evaluate

    home = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", home / "modules")
        patch.syspath_prepend(home / "modules")  # before the user's own folder, which transformers appends
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", home / "metrics")
        patch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
        evaluate.logging.set_verbosity_error()
        yield evaluate


@pytest.fixture(scope="session")
def scenes():
    return load_scenes(num_train=0, num_validation=0, num_test=15)["test"]


@pytest.fixture(scope="session")
def held_out_scorer():
    return resolve_scorer(SCORER)


@pytest.fixture(scope="session")
def features(scenes, held_out_scorer):
    """Features of first references and of images by the held-out scorer."""
    text = held_out_scorer.text_features([row[0] for row in scenes["captions"]])
    return text, held_out_scorer.image_features(list(scenes["image"]))
