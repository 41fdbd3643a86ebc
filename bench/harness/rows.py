"""The rows of the table: what each figure is, its unit and which way is better."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure of every system."""

    key: str
    title: str
    unit: str
    # Whether more is better.
    more: bool = True


def _rates():
    for key, threads in (("1", "1 thread"), ("8", "8 threads")):
        yield Row(f"create.{key}", f"create, {threads}", "/s")
        yield Row(f"write.{key}", f"write 4k + fsync, {threads}", "/s")
        yield Row(f"stat.{key}", f"stat of another thread's files, {threads}", "/s")
        yield Row(f"stat_new.{key}", f"stat on a new mount, {threads}", "/s")
        yield Row(f"readdir.{key}", f"readdir entries, {threads}", "/s")
        yield Row(f"rename.{key}", f"rename, {threads}", "/s")
        yield Row(f"unlink.{key}", f"unlink, {threads}", "/s")


ROLES = ("mount", "metadata", "near chunkserver", "far chunkserver", "all")


def _streams(gib):
    yield Row("io.write", f"sequential write {gib} + fsync", "MB/s")
    yield Row("io.read_cold", f"sequential read {gib}, all caches empty", "MB/s")
    yield Row("io.read_warm", f"sequential read {gib}, new mount, servers warm", "MB/s")
    yield Row("io.random_4", "random read 4k, 4 jobs, buffered", "/s")
    yield Row("io.random_qd1", "random read 4k, queue depth 1, direct", "/s")
    yield Row("io.random_qd16", "random read 4k, queue depth 16, direct", "/s")


def _processor():
    for what, title in (("write", "written"), ("read", "read")):
        for role in ROLES:
            yield Row(f"cpu_{what}.{role}", f"CPU per GB {title}: {role}", "s", more=False)


def _trees(files):
    yield Row("tree.untar", f"untar {files} files", "s", more=False)
    yield Row("tree.status_first", "git status after untar (reads all)", "s", more=False)
    yield Row("tree.status", "git status again", "s", more=False)
    yield Row("tree.status_new", "git status on a new mount", "s", more=False)
    yield Row("tree.remove", "rm -r of the tree", "s", more=False)


def _first_bytes():
    yield Row("cut.undisturbed", "first 4k of a cold file", "ms", more=False)
    yield Row("cut.first", "... near chunkserver just cut off", "ms", more=False)
    yield Row("cut.second", "... of the next file, at once", "ms", more=False)
    yield Row("cut.later", "... of another file, 3 s later", "ms", more=False)


def _footprint(files):
    yield Row("memory.metadata", f"metadata memory per million files ({files})", "MB", more=False)
    yield Row("memory.mount", f"mount memory after {files} creates", "MB", more=False)
    yield Row("store.dump", "metadata bytes per file, written out", "B", more=False)
    yield Row("store.directory", "metadata directory per file, stopped", "B", more=False)
    yield Row("store.data", "bytes on disk per byte written", "", more=False)


def _directories(sizes):
    for size in sizes:
        yield Row(f"large.create.{size}", f"create, directory of {size:,} files", "/s")
        yield Row(f"large.stat.{size}", f"stat, directory of {size:,} files", "/s")


def table(plan, tree):
    """All rows of a run in the order they are printed."""
    gib = f"{plan.stream_bytes >> 20} MiB"
    yield from _rates()
    yield from _streams(gib)
    yield from _processor()
    yield from _trees(f"{tree['files']:,}" if tree else "a tree of")
    yield from _first_bytes()
    yield from _footprint(f"{plan.footprint_files:,}")
    if plan.large:
        yield from _directories(plan.directory_sizes)
