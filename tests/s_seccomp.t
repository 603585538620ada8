#!/usr/bin/env python3
"""A node, and the sidecar, in what a container allows: under the profile of deploy/kubernetes/seccomp, and under one that forbids
io_uring as runtimes' default profiles do. Not root, no capabilities, read-only file system but the run directory."""
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile

LIB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
sys.path.insert(0, LIB)
import seccomp
from engine import Engine, stored, tokens
from node import BUILD, SLOW, Node, Tap, call, free_port, skip, wait_for

PROFILE = "deploy/kubernetes/seccomp/kvpick.json"
URING = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
USER = "65532"
AS_USER = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
# In a name space of its own: the run directory stays writable, everything else of the file system does not.
JAIL = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec "$@"'
tap = Tap()


def has_uring():
    """Whether this machine gives out rings at all."""
    params = ctypes.create_string_buffer(120)
    fd = ctypes.CDLL(None).syscall(seccomp.numbers()["io_uring_setup"], 4, params)
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def can_jail():
    """Whether this user may make name spaces, and the container's user may run what was built."""
    if os.geteuid() or not shutil.which("setpriv") or not shutil.which("unshare"):
        return False
    tried = [["unshare", "-m", "sh", "-c", "mount --bind /tmp /tmp && mount -o remount,bind,ro /"],
             [*AS_USER, f"{BUILD}/kvpick", "version"]]
    return all(subprocess.run(t, capture_output=True, check=False).returncode == 0 for t in tried)


def make_node(deny, jail, profile):
    node = Node(env={"KVPICK_MODE": "both", "DYN_MODEL_NAME": "default", "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render",
                     "DYN_EPP_TOKENIZER_SERVICE_URL": "http://127.0.0.1:1", "KVPICK_EPP_PORT": str(free_port()),
                     "KVPICK_EPP_HEALTH_PORT": str(free_port()), "DYN_EPP_METRICS_PORT": "0",
                     "ASAN_OPTIONS": "detect_leaks=0"})  # the search for leaks traces, which the profile forbids
    node.before = [sys.executable, os.path.join(LIB, "seccomp.py"), profile, ",".join(deny)]
    if jail:
        os.chown(node.dir.name, int(USER), int(USER))
        node.before = ["unshare", "-m", "sh", "-c", JAIL, node.dir.name, *AS_USER, *node.before]
    return node


def rings(node):
    """Rings that the node's processes have open."""
    cnt = 0
    for pid in [p for pids in node.children().values() for p in pids]:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                cnt += os.readlink(f"/proc/{pid}/fd/{fd}") == "anon_inode:[io_uring]"
            except OSError:
                pass
    return cnt


def all_run(node):
    status, said = node.call("GET", "/status?format=json")
    running = [p["role"] for p in said["processes"] if p["state"] == "RUN"] if status == 200 else []
    return sorted(running) == ["extproc", "extproc", "httpd", "indexer", "supervisor"]


def use(node, name):
    """A worker, its events, a booking: every process of the node has something to do."""
    tap.ok(wait_for(lambda: all_run(node)), f"{name}: all processes run", node.call("GET", "/status?format=json"))
    engine = Engine()
    engine.register(node, 1)
    engine.send(0, stored(1, 0, 4))
    ask = {"token_ids": tokens(1, 4)}
    tap.ok(wait_for(lambda: node.call("POST", "/overlap_scores", ask)[1]["workers"][0]["device_blocks"] == 4),
           f"{name}: KV events arrive")
    tap.same(node.call("POST", "/select_and_reserve", {"selection_id": "a", **ask})[0], 200, f"{name}: a request is booked")
    tap.same(node.call("DELETE", "/reservations/a")[0], 200, f"{name}: and freed")
    engine.close()


def one(name, deny, jail, profile=PROFILE):
    with make_node(deny, jail, profile) as node:
        use(node, name)
        want = has_uring() and not deny
        tap.same(rings(node) > 0, want, f"{name}: io_uring is {'in use' if want else 'not used'}")
        check = [*(AS_USER if jail else []), f"{BUILD}/kvpickctl", "--run-dir", node.dir.name, "check"]
        done = subprocess.run(check, capture_output=True, text=True, timeout=60 * SLOW, check=False)
        tap.ok(done.returncode == 0, f"{name}: kvpickctl check finds nothing", done.stdout + done.stderr)
        said = node.log_text()
        tap.same(node.stop(), 0, f"{name}: it ends when asked to")
        tap.ok("child.refused" not in said and " E " not in said, f"{name}: no error in the log", said)


def sidecar(name, deny, jail):
    """The sidecar needs less: nothing that it could write to."""
    ports = {"DYN_SIDECAR_PORT": free_port(), "DYN_DECODE_ENGINE_PORT": free_port()}
    env = {**{k: str(v) for k, v in ports.items()}, "KVPICK_SIDECAR_BIND": "127.0.0.1", "DYN_SIDECAR_PD_ADAPTER": "vllm_nixl",
           "PATH": os.environ["PATH"], "ASAN_OPTIONS": "detect_leaks=0"}
    before = [sys.executable, os.path.join(LIB, "seccomp.py"), PROFILE, ",".join(deny)]
    with tempfile.TemporaryDirectory() as top:
        if jail:
            before = ["unshare", "-m", "sh", "-c", JAIL, top, *AS_USER, *before]
        sim = subprocess.Popen([f"{BUILD}/kvpick-sim", "--http-port", str(ports["DYN_DECODE_ENGINE_PORT"])],
                               stdout=subprocess.DEVNULL)
        side = subprocess.Popen([*before, f"{BUILD}/kvpick-sidecar"], env=env, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)

        def ask():
            try:
                return call(ports["DYN_SIDECAR_PORT"], "POST", "/v1/completions",
                            {"model": "default", "prompt": "Is anybody there?", "max_tokens": 2})[0]
            except OSError:
                return None
        tap.ok(wait_for(lambda: ask() == 200), f"{name}: the sidecar passes requests through")
        side.terminate()
        tap.same(side.wait(60 * SLOW), 0, f"{name}: and ends when asked to")
        sim.terminate()
        sim.wait()


def service_profile():
    """The calls that the unit of deploy/systemd allows, in the form of a profile; None without systemd-analyze."""
    if not shutil.which("systemd-analyze"):
        return None
    with open("deploy/systemd/kvpick.service", encoding="utf-8") as f:
        (todo,) = re.findall(r"^SystemCallFilter=(\S+)$", f.read(), re.M)
    todo, names = [todo], set()
    while todo:
        said = subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager", todo.pop()], capture_output=True,
                              text=True, check=True).stdout
        words = [w for w in said.split("\n")[1:] if w.strip() and w.strip()[0] != "#"]
        todo += [w.strip() for w in words if w.strip()[0] == "@"]
        names |= {w.strip() for w in words if w.strip()[0] != "@"}
    return {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": sorted(names), "action": "SCMP_ACT_ALLOW"}]}


def main():
    if platform.machine() != "x86_64":
        skip("the profile is for x86-64")
    _, unknown = seccomp.program(seccomp.load(PROFILE))
    tap.ok(len(unknown) < 10, "the profile's names are system calls", unknown)
    jail = can_jail()
    where = " as user 65532 on a read-only file system" if jail else ""
    one("the profile" + where, [], jail)
    one("without io_uring" + where, URING, jail)
    sidecar("the profile" + where, [], jail)
    sidecar("without io_uring" + where, URING, jail)
    service = service_profile()
    if not service:
        tap.ok(True, "the calls of the system service # SKIP no systemd-analyze (package systemd)")
        return tap.done()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        json.dump(service, f)
        f.flush()
        os.chmod(f.name, 0o644)
        one("the calls of the system service" + where, [], jail, f.name)
    return tap.done()


sys.exit(main())
