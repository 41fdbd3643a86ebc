"""The tree that is unpacked: files every machine with a Rust toolchain has, as a git repository."""

import os
import shutil
from pathlib import Path

import proc
from proc import Failed

# No more than this is copied, whatever the number of files.
BYTES_MAX = 150 << 20


def prepare(base, files_wanted):
    """Makes the archive below `base`: (description, "") or (None, why not)."""
    source = _source(files_wanted)
    if source is None:
        return None, "neither the Rust toolchain's documentation nor its sources are installed"
    tree = base / "tree"
    files, size = _copy(source, tree, files_wanted)
    env = _git_environment(base)
    try:
        _make_repository(tree, env)
        archive = base / "tree.tar"
        proc.run(["tar", "-c", "-f", archive, "-C", tree, "."], seconds=120)
    except Failed as error:
        return None, f"no tree: {error}"
    shutil.rmtree(tree)
    made = {"tar": archive, "files": files, "bytes": size, "from": str(source), "env": env}
    return made, ""


def _source(files_wanted):
    try:
        sysroot = Path(proc.run(["rustc", "--print", "sysroot"], seconds=20).strip())
    except (Failed, OSError):
        return None
    candidates = (sysroot / "lib/rustlib/src/rust/library", sysroot / "share/doc/rust/html")
    found = [path for path in candidates if path.is_dir()]
    # The first that is large enough, else the largest.
    counts = {path: sum(len(names) for _, _, names in os.walk(path)) for path in found}
    enough = [path for path in found if counts[path] >= files_wanted]
    return enough[0] if enough else max(found, key=counts.get, default=None)


def _copy(source, tree, files_wanted):
    """Copies the first files in the order of their names."""
    files = size = 0
    for where, directories, names in os.walk(source):
        directories.sort()
        target = tree / Path(where).relative_to(source)
        for name in sorted(names):
            path = Path(where) / name
            if path.is_symlink() or not path.is_file():
                continue
            if files >= files_wanted or size > BYTES_MAX:
                return files, size
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
            files += 1
            size += path.stat().st_size
    return files, size


def _git_environment(base):
    """An environment in which git knows nothing of this machine's settings."""
    settings = {
        "safe.directory": "*",
        "gc.auto": "0",
        "core.compression": "1",
        "user.name": "bench",
        "user.email": "bench@localhost",
    }
    env = {**os.environ, "HOME": str(base), "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    env["GIT_CONFIG_GLOBAL"] = "/dev/null"
    env["GIT_CONFIG_COUNT"] = str(len(settings))
    for n, (key, value) in enumerate(settings.items()):
        env[f"GIT_CONFIG_KEY_{n}"] = key
        env[f"GIT_CONFIG_VALUE_{n}"] = value
    return env


def _make_repository(tree, env):
    for words in (
        ["init", "-q"],
        ["add", "--all", "--force"],
        ["commit", "-q", "-m", "the tree"],
        ["repack", "-a", "-d", "-q"],
    ):
        proc.run(["git", "-C", tree, *words], seconds=180, env=env)
