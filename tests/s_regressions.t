#!/usr/bin/env python3
"""Faults that other routers had, as experiments over real processes: a worker that returns while its old bookings are
still given back; upserts that reset loads; bookings left behind by calls that failed because their worker went; an
index that no request ever matches, and nobody notices."""
import http.client
import json
import os
import random
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import Engine, stored, tokens
from node import SLOW, Node, Tap, wait_for, worker
from waiter import LONG, SEED, free, part, prompt, seeded, total, waiting

tap = Tap()
rnd = seeded()
ENV = {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "3600"}


class Conn:
    """A keep-alive connection."""

    def __init__(self, node):
        self.http = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60 * SLOW)

    def ask(self, method, path, body=None):
        self.http.request(method, path, json.dumps(body) if body else None,
                          {"Content-Type": "application/json"} if body else {})
        reply = self.http.getresponse()
        return reply.status, reply.read()


def rows(node):
    """{worker: (blocks, requests)}"""
    return {r["worker_id"]: (r["potential_decode_blocks"], r["active_requests"]) for r in part(node)["loads"]}


def checked(node, name):
    code, text = node.ctl("check")
    tap.ok(code == 0, f"{name}: kvpickctl check finds no fault", text)


def returned_worker():
    """R27: what was booked on a worker before it left never touches the one that returns under its id."""
    with Node("--httpd-processes", "3", env=ENV) as node:
        node.call("POST", "/workers", worker(1))
        seen = []
        node.call("POST", "/select_and_reserve", {**prompt("A", 12), "selection_id": "A"})
        seen.append(rows(node))
        node.call("DELETE", "/workers/1")
        seen.append(rows(node))
        node.call("POST", "/workers", worker(1))
        node.call("POST", "/select_and_reserve", {**prompt("B", 8), "selection_id": "B"})
        seen.append(rows(node))
        gone = free(node, "A")
        seen.append(rows(node))
        tap.same(seen, [{1: (3, 1)}, {}, {1: (2, 1)}, {1: (2, 1)}], "R27: loads: 3, none, 2, and 2 after a late free")
        tap.same((gone, free(node, "B"), rows(node)), (404, 200, {1: (0, 0)}), "R27: which answers 404; the end is 0")
        checked(node, "R27")


def flaps():
    """R27: the same at random, with 50 requests in flight."""
    with Node("--httpd-processes", "3", env=ENV) as node:
        node.call("POST", "/workers", worker(1))
        stop, errors, done = threading.Event(), [], []

        def live(number):
            mine, conn, held = random.Random(SEED + number), Conn(node), []
            while not stop.is_set():
                sid = f"f{number}-{len(done)}-{mine.random()}"
                status, _ = conn.ask("POST", "/select_and_reserve", {**prompt(sid, 8), "selection_id": sid})
                if status == 200:
                    held.append(sid)
                elif status not in (500, 503):
                    errors.append((sid, status))
                while len(held) > 10 or (held and mine.random() < 0.5):
                    done.append(conn.ask("DELETE", f"/reservations/{held.pop(0)}")[0])
            for sid in held:
                done.append(conn.ask("DELETE", f"/reservations/{sid}")[0])
        threads = [threading.Thread(target=live, args=(n,), daemon=True) for n in range(5)]
        for t in threads:
            t.start()
        conn, times = Conn(node), 1000 if LONG else 100
        for _ in range(times):
            conn.ask("DELETE", "/workers/1")
            conn.ask("POST", "/workers", worker(1))
        stop.set()
        for t in threads:
            t.join(60 * SLOW)
        tap.same([errors[:5], [s for s in done if s not in (200, 404)]], [[], []],
                 f"R27: {times} flaps under {len(done)} bookings, {done.count(404)} of them gone with the worker")
        tap.same(rows(node), {1: (0, 0)}, "R27: the load is 0 after the last free")
        checked(node, "R27, flaps")


def upserts():
    """R28: the same worker again, a change of a label only: no load moves, no block is lost."""
    env = {k: v for k, v in ENV.items() if k != "DYN_ROUTER_USE_KV_EVENTS"}
    with Node("--httpd-processes", "3", env=env) as node:
        one, two = Engine(replay=False), Engine(replay=False)
        one.register(node, 1)
        two.register(node, 2)
        one.send(0, stored(7, 0, 8))
        same = {"token_ids": tokens(7, 8)}

        def held():
            return {w["worker_id"]: w["device_blocks"] for w in node.call("POST", "/overlap_scores", same)[1]["workers"]}
        wait_for(lambda: held()[1] == 8)
        for i in range(10):
            node.call("POST", "/reservations", {**prompt(f"u{i}", 16), "selection_id": f"u{i}", "worker_id": 1})
        want, bad, stop = rows(node), [], threading.Event()
        tap.same(want, {1: (40, 10), 2: (0, 0)}, "R28: ten bookings on worker 1")

        def sample():
            conn = Conn(node)
            while not stop.wait(0.002):
                loads = json.loads(conn.ask("GET", "/loads")[1])[0]["loads"]
                bad.extend(r for r in loads if r["worker_id"] == 1 and r["active_requests"] != 10)
        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        answers = {node.call("POST", "/workers", one.body(1))[0] for _ in range(100)}
        answers |= {node.call("PATCH", "/workers/1", {"taints": [f"label-{i}"]})[0] for i in range(100)}
        stop.set()
        sampler.join(30 * SLOW)
        tap.ok(answers <= {200, 201}, "R28: 100 upserts and 100 changes of a label", answers)
        tap.same((bad[:3], rows(node), held()), ([], want, {1: 8, 2: 0}), "R28: load and blocks stay as they were")
        fresh = node.call("POST", "/select", {"token_ids": tokens(9, 8)})[1]
        tap.same(fresh.get("worker_id"), 2, "R28: a request without overlap goes to worker 2")
        checked(node, "R28")
        one.close()
        two.close()


def vanished():
    """R29: workers go and come between choice and answer: an error answer leaves no booking."""
    with Node("--httpd-processes", "3", env={**ENV, "DYN_ROUTER_QUEUE_THRESHOLD": "1"}) as node:
        for w in range(1, 5):
            node.call("POST", "/workers", worker(w, max_num_batched_tokens=64))
        stop, answers, late = threading.Event(), {}, []

        def live(number):
            conn, i = Conn(node), 0
            while not stop.is_set():
                i += 1
                sid = f"v{number}-{i}"
                body = {**prompt(sid, 32), "selection_id": sid}
                if number % 2:
                    body["pinned_worker"] = {"worker_id": i % 4 + 1, "dp_rank": 0}
                status, _ = conn.ask("POST", "/select_and_reserve", body)
                answers[status] = answers.get(status, 0) + 1
                freed = conn.ask("DELETE", f"/reservations/{sid}")[0]
                if status != 200 and freed != 404:
                    late.append((sid, status, freed))
        threads = [threading.Thread(target=live, args=(n,), daemon=True) for n in range(8)]
        for t in threads:
            t.start()
        conn, n, end = Conn(node), 0, time.monotonic() + (10 if LONG else 2)
        while time.monotonic() < end:
            w = rnd.randint(1, 4)
            conn.ask("DELETE", f"/workers/{w}")
            conn.ask("POST", "/workers", worker(w, max_num_batched_tokens=64))
            n += 2
            time.sleep(0.005)  # between changes, so that selections meet both states
        stop.set()
        for t in threads:
            t.join(60 * SLOW)
        tap.ok(set(answers) <= {200, 500, 503} and len(answers) > 1, f"R29: {n} changes of workers under {answers}",
               answers)
        tap.same(late[:5], [], "R29: no call that failed left a booking")
        tap.same((total(node), waiting(node)), ([0, 0, 0], 0), "R29: all loads are 0 after the last free, at once")
        checked(node, "R29")


def unmatched():
    """R33: requests that never find what the index holds are told of: one warning, one gauge. Traffic of which a
    twentieth is known is healthy."""
    env = {k: v for k, v in ENV.items() if k != "DYN_ROUTER_USE_KV_EVENTS"}

    def gauge():
        return [line.split()[-1] for line in node.call("GET", "/metrics")[1].splitlines()
                if "partition_unmatched" in line and not line.startswith("#")]

    def told(what):
        return [line for line in node.log_text().splitlines() if what in line]
    with Node("--httpd-processes", "3", env=env) as node:
        engine = Engine(replay=False)
        engine.register(node, 1)
        for i in range(10):
            engine.send(i, stored(1, 1000 * i, 1000 * i + 1000))
        known = {"token_ids": tokens(1, 4)}
        depth = {"token_ids": tokens(1, 10000)}
        wait_for(lambda: node.call("POST", "/overlap_scores", depth)[1]["workers"][0]["device_blocks"] == 10000)
        conns = [Conn(node) for _ in range(6)]
        tap.same(gauge(), ["0"], "R33: 10,000 blocks, no request yet: the gauge is 0")
        for i in range(200):
            conns[i % 6].ask("POST", "/select", {"token_ids": tokens(1000 + i, 4)})
        tap.ok(wait_for(lambda: gauge() == ["1"]), "R33: after 200 requests without overlap it is 1", gauge())
        tap.same(node.call("GET", "/status")[1]["index"]["unmatched_partitions"], 1, "R33: as /status says")
        lines = told("index.unmatched")
        tap.ok(len(lines) == 1 and all(x in lines[0] for x in ("model=default", "zero_hit_share=1.00", "blocks=10000")),
               "R33: one warning names model, share and blocks", lines)
        for i in range(10000 if LONG else 1000):
            body = known if i % 20 == 0 else {"token_ids": tokens(3000 + i, 4)}
            conns[i % 6].ask("POST", "/select", body)
        tap.ok(wait_for(lambda: gauge() == ["0"]), "R33: with hits the gauge is 0 again", gauge())
        tap.same((len(told("index.unmatched")), len(told("index.matched"))), (1, 1),
                 "R33: a hit share of a twentieth brings no warning")
        engine.close()


def main():
    returned_worker()
    flaps()
    upserts()
    vanished()
    unmatched()
    return tap.done()


sys.exit(main())
