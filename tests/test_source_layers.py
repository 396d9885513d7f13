"""Faults in the layers: upward imports, import cycles, and a diagram that differs from the imports."""

import pytest

from scripts.source_checks.layers import LAYERS, SEPARATE, check_diagram, check_layers, diagram, layer_table
from tests.planted_faults import ROOT, messages, plant

# --- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        {"hf_captionrl/metrics/a.py": "from hf_captionrl.text.ngrams import x\nimport hf_captionrl.retrieval.ranking"},
        {"hf_captionrl/data/a.py": "def f():\n    from hf_captionrl.scenes import load_scenes"},
        {"hf_captionrl/trainers/a.py": "from ..captioners import auto\nfrom . import b"},
        {"hf_captionrl/__init__.py": "from hf_captionrl.trainers import T", "hf_captionrl/hub.py": "import torch"},
        {"recipes/a.py": "from hf_captionrl import load_captioner\nimport hf_captionrl.trainers"},
        {"hf_captionrl/apps/experiments/arguments.py": "def f():\n    from trl import TrlParser"},
        {"hf_captionrl/hub.py": "from hf_captionrl import __version__"},
        {"hf_captionrl/captioners/captioner.py": "def f():\n    import_module('hf_captionrl.hub')"},
        {
            "hf_captionrl/trainers/caption_trainer.py": "from hf_captionrl.trainers.caption_trainer import x",
            "hf_captionrl/trainers/caption_trainer.py": "if TYPE_CHECKING:\n    from .caption_trainer import y",
        },
    ],
)
def test_downward_imports_pass(tmp_path, files):
    assert check_layers(plant(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"hf_captionrl/losses/a.py": "from hf_captionrl.captioners.captioner import C"},
            "a.py:1: losses (layer 0) imports",
        ),
        ({"hf_captionrl/losses/a.py": "from hf_captionrl import captioners"}, "imports captioners (layer 1)"),
        ({"hf_captionrl/losses/a.py": "from ..captioners import base"}, "imports captioners (layer 1)"),
        ({"hf_captionrl/data/a.py": "def f():\n    import hf_captionrl.trainers.x"}, "a.py:2: data (layer 1) imports"),
        ({"hf_captionrl/data/a.py": "from hf_captionrl.captioners import C"}, "must not import each other"),
        ({"hf_captionrl/metrics/a.py": "from hf_captionrl import self_retrieval"}, "from the package itself"),
        ({"hf_captionrl/hub.py": "import recipes.smile_blip"}, "imports recipes, which is above"),
        ({"hf_captionrl/extras/a.py": "import os"}, "'extras' is in no layer"),
        ({"hf_captionrl/trainers/a.py": "from trl import GRPOTrainer"}, "imports trl"),
        ({"recipes/a.py": "import trl.trainer"}, "imports trl"),
        ({"recipes/a.py": "import importlib\nx = importlib.import_module('trl.trainer')"}, "a.py:2: imports trl"),
        (
            {"hf_captionrl/data/a.py": "def f():\n    import_module('hf_captionrl.hub')"},
            "a.py:2: data (layer 1) imports",
        ),
        (
            {
                "hf_captionrl/metrics/a.py": "import hf_captionrl.scenes",
                "hf_captionrl/scenes/a.py": "import hf_captionrl.data",
                "hf_captionrl/data/a.py": "import hf_captionrl.metrics",
            },
            "an import cycle: data -> metrics -> scenes -> data",
        ),
        (
            {
                "hf_captionrl/data/a.py": "from .b import x",
                "hf_captionrl/data/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y",
            },
            "b.py:3: closes an import cycle: hf_captionrl.data.a -> hf_captionrl.data.b -> hf_captionrl.data.a",
        ),
        (
            {"hf_captionrl/data/a.py": "from .b import x", "hf_captionrl/data/b.py": "def f():\n    from . import a"},
            "b.py:2: closes an import cycle: hf_captionrl.data.a -> hf_captionrl.data.b -> hf_captionrl.data.a",
        ),
        (
            {
                "hf_captionrl/data/__init__.py": "from .a import x",
                "hf_captionrl/data/a.py": "import hf_captionrl.data",
            },
            "an import cycle: hf_captionrl.data -> hf_captionrl.data.a -> hf_captionrl.data",
        ),
    ],
)
def test_upward_imports_are_faults(tmp_path, files, message):
    faults = messages(check_layers(plant(tmp_path, files)))
    assert len(faults) == 1
    assert message in faults[0]


def test_separate_units_exist():
    units = {unit for layer in LAYERS.values() for unit in layer}
    assert set(SEPARATE) | set().union(*SEPARATE.values()) <= units


def test_architecture_page_shows_the_scripts_table():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert layer_table() in page


# --- the diagram ----------------------------------------------------------------------------------------------------


HOUSE = {
    "hf_captionrl/text/a.py": "import re",
    "hf_captionrl/metrics/a.py": "from hf_captionrl.text.a import x",
    "hf_captionrl/reports/a.py": "from ..metrics import a\ndef f():\n    import hf_captionrl.text.a",
}


def test_diagram_omits_transitive_imports(tmp_path):
    arrows = [line.strip() for line in diagram(plant(tmp_path, HOUSE)).splitlines() if "-->" in line]
    assert arrows == ["metrics --> reports", "text --> metrics"]  # text --> reports goes through metrics


def test_outdated_diagram_is_a_fault(tmp_path):
    plant(tmp_path, HOUSE)
    page = "before\n\n<!-- begin diagram -->\n{}\n<!-- end diagram -->\nafter\n"
    drawn = diagram(tmp_path)
    plant(tmp_path, {"docs/architecture.md": page.format(drawn)})
    assert not check_diagram(tmp_path)
    plant(tmp_path, {"docs/architecture.md": page.format(drawn.replace("text --> metrics", "text --> losses"))})
    (fault,) = messages(check_diagram(tmp_path))
    assert "no import for 'text --> losses'" in fault
    assert "lacks 'text --> metrics'" in fault
    plant(tmp_path, {"docs/architecture.md": "no picture"})
    assert "has no diagram" in messages(check_diagram(tmp_path))[0]
