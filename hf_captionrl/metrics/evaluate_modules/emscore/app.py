"""Page of the Space."""

from pathlib import Path

from hf_captionrl.hub.spaces import build_page

if __name__ == "__main__":
    build_page("emscore", Path(__file__).parent).launch()
