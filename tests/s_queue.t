#!/usr/bin/env python3
"""The queue over three httpd processes: answered in the order of each policy, nobody polls, a killed process's waiters
are skipped and freed, clients that hang up free their claims, nothing is left at the end."""
import os
import random
import signal
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import SLOW, Node, Tap, wait_for, worker
from waiter import SEED, Waiter, free, part, seeded, total, waiting

tap = Tap()
# Without credit no booking makes the next one of the same prompt lighter.
ENV = {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_QUEUE_THRESHOLD": "0",
       "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0"}
rnd = seeded()


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


def key(policy, i, strict, jump, isl):
    """What sorts before goes first: the formulas of the policies, with the post's number for its time (jumps are
    so far apart that the time between two posts does not matter)."""
    score = (1 + jump) / isl if policy == "wspt" else jump + i / 1000 if policy == "lcfs" else jump - i / 1000
    return (-strict, -score, i)


def order(node, policy):
    tap.same(node.call("POST", "/select_and_reserve", {"token_ids": [1] * 4, "selection_id": "o"})[0], 200,
             f"{policy}: the rank is taken")
    want, makes = [], []
    for i in range(30):
        strict, jump = rnd.choice([0, 0, 0, 1, 2]), rnd.choice([0, 0, 1000, 2000])
        isl = 4 * rnd.randint(1, 40)
        want.append(key(policy, i, strict, jump, isl))
        makes.append(lambda i=i, n=isl, s=strict, j=jump: Waiter(
            node, f"o{i}", n, strict_priority=s, priority_jump=j))
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
    tap.same(got, [f"o{k[2]}" for k in sorted(want)], f"{policy}: 30 requests are answered in the order of the policy")
    for w in waiters:
        w.close()
    empty(node, policy)


def ran_ns(pids):
    """Processor time of processes, exactly."""
    out = 0
    for pid in pids:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as f:
            out += int(f.read().split()[0])
    return out


def idle(node):
    """Whoever waits sleeps. The second is the span that is measured; nothing depends on its length."""
    node.call("POST", "/select_and_reserve", {"token_ids": [1] * 4, "selection_id": "i"})
    waiters = post_all(node, [lambda i=i: Waiter(node, f"i{i}") for i in range(24)])
    pids = node.children()["kvpick-httpd"]
    before = ran_ns(pids)
    threading.Event().wait(1.0)
    ms = (ran_ns(pids) - before) / 1e6
    tap.ok(ms < 100 * SLOW, f"three processes with 24 waiting requests: {ms:.2f} ms of processor in a second", ms)
    for w in waiters:
        w.close()
    free(node, "i")
    empty(node, "idle")


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
    """Threads that wait and hang up, or get an answer and free it, at random moments. An answer may be sent in the
    instant of a hang-up, so who hung up frees the id, as the README says; one that comes later is undone by the
    server. Anything left would stop all others: there is one rank."""
    errors, done = [], [0, 0, 0]

    def live(seed):
        mine = random.Random(seed)
        for i in range(40):
            sid = f"h{seed}-{i}"
            w = Waiter(node, sid)
            status = w.answered(mine.choice([0.001, 0.002, 0.005, 0.05, 20.0 * SLOW]))
            mine.choice([w.reset, w.close])()
            if status not in (None, 200):
                errors.append((sid, status))
            done[status == 200] += 1
            if status == 200 and node.call("POST", f"/reservations/{sid}/prefill_complete")[0] != 200:
                errors.append((sid, "prefill_complete"))
            freed = free(node, sid)
            if status == 200 and freed != 200:
                errors.append((sid, "free"))
            done[2] += status is None and freed == 200
    threads = [threading.Thread(target=live, args=(SEED % 1000 + n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120 * SLOW)
    tap.same(errors, [], f"{done[1]} answered and freed, {done[0]} hung up, {done[2]} answers crossed that")
    empty(node, "hang-ups")


def shutdown(node):
    node.call("POST", "/select_and_reserve", {"token_ids": [1] * 4, "selection_id": "s"})
    waiters = post_all(node, [lambda i=i: Waiter(node, f"s{i}") for i in range(6)])
    code = node.stop()
    tap.same([w.answered(5.0) for w in waiters], [503] * 6, "who waits at the end is told 503")
    tap.same(code, 0, "and the node ends with exit code 0")


def main():
    for policy in ("fcfs", "lcfs", "wspt"):
        with Node("--httpd-processes", "3", env={**ENV, "DYN_ROUTER_QUEUE_POLICY": policy}) as node:
            node.call("POST", "/workers", worker(1, max_num_batched_tokens=512))
            order(node, policy)
            if policy == "fcfs":
                idle(node)
                killed(node)
                hang_ups(node)
                shutdown(node)
    return tap.done()


sys.exit(main())
