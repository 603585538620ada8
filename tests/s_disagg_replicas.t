#!/usr/bin/env python3
"""Two Endpoint Pickers with prefill and decode workers in network namespaces of their own, each the other's replica: a
pair that one books loads workers of both roles at the other, each role by a port of its own, and is free there when it is
here, also after the death of the process that booked it. Runs itself again inside namespaces of its own; skipped where
that is not permitted. Nothing leaves the machine: the bridge has no way out."""
import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from disagg import DEST, PREFILLER, Disagg, uuid_of
from envoy import RESPONSE_BODY, RESPONSE_HEADERS, Envoy, body, headers
from epp import COMPLETIONS, SSE, Renderer, prompt, routed
from netns import host, plug, run
from node import Tap, wait_for

HTTP, SYNC, PREFILL_SYNC, DECODE_SYNC, EPP = 8092, 9092, 9094, 9095, 9002
POOL = [(1, "prefill", "10.0.0.21:8000"), (2, "prefill", "10.0.0.22:8000"),
        (7, "decode", "10.0.0.7:8000"), (8, "decode", "10.0.0.8:8000")]
AT = {w[2]: w[0] for w in POOL}
tap = Tap()


class Replica(Disagg):
    """A node in a network namespace of its own: n<i>, 10.77.0.<10 + i>."""

    def __init__(self, i, renderer):
        self.i, self.host = i, host(i)
        plug(i)
        super().__init__(renderer, POOL, env={
            "KVPICK_REPLICA_SYNC_PORT": str(SYNC), "KVPICK_REPLICA_SYNC_PEERS": f"tcp://10.77.0.{11 - i}:{SYNC}",
            "KVPICK_EPP_PORT": str(EPP)})
        self.before = ("ip", "netns", "exec", f"n{i}")
        self.port, self.epp_port = HTTP, EPP
        self.args[self.args.index("--port") + 1] = str(HTTP)
        self.args[self.args.index("--bind") + 1] = "0.0.0.0"

    def envoy(self):
        return Envoy(f"{self.host}:{EPP}")

    def role_ids(self):
        return sorted(uuid_of(i)[1] for i in self.ids())

    def ports(self):
        """{port: connections to the other node's publisher}"""
        text = subprocess.run(["ip", "netns", "exec", f"n{self.i}", "cat", "/proc/net/tcp", "/proc/net/tcp6"],
                              check=True, capture_output=True, text=True).stdout
        rows = [line.split() for line in text.splitlines()]
        return {p: sum(r[3] == "01" and r[2].endswith(f":{p:04X}") for r in rows)
                for p in (SYNC, PREFILL_SYNC, DECODE_SYNC)}


def mirrored(here, there, what):
    """The other node sees the same load, worker by worker: (prefill tokens, blocks, requests)."""
    return tap.ok(wait_for(lambda: here.roles_load() == there.roles_load() and here.ids() == there.ids()), what,
                  (here.roles_load(), there.roles_load(), here.ids(), there.ids()))


def one_pair(here, there, name, first):
    envoy = here.envoy()
    s, head, _ = routed(envoy, COMPLETIONS, prompt(first, 5))
    p, d = AT[head.set[PREFILLER]], AT[head.set[DEST]]
    want = {p: (20, 5, 1), d: (0, 5, 1)}
    tap.ok(wait_for(lambda: there.roles_load() == want), f"{name}: a pair loads both roles there",
           (there.roles_load(), want))
    tap.same(there.role_ids(), ["decode", "prefill"], f"{name}: a booking a role")
    tap.same(there.ids(), here.ids(), f"{name}: under the ids that they have here")
    # what is loaded there is avoided there
    other = there.envoy()
    t, head, _ = routed(other, COMPLETIONS, prompt(first + 1, 5))
    tap.same((AT[head.set[PREFILLER]], AT[head.set[DEST]]), (3 - p, 15 - d),
             f"{name}: the other node takes the other worker of each role")
    mirrored(there, here, f"{name}: and tells of it")
    t.reset()
    tap.ok(wait_for(lambda: there.roles_load() == want and here.roles_load() == want),
           f"{name}: until it ends", (here.roles_load(), there.roles_load()))
    s.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n"))
    tap.ok(wait_for(lambda: there.roles_load() == {d: (0, 5, 1)}),
           f"{name}: the first byte frees prefill there, and decode not", there.roles_load())
    tap.same(there.role_ids(), ["decode"], f"{name}: one booking is left")
    s.send(body(RESPONSE_BODY, b"data: [DONE]\n\n", True))
    tap.ok(wait_for(lambda: not there.roles_load() and not there.ids()), f"{name}: the end frees decode there",
           there.roles_load())
    s.reset()
    envoy.close()
    other.close()


def killed(here, there):
    envoys = [here.envoy() for _ in range(4)]
    streams = [routed(e, COMPLETIONS, prompt(100 + 10 * i, 3))[0] for i, e in enumerate(envoys)]
    mirrored(here, there, "four pairs here are four there")
    tap.same(there.role_ids(), ["decode"] * 4 + ["prefill"] * 4, "eight bookings")
    for pid in here.pids():
        os.kill(pid, signal.SIGKILL)
    for n, name in ((here, "here"), (there, "there")):
        tap.ok(wait_for(lambda n=n: not n.roles_load() and not n.ids(), 20),
               f"the processes that booked them are killed: nothing is left {name}", (n.roles_load(), n.ids()))
    for s in streams:
        s.reset()
    for e in envoys:
        e.close()


def inside():
    renderer = Renderer()
    with Replica(0, renderer) as a, Replica(1, renderer) as b:
        for n in (a, b):
            tap.ok(wait_for(lambda n=n: n.ports() == {SYNC: 1, PREFILL_SYNC: 1, DECODE_SYNC: 1}, 20),
                   f"node {n.i} follows the other on a port for each role", n.ports())

        def heard(here, there):
            envoy = here.envoy()
            s, _, _ = routed(envoy, COMPLETIONS, prompt(1, 3))
            got = wait_for(lambda: there.role_ids() == ["decode", "prefill"], 1)
            s.reset()
            envoy.close()
            return wait_for(lambda: not here.ids() and not there.ids()) and got
        for here, there in ((a, b), (b, a)):
            tap.ok(wait_for(lambda x=here, y=there: heard(x, y), 30), f"node {there.i} hears of pairs", there.ids())
        one_pair(a, b, "from 0 to 1", 10)
        one_pair(b, a, "from 1 to 0", 20)
        killed(a, b)
        for n in (a, b):
            tap.same(n.ctl("check")[0], 0, f"node {n.i}: kvpickctl check finds no fault")
    return tap.done()


run(inside)
