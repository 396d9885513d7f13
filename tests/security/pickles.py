"""A pickle that shows when somebody opened it."""

import pickle
from pathlib import Path

import torch


class Trap:
    """What an attacker would put into a pickle: unpickled, it makes a file."""

    def __init__(self, path):
        self.path = Path(path)

    def __reduce__(self):
        return Path.touch, (self.path,)


def raw(sprung):
    """As `pickle.dump` writes it."""
    return pickle.dumps({"weight": Trap(sprung)})


def zipped(sprung, folder):
    """As `torch.save` writes it."""
    torch.save({"weight": Trap(sprung), "state": {}}, folder / "trap.pt")
    return (folder / "trap.pt").read_bytes()


FORMS = {"pickle": lambda sprung, folder: raw(sprung), "torch": zipped}
