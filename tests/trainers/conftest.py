"""A small piece of the embedded world with its scorers, and a tiny LLaMA with a few documents."""

import pytest

from hf_captionrl.apps.instruct.instructions import tiny_llama
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import model_path

# Prompts and answers of one sentence and of several.
ROWS = [
    {"prompt": "Name a fruit: ", "completion": "An apple. It is red. Is it sweet? Yes!"},
    {"prompt": "Count to six: ", "completion": "one two three four five six"},
    {"prompt": "Greet me: ", "completion": "Hello.\nHello again."},
    {
        "prompt": "What is rain? ",
        "completion": "Rain is water that falls from clouds. The water falls again. It rains.",
    },
    {"prompt": "Yes or no? ", "completion": "No."},
]


@pytest.fixture(scope="session")
def scenes():
    return load_scenes(num_train=16, num_validation=12, num_test=0)


@pytest.fixture(scope="session")
def scorer():
    return load_scorer(model_path("scenes:clip-reward"))


@pytest.fixture(scope="session")
def held_out_scorer():
    return load_scorer(model_path("scenes:siglip-held-out"))


@pytest.fixture(scope="session")
def parts():
    return tiny_llama([text for row in ROWS for text in row.values()], vocab_size=300, width=32, layers=1, seed=3)
