#!/usr/bin/env python3
"""The Endpoint Picker: what a booking and a session live by. Leases are renewed while a stream lives and end when its
process stops; the last request of a session ends its binding; further endpoints are named in order; SIGTERM lets
served requests end and answers those that wait."""
import os
import queue
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from envoy import (REQUEST_BODY, REQUEST_HEADERS, RESPONSE_BODY, RESPONSE_HEADERS, SERVED, SUBSET, body, grpc, headers,
                   metadata)
from epp import COMPLETIONS, FULL, MODEL, SSE, Epp, Renderer, prompt, respond, routed, schedulable
from node import Tap, wait_for, worker

tap = Tap()
RENDERER = Renderer()
NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}


def idle(node, name):
    tap.ok(wait_for(lambda: not node.load()), f"{name}: no load is left", node.load())


def requests(node):
    return sum(x[2] for x in node.load().values())


def workers(node, cnt, **extra):
    for i in range(1, cnt + 1):
        node.call("POST", "/workers", worker(i, model_name=MODEL, **extra))
    tap.ok(wait_for(lambda: schedulable(node) == cnt), f"{cnt} workers")


def end(s):
    respond(s)
    s.half_close()
    s.reply()


def fallbacks():
    """The order is the order of cost: with three other loads on the workers it is known."""
    with Epp(RENDERER, env={**NO_EVENTS, "KVPICK_EPP_FALLBACK_ENDPOINTS": "2"}) as node:
        workers(node, 4)
        envoy = node.envoy()
        for w, blocks in ((1, 30), (2, 10), (3, 40), (4, 20)):
            node.call("POST", "/reservations", {
                "selection_id": f"load-{w}", "worker_id": w, "dp_rank": 0, "model_name": MODEL,
                "token_ids": list(range(w * 10000, w * 10000 + 4 * blocks))})
        before = requests(node)
        s, head, _ = routed(envoy, COMPLETIONS, prompt(50, 4))
        want = "10.0.0.2:8000,10.0.0.4:8000,10.0.0.1:8000"
        tap.same((head.destination, head.metadata), (want, want), "the chosen worker, then the next two by cost")
        tap.same(requests(node) - before, 1, "one is booked")
        s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, "10.0.0.2:8000,10.0.0.4:8000")))
        s.reply()
        tap.ok(wait_for(lambda: node.load()[4][2] == 2 and node.load()[2][2] == 1),
               "the proxy went on to the second: the booking moves there", node.load())
        s.send(body(RESPONSE_BODY, b"x", True))
        s.reply()
        tap.ok(wait_for(lambda: requests(node) == before), "and is freed", node.load())
        s.half_close()
        s, head, _ = routed(envoy, COMPLETIONS, prompt(51, 4),
                            more=metadata(SUBSET, ["10.0.0.1", "10.0.0.3"]))
        tap.same(head.destination, "10.0.0.1:8000,10.0.0.3:8000", "only endpoints of the subset are named")
        s.reset()
        s, head, _ = routed(envoy, COMPLETIONS, prompt(51, 4), more=metadata(SUBSET, ["10.0.0.3"]))
        tap.same(head.destination, "10.0.0.3:8000", "none where there is no other")
        s.reset()
        tap.same(node.counter("pick_fallbacks_total"), 3, "counted")
        for w in range(1, 5):
            node.call("DELETE", f"/reservations/load-{w}")
        idle(node, "fallbacks")
        envoy.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    # A rank header goes to whoever is tried; a request that waited has fallbacks, too.
    with Epp(RENDERER, env={**NO_EVENTS, "KVPICK_EPP_FALLBACK_ENDPOINTS": "7", "KVPICK_EPP_DP_ROUTING": "header",
                            "KVPICK_EPP_DATA_PARALLEL_SIZE": "2", "DYN_ROUTER_QUEUE_THRESHOLD": "1.0"}) as node:
        workers(node, 2, data_parallel_size=2, max_num_batched_tokens=16)
        envoy = node.envoy()
        busy = [routed(envoy, COMPLETIONS, prompt(60 + i, 5)) for i in range(4)]
        tap.ok(all(h.destination.count(",") == 1 for _, h, _ in busy), "both workers are named",
               [h.destination for _, h, _ in busy])
        late = envoy.stream(headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, prompt(70, 5), True))
        tap.ok(late.silent(), "a fifth request waits")
        busy[0][0].send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n"))
        head = late.reply()
        tap.ok(head.destination.startswith(busy[0][1].destination.split(",")[0] + ","),
               "it gets the worker that became free, and another behind it", head.destination)
        for s in [late] + [b[0] for b in busy]:
            s.reset()
        idle(node, "fallbacks of a queue")
        envoy.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def sessions():
    env = {**NO_EVENTS, "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": "600"}
    with Epp(RENDERER, env=env) as node:
        workers(node, 2)
        envoy = node.envoy()

        def turn(n, final=None):
            more = [("x-dynamo-session-id", "s")] + ([("X-Dynamo-Session-Final", final)] if final else [])
            return routed(envoy, COMPLETIONS + more, prompt(n, 4))
        s, head, _ = turn(1)
        home = head.destination
        w = int(home.split(":")[0].rsplit(".", 1)[1])
        end(s)
        node.call("POST", "/reservations", {"selection_id": "load", "worker_id": w, "dp_rank": 0, "model_name": MODEL,
                                            "token_ids": list(range(9000, 9400))})
        for n, final in ((2, None), (3, "false"), (4, "yes"), (5, "true")):
            s, head, _ = turn(n, final)
            tap.same(head.destination, home, f"turn {n} stays where the session is, though it is loaded")
            if final == "true":
                t, other, _ = turn(6)
                tap.same(other.destination, home, "one beside the last one, too")
                t.reset()
                wait_for(lambda: requests(node) == 2)
            end(s)
            tap.ok(wait_for(lambda: requests(node) == 1), f"turn {n} has ended")
        s, head, _ = turn(7)
        tap.ok(head.destination and head.destination != home, "after the last one the session is free to go elsewhere")
        end(s)
        node.call("DELETE", "/reservations/load")
        idle(node, "sessions")
        envoy.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def soft_sessions():
    """In soft mode the session follows its request to the worker that served it."""
    env = {**NO_EVENTS, "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": "600", "DYN_EPP_SESSION_AFFINITY_MODE": "soft"}
    with Epp(RENDERER, env=env) as node:
        workers(node, 2)
        envoy = node.envoy()
        session = [("x-session-id", "s")]
        s, head, _ = routed(envoy, COMPLETIONS + session, prompt(1, 4))
        other = "10.0.0.2:8000" if head.destination == "10.0.0.1:8000" else "10.0.0.1:8000"
        s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, other)))
        s.reply()
        tap.ok(wait_for(lambda: node.counter("booking_moved_total") == 1), "another worker serves")
        s.send(body(RESPONSE_BODY, b"x", True))
        s.reply()
        s.half_close()
        for n in range(2, 5):
            s, head, _ = routed(envoy, COMPLETIONS + session, prompt(n, 4))
            tap.same(head.destination, other, f"turn {n} of the session goes there")
            end(s)
        idle(node, "soft sessions")
        envoy.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def leases():
    env = {**NO_EVENTS, "KVPICK_LEASE_SECS": "2", "KVPICK_SLOT_STUCK_MS": "20000", "KVPICK_RING_UNBLOCK_MS": "30000"}
    with Epp(RENDERER, env=env) as node:
        workers(node, 2)
        envoys = [node.envoy() for _ in range(12)]
        streams = [routed(e, COMPLETIONS, prompt(80 + i, 3))[0] for i, e in enumerate(envoys)]
        tap.same(requests(node), 12, "twelve streams are booked")
        least, until = 12, time.monotonic() + 3.2
        while time.monotonic() < until:
            least = min(least, requests(node))
            time.sleep(0.05)  # between looks; that the time passes is the test
        tap.same(least, 12, "streams of one and a half leases stay counted all the time")
        tap.ok(node.counter("booking_renewed_total") >= 12 * 5, "their leases were renewed",
               node.counter("booking_renewed_total"))
        pid = node.children()["kvpick-extproc"][0]
        os.kill(pid, signal.SIGSTOP)
        tap.ok(wait_for(lambda: 0 < requests(node) < 12), "a stopped process renews nothing: its bookings end",
               requests(node))
        held = requests(node)
        os.kill(pid, signal.SIGCONT)
        lost = 12 - held
        tap.ok(wait_for(lambda: node.counter("booking_lease_lost_total") == lost), f"it goes on and misses {lost}",
               node.counter("booking_lease_lost_total"))
        tap.ok(all(respond(s)[-1].end for s in streams), "all streams are served to their end")
        for s in streams:
            s.half_close()
            s.reply()
        idle(node, "leases")
        for e in envoys:
            e.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def drain():
    """SIGTERM: who is served goes on, who waits is told so at once."""
    env = {"DYN_ROUTER_QUEUE_THRESHOLD": "1.0", **NO_EVENTS, "DYN_EPP_SHED_RETRY_AFTER_SECS": "3"}
    with Epp(RENDERER, env=env) as node:
        workers(node, 1, max_num_batched_tokens=16)
        envoys = [node.envoy() for _ in range(6)]
        served, head, _ = routed(envoys[0], COMPLETIONS, prompt(30, 5))
        tap.ok(head.destination, "one request is served")
        waiting = [e.stream(headers(REQUEST_HEADERS, COMPLETIONS, config=FULL),
                            body(REQUEST_BODY, prompt(31 + i, 5), True)) for i, e in enumerate(envoys[1:5])]
        half = envoys[5].stream(headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, b"{"))
        tap.ok(wait_for(lambda: node.counter("pick_queued_total") == 4), "four wait for a worker")
        said = queue.Queue()
        channel = grpc.insecure_channel(f"127.0.0.1:{node.health_port}")

        def watch():
            try:
                for answer in channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\x09readiness"):
                    said.put(answer)
            except grpc.RpcError:
                said.put(None)
        threading.Thread(target=watch, daemon=True).start()
        tap.same(said.get(timeout=10), b"\x08\x01", "ready, says the health service")
        node.proc.send_signal(signal.SIGTERM)
        tap.same(said.get(timeout=10), b"\x08\x02", "not ready any more")
        got = [s.reply() for s in waiting + [half]]
        tap.same([(g.kind, g.status, g.text, g.set) for g in got],
                 [("immediate", 503, "no endpoints available", {"retry-after": "3"})] * 5,
                 "those that wait, and one whose body is still coming, are answered 503")
        tap.ok(all(s.reply() is None and s.status() == grpc.StatusCode.OK for s in waiting), "and end with OK")
        tap.ok(respond(served)[-1].end, "the one that is served goes on to its end")
        served.half_close()
        tap.same(wait_for(lambda: node.proc.poll() is not None) and node.proc.returncode, 0, "then the node ends")
        tap.same(said.get(timeout=10), None, "and with it the watch")
        for e in envoys:
            e.close()
        channel.close()


for test in (fallbacks, sessions, soft_sessions, leases, drain):
    test()
sys.exit(tap.done())
