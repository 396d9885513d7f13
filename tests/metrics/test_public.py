import subprocess
import sys

import pytest

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.signature import signature


def test_every_public_name_is_a_function_even_after_all_modules_were_imported():
    for name in metrics.__all__:
        assert callable(getattr(metrics, name)), name
    for name in metrics.__all__:  # a module of the same name would hide the function now
        assert callable(getattr(metrics, name)), name
    with pytest.raises(AttributeError, match="no attribute 'meteor'"):
        metrics.meteor  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    code = "import sys, hf_captionrl.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_signature_keeps_order_and_leaves_out_what_is_not_there():
    text = signature(metric="x", scorer="", seed=None, eos=False, n=4)
    assert text.startswith("metric:x|eos:false|n:4|hf_captionrl:")
    with pytest.raises(ValueError, match="separator"):
        signature(scorer="a|b")
