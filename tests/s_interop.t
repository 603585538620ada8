#!/usr/bin/env python3
"""Our node and the reference selection service beside each other: each recovers its index from the other's dump, and
each sees the bookings that the other makes. Skipped where the reference is not asked for (lib/reference.py)."""
import http.client
import json
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import Engine, pack, stored, tokens
from node import Node, Tap, free_port, wait_for
from reference import Reference, interpreter

tap = Tap()


def dump(side):
    conn = http.client.HTTPConnection("127.0.0.1", side.port, timeout=60)
    conn.request("GET", "/dump")
    reply = conn.getresponse()
    body = reply.read()
    conn.close()
    return json.loads(body) if reply.status == 200 else reply.status


def links(side):
    """{(key, block size, worker, rank, tier, block, tokens, parent)}"""
    out, whole = set(), dump(side)
    for key, part in whole.items() if isinstance(whole, dict) else ():
        for e in part["events"]:
            s = e["event"]["data"]["stored"]
            parent = s["parent_hash"]
            for b in s["blocks"]:
                out.add((key, part["block_size"], e["worker_id"], e["event"].get("dp_rank", 0),
                         e.get("storage_tier", "device"), b["block_hash"], b["tokens_hash"], parent))
                parent = b["block_hash"]
    return out


def same(got, want, name):
    return tap.ok(got == want and want, name, f"{len(got)} for {len(want)}: missing {sorted(want - got, key=str)[:3]}, "
                  f"too much {sorted(got - want, key=str)[:3]}")


def overlaps(side, first, blocks):
    got = side.call("POST", "/overlap_scores", {"token_ids": tokens(first, blocks)})[1]
    return {(w["worker_id"], w["dp_rank"]): w["device_blocks"] for w in got.get("workers", [])}


def register(side, engine, worker_id):
    status, record = side.call("POST", "/workers", engine.body(worker_id))
    if status != 201:
        raise RuntimeError(f"worker {worker_id}: {status} {record}")
    engine.subscribed()


def fill(side, engines):
    """Two engines tell 40 prompts; a part is evicted again. Hashes up to 2^64 - 1."""
    for i, e in enumerate(engines):
        register(side, e, i + 1)
        e.seq = 0
    for p in range(40):
        e = engines[p % 2]
        e.send(e.seq, stored(1 + p, 0, 6))
        e.seq += 1
        if p % 5 == 0:
            e.send(e.seq, pack([1.0, [{"type": "BlockRemoved", "block_hashes": [(1 + p) * 1000 + 6]}], None]))
            e.seq += 1
    wait_for(lambda: all(overlaps(side, 1 + p, 6).get((p % 2 + 1, 0)) == (5 if p % 5 == 0 else 6) for p in (0, 38, 39)))


def recovery(python):
    engines = [Engine() for _ in range(2)]
    with Reference(python) as ref:
        fill(ref, engines)
        told = links(ref)
        with Node("--indexer-peers", f"http://127.0.0.1:{ref.port}") as node:
            def state():
                return node.call("GET", "/status?format=json")[1]["recovery"]["state"]
            wait_for(lambda: state() != "running", 30)
            tap.same(state(), "recovered", "our node recovers from the reference")
            for i, e in enumerate(engines):
                register(node, e, i + 1)
            wait_for(lambda: links(node) == told)
            same(links(node), told, "and then tells the same as it")
            tap.same([overlaps(node, 1 + p, 6) for p in range(40)], [overlaps(ref, 1 + p, 6) for p in range(40)],
                     "overlaps are equal")
            tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    for e in engines:
        e.close()
    engines = [Engine() for _ in range(2)]
    with Node() as node:
        fill(node, engines)
        told = links(node)
        with Reference(python, "--indexer-peers", f"http://127.0.0.1:{node.port}") as ref:
            for i, e in enumerate(engines):
                register(ref, e, i + 1)
            wait_for(lambda: links(ref) == told)
            same(links(ref), told, "the reference recovers from our node")
            tap.same([overlaps(ref, 1 + p, 6) for p in range(40)], [overlaps(node, 1 + p, 6) for p in range(40)],
                     "overlaps are equal")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    for e in engines:
        e.close()


def loads(side):
    """(prefill tokens, decode blocks) of worker 1."""
    for part in side.call("GET", "/loads")[1]:
        for row in part["loads"]:
            if row["worker_id"] == 1:
                return row["potential_prefill_tokens"], row["potential_decode_blocks"]
    return None


def load(python):
    """Each side's bookings at the other: made, prefill complete, freed."""
    mine, other = free_port(), free_port()
    engine = Engine()
    with Node("--replica-sync-port", str(mine), "--replica-sync-peers", f"tcp://127.0.0.1:{other}") as node, \
            Reference(python, "--replica-sync-port", str(other), "--replica-sync-peers", f"tcp://127.0.0.1:{mine}") as ref:
        for side in (node, ref):
            register(side, engine, 1)
        sides = (("ours", node, ref), ("the-reference's", ref, node))

        def book(side, sid):
            return side.call("POST", "/select_and_reserve", {"selection_id": sid, "token_ids": tokens(7, 5)})[0]

        def both(want):
            return wait_for(lambda: loads(node) == loads(ref) == want)
        # A subscription that is still under way loses the first ones: until one arrives, in both directions.
        for name, one, two in sides:
            tries = []

            def arrives(name=name, one=one, two=two, tries=tries):
                tries.append(f"{name}-{len(tries)}")
                book(one, tries[-1])
                return wait_for(lambda: loads(two) not in (None, (0, 0)), 0.5)
            tap.ok(wait_for(arrives, 20), f"{name}: a booking is seen at the other side")
            for t in tries:
                one.call("DELETE", f"/reservations/{t}")
            tap.ok(both((0, 0)), f"{name}: and its end", (loads(one), loads(two)))
        for name, one, two in sides:
            tap.same(book(one, f"{name}-a"), 200, f"{name}: booked again")
            tap.ok(both((20, 5)), f"{name}: loads are equal", (loads(one), loads(two)))
            one.call("POST", f"/reservations/{name}-a/prefill_complete")
            tap.ok(both((0, 5)), f"{name}: prefill complete", (loads(one), loads(two)))
            two.call("DELETE", f"/reservations/{name}-a")
            tap.ok(both((0, 0)), f"{name}: freed at the other side", (loads(one), loads(two)))
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    engine.close()


with tempfile.TemporaryDirectory(prefix="kvpick-reference-") as where:
    found = interpreter(where)
    recovery(found)
    load(found)
sys.exit(tap.done())
