#!/usr/bin/env python3
"""Replica sync with real processes and sockets: recorded scenarios into a node, nodes among each other, membership,
what a bare subscriber reads of a node's bookings, kvpick-peer killed under load."""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import replica
from node import Node, Tap, free_port, wait_for, worker
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
        dropped = seen.get("malformed", 0) + replica.counter(node, "peer_mesh_bad_frames")
        tap.ok(wait_for(lambda: seen.get("malformed", 0) + replica.counter(node, "peer_mesh_bad_frames") ==
                        len(cases) - good), "those to be dropped are counted", f"{dropped} of {len(cases) - good}")


TESTS = [scenarios, decode_cases]
for t in TESTS:
    if not sys.argv[1:] or t.__name__ in sys.argv[1:]:
        t()
sys.exit(tap.done())
