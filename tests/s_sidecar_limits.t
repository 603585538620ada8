#!/usr/bin/env python3
"""kvpick-sidecar at its limits: the budget of bytes kept for requests and what memory that costs, descriptors that run
out; and the odd ends of HTTP: requests pipelined behind a half close, status lines, escaped paths, empty request ids,
ranks. Arguments choose sections by name."""

import json
import os
import re
import resource
import socket
import sys
import threading
import time

LIB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
sys.path.insert(0, LIB)
import pd
from node import BUILD, Tap, free_port, tcp_timers, wait_for
from pd import (
    CHAT,
    HANDOFF,
    STREAM,
    Client,
    Engine,
    Pair,
    Sidecar,
    answer,
    ask,
    fixed,
    sglang,
    silent,
    trt_context,
    trt_generation,
    vllm_decode,
    vllm_prefill,
)

tap = Pair.tap = Tap()
MIB = 1 << 20
# Sanitizers keep freed memory and shadows of it: what a process weighs is measured without them.
WEIGHED = os.path.basename(BUILD) in ("release", "debug")


def padded(n):
    """A body of n bytes."""
    body = json.dumps({**CHAT, "pad": ""}).encode()
    return body.replace(b'"pad": ""', b'"pad": "' + b"x" * (n - len(body)) + b'"')


def peak_mib(s):
    with open(f"/proc/{s.proc.pid}/status", encoding="ascii") as f:
        return int(re.search(r"VmHWM:\s+(\d+)", f.read()).group(1)) // 1024


def held(x):
    return x.s.metric("held_bytes")


def result(s, name):
    """Requests that ended so, of all paths."""
    with Client(s.metrics) as c:
        text = c.ask("GET", "/metrics").body.decode()
    return sum(int(n) for n in re.findall(rf'requests_total{{[^}}]*result="{name}"}} (\d+)', text))


# ---- the budget ----

SMALL = {
    "DYN_SIDECAR_MAX_REQUEST_BYTES": 100_000,
    "DYN_SIDECAR_MAX_PREFILL_RESPONSE_BYTES": 50_000,
    "KVPICK_SIDECAR_MAX_HELD_BYTES": 300_000,
}


def gated(script):
    """A prefill engine that answers when its event `go` is set."""

    def run(engine, req):
        engine.go.wait(5)
        script(engine, req)

    return run


def bodies():
    """Bodies that are kept count twice, until the engine that gets them answers; over the budget: 503."""
    x = Pair(gated(vllm_prefill()), vllm_decode(), **SMALL)
    x.p.go = threading.Event()
    body = padded(90_000)
    with Client(x.port) as first:
        first.send("POST", "/v1/chat/completions", body, {"x-prefiller-host-port": x.p.authority})
        tap.ok(wait_for(lambda: x.p.generated()), "a body of 90 KB is at the prefill engine")
        tap.ok(wait_for(lambda: held(x) == 180_000), "held_bytes says 180 KB: the body twice", held(x))
        for chunked in (None, 7000):
            got = x.ask(body, chunked=chunked)
            tap.same(
                (got.status, got.code(), got.header("connection")),
                (503, "too_many_held_bytes", "close"),
                f"a second {'in chunks' if chunked else 'by length'}: 503, told at once",
            )
        tap.same(len(x.p.generated()), 1, "no engine hears of it")
        tap.same((held(x), x.s.metric("held_refused_total")), (180_000.0, 2.0), "nothing of it is kept; it is counted")
        tap.same(result(x.s, "too_many_held_bytes"), 2, "by its result, too")
        got = x.ask(padded(40_000), headers={"x-late": "1"}) if x.p.go.set() is None else None
        tap.same(got.status, 200, "what fits is served")
        tap.same(first.read().status, 200, "so is the first")
    tap.ok(wait_for(lambda: held(x) == 0), "then nothing is held", held(x))
    tap.same(x.ask(body).status, 200, "and there is room again")
    plain = ask(x.port, padded(2_000_000))
    tap.same(plain.status, 200, "what passes through in pieces needs no room")
    x.end("bodies")


def decoding():
    """A decode answer that streams keeps nothing of the request."""
    go = threading.Event()

    def decode(engine, req):
        req.conn.head(200, [("content-type", "text/event-stream")])
        req.conn.chunk(b"data: 1\n\n")
        go.wait(20)
        req.conn.last()

    x = Pair(vllm_prefill(), decode, **SMALL)
    clients = [Client(x.port) for _ in range(3)]
    for c in clients:
        c.send("POST", "/v1/chat/completions", padded(90_000), {"x-prefiller-host-port": x.p.authority})
        tap.same((c.head()[0], c.chunk()), (200, b"data: 1\n\n"), "a stream whose body was 90 KB runs")
    tap.same(held(x), 0.0, "three such streams hold nothing")
    go.set()
    for c in clients:
        c.drop()
    x.end("decoding")


def kept():
    """On a kept connection a request counts once more, until it has left; over the budget: 503."""
    big, n = {"DYN_SIDECAR_MAX_REQUEST_BYTES": 12_000_000, "KVPICK_SIDECAR_MAX_HELD_BYTES": 40_000_000}, 12_000_000
    for adapter, copies in (("vllm_nixl", 3), ("sglang", 4)):
        env = {"KVPICK_SIDECAR_MAX_HELD_BYTES": 192 * MIB} if adapter == "sglang" else big
        p = vllm_prefill() if adapter == "vllm_nixl" else sglang("prefill")
        x = Pair(p, vllm_decode() if adapter == "vllm_nixl" else sglang("decode"), adapter, **env)
        tap.same(x.ask(CHAT).status, 200, f"{adapter}: connections are kept")
        go = threading.Event()

        class Stops(pd.Conn):
            """Reads no body before it may."""

            def take(self, n):
                if n > 1_000_000:
                    go.wait(10)
                return super().take(n)

        before, pd.Conn = pd.Conn, Stops
        x.p.hang_up()  # connections that are kept have the old one
        x.d.hang_up()
        wait_for(lambda: x.s.metric("engine_connections") == 0)
        tap.same(x.ask(CHAT).status, 200, f"{adapter}: new ones are")
        with Client(x.port) as c:
            c.send("POST", "/v1/chat/completions", padded(n), {"x-prefiller-host-port": x.p.authority})
            tap.ok(
                wait_for(lambda: held(x) >= copies * n), f"{adapter}: {copies} copies until it has left", held(x)
            )
            if adapter == "vllm_nixl":
                got = x.ask(padded(n))
                tap.same((got.status, got.code()), (503, "too_many_held_bytes"), "two copies more are over the budget")
            go.set()
            tap.same(c.read().status, 200, f"{adapter}: served")
        pd.Conn = before
        x.end(f"kept {adapter}")


def answers():
    """Answers of prefill engines count twice; a fallback needs less than was there."""
    big = vllm_prefill(extra={"pad": "y" * 40_000})
    full = vllm_prefill(extra={"pad": "y" * 49_000})

    def mixed(engine, req):
        (silent if len(req.body) > 80_000 else big)(engine, req)

    waits = lambda: 180_000 <= held(x) < 181_000  # its head, where the request may be repeated
    x = Pair(full, vllm_decode(), **SMALL)
    tap.same(x.ask(padded(90_000)).status, 200, "the longest request fits with its answer")
    x.p.script = mixed
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", padded(90_000), {"x-prefiller-host-port": x.p.authority})
        tap.ok(wait_for(waits), "one waits for its prefill")
        got = x.ask(padded(50_000))
        tap.same((got.status, got.code()), (503, "too_many_held_bytes"), "an answer over the budget: 503")
        tap.ok(waits(), "and its bytes are gone", held(x))
    x.end("answers")
    x = Pair(mixed, fixed(200, b"{}"), None, KVPICK_SIDECAR_PROFILE="llmd", **SMALL)
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", padded(90_000), {"x-prefiller-host-port": x.p.authority})
        tap.ok(wait_for(waits), "llmd: one waits for its prefill")
        before = len(x.d.generated())
        got = x.ask(padded(50_000))
        tap.same((got.status, len(x.d.generated()) - before), (200, 1), "llmd: the decode engine does all of the work")
    x.end("answers llmd")


def unread():
    """An answer of ours that the client does not read is still kept, and counted."""
    x = Pair(
        trt_context("stop", change=lambda reply: reply["choices"][0]["message"].update(content="z" * 8_000_000)),
        trt_generation,
        "trtllm",
    )
    with Client(x.port, rcvbuf=4096) as c:
        c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
        tap.ok(wait_for(lambda: x.s.metric("requests_inflight") == 0 and x.p.generated()), "answered in context")
        tap.ok(wait_for(lambda: 3_000_000 < held(x) < 9_000_000), "what was not read counts", held(x))
        got = c.read()
        tap.same((got.status, len(got.json()["choices"][0]["message"]["content"])), (200, 8_000_000), "it comes whole")
        tap.ok(wait_for(lambda: held(x) == 0), "and counts no more")
    x.end("unread")


def pipelined():
    """Bytes behind the running request count; over the budget they are thrown away, and the connection ends."""
    x = Pair(gated(vllm_prefill()), gated(fixed(200, b"d")), **SMALL)
    x.p.go, x.d.go = threading.Event(), threading.Event()
    with Client(x.port) as first, Client(x.port) as second:
        first.send("POST", "/v1/chat/completions", padded(90_000), {"x-prefiller-host-port": x.p.authority})
        tap.ok(wait_for(lambda: held(x) == 180_000 and x.p.generated()), "a body waits")
        second.send("GET", "/v1/models")
        tap.ok(wait_for(lambda: x.d.requests), "a plain request runs")
        second.sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Fill: " + b"f" * 60_000 + b"\r\n\r\n")
        tap.ok(wait_for(lambda: 240_000 < held(x) < 300_000), "the bytes behind it count", held(x))
        second.sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Fill: " + b"f" * 64_000 + b"\r\n\r\n")
        tap.ok(wait_for(lambda: x.s.metric("held_refused_total") == 1), "more of them is over the budget")
        tap.ok(wait_for(lambda: held(x) == 180_000.0), "all of them are thrown away", held(x))
        x.d.go.set()
        got = second.read()
        tap.same((got.status, got.body, got.header("connection")), (200, b"d", "close"), "the running answer is the last")
        tap.ok(second.closed(), "and the connection ends")
        x.p.go.set()
        first.read()
    x.end("pipelined")


def heads():
    """Long heads count from their first bytes, complete or not, until the request has ended."""
    x = Pair(vllm_prefill(), gated(vllm_decode()), **SMALL)
    x.d.go = threading.Event()
    fill = {"x-fill": "f" * 60_000}
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority, **fill})
        tap.ok(wait_for(lambda: x.d.requests), "a request with a long head runs")
        tap.ok(60_000 < held(x) < 70_000, "its head counts", held(x))
        x.d.go.set()
        tap.same(c.read().status, 200, "it is served")
        tap.ok(wait_for(lambda: held(x) == 0), "its head counts no more", held(x))
        c.send("POST", "/v1/chat/completions", CHAT, {"connection": "close", **fill})
        tap.same(c.read().status, 200, "the last one of its connection, too")
        tap.ok(wait_for(lambda: held(x) == 0), "which counts nothing while it waits for its end", held(x))
    open_ = [Client(x.port) for _ in range(8)]
    for part in (open_[:4], open_[4:]):
        for c in part:
            c.sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Fill: " + b"f" * 60_000)
        if not tap.ok(wait_for(lambda: held(x) > 240_000), "four unfinished heads count", held(x)):
            return
    got = [c.read() for c in open_[4:]]
    tap.same({(g.status, g.code(), g.header("connection")) for g in got}, {(503, "too_many_held_bytes", "close")},
             "further ones are over the budget")
    tap.ok(wait_for(lambda: 240_000 < held(x) < 250_000), "and count no more", held(x))
    open_[0].sock.sendall(b"\r\nContent-Length: 2\r\n\r\n{}")
    tap.same(open_[0].read().status, 200, "one of those that count is served when it is complete")
    for c in open_:
        c.drop()
    tap.ok(wait_for(lambda: held(x) == 0), "nothing is left", held(x))
    x.end("heads")


def lingering():
    """What a connection that ends has no more does not count, however long its client takes to close."""
    x = Pair(
        trt_context("stop", change=lambda reply: reply["choices"][0]["message"].update(content="z" * 8_000_000)),
        gated(fixed(200, b"d")),
        "trtllm",
    )

    def seen():
        """Bytes held and connections open, at one time."""
        with Client(x.s.metrics) as c:
            text = c.ask("GET", "/metrics").body.decode()
        return tuple(int(re.search(rf"^dynamo_pd_sidecar_{n} (\d+)$", text, re.M)[1]) for n in ("held_bytes", "connections"))

    def behind(states):
        """What was seen since something was held."""
        return states[next((i for i, s in enumerate(states) if s[0]), len(states)):]

    def long_answer(c):
        c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority, "connection": "close"})
        tap.ok(wait_for(lambda: held(x) > 3_000_000), "a long answer waits for its client", held(x))
        return len(c.read().json()["choices"][0]["message"]["content"]) == 8_000_000

    def bytes_behind(c):
        x.d.go, asked = threading.Event(), len(x.d.requests)
        c.send("GET", "/v1/models", headers={"connection": "close"})
        tap.ok(wait_for(lambda: len(x.d.requests) > asked), "the last request of a connection runs")
        c.sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Fill: " + b"f" * 60_000 + b"\r\n\r\n")
        tap.ok(wait_for(lambda: held(x) > 60_000), "bytes behind it count", held(x))
        x.d.go.set()
        return c.read().body == b"d"

    def look(states, end):
        while not end.is_set():
            states.append(seen())

    for part in (long_answer, bytes_behind):
        # The connection stays for 5 s when all is with the kernel, which may be long before the client has it.
        states, end = [], threading.Event()
        looks = threading.Thread(target=look, args=(states, end))
        with Client(x.port, rcvbuf=4096) as c:
            looks.start()
            tap.ok(part(c), f"{part.__name__}: the client has it, and stays")
            wait_for(lambda: (0, 1) in behind(states) or (0, 0) in behind(states))
        end.set()
        looks.join()
        tap.ok((0, 1) in behind(states), f"{part.__name__}: it counts no more, though the connection is there",
               behind(states)[-5:])
        tap.ok(wait_for(lambda: seen() == (0, 0)), f"{part.__name__}: gone", seen())
    x.end("lingering")


def weights():
    """What the longest legal requests cost: no tree is made of a body, whatever it holds."""
    if not WEIGHED:
        tap.ok(True, "memory is not weighed in this build")
        return
    n = 31 * MIB
    numbers = b'{"a":[' + b"1," * ((n - 8) // 2 - 1) + b"1]}"
    numbers += b" " * (n - len(numbers))
    x = Pair(silent, vllm_decode())
    clients = [Client(x.port) for _ in range(4)]
    for c in clients:
        c.send("POST", "/v1/chat/completions", numbers, {"x-prefiller-host-port": x.p.authority})
    tap.ok(wait_for(lambda: len(x.p.requests) == 4, 20), "four bodies of 31 MiB, one number after the other")
    tap.ok(wait_for(lambda: held(x) == 248 * MIB), "use the budget up", held(x))
    got = x.ask(numbers)
    tap.same((got.status, got.code()), (503, "too_many_held_bytes"), "a fifth is refused")
    tap.ok(peak_mib(x.s) < 300, "the process weighs less than 300 MiB", peak_mib(x.s))
    for c in clients:
        c.drop()
    tap.ok(wait_for(lambda: held(x) == 0), "they go with their clients")
    tap.ok(wait_for(lambda: x.s.rss_kb() < 60 * 1024), "and so does their memory", x.s.rss_kb())
    x.end("weights")


def gates():
    """SGLang: decode answers behind the gate count."""
    blob = b'data: {"choices":[]}\n\n' * 60_000

    def decode(engine, req):
        req.conn.head(200, [("content-type", "text/event-stream")])
        for _ in range(20):
            req.conn.chunk(blob)
        silent(engine, req)

    x = Pair(
        sglang("prefill", script=silent), sglang("decode", script=decode), "sglang", KVPICK_SIDECAR_MAX_HELD_BYTES=192 * MIB
    )
    clients, refused = [], 0
    for _ in range(8):
        c = Client(x.port)
        c.send("POST", "/v1/chat/completions", STREAM, {"x-prefiller-host-port": x.p.authority})
        clients.append(c)
    tap.ok(wait_for(lambda: result(x.s, "too_many_held_bytes") >= 1, 30), "kept answers use the budget up")
    tap.ok(held(x) <= 192 * MIB, "it is not exceeded", held(x))
    if WEIGHED:
        tap.ok(peak_mib(x.s) < 240, "the process weighs less than 240 MiB", peak_mib(x.s))
    for c in clients:
        c.sock.settimeout(0.01)
        try:
            refused += c.read().code() == "too_many_held_bytes"
        except (socket.timeout, TimeoutError):
            pass
        c.drop()
    tap.ok(refused >= 1, "a client that is over it is told", refused)
    tap.ok(wait_for(lambda: held(x) == 0), "nothing is left")
    x.end("gates")


def startup():
    for env, rc, text in (
        ({"KVPICK_SIDECAR_MAX_HELD_BYTES": 100_000_000}, 2, "100663296"),
        ({"KVPICK_SIDECAR_MAX_HELD_BYTES": 200_000_000, "DYN_SIDECAR_PD_ADAPTER": "sglang"}, 2, "201326592"),
        ({"KVPICK_SIDECAR_MAX_HELD_BYTES": 100_000_000, "DYN_SIDECAR_PD_ADAPTER": "trtllm"}, 2, "134217728"),
        ({"DYN_SIDECAR_MAX_REQUEST_BYTES": 200 * MIB, "KVPICK_SIDECAR_MAX_HELD_BYTES": 256 * MIB}, 2, "629145600"),
        ({"KVPICK_SIDECAR_PREFILL_ALLOWLIST": ","}, 2, "KVPICK_SIDECAR_PREFILL_ALLOWLIST"),
        ({"KVPICK_SIDECAR_PREFILL_ALLOWLIST": " , ,"}, 2, "KVPICK_SIDECAR_PREFILL_ALLOWLIST"),
        ({"KVPICK_SIDECAR_PREFILL_ALLOWLIST": " "}, 2, "KVPICK_SIDECAR_PREFILL_ALLOWLIST"),
        ({"KVPICK_SIDECAR_PREFILL_ALLOWLIST": ""}, 2, "KVPICK_SIDECAR_PREFILL_ALLOWLIST"),
    ):
        s = Sidecar(free_port(), "vllm_nixl", wait=False, **env)
        tap.same((s.wait(), text in s.log.decode()), (rc, True), f"{env} ends the process, which says {text}")
    for env in (
        {"KVPICK_SIDECAR_MAX_HELD_BYTES": 0, "DYN_SIDECAR_MAX_REQUEST_BYTES": 1 << 40},
        {"KVPICK_SIDECAR_MAX_HELD_BYTES": 100_663_296},
        {"DYN_SIDECAR_MAX_REQUEST_BYTES": 200 * MIB},
        {"KVPICK_SIDECAR_PREFILL_ALLOWLIST": "a, ,b"},
    ):
        s = Sidecar(free_port(), "vllm_nixl", **env)
        tap.same(s.stop(), 0, f"{env} is fine")
    s = Sidecar(free_port(), KVPICK_SIDECAR_MAX_HELD_BYTES=1)
    tap.same(s.stop(), 0, "without a protocol nothing is kept: any budget is fine")


# ---- odd ends of HTTP ----


def half_close():
    """Requests behind a half close are answered, also those behind one that is answered at once."""
    x = Pair(vllm_prefill(), lambda e, r: (time.sleep(0.05), r.conn.reply(200, b"d")))
    local = ("GET", "/health", 200)
    engine = ("GET", "/v1/models", 200)
    for asked in (
        [engine, local, local],
        [engine, local, engine],
        [local, local],
        [engine, ("GET", "/nothing", 404), ("PUT", "/v1/completions", 405), engine],
    ):
        with Client(x.port) as c:
            c.sock.sendall(b"".join(b"%s %s HTTP/1.1\r\nHost: a\r\n\r\n" % (m.encode(), p.encode()) for m, p, _ in asked))
            c.sock.shutdown(socket.SHUT_WR)
            got = [c.read() for _ in asked]
            tap.same([g.status for g in got], [s for _, _, s in asked], f"all of {[p for _, p, _ in asked]} are answered")
            tap.same(
                [g.header("connection") for g in got[:-1]], [None] * (len(got) - 1), "the connection stays until the last"
            )
            tap.ok(c.closed(), "then it ends")
    x.end("half_close")


def status_lines():
    """The number of an answer is sent as it was read; the engine's reason stays."""
    cases = [
        (b"HTTP/1.1 200 Fine and well", b"HTTP/1.1 200 Fine and well"),
        (b"HTTP/1.1 200", b"HTTP/1.1 200 "),
        (b"HTTP/1.1 200 ", b"HTTP/1.1 200 "),
        (b"HTTP/1.1 404 a  b", b"HTTP/1.1 404 a  b"),
        (b"HTTP/1.0 200 OK", b"HTTP/1.1 200 OK"),
        (b"HTTP/1.1 0200 X", b"HTTP/1.1 200 X"),
        (b"HTTP/1.1  200 X", b"HTTP/1.1 200 X"),
    ]
    for line, want in cases:
        d = Engine(lambda e, r, line=line: r.conn.send(line + b"\r\nContent-Length: 1\r\n\r\nx"))
        s = Sidecar(d.port)
        with Client(s.port) as c:
            c.send("GET", "/v1/models")
            got = c.line().encode()
            # What is no status line may be refused; it is never handed on.
            tap.ok(got == want or got.startswith(b"HTTP/1.1 502 "), f"{line} becomes {want}", got)
            tap.ok(re.fullmatch(rb"HTTP/1\.1 [1-5][0-9]{2} .*", got), "a status line", got)
        s.stop()
        d.close()
    for status, want in ((400, 400), (422, 422), (302, 302), (503, 503), (599, 599), (304, 502), (600, 502), (999, 502)):
        x = Pair(lambda e, r, status=status: r.conn.send(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status), vllm_decode())
        got = x.ask(CHAT)
        tap.same((got.status, got.code()), (want, "prefill_upstream_error"), f"prefill says {status}: the client gets {want}")
        x.s.stop()
        x.p.close()
        x.d.close()


def escaped_paths():
    """A path is what an engine makes of it: escapes neither lead out of /v1/ nor past the protocol."""
    x = Pair(vllm_prefill(), lambda e, r: answer(r) if r.body else r.conn.reply(200, b"d"))
    with Client(x.port) as c:
        for path in (
            "/v1/..%2fmetrics",
            "/v1/%2e.%2Fmetrics",
            "/v1/..%5cmetrics",
            "/v1/..\\metrics",
            "/v1/a%2f..%2f..%2fmetrics",
            "/v1/.%2E/x",
            "/v1/x%2f.",
        ):
            tap.same(c.ask("GET", path).status, 404, f"{path}: 404")
        tap.same(x.d.requests, [], "none of them reached the engine")
        for path in ("/v1/models/org%2fname", "/v1/a%2", "/v1/a%zz", "/v1/...%2fx", "/v1/%252e%252e"):
            tap.same((c.ask("GET", path).status, x.d.requests[-1].path), (200, path), f"{path} is proxied as it is")
    for path in ("/v1/chat%2Fcompletions", "/v1%2fchat/completions", "/v1/ch%61t/completions", "/v1/completion%73"):
        before = len(x.p.requests)
        got = x.ask(CHAT, path=path)
        tap.same(
            (got.status, len(x.p.requests) - before, x.p.requests[-1].path, x.d.requests[-1].path),
            (200, 1, path, path),
            f"{path} runs in two legs",
        )
    x.end("escaped_paths")


UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def request_ids():
    """An id that no engine would see is absent: one is made, the same for both legs."""

    def ids(r):
        return [v for k, v in r.headers if k.lower() == "x-request-id"]

    x = Pair(vllm_prefill(), lambda e, r: answer(r))
    for name, fields in (
        ("absent", []),
        ("empty", [("x-request-id", "")]),
        ("empty twice", [("x-request-id", ""), ("X-Request-Id", "")]),
        ("of the connection", [("connection", "x-request-id"), ("x-request-id", "mine")]),
    ):
        for prefill in (x.p.authority, None):
            got = ask(x.port, CHAT, prefill, headers=fields)
            seen = [ids(r) for r in ([x.p.requests[-1]] if prefill else []) + [x.d.requests[-1]]]
            tap.ok(
                got.status == 200 and len(seen[0]) == 1 and re.fullmatch(UUID, seen[0][0]) and seen[0] == seen[-1],
                f"{name}, {'two legs' if prefill else 'passed through'}: one is made",
                seen,
            )
    x.ask(CHAT, headers=[("x-request-id", "mine"), ("connection", "x-other")])
    tap.same([ids(r) for r in (x.p.requests[-1], x.d.requests[-1])], [["mine"]] * 2, "the client's stays")
    x.end("request_ids")


def ranks():
    """One rule for the prefill rank, whatever the engine: a decimal number as it is written."""
    for text, rank in (("0", 0), ("7", 7), ("007", None), ("+7", None), ("7 8", None), ("", None), ("9" * 20, None)):
        for adapter in ("vllm_nixl", "sglang"):
            p = vllm_prefill() if adapter == "vllm_nixl" else sglang("prefill")
            x = Pair(p, vllm_decode() if adapter == "vllm_nixl" else sglang("decode"), adapter)
            x.ask(CHAT, headers=[("x-prefiller-dp-rank", text)])
            r = x.p.generated()[-1]
            seen = r.header("x-data-parallel-rank")
            if adapter == "sglang":
                got = (r.json().get("disagg_prefill_dp_rank"), seen)
                want = (rank, None if rank is None else text)
            else:
                got, want = seen, None if rank is None else text
            tap.same(got, want, f"{adapter}: rank {text!r} is {rank}")
            x.s.stop()
            x.p.close()
            x.d.close()


def labels():
    """No series comes twice."""
    x = Pair(vllm_prefill(), vllm_decode(), None, KVPICK_SIDECAR_PROFILE="llmd")
    x.ask(CHAT)
    ask(x.port, CHAT)
    with Client(x.s.metrics) as c:
        lines = [line for line in c.ask("GET", "/metrics").body.decode().splitlines() if not line.startswith("#")]
    names = [line.rsplit(" ", 1)[0] for line in lines]
    tap.same(len(names), len(set(names)), "llmd: each series once")
    tap.ok(
        'dynamo_pd_sidecar_requests_total{path="chat_completions",backend="vllm_nixl",result="ok"} 1' in lines,
        "llmd: requests in two legs are vLLM's",
        [line for line in lines if "requests_total" in line],
    )
    x.end("labels")


# ---- what runs out here ----


def descriptors():
    """Without a descriptor the engine is not to blame: 503, and counted apart."""
    x = Pair(vllm_prefill(), vllm_decode())
    clients = [Client(x.port) for _ in range(4)]
    for c in clients:
        tap.same(c.ask("GET", "/health").status, 200, "a connection of a client")
    fds = sorted(int(n) for n in os.listdir(f"/proc/{x.s.proc.pid}/fd"))
    _, hard = resource.prlimit(x.s.proc.pid, resource.RLIMIT_NOFILE)
    # A new descriptor takes the lowest free number: none is left below the limit.
    most = next(n for n in range(len(fds) + 1) if n not in fds)
    resource.prlimit(x.s.proc.pid, resource.RLIMIT_NOFILE, (most, hard))
    head = {"x-prefiller-host-port": x.p.authority}
    got = clients[0].ask("POST", "/v1/chat/completions", CHAT, head)
    tap.same((got.status, got.code()), (503, "sidecar_resources_exhausted"), "the prefill leg has no descriptor: 503")
    got = clients[1].ask("POST", "/v1/chat/completions", CHAT)
    tap.same((got.status, got.code()), (503, "sidecar_resources_exhausted"), "nor has a request that is passed through")
    resource.prlimit(x.s.proc.pid, resource.RLIMIT_NOFILE, (hard, hard))
    tap.same((x.p.requests, x.d.requests), ([], []), "no engine was asked")
    tap.same(result(x.s, "sidecar_resources_exhausted"), 2, "counted as what it is")
    tap.same(clients[0].ask("POST", "/v1/chat/completions", CHAT, head).status, 200, "with descriptors it is served")
    for c in clients:
        c.drop()
    x.end("descriptors")


def vanishing():
    """A client in the middle of its upload, or an engine that waits for it, may go without a word: the kernel asks."""
    x = Pair(vllm_prefill(), fixed(200, b"d"))
    with Client(x.port) as c:
        c.sock.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nbegin")
        tap.ok(wait_for(lambda: x.s.metric("requests_inflight") == 1), "an upload that is passed through has begun")
        tap.ok(wait_for(lambda: tcp_timers(x.port, 1) == ["02"]), "keep-alive with the client", tcp_timers(x.port, 1))
        engine = x.d.port
        tap.ok(wait_for(lambda: tcp_timers(engine, 2) == ["02"]), "and with the engine", tcp_timers(engine, 2))
        c.sock.sendall(b"." * 95)
        tap.same(c.read().status, 200, "the upload goes on")
    x.end("vanishing")


def names():
    """More names of prefill engines than are remembered: 503, and counted apart."""
    x = Pair(vllm_prefill(), vllm_decode(), DYN_SIDECAR_CONNECT_TIMEOUT_MS=1000)
    out = []

    def one(i):
        got = ask(x.port, CHAT, f"n{i}.localhost:{x.p.port}")
        out.append((got.status, got.code()))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(80)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    full = [o for o in out if o == (503, "sidecar_resources_exhausted")]
    tap.same(len(full), 16, "64 names are remembered for a minute: of 80 at once 16 are refused")
    tap.same(result(x.s, "sidecar_resources_exhausted"), 16, "counted as what it is")
    tap.same(x.ask(CHAT).status, 200, "an address needs no name")
    x.s.stop()
    x.p.close()
    x.d.close()


ALL = [
    bodies,
    decoding,
    kept,
    answers,
    unread,
    pipelined,
    heads,
    lingering,
    weights,
    gates,
    startup,
    half_close,
    status_lines,
    escaped_paths,
    request_ids,
    ranks,
    labels,
    descriptors,
    vanishing,
    names,
]

for section in ALL:
    if not sys.argv[1:] or section.__name__ in sys.argv[1:]:
        at = time.monotonic()
        section()
        print(f"# {section.__name__}: {time.monotonic() - at:.1f} s")
sys.exit(tap.done())
