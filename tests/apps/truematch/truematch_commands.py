"""`captionrl truematch` on a few images."""

from hf_captionrl.cli import main

IMAGES = 105
"""Enough for RD100."""


def truematch(*arguments):
    """The exit code of `captionrl truematch` with these arguments."""
    return main(["truematch", *map(str, arguments)])


def build(folder, cache, *more):
    """The exit code of a build of the first scenes."""
    return truematch("build", "--output", folder, "--max_images", IMAGES, "--cache_dir", cache, *more)
