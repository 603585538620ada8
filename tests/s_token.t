#!/usr/bin/env python3
"""The optional bearer token: changing requests need it, looking does not, the file is read again when it changes."""
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import Node, Tap, wait_for, worker

tap = Tap()


def status(node, method, path, body=None, token=None):
    head = {"Authorization": f"Bearer {token}"} if token else {}
    return node.call(method, path, body, headers=head)[0]


def main():
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "token")
        with open(path, "w", encoding="ascii") as f:
            f.write("first-secret\n")
        with Node("--api-token-file", path, env={"DYN_ROUTER_USE_KV_EVENTS": "false"}) as node:
            code, reply = node.call("POST", "/workers", worker(1))
            tap.ok(code == 401 and "error" in reply, "registration without the token is 401", (code, reply))
            tap.same(status(node, "POST", "/workers", worker(1), "wrong-secret"), 401, "a wrong token is 401")
            tap.same(status(node, "POST", "/workers", worker(1), "first-secret"), 201, "the token opens")
            for method, route, want in [("GET", "/workers", 200), ("GET", "/loads", 200), ("GET", "/health", 200),
                                        ("GET", "/metrics", 200)]:
                tap.same(status(node, method, route), want, f"{method} {route} needs no token")
            body = {"token_ids": [1, 2, 3, 4]}
            tap.same(status(node, "POST", "/overlap_scores", body), 200, "overlap_scores needs no token")
            tap.same(status(node, "POST", "/potential_loads", body), 200, "potential_loads needs no token")
            for route in ("/select", "/select_and_reserve"):
                tap.same(status(node, "POST", route, body), 401, f"{route} needs the token")
            tap.same(status(node, "DELETE", "/workers/1"), 401, "DELETE needs the token")
            os.rename(path, path + ".old")
            tap.same(status(node, "POST", "/select", body, "first-secret"), 200, "a vanished file changes nothing")
            with open(path, "w", encoding="ascii") as f:
                f.write("second-one")
            tap.ok(wait_for(lambda: status(node, "POST", "/select", body, "second-one") == 200),
                   "a changed file is read again")
            tap.same(status(node, "POST", "/select", body, "first-secret"), 401, "the old token is closed")
            tap.ok("first-secret" not in node.log_text() and "second-one" not in node.log_text(),
                   "the log never shows a token")
            code, text = node.ctl("check")
            tap.ok(code == 0, "kvpickctl check finds no fault", text)
    return tap.done()


sys.exit(main())
