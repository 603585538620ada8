#!/usr/bin/env python3
"""The queue over three httpd processes: answered in the order of the policy, a killed process's waiters are
skipped and freed, clients that hang up free their claims, nothing is left at the end."""
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import zlib

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import SLOW, Node, Tap, wait_for, worker

tap = Tap()
ENV = {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_QUEUE_THRESHOLD": "0"}
SEED = int(os.environ.get("KVP_SEED", time.time_ns()))
print(f"# KVP_SEED={SEED}")
rnd = random.Random(SEED)


class Waiter:
    """One select_and_reserve on a connection of its own; the answer is read when it is there."""

    def __init__(self, node, sid, **more):
        body = json.dumps({"model_name": "default", "block_hashes": [len(sid)], "sequence_hashes": [zlib.crc32(sid.encode())],
                           "isl_tokens": 4, "selection_id": sid, **more}).encode()
        self.sid = sid
        self.sock = socket.create_connection(("127.0.0.1", node.port))
        self.sock.sendall(b"POST /select_and_reserve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                          b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def answered(self, seconds=0.0):
        """Status of the answer; 0 for a broken connection, None while there is none."""
        self.sock.settimeout(seconds or 0.001)
        try:
            head = self.sock.recv(65536)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:
            return 0
        return int(head.split()[1]) if head else 0

    def hang_up(self):
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()


def part(node):
    return node.call("GET", "/loads")[1][0]


def waiting(node):
    return part(node)["pending_count"]


def total(node):
    return [sum(r[k] for r in part(node)["loads"]) for k in (
        "potential_prefill_tokens", "potential_decode_blocks", "active_requests")]


def free(node, sid):
    return node.call("DELETE", f"/reservations/{sid}")[0]


def post_all(node, waiters_of):
    """Posts one after the other, each only when the one before waits."""
    out = []
    for n, make in enumerate(waiters_of, 1):
        out.append(make())
        if not wait_for(lambda n=n: waiting(node) == n):
            tap.ok(False, f"request {n} waits", part(node))
    return out


def empty(node, what):
    tap.ok(wait_for(lambda: waiting(node) == 0 and total(node) == [0, 0, 0]), f"{what}: nobody waits, no load",
           part(node))
    code, text = node.ctl("check")
    tap.ok(code == 0, f"{what}: kvpickctl check finds no fault", text)


def order(node):
    """Mixed priorities: strict first, then jump minus arrival, then age. Jumps are far enough apart that the
    time between two posts does not matter."""
    tap.same(node.call("POST", "/select_and_reserve", {"token_ids": [1] * 4, "selection_id": "o"})[0], 200,
             "the rank is taken")
    want, makes = [], []
    for i in range(30):
        strict, jump = rnd.choice([0, 0, 0, 1, 2]), rnd.choice([0, 0, 1000, 2000])
        want.append((-strict, -jump, i))
        makes.append(lambda i=i, s=strict, j=jump: Waiter(node, f"o{i}", strict_priority=s, priority_jump=j))
    waiters = post_all(node, makes)
    got, holder = [], "o"
    for _ in waiters:
        free(node, holder)
        done = wait_for(lambda: [w for w in waiters if w.sid not in got and w.answered() == 200])
        if not done:
            break
        got += [w.sid for w in done]
        holder = done[0].sid
    free(node, holder)
    tap.same(got, [f"o{i}" for _, _, i in sorted(want)], "30 requests are answered in the order of the policy")
    for w in waiters:
        w.sock.close()
    empty(node, "order")


def killed(node):
    """Waiters of a killed process vanish with it, the others are answered, and so is whoever comes back."""
    node.call("POST", "/select_and_reserve", {"token_ids": [1] * 4, "selection_id": "k"})
    waiters = post_all(node, [lambda i=i: Waiter(node, f"k{i}") for i in range(24)])
    victim = node.children()["kvpick-httpd"][0]
    os.kill(victim, signal.SIGKILL)
    lost = wait_for(lambda: [w for w in waiters if w.answered() == 0])
    lost = [w for w in waiters if w in lost or w.answered() == 0]
    left = [w for w in waiters if w not in lost]
    tap.ok(wait_for(lambda: waiting(node) == len(left)), f"{len(lost)} waiters of the killed process are skipped",
           (waiting(node), len(left)))
    tap.ok(all(free(node, w.sid) == 404 for w in lost), "none of them is booked")
    ids = {w.sid for w in lost[:3]}
    again = [Waiter(node, sid) for sid in ids]
    tap.ok(wait_for(lambda: waiting(node) == len(left) + len(again)), "their ids can wait anew")
    free(node, "k")
    open_ = left + again
    good = 0
    while open_:
        done = wait_for(lambda: [w for w in open_ if w.answered() == 200])
        if not done:
            break
        good += len(done)
        for w in done:
            open_.remove(w)
            free(node, w.sid)
    tap.same(good, len(left) + len(again), "all others are answered")
    tap.ok(wait_for(lambda: len(node.children()["kvpick-httpd"]) == 3), "the process is back")
    empty(node, "killed")


def hang_ups(node):
    """Threads that wait and hang up, or get an answer and free it, at random moments."""
    errors, done, unsure = [], [0, 0], []

    def live(seed):
        mine = random.Random(seed)
        for i in range(40):
            sid = f"h{seed}-{i}"
            w = Waiter(node, sid)
            status = w.answered(mine.choice([0.001, 0.002, 0.005, 0.05, 20.0 * SLOW]))
            w.hang_up()
            if status not in (None, 200):
                errors.append((sid, status))
            done[status == 200] += 1
            if status == 200 and node.call("POST", f"/reservations/{sid}/prefill_complete")[0] != 200:
                errors.append((sid, "prefill_complete"))
            if status == 200 and free(node, sid) != 200:
                errors.append((sid, "free"))
            if status is None:
                unsure.append(sid)
    threads = [threading.Thread(target=live, args=(SEED % 1000 + n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120 * SLOW)
    # An answer that crossed the hang-up is a booking, which a client frees, as the API says.
    crossed = []

    def settled():
        crossed.extend(s for s in unsure if free(node, s) == 200)
        return waiting(node) == 0 and total(node) == [0, 0, 0]
    wait_for(settled)
    tap.same(errors, [], f"{done[1]} answered and freed, {done[0]} hung up, {len(crossed)} answers crossed that")
    empty(node, "hang-ups")


def shutdown(node):
    node.call("POST", "/select_and_reserve", {"token_ids": [1] * 4, "selection_id": "s"})
    waiters = post_all(node, [lambda i=i: Waiter(node, f"s{i}") for i in range(6)])
    code = node.stop()
    tap.same([w.answered(5.0) for w in waiters], [503] * 6, "who waits at the end is told 503")
    tap.same(code, 0, "and the node ends with exit code 0")


def main():
    with Node("--httpd-processes", "3", env=ENV) as node:
        node.call("POST", "/workers", worker(1, max_num_batched_tokens=512))
        order(node)
        killed(node)
        hang_ups(node)
        shutdown(node)
    return tap.done()


sys.exit(main())
