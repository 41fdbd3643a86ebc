"""Prints the milliseconds from open to the first 4 KiB of a file, read past the page cache."""

import mmap
import os
import sys
import time

path = sys.argv[1]
page = mmap.mmap(-1, 4096)
started = time.perf_counter()
file = os.open(path, os.O_RDONLY | os.O_DIRECT)
count = os.preadv(file, [page], 0)
elapsed = time.perf_counter() - started
if count != 4096:
    sys.exit(f"read {count} bytes of 4096")
print(f"{elapsed * 1000:.3f}")
