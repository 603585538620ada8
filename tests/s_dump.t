#!/usr/bin/env python3
"""GET /dump of a real node: equal to a model of what engines told, valid while they go on, its parameters, clients
that stall or vanish, an indexer killed in the middle."""
import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import BLOCK, Engine, pack, stored, tokens
from node import SLOW, Node, Tap, wait_for, worker

tap = Tap()
MEDIUM = {"device": "GPU", "host_pinned": "CPU", "disk": "NVME", "external": "EXTERNAL"}
SEED = int(os.environ.get("KVP_SEED", time.time_ns() % 10**9))


def get(node, query="", method="GET"):
    """(status, headers, body bytes)"""
    conn = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
    conn.request(method, "/dump" + query)
    reply = conn.getresponse()
    body = reply.read()
    conn.close()
    return reply.status, {k.lower(): v for k, v in reply.getheaders()}, body


def links(dump):
    """{(worker, rank, tier, block, parent)} of a parsed dump; ValueError if a parent does not come first."""
    out, seen = set(), {}
    for part in dump.values():
        for e in part["events"]:
            who, tier = (e["worker_id"], e["event"].get("dp_rank", 0)), e["storage_tier"]
            stored_ = e["event"]["data"]["stored"]
            parent = stored_["parent_hash"]
            tiers = [tier] if tier == "device" else list(MEDIUM)
            if parent is not None and not any(parent in seen.get((who, t), ()) for t in tiers):
                raise ValueError(f"{who} {tier}: {parent} comes later or never")
            for b in stored_["blocks"]:
                out.add((*who, tier, b["block_hash"], parent))
                seen.setdefault((who, tier), set()).add(b["block_hash"])
                parent = b["block_hash"]
                if not 0 <= b["tokens_hash"] < 1 << 64 or not 0 <= parent < 1 << 64:
                    raise ValueError(f"{b} is out of range")
    return out


class Model:
    """What one rank told: {tier: {block: parent}}."""

    def __init__(self, engine, worker_id, rank, wire_rank):
        self.engine, self.id, self.rank, self.wire_rank, self.seq = engine, worker_id, rank, wire_rank, 0
        self.has = {t: {} for t in MEDIUM}

    def send(self, events):
        self.engine.send(self.engine.seq, pack([1.0, events, self.wire_rank]))
        self.engine.seq += 1

    def random_event(self, rng):
        tier = rng.choice(["device"] * 5 + ["host_pinned", "disk", "external"])
        has = self.has[tier]
        if rng.random() < 0.3 and has:
            gone = rng.sample(sorted(has), min(len(has), rng.randint(1, 3)))
            for b in gone:
                del has[b]
            return {"type": "BlockRemoved", "block_hashes": gone, "medium": MEDIUM[tier]}
        first, start = rng.randint(1, 6), 0
        known = [b for t in ([tier] if tier == "device" else MEDIUM) for b in self.has[t] if b // 1000 == first]
        if known and rng.random() < 0.8:
            start = rng.choice(known) % 1000
        end = start + rng.randint(1, 8)
        for i in range(start, end):
            has[first * 1000 + i + 1] = first * 1000 + i if i else None
        return {"type": "BlockStored", "block_hashes": [first * 1000 + i + 1 for i in range(start, end)],
                "parent_block_hash": first * 1000 + start if start else None,
                "token_ids": tokens(first, end)[start * BLOCK:], "block_size": BLOCK, "lora_id": None,
                "medium": MEDIUM[tier], "lora_name": None}

    def visible(self):
        """Blocks of a tier whose ancestors are held: on the device, or for lower tiers in any."""
        dev, changed = set(), True
        while changed:
            more = {b for b, p in self.has["device"].items() if b not in dev and (p is None or p in dev)}
            dev, changed = dev | more, bool(more)
        anywhere, changed = set(dev), True
        low = [(t, b, p) for t in MEDIUM if t != "device" for b, p in self.has[t].items()]
        while changed:
            more = {b for _, b, p in low if b not in anywhere and (p is None or p in anywhere)}
            anywhere, changed = anywhere | more, bool(more)
        return {("device", b, self.has["device"][b]) for b in dev} | \
            {(t, b, p) for t, b, p in low if p is None or p in anywhere}


def want(models):
    return {(m.id, m.rank, *x) for m in models for x in m.visible()}


def random_events(processes):
    rng = random.Random(SEED + processes)
    with Node(env={"KVPICK_HTTPD_PROCESSES": str(processes)}) as node:
        engines = [Engine(replay=False) for _ in range(4)]
        for e in engines:
            e.seq = 0
        engines[0].register(node, 1)
        engines[1].register(node, 18446744073709551615)
        node.call("POST", "/workers", worker(3, data_parallel_size=2, kv_events_endpoints={
            "0": engines[2].at, "1": engines[3].at}))
        engines[2].subscribed()
        engines[3].subscribed()
        models = [Model(engines[0], 1, 0, None), Model(engines[1], 18446744073709551615, 0, None),
                  Model(engines[2], 3, 0, 0), Model(engines[3], 3, 1, 1)]
        tap.same(json.loads(get(node)[2]), {"default:default": {"block_size": 4, "events": []}},
                 f"{processes} processes: an index without blocks")
        for _ in range(2):
            for _ in range(60):
                m = rng.choice(models)
                m.send([m.random_event(rng) for _ in range(rng.randint(1, 4))])
            wait_for(lambda: links(json.loads(get(node)[2])) == want(models))
            got, should = links(json.loads(get(node)[2])), want(models)
            tap.ok(got == should, f"{processes} processes: the dump equals the model ({len(should)} blocks)",
                   f"seed {SEED}, missing {sorted(should - got, key=str)[:5]}, "
                   f"too much {sorted(got - should, key=str)[:5]}")
        stop = threading.Event()

        def flow():
            while not stop.is_set():
                m = rng.choice(models)
                m.send([m.random_event(rng) for _ in range(3)])

        sender, bad = threading.Thread(target=flow), []
        sender.start()
        for _ in range(20):
            try:
                links(json.loads(get(node)[2]))
            except ValueError as e:
                bad.append(str(e))
        stop.set()
        sender.join()
        tap.same(bad, [], "dumps are valid while events flow")
        wait_for(lambda: links(json.loads(get(node)[2])) == want(models))
        tap.same(links(json.loads(get(node)[2])), want(models), "and complete when they stop")
        node.call("DELETE", "/workers/1")
        wait_for(lambda: links(json.loads(get(node)[2])) == want(models[1:]))
        tap.same(links(json.loads(get(node)[2])), want(models[1:]), "a deleted worker is not in it")
        for e in engines:
            e.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def parameters(node, whole):
    status, head, body = get(node)
    tap.same((status, head.get("content-type"), head.get("transfer-encoding"), head.get("x-kvpick-dump-role")),
             (200, "application/json", "chunked", "aggregated"), "the answer is chunked JSON that names its role")
    tap.same(len(links(json.loads(body))), whole, "with every block")
    for query, status in (("?max_bytes=1", 413), (f"?max_bytes={len(body)}", 200), (f"?max_bytes={len(body) - 1}", 413),
                          ("?max_bytes=0", 200), ("?max_bytes=", 400), ("?max_bytes=x", 400), ("?max_bytes=-1", 400),
                          ("?max_bytes=18446744073709551616", 400), ("?max_bytes=18446744073709551615", 200),
                          ("?role=aggregated", 200), ("?role=decode", 404), ("?role=prefill&max_bytes=9", 404),
                          ("?role=any", 400), ("?other=1", 200)):
        got = get(node, query)
        tap.ok(got[0] == status and (status != 200 or got[2] == body) and (status == 200 or b"error" in got[2]),
               f"/dump{query}: {status}", got[:2])
    tap.same(get(node, method="HEAD")[::2], (200, b""), "HEAD answers without making a dump")
    tap.same(get(node, method="POST")[0], 405, "POST is not allowed")


def opened(node):
    """A client that asks for a dump and reads only the head of the answer."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    s.settimeout(60)
    s.connect(("127.0.0.1", node.port))
    s.sendall(b"GET /dump HTTP/1.0\r\n\r\n")
    return s, s.recv(4096)


def anon_kb(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon"))


def clients(node):
    httpd = node.children()["kvpick-httpd"][0]
    before = anon_kb(httpd)
    many = [opened(node)[0] for _ in range(16)]
    tap.same(get(node)[0], 503, "a seventeenth dump is refused for now")
    grown = anon_kb(httpd) - before
    tap.ok(grown < 24 * 1024 or SLOW > 1, f"16 clients that do not read cost {grown} KiB")
    tap.same(node.call("GET", "/health")[0], 200, "and nobody else waits for them")
    cut = node.counted("httpd_dump_cut")
    for s in many[:8]:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        s.close()
    wait_for(lambda: node.counted("httpd_dump_cut") >= cut + 8)
    tap.ok(node.counted("httpd_dump_cut") >= cut + 8, "clients that vanish are forgotten")
    tap.same(get(node)[0], 200, "and there is room again")
    for s in many[8:]:
        s.close()


def killed_indexer(node, whole):
    s, data = opened(node)
    old = node.children()["kvpick-indexer"][0]
    os.kill(old, signal.SIGKILL)
    while more := s.recv(1 << 20):
        data += more
    s.close()
    body = data.split(b"\r\n\r\n", 1)[1]
    try:
        got = len(links(json.loads(body)))
    except ValueError as e:
        got = str(e)
    tap.same(got, whole, "an indexer killed in the middle: the dump goes on with its successor")
    wait_for(lambda: node.children().get("kvpick-indexer", [old]) != [old])
    tap.same(len(links(json.loads(get(node)[2]))), whole, "and the next one is whole, too")


def filled(node):
    """An engine, and the number of its blocks."""
    e, whole = Engine(replay=True), 60000
    e.register(node, 1)
    for i in range(whole // 1000):
        e.send(i, stored(1 + i, 0, 1000))
    wait_for(lambda: node.counted("indexer_radix_blocks") == whole, 30)
    return e, whole


def big():
    with Node() as node:
        e, whole = filled(node)
        parameters(node, whole)
        killed_indexer(node, whole)
        clients(node)
        e.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def slow_readers():
    with Node("--http-read-timeout-ms", "1000") as node:
        e, _ = filled(node)
        many = [opened(node)[0] for _ in range(8)]
        tap.ok(wait_for(lambda: node.counted("httpd_dump_cut") == len(many), 30),
               "clients that read nothing for the read time-out are cut")
        for s in many:
            s.close()
        e.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


for n in (1, 3):
    random_events(n)
big()
slow_readers()
sys.exit(tap.done())
