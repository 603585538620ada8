#!/usr/bin/env python3
"""Indexer, HTTP servers and clients are killed at random instants, over and over, while engines publish KV events
(some of them lost on the way) and clients book. In the end nothing may be left of the bookings, kvpickctl check
must find nothing, and the overlap of every prompt must be what a naive model of the events says.

KVP_SEED replays the choices. 100 kills, or as many as come in 25 seconds; KVP_KILLS: so many, in 600 seconds at
most; KVP_TORTURE_S: so many seconds at most, and 1000 kills."""
import os
import random
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import CLEAR, Engine, pack, stored, tokens
from node import SLOW, Node, Tap, call, wait_for

ENGINES, CLIENTS, IDS, FAMILIES, BLOCKS = 3, 3, 4, 6, 40


def removed(family, blocks):
    return pack([1.0, [{"type": "BlockRemoved", "block_hashes": [family * 1000 + i + 1 for i in blocks],
                        "medium": "GPU"}], None])


class Publisher(threading.Thread):
    """One engine and the model of it: the blocks that it holds of every family."""

    def __init__(self, engine, seed):
        super().__init__(daemon=True)
        self.engine, self.random, self.stop, self.seq, self.lost = engine, random.Random(seed), False, 0, 0
        self.held = {f: set() for f in range(1, FAMILIES + 1)}

    def depth(self, family):
        n = 0
        while n in self.held[family]:
            n += 1
        return n

    def send(self, payload, verb="pub"):
        self.engine.send(self.seq, payload, verb)
        self.seq += 1
        self.lost += verb == "keep"

    def grow(self, family, verb):
        start = self.depth(family)
        end = min(BLOCKS, start + self.random.randint(1, 12))
        if start < end:
            self.held[family] |= set(range(start, end))
            self.send(stored(family, start, end), verb)

    def turn(self):
        family = self.random.randint(1, FAMILIES)
        verb = "keep" if self.random.random() < 0.03 else "pub"
        what = self.random.random()
        if what < 0.6:
            self.grow(family, verb)
        elif what < 0.99 and self.held[family]:
            held = sorted(self.held[family])
            gone = self.random.sample(held, self.random.randint(1, min(len(held), 6)))
            self.held[family] -= set(gone)
            self.send(removed(family, gone), verb)
        elif what >= 0.99:
            for blocks in self.held.values():
                blocks.clear()
            self.send(CLEAR, verb)

    def run(self):
        while not self.stop:
            self.turn()
            time.sleep(0.004)

    def close(self):
        """The last batch shows the indexer whatever it has missed."""
        self.stop = True
        self.join()
        self.held[1].clear()
        self.send(removed(1, range(BLOCKS)))


def client(port, number, seed):
    """Books, reports and frees for ever; ids are few, so that what a killed client left is met again."""
    chance = random.Random(seed)

    def ask(*args):
        try:
            return call(port, *args, timeout=5)[0]
        except (OSError, ValueError):
            return None

    while True:
        sid = f"c{number}-{chance.randrange(IDS)}"
        family = chance.randint(1, FAMILIES)
        status = ask("POST", "/select_and_reserve",
                     {"selection_id": sid, "token_ids": tokens(family, chance.randint(1, BLOCKS))})
        if status == 200:
            ask("POST", f"/reservations/{sid}/prefill_complete")
            ask("POST", f"/reservations/{sid}/output_block", {"decay_fraction": 0.5})
        if status not in (200, 409, 503, None):
            print(f"{sid}: {status}", flush=True)
        if chance.random() < 0.8:
            ask("DELETE", f"/reservations/{sid}")


class Client:
    def __init__(self, node, number, seed):
        self.node, self.number, self.seed, self.odd = node, number, seed, []
        self.start()

    def start(self):
        self.seed += CLIENTS
        args = ["--client", self.node.port, self.number, self.seed]
        self.proc = subprocess.Popen([sys.executable, __file__, *map(str, args)], stdout=subprocess.PIPE, text=True)

    def kill(self):
        self.proc.kill()
        self.odd += self.proc.communicate()[0].splitlines()


def free_all(node):
    """Frees every id that clients use; what is not there is fine."""
    for number in range(CLIENTS):
        for i in range(IDS):
            wait_for(lambda sid=f"c{number}-{i}": quiet(node, "DELETE", f"/reservations/{sid}") in (200, 404))


def quiet(node, *args):
    try:
        return node.call(*args, timeout=5)[0]
    except OSError:
        return None


def total_load(node):
    rows = [r for part in node.call("GET", "/loads")[1] for r in part["loads"]]
    return [sum(r[k] for r in rows) for k in ("potential_prefill_tokens", "potential_decode_blocks",
                                              "active_requests")]


def depths(node):
    """{family: {worker: device blocks}}"""
    out = {}
    for family in range(1, FAMILIES + 1):
        scores = node.call("POST", "/overlap_scores", {"token_ids": tokens(family, BLOCKS)})[1]
        out[family] = {w["worker_id"]: w["device_blocks"] for w in scores["workers"]}
    return out


def rampage(node, clients, chance, seconds, most):
    """Kills one process after the other: {role: kills}."""
    end = time.monotonic() + seconds
    kills = {"kvpick-indexer": 0, "kvpick-httpd": 0, "client": 0}
    while sum(kills.values()) < most and time.monotonic() < end:
        role = chance.choices(list(kills), (3, 4, 3))[0]
        if role == "client":
            victim = chance.choice(clients)
            victim.kill()
            victim.start()
        else:
            pids = node.children().get(role, [])
            if not pids:
                time.sleep(0.01)
                continue
            try:
                os.kill(chance.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                continue
        kills[role] += 1
        time.sleep(chance.random() ** 2 * 0.3)  # until some moment
    return kills


def main():
    seed = int(os.environ.get("KVP_SEED") or time.time_ns() % 1000000)
    asked_s, asked_kills = os.environ.get("KVP_TORTURE_S"), os.environ.get("KVP_KILLS")
    seconds = float(asked_s or (600 if asked_kills else 25))
    most = int(asked_kills or (1000 if asked_s else 100))
    print(f"# KVP_SEED={seed}")
    tap, chance = Tap(), random.Random(seed)
    with Node("--httpd-processes", "2", "--restart-backoff-max-ms", "100") as node:
        publishers = [Publisher(Engine(), seed * 10 + i) for i in range(ENGINES)]
        for i, p in enumerate(publishers):
            p.engine.register(node, i + 1)
            p.start()
        clients = [Client(node, n, seed + n) for n in range(CLIENTS)]
        kills = rampage(node, clients, chance, seconds, most)
        for p in publishers:
            p.stop = True
        for c in clients:
            c.kill()
        print(f"# kills {sum(kills.values())}: {kills}; {sum(p.seq for p in publishers)} batches, "
              f"{sum(p.lost for p in publishers)} lost on the way")
        tap.ok(all(kills.values()), "processes of every kind were killed", kills)
        tap.ok(wait_for(lambda: {r: len(p) for r, p in node.children().items() if r in kills} ==
                        {"kvpick-indexer": 1, "kvpick-httpd": 2} and node.healthy(), 20), "all are back",
               node.children())
        tap.same([line for c in clients for line in c.odd], [], "no client saw an answer that it should not")
        for p in publishers:
            p.close()
        want = {f: {i + 1: p.depth(f) for i, p in enumerate(publishers)} for f in range(1, FAMILIES + 1)}
        wait_for(lambda: depths(node) == want, 20)
        tap.same(depths(node), want, "the overlap of every prompt is that of the model")
        free_all(node)
        tap.ok(wait_for(lambda: total_load(node) == [0, 0, 0]), "no load is left", total_load(node))
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds no fault", text)
        for p in publishers:
            p.engine.close()
    return tap.done()


if sys.argv[1:2] == ["--client"]:
    client(*map(int, sys.argv[2:5]))
sys.exit(main())
