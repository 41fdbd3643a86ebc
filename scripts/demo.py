#!/usr/bin/env python3
"""Three zones on this machine: every mount reads its own copy, a zone dies, nobody gets an error.

Usage: demo.py PATH_TO_HITHER [--keep]
"""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ZONES = ["a", "b", "c"]


class Demo:
    def __init__(self, hither, keep):
        self.hither = hither
        self.keep = keep
        self.dir = tempfile.mkdtemp(prefix="hither-demo-")
        self.play = os.path.join(self.dir, "playground")
        self.mounts = {}
        self.errors = []
        self.started = time.monotonic()

    def say(self, text):
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def run(self, *args, check=True):
        done = subprocess.run([self.hither, *args], capture_output=True, text=True)
        if check and done.returncode != 0:
            raise SystemExit(f"hither {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def playground(self, *args):
        return self.run("playground", args[0], *args[1:], "--dir", self.play)

    def up(self):
        self.say("starting three zones with two chunkservers each")
        self.run("playground", "up", "--dir", self.play, "--zones", ",".join(ZONES))
        with open(os.path.join(self.play, "playground.json")) as state:
            self.cluster = json.load(state)["cluster"]
        for zone in ZONES:
            at = os.path.join(self.dir, "mnt-" + zone)
            os.mkdir(at)
            self.run("mount", self.cluster, at, "--log", os.path.join(self.dir, f"mount-{zone}.log"),
                     "-o", f"preflabels=zone={zone},clientZone={zone},clientNode=pod-{zone}")
            self.mounts[zone] = at
            self.say(f"mounted at {at}, preferring zone={zone}")

    def down(self):
        for at in self.mounts.values():
            subprocess.run(["umount", at], check=False)
        self.run("playground", "down", "--dir", self.play, check=False)
        shutil.rmtree(self.dir, ignore_errors=True)

    # ---- what is shown

    def copy_tree(self):
        source = find_tree()
        target = os.path.join(self.mounts["a"], "tree")
        begun = time.monotonic()
        files, size = 0, 0
        for base, _, names in os.walk(source):
            into = os.path.join(target, os.path.relpath(base, source))
            os.makedirs(into, exist_ok=True)
            for name in names:
                path = os.path.join(base, name)
                if os.path.isfile(path) and not os.path.islink(path):
                    shutil.copyfile(path, os.path.join(into, name))
                    files += 1
                    size += os.path.getsize(path)
            if size > TREE_BYTES:
                break
        os.sync()
        took = time.monotonic() - begun
        self.say(f"copied {files} files, {size >> 20} MiB from {source} in {took:.1f} s and synced")
        return target[len(self.mounts["a"]) + 1:]

    def read_everywhere(self, tree):
        drop_caches()
        before = self.localities()
        sums = {}
        for zone in ZONES:
            begun = time.monotonic()
            sums[zone] = digest(os.path.join(self.mounts[zone], tree))
            self.say(f"zone {zone} read the tree in {time.monotonic() - begun:.1f} s: {sums[zone][:16]}")
        if len(set(sums.values())) != 1:
            self.errors.append("the zones read different bytes")
        return self.shares(before)

    def localities(self):
        return {z: json.loads(self.run("locality", m, "--json")) for z, m in self.mounts.items()}

    def shares(self, before):
        """Bytes read from each mount's own zone and from elsewhere since `before`."""
        result = {}
        for zone, now in self.localities().items():
            own = other = 0
            for locality, traffic in now["byLocality"].items():
                old = before[zone]["byLocality"].get(locality, {}).get("readBytes", 0)
                bytes_read = traffic["readBytes"] - old
                if locality in ("node", "zone"):
                    own += bytes_read
                else:
                    other += bytes_read
            result[zone] = (own, other)
        return result

    def preferred(self, path):
        """Name of the process that serves the first piece of a file to its mount."""
        places = json.loads(self.run("where", path, "--json"))
        address = places[0]["servers"][0]["address"]
        all_processes = json.loads(self.playground("status", "--json"))
        return next(p["name"] for p in all_processes if p["address"] == address)

    def pause_in_the_middle(self):
        path = os.path.join(self.mounts["b"], "big")
        block = bytes(range(256)) * 4096
        with open(path, "wb") as big:
            for n in range(96):
                big.write(n.to_bytes(8, "little") + block[8:])
            os.fsync(big.fileno())
        drop_caches()
        server = self.preferred(path)
        slowest, first_after = 0.0, None
        with open(path, "rb", buffering=0) as big:
            for n in range(96):
                if n == 48:
                    self.playground("pause", server)
                begun = time.monotonic()
                data = os.pread(big.fileno(), len(block), n * len(block))
                took = time.monotonic() - begun
                if n == 48:
                    first_after = took
                slowest = max(slowest, took)
                if data[:8] != n.to_bytes(8, "little") or data[8:] != block[8:]:
                    self.errors.append(f"wrong bytes in block {n}")
        self.playground("resume", server)
        self.say(f"paused {server} in the middle of a read: next bytes after "
                 f"{first_after * 1000:.0f} ms, slowest block {slowest * 1000:.0f} ms, no error")
        if slowest > 1.0:
            self.errors.append(f"a read took {slowest:.2f} s while the preferred server was paused")
        return slowest

    def kill_a_zone(self):
        stop = threading.Event()
        workers = [threading.Thread(target=self.work, args=(zone, stop)) for zone in ZONES]
        self.done = {zone: 0 for zone in ZONES}
        for worker in workers:
            worker.start()
        wait_until(lambda: min(self.done.values()) > 20, 20)
        before = dict(self.done)
        self.playground("kill", "c")
        self.say("killed every chunkserver of zone c while all zones read and write")
        wait_until(lambda: all(self.done[z] > before[z] + 50 for z in ZONES), 60)
        stop.set()
        for worker in workers:
            worker.join()
        count = sum(self.done.values())
        self.say(f"{count} files written, synced, read back and compared meanwhile, "
                 f"{len(self.errors)} errors")

    def work(self, zone, stop):
        n = 0
        base = os.path.join(self.mounts[zone], "work-" + zone)
        os.makedirs(base, exist_ok=True)
        while not stop.is_set():
            path = os.path.join(base, f"f{n % 50}")
            data = pattern(zone, n)
            try:
                with open(path, "wb") as out:
                    out.write(data)
                    os.fsync(out.fileno())
                with open(path, "rb") as back:
                    if back.read() != data:
                        self.errors.append(f"{path}: read back something else")
            except OSError as error:
                self.errors.append(f"{path}: {error}")
            n += 1
            self.done[zone] = n

    def bring_back(self, tree):
        self.playground("start", "c")
        self.say("started zone c again")
        begun = time.monotonic()

        def whole():
            groups = json.loads(self.run("status", "--cluster", self.cluster, "--json"))["groups"]
            return groups["whole"] == groups["total"]

        wait_until(whole, 90)
        self.say(f"zone c has caught up after {time.monotonic() - begun:.1f} s: all groups whole")
        time_limit = time.monotonic() + 15
        while True:
            drop_caches()
            before = self.localities()
            digest(os.path.join(self.mounts["c"], tree), 40)
            own, other = self.shares(before)["c"]
            if other == 0 and own > 0:
                self.say("zone c reads its own copies again")
                return
            if time.monotonic() > time_limit:
                self.errors.append(f"zone c still reads {other} bytes elsewhere")
                return


def find_tree():
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True)
    root = sysroot.stdout.strip()
    for part in ("share/doc/rust/html", "lib/rustlib/src", "lib"):
        path = os.path.join(root, part)
        if os.path.isdir(path):
            return path
    return "/usr/share/doc"


def pattern(zone, n):
    seed = f"{zone}/{n}".encode()
    return b"".join(hashlib.sha256(seed + bytes([i])).digest() * 64 for i in range(8))


def digest(tree, files_max=None):
    total = hashlib.sha256()
    count = 0
    for base, dirs, names in os.walk(tree):
        dirs.sort()
        for name in sorted(names):
            with open(os.path.join(base, name), "rb") as file:
                total.update(name.encode())
                total.update(file.read())
            count += 1
            if files_max and count >= files_max:
                return total.hexdigest()
    return total.hexdigest()


def drop_caches():
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as drop:
            drop.write("3\n")
    except OSError:
        print("(page caches stay: dropping them needs root)")


def wait_until(condition, seconds):
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise SystemExit(f"gave up after {seconds} s")
        time.sleep(0.1)


def size(count):
    return f"{count / (1 << 20):.1f} MiB"


TREE_BYTES = 300 << 20


def main():
    demo = Demo(os.path.abspath(sys.argv[1]), "--keep" in sys.argv)
    try:
        demo.up()
        tree = demo.copy_tree()
        shares = demo.read_everywhere(tree)
        slowest = demo.pause_in_the_middle()
        demo.kill_a_zone()
        demo.bring_back(tree)
        print()
        print(f"{'zone':<6}{'read from its own zone':<26}{'read elsewhere':<18}")
        for zone, (own, other) in shares.items():
            share = 100 * own / (own + other) if own + other else 0
            print(f"{zone:<6}{f'{size(own)} ({share:.0f} %)':<26}{size(other):<18}")
            if other:
                demo.errors.append(f"zone {zone} read {other} bytes elsewhere")
        print()
        print(f"slowest read while the preferred server was paused: {slowest * 1000:.0f} ms")
        for error in demo.errors:
            print("ERROR:", error)
        demo.say("done: " + ("no errors" if not demo.errors else f"{len(demo.errors)} errors"))
        if demo.keep:
            print(f"\nleft running: mounts {', '.join(demo.mounts.values())}")
            print(f"end it with: {demo.hither} playground down --dir {demo.play} (umount first)")
    finally:
        if not demo.keep:
            demo.down()
    sys.exit(1 if demo.errors else 0)


if __name__ == "__main__":
    main()
