#!/usr/bin/env python3
"""kvpick-sim as prefill and decode engines behind real sidecars: the three protocols end to end, what the engines refuse,
loads and handoffs that return to zero, faults of each kind in each role, clients that leave."""

import json
import os
import random
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, SLOW, Tap, call, wait_for
from pd import Client, Sidecar, ask

tap = Tap()
ADAPTER = {"vllm": "vllm_nixl", "sglang": "sglang", "trtllm": "trtllm"}
SEED = int(os.environ.get("KVP_SEED", "1"))


class Sim:
    """Three prefill and three decode engines in one process, a sidecar before each of the latter."""

    def __init__(self, proto, *args, **env):
        self.proc = subprocess.Popen(
            [
                f"{BUILD}/kvpick-sim",
                "--die-with-parent",
                "--engines",
                "6",
                "--pd",
                proto,
                "--pd-prefill",
                "3",
                "--time-scale",
                "100",
                "--kv-events",
                "off",
                "--block-size",
                "16",
                "--blocks",
                "50000",
                *args,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports = []
        for line in self.proc.stdout:
            if line.startswith("ready"):
                break
            self.ports.append(int(line.split("http=")[1].split()[0].rsplit(":", 1)[1]))
        self.sidecars = [Sidecar(p, ADAPTER[proto], **env) for p in self.ports[3:]]

    def stats(self, engine):
        return call(self.ports[engine], "GET", "/stats")[1]

    def ask(self, body, prefill=0, decode=0, **how):
        return ask(self.sidecars[decode].port, body, f"127.0.0.1:{self.ports[prefill]}", **how)

    def total(self, name):
        return sum(self.stats(i)[name] for i in range(6))

    def end(self, name, kept=False):
        idle = lambda: (self.total("running_requests"), self.total("waiting_requests")) == (0, 0)
        tap.ok(wait_for(idle, 10), f"{name}: loads of both roles return to zero")
        if not kept:
            tap.same(self.stats(0)["handoffs"], 0, f"{name}: no handoff is left")
        tap.ok(
            wait_for(lambda: all(s.metric("requests_inflight") == 0 for s in self.sidecars), 5),
            f"{name}: no request is left",
        )
        tap.same([s.stop() for s in self.sidecars], [0, 0, 0], f"{name}: the sidecars end with 0")
        self.proc.terminate()
        tap.same(self.proc.wait(20 * SLOW), 0, f"{name}: the engines end with 0")


def chat(text, **more):
    return {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def success(proto):
    s = Sim(proto)
    got = s.ask(chat("hello " * 50))
    tap.same((got.status, got.json()["usage"]["completion_tokens"]), (200, 8), f"{proto}: a chat")
    got = s.ask(chat("hello " * 50, stream=True, stream_options={"include_usage": True}), 1, 1)
    tap.ok(
        got.status == 200 and got.body.endswith(b"data: [DONE]\n\n") and b'"completion_tokens":8' in got.body,
        f"{proto}: streamed, with usage",
        got.body[-300:],
    )
    got = s.ask({"model": "default", "prompt": "a" * 400, "max_tokens": 4}, 2, 2, path="/v1/completions")
    tap.same((got.status, got.json()["usage"]["completion_tokens"]), (200, 4), f"{proto}: a completion")
    before = [s.stats(i)["prefill_tokens"] for i in range(6)]
    got = s.ask(chat("x" * 200_000, tools=[{"type": "function", "function": {"name": "f"}}]))
    after = [s.stats(i)["prefill_tokens"] - b for i, b in enumerate(before)]
    tap.ok(
        got.status == 200 and after[0] > 49000 and after[3] <= 1,
        f"{proto}: 200 KB, computed by the prefill engine only",
        after,
    )
    got = ask(s.sidecars[0].port, chat("plain"))
    tap.same(got.status, 400 if proto == "sglang" else 200, f"{proto}: without a prefill engine")
    out = []
    rnd = random.Random(SEED)

    def many(n):
        for i in range(n):
            r = s.ask(
                chat(f"{rnd.random()} " * rnd.randrange(1, 60), stream=rnd.random() < 0.5),
                rnd.randrange(3),
                rnd.randrange(3),
                headers={"x-request-id": "same"},
            )
            out.append((r.status, r.ended))

    ts = [threading.Thread(target=many, args=(20,)) for _ in range(6)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    tap.same(out, [(200, "clean")] * 120, f"{proto}: 120 requests, six at a time, one id: no handoff is mixed up")
    tap.same(s.stats(0)["protocol_rejected"], int(proto == "sglang"), f"{proto}: the engines refused nothing of ours")
    s.end(proto)


def refusals():
    s = Sim("vllm")
    p, d = s.ports[0], s.ports[3]
    kv = {"do_remote_decode": True, "do_remote_prefill": False}
    for name, port, body in (
        ("two tokens of prefill", p, chat("a", kv_transfer_params=kv)),
        ("stream options alone", d, chat("a", stream_options={"include_usage": True})),
        ("min_tokens over the limit", d, chat("a", min_tokens=9)),
        ("a half handoff", d, chat("a", kv_transfer_params={"do_remote_prefill": True})),
        ("a producer's request at a decode engine", d, {**chat("a", kv_transfer_params=kv), "max_tokens": 1}),
        (
            "an unknown handoff",
            d,
            chat(
                "a",
                kv_transfer_params={
                    "do_remote_prefill": True,
                    "remote_block_ids": [],
                    "remote_host": "h",
                    "remote_port": 1,
                    "remote_engine_id": "e",
                    "remote_request_id": "chatcmpl-ff",
                },
            ),
        ),
    ):
        tap.same(call(port, "POST", "/v1/chat/completions", body)[0], 400, f"vLLM refuses {name}")
    first = call(p, "POST", "/v1/chat/completions", {**chat("one prompt", kv_transfer_params=kv), "max_tokens": 1})[1]
    tap.same(s.stats(0)["handoffs"], 1, "a handoff waits to be fetched")
    tap.same(
        call(
            d,
            "POST",
            "/v1/chat/completions",
            chat("quite another prompt", kv_transfer_params=first["kv_transfer_params"]),
        )[0],
        400,
        "vLLM refuses a handoff of another prompt",
    )
    tap.same(
        call(d, "POST", "/v1/chat/completions", chat("one prompt", kv_transfer_params=first["kv_transfer_params"]))[0],
        200,
        "and takes its own",
    )
    s.end("refusals")


def faults(proto, kind, role):
    """Every third request meets a fault; all get an answer, and nothing is left. Connections that break unanswered: every
    request, since one that was used before is tried again on a fresh one."""
    every = 1 if kind in ("reset", "cut") else 3
    s = Sim(
        proto,
        "--pd-fault",
        kind,
        "--pd-fault-role",
        role,
        "--pd-fault-every",
        str(every),
        DYN_SIDECAR_READ_TIMEOUT_MS=400,
    )
    good = bad = 0
    codes = set()
    for i in range(9):
        got = s.ask(chat(f"number {i} " * 9, stream=i % 2 == 1))
        ok = got.status == 200 and got.ended == "clean" and (b"[DONE]" in got.body or i % 2 == 0)
        good, bad = good + ok, bad + (not ok)
        if not ok:
            codes.add("broken" if got.ended == "broken" else str(got.code()))
    if proto == "sglang" and kind == "bad":
        want = {"sglang_pd_upstream_error"}  # the decode engine waits for what never comes
    elif proto == "sglang":
        want = {
            "error": {"pd_engine_rejected"},
            "hang": {"sglang_pd_upstream_error"},
            "reset": {"sglang_pd_upstream_error"},
            "cut": {"sglang_pd_upstream_error", "broken"},
        }[kind]
    elif role == "prefill":
        want = {
            "error": {"prefill_upstream_error"},
            "hang": {"prefill_upstream_timeout"},
            "reset": {"prefill_upstream_unavailable"},
            "bad": {"invalid_prefill_handoff"},
            "cut": {"prefill_upstream_unavailable", "invalid_prefill_handoff"},
        }[kind]
    else:
        want = {
            "error": {"500"},
            "hang": {"decode_upstream_timeout"},
            "reset": {"decode_upstream_error"},
            "cut": {"decode_upstream_error", "broken"},
        }[kind]
    tap.ok(
        bad == 9 // every and codes <= want,
        f"{proto}, {role} {kind}: {9 // every} of nine fail as they must",
        (bad, codes),
    )
    s.end(f"{proto}, {role} {kind}", kept=role == "decode" or kind in ("bad", "cut"))


def leavers(proto):
    s = Sim(proto, "--time-scale", "1", "--step-us", "20000")
    rnd = random.Random(SEED)
    for i in range(20):
        with Client(s.sidecars[i % 3].port) as c:
            c.send(
                "POST",
                "/v1/chat/completions",
                chat(f"{i} " * 200, stream=True, max_tokens=200),
                {"x-prefiller-host-port": f"127.0.0.1:{s.ports[i % 3]}"},
            )
            time.sleep(rnd.random() * 0.12)
            if i % 2:
                c.reset()
    s.end(f"{proto}, clients leave at any moment", kept=True)


for one in ADAPTER:
    success(one)
refusals()
for one in ADAPTER:
    for fault in ("error", "hang", "reset", "bad", "cut"):
        for who in ("prefill", "decode"):
            # TensorRT-LLM's legs run as vLLM's do.
            if (who == "prefill" or fault != "bad") and (one != "trtllm" or fault in ("error", "bad")):
                faults(one, fault, who)
    leavers(one)
sys.exit(tap.done())
