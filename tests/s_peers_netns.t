#!/usr/bin/env python3
"""Three nodes in three network namespaces, joined by a bridge: the load is one for all of them; a herd of callers at
all of them spreads; a node is cut off and comes back, loses what it was told meanwhile, or is killed as a whole under
load, and loads agree and drain within the bound. Runs itself again inside namespaces of its own; skipped where that is
not permitted. Nothing leaves the machine: the bridge has no way out."""
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from netns import host, ip, plug, run
from node import SLOW, Node, Tap, wait_for, worker

HTTP, SYNC, NODES, WORKERS = 8092, 9092, 3, 4
EXPIRY_S = 8 if SLOW == 1 else 30
# An old booking ends when it is looked at after its time, and that is as often as the time itself.
BOUND_S = 2 * EXPIRY_S + 2
SEED = int(os.environ.get("KVP_SEED", str(random.randrange(1 << 30))))
tap = Tap()
rnd = random.Random(SEED)


class Replica(Node):
    """A node in a network namespace of its own: n<i>, 10.77.0.<10 + i>."""

    def __init__(self, i):
        self.i, self.host = i, host(i)
        plug(i)
        peers = ",".join(f"tcp://10.77.0.{10 + k}:{SYNC}" for k in range(NODES) if k != i)
        super().__init__("--replica-sync-port", str(SYNC), "--replica-sync-peers", peers, "--httpd-processes", "2",
                         env={"DYN_ROUTER_USE_KV_EVENTS": "false",
                              "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": str(EXPIRY_S)},
                         before=("ip", "netns", "exec", f"n{i}"))
        at = self.args.index("--port")
        self.port = HTTP
        self.args[at + 1] = str(HTTP)
        self.args[self.args.index("--bind") + 1] = "0.0.0.0"

    def start(self):
        super().start()
        for w in range(1, WORKERS + 1):
            self.call("POST", "/workers", worker(w))
        return self

    def cut(self):
        ip("link", "set", f"port{self.i}", "down")

    def heal(self):
        ip("link", "set", f"port{self.i}", "up")

    def kill_all(self):
        """The whole node at once, as if its machine lost power."""
        pids = [self.proc.pid, *(p for role in self.children().values() for p in role)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.proc.wait()

    def loads(self):
        """{worker: (requests, blocks, prefill tokens)}"""
        rows = [r for part in self.call("GET", "/loads")[1] for r in part["loads"]]
        return {r["worker_id"]: (r["active_requests"], r["potential_decode_blocks"],
                                 r["potential_prefill_tokens"]) for r in rows}

    def listened(self):
        """Connections of subscribers to this node's publisher, and its own to theirs."""
        text = subprocess.run(["ip", "netns", "exec", f"n{self.i}", "cat", "/proc/net/tcp", "/proc/net/tcp6"],
                              check=True, capture_output=True, text=True).stdout
        rows = [line.split() for line in text.splitlines()]
        port = f":{SYNC:04X}"
        return sum(r[3] == "01" and (r[1].endswith(port) or r[2].endswith(port)) for r in rows)


class Caller:
    """A keep-alive connection to a node."""

    def __init__(self, node):
        self.http = http.client.HTTPConnection(node.host, HTTP, timeout=20 * SLOW)

    def ask(self, method, path, body=None):
        self.http.request(method, path, json.dumps(body) if body else None,
                          {"Content-Type": "application/json"} if body else {})
        reply = self.http.getresponse()
        return reply.status, json.loads(reply.read() or b"null")

    def book(self, name):
        """The worker, or None. 16 tokens that no other prompt begins with."""
        status, body = self.ask("POST", "/select_and_reserve", {"selection_id": name, "token_ids": [
            rnd.randrange(1 << 31) for _ in range(16)]})
        return body["worker_id"] if status == 200 else None

    def free(self, name):
        return self.ask("DELETE", f"/reservations/{name}")[0]


def agree(nodes, requests, seconds=5.0):
    """Waits until all nodes show the same loads with so many requests; seconds it took, or None."""
    start = time.monotonic()

    def same():
        seen = [n.loads() for n in nodes]
        return all(s == seen[0] for s in seen) and sum(r for r, _, _ in seen[0].values()) == requests
    return (round(time.monotonic() - start, 3) or 0.001) if wait_for(same, seconds) else None


def shown(nodes):
    return "\n".join(f"n{n.i}: {n.loads()}" for n in nodes)


def one_load(nodes):
    """R11: prompts at all nodes in turns; every node sees the load of all."""
    callers, count = [Caller(n) for n in nodes], {}
    for i in range(300):
        w = callers[i % NODES].book(f"r{i}")
        count[w] = count.get(w, 0) + 1
        agree(nodes, i + 1)
    tap.ok(sorted(count) == [1, 2, 3, 4] and all(65 <= c <= 85 for c in count.values()),
           "R11: 300 prompts at 3 nodes in turns: 75 +- 10 for each of 4 workers", count)
    took = agree(nodes, 300)
    tap.ok(took, f"R11: every node shows the load of all, with no booking twice ({took} s)", shown(nodes))
    for i in range(300):  # at another node than where it was booked
        if i % 2:
            callers[(i + 1) % NODES].ask("POST", f"/reservations/r{i}/prefill_complete")
    tap.ok(agree(nodes, 300) and all(sum(p for _, _, p in n.loads().values()) == 150 * 16 for n in nodes),
           "prefill-done of another node's booking takes its tokens off everywhere", shown(nodes))
    codes = {callers[(i + 1) % NODES].free(f"r{i}") for i in range(300)}
    took = agree(nodes, 0)
    tap.ok(codes == {200} and took, f"its end, too: no load at any node ({took} s)", f"{codes}\n{shown(nodes)}")


def herd(nodes):
    """64 callers at each node, all at the same moment."""
    gate, lock, count, callers = threading.Barrier(64 * NODES), threading.Lock(), {}, []

    def one(i):
        caller = Caller(nodes[i % NODES])
        caller.ask("GET", "/health")
        gate.wait()
        w = caller.book(f"h{i}")
        with lock:
            count[w] = count.get(w, 0) + 1
            callers.append(caller)
    threads = [threading.Thread(target=one, args=(i,)) for i in range(64 * NODES)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    tap.ok(sorted(count, key=str) == [1, 2, 3, 4] and all(36 <= c <= 60 for c in count.values()),
           "a herd of 3 x 64 callers spreads: 48 +- 12 for each of 4 workers", count)
    took = agree(nodes, 64 * NODES)
    tap.ok(took, f"and every node knows all of it ({took} s)", shown(nodes))
    codes = [callers[0].free(f"h{i}") for i in range(64 * NODES)]
    took = agree(nodes, 0)
    tap.ok(set(codes) == {200} and took, f"one node frees all: no load at any node ({took} s)", shown(nodes))


def cut_off(nodes):
    """A node without its link for a moment: nothing is lost, only late."""
    a, b, c = [Caller(n) for n in nodes]
    good = [x.book(f"c{k}{i}") for k, x in enumerate((a, b, c)) for i in range(4)]
    tap.ok(all(good) and agree(nodes, 12), "12 bookings are known everywhere", shown(nodes))
    nodes[2].cut()
    inside = subprocess.run(["ip", "netns", "exec", "n2", sys.executable, __file__, "--inside"], check=True,
                            capture_output=True, text=True)
    good = [a.book(f"d{i}") for i in range(6)] + [b.free(f"c0{i}") == 200 for i in range(4)]
    tap.ok(all(good) and inside.stdout.split() == ["200"] * 9, "a node is cut off: all go on, each by itself",
           f"{good} {inside.stdout}")
    tap.ok(agree(nodes[:2], 14), "the two others agree", shown(nodes[:2]))
    time.sleep(1)  # a link that is away for longer than TCP's first tries
    nodes[2].heal()
    took = agree(nodes, 12 + 6 - 4 + 6 - 2, 10)
    tap.ok(took, f"the link is back: all agree ({took} s)", shown(nodes))
    codes = [a.free(f"c{k}{i}") for k in (1, 2) for i in range(2, 4)] + [a.free(f"d{i}") for i in range(6)]
    codes += [a.free(f"c{k}{i}") for k, i in ((1, 0), (1, 1))] + [a.free(f"e{i}") for i in range(6)]
    took = agree(nodes, 0)
    tap.ok(set(codes) == {200} and took, f"one of them frees all: no load at any node ({took} s)",
           f"{codes}\n{shown(nodes)}")


def at_cut_node():
    """What happens at the node that is cut off; runs in its namespace."""
    node = type("Local", (), {"host": "127.0.0.1"})
    caller = Caller(node)
    print(caller.ask("GET", "/health")[0], *(200 if caller.book(f"e{i}") else 0 for i in range(6)),
          *(caller.free(f"c2{i}") for i in range(2)))


def losses(nodes):
    """A node is cut off and its peer process killed: what it was told meanwhile, and what it told, is lost. Then another
    node is killed as a whole while callers are at work. Nothing that is lost counts longer than the bound."""
    a, b = Caller(nodes[0]), Caller(nodes[1])
    good = [a.book(f"l{i}") for i in range(12)]
    tap.ok(all(good) and agree(nodes, 12), "12 bookings are known everywhere", shown(nodes))
    nodes[2].cut()
    os.kill(nodes[2].children()["kvpick-peer"][0], signal.SIGKILL)
    good = [a.free(f"l{i}") == 200 for i in range(12)] + [b.book(f"m{i}") for i in range(6)]
    tap.ok(all(good) and agree(nodes[:2], 6), "6 more elsewhere, the 12 end there", shown(nodes[:2]))
    nodes[2].heal()
    tap.ok(wait_for(lambda: nodes[2].children().get("kvpick-peer")), "the peer process comes back")
    seen = sum(r for r, _, _ in nodes[2].loads().values())
    tap.ok(seen >= 12, f"where they were not told: {seen} requests at the node that was cut off", shown(nodes))
    tap.ok(wait_for(lambda: nodes[2].listened() == 4, 15), "it is connected again", nodes[2].listened())
    stop, wrong, done = threading.Event(), [], []

    def live(i):
        at, caller, n = nodes[(0, 1)[i % 2]], None, 0
        while not stop.is_set():
            try:
                caller = caller or Caller(at)
                name = f"w{i}.{n}"
                n += 1
                if caller.book(name) and n % 5 and caller.free(name) != 200:
                    wrong.append(name)
                done.append(at)
            except (OSError, http.client.HTTPException):
                caller = None
                if at is nodes[0]:
                    wrong.append("refused")
                time.sleep(0.01)
    threads = [threading.Thread(target=live, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    wait_for(lambda: done.count(nodes[0]) > 200 and done.count(nodes[1]) > 200)
    nodes[1].kill_all()
    seen = len(done)
    wait_for(lambda: len(done) > seen + 200)
    stop.set()
    for t in threads:
        t.join()
    left = [sum(r for r, _, _ in n.loads().values()) for n in (nodes[0], nodes[2])]
    tap.ok(not wrong and min(left) > 0, f"a node is killed under load; {left} requests are left at the others", wrong)
    took = agree([nodes[0], nodes[2]], 0, BOUND_S)
    tap.ok(took, f"they drain within {BOUND_S} s ({took} s)", shown([nodes[0], nodes[2]]))


def comes_back(nodes):
    """The killed node starts anew, and has part in the load again."""
    nodes[1].start()
    tap.ok(wait_for(lambda: all(n.listened() == 4 for n in nodes), 15), "the killed node is back and connected",
           [n.listened() for n in nodes])
    callers = [Caller(n) for n in nodes]
    good = [c.book(f"z{k}") for k, c in enumerate(callers)]
    took = agree(nodes, 3)
    tap.ok(all(good) and took, f"bookings at all nodes are known at all of them ({took} s)", shown(nodes))
    codes = [callers[(k + 1) % 3].free(f"z{k}") for k in range(3)]
    tap.ok(codes == [200] * 3 and agree(nodes, 0), "and end everywhere", shown(nodes))
    for n in nodes:
        code, text = n.ctl("check")
        tap.ok(code == 0, f"n{n.i}: kvpickctl check finds no fault", text)


def inside():
    print(f"# KVP_SEED={SEED}")
    nodes = [Replica(i) for i in range(NODES)]
    try:
        for n in nodes:
            n.start()
        tap.ok(wait_for(lambda: all(n.listened() == 4 for n in nodes), 15), "three nodes are connected to each other",
               [n.listened() for n in nodes])
        for step in (one_load, herd, cut_off, losses, comes_back):
            step(nodes)
    finally:
        for n in nodes:
            if n.proc:
                n.stop()
            if tap.failed:
                print("# " + n.log_text()[-3000:].replace("\n", "\n# "))
            n.log.close()
            n.dir.cleanup()
    return tap.done()


if "--inside" in sys.argv:
    at_cut_node()
    sys.exit(0)
run(inside)
