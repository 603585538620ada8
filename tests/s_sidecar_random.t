#!/usr/bin/env python3
"""Random clients and failing engines at a sidecar: whatever is asked, broken off, cut or refused, every complete request
gets an answer of its kind, and at the end no request, no connection and no memory is left. KVP_SEED replays; KVP_LONG=1
runs ten times as long."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, SLOW, Tap, call, wait_for
from pd import Client, Sidecar

tap = Tap()
SEED = int(os.environ.get("KVP_SEED", "1"))
REQUESTS = 2500 if os.environ.get("KVP_LONG") else 100
ADAPTER = {"vllm": "vllm_nixl", "sglang": "sglang", "trtllm": "trtllm"}
KNOWN = {200, 400, 404, 405, 408, 413, 431, 500, 501, 502, 503, 504}


def engines(proto, fault):
    proc = subprocess.Popen(
        [
            f"{BUILD}/kvpick-sim",
            "--die-with-parent",
            "--engines",
            "2",
            "--pd",
            proto,
            "--time-scale",
            "20",
            "--kv-events",
            "off",
            "--block-size",
            "16",
            "--blocks",
            "50000",
            "--pd-fault",
            fault,
            "--pd-fault-every",
            "7",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    ports = []
    for line in proc.stdout:
        if line.startswith("ready"):
            break
        ports.append(int(line.split("http=")[1].split()[0].rsplit(":", 1)[1]))
    return proc, ports


def body(rnd):
    value = {
        "model": "default",
        "messages": [{"role": "user", "content": f"{rnd.random()} " * rnd.choice((1, 20, 3000))}],
        "max_tokens": rnd.choice((1, 5, 60)),
        "stream": rnd.random() < 0.6,
    }
    text = json.dumps(value).encode()
    return rnd.choice((text, text, text, text, text, text[:-1], b"{}", b"[1]", b"", text.replace(b"default", b"other")))


class Clients:
    def __init__(self, port, prefill, rnd):
        self.port, self.prefill, self.rnd, self.wrong, self.done = port, prefill, rnd, [], 0

    def headers(self):
        r = self.rnd.random()
        target = {"x-prefiller-host-port": f"127.0.0.1:{self.prefill}"}
        return (
            target
            if r < 0.8
            else {} if r < 0.9 else {"x-prefiller-host-port": self.rnd.choice(("", "a", "127.0.0.1:1", "x.invalid:9"))}
        )

    def check(self, reply, what):
        self.done += 1
        if reply.status not in KNOWN or (
            reply.status >= 400 and reply.status not in (404, 405, 500) and not reply.body
        ):
            self.wrong.append((what, reply.status, reply.body[:200]))

    def whole(self):
        with Client(self.port) as c:
            for _ in range(self.rnd.randrange(1, 4)):
                c.send(
                    "POST",
                    "/v1/chat/completions",
                    body(self.rnd),
                    self.headers(),
                    chunked=self.rnd.choice((None, None, 7, 5000)),
                )
                reply = c.read()
                self.check(reply, "whole")
                if reply.header("connection") == "close" or reply.ended == "broken":
                    break

    def half(self):
        with Client(self.port) as c:
            c.send("POST", "/v1/chat/completions", body(self.rnd), self.headers())
            c.sock.shutdown(socket.SHUT_WR)
            self.check(c.read(), "half")

    def leaves(self):
        c = Client(self.port)
        data = body(self.rnd)
        c.send("POST", "/v1/chat/completions", data, self.headers(), length=len(data) + self.rnd.choice((0, 0, 9)))
        time.sleep(self.rnd.random() * 0.03)
        if self.rnd.random() < 0.5:
            c.reset()
        else:
            c.drop()

    def garbage(self):
        with Client(self.port) as c:
            c.sock.sendall(
                self.rnd.choice(
                    (
                        b"\x16\x03\x01\x02",
                        b"GET\r\n\r\n",
                        b"POST /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nqq",
                        b"GET /v1/" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n",
                        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    )
                )
            )
            if self.rnd.random() < 0.5:
                c.sock.shutdown(socket.SHUT_WR)

    def pipeline(self):
        with Client(self.port) as c:
            n = self.rnd.randrange(2, 5)
            for _ in range(n):
                c.send(
                    "POST",
                    "/v1/chat/completions",
                    json.dumps(
                        {
                            "model": "default",
                            "prompt": "a",
                            "messages": [{"role": "user", "content": "a"}],
                            "max_tokens": 1,
                        }
                    ).encode(),
                    self.headers(),
                )
            for _ in range(n):
                reply = c.read()
                self.check(reply, "pipeline")
                if reply.header("connection") == "close" or reply.ended == "broken":
                    break

    def slow(self):
        with Client(self.port, rcvbuf=4096) as c:
            c.send(
                "POST",
                "/v1/chat/completions",
                {
                    "model": "default",
                    "max_tokens": 60,
                    "stream": True,
                    "messages": [{"role": "user", "content": "slow"}],
                },
                self.headers(),
            )
            time.sleep(0.05)
            self.check(c.read(), "slow")

    def run(self, n):
        for _ in range(n):
            what = self.rnd.choice(
                (self.whole, self.whole, self.half, self.leaves, self.leaves, self.garbage, self.pipeline, self.slow)
            )
            try:
                what()
            except (ConnectionError, socket.timeout, TimeoutError, AssertionError, ValueError) as e:
                # A connection that breaks is an answer where an engine broke off before it had said a status.
                if what not in (self.leaves, self.garbage):
                    self.wrong.append((what.__name__, repr(e)))


def files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def chaos(proto, fault, threads, profile="dyn"):
    proc, ports = engines(proto, fault)
    s = Sidecar(
        ports[1],
        ADAPTER[proto],
        DYN_SIDECAR_READ_TIMEOUT_MS=300,
        DYN_SIDECAR_CLIENT_BODY_TIMEOUT_MS=300,
        KVPICK_SIDECAR_THREADS=threads,
        KVPICK_SIDECAR_PROFILE=profile,
    )
    base = files(s.proc.pid)
    clients = [Clients(s.port, ports[0], random.Random(f"{SEED} {proto} {fault} {i}")) for i in range(5)]
    ts = [threading.Thread(target=c.run, args=(REQUESTS // 5,)) for c in clients]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    name = f"{proto}, engines with {fault}" + (", in llm-d's place" if profile == "llmd" else "")
    wrong = [w for c in clients for w in c.wrong]
    tap.same(wrong, [], f"{name}: every answer is one of ours or the engine's")
    tap.ok(sum(c.done for c in clients) > REQUESTS // 2, f"{name}: {sum(c.done for c in clients)} answers")
    tap.ok(wait_for(lambda: s.metric("requests_inflight") == 0, 5), f"{name}: no request is left")
    tap.ok(wait_for(lambda: s.metric("connections") == 0, 8), f"{name}: no connection of a client is left")
    tap.same(s.metric("held_bytes"), 0.0, f"{name}: nothing is held for anybody")
    stats = lambda: [call(p, "GET", "/stats")[1] for p in ports]
    tap.ok(
        wait_for(lambda: all(x["running_requests"] + x["waiting_requests"] == 0 for x in stats()), 5),
        f"{name}: no leg is left running",
    )
    # Beside what there was: kept connections to engines, the resolver of the one name (5), and the metrics' client, gone
    # or not yet.
    extra = lambda: files(s.proc.pid) - base - int(s.metric("engine_connections"))
    tap.ok(wait_for(lambda: extra() <= 5 * threads + 1, 5), f"{name}: files are given back", (base, files(s.proc.pid), extra()))
    tap.ok(s.stop() == 0, f"{name}: the sidecar ends with 0", s.log.decode()[-6000:])
    proc.terminate()
    proc.wait(20 * SLOW)


print(f"# KVP_SEED={SEED}")
for one in ADAPTER:
    chaos(one, "none", 1)
    for kind in ("error", "hang", "reset", "bad", "cut"):
        chaos(one, kind, 2)
        if one == "vllm":
            chaos(one, kind, 1, "llmd")
sys.exit(tap.done())
