#!/usr/bin/env python3
"""A node that recovers its index from a peer: the same answers afterwards, the gate meanwhile, events that come
during it, peers of every bad kind, killed processes. KVP_LONG=1: a million blocks."""
import http.client
import json
import os
import random
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from dump_peer import Peer
from engine import Engine, pack, stored, tokens
from node import SLOW, Node, Tap, call, free_port, wait_for, worker

class Claims(Tap):
    """Sets of blocks are compared by what they differ in."""

    def same(self, got, want, name):
        if isinstance(got, set) and isinstance(want, set) and got != want:
            return self.ok(False, name, f"{len(got)} for {len(want)}: missing {sorted(want - got, key=str)[:3]}, "
                           f"too much {sorted(got - want, key=str)[:3]}")
        return super().same(got, want, name)


tap = Claims()
SEED = int(os.environ.get("KVP_SEED", time.time_ns() % 10**9))
print(f"# KVP_SEED={SEED}")
LONG = os.environ.get("KVP_LONG") == "1"


# -- dumps --

def links(dump):
    """{(key, block size, worker, rank, tier, block, tokens, parent)} of a parsed dump."""
    out = set()
    for key, part in dump.items():
        for e in part["events"]:
            s = e["event"]["data"]["stored"]
            parent = s["parent_hash"]
            for b in s["blocks"]:
                out.add((key, part["block_size"], e["worker_id"], e["event"]["dp_rank"], e["storage_tier"],
                         b["block_hash"], b["tokens_hash"], parent))
                parent = b["block_hash"]
    return out


def dump(port, query=""):
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    conn.request("GET", "/dump" + query)
    reply = conn.getresponse()
    body = reply.read()
    conn.close()
    return reply.status, {k.lower(): v for k, v in reply.getheaders()}, body


def links_of(node):
    status, _, body = dump(node.port)
    return links(json.loads(body)) if status == 200 else status


def state(node):
    return node.call("GET", "/status?format=json")[1]["recovery"]


def ended(node, seconds=30):
    return wait_for(lambda: state(node)["state"] != "running" and state(node)["state"], seconds)


def log_has(node, *words):
    return wait_for(lambda: any(all(w in line for w in words) for line in node.log_text().splitlines()), 5)


def joiner(*peers, **env):
    """A node that is to recover from these addresses; it does not wait to be ready."""
    port = free_port()
    more = {"DYN_EPP_SELECTION_HTTP_PORT": str(port), "DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS": str(1500 * SLOW)}
    more.update(env)
    node = Node("--indexer-peers", ",".join(peers), env=more)
    node.dump_port = port
    return node


# -- a node that has blocks --

class Source:
    """A node, its engines, and what they told it: blocks of four ranks in all tiers."""

    def __init__(self, prompts=20, length=8):
        self.rng = random.Random(SEED)
        self.node = Node().start()
        self.engines = [Engine() for _ in range(3)]
        self.ids = [1, 18446744073709551615, 3]
        for e in self.engines:
            e.seq = 0
        for e, i in zip(self.engines[:2], self.ids):
            e.register(self.node, i)
        self.node.call("POST", "/workers", self.third())
        self.engines[2].subscribed()
        for p in range(prompts):
            e = self.rng.choice(self.engines)
            tier = self.rng.choice(["GPU"] * 4 + ["CPU", "NVME", "EXTERNAL"])
            self.send(e, stored(1 + p, 0, length, medium="GPU"))
            if tier != "GPU":
                self.send(e, stored(1 + p, length // 2, length, medium=tier))
        self.blocks = self.settled()

    def third(self):
        return worker(3, self.engines[2].at, replay_endpoint=self.engines[2].replay_at, model_name="org:m",
                      routing_group="g:1")

    def send(self, engine, payload):
        engine.send(engine.seq, payload)
        engine.seq += 1

    def settled(self):
        last = None
        def quiet():
            nonlocal last
            now = links_of(self.node)
            same = now == last and self.node.counted("indexer_batch_applied") == sum(
                e.seq for e in self.engines)
            last = now
            return same
        wait_for(quiet, 10)
        return links_of(self.node)

    def register(self, node):
        """The same workers at another node."""
        for e, i in zip(self.engines[:2], self.ids):
            e.register(node, i)
        node.call("POST", "/workers", self.third())
        self.engines[2].subscribed()

    def at(self):
        return f"http://127.0.0.1:{self.node.port}"

    def close(self):
        for e in self.engines:
            e.close()
        tap.same(self.node.ctl("check")[0], 0, "kvpickctl check of the source finds no fault")
        self.node.stop()
        self.node.__exit__()


def select(node, **more):
    return node.call("POST", "/select", {"token_ids": list(range(16)), "selection_id": f"s{random.random()}",
                                         **more})


# -- claims --

def round_trip(src):
    with joiner(src.at()) as node:
        tap.same(ended(node), "recovered", "a node that starts beside one that has an index recovers it")
        tap.same(state(node)["blocks"], len(src.blocks), "with every block, though no worker is registered yet")
        tap.same(links_of(node), set(), "whose blocks nobody sees")
        src.register(node)
        wait_for(lambda: links_of(node) == src.blocks)
        tap.same(links_of(node), src.blocks, "until the workers register: the dumps are equal, tiers and all")
        tap.ok(log_has(node, "recovery.ended", "state=recovered", "ms="), "how long it took is logged")
        status, head, body = dump(node.dump_port)
        tap.same((status, links(json.loads(body)), head["x-kvpick-dump-role"]), (200, src.blocks, "aggregated"),
                 "the dump port tells the same")
        port(node, body)
        tap.same(select(node)[0], 200, "selections are answered")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def port(node, body):
    whole = len(body)
    for query, status, text in (
            ("?max_bytes=1", 413, b"peer KV-index snapshot exceeds requested max_bytes"),
            (f"?max_bytes={whole}", 200, None), ("?max_bytes=x", 400, None), ("?role=prefill", 200, b"{}"),
            ("?role=decode&max_bytes=9", 200, b"{}"), ("?role=any", 400, None)):
        got = dump(node.dump_port, query)
        tap.ok(got[0] == status and (text is None or got[2] == text), f"dump port, {query}: {status}", got)
    tap.same(dump(node.dump_port, "?role=decode")[1]["x-kvpick-dump-role"], "decode", "the answer names its role")
    for method, path, status in (("POST", "/dump", 405), ("GET", "/health", 404), ("GET", "/", 404)):
        tap.same(call(node.dump_port, method, path)[0], status, f"dump port, {method} {path}: {status}")


def gate(src):
    """What is answered while the peer's dump is awaited, and what becomes of events that come meanwhile."""
    peer = Peer(dump(src.node.port)[2])
    with joiner(peer.at("first"), peer.at("held"), DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS="60000") as node:
        tap.same(node.call("GET", "/health")[0], 200, "while the peer's dump is awaited: /health answers")
        e = src.engines[0]
        src.register(node)
        tap.ok(True, "workers can be registered")
        peer.first.set()
        tap.ok(peer.hold.wait(20), "the first peer fails, the next one is asked")
        tap.same(node.call("GET", "/ready")[0], 503, "/ready is 503")
        tap.same(select(node), (503, {"error": "the index is still being recovered from a peer"}),
                 "selections are 503")
        tap.same(dump(node.port)[0], 503, "GET /dump is 503")
        tap.same(dump(node.dump_port)[::2], (503, b"peer KV index not yet recovered"), "on the dump port, too")
        tap.same(state(node)["state"], "running", "and /status says why")
        mine = sorted(b[5] for b in src.blocks if b[2] == 1 and b[4] == "device" and b[5] % 1000 == 8)
        gone = mine[:2]
        src.send(e, pack([1.0, [{"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}], None]))
        src.send(e, stored(900, 0, 5))
        wait_for(lambda: src.node.counted("indexer_batch_applied") == sum(x.seq for x in src.engines))
        time.sleep(0.2)  # for a node that would apply them; those that wait in its sockets show nowhere
        tap.same(node.counted("indexer_batch_applied"), 0, "events are kept, not applied")
        replays = node.counted("indexer_replay_requested")
        peer.go.set()
        tap.same(ended(node), "recovered", "the dump comes: recovered")
        now = src.settled()
        wait_for(lambda: links_of(node) == now)
        tap.same(links_of(node), now, "the events that came meanwhile are applied behind it: equal again")
        tap.ok(all(b not in {x[5] for x in links_of(node) if x[2] == 1 and x[4] == "device"} for b in gone),
               "what was evicted meanwhile did not come back")
        tap.same(node.counted("indexer_replay_requested"), replays,
                 "and no engine was asked to replay what the dump held")
        tap.same((node.call("GET", "/ready")[0], select(node)[0]), (200, 200), "ready, and selections are answered")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    peer = Peer(dump(src.node.port)[2])
    with joiner(peer.at("held"), DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS="60000") as node:
        tap.ok(peer.hold.wait(20), "another node: the peer is asked before any worker is known")
        src.register(node)
        src.send(e, stored(901, 0, 5))
        peer.go.set()
        tap.same(ended(node), "recovered", "recovered")
        now = src.settled()
        wait_for(lambda: links_of(node) == now)
        tap.same(links_of(node), now, "equal")
        tap.ok(wait_for(lambda: node.counted("indexer_replay_requested") == 1),
               "a listener that connected after the request has its engine replay what it may have missed")


BAD = {"missing": "status 404", "notyet": "status 503", "moved": "status 302", "html": "content type text/html",
       "list": "not an object", "garbage": "not JSON", "cut": "ended early", "cutchunk": "ended early",
       "cuttext": "not JSON", "reset": "ended early", "announced": "too large", "endless": "too large",
       "spaces": "token of more than", "silent": "no whole answer", "drip": "no whole answer",
       "role": "dump of role prefill", "zipped": "content encoding gzip", "twice": "exchange",
       "error": "indexer offline", "nokey": "without a colon", "null": "residency_domain", "negative": "-1"}


def hostile(src):
    src.blocks = src.settled()
    peer = Peer(dump(src.node.port)[2])
    dead = f"http://127.0.0.1:{free_port()}"
    kinds = [peer.at(k) for k in BAD]
    with joiner(dead, "http://nobody.invalid:1", *kinds, src.at(), DYN_EPP_RECOVERY_MAX_DUMP_BYTES="4000000") as node:
        src.register(node)
        tap.same(ended(node, 60), "recovered", "after 24 peers of every bad kind the next one is recovered from")
        text = node.log_text()
        for kind, reason in BAD.items():
            line = next((x for x in text.splitlines() if "peer_failed" in x and f"/{kind} " in x), "")
            tap.ok(reason in line, f"{kind}: the log says so", line)
        for at in (dead.split("/")[2], "nobody.invalid"):
            tap.ok(log_has(node, "recovery.peer_failed", at), f"{at}: the log says so")
        tap.same(len(peer.asked), len(BAD), "each was asked once")
        tap.ok(all("max_bytes=4000000" in x and "role=" not in x for x in peer.asked), "and told the limit")
        wait_for(lambda: links_of(node) == src.blocks)
        tap.same(links_of(node), src.blocks, "and the index is the good one's")
        tap.same(state(node)["attempts"], len(BAD) + 3, "attempts are counted")
        tap.same(node.counted("peer_recovery_failed"), len(BAD) + 2, "and failures")
        tap.same(node.call("GET", "/ready")[0], 200, "the node is ready")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    with joiner(peer.at("missing"), peer.at("error"), dead) as node:
        tap.same(ended(node), "exhausted", "all peers failed: exhausted")
        src.engines[0].register(node, 1)
        tap.same((node.call("GET", "/ready")[0], select(node)[0]), (200, 200), "and the node serves all the same")
        tap.ok(log_has(node, "recovery.exhausted"), "the log says so")
    for kind in ("empty", "chunks"):
        with joiner(peer.at(kind)) as node:
            tap.same(ended(node), "recovered", f"{kind}: recovered")
            src.register(node)
            should = src.blocks if kind == "chunks" else set()
            if kind == "chunks":
                wait_for(lambda: links_of(node) == src.blocks)
                tap.same(links_of(node), should, "in pieces of seven bytes: equal")
    peer.shutdown()


def killed(src):
    peer = Peer(dump(src.node.port)[2])
    with joiner(peer.at("held"), DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS="60000") as node:
        src.register(node)
        peer.hold.wait(20)
        old = node.children()["kvpick-peer"]
        os.kill(old[0], signal.SIGKILL)
        tap.ok(wait_for(lambda: len(peer.asked) == 2, 20), "the peer daemon killed: its successor asks anew")
        tap.same(node.call("GET", "/ready")[0], 503, "and the gate is still shut")
        old = node.children()["kvpick-indexer"]
        os.kill(old[0], signal.SIGKILL)
        wait_for(lambda: node.children().get("kvpick-indexer", old) != old, 20)
        peer.go.set()
        tap.same(ended(node, 60), "recovered", "the indexer killed, too: recovered in the end")
        tap.ok(log_has(node, "recovery.again"), "by another attempt with the same peer")
        wait_for(lambda: links_of(node) == src.blocks)
        tap.same(links_of(node), src.blocks, "completely")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    peer.shutdown()


def loads_of(port):
    return {(r["worker_id"], r["dp_rank"]): (r["potential_prefill_tokens"], r["potential_decode_blocks"])
            for part in call(port, "GET", "/loads")[1] for r in part["loads"]
            if r["potential_prefill_tokens"] or r["potential_decode_blocks"]}


def warm_up(src):
    """KVPICK_RECOVER_LOADS: a newcomer assumes the loads that its peer knows."""
    for i in range(6):
        src.node.call("POST", "/select_and_reserve", {"selection_id": f"w{i}", "token_ids": tokens(500 + i, 20)})
    want = loads_of(src.node.port)
    with joiner(src.at(), KVPICK_RECOVER_LOADS="true") as node:
        src.register(node)
        tap.same(ended(node), "recovered", "recovered, loads are asked for")
        wait_for(lambda: set(loads_of(node.port)) == set(want))
        got = loads_of(node.port)
        near = all(got.get(k, (0, 0))[i] <= v[i] and got.get(k, (0, 0))[i] >= v[i] * 0.7
                   for k, v in want.items() for i in (0, 1))
        tap.ok(near and set(got) == set(want), "the newcomer bears about the loads that its peer told", (got, want))
        tap.same(loads_of(node.dump_port), loads_of(node.port), "and tells them on its dump port")
        tap.ok(log_has(node, "recovery.loads"), "the log says so")
        tap.same(loads_of(src.node.port), want, "its peer does not hear of them")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    with joiner(src.at()) as node:
        src.register(node)
        ended(node)
        tap.same((loads_of(node.port), call(node.dump_port, "GET", "/loads")[0]), ({}, 404), "not without the setting")
    for i in range(6):
        src.node.call("DELETE", f"/reservations/w{i}")


def lost_index(src):
    """A tree that fails its check is emptied; a node with a peer gets it back while it serves."""
    with joiner(src.at()) as node:
        ended(node)
        src.register(node)
        wait_for(lambda: links_of(node) == src.blocks)
        where = f"/proc/{node.proc.pid}/fd"
        index = next(f"{where}/{n}" for n in os.listdir(where) if "kvpick-index" in os.readlink(f"{where}/{n}"))
        with open(index, "r+b") as f:
            f.seek(64)  # the generation that must be the tree's
            f.write(b"\x55" * 8)
        old = node.children()["kvpick-indexer"]
        os.kill(old[0], signal.SIGKILL)
        tap.ok(wait_for(lambda: "action=emptied" in node.log_text(), 20), "an indexer finds its tree broken: emptied")
        tap.ok(wait_for(lambda: node.log_text().count("recovery.ended") == 2, 20), "and recovers it from the peer again")
        wait_for(lambda: links_of(node) == src.blocks)
        tap.same(links_of(node), src.blocks, "completely")
        tap.same((state(node)["state"], select(node)[0]), ("recovered", 200), "in service")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def signed(text):
    n = int(text)
    return n - (1 << 64) if n >= 1 << 63 else n


def vectors():
    """The dumps of index_scenarios.json, and the keys of replica_sync.json, from a peer."""
    where = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors")
    with open(os.path.join(where, "index_scenarios.json"), encoding="utf-8") as f:
        cases = json.load(f)["peer_dumps"]
    with open(os.path.join(where, "replica_sync.json"), encoding="utf-8") as f:
        sync = json.load(f)
    one = {"worker_id": 1, "event": {"event_id": 0, "data": {"stored": {"blocks": [
        {"block_hash": 5, "tokens_hash": 6}]}}}}
    for k in sync["dump_keys"]:
        cases.append({"name": f"key {k['key']!r}", "http_body": {k["key"]: {"block_size": 4, "events": [one]}},
                      "expect": {"success": not k.get("error"), "query_block_hashes": ["6"],
                                 "device_blocks": {"1:0": 1}} if not k.get("error") else {"success": False},
                      "part": (k.get("model"), k.get("group"))})
    cases.append({"name": "the example", "http_body": json.loads(sync["dump_example_json"]), "part": ("model", "default"),
                  "expect": {"query_block_hashes": ["11", "12"], "device_blocks": {"1:0": 2}}})
    for c in cases:
        want = c["expect"]
        peer = Peer(json.dumps(c["http_body"]).encode())
        with joiner(peer.at("good")) as node:
            good = want.get("success", "original_recovery" not in want)
            tap.same(ended(node), "recovered" if good else "exhausted", f"{c['name']}: {'taken' if good else 'refused'}")
            model, group = c.get("part") or ("m", "default")
            engine = Engine(replay=False)
            body = engine.body(1, model_name=model, routing_group=group,
                               block_size=next(iter(c["http_body"].values()), {}).get("block_size", 4))
            if good and "device_blocks" in want and node.call("POST", "/workers", body)[0] == 201:
                got = node.call("POST", "/overlap_scores", {
                    "model_name": model, "routing_group": group, "isl_tokens": 64,
                    "block_hashes": [signed(h) for h in want["query_block_hashes"]],
                    "sequence_hashes": list(range(1, 1 + len(want["query_block_hashes"])))})[1]
                tap.same({f"{w['worker_id']}:{w['dp_rank']}": w["device_blocks"] for w in got.get("workers", [])},
                         want["device_blocks"], f"{c['name']}: and found")
            engine.close()
        peer.shutdown()


class Asker:
    """POST /overlap_scores over one connection."""

    def __init__(self, node):
        self.conn = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)

    def __call__(self, ids):
        self.conn.request("POST", "/overlap_scores", json.dumps({"token_ids": ids}),
                          {"Content-Type": "application/json"})
        reply = self.conn.getresponse()
        return json.loads(reply.read())


def same_answers(blocks, samples):
    """A node with many blocks, one that recovers them: the same overlaps for prompts that are cached in part."""
    length, rng = 1000, random.Random(SEED + 1)
    prompts, room = blocks // length, ["--max-blocks", str(4 * blocks)]
    with Node(*room) as first:
        engines = [Engine(replay=False) for _ in range(4)]
        for i, e in enumerate(engines):
            e.register(first, i + 1)
        sent = [0] * 4

        def send(to, payload):
            engines[to].send(sent[to], payload)
            sent[to] += 1
        for p in range(prompts):
            send(p % 4, stored(1 + p, 0, length))
            if p % 3 == 0:  # a second rank has the first half
                send((p + 1) % 4, stored(1 + p, 0, length // 2))
        held = blocks + (prompts + 2) // 3 * (length // 2)
        wait_for(lambda: first.counted("indexer_block_stored") == held, 120)
        begun = time.monotonic()
        with Node("--indexer-peers", f"http://127.0.0.1:{first.port}", *room) as second:
            tap.same(ended(second, 60), "recovered", f"{held} blocks of ranks are recovered")
            took = time.monotonic() - begun
            tap.same(state(second)["blocks"], held, "all of them")
            for i, e in enumerate(engines):
                second.call("POST", "/workers", e.body(i + 1))
            wait_for(lambda: second.call("GET", "/ready")[0] == 200)
            tap.same(second.call("GET", "/ready")[0], 200, f"ready {took:.2f} s after its start, recovery took "
                     f"{state(second)['ms']} ms")
            a, b, other, none = Asker(first), Asker(second), 0, 0
            for _ in range(samples):
                p, n = 1 + rng.randrange(prompts), rng.choice([1, 8, 40, 200])
                if n == 200 and rng.random() < 0.8:
                    n = 17
                ids = tokens(p, n) + [7] * rng.choice([0, 3, 16])
                x, y = a(ids), b(ids)
                other += x != y
                none += not any(w["device_blocks"] for w in x["workers"]) if "workers" in x else 1
            tap.same((other, none), (0, 0), f"{samples} prompts have the same overlaps at both nodes, none is unknown")
            tap.same(second.ctl("check")[0], 0, "kvpickctl check finds no fault")
        for e in engines:
            e.close()


src = Source()
round_trip(src)
gate(src)
hostile(src)
killed(src)
warm_up(src)
lost_index(src)
vectors()
src.close()
same_answers(*((1000000, 10000) if LONG else (48000, 400)))
sys.exit(tap.done())
