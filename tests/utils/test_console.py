"""The memory of freed tensors is used again in programs, and in their children."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from hf_captionrl.utils.console import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(20):
    b"x" * 25_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_freed_memory_is_not_returned_to_the_system():
    def faults(argument, **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | variables
        command = [sys.executable, "-c", PROGRAM, argument]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    pages = 20 * 25_000_000 // os.sysconf("SC_PAGE_SIZE")
    returned = faults("returned", MALLOC_MMAP_THRESHOLD_="1000000")
    assert returned > 0.9 * pages
    assert faults("kept") < returned - 0.8 * pages
    # The user's setting holds.
    assert faults("kept", MALLOC_MMAP_MAX_="65536", MALLOC_MMAP_THRESHOLD_="1000000") > 0.9 * pages
