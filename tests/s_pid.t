#!/usr/bin/env python3
"""A node in a process id namespace of its own, where ids can be chosen: an HTTP process that dies comes again with
the same id. What it had begun is swept, what it had booked for the node stays, and nothing is taken for alive that
is dead. Runs itself again inside such a namespace; skipped where that is not permitted."""
import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import Node, Tap, wait_for, worker

INSIDE = "KVP_TEST_INSIDE"
TRIES = 10


def httpd(node):
    return node.children().get("kvpick-httpd", [])


def come_again(node, pid, before):
    """Kills pid; the id of the process that comes instead. So many ids are taken before it: one by the sweep helper,
    more by what a sanitizer starts at its end."""
    with open("/proc/sys/kernel/ns_last_pid", "w", encoding="ascii") as f:
        f.write(str(pid - 1 - before))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(node.log_text().split("child.running role=httpd")) > come_again.started, 20)
    come_again.started += 1
    wait_for(node.healthy, 20)
    return httpd(node)[0]


come_again.started = 2


def inside():
    tap = Tap()
    with Node(env={"DYN_ROUTER_USE_KV_EVENTS": "false"}) as node:
        tap.ok(node.proc.pid < 1000, "the node has small process ids", node.proc.pid)
        node.call("POST", "/workers", worker(1))
        same, before = 0, 1
        for i in range(TRIES):
            status = node.call("POST", "/select_and_reserve", {"selection_id": f"s{i}", "token_ids": [i] * 16})[0]
            pid = httpd(node)[0]
            again = come_again(node, pid, before) == pid
            same += again
            before += not again
            tap.ok(status == 200 and node.call("DELETE", f"/reservations/s{i}")[0] == 200,
                   f"booking {i} outlives its process", status)
            if same >= 2:
                break
        tap.ok(same >= 2, f"a dead process's id came again ({same} of {i + 1} times)")
        rows = [r for part in node.call("GET", "/loads")[1] for r in part["loads"]]
        tap.same([r["active_requests"] for r in rows], [0], "no load is left")
        tap.ok(wait_for(lambda: node.log_text().count("sweep.done") >= i + 1), "each death was swept")
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)
    return tap.done()


def main():
    if os.environ.get(INSIDE):
        return inside()
    enter = ["unshare", "--pid", "--fork", "--mount-proc"]
    for more in ([], ["--user", "--map-root-user"]):
        test = subprocess.run([*enter, *more, "sh", "-c", "echo 300 > /proc/sys/kernel/ns_last_pid"],
                              capture_output=True, text=True, check=False)
        if test.returncode == 0:
            return subprocess.run([*enter, *more, sys.executable, __file__], env={**os.environ, INSIDE: "1"},
                                  check=False).returncode
    print(f"1..0 # SKIP process id namespaces: {test.stderr.strip()}")
    return 0


sys.exit(main())
