#!/usr/bin/env python3
"""One-line breakages of the source (tests/mutations.txt), each of which must make a named test fail.

A test is a C program, or a script with the sections that it is to run; then `needs` names the programs that it starts.
A script must pass as things are before it may fail without something.

Works on a copy of the tree in a temporary directory, objects included, so that a mutation costs one compilation,
one link and one test. What a mutation built is put back afterwards.

Without arguments: the list is checked, then as many mutations of the release build as fit in KVP_MUTATION_S
seconds (30), chosen by KVP_SEED; none that takes luck to be noticed (tries). --all: every mutation, every build;
KVP_MUTATION_JOBS at a time (1). Other arguments: mutations by name. A build other than release checks the list
only."""
import os
import pathlib
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = ["Makefile", "include", "shm", "ipc", "daemons", "tests", "bench", "deploy"]
LIMIT_S = 30.0  # of one test
FIELDS = {"id", "file", "old", "new", "test", "needs", "build", "tries", "form", "env", "why"}


def read_list():
    """[{field: text}] of the blocks in mutations.txt; \\n and \\t in old and new stand for themselves."""
    out = []
    text = (ROOT / "tests/mutations.txt").read_text(encoding="utf-8")
    for block in re.split(r"\n\s*\n", text):
        m = {}
        for line in block.splitlines():
            if not line.startswith("#") and line.strip():
                key, _, value = line.partition(": ")
                m[key.rstrip(":")] = value
        if not m:
            continue
        if not {"id", "file", "old", "test", "why"} <= set(m) or set(m) - FIELDS:
            raise SystemExit(f"Bail out! mutations.txt: {m}")
        for key in ("old", "new"):
            m[key] = m.get(key, "").replace("\\n", "\n").replace("\\t", "\t")
        m.setdefault("build", "release")
        out.append(m)
    return out


def is_script(m):
    return m["test"].split()[0].endswith(".t")


def targets_of(m):
    """What is built for its test."""
    names = m.get("needs", "kvpick-sidecar").split() if is_script(m) else [m["test"]]
    return [f"build/{m['build']}/{name}" for name in names]


def command_of(m, where):
    first, *more = m["test"].split()
    return [where / first if is_script(m) else where / "build" / m["build"] / first, *more]


def list_faults(mutations):
    """Complaints about the list; marks what they are about."""
    seen, faults = set(), []
    for m in mutations:
        before = len(faults)
        path = ROOT / m["file"]
        count = path.read_text(encoding="utf-8").count(m["old"]) if path.is_file() else 0
        if count != 1:
            faults.append(f"{m['id']}: text occurs {count} times in {m['file']}")
        if not (ROOT / (m["test"].split()[0] if is_script(m) else m["test"] + ".c")).is_file():
            faults.append(f"{m['id']}: no test {m['test']}")
        if m["id"] in seen or m["old"] == m["new"] or m["build"] not in ("release", "debug", "asan", "tsan"):
            faults.append(f"{m['id']}: named twice, changes nothing, or unknown build")
        seen.add(m["id"])
        m["is_usable"] = len(faults) == before
    return faults


def make(where, build, targets, jobs=1, extra=()):
    done = subprocess.run(["make", "-s", f"-j{jobs}", f"BUILD={build}", *extra, *targets], cwd=where,
                          capture_output=True, text=True, env={k: v for k, v in os.environ.items()
                                                               if k not in ("MAKEFLAGS", "MAKELEVEL", "BUILD")})
    return done.returncode, done.stdout + done.stderr


def copy_tree(source, target, builds):
    """Sources and objects, without programs and benchmarks: tests need neither."""
    for part in PARTS:
        copy = shutil.copytree if (source / part).is_dir() else shutil.copy2
        copy(source / part, target / part)
    for build in builds:
        shutil.copytree(source / "build" / build, target / "build" / build,
                        ignore=lambda folder, names: {n for n in names if n == "bench" or n.endswith(".so")
                                                      or n.startswith("kvpick")})


class Copy:
    """A copy of the tree that mutations are tried in, one after the other, and one that stays as it is."""

    def __init__(self, builds):
        self.temp = tempfile.TemporaryDirectory(prefix="kvpick-mutation-")
        self.kept, self.dir = (pathlib.Path(self.temp.name) / x for x in ("kept", "work"))
        for folder in (self.kept, self.dir):
            folder.mkdir()
        copy_tree(ROOT, self.kept, builds)
        copy_tree(self.kept, self.dir, builds)
        self.sound = {}  # scripts that were run as things are: whether they passed

    def put_back(self, m, since_ns):
        shutil.copy2(self.kept / m["file"], self.dir / m["file"])
        for folder, _, names in os.walk(self.dir / "build" / m["build"]):
            for name in names:
                path = pathlib.Path(folder) / name
                if path.stat().st_mtime_ns >= since_ns:
                    kept = self.kept / path.relative_to(self.dir)
                    if kept.is_file():
                        shutil.copy2(kept, path)
                    else:
                        path.unlink()

    def run_test(self, m, seed):
        """(failed, how) of one run."""
        env = {**os.environ, "KVP_BUILD_DIR": f"build/{m['build']}", "KVP_SEED": str(seed)}
        for pair in m.get("env", "").split():
            key, _, value = pair.partition("=")
            env[key] = value
        if m["build"] == "tsan":
            env["TSAN_OPTIONS"] = f"suppressions={self.dir}/tests/tsan.supp exitcode=66 halt_on_error=1"
        proc = subprocess.Popen(command_of(m, self.dir), cwd=self.dir, env=env, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            code = proc.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = "time limit"
        try:
            os.killpg(proc.pid, 9)  # also children that the test left
        except ProcessLookupError:
            pass
        proc.wait()
        return code != 0, f"exit {code}"

    def is_sound(self, m, seed):
        """Whether a script passes without a breakage."""
        key = (m["test"], m["build"])
        if key not in self.sound:
            since = time.time_ns()
            code, _ = make(self.dir, m["build"], targets_of(m))
            self.sound[key] = not code and not self.run_test(m, seed)[0]
            self.put_back(m, since)
        return self.sound[key]

    def attempt(self, m, seed):
        """(caught, text)"""
        start = time.monotonic()
        if is_script(m) and not self.is_sound(m, seed):
            return False, "fails as things are"
        path = self.dir / m["file"]
        text = path.read_text(encoding="utf-8")
        since = time.time_ns()
        path.write_text(text.replace(m["old"], m["new"]), encoding="utf-8")
        os.utime(path)
        try:
            # A mutation may leave something unused: no warnings.
            code, out = make(self.dir, m["build"], targets_of(m), extra=["WARN=-w"])
            if code:
                return False, "does not compile\n" + out[-2000:]
            how = ""
            for i in range(int(m.get("tries", "1"))):
                failed, how = self.run_test(m, seed + i)
                if failed:
                    return True, f"{how}, run {i + 1}, {time.monotonic() - start:.1f} s"
            return False, how
        finally:
            self.put_back(m, since)


class Report:
    def __init__(self):
        self.lock, self.count, self.failed = threading.Lock(), 0, 0

    def ok(self, cond, name, detail=""):
        with self.lock:
            self.count += 1
            self.failed += not cond
            print(f"{'ok' if cond else 'not ok'} {self.count} - {name}")
            if not cond and detail:
                print("#   " + detail.replace("\n", "\n#   "))
            sys.stdout.flush()


def try_all(mutations, seed, jobs, until, report):
    """Tries them in order; none is begun after until. Result: how many were tried."""
    work = queue.SimpleQueue()
    tried = []
    for m in mutations:
        work.put(m)

    def worker():
        copy = Copy(sorted({m["build"] for m in mutations}))
        with copy.temp:
            while time.monotonic() < until:
                try:
                    m = work.get_nowait()
                except queue.Empty:
                    return
                caught, text = copy.attempt(m, seed)
                tried.append(m)
                report.ok(caught, f"{m['id']}: {m['test']} ({m['build']}) fails without {m['why']}"
                          + (f" # {text}" if caught else ""), text)

    threads = [threading.Thread(target=worker) for _ in range(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return len(tried)


def main():
    every = read_list()
    report = Report()
    faults = list_faults(every)
    report.ok(not faults, f"each of {len(every)} mutations names one place and one test", "\n".join(faults))
    args = sys.argv[1:]
    seed = int(os.environ.get("KVP_SEED") or time.time_ns() % 1000000)
    print(f"# KVP_SEED={seed}")
    jobs, until = int(os.environ.get("KVP_MUTATION_JOBS", "1")), float("inf")
    if args == ["--all"]:
        chosen = every
    elif args:
        chosen = [m for m in every if m["id"] in args]
    elif os.environ.get("KVP_BUILD_DIR", "build/release") == "build/release":
        chosen = [m for m in every if m["build"] == "release" and m.get("form") != "long" and "tries" not in m]
        random.Random(seed).shuffle(chosen)
        until = time.monotonic() + float(os.environ.get("KVP_MUTATION_S", "30"))
    else:
        chosen = []
    chosen = [m for m in chosen if m["is_usable"]]
    if chosen:
        for build in sorted({m["build"] for m in chosen}):
            targets = sorted({t for m in chosen if m["build"] == build for t in targets_of(m)})
            code, out = make(ROOT, build, targets, jobs)
            if code:
                raise SystemExit("Bail out! " + out[-2000:])
        tried = try_all(chosen, seed, jobs, until, report)
        print(f"# {tried} of {len(every)} mutations tried")
    print(f"1..{report.count}")
    return 1 if report.failed else 0


sys.exit(main())
