#!/usr/bin/env python3
"""The container image and the system service, as far as a machine without a container engine can tell: the Dockerfile
copies what is there and what `make install` needs, names no package itself, runs as a user that is not root; the table
of run-time packages is what the programs link; `make install` puts a unit in place that systemd accepts."""
import fnmatch
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, Tap

tap = Tap()
NOT_IN_IMAGE = {"kvpick-sim", "kvpick-load"}


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def out(*cmd, **more):
    return subprocess.run(cmd, capture_output=True, text=True, check=False, **more)


def instructions():
    """[(word, rest)] of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", read("Dockerfile"), flags=re.M)
    return [tuple(line.split(None, 1)) for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]


def ignored(path):
    """Whether .dockerignore keeps a path from the builder; the last line that fits decides."""
    out_of_it = False
    for line in read(".dockerignore").splitlines():
        if line and line[0] != "#":
            rule = line.lstrip("!")
            if rule == "*" or path == rule or path.startswith(rule + "/") or fnmatch.fnmatch(path, rule):
                out_of_it = line[0] != "!"
    return out_of_it


def dockerfile():
    steps = instructions()
    froms = [rest.split()[0] for word, rest in steps if word == "FROM"]
    tap.ok(froms and all(re.fullmatch(r"debian:12(-slim)?", f) for f in froms), "both stages are Debian 12", froms)
    sources = [s for word, rest in steps if word == "COPY" and "--from" not in rest for s in rest.split()[:-1]]
    for path in sorted(set(sources)):
        tap.ok(os.path.exists(path) and not ignored(path), f"COPY {path}: it is there, and the builder gets it")
    runs = " ".join(rest for word, rest in steps if word == "RUN")
    tap.ok(not re.search(r"\bapt(-get)?\b", runs.replace("/apt/", "/")), "packages come from deploy/deps.sh only", runs)
    wanted = re.findall(r"deps\.sh (\w+)", runs)
    tap.same(wanted, ["build", "runtime"], "those to build first, those to run in the image")
    users = [rest for word, rest in steps if word == "USER"]
    tap.ok(len(users) == 1 and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0]), "it runs as a number that is not root", users)
    manifest = read("deploy/kubernetes/components/pod/pod.yaml")
    tap.ok(f"runAsUser: {users[0].split(':')[0]}\n" in manifest, "the same as in the manifests")
    last = dict(steps)
    tap.same((last["ENTRYPOINT"], last["CMD"]), ('["kvpick"]', '["run"]'), "it starts a node")
    return sources


def builds(sources):
    """`make install` finds everything it names among the copied files."""
    with tempfile.TemporaryDirectory() as top:
        for path in sources:
            to = os.path.join(top, path)
            os.makedirs(os.path.dirname(to), exist_ok=True)
            if os.path.isdir(path):
                shutil.copytree(path, to, dirs_exist_ok=True)
            else:
                shutil.copy(path, to)
        # Every file made before it is needed: a dry run compiles nothing, but looks for all sources.
        done = out("make", "-n", "install", "BUILD=release", "DESTDIR=/x", cwd=top)
        tap.ok(done.returncode == 0 and "-o build/release/kvpick " in done.stdout, "the copied sources are all that is built",
               done.stderr)
        for path in re.findall(r"install -m \d+ (.*) /x/", done.stdout):
            missing = [p for p in path.split() if not p.startswith("build/") and not glob.glob(os.path.join(top, p))]
            tap.same(missing, [], f"and installed: {path[:60]}")


def packages():
    """The libraries that the programs name, against the table."""
    table = set(out("deploy/deps.sh", "list", "runtime").stdout.split())
    programs = [f"{BUILD}/{p}" for p in sorted(os.listdir(BUILD))
                if re.fullmatch(r"kvpick[\w-]*", p) and p not in NOT_IN_IMAGE and os.access(f"{BUILD}/{p}", os.X_OK)]
    owners, lost = {}, []
    for program in programs:
        names = re.findall(r"NEEDED\).*\[(.*)\]", out("readelf", "-d", program).stdout)
        found = dict(re.findall(r"^\s*(\S+) => (/\S+)", out("ldd", program).stdout, re.M))
        lost += re.findall(r"\S+ => not found", out("ldd", program).stdout)
        for name in names:
            if name.startswith("ld-linux") or re.match(r"lib(asan|ubsan|tsan|gcov)", name):
                continue
            path = os.path.realpath(found.get(name, ""))
            said = out("dpkg", "-S", path).stdout or out("dpkg", "-S", path.replace("/usr/lib/", "/lib/")).stdout
            owners.setdefault(said.split(":")[0] or f"nobody ({name})", set()).add(os.path.basename(program))
    tap.same(lost, [], "every library is found")
    tap.ok(len(programs) >= 5 and f"{BUILD}/kvpick" in programs, "programs were looked at", programs)
    tap.same(sorted(set(owners) - table), [], "the table has the package of every library")
    # Debug builds may lack one that only optimised code does not need, not the other way round.
    if BUILD.endswith("release"):
        tap.same(sorted(table - set(owners)), [], "and no package that none needs")
    both = set(out("deploy/deps.sh", "list", "build").stdout.split())
    everything = out("deploy/deps.sh", "list", "all").stdout.split()
    tap.ok(both < set(everything) and len(everything) == len(set(everything)), "the packages to build are part of all, none twice")
    tap.same(out("deploy/deps.sh", "list", "some").returncode, 2, "another word is refused")


def service():
    with tempfile.TemporaryDirectory() as top:
        done = out("make", "-s", "--no-print-directory", f"BUILD={os.path.basename(BUILD)}", "install", f"DESTDIR={top}")
        tap.ok(done.returncode == 0, "make install", done.stderr)
        unit = f"{top}/usr/lib/systemd/system/kvpick.service"
        text = read(unit)
        program = re.search(r"^ExecStart=(\S+)", text, re.M).group(1)
        tap.ok(os.access(top + program, os.X_OK), f"the unit starts {program}, which is installed")
        tap.ok(os.path.exists(f"{top}/usr/share/doc/kvpick/kvpick.yaml"), "an example of its settings is installed")
        said = out(f"{BUILD}/kvpick", "check-config", "--config", f"{top}/usr/share/doc/kvpick/kvpick.yaml")
        tap.ok(said.returncode == 0, "kvpick accepts the example", said.stderr)
        opened = f"{top}/all.yaml"
        with open(opened, "w", encoding="utf-8") as f:
            f.write(re.sub(r"^#(\w+: )", r"\1", read("deploy/systemd/kvpick.yaml"), flags=re.M))
        said = out(f"{BUILD}/kvpick", "check-config", "--config", opened)
        tap.ok(said.returncode == 0, "also with the settings that are left out in it", said.stderr)
        drain = int(re.search(r"^KVPICK_DRAIN_TIMEOUT_MS=(\d+)", said.stdout, re.M).group(1))
        stop = int(re.search(r"^TimeoutStopSec=(\d+)", text, re.M).group(1))
        tap.ok(stop * 1000 > drain, "systemd waits until the node has drained")
        if not shutil.which("systemd-analyze"):
            tap.ok(True, "systemd-analyze verify # SKIP no systemd-analyze (package systemd)")
            return
        with open(unit, "w", encoding="utf-8") as f:
            f.write(text.replace(f"={program}", f"={top}{program}"))
        done = out("systemd-analyze", "verify", "--man=no", unit)
        tap.ok(done.returncode == 0 and not done.stderr.strip(), "systemd accepts the unit", done.stderr)
        done = out("systemd-sysusers", "--dry-run", f"{top}/usr/lib/sysusers.d/kvpick.conf")
        user = re.search(r"^User=(\w+)", text, re.M).group(1)
        known = out("id", "-u", user).returncode == 0
        tap.ok(done.returncode == 0 and (known or f"user '{user}'" in done.stdout + done.stderr),
               "and makes its user", done.stdout + done.stderr)


def main():
    builds(dockerfile())
    packages()
    service()
    return tap.done()


sys.exit(main())
