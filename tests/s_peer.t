#!/usr/bin/env python3
"""Replica sync with real processes and sockets: recorded scenarios into a node, nodes among each other, membership,
what a bare subscriber reads of a node's bookings, kvpick-peer killed under load."""
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import replica
from node import BUILD, Node, Tap, free_port, wait_for, worker
from replica import Peer

NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
tap = Tap()
WORDS = {  # what became of an event: counters of it
    "applied": {"added", "marked", "freed"}, "applied+prefill_done": {"added_done"}, "unchanged": {"unchanged"},
    "tombstoned": {"tombstoned"}, "pending": {"pended"}, "dropped:unknown_partition": {"unknown_partition"},
    "dropped:block_size": {"block_size"}, "dropped:unknown_worker": {"unknown_worker"},
    "dropped:duplicate": {"duplicate"}, "dropped:tombstone": {"late"}, "ignored:worker_mismatch": {"mismatch"}}


class Replica(Node):
    """A node with replica sync."""

    def __init__(self, *args, env=None):
        self.sync = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.sync}"
        super().__init__("--replica-sync-port", str(self.sync), *args, env=dict(NO_EVENTS, **(env or {})))

    def workers(self, *ids, **extra):
        for i in ids:
            self.call("POST", "/workers", worker(i, **extra))

    def checked(self, name):
        code, text = self.ctl("check")
        tap.ok(code == 0, f"{name}: kvpickctl check finds no fault", text)


def load_rows(rows):
    return {(r["worker_id"], r["dp_rank"]): (r["active_requests"], r["active_decode_blocks"],
                                             r["active_prefill_tokens"]) for r in rows}


def scenario(sc):
    """The steps of a recorded scenario over a real socket; loads and outcome are compared after every one."""
    at, problems = sc["receiver"], []
    with Replica() as node, Peer() as peer:
        for worker_id, rank in at["workers"]:
            node.workers(worker_id, block_size=at["block_size"], model_name=at["model_name"],
                         routing_group=at["routing_group"], data_parallel_start_rank=rank)
        replica.linked(node, peer)
        want, before = {}, {}
        for i, step in enumerate(sc["steps"]):
            if step.get("action") == "delete_worker":
                node.call("DELETE", f"/workers/{step['worker_id']}")
            elif step.get("action") == "register_worker":
                node.workers(step["worker_id"], block_size=at["block_size"], model_name=at["model_name"],
                             routing_group=at["routing_group"])
            else:
                peer.send(replica.TOPIC, bytes.fromhex(step["payload_hex"]))
                now = wait_for(lambda: (lambda e: e if e != before else None)(replica.events(node)))
                new = {k for k in now or {} if now[k] != before.get(k)}
                if not new <= WORDS[step["result"]] or not new:
                    problems.append(f"step {i}: {step['result']}, got {new}")
                before = now
            want = load_rows(step.get("loads_after", [])) or want
            get = lambda: replica.loads(node, at["model_name"], at["routing_group"])
            if not wait_for(lambda: all(get().get(k, (0, 0, 0)) == v for k, v in want.items())):
                problems.append(f"step {i}: loads {get()}, want {want}")
        tap.ok(not problems, f"{sc['name']} over a socket: {sc['description']}", "\n".join(problems))
        node.checked(sc["name"])


def scenarios():
    with open("tests/vectors/replica_sync.json", encoding="utf-8") as f:
        vectors = json.load(f)
    for sc in vectors["scenarios"]:
        # By the clock, and with this node's own number: tests/v_replica_apply.c.
        if all(s["t"] < 100 and s.get("result") != "dropped:self" for s in sc["steps"]):
            scenario(sc)


def decode_cases():
    """What must be dropped is dropped and counted, and the connection goes on."""
    with open("tests/vectors/replica_sync.json", encoding="utf-8") as f:
        cases = json.load(f)["decode_cases"]
    with Replica() as node, Peer() as peer:
        node.workers(1)
        replica.linked(node, peer)
        good = 0
        for c in cases:
            if bytes.fromhex(c["frames_hex"][0]).startswith(replica.TOPIC):
                peer.send(*map(bytes.fromhex, c["frames_hex"]))
                good += c["accept"]
        peer.event(data=replica.add([1, 2], 8), rid="last")
        tap.ok(wait_for(lambda: replica.loads(node)[1, 0] == (1, 2, 8)), "behind them, an event is applied")
        seen = replica.events(node)
        tap.same(seen.get("unknown_partition"), good, "those to be accepted came through")
        dropped = seen.get("malformed", 0) + node.counted("peer_mesh_bad_frames")
        tap.ok(wait_for(lambda: seen.get("malformed", 0) + node.counted("peer_mesh_bad_frames") ==
                        len(cases) - good), "those to be dropped are counted", f"{dropped} of {len(cases) - good}")


def published():
    """A bare subscriber reads of a node's bookings exactly the bytes that another implementation would send."""
    with Replica() as node, Peer() as peer:
        node.workers(7, model_name="m", routing_group="g", data_parallel_start_rank=1, data_parallel_size=2)
        peer.listen(node.sync)
        at = dict(model="m", group="g", size=4, worker=7, rank=2)
        probe = lambda i: (node.call("POST", "/reservations", {"selection_id": f"p{i}", "model_name": "m",
                                                               "routing_group": "g", "worker_id": 7, "dp_rank": 2,
                                                               "block_hashes": [9], "sequence_hashes": [9],
                                                               "isl_tokens": 4}), peer.recv(100))[1]
        tap.ok(any(probe(i) for i in range(100)), "a subscriber is heard")
        while peer.recv(200):
            pass
        big = -(1 << 62)
        node.call("POST", "/reservations", {"selection_id": "550e8400-e29b-41d4-a716-446655440000", "model_name": "m",
                                            "routing_group": "g", "worker_id": 7, "dp_rank": 2,
                                            "block_hashes": [1, 2], "sequence_hashes": [300, big],
                                            "isl_tokens": 400, "effective_prefill_tokens": 384,
                                            "expected_output_tokens": 70000, "lora_name": "ad"})
        frames = peer.recv()
        router = replica.unpack(frames[1])["event"]["router_id"]
        tap.ok(router != 0, "the router id is not 0")
        rid = "550e8400-e29b-41d4-a716-446655440000"
        told = dict(at, rid=rid, router=router, lora="ad")
        want = replica.event(data=replica.add([300, big + (1 << 64)], 384, output=70000), **told)
        tap.same([f.hex() for f in frames], [replica.TOPIC.hex(), want.hex()], "a booking, byte by byte")
        node.call("POST", f"/reservations/{rid}/output_block", {})
        node.call("POST", f"/reservations/{rid}/prefill_complete", {})
        frames = peer.recv()
        tap.same(frames[1].hex(), replica.event(data="MarkPrefillCompleted", **told).hex(), "the end of its prefill")
        node.call("POST", f"/reservations/{rid}/prefill_complete", {})
        tap.same(peer.recv()[1].hex(), frames[1].hex(), "once more when it is repeated")
        tap.same(node.call("DELETE", f"/reservations/{rid}")[0], 200, "freed")
        tap.same(peer.recv()[1].hex(), replica.event(data="Free", **told).hex(), "its end")
        node.call("DELETE", f"/reservations/{rid}")
        node.call("POST", f"/reservations/{rid}/prefill_complete", {})
        tap.same(peer.recv(300), None, "what answers 404 is not told")
        node.call("POST", "/select_and_reserve", {"selection_id": "s", "model_name": "m", "routing_group": "g",
                                                  "token_ids": list(range(9))})
        data = replica.unpack(peer.recv()[1])["event"]["data"]["AddRequest"]
        tap.same((len(data["token_sequence"]), data["prefill_load_hint"]["initial_effective_prefill_tokens"],
                  data["track_prefill_tokens"], data["expected_output_tokens"]), (2, 9, True, None), "a selection")
        node.call("DELETE", "/workers/7")
        tap.same(peer.recv(300), None, "bookings that end with their worker are not told")
        node.checked("published")


def pair(a, b):
    """Two nodes follow each other; both have heard the other one."""
    a.call("POST", "/replica_sync/register_peer", {"endpoint": b.endpoint})
    b.call("POST", "/replica_sync/register_peer", {"endpoint": a.endpoint})
    for i, (x, y) in enumerate(((a, b), (b, a))):
        heard = lambda: y.counted("peer_mesh_received")
        x.call("POST", "/select_and_reserve", {"selection_id": f"hello{i}", "token_ids": [1] * 4})
        prefill = lambda: x.call("POST", f"/reservations/hello{i}/prefill_complete", {})
        if not wait_for(lambda: (prefill(), heard())[1]):
            raise RuntimeError("nodes do not hear each other")
        x.call("DELETE", f"/reservations/hello{i}")
    if not wait_for(lambda: replica.total(a) == replica.total(b) == (0, 0, 0)):
        raise RuntimeError("loads are left")


@contextlib.contextmanager
def both(*args, env=None, ids=(1, 2), **extra):
    """Two nodes with the same workers that follow each other."""
    with Replica(*args, env=env) as a, Replica(*args, env=env) as b:
        for n in (a, b):
            n.workers(*ids, **extra)
        pair(a, b)
        yield a, b


def mirrored():
    """What one node books, the other one has, too, and each may end it."""
    with both() as (a, b):
        a.call("POST", "/reservations", {"selection_id": "r", "worker_id": 1, "dp_rank": 0, "token_ids": [1, 2, 3, 4],
                                         "effective_prefill_tokens": 4})
        tap.ok(wait_for(lambda: replica.loads(b)[1, 0] == (1, 1, 4)), "B shows 1 request, 1 block, 4 tokens")
        a.call("POST", "/reservations/r/prefill_complete", {})
        tap.ok(wait_for(lambda: replica.loads(b)[1, 0] == (1, 1, 0)), "prefill complete on A: 1, 1, 0")
        for path, body in (("/select_and_reserve", {"selection_id": "r", "token_ids": [5] * 4}),
                           ("/reservations", {"selection_id": "r", "worker_id": 2, "dp_rank": 0,
                                              "token_ids": [5] * 4})):
            tap.same(b.call("POST", path, body)[0], 409, f"a mirrored id is taken: {path}")
        a.call("POST", "/reservations/r/output_block", {})
        tap.same((replica.loads(a)[1, 0], replica.loads(b)[1, 0]), ((1, 2, 0), (1, 1, 0)),
                 "output blocks count where they were told")
        a.call("DELETE", "/reservations/r")
        tap.ok(wait_for(lambda: replica.loads(b)[1, 0] == (0, 0, 0)), "free on A: 0, 0, 0")
        a.call("POST", "/reservations", {"selection_id": "x", "worker_id": 2, "dp_rank": 0, "token_ids": [7] * 12,
                                         "effective_prefill_tokens": 12, "lora_name": "l"})
        wait_for(lambda: replica.loads(b)[2, 0][0])
        tap.same(b.call("POST", "/reservations/x/output_block", {})[0], 200, "B adds an output block to A's booking")
        tap.same(b.call("POST", "/reservations/x/prefill_complete", {})[0], 200, "B ends A's prefill")
        tap.ok(wait_for(lambda: replica.loads(a)[2, 0] == (1, 3, 0)), "A sees it")
        tap.same(b.call("DELETE", "/reservations/x")[0], 200, "B frees A's booking")
        tap.ok(wait_for(lambda: replica.total(a) == (0, 0, 0)), "A sees that, too")
        tap.same(a.call("DELETE", "/reservations/x")[0], 404, "and does not know it any more")
        tap.same(a.call("POST", "/reservations", {"selection_id": "y", "worker_id": 9, "dp_rank": 0,
                                                  "token_ids": [1] * 4})[0], 404, "a booking that fails")
        told = a.counted("any_lifecycle_enqueued")
        a.call("POST", "/select", {"token_ids": [3] * 8})
        tap.same(a.counted("any_lifecycle_enqueued"), told, "and a selection are not told")
        a.checked("mirrored A")
        b.checked("mirrored B")
        for i in range(20):
            a.call("POST", "/select_and_reserve", {"selection_id": f"e{i}", "token_ids": [i] * 8})
        tap.ok(wait_for(lambda: replica.total(b)[0] == 20), "twenty bookings of A")
        for i in range(20):
            a.call("DELETE", f"/reservations/e{i}")
        a.proc.send_signal(signal.SIGTERM)
        tap.ok(wait_for(lambda: replica.total(b) == (0, 0, 0)), "what a node frees as its last is told")


def converge():
    """Random traffic on both sides, each ending what either has begun: the same loads in the end, then none."""
    import random
    rnd = random.Random(int(os.environ.get("KVP_SEED", "1")))
    with both() as (a, b):
        live = []
        for i in range(400):
            n = rnd.choice((a, b))
            what = rnd.random()
            if what < 0.5 or not live:
                rid = f"c{i}"
                n.call("POST", "/select_and_reserve", {"selection_id": rid,
                                                       "token_ids": [rnd.randrange(5)] * rnd.randrange(4, 40)})
                live.append(rid)
            elif what < 0.7:
                n.call("POST", f"/reservations/{rnd.choice(live)}/prefill_complete", {})
            else:
                rid = rnd.choice(live)
                if n.call("DELETE", f"/reservations/{rid}")[0] == 200:
                    live.remove(rid)
        tap.ok(wait_for(lambda: replica.loads(a) == replica.loads(b)), "both nodes show the same loads",
               f"{replica.loads(a)} {replica.loads(b)}")
        tap.same(replica.total(a)[0], len(live), "of all that is live")
        for rid in live:
            rnd.choice((a, b)).call("DELETE", f"/reservations/{rid}")
        tap.ok(wait_for(lambda: replica.total(a) == replica.total(b) == (0, 0, 0)), "and none in the end",
               f"{replica.total(a)} {replica.total(b)}")
        a.checked("converge A")
        b.checked("converge B")


def members():
    """Peers come and go while the node runs; a node may be its own peer."""
    with Replica() as node, Peer() as peer:
        node.workers(1)
        tap.same(node.counted("peer_mesh_peers"), 0, "nobody is listened to")
        replica.linked(node, peer)
        tap.ok(wait_for(lambda: node.counted("peer_mesh_peers") == 1), "a registered peer is")
        tap.ok(peer.at in node.ctl("peers")[1], "kvpickctl shows it")
        peer.event(data=replica.add([1], 4), rid="a")
        tap.ok(wait_for(lambda: replica.loads(node)[1, 0] == (1, 1, 4)), "its events count")
        tap.same(node.call("POST", "/replica_sync/deregister_peer", {"endpoint": peer.at})[0], 200, "it is removed")
        for i in range(50):
            peer.event(data=replica.add([i + 2], 4), rid=f"b{i}")
        tap.ok(not wait_for(lambda: replica.loads(node)[1, 0] != (1, 1, 4), 0.3), "nothing of it counts any more")
        tap.same(node.counted("peer_mesh_peers"), 0, "nobody is listened to")
        replica.linked(node, peer)
        peer.event(data="Free", rid="a")
        tap.ok(wait_for(lambda: replica.total(node) == (0, 0, 0)), "registered again, it is heard")
        tap.same(node.call("POST", "/replica_sync/register_peer", {"endpoint": "tcp://*:9092"})[0], 400,
                 "a wildcard is no peer")
        node.call("POST", "/replica_sync/register_peer", {"endpoint": node.endpoint})
        wait_for(lambda: node.counted("peer_mesh_peers") == 2)
        own = lambda: replica.events(node).get("own", 0)
        node.call("POST", "/select_and_reserve", {"selection_id": "own", "token_ids": [1] * 8})
        again = lambda: (node.call("POST", "/reservations/own/prefill_complete", {}), own())[1]
        tap.ok(wait_for(again), "a node that is its own peer drops its own events")
        seen = own()
        node.call("DELETE", "/reservations/own")
        tap.ok(wait_for(lambda: own() > seen), "all of them")
        tap.same(replica.total(node), (0, 0, 0), "and counts nothing twice")
        node.checked("members")


def ipv6():
    probe = socket.socket(socket.AF_INET6)
    try:
        probe.bind(("::1", 0))
    except OSError:
        tap.ok(True, "peers by IPv6 # SKIP this host has no IPv6")
        return
    finally:
        probe.close()
    with Replica() as a, Replica("--replica-sync-peers", f"tcp://[::1]:{a.sync}") as b:
        for n in (a, b):
            n.workers(1)
        more = lambda i=[0]: i.append(i[-1] + 1) or a.call("POST", "/select_and_reserve", {
            "selection_id": f"v{i[-1]}", "token_ids": [1] * 4})
        tap.ok(wait_for(lambda: (more(), replica.total(b)[0])[1]), "a configured peer by IPv6 is heard")


def waiting():
    """A request that waits at B because of A's load goes when A frees it."""
    with both(env={"DYN_ROUTER_QUEUE_THRESHOLD": "0.1"}, ids=[3], max_num_batched_tokens=100) as (a, b):
        a.call("POST", "/reservations", {"selection_id": "big", "worker_id": 3, "dp_rank": 0,
                                         "token_ids": [1] * 80, "effective_prefill_tokens": 80})
        wait_for(lambda: replica.total(b)[0] == 1)
        got = []
        t = threading.Thread(target=lambda: got.append(b.call("POST", "/select_and_reserve", {
            "selection_id": "w", "token_ids": [2] * 20})))
        t.start()
        pending = lambda: b.call("GET", "/loads")[1][0]["pending_count"]
        tap.ok(wait_for(lambda: pending() == 1), "a request waits at B")
        tap.ok(not got, "for A's load")
        a.call("DELETE", "/reservations/big")
        t.join(10)
        tap.ok(got and got[0][0] == 200, "A frees it: B's request goes", f"{got}")
        b.call("DELETE", "/reservations/w")
        tap.ok(wait_for(lambda: replica.total(a) == replica.total(b) == (0, 0, 0)), "no load is left")
        b.checked("waiting")


def sessions():
    """A session that A has bound goes to the same worker at B."""
    with both("--session-affinity-ttl-secs", "600") as (a, b):
        for n in (a, b):
            n.workers(3, 4, 5, 6, 7, 8)
        for i in range(6):
            ask = {"token_ids": [i * 10 + j for j in range(12)], "session_id": f"s{i}"}
            at = a.call("POST", "/select_and_reserve", dict(ask, selection_id=f"sa{i}"))[1]["worker_id"]
            wait_for(lambda: b.counted("peer_binding_applied") > i)
            got = b.call("POST", "/select_and_reserve", dict(ask, selection_id=f"sb{i}"))[1].get("worker_id")
            tap.same(got, at, f"session {i} sticks")
        for i in range(6):
            a.call("DELETE", f"/reservations/sa{i}")
            b.call("DELETE", f"/reservations/sb{i}")
        tap.ok(wait_for(lambda: replica.total(a) == replica.total(b) == (0, 0, 0)), "no load is left")
        for n in (a, b):
            n.checked("sessions")


def killed():
    """kvpick-peer killed under load: it comes back, and what was lost ends by age."""
    age = 3
    with both(env={"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": str(age)}) as (a, b):
        stop, done = threading.Event(), []

        def client(n, name):
            i = 0
            while not stop.is_set():
                rid = f"{name}{i}"
                n.call("POST", "/select_and_reserve", {"selection_id": rid, "token_ids": [i % 7] * 16})
                n.call("POST", f"/reservations/{rid}/prefill_complete", {})
                if n.call("DELETE", f"/reservations/{rid}")[0] == 200:
                    done.append(rid)
                i += 1
        threads = [threading.Thread(target=client, args=(n, f"{n.port}{x}")) for n in (a, b) for x in "xy"]
        for t in threads:
            t.start()
        for n in (a, b, a):
            old = n.children()["kvpick-peer"]
            seen = len(done)
            wait_for(lambda: len(done) > seen + 100)
            os.kill(old[0], signal.SIGKILL)
            back = lambda: n.children().get("kvpick-peer", old) != old
            tap.ok(wait_for(back), "a killed kvpick-peer is started again")
        heard = lambda n: replica.events(n).get("added", 0)
        was = [heard(n) for n in (a, b)]
        tap.ok(wait_for(lambda: all(heard(n) > w for n, w in zip((a, b), was))), "and hears its peer again")
        stop.set()
        for t in threads:
            t.join()
        tap.ok(wait_for(lambda: replica.total(a) == replica.total(b) == (0, 0, 0), 2 * age + 60),
               "all loads end", f"{replica.loads(a)} {replica.loads(b)}")
        a.checked("killed A")
        b.checked("killed B")


def herd():
    """Two nodes, four idle workers, 400 prompts in turn, none ended: with sync each sees the load of both."""
    for sync in (True, False):
        with (both() if sync else contextlib.nullcontext((Replica().start(), Replica().start()))) as (a, b):
            for n in (a, b):
                n.workers(1, 2, 3, 4)
            chosen = {}
            for i in range(400):
                here, there = (a, b) if i % 2 else (b, a)
                at = here.call("POST", "/select_and_reserve", {
                    "selection_id": f"h{i}", "token_ids": [i * 8 + j for j in range(8)]})[1]["worker_id"]
                chosen[at] = chosen.get(at, 0) + 1
                if sync:
                    wait_for(lambda there=there, n=i + 1: replica.total(there)[0] == n)
            if sync:
                tap.ok(all(90 <= chosen.get(w, 0) <= 110 for w in (1, 2, 3, 4)), "with sync it spreads evenly",
                       f"{chosen}")
                tap.ok(wait_for(lambda: replica.loads(a) == replica.loads(b)), "both nodes see the same")
                tap.same((replica.total(a)[0], replica.total(b)[0]), (400, 400), "all of it")
            else:
                tap.same((replica.total(a)[0], replica.total(b)[0]), (200, 200), "without sync each sees its own")
                a.stop()
                b.stop()


def refused():
    """A sync port that somebody else has ends the start, with a line that names it."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        node = Node("--replica-sync-port", str(port), env=NO_EVENTS)
        node.proc = subprocess.Popen([f"{BUILD}/kvpick", "run", *node.args], env=node.env, stdout=node.log,
                                     stderr=node.log)
        code = node.proc.wait(20)
        text = node.log_text()
        tap.same(code, 2, "exit code 2")
        tap.ok(f"peer.listen port={port} " in text and "Address already in use" in text,
               "the log names the port", text)
    again = Node("--replica-sync-port", str(port), env=NO_EVENTS)
    with again:
        tap.ok(True, "the port is free again afterwards")
    for args, want in ((("--replica-sync-port", "0"), "KVPICK_REPLICA_SYNC_PORT"),
                       (("--replica-sync-peers", "tcp://127.0.0.1:1"),
                        "--replica-sync-peers requires --replica-sync-port")):
        out = subprocess.run([f"{BUILD}/kvpick", "run", "--run-dir", again.dir.name, *args], env=again.env,
                             capture_output=True, text=True, check=False, timeout=20)
        tap.ok(out.returncode == 2 and want in out.stdout + out.stderr, f"{' '.join(args)} is refused",
               out.stdout + out.stderr)


def many():
    """More peers than the soft limit of open files allows; each costs several."""
    nobody = free_port()
    peers = ",".join(f"tcp://127.0.1.{i}:{nobody}" for i in range(1, 151))
    with Node("--replica-sync-port", str(free_port()), "--replica-sync-peers", peers, env=NO_EVENTS,
              before=("prlimit", "--nofile=200:5000")) as node:
        tap.ok(wait_for(lambda: node.counted("peer_mesh_peers") == 150), "150 peers are listened to",
               node.counted("peer_mesh_peers"))
        tap.same(node.counted("peer_mesh_connect_failed"), 0, "whatever the soft limit of open files")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


TESTS = [scenarios, decode_cases, published, mirrored, converge, members, ipv6, waiting, sessions, killed, herd,
         refused, many]
for t in TESTS:
    if not sys.argv[1:] or t.__name__ in sys.argv[1:]:
        t()
sys.exit(tap.done())
