"""The modules as installed by users, and a few scenes with the held-out scorer."""

import sys
from pathlib import Path

import pytest

from hf_captionrl.metrics.evaluate_modules.inputs import resolve_scorer
from hf_captionrl.scenes import load_scenes

SCORER = "scenes:clip-reward"


def _forget_modules() -> None:
    """The package that `evaluate` makes for modules keeps its first home for the whole process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
        del sys.modules[name]


@pytest.fixture(scope="package")
def evaluate(tmp_path_factory):
    """`evaluate` with separate caches, in which only our modules are installed."""
    import evaluate

    from hf_captionrl.metrics.evaluate_modules import MODULES, install

    home = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", home / "modules")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", home / "metrics")
        patch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
        # `evaluate` appends this home; the home of a metric loaded before would come first.
        patch.setattr(sys, "path", [p for p in sys.path if not Path(p, "evaluate_modules").is_dir()])
        _forget_modules()
        evaluate.logging.set_verbosity_error()
        assert len(install()) == len(MODULES) >= 7
        yield evaluate
    _forget_modules()


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
