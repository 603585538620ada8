#!/usr/bin/env python3
"""SIGKILL of every process of the node under load: it answers again within a second, no load is left when the
clients have ended, kvpickctl check finds nothing."""
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import node
from node import SLOW, Node, Tap, call, wait_for, worker
from points import Points

tap = Tap()
NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}


class Client(threading.Thread):
    """Books, reports and frees in a loop. A call whose answer was lost is retried as the API says: free the id,
    404 is fine."""

    def __init__(self, node, number, stop):
        super().__init__(daemon=True)
        self.node, self.number, self.stop, self.done, self.errors = node, number, stop, 0, []

    def try_call(self, *args):
        try:
            return self.node.call(*args, timeout=5)[0]
        except OSError:
            return None

    def run(self):
        i = 0
        while not self.stop.is_set():
            i += 1
            sid = f"c{self.number}-{i}"
            status = self.try_call("POST", "/select_and_reserve", {
                "selection_id": sid, "token_ids": [self.number] * 16 + list(range(i % 64, i % 64 + 16))})
            if status == 200:
                self.try_call("POST", f"/reservations/{sid}/prefill_complete")
                self.done += 1
            elif status not in (None, 503):
                self.errors.append((sid, status))
            if not wait_for(lambda sid=sid: self.try_call("DELETE", f"/reservations/{sid}") in (200, 404), 30):
                self.errors.append((sid, "cannot be freed"))


def total_load(node):
    rows = [r for part in node.call("GET", "/loads")[1] for r in part["loads"]]
    return [sum(r[k] for r in rows) for k in ("potential_prefill_tokens", "potential_decode_blocks",
                                              "active_requests")]


def answers(node):
    try:
        return call(node.port, "POST", "/select", {"token_ids": [1, 2, 3, 4]}, timeout=2)[0] == 200
    except OSError:
        return False


def back_after(node, pid):
    """Kills pid; seconds until 20 selections in a row succeed again."""
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    good = 0
    while good < 20 and time.monotonic() - start < 30 * SLOW:
        if answers(node):
            good += 1
        else:
            good = 0
            time.sleep(0.005)
    return time.monotonic() - start if good == 20 else None


def sweeper_killed():
    """The first helper that sweeps after a killed httpd is killed itself: bookings and workers stay."""
    build = os.path.abspath(node.BUILD)
    with tempfile.TemporaryDirectory(prefix="kvp-kill") as d:
        for name in os.listdir(build):
            if name.startswith("kvpick"):
                os.symlink(f"{build}/{name}", f"{d}/{name}")
        os.unlink(f"{d}/kvpick")
        shutil.copy(f"{build}/kvpick", d)  # it starts what is beside its own program file
        os.unlink(f"{d}/kvpickctl")
        with open(f"{d}/kvpickctl", "w") as f:
            f.write(f'#!/bin/sh\n[ "$1" != sweep ] || mkdir {d}/once || exec {build}/kvpickctl "$@"\n'
                    f'[ "$1" != sweep ] || kill -9 $$\nexec {build}/kvpickctl "$@"\n')
        os.chmod(f"{d}/kvpickctl", 0o755)
        node.BUILD, before = d, node.BUILD
        try:
            with Node(env=NO_EVENTS) as n:
                n.call("POST", "/workers", worker(1))
                n.call("POST", "/select_and_reserve", {"selection_id": "a", "token_ids": list(range(16))})
                loads = n.call("GET", "/loads")
                pid = n.children()["kvpick-httpd"][0]
                tap.ok(back_after(n, pid) is not None, "httpd and the helper that sweeps killed: it answers again")
                tap.ok(os.path.exists(f"{d}/once"), "the helper was killed")
                tap.same(n.call("GET", "/loads"), loads, "the booking is there")
                tap.same(n.call("DELETE", "/reservations/a")[0], 200, "and can be freed")
                tap.same(len(n.call("GET", "/workers")[1]), 1, "so is the worker")
                code, text = n.ctl("check")
                tap.ok(code == 0, "kvpickctl check finds no fault", text)
        finally:
            node.BUILD = before


def sweep_killed(*places):
    """httpd is killed in the middle of a booking, the helper that sweeps in the middle of that, and the helper that
    repeats it in the middle, too."""
    name = " and ".join(places)
    with Points(kvpick_httpd=None, kvpickctl="sweep") as points:
        points.arm("kvpick-httpd", "book:ref:3")
        points.arm("kvpickctl", *places)
        with Node("--httpd-processes", "1", env=NO_EVENTS) as n:
            n.call("POST", "/workers", worker(1))
            for sid in "ab":
                tap.same(n.call("POST", "/select_and_reserve", {"selection_id": sid, "token_ids": list(range(32))})[0], 200,
                         f"{name}: booked")
            loads, gen = n.call("GET", "/loads"), n.ctl("--json", "gen")
            try:
                got = n.call("POST", "/select_and_reserve", {"selection_id": "c", "token_ids": list(range(40))})
            except OSError:
                got = None
            tap.same(got, None, f"{name}: httpd is killed while it books")
            tap.ok(wait_for(n.healthy, 30), f"{name}: it answers again", n.log_text())
            died = re.findall(r"child.ended role=(\w+) .* how=signal code=9", n.log_text())
            tap.same(died, ["httpd", "ctl", "ctl"], f"{name}: both helpers were killed there")
            tap.same((n.counted("supervisor_sweep_again"), n.counted("supervisor_child_swept")), (2, 1),
                     f"{name}: the third has swept")
            tap.same(n.ctl("--json", "gen"), gen, f"{name}: the region is the same")
            tap.ok(wait_for(lambda: n.call("GET", "/loads") == loads), f"{name}: bookings count as before",
                   (n.call("GET", "/loads"), loads))
            tap.same([n.call("DELETE", f"/reservations/{sid}")[0] for sid in "abc"], [200, 200, 404],
                     f"{name}: those that were made are there, the other is not")
            tap.same(total_load(n), [0, 0, 0], f"{name}: no load is left")
            code, text = n.ctl("check")
            tap.ok(code == 0, f"{name}: kvpickctl check finds no fault", text)


def supervisor_killed(node):
    """Children end with their supervisor; whoever watches it (systemd, kubelet) starts a new node."""
    pids = [p for group in node.children().values() for p in group]
    node.proc.kill()
    node.proc.wait()
    tap.ok(wait_for(lambda: not any(os.path.exists(f"/proc/{p}") for p in pids)),
           "supervisor killed: its children end with it")
    start = time.monotonic()
    node.start()
    node.call("POST", "/workers", worker(1))
    tap.ok(wait_for(lambda: answers(node)), "a new node takes over directory and port")
    print(f"# supervisor killed: a new node answers {time.monotonic() - start:.3f} s after its start")


def main():
    with Node("--httpd-processes", "2", env=NO_EVENTS) as n:
        for i in range(1, 5):
            n.call("POST", "/workers", worker(i))
        stop = threading.Event()
        clients = [Client(n, k, stop) for k in range(4)]
        for c in clients:
            c.start()
        for turn in range(2):
            for role in ("kvpick-httpd", "kvpick-indexer"):
                pids = wait_for(lambda r=role: n.children().get(r))
                seconds = back_after(n, pids[0])
                tap.ok(seconds is not None, f"turn {turn}: {role} killed, the service answers again", seconds)
                print(f"# {role} killed: 20 selections in a row after {seconds} s")
                want = 2 if role == "kvpick-httpd" else 1
                tap.ok(wait_for(lambda: len(n.children().get(role, [])) == want), f"turn {turn}: {role} is back",
                       n.children())
        stop.set()
        for c in clients:
            c.join(30 * SLOW)
        tap.ok(all(c.done > 10 for c in clients), "clients worked all the time", [c.done for c in clients])
        tap.same([e for c in clients for e in c.errors], [], "no client saw an answer other than 200 or 503")
        tap.ok(wait_for(lambda: total_load(n) == [0, 0, 0]), "no load is left", total_load(n))
        tap.same(len(n.call("GET", "/workers")[1]), 4, "the catalogue has all workers")
        code, text = n.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)
        supervisor_killed(n)
    sweeper_killed()


def sweeps():
    for places in (("book:recount:1", "book:recount_ref:2"), ("book:recount_store:1", "book:recount_store:1"),
                   ("book:recount_clean:1", "book:sweep:1"), ("book:sweep:1", "book:sweep:2")):
        sweep_killed(*places)


for test in (main, sweeps):
    if len(sys.argv) < 2 or test.__name__ in sys.argv[1:]:
        test()
sys.exit(tap.done())
