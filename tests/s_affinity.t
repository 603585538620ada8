#!/usr/bin/env python3
"""Session affinity over three HTTP processes: concurrent first bookings of a session meet on one worker, leases end
with their reservations however these end, replayed selections bind, a killed process leaves nothing behind."""
import concurrent.futures
import http.client
import json
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, Node, Tap, wait_for, worker

SLEEP_MAX_S = 0.05  # KVP_SLEEP_MAX_MS: who waits for another process looks by itself so often


def book(node, rid, session, **extra):
    body = {"selection_id": rid, "session_id": session, "block_hashes": [len(rid) + 1000], "sequence_hashes": [7],
            "isl_tokens": 4, **extra}
    return node.call("POST", "/select_and_reserve", body)


def counter(node, event):
    lines = [x.split() for x in node.call("GET", "/metrics")[1].split("\n") if f"affinity_{event}" in x and x[0] != "#"]
    return sum(float(x[-1]) for x in lines)


def looked_at(node, session):
    """Where a selection of the session goes that books nothing."""
    body = {"block_hashes": [5], "sequence_hashes": [6], "isl_tokens": 4}
    return node.call("POST", "/select", {**body, "session_id": session})[1]["worker_id"]


def together(tap, node):
    """Bursts of one session each, on all processes at once."""
    spread, refused = 0, []
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for n in range(40):
            got = list(pool.map(lambda i, n=n: book(node, f"b{n}-{i}", f"burst{n}"), range(12)))
            refused += [g for g in got if g[0] != 200]
            spread += len({g[1].get("worker_id") for g in got}) != 1
            for i in range(12):
                node.call("DELETE", f"/reservations/b{n}-{i}")
    tap.ok(not refused, "480 bookings of 40 sessions: none refused", refused[:3])
    tap.same(spread, 0, "every session on one worker from its first booking on")


def leases(tap, node):
    first = book(node, "l1", "lease")[1]["worker_id"]
    for n in range(3):
        book(node, f"busy{n}", "", pinned_worker={"worker_id": first, "dp_rank": 0})
    tap.same(looked_at(node, "lease"), first, "a bound session goes where it is loaded")
    other = book(node, "l2", "lease", allowed_worker_ids=[3 - first])
    tap.ok(other[0] == 400 and "session affinity" in other[1]["error"], "hard: booked elsewhere is 400", other)
    tap.same(node.call("DELETE", "/reservations/l2")[0], 404, "and the booking was freed")
    tap.same(looked_at(node, "lease"), 3 - first, "the binding was dropped: the session is free again")
    replay = {"selection_id": "r1", "session_id": "replayed", "token_ids": [1, 2, 3, 4],
              "allowed_worker_ids": [first]}
    tap.same(node.call("POST", "/select", replay)[0], 200, "a selection with a session")
    tap.ok(looked_at(node, "replayed") == 3 - first, "binds nothing")
    tap.same(node.call("POST", "/reservations", {"selection_id": "r1"})[0], 201, "its replay")
    tap.same(looked_at(node, "replayed"), first, "does")
    again = {**replay, "selection_id": "r2", "allowed_worker_ids": [3 - first]}
    node.call("POST", "/select", again)
    tap.same(node.call("POST", "/reservations", {"selection_id": "r2"})[0], 400, "a replay elsewhere is refused")
    tap.same(node.call("POST", "/reservations", {"selection_id": "r2"})[0], 404, "and used up")
    for rid in ("l1", "r1", "busy0", "busy1", "busy2"):
        node.call("DELETE", f"/reservations/{rid}")


def asked_once(tap):
    """Bookings of a session whose first one waits in the queue: their bodies are not read again at every turn of the
    process, only when that one is done."""
    many, body = 30, {"session_id": "S", "token_ids": [1] * 300000}
    env = {"DYN_USE_KV_EVENTS": "false", "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": "60",
           "DYN_ROUTER_QUEUE_THRESHOLD": "0.5"}
    with Node(env=env) as node, concurrent.futures.ThreadPoolExecutor(many + 1) as pool:
        def waiting():
            return node.call("GET", "/loads")[1][0]["pending_count"]
        node.call("POST", "/workers", worker(1, max_num_batched_tokens=16))
        node.call("POST", "/select_and_reserve", {"selection_id": "a", "token_ids": list(range(64))})
        first = pool.submit(node.call, "POST", "/select_and_reserve",
                            {"selection_id": "q", "session_id": "S", "token_ids": list(range(64))}, timeout=120)
        wait_for(lambda: waiting() == 1)
        rest = [pool.submit(node.call, "POST", "/select_and_reserve", body, timeout=120) for _ in range(many)]
        tap.ok(wait_for(lambda: counter(node, "waited") >= many, 30), "bookings wait for the first of their session")
        at, looked = time.monotonic(), counter(node, "looked")
        for _ in range(100):
            node.call("GET", "/health")
        looked, most = counter(node, "looked") - looked, (1 + (time.monotonic() - at) / SLEEP_MAX_S) * many
        tap.same(counter(node, "waited"), many, "and do not ask again while nothing has changed")
        tap.ok(looked <= most, "nor are they looked at in every turn, only by a timer", (looked, most))
        node.call("DELETE", "/reservations/a")
        tap.same(first.result(120)[0], 200, "the first one is booked")
        tap.ok(wait_for(lambda: waiting() + sum(f.done() for f in rest) == many), "the others follow", waiting())
        tap.same(counter(node, "waited"), many, "each after one more look")
        node.call("DELETE", "/reservations/q")
        for f in concurrent.futures.as_completed(rest, 120):
            node.call("DELETE", f"/reservations/{f.result()[1]['selection_id']}")
        tap.ok(wait_for(lambda: waiting() == 0), "all are answered")
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)


def killed(tap, node):
    first = book(node, "k1", "kept")[1]["worker_id"]
    dying = set(node.children()["kvpick-httpd"])
    for pid in dying:
        os.kill(pid, signal.SIGKILL)

    def back():
        now = set(node.children().get("kvpick-httpd", []))
        return len(now) == 3 and not now & dying and node.listeners() == 3 and node.healthy()
    wait_for(back)
    for n in range(3):
        book(node, f"kb{n}", "", pinned_worker={"worker_id": first, "dp_rank": 0})
    tap.same(wait_for(lambda: node.healthy() and looked_at(node, "kept") == first), True,
             "a binding outlives all HTTP processes")
    node.call("DELETE", f"/workers/{first}")
    tap.same(book(node, "k2", "kept")[1].get("worker_id"), 3 - first, "a departed worker is replaced without an error")
    node.call("DELETE", "/reservations/k2")


def parked(tap):
    """A booking that must wait holds up nobody else, follows when it may, and is forgotten with its client."""
    with Node("--session-affinity-ttl-secs", "60", env={"DYN_ROUTER_USE_KV_EVENTS": "false"}) as node, \
            concurrent.futures.ThreadPoolExecutor(4) as pool:
        node.call("POST", "/workers", worker(1))
        pid = str(node.children()["kvpick-httpd"][0])
        holder = subprocess.Popen([f"{BUILD}/tests/helpers/h_session", pid, "held"], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE)
        tap.same(holder.stdout.readline(), b"held\n", "another process initialises a session")
        waits = pool.submit(book, node, "p1", "held")
        gone = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
        gone.request("POST", "/select_and_reserve", json.dumps(
            {"selection_id": "p2", "session_id": "held", "token_ids": [1, 2, 3, 4]}),
            {"Content-Type": "application/json"})
        tap.ok(wait_for(lambda: counter(node, "waited") >= 2), "two bookings of it wait")
        tap.same(book(node, "p3", "free")[0], 200, "bookings of other sessions do not")
        gone.sock.close()
        tap.ok(wait_for(lambda: "kvpick_httpd_request_aborted_total 1\n" in node.call("GET", "/metrics")[1]),
               "a client that goes away is noticed")
        tap.ok(not waits.done(), "still waiting")
        holder.stdin.close()
        tap.same(waits.result(timeout=30)[0], 200, "booked when the other one gives up")
        tap.same(node.call("DELETE", "/reservations/p2")[0], 404, "not booked for a client that has gone")
        tap.same((node.call("DELETE", "/reservations/p1")[0], holder.wait(30)), (200, 0), "freed")
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)


def main():
    tap = Tap()
    parked(tap)
    asked_once(tap)
    with Node("--session-affinity-ttl-secs", "2",
              env={"DYN_ROUTER_USE_KV_EVENTS": "false", "KVPICK_HTTPD_PROCESSES": "3"}) as node:
        for n in (1, 2):
            node.call("POST", "/workers", worker(n))
        together(tap, node)
        leases(tap, node)
        killed(tap, node)
        tap.ok(wait_for(lambda: counter(node, "reaped") > 0), "idle bindings are removed")
        print(f"# bookings that met an initialisation: {counter(node, 'waited')}")
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)
    return tap.done()


sys.exit(main())
