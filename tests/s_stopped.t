#!/usr/bin/env python3
"""A stopped process is not a dead one: nobody takes what it holds, nobody waits for it, the supervisor says that it
is stuck, and when it goes on everything is as if nothing had happened. A process stopped for good is killed and
replaced."""
import http.client
import json
import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import Node, Tap, wait_for, worker

tap = Tap()
ENV = {"DYN_ROUTER_USE_KV_EVENTS": "false", "KVPICK_SLOT_BEAT_MS": "20", "KVPICK_SLOT_STUCK_MS": "1000",
       "KVPICK_RING_UNBLOCK_MS": "3000"}


def ask(conn, method, path, body=None):
    conn.request(method, path, json.dumps(body) if body is not None else None,
                 {"Content-Type": "application/json"} if body is not None else {})
    reply = conn.getresponse()
    reply.read()
    return reply.status


def connections(node, n=24):
    """Keep-alive connections, each already served once: accepted by one of the httpd processes."""
    out = []
    for _ in range(n):
        c = http.client.HTTPConnection("127.0.0.1", node.port, timeout=0.4)
        ask(c, "GET", "/health")
        out.append(c)
    return out


def living(conns):
    """The connections that still answer."""
    out = []
    for c in conns:
        try:
            if ask(c, "GET", "/health") == 200:
                out.append(c)
        except OSError:
            c.close()
        if len(out) >= 4:
            break
    return out


def requests_on(node):
    return sum(r["active_requests"] for part in node.call("GET", "/loads")[1] for r in part["loads"])


def stopped_httpd(node):
    conns = connections(node)
    for i, c in enumerate(conns):
        ask(c, "POST", "/select_and_reserve", {"selection_id": f"s{i}", "token_ids": list(range(16))})
    pid = node.children()["kvpick-httpd"][0]
    os.kill(pid, signal.SIGSTOP)
    good = living(conns)
    tap.ok(good, "the other httpd answers")
    before = pid in node.children()["kvpick-httpd"]
    codes = {ask(good[0], "POST", "/select_and_reserve", {"selection_id": f"t{i}", "token_ids": list(range(16))})
             for i in range(200)}
    codes |= {ask(good[0], "DELETE", f"/reservations/t{i}") for i in range(200)}
    tap.same(codes, {200}, "400 bookings and frees beside a stopped process, none refused")
    freed = [ask(good[0], "DELETE", f"/reservations/s{i}") for i in range(len(conns))]
    tap.same(set(freed), {200}, "bookings that the stopped process made are freed through the other one")
    tap.ok(wait_for(lambda: "stuck" in node.log_text()), "the supervisor says that a process is stuck")
    tap.ok(before and pid in node.children()["kvpick-httpd"], "but does not take it for dead")
    os.kill(pid, signal.SIGCONT)
    tap.ok(wait_for(lambda: all(ask(c, "GET", "/health") == 200 for c in connections(node, 12))),
           "it goes on where it was")
    tap.same(requests_on(node), 0, "no load is left")


def stopped_indexer(node):
    pid = node.children()["kvpick-indexer"][0]
    os.kill(pid, signal.SIGSTOP)
    tap.same({node.call("POST", "/select", {"token_ids": [1, 2, 3, 4]})[0] for _ in range(50)}, {200},
             "selection does not need the indexer's attention")
    os.kill(pid, signal.SIGCONT)
    tap.ok(wait_for(lambda: node.call("POST", "/workers", worker(7))[0] == 201), "registration works again")


def stopped_for_good(node):
    pid = node.children()["kvpick-httpd"][0]
    os.kill(pid, signal.SIGSTOP)
    tap.ok(wait_for(lambda: len(node.children().get("kvpick-httpd", [])) == 2 and
                    pid not in node.children()["kvpick-httpd"], 20), "a process stopped for good is replaced")


def main():
    with Node("--httpd-processes", "2", env=ENV) as node:
        for i in (1, 2):
            node.call("POST", "/workers", worker(i))
        stopped_httpd(node)
        stopped_indexer(node)
        stopped_for_good(node)
        tap.ok(wait_for(lambda: node.ctl("check")[0] == 0), "kvpickctl check finds no fault", node.ctl("check")[1])
    return tap.done()


sys.exit(main())
