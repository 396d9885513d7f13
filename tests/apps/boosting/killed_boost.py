"""A process that runs `captionrl boost` in forked children, which the test kills; imports happen once.

A line of its input is either a list of arguments of `captionrl boost`, answered with the child's process id, or such an id,
answered with the child's exit status once it has ended (as `subprocess` counts, -9 for SIGKILL). One thread, so that a fork
is safe.
"""

import json
import os
import sys
import tempfile

import hf_captionrl.scenes
from hf_captionrl.cli import main
from tests.apps.boosting.doubles import scenes


def serve():
    # Created once, not in each child.
    rows = scenes(int(sys.argv[1]))
    hf_captionrl.scenes.load_scenes = lambda **options: {"test": rows}
    said = os.fdopen(os.dup(1), "w")  # the output of a run is not part of the protocol
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        assert main(["boost", "--max_images", "2", "--output", folder]) == 0
    print("ready", file=said, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), file=said, flush=True)
        elif (child := os.fork()) == 0:
            os._exit(main(["boost", *asked]))
        else:
            print(child, file=said, flush=True)


if __name__ == "__main__":
    serve()
