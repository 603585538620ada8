#!/usr/bin/env python3
"""Three httpd processes, 64 callers, more load than the workers take: a rank is given requests only up to its
admission threshold; what processes that decide at the same moment may add is one request each. Half of the callers ask
for one certain rank. Loads, read all the while, never pass that bound, and drain to zero."""
import http.client
import json
import os
import random
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import SLOW, Node, Tap, wait_for, worker
from waiter import LONG, SEED, part, prompt, seeded, total, waiting

tap = Tap()
rnd = seeded()
PROCESSES, CALLERS, WORKERS, RANKS = 3, 64, 3, 2
BATCH, THRESHOLD, ISL_MAX = 256, 0.25, 64
ROUNDS = 300 if LONG else 15


class Caller(threading.Thread):
    """Books, holds for a moment, gives the prefill back, frees. Odd ones pin the rank."""

    def __init__(self, node, number):
        super().__init__(daemon=True)
        self.conn = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60 * SLOW)
        self.rnd, self.number, self.done, self.errors, self.waited_s = random.Random(SEED + number), number, 0, [], 0

    def ask(self, method, path, body=None):
        self.conn.request(method, path, json.dumps(body) if body else None,
                          {"Content-Type": "application/json"} if body else {})
        reply = self.conn.getresponse()
        return reply.status, reply.read()

    def run(self):
        for i in range(ROUNDS):
            sid = f"a{self.number}-{i}"
            body = {**prompt(sid, 4 * self.rnd.randint(1, ISL_MAX // 4)), "selection_id": sid}
            if self.number % 2:
                body["pinned_worker"] = {"worker_id": self.rnd.randint(1, WORKERS), "dp_rank": self.rnd.randrange(RANKS)}
            start = time.monotonic()
            status, text = self.ask("POST", "/select_and_reserve", body)
            self.waited_s += time.monotonic() - start
            if status != 200:
                self.errors.append((sid, status, text))
                continue
            time.sleep(self.rnd.random() * 0.01)  # holds it: load, not a wait for anything
            if self.rnd.random() < 0.5 and self.ask("POST", f"/reservations/{sid}/prefill_complete")[0] != 200:
                self.errors.append((sid, "prefill_complete"))
            if self.ask("DELETE", f"/reservations/{sid}")[0] != 200:
                self.errors.append((sid, "free"))
            self.done += 1


def watch(node, stop, seen):
    conn = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60 * SLOW)
    while not stop.is_set():
        conn.request("GET", "/loads")
        now = json.loads(conn.getresponse().read())[0]
        seen["samples"] += 1
        seen["waiting"] = max(seen["waiting"], now["pending_count"])
        for r in now["loads"]:
            seen["tokens"] = max(seen["tokens"], r["potential_prefill_tokens"])
            seen["negative"] |= min(r["potential_prefill_tokens"], r["potential_decode_blocks"],
                                    r["active_requests"]) < 0


def main():
    env = {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_QUEUE_THRESHOLD": str(THRESHOLD)}
    with Node("--httpd-processes", str(PROCESSES), env=env) as node:
        for w in range(1, WORKERS + 1):
            node.call("POST", "/workers", worker(w, max_num_batched_tokens=BATCH, data_parallel_size=RANKS))
        tap.ok(wait_for(lambda: len(part(node)["loads"]) == WORKERS * RANKS), "six ranks", part(node))
        stop, seen = threading.Event(), {"samples": 0, "waiting": 0, "tokens": 0, "negative": False}
        watcher = threading.Thread(target=watch, args=(node, stop, seen), daemon=True)
        watcher.start()
        callers = [Caller(node, n) for n in range(CALLERS)]
        start = time.monotonic()
        for c in callers:
            c.start()
        for c in callers:
            c.join(300 * SLOW)
        took = time.monotonic() - start
        stop.set()
        watcher.join(30 * SLOW)
        done = sum(c.done for c in callers)
        tap.same([e for c in callers for e in c.errors][:5], [], f"{done} requests of {CALLERS} callers are served")
        print(f"# {took:.1f} s, {seen['samples']} looks at the loads, at most {seen['waiting']} waiting, "
              f"{sum(c.waited_s for c in callers) / max(done, 1) * 1000:.1f} ms until an answer on average")
        full, most = BATCH * THRESHOLD, seen["tokens"]
        tap.ok(full < most <= full + PROCESSES * ISL_MAX,
               f"no rank above {full:.0f} tokens and one request of {ISL_MAX} a process: at most {most}", most)
        tap.ok(seen["waiting"] > 0 and not seen["negative"], "requests had to wait; no load was ever negative", seen)
        tap.ok(wait_for(lambda: waiting(node) == 0 and total(node) == [0, 0, 0]), "loads drain to zero", part(node))
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)
    return tap.done()


sys.exit(main())
