"""The Auto classes load ClipCap, in any order of imports, without an import cycle or an import hook."""

import subprocess
import sys

import pytest

CODE = """
import sys
import hf_captionrl
assert "transformers" not in sys.modules
from transformers import {first}
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
loaded = "hf_captionrl.captioners.clipcap.modeling_clipcap" in sys.modules
from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig
mapping = AutoModelForImageTextToText._model_mapping
assert ClipCapConfig in mapping and ClipCapConfig in list(mapping.keys())
print(loaded, mapping[ClipCapConfig].__name__, PROCESSOR_MAPPING[ClipCapConfig].__name__, None in mapping.values())
"""


# Models import modules while the modules of the Auto classes are being imported.
@pytest.mark.slow
@pytest.mark.parametrize("first", ["GitForCausalLM", "AutoProcessor"])
def test_clipcap_is_registered_in_any_order_of_imports(first):
    run = subprocess.run([sys.executable, "-c", CODE.format(first=first)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["False", "ClipCapForConditionalGeneration", "ClipCapProcessor", "False"]


def test_unregistered_configuration_is_still_unknown():
    from transformers import AutoModelForImageTextToText

    class Nobody:
        model_type = "nobody"

    assert Nobody not in AutoModelForImageTextToText._model_mapping
    with pytest.raises(KeyError):
        AutoModelForImageTextToText._model_mapping[Nobody]
