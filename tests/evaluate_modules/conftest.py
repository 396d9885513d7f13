import pytest

from tests.evaluate_modules.nursery import Nursery


@pytest.fixture(scope="package")
def nursery():
    with Nursery() as running:
        yield running


@pytest.fixture(scope="package")
def evaluate(tmp_path_factory):
    """`evaluate` with caches of its own, the modules installed there, and nothing but these found."""
    import evaluate

    from hf_captionrl.evaluate_modules import install

    home = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", home / "modules")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", home / "metrics")
        patch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
        evaluate.logging.set_verbosity_error()
        assert len(install()) == 7
        yield evaluate
