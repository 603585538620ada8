#!/usr/bin/env python3
"""Faults that users of comparable pickers met, through the Endpoint Picker of a whole node: a test each, named by its
number."""
import json
import os
import random
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import Engine, stored, tokens
from envoy import REQUEST_BODY, REQUEST_HEADERS, body, headers
from epp import CHAT, COMPLETIONS, FULL, MODEL, Epp, Renderer, prompt, respond, routed, schedulable
from node import Tap, wait_for, worker

tap = Tap()
RENDERER = Renderer()
NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
SEED = int(os.environ.get("KVP_SEED", random.randrange(1 << 30)))
rnd = random.Random(SEED)


def idle(node, name):
    tap.ok(wait_for(lambda: not node.load()), f"{name}: no load is left", node.load())


def end(s):
    respond(s)
    s.half_close()
    s.reply()


def bodies(node, envoy):
    """R01: every size around the limits of pieces and messages; R03: none at all."""
    base = len(json.dumps({"model": MODEL, "messages": [{"role": "user", "content": ""}]}))
    for size in (65535, 65536, 65537, 124000, 3 << 20):
        data = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * (size - base)}]}).encode()
        s = envoy.stream(headers(REQUEST_HEADERS, CHAT, config=FULL))
        for at in range(0, size, 65536):
            s.send(body(REQUEST_BODY, data[at:at + 65536], at + 65536 >= size))
        head, got = s.reply(), []
        while not (got and got[-1].end):
            got.append(s.reply())
        tap.ok(len(data) == size and head.kind == "request_headers" and head.destination and
               b"".join(g.piece for g in got) == data and max(len(g.piece) for g in got) <= 65536 and
               [g.end for g in got].count(True) == 1, f"R01: {size} bytes in {len(got)} pieces")
        end(s)
    for data, want in ((b"", 400), (b"{", 400)):
        _, head, _ = routed(envoy, CHAT, data)
        tap.same((head.kind, head.status), ("immediate", want), f"R01, R03: a chat of {len(data)} bytes")
    idle(node, "R01")


def twice(node, envoy):
    """R02: body messages behind the end, good and garbled, before and after the answer."""
    for extra in (prompt(1, 4), b"\0garbage{", b""):
        s = envoy.stream(headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, prompt(1, 4), True),
                         body(REQUEST_BODY, extra, True))
        got = [s.reply(), s.reply()]
        tap.ok([g.kind for g in got] == ["request_headers", "request_body"] and s.silent(),
               f"R02: {extra[:8]!r} behind the end is not answered")
        tap.same(sum(x[2] for x in node.load().values()), 1, "R02: one request is booked")
        end(s)
        idle(node, "R02")


def cut_anywhere(node, envoy):
    """R15: an answer's events cut at every byte."""
    text = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'
    before, done = node.counter("booking_prefilled_total"), node.counter("booking_freed_total")
    whole = True
    for cut in range(1, len(text)):
        s, _, _ = routed(envoy, COMPLETIONS, prompt(8, 2))
        got = respond(s, (text[:cut], text[cut:]))
        whole &= b"".join(g.piece for g in got[1:]) == text and got[-1].end
        s.half_close()
        s.reply()
    tap.ok(whole, "R15: all of it passes unchanged, wherever it is cut")
    tap.ok(wait_for(lambda: node.counter("booking_freed_total") - done == len(text) - 1), "R15: one free a stream")
    tap.same(node.counter("booking_prefilled_total") - before, len(text) - 1, "R15: one end of prefill a stream")
    idle(node, "R15")


def flaps():
    """R27: a worker leaves and comes back while streams are open: an end reaches only the worker that was charged."""
    with Epp(RENDERER, env=NO_EVENTS) as node:
        node.call("POST", "/workers", worker(1, model_name=MODEL))
        wait_for(lambda: schedulable(node) == 1)
        envoy = node.envoy()
        a, _, _ = routed(envoy, COMPLETIONS, prompt(1, 3))
        tap.same(node.load(), {1: (12, 3, 1)}, "R27: A is booked")
        node.call("DELETE", "/workers/1")
        tap.same(node.load(), {}, "R27: its worker leaves")
        node.call("POST", "/workers", worker(1, model_name=MODEL))
        wait_for(lambda: schedulable(node) == 1)
        b, _, _ = routed(envoy, COMPLETIONS, prompt(2, 2))
        tap.same(node.load(), {1: (8, 2, 1)}, "R27: it returns; B is booked")
        wait_for(lambda: node.counter("stream_open") == 2)
        end(a)
        tap.ok(wait_for(lambda: node.counter("stream_open") == 1), "R27: A ends")
        tap.same(node.load(), {1: (8, 2, 1)}, "R27: the end of A touches nothing")
        end(b)
        idle(node, "R27")
        streams = []
        for i in range(200):
            if len(streams) < 30 or rnd.random() < 0.5:
                s = envoy.stream(headers(REQUEST_HEADERS, COMPLETIONS, config=FULL),
                                 body(REQUEST_BODY, prompt(i, 2), True))
                streams.append(s)
            else:
                streams.pop(rnd.randrange(len(streams))).reset()
            if rnd.random() < 0.3:
                node.call("DELETE", "/workers/1")
                node.call("POST", "/workers", worker(1, model_name=MODEL))
        for s in streams:
            s.reset()
        idle(node, "R27: 60 flaps with streams open")
        envoy.close()
        tap.same(node.ctl("check")[0], 0, "R27: kvpickctl check finds no fault")


def vanishing():
    """R29: workers go between choice and answer: who gets no route has left nothing behind."""
    with Epp(RENDERER, env={**NO_EVENTS, "DYN_ROUTER_QUEUE_THRESHOLD": "1",
                            "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "3600"}) as node:
        for w in range(1, 5):
            node.call("POST", "/workers", worker(w, model_name=MODEL, max_num_batched_tokens=64))
        wait_for(lambda: schedulable(node) == 4)
        stop, seen = threading.Event(), {}

        def client(n):
            envoy, i = node.envoy(), 0
            while not stop.is_set():
                i += 1
                s, head, _ = routed(envoy, COMPLETIONS, prompt(1000 * n + i, 3))
                key = head.status if head and head.kind == "immediate" else 200 if head and head.destination else None
                seen[key] = seen.get(key, 0) + 1
                s.reset()
            envoy.close()
        threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(8)]
        for t in threads:
            t.start()
        until, changes = time.monotonic() + 2.5, 0
        while time.monotonic() < until:
            w = rnd.randint(1, 4)
            node.call("DELETE", f"/workers/{w}")
            node.call("POST", "/workers", worker(w, model_name=MODEL, max_num_batched_tokens=64))
            changes += 2
        stop.set()
        for t in threads:
            t.join(20)
        tap.ok(set(seen) <= {200, 500, 503} and seen.get(200), f"R29: {changes} changes of workers: {seen}", seen)
        start = time.monotonic()
        idle(node, "R29")
        print(f"# R29: {time.monotonic() - start:.3f} s after the last stream")
        tap.same(node.ctl("check")[0], 0, "R29: kvpickctl check finds no fault")


def identities():
    """R14: adapters and salts: a request finds what was cached for its own, and nothing else."""
    with Epp(RENDERER) as node:
        engine = Engine()
        engine.register(node, 1, model_name=MODEL)
        engine.send(0, stored(1, 0, 4, lora_name="a"))
        wait_for(lambda: any(w["device_blocks"] == 4 for w in node.call("POST", "/overlap_scores", {
            "model_name": MODEL, "lora_name": "a", "token_ids": tokens(1, 4)})[1].get("workers", [])))
        envoy = node.envoy()
        for model, more, cached, name in (("a", [], 4, "the adapter's own"), ("b", [], 0, "another adapter's"),
                                          (MODEL, [], 0, "the plain model's"),
                                          ("a", [("x-tenant-id", "t")], 0, "a tenant's")):
            data = json.dumps({"model": model, "prompt": tokens(1, 4)}).encode()
            s, head, _ = routed(envoy, COMPLETIONS + more, data)
            tap.same(node.load(), {1: (16 - 4 * cached, 4, 1)}, f"R14: {name} request has {cached} blocks cached")
            s.reset()
            idle(node, f"R14: {name}")
        envoy.close()
        engine.close()


def predictions():
    """R33: engines report far more, or far less, than the index predicts: the gauge and one warning that says which."""
    for name, first, reported, says in (("more", 500, 36, "far more"), ("less", 1, 0, "far fewer")):
        with Epp(RENDERER) as node:
            engine = Engine()
            engine.register(node, 1, model_name=MODEL)
            engine.send(0, stored(1, 0, 10))
            wait_for(lambda: any(w["device_blocks"] == 10 for w in node.call("POST", "/overlap_scores", {
                "model_name": MODEL, "token_ids": tokens(1, 10)})[1].get("workers", [])))
            envoy = node.envoy()
            usage = json.dumps({"usage": {"prompt_tokens": 40, "completion_tokens": 1,
                                          "prompt_tokens_details": {"cached_tokens": reported}}}).encode()

            def warned():
                return node.log_text().count(" extproc.mismatch ")
            for i in range(600):
                s, _, _ = routed(envoy, COMPLETIONS, prompt(first + (i if first > 1 else 0), 10))
                respond(s, (b"data: " + usage + b"\n\n",))
                s.half_close()
                s.reply()
                if warned():
                    break
            text = node.call("GET", "/metrics")[1]
            gauge = [x for x in text.splitlines() if x.startswith("dynamo_epp_index_mismatch{")]
            tap.ok(wait_for(lambda: warned() == 1) and says in node.log_text(),
                   f"R33: {name} cached tokens than predicted: one warning after {i + 1} requests")
            tap.ok(wait_for(lambda: [x for x in node.call("GET", "/metrics")[1].splitlines()
                                     if x.startswith("dynamo_epp_index_mismatch{")][0].endswith(" 1")),
                   "R33: and the gauge", gauge)
            envoy.close()
            engine.close()


def main():
    print(f"# KVP_SEED={SEED}")
    with Epp(RENDERER, env=NO_EVENTS) as node:
        for i in (1, 2):
            node.call("POST", "/workers", worker(i, model_name=MODEL))
        wait_for(lambda: schedulable(node) == 2)
        envoy = node.envoy()
        for test in (bodies, twice, cut_anywhere):
            test(node, envoy)
        envoy.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    for test in (flaps, vanishing, identities, predictions):
        test()
    return tap.done()


sys.exit(main())
