#!/usr/bin/env python3
"""What the replicas are told of the Endpoint Picker's bookings, message by message: a request from its pick to its end,
one that the proxy served elsewhere, clients that go away, a process that is killed and one that is stopped."""
import os
import signal
import sys
import uuid

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import replica
from envoy import RESPONSE_BODY, RESPONSE_HEADERS, SERVED, body, headers, metadata
from epp import COMPLETIONS, MODEL, SSE, Epp, Renderer, prompt, respond, routed, schedulable
from node import SLOW, Tap, free_port, wait_for, worker
from replica import Peer

LEASE_S = 2 * SLOW
tap = Tap()


class Ear:
    """The messages that a subscriber to the node gets, as (what, id, worker)."""

    def __init__(self, node, peer, port):
        self.peer, self.router = peer, None
        peer.listen(port)

        def probe():
            node.call("POST", "/reservations", {"selection_id": str(uuid.uuid4()), "worker_id": 1, "dp_rank": 0,
                                                "model_name": MODEL, "token_ids": [1, 2, 3, 4]})
            return self.next(100)
        tap.ok(wait_for(probe), "a subscriber is heard")
        while self.next(200):
            pass

    def next(self, ms=5000 * SLOW):
        frames = self.peer.recv(ms)
        if not frames:
            return None
        e = replica.unpack(frames[1])["event"]
        what = e["data"] if isinstance(e["data"], str) else "Add"
        if what == "Add":
            add = e["data"]["AddRequest"]
            what = ("Add", len(add["token_sequence"]), add["prefill_load_hint"]["initial_effective_prefill_tokens"])
        self.router = self.router or e["router_id"]
        if e["router_id"] != self.router:
            tap.ok(False, "all messages carry one router id", e)
        return what, e["request_id"], e["worker"]["worker_id"]


def number(destination):
    return int(destination.split(":")[0].rsplit(".", 1)[1])


def one_request(ear, envoy):
    s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 3))
    at = number(head.destination)
    what, rid, w = ear.next()
    tap.same((what, w), (("Add", 3, 12), at), "a pick: the booking, its blocks and tokens, at the picked worker")
    tap.ok(str(uuid.UUID(rid)) == rid, "under an id of its own", rid)
    s.send(headers(RESPONSE_HEADERS, SSE))
    s.reply()
    s.send(body(RESPONSE_BODY, b"data: 1\n\n"))
    s.reply()
    tap.same(ear.next(), ("MarkPrefillCompleted", rid, at), "the first of the response: its prefill is done")
    s.send(body(RESPONSE_BODY, b"data: [DONE]\n\n", True))
    s.reply()
    tap.same(ear.next(), ("Free", rid, at), "the last of it: its end")
    s.half_close()


def served_elsewhere(ear, envoy):
    s, head, _ = routed(envoy, COMPLETIONS, prompt(10, 3))
    at, other = number(head.destination), 3 - number(head.destination)
    _, rid, _ = ear.next()
    s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, f"10.0.0.{other}:8000")))
    s.reply()
    got = [ear.next(), ear.next()]
    tap.same(got, [("Free", rid, at), (("Add", 3, 12), rid + "~1", other)],
             "served by the other worker: the booking ends here and begins there, under a new id")
    respond(s, [b"x"])
    rest = [m for m in (ear.next(), ear.next()) if m]
    tap.same(rest[-1], ("Free", rid + "~1", other), "which ends, too")
    s.half_close()


def goes_away(ear, envoy):
    s, head, _ = routed(envoy, COMPLETIONS, prompt(20, 3))
    _, rid, w = ear.next()
    s.reset()
    tap.same(ear.next(), ("Free", rid, w), "the proxy resets a stream: the booking ends")


def killed(node, ear, envoys):
    streams = [routed(e, COMPLETIONS, prompt(30 + i, 3)) for i, e in enumerate(envoys)]
    ids = {ear.next()[1] for _ in streams}
    pids = node.children()["kvpick-extproc"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    got = [ear.next() for _ in streams]
    tap.same(({g and g[1] for g in got}, {g and g[0] for g in got}), (ids, {"Free"}),
             f"processes with {len(ids)} streams are killed: each booking ends")
    tap.ok(wait_for(lambda: node.log_text().count("extproc.run ") == 4), "others come in their place")


def at_rest(pids):
    """Whether all their threads sleep: what they were doing is done."""
    states = []
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii") as f:
                states.append(f.read().rsplit(")", 1)[1].split()[0])
    return set(states) == {"S"}


def stopped(node, ear, envoys):
    streams = [routed(e, COMPLETIONS, prompt(50 + i, 3)) for i, e in enumerate(envoys)]
    ids = {ear.next()[1] for _ in streams}
    pids = node.children()["kvpick-extproc"]
    tap.ok(wait_for(lambda: at_rest(pids)), "what the processes had to do is done")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    got = [ear.next() for _ in streams]
    tap.same(({g and g[1] for g in got}, {g and g[0] for g in got}), (ids, {"Free"}),
             f"processes with {len(ids)} streams are stopped: their leases run out, each booking ends")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for s, _, _ in streams:
        s.reset()
    tap.same(ear.next(500), None, "once")


sync = free_port()
env = {"DYN_ROUTER_USE_KV_EVENTS": "false", "KVPICK_LEASE_SECS": str(LEASE_S), "KVPICK_SLOT_STUCK_MS": "20000",
       "KVPICK_RING_UNBLOCK_MS": "30000"}
with Epp(Renderer(), "--replica-sync-port", str(sync), env=env) as picker, Peer() as subscriber:
    for i in (1, 2):
        picker.call("POST", "/workers", worker(i, model_name=MODEL))
    tap.ok(wait_for(lambda: schedulable(picker) == 2), "two workers")
    heard = Ear(picker, subscriber, sync)
    proxy = picker.envoy()
    one_request(heard, proxy)
    served_elsewhere(heard, proxy)
    goes_away(heard, proxy)
    killed(picker, heard, [picker.envoy() for _ in range(6)])
    stopped(picker, heard, [picker.envoy() for _ in range(6)])
    tap.same(picker.ctl("check")[0], 0, "kvpickctl check finds no fault")
sys.exit(tap.done())
