"""Runs a real node for a system test: temporary run directory, free ports, HTTP calls, TAP, kvpickctl check.

Used by tests/s_*.t; Python's standard library only. KVP_BUILD_DIR names the build (build/release)."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy"))
from free_port import free_port

BUILD = os.environ.get("KVP_BUILD_DIR", "build/release")
SLOW = 5 if any(x in BUILD for x in ("asan", "ubsan")) else 1


def skip(why):
    """Ends a test that can't run in this build or on this machine."""
    print(f"1..0 # SKIP {why}")
    sys.exit(0)


if BUILD.endswith("tsan"):
    skip("a node is several processes, of which ThreadSanitizer sees one")


class Tap:
    """ok() prints one claim; done() the plan. The exit code of the test is done()'s result."""

    def __init__(self):
        self.count = self.failed = 0

    def ok(self, cond, name, detail=""):
        self.count += 1
        self.failed += not cond
        print(f"{'ok' if cond else 'not ok'} {self.count} - {name}")
        sys.stdout.flush()
        if not cond:  # where prove shows it
            print("#   " + f"failed: {name}\n{detail}".rstrip("\n").replace("\n", "\n#   "), file=sys.stderr)
        return cond

    def same(self, got, want, name):
        return self.ok(got == want, name, f"got  {got!r}\nwant {want!r}")

    def done(self):
        print(f"1..{self.count}")
        return 1 if self.failed or not self.count else 0


def wait_for(what, seconds=10.0):
    """Calls what() until it answers something true; returns that, or the last answer after the deadline. Other processes
    tell nobody of what they do, so it looks every 10 ms."""
    end = time.monotonic() + seconds * SLOW
    while True:
        got = what()
        if got or time.monotonic() > end:
            return got
        time.sleep(0.01)


def tcp_timers(port, end):
    """What the kernel's timer of each established TCP connection over IPv4 is for (02: keep-alive), of those whose
    `end` (1: local, 2: remote) is port."""
    with open("/proc/net/tcp", encoding="ascii") as f:
        rows = [line.split() for line in f.readlines()[1:]]
    return [w[5].split(":")[0] for w in rows if w[3] == "01" and int(w[end].split(":")[1], 16) == port]


def call(port, method, path, body=None, headers=None, timeout=30.0, host="127.0.0.1"):
    """One HTTP exchange on a fresh connection: (status, parsed JSON or text)."""
    conn = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        head = dict(headers or {})
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
            head.setdefault("Content-Type", "application/json")
        conn.request(method, path, body, head)
        reply = conn.getresponse()
        text = reply.read().decode("utf-8", "replace")
        try:
            return reply.status, json.loads(text)
        except ValueError:
            return reply.status, text
    finally:
        conn.close()


class Node:
    """`kvpick run` with its children. Use as a context manager; leaving it stops the node and checks that it
    ends with exit code 0 when asked to."""
    host = "127.0.0.1"  # where its ports are reached

    def __init__(self, *args, env=None, quiet=True, before=()):
        self.dir = tempfile.TemporaryDirectory(prefix="kvpick-test-")
        self.port = free_port()
        self.args = ["--run-dir", self.dir.name, "--port", str(self.port), "--bind", "127.0.0.1",
                     "--max-ranks", "256", "--index-ranks", "64", "--max-blocks", "200000",
                     "--max-reservations", "4096", "--max-active-blocks", "262144", *args]
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVPICK_"))}
        self.env.update(env or {})
        self.log = open(os.path.join(self.dir.name, "log"), "w+b")
        self.proc = None
        self.quiet = quiet
        self.before = before  # command that starts it

    def start(self):
        self.proc = subprocess.Popen([*self.before, f"{BUILD}/kvpick", "run", *self.args], env=self.env,
                                     stdout=self.log, stderr=self.log)
        wait_for(lambda: self.proc.poll() is not None or self.healthy(), 20)
        if self.proc.poll() is not None or not self.healthy():
            self.stop(signal.SIGKILL)
            raise RuntimeError("node did not become healthy\n" + self.log_text())
        return self

    def healthy(self):
        if self.proc.poll() is not None:
            return False
        try:
            return call(self.port, "GET", "/health", timeout=2, host=self.host)[0] == 200
        except OSError:
            return False

    def call(self, method, path, body=None, **kw):
        return call(self.port, method, path, body, host=self.host, **kw)

    def ctl(self, *args):
        """kvpickctl: (exit code, output). On a busy machine the supervisor may need more than its second to answer."""
        done = subprocess.run([f"{BUILD}/kvpickctl", "--run-dir", self.dir.name, "-t", "20000", *args], env=self.env,
                              capture_output=True, text=True, timeout=60 * SLOW)
        return done.returncode, done.stdout + done.stderr

    def counted(self, name):
        """A counter or gauge by its name without kvpick_ and _total, all its series together."""
        rows = [float(line.split()[-1]) for line in self.call("GET", "/metrics")[1].splitlines()
                if re.match(rf"kvpick_{name}(_total)?[ {{]", line)]
        if not rows:
            raise RuntimeError(f"no metric kvpick_{name}")
        return int(sum(rows))

    def children(self):
        """{role: [pid]} of the node's processes, by program name."""
        out = {}
        path = f"/proc/{self.proc.pid}/task/{self.proc.pid}/children"
        with open(path, encoding="ascii") as f:
            pids = [int(p) for p in f.read().split()]
        for pid in pids:
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    name = os.path.basename(f.read().split(b"\0")[0].decode())
                out.setdefault(name, []).append(pid)
            except OSError:
                pass
        return out

    def listeners(self):
        """Number of sockets that listen on the node's HTTP port. The kernel closes that of a killed process some
        milliseconds after the process is gone (its io_uring is torn down by a kernel worker), and resets what
        had come in there."""
        with open("/proc/net/tcp", encoding="ascii") as f:
            rows = [line.split() for line in f.readlines()[1:]]
        return sum(r[3] == "0A" and r[1].endswith(f":{self.port:04X}") for r in rows)

    def log_text(self):
        self.log.flush()
        with open(self.log.name, "rb") as f:
            return f.read().decode("utf-8", "replace")

    def stop(self, sig=signal.SIGTERM):
        if self.proc.poll() is None:
            self.proc.send_signal(sig)
            try:
                self.proc.wait(40 * SLOW)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.proc.wait()
        return self.proc.returncode

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc):
        self.stop()
        self.log.close()
        self.dir.cleanup()


def worker(worker_id, events=None, **extra):
    """A WorkerRequest with the members that make it schedulable."""
    body = {"worker_id": worker_id, "endpoint": f"http://10.0.0.{worker_id % 250}:8000", "block_size": 4}
    if events:
        body["kv_events_endpoint"] = events
    body.update(extra)
    return body
