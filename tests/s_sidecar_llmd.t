#!/usr/bin/env python3
"""kvpick-sidecar in the place of llm-d's (KVPICK_SIDECAR_PROFILE=llmd), over real sockets: how it reads the header, what
it does when prefill fails, its errors, its allowlist, and the cached tokens of the prefill engine in the answers of the
decode engine, against a model of their own. KVP_SEED replays. Arguments choose sections by name."""

import json
import os
import random
import re
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import SLOW, Tap, free_port, wait_for
from pd import CHAT, STREAM, Client, Engine, Pair, Sidecar, ask, fixed, sglang, silent

tap = Pair.tap = Tap()
SEED = int(os.environ.get("KVP_SEED", "1"))
JSON, EVENTS = "application/json", "text/event-stream"
FORBIDDEN = b"Forbidden: prefill target not allowed by SSRF protection"


def prefill_says(cached=7, usage=True):
    details = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}} if usage else None
    return fixed(200, {"id": "p", "kv_transfer_params": {"a": [1]}, "usage": details})


def llmd_pair(prefill=None, decode=None, **env):
    """A decode engine that answers with what is in say: content type, pieces, other fields."""

    def says(engine, req):
        kind, pieces, fields = engine.say
        req.conn.head(200, [("content-type", kind), *fields])
        for piece in pieces:
            if piece:
                req.conn.chunk(piece)
        req.conn.last()

    return Pair(prefill or prefill_says(), decode or says, None, **{"KVPICK_SIDECAR_PROFILE": "llmd", **env})


def say(x, kind, *pieces, fields=(), how=None):
    """What the client gets of that answer."""
    x.d.say = (kind, pieces, fields)
    got = x.ask(STREAM) if how is None else how()
    tap.ok(got.ended == "clean" and got.status == 200, "the answer is whole") if got.ended != "clean" else None
    return got.body


def error_is(got, status, kind, name):
    tap.same(
        (got.status, got.header("content-type"), {**got.json(), "message": "?"}),
        (status, JSON, {"object": "error", "message": "?", "type": kind, "param": "", "code": status}),
        f"llm-d error: {name}: {status} {kind}",
    )
    tap.ok(
        list(got.json()) == ["object", "message", "type", "param", "code"] and got.json()["message"],
        f"llm-d error: {name}: with a message",
    )


# ---- header, legs, failing prefill ----


def legs():
    echo = lambda e, r: r.conn.reply(200, r.body)
    x = llmd_pair(fixed(200, {"kv_transfer_params": {"a": [1]}}), echo)
    got = ask(x.port, CHAT, f" http://{x.p.authority} , b:1")
    tap.same(
        got.json(),
        {**CHAT, "kv_transfer_params": {"a": [1]}},
        "llm-d: the first of a list is used, the handoff not judged",
    )
    got = ask(x.port, CHAT, "")
    tap.same((got.json(), len(x.p.requests)), (CHAT, 1), "llm-d: an empty value is none")
    tap.same(ask(x.port, b"", path="/healthz", method="GET").status, 200, "llm-d: every path is proxied")
    for path, limits in (
        ("/v1/chat/completions", ("max_tokens", "max_completion_tokens")),
        ("/v1/completions", ("max_tokens", "max_completion_tokens")),
        ("/v1/responses", ("max_output_tokens",)),
    ):
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stream", "stream_options")
        for own in ({}, {"min_tokens": 5, "stream": True, "stream_options": {}}, {limits[0]: 40}, {limits[-1]: 41}):
            before = {"model": "m", "input": "hi", **own}
            x.ask(before, path=path)
            p, d = (e.requests[-1].json() for e in (x.p, x.d))
            want = {"stream": False, **{k: 1 for k in limits}, **{k: v for k, v in own.items() if k == "min_tokens"}}
            tap.same(
                {k: p[k] for k in names if k in p}, want, f"llm-d token limits: {path} {own}: one token of prefill"
            )
            tap.same(
                {k: v for k, v in d.items() if k != "kv_transfer_params"}, before, "llm-d token limits: decode's stay"
            )
    x.p.script = fixed(200, {"id": "p"})
    tap.same(x.ask(CHAT).json()["kv_transfer_params"], None, "llm-d: without a handoff decode gets null")
    for client in ([], [("x-request-id", "r1")]):
        x.ask(CHAT, headers=client)
        seen = [[v for k, v in e.requests[-1].headers if k.lower() == "x-request-id"] for e in (x.p, x.d)]
        tap.same((seen[0], seen[0][:-1]), (seen[1], [v for _, v in client]), "llm-d: one more request id on both legs")
        tap.ok(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", seen[0][-1]), "llm-d: which is a fresh UUID")
        ask(x.port, CHAT, headers=client)
        ids = [v for k, v in x.d.requests[-1].headers if k.lower() == "x-request-id"]
        tap.same(ids if client else len(ids), ["r1"] if client else 1, "llm-d: none more where it only passes")
    x.end("legs")


def prefill_fails():
    echo = lambda e, r: r.conn.reply(200, r.body)
    x = llmd_pair(None, echo)
    for status in (400, 401, 404, 422, 429, 450, 451):
        x.p.script = fixed(status, {"why": "x"}, {"content-type": JSON, "x-why": "y", "retry-after": "3"})
        got = x.ask(CHAT)
        tap.same(
            (got.status, got.body, got.header("x-why"), got.header("retry-after")),
            (status, b'{"why": "x"}', "y", "3"),
            f"llm-d: {status} of prefill is relayed with fields and body",
        )
    asked = len(x.d.requests)
    tap.same(asked, 0, "llm-d: and decode is not asked")
    for name, script in [(s, fixed(s, b"no")) for s in (300, 302, 304, 452, 499, 500, 502, 503)] + [
        ("a reset", lambda e, r: r.conn.reset()),
        ("a cut answer", lambda e, r: (r.conn.head(200, [], 9), r.conn.send(b"{"), r.conn.reset())),
    ]:
        x.p.script = script
        got = x.ask(CHAT)
        tap.same((got.status, got.json()), (200, CHAT), f"llm-d: after {name} of prefill decode does all of it")
    got = ask(x.port, CHAT, f"127.0.0.1:{free_port()}")
    tap.same((got.status, got.json()), (200, CHAT), "llm-d: also where nobody listens")
    tap.same(x.s.metric("prefill_fallbacks_total"), 11.0, "llm-d: falling back is counted")
    x.end("prefill_fails")


def errors():
    x = llmd_pair(None, silent, DYN_SIDECAR_READ_TIMEOUT_MS=200, DYN_SIDECAR_MAX_REQUEST_BYTES=4096)
    for name, body in (("no JSON", b"leak"), ("nothing", b""), ("an array", b"[1]"), ("cut JSON", b'{"a":')):
        x.p.script = fixed(200, body)
        got = x.ask(CHAT)
        error_is(got, 400, "BadRequestError", f"prefill 200 with {name}")
        tap.ok(b"leak" not in got.body, "llm-d error: without its words")
    tap.same(x.d.requests, [], "llm-d error: decode is not asked then")
    error_is(x.ask(b"{"), 400, "BadRequestError", "the client's body is no JSON")
    error_is(x.ask(b'{"a":"%s"}' % (b"x" * 5000)), 413, "BadRequestError", "the client's body is too large")
    error_is(ask(x.port, CHAT, "nonsense"), 502, "BadGateway", "a target that is none")
    with Client(x.port) as c:
        c.sock.sendall(b"GET /v1/x HTTP/1.1\r\nHost: a\r\nX: a\x01b\r\n\r\n")
        error_is(c.read(), 400, "BadRequestError", "no HTTP")
    x.p.script = prefill_says()
    for name, script in (
        ("is silent", silent),
        ("resets", lambda e, r: r.conn.reset()),
        ("is no HTTP", lambda e, r: r.conn.send(b"hello\r\n\r\n")),
    ):
        x.d.script = script
        for how, prefill in (("both legs", x.p.authority), ("passed through", None)):
            error_is(ask(x.port, CHAT, prefill), 502, "BadGateway", f"decode {name}, {how}")
    x.end("errors")
    p = Engine(prefill_says())
    s = Sidecar(free_port(), KVPICK_SIDECAR_PROFILE="llmd")
    for how, prefill in (("both legs", p.authority), ("passed through", None)):
        got = ask(s.port, CHAT, prefill)
        error_is(got, 503, "ServiceUnavailable", f"decode refuses the connection, {how}")
        tap.ok("decode node is not ready" in got.json()["message"], "llm-d error: decode node is not ready")
    tap.same(s.stop(), 0, "errors: ends with 0")
    p.close()


def allowlist():
    x = llmd_pair(None, lambda e, r: r.conn.reply(200, r.body), KVPICK_SIDECAR_PREFILL_ALLOWLIST="127.0.0.0/8,pf:8000")
    tap.same(x.ask(CHAT).status, 200, "llm-d allowlist: a listed target is used")
    for v in ("192.0.2.1:80", "pf:8001", "localhost:80", f"192.0.2.1:80,{x.p.authority}"):
        got = ask(x.port, CHAT, v)
        tap.same(
            (got.status, got.header("content-type"), got.body),
            (403, "text/plain; charset=utf-8", FORBIDDEN),
            f"llm-d allowlist: {v}: 403",
        )
    tap.same((len(x.p.requests), len(x.d.requests)), (1, 1), "llm-d allowlist: no engine is asked then")
    with Client(x.s.metrics) as c:
        text = c.ask("GET", "/metrics").body.decode()
    tap.ok('result="prefill_target_forbidden"} 4\n' in text, "llm-d allowlist: and each is counted")
    x.end("allowlist")


def encoders():
    """There is no stage for encoders here: their list is for the sidecar only, whatever of it is allowed."""
    lists = ([("x-encoder-hosts-ports", "127.0.0.1:1, 192.0.2.1:80"), ("X-Encoder-Hosts-Ports", "e:1")], [("x-encoder-hosts-ports", "")])
    for allowed in ("", "127.0.0.0/8"):
        env = {"KVPICK_SIDECAR_PREFILL_ALLOWLIST": allowed} if allowed else {}
        x = llmd_pair(None, fixed(200, b"{}"), **env)
        for fields in lists:
            fields = [*fields, ("x-data-parallel-host-port", "127.0.0.1:1"), ("x-own", "1")]
            for prefill, path in ((x.p.authority, PATH), (None, PATH), (None, "/v1/embeddings")):
                tap.same(ask(x.port, CHAT, prefill, fields, path).status, 200, "encoder header filtering: it is served")
                seen = [r for e in (x.p, x.d) for r in e.requests[-1:]]
                tap.same(
                    [(r.header("x-encoder-hosts-ports"), r.header("x-data-parallel-host-port"), r.header("x-own")) for r in seen],
                    [(None, None, "1")] * len(seen),
                    f"encoder header filtering: no engine sees the list, {'with' if allowed else 'without'} an allowlist",
                )
        x.end("encoders")


PATH = "/v1/chat/completions"


def sampling():
    """Every row of llmd_header_selection; a and b are two engines."""
    with open("tests/vectors/disagg.json", encoding="utf-8") as f:
        rows = json.load(f)["llmd_header_selection"]
    d = Engine(fixed(200, b"{}"))
    engines = {name: Engine(prefill_says()) for name in "ab"}
    sidecars = {on: Sidecar(d.port, KVPICK_SIDECAR_PROFILE="llmd", ENABLE_PREFILLER_SAMPLING=on) for on in (False, True)}
    for row in rows:
        fields = [("x-prefiller-host-port", re.sub("[ab]", lambda m: engines[m[0]].authority, v)) for v in row["field_lines"]]
        for e in engines.values():
            e.requests.clear()
        times = 40 if row["sampling"] else 3
        wrong = [s for s in (ask(sidecars[row["sampling"]].port, CHAT, None, fields).status for _ in range(times)) if s != 200]
        seen = [name for name, e in engines.items() if e.requests]
        want = [] if row["result"] == "passthrough" else row["result"]
        tap.same((wrong, seen), ([], want), f"llm-d header {row['field_lines']}, sampling {row['sampling']}: {row['result']}")
        if len(want) == 2:
            cnt = [len(e.requests) for e in engines.values()]
            tap.ok(sum(cnt) == times and min(cnt) >= 4, "llm-d sampling: each of them takes its part", cnt)
    for s in sidecars.values():
        tap.same(s.stop(), 0, "sampling: ends with 0")
    for e in (d, *engines.values()):
        e.close()


def bootstrap_port():
    for env, want in (({"SGLANG_BOOTSTRAP_PORT": 9777}, 9777), ({}, 9001)):
        p = Engine(sglang("prefill", port=9001, expected=want))
        d = Engine(sglang("decode", port=1, expected=want))
        s = Sidecar(d.port, "sglang", KVPICK_SIDECAR_PROFILE="llmd", **env)
        tap.same(ask(s.port, CHAT, p.authority).status, 200, f"llm-d with sglang, {env}: served")
        tap.same([e.generated()[0].json()["bootstrap_port"] for e in (p, d)], [want] * 2, f"both engines get port {want}")
        s.stop()
        p.close()
        d.close()


def without_effect():
    """What is set and does nothing is named when the process starts."""
    pool = {"INFERENCE_POOL": "ns/p", "INFERENCE_POOL_NAMESPACE": "ns", "INFERENCE_POOL_NAME": "p"}
    cases = (
        (pool, list(pool), "KVPICK_SIDECAR_PREFILL_ALLOWLIST"),
        ({"ENABLE_PREFILLER_SAMPLING": "true"}, ["ENABLE_PREFILLER_SAMPLING"], "KVPICK_SIDECAR_PROFILE=llmd"),
        ({"SGLANG_BOOTSTRAP_PORT": "8998"}, ["SGLANG_BOOTSTRAP_PORT"], "KVPICK_SIDECAR_PROFILE=llmd"),
        (
            {"SGLANG_BOOTSTRAP_PORT": "8998", "KVPICK_SIDECAR_PROFILE": "llmd"},
            ["SGLANG_BOOTSTRAP_PORT"],
            "DYN_SIDECAR_PD_ADAPTER=sglang",
        ),
    )
    for env, names, instead in cases:
        s = Sidecar(free_port(), **env)
        tap.ok(
            wait_for(lambda s=s, n=names, i=instead: all(f"{x}(" in s.log.decode() for x in n) and i in s.log.decode()),
            f"{names} without effect: named at start, with {instead}",
            s.log,
        )
        tap.same(s.stop(), 0, "without_effect: ends with 0")
    s = Sidecar(free_port(), KVPICK_SIDECAR_PROFILE="llmd", ENABLE_PREFILLER_SAMPLING="true")
    s.stop()
    tap.ok(b"config.ignored" not in s.log, "what has an effect is not", s.log)
    for env in ({"SGLANG_BOOTSTRAP_PORT": "0"}, {"ENABLE_PREFILLER_SAMPLING": "maybe"}):
        s = Sidecar(free_port(), wait=False, **env)
        tap.same(s.wait(), 2, f"{env} ends the process with 2")


# ---- cached tokens ----

D7 = '"prompt_tokens_details":{"cached_tokens":7}'
TEXTS = (  # name, text of the decode engine, text for the client; None: as it is
    ("JSON", '{"id":"d","usage":{"prompt_tokens_details":{"cached_tokens":3,"x":1.50},"t":9},"z":1e2}',
     '{"id":"d","usage":{"prompt_tokens_details":{"cached_tokens":7,"x":1.50},"t":9},"z":1e2}'),
    ("missing details", '{"usage":{"t": 9 } ,"z":"\\u00e9"}', '{"usage":{"t": 9 ,' + D7 + '} ,"z":"\\u00e9"}'),
    ("missing count", '{"usage":{"prompt_tokens_details":{ } }}', '{"usage":{"prompt_tokens_details":{ "cached_tokens":7} }}'),
    ("details null", '{"usage":{"prompt_tokens_details": null,"t":1}}', '{"usage":{"prompt_tokens_details": {"cached_tokens":7},"t":1}}'),
    ("count null", '{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}', '{"usage":{' + D7 + "}}"),
    ("usage empty", '{"usage":{}}', '{"usage":{' + D7 + "}}"),
    ("usage null", '{"usage":null,"a":[1, 2]}', None),
    ("usage a number", '{"usage":5}', None),
    ("no usage", '{"a":{"usage":{"t":1}}}', None),
    ("names with escapes", '{"us\\u0061ge":{"prompt_tokens_d\\u0065tails":{"cached_tokens" :1}}}',
     '{"us\\u0061ge":{"prompt_tokens_d\\u0065tails":{"cached_tokens" :7}}}'),
    ("members twice", '{"usage":{"a":1},"usage":{"b":2}}', '{"usage":{"a":1},"usage":{"b":2,' + D7 + "}}"),
    ("big numbers", '{"n":123456789012345678901234567890,"f":1.0E+2,"usage":{"t":-0}}',
     '{"n":123456789012345678901234567890,"f":1.0E+2,"usage":{"t":-0,' + D7 + "}}"),
    ("an array", '[{"usage":{}}]', None),
    ("no JSON", '{"usage":{}', None),
    ("two values", '{"usage":{}}{"usage":{}}', None),
    ("nothing", "", None),
)  # fmt: skip


def both(lines):
    """Lines before and after, as two texts."""
    return "".join(a for a, _ in lines).encode(), "".join(b for _, b in lines).encode()


SSE = both(
    [(t, t) for t in (": hello\n", "\n", "event: x\r\n", "data: {\"choices\":[{\"delta\":{\"content\":\"caf\u00e9\"}}],\"usage\":null}\r\n", "\r\n")]
    + [('data: {"usage":{"t":1}}\n', 'data: {"usage":{"t":1,' + D7 + "}}\n"), ("\n", "\n")]
    + [('data:{"choices":[],"usage":{"prompt_tokens_details":null}}\r', 'data:{"choices":[],"usage":{' + D7 + "}}\r"), ("\r", "\r")]
    + [(t, t) for t in ("usage: {\"usage\":{}}\n", "data: {\"usage\":{}\n", "data: [DONE]\n\n")]
)


def usage_texts():
    x = llmd_pair()
    for name, text, want in TEXTS:
        text, want = text.encode(), (text if want is None else want).encode()
        pretty = text.replace(b",", b",\r\n  ").replace(b"{", b"{ \n")
        tap.same(say(x, JSON, text), want, f"llm-d usage, JSON: {name}")
        wrong = [at for at in range(len(text)) if say(x, JSON, text[:at], text[at:]) != want]
        tap.same(wrong, [], f"llm-d usage, JSON: {name}: split at every byte")
        tap.same(say(x, JSON + "; charset=utf-8", pretty), model(pretty, 7), f"llm-d usage, JSON on several lines: {name}")
        line = b"data: " + text
        tap.same(say(x, EVENTS, line), b"data: " + want, f"llm-d usage, events: {name}: missing final newline")
        tap.same(say(x, EVENTS, line + b"\n\n"), b"data: " + want + b"\n\n", f"llm-d usage, events: {name}")
    wrong = [at for at in range(len(SSE[0]) + 1) if say(x, EVENTS, SSE[0][:at], SSE[0][at:]) != SSE[1]]
    tap.same(wrong, [], "llm-d usage, events: split at every byte")
    tap.same(say(x, EVENTS, *(bytes([b]) for b in SSE[0])), SSE[1], "llm-d usage, events: every byte for itself")
    x.d.script = fixed(200, TEXTS[0][1], {"content-type": JSON})
    got = x.ask(CHAT)
    tap.same(
        (got.body, got.header("content-length"), got.header("transfer-encoding")),
        (TEXTS[0][2].encode(), None, "chunked"),
        "llm-d usage: content-length is dropped",
    )
    with Client(x.port) as c:
        got = c.ask("POST", PATH, CHAT, {"x-prefiller-host-port": x.p.authority}, version="1.0")
        tap.same((got.body, got.header("content-length")), (TEXTS[0][2].encode(), None), "llm-d usage: HTTP/1.0, too")
    x.end("usage_texts")


def usage_counts():
    x = llmd_pair()
    text = b'{"usage":{"prompt_tokens_details":{"cached_tokens":3}}}'
    for cached, want in ((0, 0), (12, 12), (2**63, 2**63), (None, 0), ("5", 0), (-1, 0), (1.5, 0), (True, 0), ([1], 0)):
        x.p.script = prefill_says(cached)
        tap.same(say(x, JSON, text), text.replace(b"3", b"%d" % want), f"llm-d usage: prefill says {cached!r}: {want}")
    for answer in ({"id": "p"}, {"usage": None}, {"usage": {"prompt_tokens_details": None}}, {"usage": [1]}):
        x.p.script = fixed(200, answer)
        tap.same(say(x, JSON, text), text.replace(b"3", b"0"), f"llm-d usage: prefill says {answer}: 0")
    x.end("usage_counts")


def usage_stays():
    """Where no prefill ran, and where the answer is of another kind, nothing is touched."""
    x = llmd_pair()
    text, line = b'{"usage":{"a":1}}', b'data: {"usage":{"a":1}}\n\n'
    for kind, data in ((JSON, text), (EVENTS, line)):
        tap.ok(say(x, kind, data) != data, f"llm-d usage, {kind}: set behind a prefill")
        tap.same(say(x, kind, data, how=lambda: ask(x.port, CHAT)), data, f"llm-d usage, {kind}: not when passed through")
        tap.same(say(x, kind, data, fields=[("content-encoding", "gzip")]), data, f"llm-d usage, {kind}: not when compressed")
    for kind in ("text/plain", "application/jsonl", "text/event-stream2", "application/octet-stream"):
        tap.same(say(x, kind, text), text, f"llm-d usage: not of {kind}")
    for kind, data in ((JSON, text), (EVENTS, line)):
        for script in (fixed(500, b""), lambda e, r: r.conn.reset()):
            x.p.script = script
            tap.same(say(x, kind, data), data, f"llm-d usage, {kind}: not after a fall back")
    x.p.script = fixed(429, text, {"content-type": JSON})
    tap.same(x.ask(CHAT).body, text, "llm-d usage: not in prefill's own error")
    x.end("usage_stays")
    for profile, adapter in (("dyn", "vllm_nixl"), ("llmd", "sglang")):
        d = Engine(None)
        p = Engine(sglang("prefill", lambda: d) if adapter == "sglang" else prefill_handoff)
        answers = fixed(200, b'{"choices":[{"finish_reason":"stop"}],"usage":{"a":1}}', {"content-type": JSON})
        d.script = sglang("decode", lambda: p, answers) if adapter == "sglang" else answers
        s = Sidecar(d.port, adapter, KVPICK_SIDECAR_PROFILE=profile)
        tap.ok(ask(s.port, CHAT, p.authority).body.endswith(b'"usage":{"a":1}}'), f"usage: not of {profile} with {adapter}")
        s.stop()
        p.close()
        d.close()


def prefill_handoff(engine, req):
    from pd import HANDOFF

    req.conn.reply(200, {"kv_transfer_params": HANDOFF, "usage": {"prompt_tokens_details": {"cached_tokens": 7}}})


def usage_stream():
    """An event leaves when its line has ended; a line that breaks off leaves as it is."""
    go = threading.Event()

    def script(engine, req):
        req.conn.head(200, [("content-type", EVENTS)])
        req.conn.chunk(b'data: {"usage":{}}\n\nda')
        go.wait(10)
        req.conn.chunk(b'ta: {"usage":{"t":1')
        time.sleep(0.05)
        req.conn.reset()

    x = llmd_pair(None, script)
    with Client(x.port) as c:
        c.send("POST", PATH, STREAM, {"x-prefiller-host-port": x.p.authority})
        c.head()
        tap.same(c.chunk(), b'data: {"usage":{' + D7.encode() + b"}}\n\n", "llm-d usage: an event comes before the next")
        go.set()
        rest, data = b"", b"x"
        while data:
            data = c.chunk()
            rest += data or b""
        tap.same((rest, data), (b'data: {"usage":{"t":1', None), "llm-d usage: a broken stream ends with what came, broken")
    x.end("usage_stream")
    x = llmd_pair(None, lambda e, r: (r.conn.head(200, [("content-type", JSON)]), r.conn.chunk(b'{"us'), silent(e, r)))
    c = Client(x.port)
    c.send("POST", PATH, CHAT, {"x-prefiller-host-port": x.p.authority})
    c.head()
    at = time.monotonic()
    c.drop()
    tap.ok(
        wait_for(lambda: x.d.ended, 3) and time.monotonic() - at < 1.5 * SLOW,
        "llm-d usage: a client that leaves while a text is gathered lets the engine go within a second",
    )
    x.end("usage_stream left")


def usage_bounds():
    """Lines and texts over 4 MiB pass; a client that does not read stops the engine."""
    most = 4 << 20
    x = llmd_pair()
    head, tail = b'data: {"usage":{},"x":"', b'"}\n'
    small = b'data: {"usage":{}}\n'
    small_set = small.replace(b"{}", b"{" + D7.encode() + b"}")
    for size, is_set in ((most, True), (most + 1, False)):
        line = head + b"x" * (size - len(head) - len(tail)) + tail
        pieces = [line[i : i + 100_000] for i in range(0, size, 100_000)]
        got = say(x, EVENTS, *pieces, small)
        want = (line.replace(b"{}", b"{" + D7.encode() + b"}", 1) if is_set else line) + small_set
        tap.ok(got == want, f"llm-d usage: a line of {size} bytes {'is set' if is_set else 'passes'}, the next is set")
        text = line[6:-1]
        text += b" " * (size - len(text))
        want = text.replace(b"{}", b"{" + D7.encode() + b"}", 1) if is_set else text
        tap.ok(say(x, JSON, text[: size // 2], text[size // 2 :]) == want, f"llm-d usage: and so does a text of {size} bytes")
    tap.same(x.s.metric("usage_too_long_total"), 2.0, "llm-d usage: what is too long is counted")
    total = 300 << 20

    def flood(engine, req):
        req.conn.head(200, [("content-type", EVENTS)])
        piece = (b'data: {"usage":{"t":1}}\n' if engine.lines else b"data: xxxxxxxxxxxxxxxxxx") * 2730
        engine.sent = 0
        while engine.sent < total:
            req.conn.chunk(piece)
            engine.sent += len(piece)

    x.d.script = flood
    for x.d.lines in (True, False):
        x.d.sent = 0
        base = x.s.rss_kb()
        with Client(x.port, rcvbuf=65536) as c:
            c.send("POST", PATH, STREAM, {"x-prefiller-host-port": x.p.authority})
            c.head()
            last = -1
            while last != x.d.sent:
                last = x.d.sent
                time.sleep(0.3)
            what = "lines" if x.d.lines else "one line without end"
            tap.ok(0 < x.d.sent < total // 4, f"llm-d usage: a client that does not read {what} stops the engine", x.d.sent)
            grown = x.s.rss_kb() - base
            tap.ok(grown < 16384 * SLOW, f"llm-d usage: {what}: without memory for it", grown)
            for _ in range(300):
                c.chunk()
            tap.ok(wait_for(lambda: x.d.sent > last), "llm-d usage: when it reads on, the engine goes on")
        tap.ok(x.idle(), "llm-d usage: when it leaves, the stream ends")
    x.end("usage_bounds")


# ---- a model of its own ----


def refuse(_):
    raise ValueError


DECODER = json.JSONDecoder(parse_constant=refuse)
BLANKS = re.compile(r"[ \t\r\n]*")


def blanks(text, at):
    return BLANKS.match(text, at).end()


def members(text, at):
    """Members of the object at `at`: {name: (from, to)}, the last of a name, and where its brace is."""
    found, at = {}, blanks(text, at + 1)
    while text[at] != "}":
        name, at = DECODER.raw_decode(text, at)
        at = blanks(text, blanks(text, at) + 1)
        _, end = DECODER.raw_decode(text, at)
        found[name] = (at, end)
        at = blanks(text, end)
        if text[at] == ",":
            at = blanks(text, at + 1)
    return found, at


def add(text, brace, member):
    comma = "" if text[:brace].rstrip(" \t\r\n").endswith("{") else ","
    return text[:brace] + comma + member + text[brace:]


def model(data, cached):
    """What becomes of one JSON text."""
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return data
    if not isinstance(value, dict) or not isinstance(value.get("usage"), dict):
        return data
    usage, brace = members(text, members(text, blanks(text, 0))[0]["usage"][0])
    if "prompt_tokens_details" not in usage:
        out = add(text, brace, f'"prompt_tokens_details":{{"cached_tokens":{cached}}}')
    else:
        at, end = usage["prompt_tokens_details"]
        if text[at] != "{":
            out = text[:at] + f'{{"cached_tokens":{cached}}}' + text[end:]
        else:
            details, brace = members(text, at)
            if "cached_tokens" in details:
                at, end = details["cached_tokens"]
                out = text[:at] + str(cached) + text[end:]
            else:
                out = add(text, brace, f'"cached_tokens":{cached}')
    value["usage"] = dict(value["usage"])
    old = value["usage"].get("prompt_tokens_details")
    value["usage"]["prompt_tokens_details"] = {**(old if isinstance(old, dict) else {}), "cached_tokens": cached}
    assert json.loads(out) == value, (text, out)
    return out.encode()


def model_events(data, cached):
    out = b""
    for line in re.findall(rb"[^\r\n]*[\r\n]|[^\r\n]+", data):
        out += b"data:" + model(line[5:], cached) if line.startswith(b"data:") else line
    return out


def random_name(rnd, name):
    return "".join(f"\\u{ord(c):04x}" if rnd.random() < 0.02 else c for c in name)


def random_value(rnd, depth=0):
    r = rnd.random()
    if depth < 4 and r < 0.3:
        return random_object(rnd, depth, [])
    if depth < 4 and r < 0.4:
        return "[" + ",".join(random_value(rnd, depth + 1) for _ in range(rnd.randrange(3))) + "]"
    return rnd.choice(
        ("null", "true", "0", "-0", "1.50", "1e2", "18446744073709551616", '""', '"usage"', '"a\\"}{,"', '"caf\u00e9 \\n"', '"\\ud800"')
    )


def random_object(rnd, depth, extra):
    blank = lambda: rnd.choice(("", "", "", " ", "\t", "  "))
    pairs = [(rnd.choice(("id", "choices", "t", "x\\n", "")), random_value(rnd, depth + 1)) for _ in range(rnd.randrange(4))]
    pairs += extra
    rnd.shuffle(pairs)
    text = ",".join(f'{blank()}"{random_name(rnd, k)}"{blank()}:{blank()}{v}{blank()}' for k, v in pairs)
    return "{" + (text or blank()) + "}"


def random_text(rnd):
    """An answer, most of them with usage; some of them broken."""
    cached = [("cached_tokens", random_value(rnd)) for _ in range(rnd.choice((0, 1, 1, 2)))]
    details = random_object(rnd, 1, cached) if rnd.random() < 0.7 else random_value(rnd)
    usage = [("prompt_tokens_details", details)] if rnd.random() < 0.7 else []
    usage = random_object(rnd, 1, usage) if rnd.random() < 0.8 else random_value(rnd)
    text = random_object(rnd, 0, [("usage", usage)] * rnd.choice((0, 1, 1, 1, 2)))
    if rnd.random() < 0.1:
        at = rnd.randrange(len(text))
        text = text[:at] + rnd.choice(("", "}", "\x01", '"', ",")) + text[at + 1 :]
    data = text.encode("utf-8", "surrogatepass")
    return data[:-1] + b"\xff" + data[-1:] if rnd.random() < 0.03 else data


def random_events(rnd):
    out = b""
    for _ in range(rnd.randrange(1, 12)):
        line = rnd.choice((b"data: ", b"data:", b"data: ", b"data: ", b"data : ", b"Data: ", b": ", b"", b"event: "))
        line += rnd.choice((random_text(rnd), random_text(rnd), b"[DONE]", b"", b"x"))
        out += line + rnd.choice((b"\n", b"\n\n", b"\r\n\r\n", b"\r", b"\r\n"))
    return out.rstrip(b"\r\n") if rnd.random() < 0.3 else out


def usage_random():
    rnd = random.Random(f"{SEED} usage")
    x = llmd_pair(None, None)
    wrong, changed, rounds = [], 0, 3000 if os.environ.get("KVP_LONG") else 400
    for i in range(rounds):
        events, cached = rnd.random() < 0.6, rnd.choice((0, 1, 61, 10**6))
        x.p.script = prefill_says(cached)
        data = random_events(rnd) if events else random_text(rnd)
        cuts = sorted(rnd.sample(range(len(data) + 1), min(rnd.choice((0, 1, 3, 20)), len(data))))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
        want = (model_events if events else model)(data, cached)
        changed += want != data
        got = say(x, EVENTS if events else JSON, *pieces)
        if got != want:
            wrong.append((i, pieces, want, got))
    tap.same(wrong[:1], [], f"llm-d usage: {rounds} random answers, randomly cut, KVP_SEED={SEED}")
    tap.ok(rounds // 3 < changed < rounds, "llm-d usage: of them many were to be changed", changed)
    x.end("usage_random")


ALL = [
    legs,
    prefill_fails,
    errors,
    allowlist,
    encoders,
    sampling,
    bootstrap_port,
    without_effect,
    usage_texts,
    usage_counts,
    usage_stays,
    usage_stream,
    usage_bounds,
    usage_random,
]
print(f"# KVP_SEED={SEED}")
for section in ALL:
    if not sys.argv[1:] or section.__name__ in sys.argv[1:]:
        begun = time.monotonic()
        section()
        print(f"# {section.__name__}: {time.monotonic() - begun:.1f} s")
sys.exit(tap.done())
