#!/usr/bin/env python3
"""Bookings that feed the index, over real nodes: approximate mode (ages, limits, long prompts, ranks that go, an
indexer that is killed or stands still) and predictions beside KV events."""
import http.client
import os
import random
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import CLEAR, Engine, becomes, depth, pack, stored, tokens
from node import SLOW, Node, Tap, wait_for, worker

tap = Tap()
SEED = int(os.environ.get("KVP_SEED", time.time_ns()))
print(f"# KVP_SEED={SEED}")
OFF = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
LONG = 10000  # blocks: more than one command holds


def reserve(node, first, blocks, worker_id, rank=0, **extra):
    """An explicit booking; its id, or None when refused."""
    reserve.made += 1
    body = dict(selection_id=f"r{reserve.made}", worker_id=worker_id, dp_rank=rank,
                token_ids=tokens(first, blocks), **extra)
    return body["selection_id"] if node.call("POST", "/reservations", body)[0] == 201 else None


reserve.made = 0


def register(node, *bodies):
    for body in bodies:
        status, record = node.call("POST", "/workers", body)
        if status != 201 or record["lifecycle"] != "schedulable":
            raise RuntimeError(f"{status} {record}")


def checked(node):
    code, text = node.ctl("check")
    tap.ok(code == 0, "no faults in the region", text)


def forms_and_ages():
    ttl = 3.0 * SLOW
    with Node(env=dict(OFF, DYN_ROUTER_TTL_SECS=str(ttl), KVPICK_HTTPD_PROCESSES="3")) as node:
        register(node, worker(1), worker(2))
        asked = time.monotonic()
        node.call("POST", "/select_and_reserve", {"token_ids": tokens(1, 6), "pinned_worker": {
            "worker_id": 2, "dp_rank": 0}})
        becomes(tap, node, 1, 8, {(1, 0): 0, (2, 0): 6}, "select_and_reserve: its blocks count at the booked worker")
        reserve(node, 2, 5, 1)
        becomes(tap, node, 2, 5, {(1, 0): 5, (2, 0): 0}, "explicit booking: likewise")
        hashes = {"block_hashes": [71, 72, 73], "sequence_hashes": [1, 2, 3], "isl_tokens": 12}
        node.call("POST", "/reservations", {"selection_id": "h", "worker_id": 1, **hashes})

        def by_hash():
            rows = node.call("POST", "/overlap_scores", hashes)[1]["workers"]
            return [w["device_blocks"] for w in rows]
        tap.ok(wait_for(lambda: by_hash() == [3, 0]), "with block hashes: likewise", by_hash())
        node.call("POST", "/reservations", {"selection_id": "n", "worker_id": 1, "isl_tokens": 4,
                                            "sequence_hashes": [9]})
        status, answer = node.call("POST", "/reservations", {"selection_id": "x", "worker_id": 1, "isl_tokens": 4,
                                                             "block_hashes": [7], "sequence_hashes": [9, 10]})
        tap.ok(status == 400 and "block_hashes length 1" in answer["error"], "lists of two lengths are refused",
               answer)
        node.call("POST", "/select", {"token_ids": tokens(3, 4), "selection_id": "s"})
        node.call("POST", "/reservations", {"selection_id": "s"})
        tap.ok(wait_for(lambda: sorted(depth(node, 3, 4).values()) == [0, 4]), "replay of a selection: likewise")
        got = wait_for(lambda: depth(node, 1, 6) == {(1, 0): 0, (2, 0): 0})
        took = time.monotonic() - asked
        tap.ok(got and took >= ttl, "blocks end by age, not before", f"{got} {took}")
        tap.ok(wait_for(lambda: node.counted("indexer_routed_blocks") == 0), "all of them")
        tap.same(node.counted("indexer_routed_expired"), 18, "which is counted")
        checked(node)


def tells_nothing():
    with Node(env=dict(OFF, DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT="0")) as node:
        register(node, worker(1))
        reserve(node, 1, 4, 1)
        tap.same(node.counted("any_select_routed"), 0, "with a credit of 0 no booking is told")


def long_prompts(node):
    reserve(node, 1, LONG, 1)
    becomes(tap, node, 1, LONG, {(1, 0): LONG, (2, 0): 0}, f"a prompt of {LONG} blocks goes in pieces and is whole")
    for n in range(12):
        reserve(node, 20 + n % 3, LONG + 100 + n, 1 + n % 2)
    got = wait_for(lambda: depth(node, 20, LONG + 109) == {(1, 0): LONG + 106, (2, 0): LONG + 109})
    tap.ok(got, "pieces of several processes are not mixed", depth(node, 20, LONG + 109))
    tap.same(node.counted("indexer_routed_malformed"), 0, "none was lost")


def ranks_go(node):
    register(node, worker(5, model_name="g", data_parallel_size=2))
    reserve(node, 1, 5, 5, 0, model_name="g")
    reserve(node, 2, 5, 5, 1, model_name="g")
    becomes(tap, node, 2, 5, {(5, 0): 0, (5, 1): 5}, "each rank has its own blocks", model_name="g")
    node.call("PATCH", "/workers/5", {"data_parallel_size": 1})
    node.call("PATCH", "/workers/5", {"data_parallel_size": 2})
    becomes(tap, node, 2, 5, {(5, 0): 0, (5, 1): 0}, "a rank lost by PATCH loses them", model_name="g")
    becomes(tap, node, 1, 5, {(5, 0): 5, (5, 1): 0}, "the other one keeps them", model_name="g")
    node.call("PATCH", "/workers/5", {"kv_events_endpoint": "tcp://127.0.0.1:9"})
    tap.same(depth(node, 1, 5, model_name="g"), {(5, 0): 5, (5, 1): 0}, "another event endpoint changes nothing")
    register(node, worker(5, model_name="h", data_parallel_size=2))
    becomes(tap, node, 1, 5, {(5, 0): 0, (5, 1): 0}, "a worker that moves begins anew", model_name="h")
    node.call("DELETE", "/workers/5")


def killed(node):
    register(node, worker(2))  # the gauge is renewed with it
    reserve(node, 3, 40, 1)
    becomes(tap, node, 3, 40, {(1, 0): 40, (2, 0): 0}, "forty blocks")
    before = node.counted("indexer_routed_blocks")
    os.kill(node.children()["kvpick-indexer"][0], signal.SIGKILL)
    wait_for(lambda: "kvpick-indexer" in node.children())
    reserve(node, 4, 7, 2)
    becomes(tap, node, 4, 7, {(1, 0): 0, (2, 0): 7}, "an indexer was killed: its successor learns on")
    tap.same(depth(node, 3, 40), {(1, 0): 40, (2, 0): 0}, "and has what was there")
    tap.ok(wait_for(lambda: node.counted("indexer_routed_blocks") == before + 47), "with an entry for each block",
           f"{node.counted('indexer_routed_blocks')} {before}")


def stands_still(node):
    pid = node.children()["kvpick-indexer"][0]
    told = node.counted("any_select_routed"), node.counted("any_select_routed_full")
    os.kill(pid, signal.SIGSTOP)
    made = sum(reserve(node, 100 + i, 3, 1) is not None for i in range(250))
    now = node.counted("any_select_routed"), node.counted("any_select_routed_full")
    os.kill(pid, signal.SIGCONT)
    tap.same(made, 250, "no booking waits for an indexer that stands still")
    tap.same(now[0] - told[0] + now[1] - told[1], 250, "each was told or counted as not told")
    tap.ok(now[1] > told[1], "there was no room for all")
    becomes(tap, node, 100, 3, {(1, 0): 3, (2, 0): 0}, "what was told is there afterwards")
    register(node, worker(9, model_name="other"))


def approximate():
    with Node(env=dict(OFF, KVPICK_HTTPD_PROCESSES="3")) as node:
        register(node, worker(1), worker(2))
        long_prompts(node)
        ranks_go(node)
        killed(node)
        stands_still(node)
        checked(node)


def killed_often():
    """Everything learned has an age, whoever was killed when: at the end nothing is left."""
    with Node(env=dict(OFF, DYN_ROUTER_TTL_SECS="1", KVPICK_HTTPD_PROCESSES="2")) as node:
        register(node, worker(1), worker(2))
        stop = threading.Event()

        def book(n):
            rnd = random.Random(f"{SEED}/{n}")
            while not stop.is_set():
                first, blocks = rnd.randrange(20), rnd.randrange(1, 60)
                try:
                    answer = node.call("POST", "/select_and_reserve", {"token_ids": tokens(first, blocks)}, timeout=2)
                    node.call("DELETE", f"/reservations/{answer[1]['selection_id']}", timeout=2)
                except (OSError, http.client.HTTPException):
                    pass  # its process was killed
        threads = [threading.Thread(target=book, args=(n,)) for n in range(3)]
        for t in threads:
            t.start()
        rnd, kills = random.Random(SEED), 0
        for _ in range(12):
            name = rnd.choice(["kvpick-indexer", "kvpick-httpd"])
            pids = wait_for(lambda name=name: node.children().get(name))
            time.sleep(rnd.random() / 10)  # killed at some moment
            try:
                os.kill(rnd.choice(pids), signal.SIGKILL)
                kills += 1
            except OSError:
                pass  # killed before
        stop.set()
        for t in threads:
            t.join()
        tap.ok(kills > 5, f"{kills} kills while bookings come in")
        tap.ok(wait_for(lambda: len(node.children().get("kvpick-httpd", [])) == 2 and
                        len(node.children().get("kvpick-indexer", [])) == 1), "all processes are back")
        wait_for(lambda: all(node.healthy() for _ in range(10)))
        # a booking that meets a process which is only coming back may teach nothing; the next one does
        tap.ok(wait_for(lambda: reserve(node, 50, 5, 1) and
                        wait_for(lambda: depth(node, 50, 5) == {(1, 0): 5, (2, 0): 0}, 0.5)), "it still learns",
               depth(node, 50, 5))
        tap.ok(wait_for(lambda: all(not any(depth(node, f, 60).values()) for f in range(20))),
               "and nothing outlives its age")
        tap.ok(wait_for(lambda: node.counted("indexer_routed_blocks") == 0), "no entry is left",
               node.counted("indexer_routed_blocks"))
        checked(node)


def least_recently():
    with Node(env=dict(OFF, DYN_ROUTER_APPROXIMATE_CACHE_POLICY="lru", DYN_ROUTER_TTL_SECS="0")) as node:
        register(node, worker(1, total_kv_blocks=10), worker(2))
        reserve(node, 1, 6, 1)
        reserve(node, 2, 6, 1)
        becomes(tap, node, 2, 6, {(1, 0): 6, (2, 0): 0}, "lru: the newest booking is whole")
        tap.same(depth(node, 1, 6), {(1, 0): 4, (2, 0): 0}, "the older one lost its end to the worker's size")
        reserve(node, 1, 4, 1)
        reserve(node, 3, 3, 1)
        becomes(tap, node, 3, 3, {(1, 0): 3, (2, 0): 0}, "another one")
        tap.same((depth(node, 1, 6)[1, 0], depth(node, 2, 6)[1, 0]), (4, 3), "least recently recorded goes first")
        reserve(node, 9, 300, 2)
        becomes(tap, node, 9, 300, {(1, 0): 0, (2, 0): 300}, "a worker of unknown size has no limit, and nothing ages")
        tap.same(node.counted("indexer_routed_evicted"), 5, "evictions are counted")
        checked(node)


def waited():
    with Node(env=dict(OFF, DYN_ROUTER_QUEUE_THRESHOLD="0", KVPICK_HTTPD_PROCESSES="3")) as node:
        register(node, worker(1, max_num_batched_tokens=1))
        node.call("POST", "/select_and_reserve", {"token_ids": tokens(1, 4), "selection_id": "busy"})
        answer = []
        thread = threading.Thread(target=lambda: answer.append(node.call(
            "POST", "/select_and_reserve", {"token_ids": tokens(2, 5), "selection_id": "waits"})))
        thread.start()
        tap.ok(wait_for(lambda: node.call("GET", "/loads")[1][0]["pending_count"] == 1), "a request waits its turn")
        tap.same(depth(node, 2, 5), {(1, 0): 0}, "while it waits nothing is booked or learned")
        node.call("DELETE", "/reservations/busy")
        thread.join()
        tap.same(answer[0][0], 200, "then it is booked")
        becomes(tap, node, 2, 5, {(1, 0): 5}, "and its blocks count, too")
        checked(node)


def removed(first, start, end):
    names = [first * 1000 + i + 1 for i in range(start, end)]
    return pack([1.0, [{"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}], None])


def tiers(node, first, blocks):
    row = node.call("POST", "/overlap_scores", {"token_ids": tokens(first, blocks)})[1]["workers"][0]
    return row["device_blocks"], row["host_pinned_extension_blocks"], row["disk_extension_blocks"]


def predictions():
    ttl = 3.0 * SLOW
    with Node(env={"DYN_ROUTER_PREDICTED_TTL_SECS": str(ttl)}) as node:
        e = Engine()
        e.register(node, 1)
        e.send(0, stored(7, 0, 2))
        becomes(tap, node, 7, 8, {(1, 0): 2}, "two blocks of an event")
        e.send(1, stored(7, 2, 5, medium="CPU"))
        tap.ok(wait_for(lambda: tiers(node, 7, 8) == (2, 3, 0)), "three more in host memory", tiers(node, 7, 8))
        asked = time.monotonic()
        reserve(node, 7, 4, 1)
        tap.ok(wait_for(lambda: tiers(node, 7, 8) == (4, 1, 0)),
               "a prediction of four: counted as on the device, and no block twice", tiers(node, 7, 8))
        reserve(node, 8, 6, 1)
        e.send(2, stored(8, 0, 6))
        becomes(tap, node, 8, 6, {(1, 0): 6}, "predicted and stored")
        e.send(3, removed(8, 3, 6))
        e.send(4, stored(9, 0, 1))
        becomes(tap, node, 9, 1, {(1, 0): 1}, "then three of them removed by an event")
        tap.same(depth(node, 8, 6), {(1, 0): 6}, "the prediction stays")
        becomes(tap, node, 8, 6, {(1, 0): 3}, "until it ends: what the engine has is left")
        tap.ok(time.monotonic() - asked >= ttl, "not before its time")
        tap.ok(wait_for(lambda: tiers(node, 7, 8) == (2, 3, 0)), "the lower tiers are as before", tiers(node, 7, 8))
        os.kill(node.children()["kvpick-indexer"][0], signal.SIGKILL)
        e.subscribed()
        reserve(node, 10, 5, 1)
        becomes(tap, node, 10, 5, {(1, 0): 5}, "after a killed indexer bookings are predictions again")
        e.send(5, CLEAR)
        becomes(tap, node, 8, 6, {(1, 0): 0}, "an engine clears its cache")
        tap.same(node.counted("indexer_routed_malformed") + node.counted("indexer_routed_late"), 0,
                 "no booking was lost")
        reserve(node, 11, 5, 1)
        node.call("DELETE", "/workers/1")
        register(node, worker(1, e.at))
        tap.same(depth(node, 11, 5), {(1, 0): 0}, "a worker registered anew has no predictions")
        checked(node)
        e.close()


forms_and_ages()
tells_nothing()
approximate()
killed_often()
least_recently()
waited()
predictions()
sys.exit(tap.done())
