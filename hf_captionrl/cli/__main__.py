"""`python -m hf_captionrl.cli`, the same as `captionrl`."""

from hf_captionrl.cli import console

__all__: list[str] = []

if __name__ == "__main__":
    console()
