#!/usr/bin/env python3
"""kvpick-sidecar as a process between clients and simulated engines: routes, header fields, bodies kept byte for byte,
broken clients and engines at every stage, limits, back-pressure, drain, kills. Arguments choose sections by name."""

import json
import os
import re
import signal
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time

LIB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
sys.path.insert(0, LIB)
from node import SLOW, Tap, free_port, wait_for
from pd import (
    CHAT,
    HANDOFF,
    IDS,
    STREAM,
    Client,
    Conn,
    Engine,
    Pair,
    Sidecar,
    answer,
    ask,
    certificate,
    fixed,
    has_ipv6,
    sglang,
    silent,
    trt_context,
    trt_generation,
    vllm_decode,
    vllm_prefill,
)

tap = Pair.tap = Tap()
PATHS = ("/v1/chat/completions", "/v1/completions")
HOP = ("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer")
HOP += ("upgrade", "host")  # of one connection, or rewritten


def sgl_pair(prefill=None, decode=None, **env):
    """Two engines that wait for each other as the real ones do, unless a script is given."""
    pair = {}
    p = sglang("prefill", lambda: pair["d"], prefill)
    d = sglang("decode", lambda: pair["p"], decode)
    x = Pair(p, d, "sglang", **env)
    pair["p"], pair["d"] = x.p, x.d
    return x


def aborts(e):
    return len(e.calls("/abort_request"))


# ---- routes and passing through ----


def segments(client):
    """Segments with data that a client has got; the kernel's count takes those in that came twice."""
    info = client.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return struct.unpack_from("I", info, 152)[0]


def routes():
    d = Engine(fixed(200, b"engine", {"x-engine": "d0"}))
    s = Sidecar(d.port, "vllm_nixl")
    with Client(s.port) as c:
        for method in ("GET", "HEAD"):
            for path in ("/health", "/ready"):
                got = c.ask(method, path)
                tap.same((got.status, got.body), (200, b""), f"{method} {path} is answered here")
        tap.same(c.ask("POST", "/health", b"").status, 405, "POST /health: 405")
        for path in PATHS:
            for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD"):
                got = c.ask(method, path)
                tap.same((got.status, got.body, got.header("allow")), (405, b"", "POST"), f"{method} {path}: 405")
        for path in (
            "/",
            "/metrics",
            "/v1",
            "/v2/models",
            "/server_info",
            "/abort_request",
            "/v1/../metrics",
            "/v1/%2e%2E/metrics",
            "/v1/./../x",
            "/healthz",
            "/health/",
        ):
            tap.same((c.ask("GET", path).status), 404, f"GET {path}: 404, not the engine's")
        tap.same(d.requests, [], "none of these reached the engine")
        for method, path in (
            ("GET", "/v1/models"),
            ("DELETE", "/v1/files/7?x=%20&y"),
            ("PATCH", "/v1/x"),
            ("POST", "/v1/embeddings"),
            ("GET", "/v1/a..b"),
            ("HEAD", "/v1/models"),
            ("PROPFIND", "/v1/x"),
        ):
            got = c.ask(method, path, b"abc" if method == "POST" else b"", {"x-prefiller-host-port": "nonsense"})
            want = b"" if method == "HEAD" else b"engine"
            tap.same((got.status, got.body, got.header("x-engine")), (200, want, "d0"), f"{method} {path} is proxied")
            r = d.requests[-1]
            tap.same(
                (r.method, r.path, r.header("x-prefiller-host-port")),
                (method, path, None),
                f"{method} {path}: as it came, without the prefill header",
            )
        got = c.ask("GET", f"http://elsewhere:1{'/v1/models'}?q=1")
        tap.same(
            (got.status, d.requests[-1].path), (200, "/v1/models?q=1"), "an absolute target: its authority is ignored"
        )
    got = ask(s.port, b"", method="GET", path="/v1/models", version="1.0")
    tap.same((got.status, got.body, got.header("transfer-encoding")), (200, b"engine", None), "HTTP/1.0 is served")
    tap.same(s.stop(), 0, "routes: ends with 0")
    d.close()


def passing():
    """Status, fields and bytes are the engine's; nothing is parsed, nothing is kept back."""

    def script(engine, req):
        req.conn.head(
            202,
            [
                ("x-custom", "a"),
                ("x-custom", "b"),
                ("connection", "x-hop"),
                ("x-hop", "1"),
                *((k, "x") for k in HOP if k != "connection"),
                ("content-type", "application/vnd.x"),
            ],
            reason="Odd Reason",
        )
        req.conn.chunk(b"first")
        engine.go.wait(10)
        req.conn.chunk(b"second")
        req.conn.last()

    d = Engine(script)
    d.go = threading.Event()
    s = Sidecar(d.port)
    with Client(s.port) as c:
        c.send(
            "POST",
            "/v1/chat/completions?a=1",
            b'{ "n": 3,, not json',
            [
                ("Connection", "keep-alive, X-Mine"),
                ("X-Mine", "1"),
                *((k.title(), "x") for k in HOP if k not in ("connection", "host")),
                ("Authorization", "Bearer k"),
                ("Cookie", "a=b"),
                ("Cookie", "c=d"),
                ("x-gateway-destination-endpoint", "e"),
                ("x-dynamo-routing-mode", "disaggregated"),
                ("Accept-Encoding", "gzip"),
                ("traceparent", "00-1"),
            ],
        )
        status, headers = c.head()
        first = c.chunk()
        tap.same((status, first), (202, b"first"), "head and first bytes come before the engine has ended")
        d.go.set()
        tap.same((c.chunk(), c.chunk()), (b"second", b""), "then the rest and the end")
        names = sorted(k.lower() for k, _ in headers)
        tap.same(names, ["content-type", "transfer-encoding", "x-custom", "x-custom"], "hop-by-hop fields stay behind")
        r = d.requests[0]
        tap.same(r.body, b'{ "n": 3,, not json', "the body passes as it is")
        tap.same(r.path, "/v1/chat/completions?a=1", "path and query pass as they are")
        gone = [k for k, _ in r.headers if k.lower() in ("x-mine", *HOP) and k != "host"]
        tap.same(gone, [], "hop-by-hop and nominated fields do not reach the engine")
        tap.same([v for k, v in r.headers if k == "Cookie"], ["a=b", "c=d"], "repeated fields pass, in order")
        kept = [
            r.header(k)
            for k in (
                "authorization",
                "x-gateway-destination-endpoint",
                "x-dynamo-routing-mode",
                "accept-encoding",
                "traceparent",
            )
        ]
        tap.same(kept, ["Bearer k", "e", "disaggregated", "gzip", "00-1"], "all others pass")
        tap.ok(
            re.fullmatch(
                r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", r.header("x-request-id") or ""
            ),
            "a request id is made where there was none",
        )
    tap.same(s.stop(), 0, "passing: ends with 0")
    d.close()


def bodiless():
    """Statuses that have no body: nothing says where one would end, and the connection serves on."""
    said = [b"204 None", b"304 Same", b"304 Same\r\nContent-Length: 5", b"304 Same\r\nTransfer-Encoding: chunked"]
    left = list(said)
    d = Engine(lambda _, req: req.conn.send(b"HTTP/1.1 " + left.pop(0) + b"\r\nX-A: b\r\n\r\n"))
    s = Sidecar(d.port)
    with Client(s.port) as c:
        for want in said:
            c.send("POST", "/v1/chat/completions", CHAT)
            status, fields = c.head()
            tap.same((status, fields), (int(want[:3]), [("X-A", "b")]), f"{want}: the engine's, without a body's framing")
        left.append(b"200 Head\r\nContent-Length: 5")
        c.send("HEAD", "/v1/models")
        tap.same(c.head(), (200, [("X-A", "b")]), "the answer to HEAD")
        tap.same(c.ask("GET", "/health").status, 200, "nothing came behind them")
    tap.same(s.stop(), 0, "bodiless: ends with 0")
    d.close()


def pieces():
    """Head and body of an answer that came in one piece leave in one piece."""

    def at_once(_engine, req):
        req.conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nBlue")

    e = Engine(at_once)
    s = Sidecar(e.port)
    seen, bodies = [], set()
    with Client(s.port) as c:
        for _ in range(20):
            before = segments(c)
            bodies.add(c.ask("POST", "/v1/chat/completions", CHAT).body)
            seen.append(segments(c) - before)
    tap.same((bodies, min(seen)), ({b"Blue"}, 1), "head and body of a small answer are one segment")
    s.stop()
    e.close()


def uploads():
    """Bodies of requests pass in pieces, of any size, in either framing."""
    d = Engine(lambda e, r: r.conn.reply(200, str(len(r.body)) + r.header("x-request-id")))
    s = Sidecar(d.port, DYN_SIDECAR_MAX_REQUEST_BYTES=1000)
    big = os.urandom(3_000_000)
    for size, chunked in ((0, None), (10, None), (70_000, None), (3_000_000, None), (10, 3), (3_000_000, 70_000)):
        got = ask(s.port, big[:size], headers={"x-request-id": "-r"}, chunked=chunked)
        tap.same(got.body, f"{size}-r".encode(), f"{size} bytes, {'chunked' if chunked else 'by length'}")
        tap.ok(d.requests[-1].body == big[:size], "arrive as they were")
    tap.same(d.accepted, 5, "what is long, or may be, could not be repeated: it takes no connection that was used")
    with Client(s.port) as c:
        c.send("POST", "/v1/embeddings", b"abc", length=6)
        tap.ok(
            wait_for(lambda: d.begun and d.begun[-1].path == "/v1/embeddings"),
            "the engine sees a request whose body is still coming",
        )
        c.sock.sendall(b"def")
        tap.same(c.read().status, 200, "and answers when it has come")
        tap.same(d.requests[-1].body, b"abcdef", "both pieces")
    with Client(s.port) as c:
        c.send("POST", "/v1/embeddings", b"", {"Expect": "100-continue"}, length=3)
        tap.same(c.head()[0], 100, "100-continue is answered here")
        c.sock.sendall(b"xyz")
        tap.same(c.read().status, 200, "then the request is served")
        tap.same(d.requests[-1].header("expect"), None, "and not asked for again")
    with Client(s.port) as c:
        for i in range(3):
            c.send("POST", "/v1/embeddings", b"%d" % i)
        tap.same([c.read().status for _ in range(3)], [200] * 3, "pipelined requests are answered in order")
        tap.same([r.body for r in d.requests[-3:]], [b"0", b"1", b"2"], "and run in order")
    tap.same(s.stop(), 0, "uploads: ends with 0")
    d.close()


class Early(Engine):
    """Answers when it has the head of a request; the rest of its answer comes when go is set."""

    go = threading.Event()

    def serve(self, sock):
        conn = Conn(sock, self)
        try:
            while conn.line():
                pass
            conn.head(200, [("content-type", "text/event-stream")])
            conn.chunk(b"one")
            self.go.wait(60)
            conn.chunk(b"two")
            conn.last()
            while True:
                conn.fill()
        except OSError:
            sock.close()


def early():
    """An engine may answer before the upload is there; then the answer is the last one of its connection."""
    d = Early(None)
    s = Sidecar(d.port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    for name, more, rest in (
        ("goes on", b"3\r\ndef\r\n0\r\n\r\n", b"3\r\ntwo\r\n0\r\n\r\n"),
        ("goes on after it", b"", b"3\r\ntwo\r\n0\r\n\r\n"),
        ("is no HTTP any more", b"zz\r\n", b""),
    ):
        d.go.clear()
        with Client(s.port) as c:
            c.sock.sendall(head)
            status, fields = c.head()
            tap.same((status, dict(fields).get("connection"), c.chunk()), (200, "close", b"one"), f"the upload {name}: answered")
            c.sock.sendall(more)
            if rest:
                d.go.set()
            tap.ok(c.closed(), f"the upload {name}: the connection ends")
            tap.same(c.buf, rest, f"the upload {name}: behind the rest of the answer, and nothing else")
        d.go.set()
    tap.ok(wait_for(lambda: s.metric("requests_inflight") == 0), "nothing runs any more")
    tap.same(s.stop(), 0, "early: ends with 0")
    d.close()


def bad_http():
    d = Engine(fixed(200, b"x"))
    s = Sidecar(d.port)
    cases = [
        (
            b"GET /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "both lengths",
        ),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", 400, "two lengths"),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "a foreign coding"),
        (b"POST /v1/x HTTP/2.0\r\nHost: a\r\n\r\n", 505, "another version"),
        (b"GET  /v1/x HTTP/1.1\r\nHost: a\r\n\r\n", 400, "two blanks"),
        (b"GET /v1/x HTTP/1.1\r\nHost: a\r\nX: a\x01b\r\n\r\n", 400, "a control byte"),
        (b"GET /v1/x HTTP/1.1\r\nHost: a\r\nX-Big: " + b"a" * 70000 + b"\r\n\r\n", 431, "64 KiB of fields"),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nExpect: x\r\nContent-Length: 1\r\n\r\n", 417, "another expectation"),
    ]
    for raw, status, name in cases:
        with Client(s.port) as c:
            c.sock.sendall(raw)
            got = c.read()
            tap.same((got.status, got.header("connection")), (status, "close"), f"{name}: {status}")
            tap.ok(c.closed(), f"{name}: the connection closes")
    with Client(s.port) as c:
        c.sock.sendall(b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        tap.same(c.read().status, 400, "a bad chunk: 400")
    tap.same(d.requests, [], "none of them was a request to the engine")
    tap.same(s.stop(), 0, "bad_http: ends with 0")
    d.close()


def header_values():
    """Whatever is not exactly one target never reaches an engine."""
    x = Pair(vllm_prefill(), vllm_decode())
    with open("tests/vectors/disagg.json", encoding="utf-8") as f:
        cases = json.load(f)["header_validation"]["cases"]
    bad = [c["value"] for c in cases if not c["valid"] and c["value"].strip() == c["value"]]
    bad += ["10.0.0.1:99999", "fd00::1:8000", "http://a:1", "[fe80::1%eth0]:80"]
    for v in bad:
        with Client(x.port) as c:
            c.sock.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n"
                b"X-Prefiller-Host-Port: " + v.encode() + b"\r\n\r\n{}"
            )
            got = c.read()
        tap.same((got.status, got.code()), (502, "invalid_epp_metadata"), f"R09 {v!r} is refused")
    good = x.p.authority
    for pair in ((good, good), (good, "b:1"), ("", good)):
        got = ask(x.port, CHAT, headers=[("x-prefiller-host-port", pair[0]), ("X-PREFILLER-HOST-PORT", pair[1])])
        tap.same(got.code(), "invalid_epp_metadata", f"R09 two lines {pair} are refused")
    tap.same((x.p.requests, x.d.requests), ([], []), "R09 no engine was asked")
    for path in PATHS:
        body = CHAT if "chat" in path else {"model": "m", "prompt": "Why?"}
        got = x.ask(body, path=path)
        tap.same(got.status, 200, f"R09 one target: {path} runs the protocol")
        tap.same(
            [r.header("x-prefiller-host-port") for r in (x.p.requests[-1], x.d.requests[-1])],
            [None, None],
            "and no engine sees the header",
        )
    x.end("header_values")


def no_adapter():
    """A prefill engine is named, but no protocol is configured."""
    x = Pair(vllm_prefill(), fixed(200, b"engine"), None)
    for path in PATHS:
        got = x.ask(CHAT, path=path)
        tap.same((got.status, got.code()), (501, "pd_adapter_unavailable"), f"no adapter, {path}: 501")
    tap.same((x.p.requests, x.d.requests), ([], []), "no adapter: no engine was asked")
    tap.same(ask(x.port, CHAT).body, b"engine", "no adapter: what names no prefill engine passes")
    x.end("no_adapter")


def base_path():
    """8.6: what goes to the engine on localhost is the base path, the request's path, the query as it is."""
    for base, want in (("/engine/v9/", "/engine/v9"), ("/a", "/a"), ("/", ""), ("", "")):
        x = Pair(vllm_prefill(), vllm_decode(), KVPICK_SIDECAR_ENGINE_BASE_PATH=base)
        path = "/v1/chat/completions?a=%20&b=/x?y"
        x.ask(CHAT, path=path)
        tap.same(
            [e.requests[-1].path for e in (x.p, x.d)],
            [path, want + path],
            f"target URL keeps a base path and the query: {base!r}: decode leg; the prefill engine has none",
        )
        x.d.script = fixed(200, b"x")
        for method, path in (("POST", path), ("GET", "/v1/models?q=/../"), ("GET", "/v1/x?")):
            ask(x.port, CHAT if method == "POST" else b"", method=method, path=path)
            tap.same(x.d.requests[-1].path, want + path, f"target URL keeps a base path and the query: {base!r} {path}")
        x.end("base_path")
    p, d = Engine(sglang("prefill", script=silent)), Engine(None)
    inner = sglang("decode", script=silent)

    def below(engine, req):
        whole, req.path = req.path, req.path.removeprefix("/b")
        engine.seen.append(whole)
        inner(engine, req)

    d.script, d.seen = below, []
    s = Sidecar(d.port, "sglang", KVPICK_SIDECAR_ENGINE_BASE_PATH="/b")
    with Client(s.port) as c:
        c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": p.authority})
        wait_for(lambda: p.generated() and d.generated())
    paths = ["/server_info", "/v1/chat/completions", "/abort_request"]
    wait_for(lambda: len(p.requests) == len(d.requests) == 3)
    tap.same((d.seen, [r.path for r in p.requests]), (["/b" + v for v in paths], paths), "base path: SGLang's calls, too")
    tap.same(s.stop(), 0, "base_path: ends with 0")
    p.close()
    d.close()
    d = Engine(fixed(200, b"x"))
    s = Sidecar(d.port, None, KVPICK_SIDECAR_ENGINE_BASE_PATH="/b", KVPICK_SIDECAR_PROFILE="llmd")
    for path in ("/../x", "/v1/%2e%2e/%2E%2E/x"):
        tap.same(ask(s.port, b"", method="GET", path=path).status, 404, f"base path: {path} does not climb out of it")
    tap.same((ask(s.port, b"", method="OPTIONS", path="*").status, d.requests[-1].path), (200, "*"), "base path: not before *")
    tap.same((s.stop(), len(d.requests)), (0, 1), "base_path: ends with 0")
    d.close()
    for bad in ("v1", "/a?b", "/a#b", "/a b", "/a\tb", "/a\x7f", "/\u00e9", "http://a/"):
        s = Sidecar(free_port(), wait=False, KVPICK_SIDECAR_ENGINE_BASE_PATH=bad)
        tap.same(s.wait(), 2, f"base path {bad!r} ends the process with 2")
        tap.ok(wait_for(lambda s=s: b"KVPICK_SIDECAR_ENGINE_BASE_PATH" in s.log), "and is named", s.log)


def both_legs():
    """What of a request's own fields reaches the engines; the query; a prefill engine at an IPv6 address."""
    hop = [("Connection", "keep-alive, X-Mine"), ("X-Mine", "1"), ("TE", "trailers"), ("Keep-Alive", "9")]
    own = [("authorization", "Bearer k"), ("x-custom", "c"), ("x-gateway-destination-endpoint", "e")]
    own += [("x-dynamo-routing-mode", "disaggregated")]
    for host in ("127.0.0.1", "::1") if has_ipv6() else ("127.0.0.1",):
        p, d = Engine(vllm_prefill(), host), Engine(vllm_decode())
        s = Sidecar(d.port, "vllm_nixl")
        got = ask(s.port, CHAT, p.authority, headers=hop + own, path="/v1/chat/completions?a=%20&b")
        tap.same(got.status, 200, f"{host}: both legs")
        for name, r in (("prefill", p.requests[0]), ("decode", d.requests[0])):
            tap.same(
                (r.method, r.path, r.header("x-prefiller-host-port")),
                ("POST", "/v1/chat/completions?a=%20&b", None),
                f"{host}: {name} gets method, path and query, not the prefill header",
            )
            tap.same(r.json()["messages"], CHAT["messages"], f"{host}: {name} gets the client's members")
            tap.same([r.header(k) for k, _ in own], [v for _, v in own], f"{host}: {name} gets the client's fields")
            tap.same([r.header(k) for k in ("x-mine", "te", "keep-alive")], [None] * 3, f"{host}: {name}: none of a hop")
        with Client(s.port) as c:
            kind = [("Content-Type", "text/plain"), ("content-type", "a/b"), ("x-prefiller-host-port", p.authority)]
            tap.same(c.ask("POST", "/v1/completions", CHAT, kind).status, 200, f"{host}: whatever the client calls its body")
        for name, r in (("prefill", p.requests[1]), ("decode", d.requests[1])):
            kinds = [v for k, v in r.headers if k.lower() == "content-type"]
            tap.same(kinds, ["application/json"], f"{host}: {name}: it is JSON")
        tap.same(s.stop(), 0, f"{host}: ends with 0")
        p.close()
        d.close()


def allowlist():
    x = Pair(
        vllm_prefill(),
        vllm_decode(),
        KVPICK_SIDECAR_PREFILL_ALLOWLIST="10.0.0.0/8,pf.example:8000,fd00::/8,127.0.0.0/8",
    )
    tap.same(x.ask(CHAT).status, 200, "R10 a target in a listed network is used")
    for v in ("192.0.2.1:80", "localhost:80", "pf.example:8001", "[2001:db8::1]:80", "11.0.0.1:80"):
        tap.same(ask(x.port, CHAT, v).code(), "invalid_epp_metadata", f"R10 {v} is not allowed")
    x.end("allowlist")


def strict_strip():
    names = (
        "x-gateway-destination-endpoint",
        "x-gateway-inference-objective",
        "x-dynamo-dp-rank",
        "x-dynamo-routing-mode",
        "x-gateway-model-name-rewrite",
    )
    for strict in ("false", "true"):
        x = Pair(vllm_prefill(), vllm_decode(), KVPICK_SIDECAR_STRIP_STRICT=strict)
        x.ask(CHAT, headers=[(n, "v") for n in names])
        for e in (x.p, x.d):
            seen = [n for n in names if e.requests[0].header(n)]
            tap.same(
                seen, [] if strict == "true" else list(names), f"strict={strict}: orchestration fields at the engine"
            )
        x.end("strict_strip")


def ranks():
    """PR#9936: each engine sees its own rank."""
    x = Pair(vllm_prefill(), vllm_decode())
    x.ask(CHAT, headers=[("x-data-parallel-rank", "5"), ("x-prefiller-dp-rank", "2")])
    tap.same(
        [e.requests[0].header("x-data-parallel-rank") for e in (x.p, x.d)], ["2", "5"], "prefill rank 2, decode rank 5"
    )
    tap.same(
        [e.requests[0].header("x-prefiller-dp-rank") for e in (x.p, x.d)], [None, None], "the field for it stays here"
    )
    x.ask(CHAT, headers=[("x-data-parallel-rank", "5")])
    tap.same(
        [e.requests[1].header("x-data-parallel-rank") for e in (x.p, x.d)],
        [None, "5"],
        "dynamo PR#9936: the decode rank is never prefill's",
    )
    x.end("ranks")


# ---- vLLM ----


def vllm_bodies():
    x = Pair(vllm_prefill(), vllm_decode())
    odd = (
        b'{ "model" : "m",\t"messages":[{"role":"user","content":"\\ud800 \\u00e9 /\\/"}] ,"big":123456789012345678901234567890,'
        b'"f":1.50e+2, "max_tokens" : 40 ,"x":{"stream":1,"max_tokens":2},"x":7,"stream":true , "stream_options":{"include_usage":true},'
        b'"min_tokens":5,"tools":[{"type":"function"}],"kv_transfer_params":null,"k\\u0065y":"stays" }'
    )
    got = x.ask(odd)
    tap.same((got.status, got.header("content-type")), (200, "text/event-stream"), "a body with every oddity is served")
    p, d = x.p.requests[0].body, x.d.requests[0].body
    kept = b'{ "model" : "m",\t"messages":[{"role":"user","content":"\\ud800 \\u00e9 /\\/"}] ,"big":123456789012345678901234567890,"f":1.50e+2'
    tap.ok(p.startswith(kept) and d.startswith(kept), "bytes that need no change have none", (p, d))
    tap.ok(
        b'"x":{"stream":1,"max_tokens":2},"x":7' in p and b'"k\\u0065y":"stays"' in p,
        "also doubled and nested members, and escaped names",
    )
    tap.same(
        [k for k in ("stream_options", "min_tokens") if k in json.loads(p)],
        [],
        "prefill loses stream_options and min_tokens",
    )
    tap.ok(d.startswith(odd[: odd.index(b',"kv_transfer')]), "decode has the client's bytes up to the handoff")
    tap.same(json.loads(d)["kv_transfer_params"], HANDOFF, "and the handoff of the prefill engine")
    tap.same(got.body.count(b"[DONE]"), 1, "one [DONE]")
    tap.ok(b"Secret" not in got.body and b"include" not in got.body, "nothing of the prefill answer is shown")
    x.ask(b'{"model":"m","max\\u005ftokens":50,"max_tokens":60,"n":2,"n":1,"messages":[]}')
    body = x.p.requests[1].body
    tap.same(
        (body.count(b"50"), body.count(b"60"), json.loads(body)["max_tokens"]),
        (0, 0, 1),
        "an escaped name is the name it spells; all copies go",
    )
    for limits in ({}, {"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 8, "max_completion_tokens": 9}):
        got = x.ask({"messages": [], **limits})
        p, d = (e.requests[-1].json() for e in (x.p, x.d))
        want = {"max_tokens": 1, **({"max_completion_tokens": 1} if "max_completion_tokens" in limits else {})}
        tap.same(
            ({k: v for k, v in p.items() if k.startswith("max")}, {k: v for k, v in d.items() if k.startswith("max")}),
            (want, limits),
            f"routing-sidecar#58, production-stack#747: limits {limits}: prefill makes one token, decode keeps them",
        )
    got = x.ask(
        {
            "messages": [],
            "min_tokens": 4,
            "min_completion_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    tap.same(
        got.status, 200, "router PR#2, production-stack PR#971: min_tokens and stream_options do not break prefill"
    )
    tap.ok(b'"usage"' in got.body, "and the client gets usage")
    prompt = "x" * 200_000
    got = x.ask({"messages": [{"role": "user", "content": prompt}], "stream": True})
    tap.same(
        (got.status, [e.requests[-1].json()["messages"][0]["content"] == prompt for e in (x.p, x.d)]),
        (200, [True, True]),
        "200 KB of prompt reach both engines",
    )
    tap.same([e.requests[-1].header("content-type") for e in (x.p, x.d)], ["application/json"] * 2, "legs are JSON")
    x.ask(CHAT, headers=[("Accept-Encoding", "gzip"), ("x-request-id", "same")])
    tap.same(
        [e.requests[-1].header("accept-encoding") for e in (x.p, x.d)],
        [None, "gzip"],
        "no compression on the prefill leg",
    )
    tap.same(
        [e.requests[-1].header("x-request-id") for e in (x.p, x.d)], ["same", "same"], "one request id on both legs"
    )
    x.ask(CHAT)
    a, b = (e.requests[-1].header("x-request-id") for e in (x.p, x.d))
    tap.ok(a and a == b and a != "same", "also one that the sidecar made")
    x.end("vllm_bodies")


def vllm_refused():
    """What is refused before any engine is asked."""
    x = Pair(vllm_prefill(), vllm_decode(), DYN_SIDECAR_MAX_REQUEST_BYTES=4096, DYN_SIDECAR_CLIENT_BODY_TIMEOUT_MS=300)
    deep = b'{"a":' + b"[" * 127 + b"]" * 127 + b"}"
    cases = [
        ("not JSON", b"{", 400, "invalid_pd_request"),
        ("empty", b"", 400, "invalid_pd_request"),
        ("an array", b"[]", 400, "invalid_pd_request"),
        ("a byte order mark", b"\xef\xbb\xbf{}", 400, "invalid_pd_request"),
        ("not UTF-8", b'{"a":"\xff"}', 400, "invalid_pd_request"),
        ("too deep", b'{"a":' + b"[" * 128 + b"]" * 128 + b"}", 400, "invalid_pd_request"),
        ("two values", b"{}{}", 400, "invalid_pd_request"),
        ("a handoff", b'{"kv_transfer_params":{"do_remote_prefill":true}}', 400, "invalid_pd_request"),
        ("a handoff that is none", b'{"kv_transfer_params":[]}', 400, "invalid_pd_request"),
        (
            "the last of two handoffs",
            b'{"kv_transfer_params":{},"kv_transfer_params":{"a":1}}',
            400,
            "invalid_pd_request",
        ),
        ("an escaped handoff", b'{"kv\\u005ftransfer_params":{"a":1}}', 400, "invalid_pd_request"),
        ("too large", b'{"a":"' + b"x" * 4096 + b'"}', 413, "pd_request_too_large"),
    ]
    cases += [
        (f"n={n}", b'{"n":' + n + b"}", 400, "unsupported_pd_variant")
        for n in (b"2", b"3", b"0", b"null", b'"1"', b"true", b"1.0", b"-1", b"1e0")
    ]
    for name, body, status, code in cases:
        got = x.ask(body)
        tap.same((got.status, got.code()), (status, code), f"{name}: {status} {code}")
        if len(body) > 10:
            tap.same(x.ask(body, chunked=100).code(), code, f"{name}: the same in chunks")
    exact = b'{"a":"' + b"x" * (4096 - 8) + b'"}'
    tap.same(x.ask(b'{"kv_transfer_params":{"a":1},"kv_transfer_params":{}}').status, 200, "the last of two counts")
    tap.same((len(exact), x.ask(exact).status), (4096, 200), "exactly the limit is allowed")
    tap.same(x.ask(deep).status, 200, "depth 128 is allowed")
    before = len(x.p.requests)
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", b"", {"x-prefiller-host-port": x.p.authority}, length=4097)
        tap.same(c.read().code(), "pd_request_too_large", "an announced size is enough to refuse")
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", b'{"a', {"x-prefiller-host-port": x.p.authority}, length=50)
        for _ in range(4):
            time.sleep(0.05)
            c.sock.sendall(b" ")
        tap.same(c.read().code(), "pd_request_timeout", "a dribbling client: 408 in total time")
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", b'{"a', {"x-prefiller-host-port": x.p.authority}, length=50)
        c.drop()
    tap.same(len(x.p.requests), before, "none of them reached the prefill engine")
    x.end("vllm_refused")


def prefill_says(name, script, status, code, **env):
    x = Pair(script, vllm_decode(), **env)
    started = time.monotonic()
    got = x.ask(STREAM)
    took = time.monotonic() - started
    tap.same((got.status, got.code()), (status, code), f"prefill {name}: {status} {code}")
    tap.same(list(got.json()["error"]), ["message", "type", "param", "code"], f"prefill {name}: in the envelope")
    tap.ok(
        "decode" not in got.json()["error"]["message"] and b"leak" not in got.body,
        f"prefill {name}: neither the engine's words nor the other leg are named",
    )
    tap.same(x.d.requests, [], f"prefill {name}: decode is not contacted")
    x.end(f"prefill {name}")
    return took


def dribble(engine, req):
    req.conn.head(200, [], 1_000_000)
    while True:
        req.conn.send(b" " * 64)
        time.sleep(0.01)


def stall(engine, req):
    req.conn.head(200, [("content-type", "application/json")], 32)
    silent(engine, req)


def cut(engine, req):
    req.conn.head(200, [], 100)
    req.conn.send(b'{"kv')
    raise ConnectionError


def vllm_prefill_fails():
    for status in (400, 401, 404, 429, 500, 503, 302):
        prefill_says(f"answers {status}", fixed(status, {"error": "leak"}), status, "prefill_upstream_error")
    bad = "invalid_prefill_handoff"
    prefill_says("answers no JSON", fixed(200, b"leak"), 502, bad)
    prefill_says("answers events", lambda e, r: r.conn.events('data: {"a":"leak"}\n\ndata: [DONE]\n\n'), 502, bad)
    prefill_says("has no handoff", fixed(200, {"choices": []}), 502, bad)
    prefill_says("has a flat handoff", vllm_prefill({**HANDOFF, "remote_block_ids": [1, 2]}), 502, bad)
    prefill_says("has a handoff of null", vllm_prefill(None), 502, bad)
    prefill_says("answers nothing", fixed(204, b""), 502, bad)
    prefill_says("breaks off in its body", cut, 502, bad)
    prefill_says(
        "resets behind its head", lambda e, r: (r.conn.head(200, [], 9), time.sleep(0.05), r.conn.reset()), 502, bad
    )
    prefill_says("sends bad chunks", lambda e, r: (r.conn.head(200), r.conn.send(b"zz\r\n")), 502, bad)
    gone = "prefill_upstream_unavailable"
    prefill_says("resets at once", lambda e, r: r.conn.reset(), 502, gone)
    prefill_says(
        "closes at once", lambda e, r: r.conn.hang(0.01) or (_ for _ in ()).throw(ConnectionError()), 502, gone
    )
    prefill_says("speaks something else", lambda e, r: r.conn.send(b"220 smtp\r\n\r\n"), 502, gone)
    prefill_says("is silent", silent, 504, "prefill_upstream_timeout", DYN_SIDECAR_READ_TIMEOUT_MS=200)
    prefill_says("stalls behind its head", stall, 504, "prefill_upstream_timeout", DYN_SIDECAR_READ_TIMEOUT_MS=200)
    prefill_says(
        "stalls in its body",
        lambda e, r: (r.conn.head(200, [], 32), r.conn.send(b'{"kv_tr'), silent(e, r)),
        504,
        "prefill_upstream_timeout",
        DYN_SIDECAR_READ_TIMEOUT_MS=200,
    )
    prefill_says(
        "dribbles",
        dribble,
        504,
        "prefill_deadline_exceeded",
        DYN_SIDECAR_READ_TIMEOUT_MS=5000,
        DYN_SIDECAR_PREFILL_DEADLINE_MS=300,
    )
    large = "prefill_response_too_large"
    prefill_says(
        "announces too much",
        lambda e, r: (r.conn.head(200, [], 5000), silent(e, r)),
        502,
        large,
        DYN_SIDECAR_MAX_PREFILL_RESPONSE_BYTES=4096,
    )
    prefill_says(
        "says too much",
        lambda e, r: (r.conn.head(200), r.conn.chunk(b" " * 5000), silent(e, r)),
        502,
        large,
        DYN_SIDECAR_MAX_PREFILL_RESPONSE_BYTES=4096,
    )
    x = Pair(vllm_prefill(), vllm_decode())
    tap.same(ask(x.port, CHAT, f"127.0.0.1:{free_port()}").code(), gone, "prefill port closed: unavailable")
    tap.same(ask(x.port, CHAT, "no-such-name.invalid:80").code(), gone, "prefill name unknown: unavailable")
    tap.same(ask(x.port, CHAT, f"localhost:{x.p.port}").status, 200, "prefill by name")
    tap.same(ask(x.port, CHAT, f"localhost:0{x.p.port}").status, 200, "and port with a leading zero")
    if has_ipv6():
        tap.same(ask(x.port, CHAT, f"[::1]:{free_port()}").code(), gone, "prefill by IPv6, closed: unavailable")
    x.end("vllm_prefill_fails")


def vllm_decode_fails():
    x = Pair(
        vllm_prefill(),
        fixed(429, {"error": {"message": "busy"}}, {"retry-after": "3", "content-type": "x/y"}, "Slow Down"),
    )
    got = x.ask(CHAT)
    tap.same(
        (got.status, got.header("retry-after"), got.json()),
        (429, "3", {"error": {"message": "busy"}}),
        "decode's own error is relayed whole",
    )
    x.end("decode 429")
    for name, script, status, code, env in (
        ("resets", lambda e, r: r.conn.reset(), 502, "decode_upstream_error", {}),
        ("is silent", silent, 504, "decode_upstream_timeout", {"DYN_SIDECAR_READ_TIMEOUT_MS": 200}),
        ("is no HTTP", lambda e, r: r.conn.send(b"hello\r\n\r\n"), 502, "decode_upstream_error", {}),
    ):
        x = Pair(vllm_prefill(), script, **env)
        for prefill in (x.p.authority, None):
            got = ask(x.port, CHAT, prefill)
            tap.same(
                (got.status, got.code()),
                (status, code),
                f"decode {name}, {'both legs' if prefill else 'passed through'}: {status} {code}",
            )
        tap.same(len(x.p.requests), 1, "prefill is not asked again")
        x.end(f"decode {name}")

    def breaks(engine, req):
        req.conn.head(200, [("content-type", "text/event-stream")])
        req.conn.chunk(b"data: 1\n\n")
        time.sleep(0.05)
        req.conn.reset()

    x = Pair(vllm_prefill(), breaks)
    got = x.ask(STREAM)
    tap.same(
        (got.status, got.body, got.ended),
        (200, b"data: 1\n\n", "broken"),
        "decode breaks in its stream: the client sees the break, no [DONE]",
    )
    with Client(x.port) as c:
        got = c.ask("POST", "/v1/chat/completions", CHAT, version="1.0")
        tap.same(got.ended, "broken", "also where only the connection's end ends the body")
    x.end("decode breaks")
    x = Pair(
        vllm_prefill(),
        lambda e, r: (r.conn.head(200), r.conn.chunk(b"a"), silent(e, r)),
        DYN_SIDECAR_READ_TIMEOUT_MS=200,
    )
    tap.same(x.ask(STREAM).ended, "broken", "decode stalls in its stream: the client sees the break")
    x.end("decode stalls")


def concurrent():
    """PR#36958: handoffs of requests with one id stay apart."""

    def prefill(engine, req):
        name = req.json()["messages"][0]["content"]
        time.sleep(0.02)
        vllm_prefill({**HANDOFF, "remote_request_id": name})(engine, req)

    def decode(engine, req):
        b = req.json()
        req.conn.reply(200, {"same": b["kv_transfer_params"]["remote_request_id"] == b["messages"][0]["content"]})

    x = Pair(prefill, decode)
    out = []

    def one(i):
        out.append(x.ask({"messages": [{"content": f"r{i}"}]}, headers={"x-request-id": "one"}).json())

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    tap.same(out, [{"same": True}] * 8, "vllm PR#36958: 8 requests with one id at once: none gets another's handoff")
    x.end("concurrent")


def gone(x, c, name, engines, how="drop"):
    """The client leaves; every engine that runs sees its connection close within a second."""
    if how == "drop":
        c.drop()
    else:
        c.reset()
    tap.ok(wait_for(lambda: all(e.ended for e in engines), 3), f"{name} ({how}): engines are let go")


def vllm_aborts():
    for how in ("drop", "reset"):
        x = Pair(silent, vllm_decode())
        c = Client(x.port)
        c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
        wait_for(lambda: x.p.requests)
        gone(x, c, "client leaves while prefill is pending", [x.p], how)
        tap.same(x.d.requests, [], "decode is never contacted")
        x.end("abort 1")
        x = Pair(lambda e, r: (r.conn.head(200, [], 100), r.conn.send(b"{"), silent(e, r)), vllm_decode())
        c = Client(x.port)
        c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
        wait_for(lambda: x.p.requests)
        gone(x, c, "client leaves while the handoff is read", [x.p], how)
        tap.same(x.d.requests, [], "decode is never contacted")
        x.end("abort 2")
        for prefill in (True, False):
            x = Pair(vllm_prefill(), silent)
            c = Client(x.port)
            c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority} if prefill else {})
            wait_for(lambda: x.d.requests)
            gone(x, c, "client leaves while decode headers are pending", [x.d], how)
            x.end("abort 3")
            x = Pair(vllm_prefill(), lambda e, r: (r.conn.head(200), r.conn.chunk(b"a"), silent(e, r)))
            c = Client(x.port)
            c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority} if prefill else {})
            c.head()
            c.chunk()
            gone(x, c, "client leaves in a stream that is quiet: dropping it cancels the engine's work", [x.d], how)
            x.end("abort 4")
        for size in (30_000, 5_000_000):
            x = Pair(vllm_prefill(), silent)
            c = Client(x.port)
            c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
            c.sock.sendall(b"POST /v1/next HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n" + b"y" * size)
            wait_for(lambda: x.d.requests)
            gone(x, c, f"client leaves behind {size} pipelined bytes", [x.d], how)
            x.end("abort 5")
    x = Pair(vllm_prefill(), lambda e, r: (time.sleep(0.2), answer(r)))
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", STREAM, {"x-prefiller-host-port": x.p.authority})
        c.sock.shutdown(socket.SHUT_WR)
        got = c.read()
        tap.same((got.status, got.ended), (200, "clean"), "a client that only ends its sending is served")

    def slow(engine, req):
        req.conn.head(200)
        req.conn.chunk(b"a")
        time.sleep(0.3)
        req.conn.chunk(b"b" * 20)
        req.conn.last()

    x.d.script = slow
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", STREAM)
        c.head()
        first = c.chunk()
        c.sock.shutdown(socket.SHUT_WR)
        tap.same((first, c.chunk(), c.chunk()), (b"a", b"b" * 20, b""), "also when it ends it in the stream")
    x.end("half close")


# ---- SGLang ----


def sgl_success():
    x = sgl_pair()
    for body in (CHAT, STREAM, {**CHAT, "n": 1}):
        got = x.ask(body)
        tap.same((got.status, got.ended), (200, "clean"), f"both engines meet in their room: {sorted(body)}")
        p, d = x.p.generated()[-1], x.d.generated()[-1]
        tap.same(p.body, d.body, "both get the same bytes")
        tap.same(p.json()["bootstrap_host"], "127.0.0.1", "the host is the prefill engine's")
        tap.same(p.json().get("max_tokens"), 9, "limits stay on the prefill leg")
    rooms = {r.json()["bootstrap_room"] for r in x.p.generated()} | {r.json()["rid"] for r in x.p.generated()}
    tap.same(len(rooms), 6, "room and rid are fresh each time")
    tap.same(
        (len(x.p.calls("/server_info")), len(x.d.calls("/server_info"))), (3, 3), "server info once an engine a request"
    )
    tap.same((aborts(x.p), aborts(x.d)), (0, 0), "no aborts after normal ends")
    info = x.p.calls("/server_info")[0]
    tap.same(
        sorted(k.lower() for k, _ in info.headers),
        ["host"],
        "server info carries no field of the client but authorization",
    )
    got = x.ask(CHAT, headers=[("x-prefiller-dp-rank", "3")])
    tap.same(
        (got.status, x.p.generated()[-1].json()["disagg_prefill_dp_rank"]), (200, 3), "the prefill rank is told to both"
    )
    odd = b'{ "n": 2, "rid" : "own","bootstrap_room":7 }'
    x.d.script = fixed(200, odd, {"x-own": "a"})
    got = ask(x.port, odd)
    tap.same(
        (got.body, got.header("x-own"), x.d.requests[-1].body), (odd, "a", odd), "SGLang: without the header bytes are kept"
    )
    tap.same(len(x.d.calls("/server_info")), 4, "without the header no server info is asked for")
    x.end("sgl_success")
    if has_ipv6():
        d = Engine(None)
        p = Engine(sglang("prefill", lambda: d), "::1")
        d.script = sglang("decode", lambda: p)
        s = Sidecar(d.port, None, DYN_SIDECAR_PD_BACKEND="sglang")
        tap.same(ask(s.port, CHAT, p.authority).status, 200, "an IPv6 prefill engine, adapter by its other name")
        tap.same(p.generated()[0].json()["bootstrap_host"], "::1", "its bootstrap host has no brackets")
        tap.same(s.stop(), 0, "ends with 0")


def sgl_gate():
    """Nothing of the decode answer is seen before prefill has completed; then byte for byte."""
    go = threading.Event()
    sse = "data: {\"choices\":[{\"finish_reason\":null,\"delta\":{\"content\":\"caf\u00e9 \u4e2d\"}}]}\r\n\r\n: c\r\n\r\n".encode()
    full = sse + b'data: {"choices":[{"finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'

    def prefill(engine, req):
        go.wait(10)
        answer(req)

    def decode(engine, req):
        req.conn.head(200, [("content-type", "text/event-stream"), ("x-engine", "d")])
        half = sse.index(b"\xa9")  # in the middle of a character
        req.conn.chunk(full[:half])
        engine.half.set()
        engine.rest.wait(10)
        req.conn.chunk(full[half:])
        req.conn.last()

    x = sgl_pair(prefill, decode)
    x.d.half, x.d.rest = threading.Event(), threading.Event()
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", STREAM, {"x-prefiller-host-port": x.p.authority})
        x.d.half.wait(10)
        c.sock.settimeout(0.3)
        try:
            c.fill()
            early = c.buf
        except (socket.timeout, TimeoutError):
            early = b""
        tap.same(early, b"", "not a byte before prefill completes")
        c.sock.settimeout(20)
        go.set()
        status, headers = c.head()
        half = sse.index(b"\xa9")
        tap.same((status, c.chunk()), (200, full[:half]), "then what was kept comes at once, a half character too")
        tap.ok(("x-engine", "d") in headers, "with the decode engine's fields")
        x.d.rest.set()
        rest = b""
        while True:
            data = c.chunk()
            if not data:
                break
            rest += data
        tap.same((rest, data), (full[half:], b""), "and the rest as it comes")
    x.end("sgl_gate")
    done = threading.Event()
    x = sgl_pair(lambda e, r: (done.wait(5), time.sleep(0.1), answer(r)), lambda e, r: (answer(r), done.set()))
    got = x.ask(STREAM)
    tap.same(
        (got.status, got.ended, got.body.count(b"[DONE]"), aborts(x.d)),
        (200, "clean", 1, 0),
        "llm-d: prefill slower than decode: decode may end before prefill does",
    )
    x.end("sgl early decode")


def sgl_fails(name, prefill, decode, status, code, calls=(1, 1), body=None, retry=None, **env):
    x = sgl_pair(prefill, decode, **env)
    started = time.monotonic()
    got = x.ask(STREAM if body is None else body)
    took = time.monotonic() - started
    tap.same(
        (got.status, got.code(), got.header("retry-after")), (status, code, retry), f"SGLang {name}: {status} {code}"
    )
    tap.ok(took < 4 * SLOW, f"SGLang {name}: without waiting for aborts, which may take 5 s", took)
    wait_for(lambda: (aborts(x.p), aborts(x.d)) == calls, 2)
    tap.same((aborts(x.p), aborts(x.d)), calls, f"SGLang {name}: aborts {calls}")
    rids = {r.json()["rid"] for e in (x.p, x.d) for r in e.calls("/abort_request")} | {
        r.json()["rid"] for e in (x.p, x.d) for r in e.generated()
    }
    tap.ok(len(rids) <= 1, f"SGLang {name}: aborts name the request")
    x.end(f"SGLang {name}")
    return x


def events(*parts):
    return lambda e, r: r.conn.events("".join(f"data: {p}\n\n" for p in parts))


def open_events(*parts):
    def script(engine, req):
        req.conn.head(200, [("content-type", "text/event-stream")])
        req.conn.chunk("".join(f"data: {p}\n\n" for p in parts).encode())
        silent(engine, req)

    return script


OK1, STOP = '{"choices":[{"finish_reason":null}]}', '{"choices":[{"finish_reason":"stop"}]}'


def sgl_failures():
    rej, pro, ups = "pd_engine_rejected", "sglang_pd_protocol_error", "sglang_pd_upstream_error"
    sgl_fails("prefill 503", fixed(503, {"x": 1}), silent, 503, rej)
    sgl_fails("prefill 429 with Retry-After", fixed(429, b"", {"retry-after": "9"}), silent, 429, rej, retry="9")
    sgl_fails("decode 429 with Retry-After", silent, fixed(429, b"", {"retry-after": "7"}), 429, rej, retry="7")
    sgl_fails("decode 302", silent, fixed(302, b"", {"location": "/"}), 502, ups)
    sgl_fails("decode 600", silent, fixed(600, b""), 502, ups)
    sgl_fails("prefill 304", fixed(304, b""), silent, 502, ups)
    sgl_fails("error event of prefill", events(OK1, '{"error":{"message":"x"}}', "[DONE]"), open_events(OK1), 502, pro)
    sgl_fails("prefill without [DONE]", events(OK1, STOP), open_events(OK1), 502, pro)
    sgl_fails(
        "prefill aborted gracefully", events('{"choices":[{"finish_reason":"abort"}]}', "[DONE]"), silent, 502, pro
    )
    sgl_fails(
        "prefill aborted gracefully, JSON",
        fixed(200, '{"choices":[{"finish_reason":"abort"}]}'),
        silent,
        502,
        pro,
        body=CHAT,
    )
    sgl_fails("error event of decode", silent, open_events(OK1, '{"error":"x"}'), 502, pro)
    sgl_fails("decode ends invalid", silent, events(OK1, "[DONE]"), 502, pro, calls=(1, 0))
    sgl_fails("prefill resets", lambda e, r: r.conn.reset(), silent, 502, ups)
    sgl_fails(
        "decode breaks after its 200",
        silent,
        lambda e, r: (r.conn.head(200), time.sleep(0.05), r.conn.reset()),
        502,
        ups,
    )
    sgl_fails("both silent", silent, silent, 504, ups, DYN_SIDECAR_READ_TIMEOUT_MS=300)
    for n in ("null", "0", "2", "-1", '"1"', "true"):
        sgl_fails(f"n={n}", None, None, 400, "unsupported_pd_sampling", (0, 0), b'{"n":%s,"stream":7}' % n.encode())
    sgl_fails("stream=7", None, None, 400, "invalid_pd_request", (0, 0), b'{"stream":7}')
    for name, p, d in (
        ("version", {"version": "0.5.18"}, {}),
        ("decode version", {}, {"version": "x"}),
        ("mode of prefill", {"mode": "decode"}, {}),
        ("mode of decode", {}, {"mode": "prefill"}),
        ("port 0", {"port": 0}, {}),
        ("no port", {"port": None}, {}),
    ):
        x = Pair(sglang(**{"mode": "prefill", **p}), sglang(**{"mode": "decode", **d}), "sglang")
        tap.same(x.ask(CHAT).code(), pro, f"SGLang wrong {name}: protocol error")
        tap.same(
            (x.p.generated(), x.d.generated(), aborts(x.p), aborts(x.d)),
            ([], [], 0, 0),
            "nothing is generated or aborted",
        )
        x.end(f"SGLang {name}")
    for name, script, status, code in (
        ("info 500", fixed(500, b""), 502, ups),
        ("info resets", lambda e, r: r.conn.reset(), 502, ups),
        ("info silent", silent, 504, ups),
        ("info no JSON", fixed(200, b"x"), 502, pro),
        ("info 2 MiB", fixed(200, b" " * (1 << 21)), 502, pro),
    ):
        x = Pair(script, sglang("decode"), "sglang", DYN_SIDECAR_READ_TIMEOUT_MS=300)
        got = x.ask(CHAT)
        tap.same((got.status, got.code()), (status, code), f"SGLang {name}: {status} {code}")
        tap.same(x.d.generated(), [], f"SGLang {name}: nothing is generated")
        x.end(f"SGLang {name}")


def sgl_limits():
    """32 MiB of what is kept back, and of a request."""
    most = 32 << 20

    def flood(size):
        def script(engine, req):
            req.conn.head(200, [("content-type", "text/event-stream")])
            left = size
            while left > 0:
                n = min(left, 1 << 20)
                req.conn.chunk(b":" * (n - 1) + b"\n")
                left -= n
            engine.full.set()
            silent(engine, req)

        return script

    for size, code in ((most, None), (most + 1, "sglang_pd_protocol_error")):
        x = sgl_pair(silent, flood(size))
        x.d.full = threading.Event()
        with Client(x.port) as c:
            c.send("POST", "/v1/chat/completions", STREAM, {"x-prefiller-host-port": x.p.authority})
            if code:
                tap.same(c.read().code(), code, "one byte over 32 MiB before the gate opens: refused")
                wait_for(lambda e=x: (aborts(e.p), aborts(e.d)) == (1, 1), 3)
                tap.same((aborts(x.p), aborts(x.d)), (1, 1), "and both engines are told to stop")
            else:
                x.d.full.wait(20)
                c.sock.settimeout(0.3)
                try:
                    c.fill()
                except (socket.timeout, TimeoutError):
                    pass
                tap.same(c.buf, b"", "exactly 32 MiB before the gate opens: kept")
        x.end("sgl_limits")
    done = b'data: {"choices":[{"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    info = b'{"version":"0.5.19","disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998,"x":"%s"}'
    for over, code in ((0, None), (1, "sglang_pd_protocol_error")):
        text = b":" * (most + over - len(done) - 1) + b"\n" + done
        x = sgl_pair(lambda _, req, text=text: req.conn.events(text, 1 << 20))
        tap.same(x.ask(STREAM).code(), code, f"a prefill answer of 32 MiB and {over} bytes")
        text = info % (b"x" * ((1 << 20) + over - len(info) + 2))
        x.p.script = lambda e, req, text=text: (
            req.conn.reply(200, text) if req.path == "/server_info" else sglang("prefill")(e, req)
        )
        got = x.ask(STREAM)
        tap.same((got.code(), len(text) - (1 << 20)), (code, over), f"a server info of 1 MiB and {over} bytes")
        x.end("sgl_limits prefill")
    x = sgl_pair()
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", b"", {"x-prefiller-host-port": x.p.authority}, length=most + 1)
        got = c.read()
        tap.same((got.status, got.code()), (413, "invalid_pd_request"), "a request over 32 MiB: 413 with SGLang's code")
    tap.same((x.p.requests, x.d.requests), ([], []), "and no engine is asked")
    x.end("sgl_limits request")
    x = sgl_pair(DYN_SIDECAR_CLIENT_BODY_TIMEOUT_MS=300)
    fields = {"x-prefiller-host-port": x.p.authority}
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", b'{"a', fields, length=50)
        tap.same(c.read().status, 408, "SGLang: a request body that does not come: 408")
    with Client(x.port) as c:
        c.sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
            b"x-prefiller-host-port: " + x.p.authority.encode() + b"\r\n\r\nzz\r\n"
        )
        tap.same(c.read().status, 400, "SGLang: a request body with bad chunks: 400")
    for body in (b"{", b"[]", b"", b'{"a":"\xff"}'):
        got = x.ask(body)
        tap.same((got.status, got.code()), (400, "invalid_pd_request"), f"SGLang: {body}: 400")
    tap.same((x.p.requests, x.d.requests), ([], []), "and no engine is asked")
    x.end("sgl_limits client")


def cuts():
    """R15: wherever an event stream is cut, the client gets its bytes."""
    full = b'data: {"choices":[{"delta":{"content":"caf\xc3\xa9"}}]}\r\n\r\n: c\n\ndata: [DONE]\n\n'

    def script(engine, req):
        at = int(req.header("x-cut"))
        req.conn.head(200, [("content-type", "text/event-stream")])
        for piece in (full[:at], full[at:]):
            if piece:
                req.conn.chunk(piece)
        req.conn.last()

    x = Pair(vllm_prefill(), script)
    wrong = []
    for at in range(len(full) + 1):
        got = x.ask(STREAM, headers={"x-cut": at})
        if (got.status, got.body, got.ended) != (200, full, "clean"):
            wrong.append(at)
    tap.same(wrong, [], "R15 an event stream cut at every byte passes unchanged")
    x.end("cuts")


def reports():
    """Reports on other sidecars that are not named elsewhere."""
    x = Pair(vllm_prefill(), vllm_decode())
    got = ask(x.port, {"token_ids": [1, 2]}, x.p.authority, path="/inference/v1/generate")
    tap.same(
        (got.status, x.d.requests),
        (404, []),
        "llm-d-router#1461: a path without a protocol is not silently decode-only",
    )
    got = x.ask(
        {
            **CHAT,
            "stream": True,
            "stream_options": {"include_usage": True},
            "min_tokens": 3,
            "max_completion_tokens": 50,
        }
    )
    p = x.p.requests[0].json()
    tap.same(
        (got.status, p["stream"], p["max_completion_tokens"], p["max_tokens"]),
        (200, False, 1, 1),
        "llm-d-router#400, #2000: prefill is one token and not streamed",
    )
    tap.same(
        [x.ask({**CHAT, "n": n}).status for n in (2, 4)], [400, 400], "vllm PR#43509: more than one choice is refused"
    )
    x.d.script = lambda e, r: r.conn.reset()
    tap.same(
        [x.ask(CHAT).code() for _ in range(3)],
        ["decode_upstream_error"] * 3,
        "vllm#49238: an engine that dies of its peer's restart is an error a request, no more",
    )
    x.d.script = vllm_decode()
    tap.same(x.ask(CHAT).status, 200, "and served again when it is back")
    got = x.ask(b'{"n":2,"messages":[],"\\u006e":1,"stream":false}')
    tap.same(
        (got.status, [b'"n"' in e.requests[-1].body or b"006e" in e.requests[-1].body for e in (x.p, x.d)]),
        (200, [False, False]),
        "of two n the last counts, and no engine sees either",
    )
    x.ask(b'{"messages":[],"n":1}')
    tap.ok(all(b'"n":1' in e.requests[-1].body for e in (x.p, x.d)), "one n stays as it is")
    x.end("reports")
    other = Engine(vllm_decode())
    away = {**HANDOFF, "remote_host": other.host, "remote_port": other.port}
    x = Pair(vllm_prefill(away), vllm_decode(away))
    tap.same(
        (x.ask(CHAT, headers={"x-request-id": "own"}).status, other.accepted, len(x.d.requests)),
        (200, 0, 1),
        "remote_host and remote_port do not change where decode is",
    )
    tap.same(
        (x.d.requests[0].json()["kv_transfer_params"]["remote_request_id"], x.d.requests[0].header("x-request-id")),
        (HANDOFF["remote_request_id"], "own"),
        "the engine's request id is not the client's, both pass unchanged",
    )
    x.end("reports handoff")
    other.close()
    push = {**HANDOFF, "transfer_mode": "push"}
    x = Pair(vllm_prefill(push), silent)
    c = Client(x.port)
    c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
    wait_for(lambda: x.d.requests)
    tap.same(x.d.requests[0].json()["kv_transfer_params"], push, "vllm#46283: a pushed handoff is passed on as it is")
    gone(x, c, "vllm#46283: client leaves while the push is awaited", [x.d])
    x.end("reports push")
    x = Pair(sglang("prefill", port=9001, expected=9001), sglang("decode", port=1, expected=9001), "sglang")
    x.ask(CHAT)
    tap.same(
        [e.generated()[0].json()["bootstrap_port"] for e in (x.p, x.d)],
        [9001, 9001],
        "llm-d PR#1709: the bootstrap port is the one that the prefill engine says",
    )
    x.end("reports sglang")


def sgl_aborts():
    for name, prefill, decode, wait, calls in (
        ("both are pending", silent, silent, None, (1, 1)),
        ("decode streams", None, open_events(OK1), "head", (0, 1)),
    ):
        x = sgl_pair(prefill, decode)
        c = Client(x.port)
        c.send(
            "POST",
            "/v1/chat/completions",
            STREAM,
            {"x-prefiller-host-port": x.p.authority, "authorization": "Bearer k"},
        )
        wait_for(lambda: x.p.generated() and x.d.generated())
        if wait:
            c.head()
            c.chunk()
        gone(x, c, f"SGLang: client leaves while {name}", [x.d] if wait else [x.p, x.d])
        wait_for(lambda: (aborts(x.p), aborts(x.d)) == calls, 2)
        tap.same((aborts(x.p), aborts(x.d)), calls, f"SGLang: client leaves while {name}: aborts {calls}")
        r = x.d.calls("/abort_request")[0]
        tap.same(
            (r.header("authorization"), r.header("content-type"), r.header("x-prefiller-host-port")),
            ("Bearer k", "application/json", None),
            "with the client's authorization",
        )
        x.end(f"SGLang {name}")

    # The engine that is told to stop does not answer: the sidecar's own end does not wait longer than 5 s.
    def mute(engine, req):
        if req.path == "/abort_request":
            silent(engine, req)
        sglang("decode", script=silent)(engine, req)

    y = Pair(sglang("prefill", script=silent), mute, "sglang")
    with Client(y.port) as c:
        c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": y.p.authority})
        wait_for(lambda: y.p.generated() and y.d.generated())
    x = Pair(sglang("prefill", script=silent), mute, "sglang", DYN_SIDECAR_DRAIN_TIMEOUT_MS=200)
    with Client(x.port) as c:
        c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
        wait_for(lambda: x.p.generated() and x.d.generated())
        x.s.signal()
        started = time.monotonic()
        tap.same(c.read().code(), "request_cancelled", "forced end: an error without waiting for aborts")
        tap.ok(time.monotonic() - started < 4 * SLOW, "before they end")
        tap.same(x.s.wait(), 0, "the end waits for the aborts")
        took = time.monotonic() - started
        tap.ok(4.0 < took < 15 * SLOW, "which take 5 s at most", took)
        tap.same((aborts(x.p), aborts(x.d)), (1, 1), "forced end: both engines were told to stop")
    x.p.close()
    x.d.close()
    tap.ok(wait_for(lambda: y.s.metric("aborts_failed_total") == 1, 20), "one that is not answered is given up and counted")
    tap.same(y.s.metric("aborts_total"), 2.0, "of two")
    y.end("aborts that are not answered")


# ---- TensorRT-LLM ----


def trt():
    x = Pair(trt_context(), trt_generation, "trtllm", KVPICK_SIDECAR_NODE_ID=7)
    base = {"model": "m", "messages": [], "max_tokens": 9}
    for body in (base, {**base, "stream": True}):
        got = x.ask(body)
        tap.same((got.status, got.ended), (200, "clean"), f"context, then generation: {sorted(body)}")
    got = x.ask(
        {**base, "prompt_token_ids": None, "disaggregated_params": {"request_type": "x"}, "stream_options": None}
    )
    tap.same(got.status, 200, "the client's tokens and state are dropped")
    ids = [r.json()["disaggregated_params"]["disagg_request_id"] for r in x.p.requests]
    tap.ok(
        len(set(ids)) == 3 and all(i >> 16 & 255 == 7 and i > 2**53 for i in ids),
        "ids carry the node, fresh each time, exact beyond 2^53",
        ids,
    )
    x.p.script = trt_context(nested=True)
    got = x.ask({"model": "m", "prompt": "Why?"}, path="/v1/completions")
    tap.same(
        (got.status, x.d.requests[-1].json()["prompt"]), (200, [IDS]), "completions: the prompt becomes its tokens"
    )
    x.ask({"model": "m", "prompt": "Why?", "prompt_token_ids": [9]}, path="/v1/completions")
    tap.ok("prompt_token_ids" not in x.d.requests[-1].json(), "completions: the client's own tokens are dropped, too")
    for same in ({"n": 1}, {"best_of": 1}, {"best_of": None}, {"use_beam_search": False}, {"use_beam_search": None}):
        tap.same(x.ask({**base, **same}).status, 200, f"TensorRT-LLM: {same} is served")
    for bad in ({"n": 2}, {"best_of": 2}, {"use_beam_search": True}):
        tap.same(x.ask({**base, **bad}).code(), "unsupported_pd_variant", f"{bad} is refused")
    before = len(x.d.requests)
    x.p.script = trt_context("stop")
    got = x.ask(base)
    tap.ok(
        "disaggregated_params" not in got.json()["choices"][0]
        and got.json()["choices"][0]["message"]["content"] == "Ray",
        "finished in context: the answer without the state",
        got.body,
    )
    got = x.ask({**base, "stream": True})
    first, last = got.body.split(b"\n\n")[:2]
    first = json.loads(first[6:])
    tap.same(
        (got.header("content-type"), first["choices"], first["object"], last),
        (
            "text/event-stream",
            [{"index": 0, "delta": {"role": "assistant", "content": "Ray"}, "finish_reason": "stop"}],
            "chat.completion.chunk",
            b"data: [DONE]",
        ),
        "finished in context, streamed: one chunk and [DONE]",
    )
    got = x.ask({"model": "m", "prompt": "a", "stream": True}, path="/v1/completions")
    tap.same(
        json.loads(got.body.split(b"\n\n")[0][6:])["choices"],
        [{"index": 0, "text": "Ray", "finish_reason": "stop"}],
        "the same for completions",
    )
    tap.same(len(x.d.requests), before, "generation is not asked")
    for name, change in (
        ("no choices", lambda r: r.update(choices=[])),
        ("two choices", lambda r: r.update(choices=r["choices"] * 2)),
        ("no state", lambda r: r["choices"][0].update(disaggregated_params=None)),
        ("no context id", lambda r: r["choices"][0]["disaggregated_params"].update(ctx_request_id=None)),
        ("no tokens", lambda r: r.pop("prompt_token_ids")),
        ("text tokens", lambda r: r.update(prompt_token_ids=["a"])),
    ):
        x.p.script = trt_context(change=change)
        tap.same(x.ask(base).code(), "invalid_prefill_handoff", f"context answer with {name}: 502")
    tap.same(x.ask({**base, "vendor": 1}).status, 400, "what the context engine refuses keeps its status")
    tap.same(len(x.d.requests), before, "generation was never asked")
    x.end("trt")
    x = Pair(trt_context(), trt_generation, "trtllm")
    x.ask(base)
    i = x.p.requests[0].json()["disaggregated_params"]["disagg_request_id"]
    tap.ok(2**40 <= i < 2**63, "without a node id it is random")
    x.end("trt random")


# ---- TLS to engines ----


def tls():
    folder = tempfile.TemporaryDirectory()
    made = certificate(folder.name)
    if not made:
        tap.ok(True, "TLS to engines # SKIP no openssl program to make a certificate")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*made)
    trust = {"KVPICK_SIDECAR_ENGINE_TLS": "both", "KVPICK_SIDECAR_ENGINE_CA_FILE": made[0]}
    x = Pair(vllm_prefill(), vllm_decode(), **trust)
    x.p.tls = x.d.tls = context
    for body in (CHAT, STREAM, {"messages": [{"content": "x" * 200_000}]}):
        got = x.ask(body)
        tap.same((got.status, got.ended), (200, "clean"), f"both legs over TLS: {str(body)[:40]}")
    tap.same((x.p.accepted, x.d.accepted), (1, 1), "each over one connection")
    big = os.urandom(1_500_000)
    x.d.script = lambda e, r: r.conn.reply(200, r.body)
    tap.ok(ask(x.port, big, path="/v1/files").body == big, "1.5 MB each way over TLS, passed through")
    for own, ended in ((True, "clean"), (False, "broken")):

        def close_ends_it(_engine, req, own=own):
            req.conn.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
            if own:
                req.conn.sock.unwrap()
            raise ConnectionError

        x.d.script = close_ends_it
        got = x.ask(STREAM)
        tap.same((got.body, got.ended), (b"abc", ended), f"an answer that ends with the connection, TLS's own end {own}")
    x.p.script = silent
    c = Client(x.port)
    c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
    wait_for(lambda: len(x.p.requests) == 5)
    gone(x, c, "client leaves while prefill over TLS is pending", [x.p])
    x.end("tls")
    gone_code = "prefill_upstream_unavailable"
    for name, env, code in (
        ("nobody vouches for the certificate", {"KVPICK_SIDECAR_ENGINE_TLS": "both"}, gone_code),
        ("the certificate names another host", {**trust, "KVPICK_SIDECAR_ENGINE_NAME": "other"}, gone_code),
        ("only the prefill engine speaks TLS", {**trust, "KVPICK_SIDECAR_ENGINE_TLS": "prefill"}, None),
    ):
        x = Pair(vllm_prefill(), vllm_decode(), **env)
        x.p.tls = context
        got = x.ask(CHAT)
        tap.same((got.status, got.code()), (502 if code else 200, code), f"TLS: {name}")
        if code:
            tap.same((x.p.requests, x.d.requests), ([], []), f"TLS: {name}: nothing was said to it")
            tap.ok(wait_for(lambda y=x: b"certificate" in y.s.log), f"TLS: {name}: the log says so", x.s.log)
        x.s.stop()
    x = Pair(vllm_prefill(), vllm_decode(), DYN_SIDECAR_CONNECT_TIMEOUT_MS=300, **trust)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(1)
        got = ask(x.port, CHAT, f"127.0.0.1:{mute.getsockname()[1]}")
        tap.same((got.status, got.code()), (504, "prefill_upstream_timeout"), "TLS: no handshake in time")
    tap.same(x.ask(CHAT).code(), "prefill_upstream_timeout", "TLS: an engine of plain text that waits for more")
    x.s.stop()
    x = sgl_pair(silent, silent, **trust)
    x.p.tls = x.d.tls = context
    c = Client(x.port)
    c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
    wait_for(lambda: x.p.generated() and x.d.generated())
    c.drop()
    tap.ok(wait_for(lambda: (aborts(x.p), aborts(x.d)) == (1, 1)), "TLS: SGLang's engines are told to stop")
    x.s.stop()
    s = Sidecar(free_port(), wait=False, KVPICK_SIDECAR_ENGINE_TLS="both", KVPICK_SIDECAR_ENGINE_CA_FILE=made[1])
    tap.same(s.wait(), 2, "TLS: a file without certificates ends the process with 2")


# ---- limits, memory, ends ----


def pool():
    """Kept connections: used again, noticed when dead, a request repeated once if nothing was answered."""
    d = Engine(lambda e, r: r.conn.reply(200, b"x"))
    s = Sidecar(d.port)
    with Client(s.port) as c:
        for i in range(5):
            c.ask("POST", "/v1/embeddings", b"a" * i)
    tap.same(d.accepted, 1, "one connection to the engine serves five requests")

    def dies(engine, req):
        if req.path == "/v1/die":
            engine.script = lambda e, r: r.conn.reply(200, b"fresh")
            raise ConnectionError
        req.conn.reply(200, b"x")

    d.script = dies
    got = ask(s.port, b"abc", path="/v1/die")
    tap.same(
        (got.status, got.body), (200, b"fresh"), "a kept connection that dies unanswered: once more on a fresh one"
    )
    tap.same(
        (len(d.calls("/v1/die")), d.calls("/v1/die")[-1].body, s.metric("engine_retries_total")),
        (2, b"abc", 1.0),
        "with the whole request",
    )
    d.hang_up()
    tap.same(ask(s.port, b"abc", path="/v1/x").status, 200, "an idle connection that was closed is noticed")
    tap.same(s.metric("engine_retries_total"), 1.0, "before it is used")
    d.close()
    wait_for(lambda: s.metric("engine_connections") == 0)
    tap.same(ask(s.port, b"abc", path="/v1/x").code(), "decode_upstream_error", "no engine: 502")
    d = Engine(lambda e, r: r.conn.reply(200, b"back"), port=d.port)
    tap.same(ask(s.port, b"abc", path="/v1/x").body, b"back", "and served again when it is back")
    tap.same(s.stop(), 0, "pool: ends with 0")
    d.close()
    if has_ipv6():
        d = Engine(lambda e, r: r.conn.reply(200, b"six"), host="::1")
        s = Sidecar(d.port)
        tap.same(ask(s.port, b"abc", path="/v1/x").body, b"six", "an engine that listens on ::1 only is found")
        s.stop()
        d.close()


def max_streams():
    x = Pair(vllm_prefill(), silent, KVPICK_SIDECAR_MAX_STREAMS=2)
    held = [Client(x.port) for _ in range(2)]
    for c in held:
        c.send("POST", "/v1/chat/completions", CHAT)
    wait_for(lambda: len(x.d.requests) == 2)
    got = x.ask(CHAT)
    tap.same((got.status, got.code()), (503, "too_many_streams"), "over the stream limit: 503")
    tap.same(ask(x.port, b"", path="/health", method="GET").status, 200, "health is no stream")
    held[0].drop()
    wait_for(lambda: x.s.metric("requests_inflight") == 1)
    x.d.script = vllm_decode()
    tap.same(x.ask(CHAT).status, 200, "one that ends makes room")
    held[1].drop()
    x.end("max_streams")


def back_pressure():
    """A client that does not read stops the engine; an engine that does not read stops the client."""
    total = 300 << 20

    def flood(engine, req):
        req.conn.head(200, [("content-type", "text/event-stream")])
        piece = b"x" * 65536
        engine.sent = 0
        while engine.sent < total:
            req.conn.chunk(piece)
            engine.sent += len(piece)
        req.conn.last()

    x = Pair(vllm_prefill(), flood)
    x.d.sent = 0
    base = x.s.rss_kb()
    with Client(x.port, rcvbuf=65536) as c:
        c.send("POST", "/v1/chat/completions", STREAM, {"x-prefiller-host-port": x.p.authority})
        c.head()
        last = -1
        while last != x.d.sent:
            last = x.d.sent
            time.sleep(0.3)
        tap.ok(0 < x.d.sent < total // 4, "a client that does not read stops the engine", x.d.sent)
        grown = x.s.rss_kb() - base
        tap.ok(grown < 8192 * SLOW, "without memory for it in the sidecar", grown)
        tap.ok(wait_for(lambda: c.chunk() and x.d.sent > last), "when it reads on, the engine goes on")
    tap.ok(x.idle(), "when it leaves, the stream ends")

    def deaf(engine, req):
        raise ConnectionError

    x.d.script = deaf
    started = threading.Event()

    class Deaf(Engine):
        def serve(self, sock):
            started.set()
            time.sleep(1.5)
            sock.close()

    y = Deaf(None)
    s = Sidecar(y.port)
    base = s.rss_kb()
    with Client(s.port) as c:
        c.sock.settimeout(0.5)
        sent = 0
        try:
            c.send("POST", "/v1/files", b"", length=total)
            while sent < total:
                sent += c.sock.send(b"y" * 65536)
        except (socket.timeout, TimeoutError, ConnectionError):
            pass
        tap.ok(started.is_set() and sent < total // 4, "an engine that does not read stops the client", sent)
        grown = s.rss_kb() - base
        tap.ok(grown < 8192 * SLOW, "without memory for it in the sidecar", grown)
    tap.same(s.stop(), 0, "upload: ends with 0")
    x.end("back_pressure")


def drain_of_threads():
    x = Pair(vllm_prefill(), vllm_decode(), DYN_SIDECAR_DRAIN_TIMEOUT_MS=10000, KVPICK_SIDECAR_THREADS=8)
    go = [threading.Event() for _ in range(16)]
    x.d.script = lambda e, r: (r.conn.head(200), r.conn.chunk(b"a"), go[len(e.requests) - 1].wait(10), r.conn.last())
    streams = []
    for _ in go:
        c = Client(x.port)
        c.send("POST", "/v1/chat/completions", STREAM)
        c.head()
        c.chunk()
        streams.append(c)
    x.s.signal()
    said = []
    for c, event in zip(streams, go):
        said.append(ask(x.s.metrics, b"", path="/metrics", method="GET").status)
        event.set()
        c.chunk()
        c.closed()
    tap.same(said, [200] * len(go), "drain: metrics are served until the last thread's last stream has ended")
    tap.same(x.s.wait(), 0, "drain: then all of them end")


def drain():
    x = Pair(vllm_prefill(), vllm_decode(), DYN_SIDECAR_DRAIN_TIMEOUT_MS=10000)
    go = threading.Event()
    x.d.script = lambda e, r: (r.conn.head(200), r.conn.chunk(b"a"), go.wait(10), r.conn.chunk(b"b"), r.conn.last())
    idle, busy = Client(x.port), Client(x.port)
    idle.ask("GET", "/ready")
    busy.send("POST", "/v1/chat/completions", STREAM)
    busy.head()
    busy.chunk()
    late, well = Client(x.port), Client(x.port)
    before = x.s.metric("received_bytes_total")
    late.sock.sendall(b"GET /ready HT")
    well.sock.sendall(b"GET /health HT")
    wait_for(lambda: x.s.metric("received_bytes_total") >= before + 27)
    x.s.signal()
    tap.ok(idle.closed(), "drain: an idle connection closes at once")

    def refused():
        try:
            Client(x.port).drop()
            return False
        except OSError:
            return True

    tap.ok(wait_for(refused), "drain: the listener is closed")
    said = [ask(x.s.metrics, b"", path=path, method="GET").status for path in ("/ready", "/health", "/metrics")]
    tap.same(said, [503, 200, 200], "drain: the port of metrics stays, and says that it is not ready")
    for c, status, path in ((late, 503, "/ready"), (well, 200, "/health")):
        c.sock.sendall(b"TP/1.1\r\nHost: a\r\n\r\n")
        tap.same(c.read().status, status, f"drain: {path} on a connection that is left is {status}")
    go.set()
    tap.same((busy.chunk(), busy.chunk()), (b"b", b""), "drain: a running stream finishes")
    tap.same(x.s.wait(), 0, "drain: then the process ends with 0")
    drain_of_threads()
    for replied in (False, True):
        x = Pair(
            vllm_prefill(),
            (lambda e, r: (r.conn.head(200), r.conn.chunk(b"a"), silent(e, r))) if replied else silent,
            DYN_SIDECAR_DRAIN_TIMEOUT_MS=200,
        )
        with Client(x.port) as c:
            c.send("POST", "/v1/chat/completions", STREAM, {"x-prefiller-host-port": x.p.authority})
            wait_for(lambda: x.d.requests)
            if replied:
                c.head()
                c.chunk()
            x.s.signal(signal.SIGINT if replied else signal.SIGTERM)
            if replied:
                tap.same(c.chunk(), b"", "forced end in a stream: it ends cleanly")
            else:
                got = c.read()
                tap.same(
                    (got.status, got.code()),
                    (502, "request_cancelled"),
                    "forced end before headers: 502 request_cancelled",
                )
        tap.same(x.s.wait(), 0, "forced end: exit 0")
        tap.ok(wait_for(lambda: x.d.ended), "forced end: the engine's connection is closed")
    x = Pair(silent, vllm_decode(), DYN_SIDECAR_DRAIN_TIMEOUT_MS=200)
    with Client(x.port) as a, Client(x.port) as b:
        a.send("POST", "/v1/chat/completions", STREAM, {"x-prefiller-host-port": x.p.authority})
        b.send("POST", "/v1/chat/completions", b"{", {"x-prefiller-host-port": x.p.authority}, length=100)
        wait_for(lambda: x.p.requests)
        x.s.signal()
        tap.same(a.read().code(), "request_cancelled", "forced end in prefill: 502 request_cancelled")
        tap.same(b.read().status, 503, "forced end in an upload: 503")
    tap.same(x.s.wait(), 0, "forced end: exit 0")
    tap.same(x.d.requests, [], "decode was not contacted")


def killed():
    x = Pair(silent, silent, "sglang")
    x.p.script, x.d.script = sglang("prefill", script=silent), sglang("decode", script=silent)
    c = Client(x.port)
    c.send("POST", "/v1/chat/completions", CHAT, {"x-prefiller-host-port": x.p.authority})
    wait_for(lambda: x.p.generated() and x.d.generated())
    x.s.signal(signal.SIGKILL)
    tap.ok(c.closed(), "SIGKILL: the client's connection ends")
    tap.ok(wait_for(lambda: x.p.ended and x.d.ended), "SIGKILL: both engines are let go")
    x.s.wait()
    x.p.close()
    x.d.close()


def threads():
    x = Pair(vllm_prefill(), vllm_decode(), KVPICK_SIDECAR_THREADS=3)
    out = []
    ts = [threading.Thread(target=lambda: out.append(x.ask(STREAM).status)) for _ in range(30)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    tap.same(out, [200] * 30, "three threads serve thirty requests")
    with Client(x.s.metrics) as c:
        text = c.ask("GET", "/metrics").body.decode()
    tap.ok(
        'requests_total{path="chat_completions",backend="vllm_nixl",result="ok"} 30\n' in text,
        "and count them together",
    )
    tap.ok('leg_duration_seconds_count{leg="prefill"} 30\n' in text, "legs, too")
    ready = lambda: Client(x.s.metrics).ask("GET", "/ready").status
    tap.ok(wait_for(lambda: ready() == 200, 5), "readiness of the engine: 200 on the metrics port")
    x.d.close()
    tap.ok(wait_for(lambda: ready() == 503, 5), "without the engine: 503")
    tap.same(ask(x.port, b"", path="/ready", method="GET").status, 200, "the sidecar's own stays 200")
    x.end("threads")
    if has_ipv6():
        d = Engine(fixed(200, b"x"), "::1")
        s = Sidecar(d.port)
        got = ask(s.metrics, b"", path="/ready", method="GET").status
        tap.same(got, 200, "an engine that listens on ::1 only is ready, too")
        s.stop()
        d.close()
    x = Pair(trt_context(), trt_generation, "trtllm", KVPICK_SIDECAR_NODE_ID=7, KVPICK_SIDECAR_THREADS=2)
    for _ in range(40):
        x.ask(CHAT)
    ids = [r.json()["disaggregated_params"]["disagg_request_id"] for r in x.p.requests]
    tap.same(len(set(ids)), 40, "TensorRT-LLM's ids differ")
    tap.same({(i >> 10 & 0xFFF) for i in ids}, {7 << 6, 7 << 6 | 1}, "each thread is a process of its own in them")
    x.end("threads, ids")


def logs():
    """One request in n, with its id and how it ended; a failed one at most once a second; never what was said."""
    x = Pair(vllm_prefill(), vllm_decode(), KVPICK_LOG_REQUESTS=2, DYN_LOGGING_JSONL="true")
    for i in range(6):
        x.ask(
            {"messages": [{"content": "secret"}]}, headers={"x-request-id": f"r{i}", "authorization": "Bearer secret"}
        )
    for _ in range(5):
        x.ask(b"{secret")
    wait_for(lambda: b"suppressed" in x.s.log)
    x.end("logs")
    lines = [json.loads(line) for line in x.s.log.decode().splitlines()]
    seen = [line for line in lines if line.get("event") == "sidecar.request" and "request_id" in line]
    tap.same([line["request_id"] for line in seen][:3], ["r0", "r2", "r4"], "every second request is logged")
    tap.same(
        (seen[0]["path"], seen[0]["backend"], seen[0]["result"], str(seen[0]["status"])),
        ("chat_completions", "vllm_nixl", "ok", "200"),
        "with its kind and how it ended",
    )
    warned = [line for line in lines if line.get("level") == "W" and line.get("event") == "sidecar.request"]
    tap.ok(1 <= len(warned) <= 2 and warned[0]["code"] == "invalid_pd_request", "failures: a warning a second", warned)
    tap.ok("secret" not in x.s.log.decode(), "no log line holds what client or engines said")


def startup():
    cases = [
        ({"DYN_SIDECAR_PD_ADAPTER": "vllm"}, "DYN_SIDECAR_PD_ADAPTER"),
        ({"DYN_SIDECAR_PD_BACKEND": "SGLang"}, "DYN_SIDECAR_PD_BACKEND"),
        ({"DYN_SIDECAR_PD_BACKEND": " sglang"}, "DYN_SIDECAR_PD_BACKEND"),
        ({"DYN_SIDECAR_PD_BACKEND": "\udcff"}, "DYN_SIDECAR_PD_BACKEND"),  # the byte 0xff
        ({"DYN_SIDECAR_READ_TIMEOUT_MS": ""}, "DYN_SIDECAR_READ_TIMEOUT_MS"),
        ({"DYN_SIDECAR_PORT": "0"}, "DYN_SIDECAR_PORT"),
        ({"DYN_SIDECAR_CONNECT_TIMEOUT_MS": "0"}, "DYN_SIDECAR_CONNECT_TIMEOUT_MS"),
        ({"DYN_SIDECAR_PD_ADAPTER": "vllm_nixl", "DYN_SIDECAR_PD_BACKEND": "sglang"}, "DYN_SIDECAR_PD_BACKEND"),
        (
            {"DYN_SIDECAR_PD_ADAPTER": "vllm_nixl", "DYN_VLLM_NIXL_PROTOCOL_VERSION": "x"},
            "DYN_VLLM_NIXL_PROTOCOL_VERSION",
        ),
    ]
    for env, name in cases:
        s = Sidecar(free_port(), wait=False, **env)
        tap.same(s.wait(), 2, f"{env} ends the process with 2")
        tap.ok(wait_for(lambda s=s, n=name: n in s.log.decode("utf-8", "replace")), f"and names {name}", s.log)
    s = Sidecar(free_port(), None, DYN_VLLM_NIXL_PROTOCOL_VERSION="x", DYN_SIDECAR_PD_ADAPTER=" sglang ")
    tap.same(s.stop(), 0, "a protocol version is checked only for its adapter; the adapter's name is trimmed")
    d = Engine(None)
    s = Sidecar(d.port, wait=False, DYN_SIDECAR_PORT=d.port - 1 if d.port > 2 else d.port + 1)
    s.stop()
    busy = Sidecar(d.port, wait=True)
    s = Sidecar(d.port, wait=False, DYN_SIDECAR_PORT=busy.port)
    tap.same(s.wait(), 2, "a port in use ends the process with 2")
    busy.stop()


ALL = [
    routes,
    passing,
    bodiless,
    pieces,
    uploads,
    early,
    bad_http,
    header_values,
    no_adapter,
    base_path,
    both_legs,
    allowlist,
    strict_strip,
    ranks,
    vllm_bodies,
    vllm_refused,
    vllm_prefill_fails,
    vllm_decode_fails,
    concurrent,
    vllm_aborts,
    sgl_success,
    sgl_gate,
    sgl_failures,
    sgl_limits,
    sgl_aborts,
    cuts,
    reports,
    trt,
    tls,
    pool,
    max_streams,
    back_pressure,
    drain,
    killed,
    threads,
    logs,
    startup,
]
EPOLL = [passing, pieces, uploads, vllm_aborts, sgl_success, sgl_gate, pool, back_pressure, drain]


def run(sections):
    for section in sections:
        at = time.monotonic()
        section()
        print(f"# {section.__name__}: {time.monotonic() - at:.1f} s")


chosen = sys.argv[1:]
run([section for section in ALL if not chosen or section.__name__ in chosen])
if not chosen or "epoll" in chosen:
    print("# the same without io_uring")
    Sidecar.before = [
        sys.executable,
        os.path.join(LIB, "seccomp.py"),
        "deploy/kubernetes/seccomp/kvpick.json",
        "io_uring_setup,io_uring_enter,io_uring_register",
    ]
    os.environ["ASAN_OPTIONS"] = "detect_leaks=0"  # the search for leaks traces, which the profile forbids
    run(EPOLL)
sys.exit(tap.done())
