#!/usr/bin/env python3
"""kv_hint of booked selections over a real node: who is a source, whose names it gives, and what happens to the
answer when the indexer does not help; of those that waited their turn, too."""
import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import Engine, stored, tokens
from node import Node, Tap, wait_for
from waiter import waiting

tap = Tap()
BIG = 18446744073709551000
ids = iter(range(10**6))


def book(node, target, first, blocks, path="/select_and_reserve", rank=0, **extra):
    name = f"s{next(ids)}"
    status, a = node.call("POST", path, dict(selection_id=name, token_ids=tokens(first, blocks),
                                             pinned_worker={"worker_id": target, "dp_rank": rank}, **extra))
    if status != 200:
        raise RuntimeError(f"{status} {a}")
    if path == "/select_and_reserve":
        node.call("DELETE", f"/reservations/{name}")
    return name, a.get("kv_hint")


def hint(name, endpoint, hashes):
    return {"protocol_version": "0.1", "message_id": name, "actions": [
        {"action_id": "a1", "action_type": "kv.fetch", "action_version": "1.0",
         "payload": {"source_control_endpoint": endpoint, "block_hashes": hashes}}]}


def hashes(got):
    return got["actions"][0]["payload"]["block_hashes"] if got else []


def names(first, blocks):
    return [BIG + i if first == 9 else first * 1000 + i + 1 for i in range(blocks)]


def gives(node, target, first, blocks, endpoint, hashes, text, **extra):
    name, got = book(node, target, first, blocks, **extra)
    tap.same(got, hint(name, endpoint, hashes) if endpoint else None, text)


def sources(node, e):
    gives(node, 2, 1, 10, "tcp://one:1", names(1, 6), "another worker of the same type holds 6, the chosen one none")
    gives(node, 2, 1, 4, "tcp://one:1", names(1, 4), "of a shorter prompt as many as match")
    gives(node, 1, 1, 10, None, None, "the worker that holds most gets none")
    gives(node, 2, 7, 5, None, None, "nobody holds anything")
    gives(node, 3, 1, 10, None, None, "a worker without a type gets none")
    gives(node, 5, 1, 10, None, None, "a worker of another type gets none")
    tap.same(book(node, 2, 1, 10, path="/select")[1], None, "a selection without a booking gets none")
    e[2].send(0, stored(1, 0, 6))
    wait_for(lambda: book(node, 2, 1, 10)[1] is None)
    gives(node, 2, 1, 10, None, None, "as many blocks are not more")
    e[1].send(1, stored(1, 6, 8))
    wait_for(lambda: book(node, 2, 1, 10)[1])
    gives(node, 2, 1, 10, "tcp://one:1", names(1, 8), "more are: all of them from the first on")
    e[4].send(0, stored(1, 0, 9))
    wait_for(lambda: node.call("POST", "/overlap_scores", {"token_ids": tokens(1, 9)})[1]["workers"][3]
             ["device_blocks"] == 9)
    gives(node, 2, 1, 10, "tcp://one:1", names(1, 8), "a source of a state agent does not count")
    node.call("PATCH", "/workers/4", {"kv_event_source_mode": "worker"})
    gives(node, 2, 1, 10, "tcp://four:1", names(1, 9), "a worker that is none any more does")
    node.call("PATCH", "/workers/4", {"router_hint_source_control_endpoints": {"5": "tcp://x:1", "0": ""}})
    gives(node, 2, 1, 10, "tcp://one:1", names(1, 8), "nor does one without a control endpoint for the rank")
    e[1].send(2, stored(9, 0, 3, block_hashes=names(9, 3)))
    wait_for(lambda: book(node, 2, 9, 3)[1])
    gives(node, 2, 9, 3, "tcp://one:1", names(9, 3), "hashes are unsigned and exact")
    e[1].send(3, stored(8, 0, 1000))
    wait_for(lambda: len(hashes(book(node, 2, 8, 1000)[1])) == 1000)
    gives(node, 2, 8, 1000, "tcp://one:1", names(8, 1000), "a long prompt")
    node.call("DELETE", "/workers/1")
    gives(node, 2, 9, 3, None, None, "a deleted worker is no source")


def without_indexer(node, e):
    e[1].register(node, 1, router_hint_worker_type="t", router_hint_source_control_endpoints={"0": "tcp://one:1"})
    e[1].send(4, stored(6, 0, 5))
    wait_for(lambda: book(node, 2, 6, 5)[1])
    gives(node, 2, 6, 5, "tcp://one:1", names(6, 5), "registered anew it is one again")
    indexer = node.children()["kvpick-indexer"][0]
    os.kill(indexer, signal.SIGSTOP)
    start = time.monotonic()
    gives(node, 2, 6, 5, None, None, "an indexer that does not answer: the selection comes without a hint")
    tap.ok(time.monotonic() - start < 5, "soon")
    s = socket.create_connection(("127.0.0.1", node.port))
    body = json.dumps({"selection_id": "gone", "token_ids": tokens(6, 5),
                       "pinned_worker": {"worker_id": 2, "dp_rank": 0}}).encode()
    s.sendall(b"POST /select_and_reserve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
              b"Content-Length: %d\r\n\r\n" % len(body) + body)
    wait_for(lambda: node.call("POST", "/reservations/gone/prefill_complete")[0] == 200, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    s.close()
    tap.ok(wait_for(lambda: node.call("DELETE", "/reservations/gone")[0] == 404),
           "a client that leaves before its answer leaves no booking behind")
    os.kill(indexer, signal.SIGCONT)
    wait_for(lambda: book(node, 2, 6, 5)[1])
    gives(node, 2, 6, 5, "tcp://one:1", names(6, 5), "and then it goes on")


def waits(node, target, first, blocks, meanwhile=lambda: None, path="/select_and_reserve"):
    """A selection that waits for its rank until meanwhile() is done: its name, its hint, seconds until it came."""
    name, holder = f"s{next(ids)}", f"s{next(ids)}"
    pin = {"pinned_worker": {"worker_id": target, "dp_rank": 0}}
    node.call("POST", "/select_and_reserve", dict(selection_id=holder, token_ids=tokens(50, 4), **pin))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(node.call, "POST", path, dict(selection_id=name, token_ids=tokens(first, blocks), **pin))
        waited = wait_for(lambda: waiting(node) == 1)
        meanwhile()
        start = time.monotonic()
        node.call("DELETE", f"/reservations/{holder}")
        status, a = call.result()
    if status != 200 or not waited:
        raise RuntimeError(f"{waited} {status} {a}")
    node.call("DELETE", f"/reservations/{name}")
    return name, a.get("kv_hint"), time.monotonic() - start


def holds(node, first, blocks, worker):
    """Waits until the index says so of a prompt's blocks."""
    def look():
        rows = node.call("POST", "/overlap_scores", {"token_ids": tokens(first, blocks)})[1]["workers"]
        return [r["device_blocks"] for r in rows if r["worker_id"] == worker] == [blocks]
    if not wait_for(look):
        raise RuntimeError(f"worker {worker} does not hold {blocks} blocks of {first}")


def after_waiting(node, e):
    name, got, _ = waits(node, 2, 1, 10)
    tap.same(got, hint(name, "tcp://one:1", names(1, 6)), "one that waited its turn gets a hint, too")

    def more():
        e[1].send(1, stored(1, 6, 8))
        holds(node, 1, 8, 1)
    name, got, _ = waits(node, 2, 1, 10, more)
    tap.same(got, hint(name, "tcp://one:1", names(1, 8)), "of what the source holds when it is answered")
    tap.same(waits(node, 1, 1, 10)[1], None, "not the worker that holds most")
    tap.same(waits(node, 2, 7, 5)[1], None, "nor where nobody holds anything")
    tap.same(waits(node, 3, 1, 10)[1], None, "nor a worker without a type")
    tap.same(waits(node, 2, 1, 10, path="/select")[1], None, "nor one that books nothing")

    def same():
        e[2].send(0, stored(1, 0, 8))
        holds(node, 1, 8, 2)
    tap.same(waits(node, 2, 1, 10, same)[1], None, "nor a worker that has come to hold as much meanwhile")
    e[1].send(2, stored(5, 0, 4))
    holds(node, 5, 4, 1)
    indexer = node.children()["kvpick-indexer"][0]
    _, got, seconds = waits(node, 2, 5, 4, lambda: os.kill(indexer, signal.SIGSTOP))
    tap.same(got, None, "an indexer that does not answer: it comes without a hint")
    tap.ok(seconds < 5, "soon", seconds)
    os.kill(indexer, signal.SIGCONT)
    tap.ok(wait_for(lambda: waits(node, 2, 5, 4)[1]), "and then it goes on")
    tap.ok(wait_for(lambda: waiting(node) == 0), "nobody waits at the end")


with Node() as one:
    engines = {i: Engine(replay=False) for i in range(1, 6)}
    members = {1: {"router_hint_worker_type": "t", "router_hint_source_control_endpoints": {"0": "tcp://one:1"}},
               2: {"router_hint_worker_type": "t"}, 3: {},
               4: {"router_hint_worker_type": "t", "router_hint_source_control_endpoints": {"0": "tcp://four:1"},
                   "kv_event_source_mode": "state_agent_v2"},
               5: {"router_hint_worker_type": "other"}}
    for i, extra in members.items():
        engines[i].register(one, i, **extra)
    engines[1].send(0, stored(1, 0, 6))
    wait_for(lambda: book(one, 2, 1, 10)[1])
    sources(one, engines)
    without_indexer(one, engines)
    for engine in engines.values():
        engine.close()
    tap.same(one.ctl("check")[0], 0, "kvpickctl check finds no fault")
with Node("--httpd-processes", "2", env={"DYN_ROUTER_QUEUE_THRESHOLD": "0"}) as two:
    engines = {i: Engine(replay=False) for i in range(1, 4)}
    for i in engines:
        engines[i].register(two, i, max_num_batched_tokens=512, **members[i])
    engines[1].send(0, stored(1, 0, 6))
    holds(two, 1, 6, 1)
    after_waiting(two, engines)
    for engine in engines.values():
        engine.close()
    tap.same(two.ctl("check")[0], 0, "kvpickctl check finds no fault")
sys.exit(tap.done())
