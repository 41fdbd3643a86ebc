"""Two mounts of one file system, files that both have mapped. Run by mapped.rs.

    mapped.py fresh A B     what one mount has written the other reads, mapped pages or not
    mapped.py crowd A B     more contended files than anybody has threads for
    mapped.py locked A B    as fresh, while plain writes keep pages locked
    mapped.py cuts A B      both sides cut a file of which both have dirty pages
    mapped.py order A B     what was stored before another wrote does not lie over that
    mapped.py parts A B     plain writes of parts of one page from both sides
"""

import mmap
import os
import struct
import sys
import threading
import time

PAGE = 4096


def number(value: int) -> bytes:
    return struct.pack("<Q", value)


def opened(path: str) -> int:
    return os.open(path, os.O_RDWR)


def fresh(a: str, b: str) -> None:
    """A page is dirty here while another of the same file is written there, and read here at once."""
    path = "fresh"
    with open(f"{a}/{path}", "wb") as file:
        file.write(bytes(4 * PAGE))
        os.fsync(file.fileno())
    here, there = opened(f"{a}/{path}"), opened(f"{b}/{path}")
    pages = mmap.mmap(here, 4 * PAGE)
    for turn in range(1, 301):
        pages[0:8] = number(turn)
        assert pages[2 * PAGE : 2 * PAGE + 8] == number(turn - 1)
        os.pwrite(there, number(turn), 2 * PAGE)
        read = os.pread(here, 8, 2 * PAGE)
        assert read == number(turn), f"turn {turn}: read {read} after it was written over"
        mapped = pages[2 * PAGE : 2 * PAGE + 8]
        assert mapped == number(turn), f"turn {turn}: mapped {mapped}"
        assert pages[0:8] == number(turn), f"turn {turn}: the mapped store is gone"
    pages.flush()
    assert os.pread(there, 8, 0) == number(300)


def locked(a: str, b: str) -> None:
    """Parts of pages are written here, which the kernel keeps locked, and others there."""
    far = 200 * PAGE
    with open(f"{a}/locked", "wb") as file:
        file.write(bytes(far + PAGE))
        os.fsync(file.fileno())
    here, there = opened(f"{a}/locked"), opened(f"{b}/locked")
    done = threading.Event()

    def write() -> None:
        at = 0
        while not done.is_set():
            os.pwrite(here, b"part", (at % 200) * PAGE + 100)
            at += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for turn in range(1, 101):
            os.pread(here, 8, far)
            os.pwrite(there, number(turn), far)
            read = os.pread(here, 8, far)
            assert read == number(turn), f"turn {turn}: read {read} after it was written over"
    finally:
        done.set()
        thread.join()


def cuts(a: str, b: str) -> None:
    """The kernel holds pages back while a file is cut, and forgets none of them meanwhile."""
    with open(f"{a}/cuts", "wb") as file:
        file.write(bytes(8 * PAGE))
        os.fsync(file.fileno())
    longest = 0.0
    for turn in range(8, 2, -1):
        sides = []
        for root in (a, b):
            descriptor = opened(f"{root}/cuts")
            sides.append((descriptor, mmap.mmap(descriptor, turn * PAGE)))
        for at, (_, pages) in enumerate(sides):
            # Fault in, then dirty.
            assert len(pages[:]) == turn * PAGE
            pages[at * PAGE] = turn
        begun = time.monotonic()
        cutters = [
            threading.Thread(target=os.ftruncate, args=(descriptor, (turn - 1) * PAGE))
            for descriptor, _ in sides
        ]
        for cutter in cutters:
            cutter.start()
        for cutter in cutters:
            cutter.join()
        longest = max(longest, time.monotonic() - begun)
        for descriptor, pages in sides:
            pages.close()
            os.close(descriptor)
    assert longest < 10, f"a cut took {longest:.1f} s"


def order(a: str, b: str) -> None:
    """A page is stored to here, then another part of it is written there: both are there at the end."""
    with open(f"{a}/order", "wb") as file:
        file.write(bytes(PAGE))
        os.fsync(file.fileno())
    here, there = opened(f"{a}/order"), opened(f"{b}/order")
    pages = mmap.mmap(here, PAGE)
    for turn in range(1, 401):
        assert pages[100:108] == number(turn - 1)
        pages[0:8] = number(turn)
        os.pwrite(there, number(turn), 100)
        os.fsync(there)
        for root in (a, b):
            with open(f"{root}/order", "rb") as file:
                whole = file.read()
            assert whole[100:108] == number(turn), f"turn {turn}: what {b} wrote is gone at {root}"
            assert whole[0:8] == number(turn), f"turn {turn}: what {a} stored is gone at {root}"


def crowd(a: str, b: str) -> None:
    """Each side stores to pages of its own in all files, through mappings, all at the same time."""
    files, turns = 24, 10
    for at in range(files):
        with open(f"{a}/crowd{at}", "wb") as file:
            file.write(bytes(8 * PAGE))
    os.sync()
    wrong: list[str] = []

    def store(side: int, root: str, at: int) -> None:
        try:
            descriptor = opened(f"{root}/crowd{at}")
            with mmap.mmap(descriptor, 8 * PAGE) as pages:
                for turn in range(turns):
                    for page in range(side, 8, 2):
                        pages[page * PAGE : page * PAGE + 8] = number(turn)
                    pages.flush()
            os.close(descriptor)
        except OSError as error:
            wrong.append(f"{root}/crowd{at}: {error}")

    threads = [
        threading.Thread(target=store, args=(side, root, at))
        for at in range(files)
        for side, root in enumerate((a, b))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    for root in (a, b):
        for at in range(files):
            with open(f"{root}/crowd{at}", "rb") as file:
                whole = file.read()
            for page in range(8):
                assert whole[page * PAGE : page * PAGE + 8] == number(turns - 1), (root, at, page)


def parts(a: str, b: str) -> None:
    """Both sides write parts of the same pages; every part is there at the end."""
    turns = 40
    for root in (a, b):
        if not os.path.exists(f"{root}/parts"):
            open(f"{root}/parts", "wb").close()

    def write(side: int, root: str) -> None:
        descriptor = opened(f"{root}/parts")
        for turn in range(turns):
            os.pwrite(descriptor, number(turn + 1), (turn * 2 + side) * 100)
        os.close(descriptor)

    threads = [threading.Thread(target=write, args=side) for side in enumerate((a, b))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for root in (a, b):
        with open(f"{root}/parts", "rb") as file:
            whole = file.read()
        for turn in range(turns):
            for side in range(2):
                at = (turn * 2 + side) * 100
                assert whole[at : at + 8] == number(turn + 1), (root, turn, side)


if __name__ == "__main__":
    {"fresh": fresh, "locked": locked, "cuts": cuts, "order": order, "crowd": crowd, "parts": parts}[sys.argv[1]](*sys.argv[2:])
