"""Where children of the tests find what keeps them from the network."""

import os


def python_path(*folders):
    """PYTHONPATH with more folders, that still locks a child in."""
    return os.pathsep.join([os.environ["PYTHONPATH"], *map(str, folders)])
