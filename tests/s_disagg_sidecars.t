#!/usr/bin/env python3
"""Random sagas the whole way: pickers, sidecars and simulated engines of all three protocols as processes, requests that
are broken off at every place, engines that fail in every way, pickers and sidecars that are killed while all this is under
way. No plan is shown with one leg, no booking stays, no leg runs on. KVP_SEED replays the choices; KVP_LONG=1 runs ten
thousand."""
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import pd
from disagg import DEST, PREFILLER, Disagg, ask
from envoy import RESPONSE_BODY, RESPONSE_HEADERS, body, headers
from epp import CHAT, MODEL, SSE, Renderer, chat
from node import BUILD, SLOW, Tap, call, wait_for

SEED = int(os.environ.get("KVP_SEED", str(random.randrange(1 << 30))))
LONG = os.environ.get("KVP_LONG") == "1"
SAGAS = 10000 if LONG else 900 // SLOW
CLIENTS = 8
KILL_EVERY = 25 // SLOW
ADAPTER = {"vllm": "vllm_nixl", "sglang": "sglang", "trtllm": "trtllm"}
# Protocol, what an engine does instead of an answer, which engine.
ROUNDS = [("vllm", "reset", "prefill"), ("sglang", "cut", "decode"), ("trtllm", "error", "prefill"),
          ("vllm", "hang", "decode"), ("sglang", "error", "prefill"), ("trtllm", "bad", "prefill"),
          ("vllm", "bad", "prefill"), ("sglang", "hang", "prefill"), ("trtllm", "reset", "decode"),
          ("vllm", "cut", "decode")]
ROOM = {"max_num_batched_tokens": 64}
RENDERER = Renderer()
tap = Tap()


class Engines:
    """Two engines that prefill and two that decode, with a fault."""

    def __init__(self, protocol, fault, role):
        self.proc = subprocess.Popen(
            [f"{BUILD}/kvpick-sim", "--die-with-parent", "--model", MODEL, "--engines", "4", "--pd", protocol,
             "--pd-prefill", "2", "--time-scale", "20", "--kv-events", "off", "--block-size", "4", "--blocks", "50000",
             "--pd-fault", fault, "--pd-fault-role", role, "--pd-fault-every", "9"],
            stdout=subprocess.PIPE, text=True)
        self.ports = []
        for line in self.proc.stdout:
            if line.startswith("ready"):
                break
            self.ports.append(int(line.split("http=")[1].split()[0].rsplit(":", 1)[1]))

    def running(self):
        return sum(x["running_requests"] + x["waiting_requests"]
                   for x in (call(p, "GET", "/stats")[1] for p in self.ports))

    def close(self):
        self.proc.terminate()
        self.proc.wait(20 * SLOW)
        self.proc.stdout.close()


class Guarded:
    """A sidecar that comes again on its port after each death."""

    def __init__(self, engine, adapter):
        self.engine, self.adapter, self.port = engine, adapter, None
        self.start()

    def start(self):
        for _ in range(100):
            env = {"DYN_SIDECAR_PORT": self.port} if self.port else {}
            now = pd.Sidecar(self.engine, self.adapter, wait=False, DYN_SIDECAR_READ_TIMEOUT_MS=300 * SLOW,
                             DYN_SIDECAR_CLIENT_BODY_TIMEOUT_MS=300 * SLOW, **env)
            self.port = now.port = self.port or now.port
            if wait_for(lambda s=now: s.proc.poll() is not None or s.up(), 10) and now.proc.poll() is None:
                self.now = now
                return
            now.stop()  # the kernel has not closed the port of the killed one yet
        raise RuntimeError(now.log.decode())

    def kill(self):
        self.now.signal(signal.SIGKILL)
        self.now.wait()
        self.start()


class Client(threading.Thread):
    """Sends requests the way a proxy does: to a picker first, then where it says."""

    def __init__(self, node, work, seed, done):
        super().__init__(daemon=True)
        self.node, self.work, self.rnd, self.done = node, work, random.Random(seed), done
        self.envoy = None
        self.half, self.wrong = [], []
        self.count = {}
        self.stage = ""

    def told(self, what):
        self.count[what] = self.count.get(what, 0) + 1

    def run(self):
        while True:
            try:
                n = self.work.get_nowait()
            except queue.Empty:
                break
            self.envoy = self.envoy or self.node.envoy()
            try:
                self.saga(n)
            except Exception as e:  # pylint: disable=broad-except
                self.wrong.append((repr(e), self.stage, self.node.roles_load(), self.node.ids()))
            self.done.put(n)
        if self.envoy:
            self.envoy.close()

    def saga(self, n):
        data = json.loads(chat(1 + n * 13, self.rnd.randint(1, 12)))
        data.update({"max_tokens": self.rnd.choice((1, 4, 20)), "stream": self.rnd.random() < 0.5})
        data = json.dumps(data).encode()
        s = ask(self.envoy, data, CHAT)
        try:
            if self.rnd.random() < 0.05:
                self.told("left before the answer")
                return
            self.stage = "waits for the headers' answer"
            head, pieces = s.reply(), []
            self.stage = "waits for the body's answer"
            while head and head.kind == "request_headers" and not (pieces and pieces[-1].end):
                pieces.append(s.reply())
                if not pieces[-1]:
                    head = None
            if not head:
                self.told("picker died")
                self.envoy.close()
                self.envoy = None
            elif head.kind != "request_headers":
                self.told(f"refused {head.status}")
            elif not (head.set.get(DEST) and head.set.get(PREFILLER)):
                self.half.append(head.set)
            elif self.rnd.random() < 0.05:
                self.told("left after the answer")
            else:
                self.engines(s, head.set, b"".join(p.piece for p in pieces))
        finally:
            s.reset()

    def engines(self, s, to, data):
        pairs = [("content-type", "application/json"), *to.items()]
        self.stage = "asks the sidecar"
        try:
            with pd.Client(int(to[DEST].split(":")[1]), timeout=15) as c:
                c.send("POST", "/v1/chat/completions", data, pairs)
                if self.rnd.random() < 0.1:
                    threading.Event().wait(self.rnd.random() * 0.03)
                    self.told("left the sidecar")
                    c.reset()
                    return
                if self.rnd.random() < 0.1:
                    c.head()
                    s.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n"))
                    self.told("left the response")
                    c.reset()
                    return
                reply = c.read()
        except (ConnectionError, AssertionError, ValueError):
            self.told("sidecar died")
            return
        self.told(f"{reply.status}" if reply.ended == "clean" else f"{reply.status} broken")
        s.send(headers(RESPONSE_HEADERS, [(":status", str(reply.status)), *SSE[1:]]),
               body(RESPONSE_BODY, reply.body, reply.ended == "clean"))
        if self.rnd.random() < 0.5 and reply.ended == "clean":
            self.stage = "waits for the end"
            s.half_close()
            while s.reply():
                pass


def extproc_again(node):
    return wait_for(lambda: len(node.children().get("kvpick-extproc", [])) == 2, 20)


def play(node, clients, work_cnt, sidecars, done, rnd):
    """Kills one process after every so many sagas. How often: (pickers, sidecars)."""
    killed = [0, 0]
    for n in range(1, work_cnt + 1):
        done.get(timeout=60 * SLOW)
        if n % KILL_EVERY or n == work_cnt:
            continue
        if rnd.random() < 0.4 and extproc_again(node):
            try:
                os.kill(rnd.choice(node.pids()), signal.SIGKILL)
                killed[0] += 1
            except ProcessLookupError:
                pass  # the one killed before, just reaped
        else:
            rnd.choice(sidecars).kill()
            killed[1] += 1
    for c in clients:
        c.join(60 * SLOW)
    return killed


def sagas(node, protocol, fault, role, cnt):
    name = f"{protocol}, {role} engines with {fault}"
    rnd = random.Random(f"{SEED} {name}")
    engines = Engines(protocol, fault, role)
    sidecars = [Guarded(p, ADAPTER[protocol]) for p in engines.ports[2:]]
    node.write([(i, "prefill", f"127.0.0.1:{p}", ROOM)
                for i, p in enumerate(engines.ports[:2], node.base)] +
               [(i, "decode", f"127.0.0.1:{x.port}", ROOM)
                for i, x in enumerate(sidecars, node.base + 10)])
    node.base += 20
    node.settled()
    work, done = queue.Queue(), queue.Queue()
    for i in range(cnt):
        work.put(i)
    clients = [Client(node, work, f"{SEED} {name} {i}", done) for i in range(CLIENTS)]
    for c in clients:
        c.start()
    killed = play(node, clients, cnt, sidecars, done, rnd)
    count = {}
    for c in clients:
        for what, n in c.count.items():
            count[what] = count.get(what, 0) + n
    print(f"# {name}: {cnt} sagas, {killed[0]} pickers and {killed[1]} sidecars killed, {dict(sorted(count.items()))}")
    tap.same([w for c in clients for w in c.wrong], [], f"{name}: each of {cnt} sagas ends in a way of its own")
    tap.same([h for c in clients for h in c.half], [], f"{name}: no plan is shown with one leg")
    tap.ok(count.get("200", 0) > cnt // 10, f"{name}: {count.get('200')} go all the way", count)
    tap.ok(wait_for(lambda: not node.roles_load() and not node.ids(), 20), f"{name}: no load and no booking is left",
           (node.roles_load(), node.ids()))
    tap.ok(wait_for(lambda: not engines.running(), 10), f"{name}: no leg is left running", engines.running())
    tap.ok(wait_for(lambda: all(x.now.metric("requests_inflight") == 0 for x in sidecars), 5),
           f"{name}: no sidecar has a request left")
    tap.same([x.now.stop() for x in sidecars], [0, 0], f"{name}: sidecars end with 0")
    tap.ok(extproc_again(node), f"{name}: both pickers are there")
    engines.close()
    return killed


def main():
    print(f"# KVP_SEED={SEED}")
    rounds = ROUNDS if LONG else ROUNDS[:3]
    with Disagg(RENDERER, [(1, "prefill", "127.0.0.1:9", ROOM), (11, "decode", "127.0.0.1:9", ROOM)], env={
            "DYN_ROUTER_QUEUE_THRESHOLD": "1.0", "DYN_EPP_MAX_NUM_BATCHED_TOKENS": "64"}) as node:
        node.base = 100
        killed = [sagas(node, *r, SAGAS // len(rounds)) for r in rounds]
        tap.ok(all(sum(k) for k in zip(*killed)), f"pickers and sidecars were killed {killed}")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    return tap.done()


sys.exit(main())
