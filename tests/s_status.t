#!/usr/bin/env python3
"""GET /status of a real node on both ports, and readiness that waits for a number of workers."""
import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import Node, Tap, call, free_port, wait_for, worker

tap = Tap()


def status(node, port=None, **headers):
    return call(port or node.port, "GET", "/status", headers=headers)


def page(node, metrics):
    wait_for(lambda: len(status(node)[1]["processes"]) == 4)  # the API answers before the last one has joined
    s, body = status(node)
    tap.same((s, body["instance"], body["index"]["ready"], body["ready"]), (200, "default", True, False),
             "an empty node: index ready, node not")
    tap.same(sorted(p["role"] for p in body["processes"]), ["httpd", "indexer", "peer", "supervisor"], "its processes")
    tap.same((body["partitions"], body["replica_peers"], body["errors"]), ([], ["tcp://127.0.0.1:1"], []), "and the rest")
    s, text = status(node, Accept="text/html,application/xhtml+xml;q=0.9")
    tap.ok(s == 200 and text.startswith("<!DOCTYPE html>") and "/status?format=json" in text, "a browser gets a page")
    tap.ok(call(node.port, "GET", "/status?format=json", headers={"Accept": "text/html"})[1]["instance"] == "default",
           "that fetches JSON")
    tap.ok(status(node, metrics)[1]["instance"] == "default", "the same on the metrics port")
    tap.same(call(metrics, "GET", "/")[0], 302, "whose root leads there")
    tap.same((node.call("GET", "/")[0], node.call("POST", "/status")[0]), (404, 405),
             "the root of the Selection API stays unknown, and the page is only read")


def readiness(node):
    for n, want in ((1, 503), (2, 503)):
        node.call("POST", "/workers", worker(n, model_name=f"m{n}"))
        tap.same(node.call("GET", "/ready")[0], want, f"{n} of 3 workers: {want}")
    s, ready = node.call("GET", "/ready")
    tap.same((ready["ready"], ready["schedulable_workers"], len(ready["workers"])), (False, 2, 2),
             "the answer says what is there")
    node.call("DELETE", "/workers/1")
    node.call("POST", "/workers", worker(3))
    tap.same(node.call("GET", "/ready")[0], 503, "it counts those that are there at once")
    node.call("POST", "/workers", worker(1))
    tap.same(node.call("GET", "/ready")[0], 200, "three: 200")
    os.kill(node.children()["kvpick-indexer"][0], signal.SIGKILL)
    node.call("DELETE", "/workers/1")
    tap.ok(wait_for(lambda: node.call("GET", "/ready")[0] == 200 and len(node.children().get("kvpick-indexer", []))),
           "once is enough, also over an indexer's death")
    body = status(node)[1]
    tap.same(body["workers"]["most_schedulable"], 3, "the page shows the greatest number")
    node.call("POST", "/select_and_reserve", {"selection_id": "a", "model_name": "m2", "token_ids": list(range(8))})
    row = next(p for p in status(node)[1]["partitions"] if p["model_name"] == "m2")
    tap.same((row["active_requests"], row["active_prefill_tokens"], row["active_decode_blocks"], row["ranks"]),
             (1, 8, 2, 1), "loads are summed up by partition")


port = free_port()
with Node("--replica-sync-port", str(free_port()), "--replica-sync-peers", "tcp://127.0.0.1:1",
          env={"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_MIN_INITIAL_WORKERS": "3",
               "DYN_EPP_METRICS_PORT": str(port)}) as one:
    page(one, port)
    readiness(one)
sys.exit(tap.done())
