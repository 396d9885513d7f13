"""Arguments that name a data set are declared once, for the commands and for training."""

import argparse
import dataclasses

import pytest

from hf_captionrl.apps.experiments.arguments import DataArguments
from hf_captionrl.data.options import DatasetOptions, SplitArguments
from hf_captionrl.utils.options import add_options, options_from


def parsed(*argv: str) -> DatasetOptions:
    parser = argparse.ArgumentParser()
    add_options(parser, DatasetOptions)
    return options_from(DatasetOptions, parser.parse_args(argv))


@pytest.mark.parametrize("field", dataclasses.fields(SplitArguments), ids=lambda field: field.name)
def test_commands_and_training_have_the_same_field(field):
    for kind in (DatasetOptions, DataArguments):
        assert field.name not in vars(kind)["__annotations__"]
        assert getattr(kind(), field.name) == field.default


def test_commands_check_shares_when_they_are_parsed():
    assert parsed("--validation_share", "0.25").validation_share == 0.25
    with pytest.raises(ValueError, match="validation_share is 25"):
        parsed("--validation_share", "25")


def test_commands_show_the_help_of_training_as_phrases():
    parser = argparse.ArgumentParser()
    add_options(parser, DatasetOptions)
    text = " ".join(parser.format_help().split())
    assert "--image_column NAME column with the images (default: image)" in text
    assert "--image_root DIR folder that image paths are relative to --" in text
