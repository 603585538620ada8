#!/usr/bin/env python3
"""Every exchange of disagg.json over real sockets: client, sidecar, prefill engine, decode engine. Addresses of
the vectors stand for loopback ones; <RID>, <ROOM> and <DISAGG_ID> stand for what the sidecar chose."""

import json
import os
import socket
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import Tap, free_port, wait_for
from pd import CHAT, Client, Engine, Pair, Sidecar, ask, fixed, has_ipv6, sglang

tap = Pair.tap = Tap()
PREFILL, PREFILL6 = "10.42.3.17:8000", "[fd00:10::5]:8000"
SPECIAL = {"<RID>": "rid", "<ROOM>": "bootstrap_room", "<DISAGG_ID>": "disagg_request_id"}


def text_of(message):
    if "raw" in message:
        return message["raw"].encode()
    return json.dumps(message["json"]).encode() if "json" in message else b""


def resolve(value, chosen, host):
    """A vector's value with what this run chose."""
    if isinstance(value, dict):
        return {k: resolve(v, chosen, host) for k, v in value.items()}
    if isinstance(value, list):
        return [resolve(v, chosen, host) for v in value]
    if value in SPECIAL:
        return chosen.get(SPECIAL[value])
    return host if value == "10.42.3.17" else value


def chosen_by(body):
    out = {k: body[k] for k in ("rid", "bootstrap_room") if k in body}
    out.update({k: v for k, v in (body.get("disaggregated_params") or {}).items() if k == "disagg_request_id"})
    return out


class Side:
    """One engine of an exchange: answers side calls as given, the inference call as its leg says."""

    def __init__(self, x, name, host):
        self.leg, self.x, self.closed = x[f"{name}_leg"], x, False
        self.side = [c for c in x.get("side_calls", []) if c["target"] == name]
        self.name, self.sent_at = name, None
        self.engine = Engine(self.script, host)

    def script(self, engine, req):
        path = req.path.split("?")[0]
        if path in ("/server_info", "/abort_request"):
            call = next(c for c in self.side if c["request"]["url"].endswith(path))
            req.conn.reply(call["response"]["status"], text_of(call["response"]))
            return
        if self.side:  # engines of this kind meet before either answers
            wait_for(lambda: all(s.engine.generated() for s in self.both))
        self.infer(req)

    def infer(self, req):
        conn, response, event = req.conn, self.leg["response"], self.leg.get("event", "")
        if not response:
            self.closed = conn.hang()
            raise ConnectionError
        body = response.get("raw", "")
        if "json" in response:
            body = json.dumps(resolve(response["json"], chosen_by(req.json()), self.engine.host))
        if self.x["id"] == "E30" and self.name == "prefill":
            time.sleep(0.1)  # the decode engine's first bytes come before
        if "every 20 ms" in body:
            conn.head(response["status"], [], 1000000)
            while True:
                conn.send(b"x" * 256)
                time.sleep(0.02)
        if "no body byte" in event:
            conn.head(200, [("content-type", "application/json")], 32)
            self.closed = conn.hang()
            raise ConnectionError
        if "reset" in event or "still open" in event or "client closes" in event:
            conn.head(response["status"], response["headers"].items())
            conn.chunk(body.encode())
            self.sent_at = time.monotonic()
            if "reset" in event:
                time.sleep(0.05)
                conn.reset()
            self.closed = conn.hang()
            raise ConnectionError
        conn.reply(
            response["status"], body, {k: v for k, v in response.get("headers", {}).items() if k != "content-length"}
        )


def leg_ok(x, side, host, chosen):
    """The request that an engine got against the vector's."""
    name, want = side.name, side.leg and side.leg["request"]
    got = side.engine.generated()
    if not want:
        tap.same([r.path for r in got], [], f"{x['id']} {name} engine is not asked to generate")
        return
    if not tap.ok(len(got) == 1, f"{x['id']} {name} engine is asked once", [r.path for r in got]):
        return
    req = got[0]
    path = want["url"].split("/", 3)[3]
    tap.same((req.method, req.path), (want["method"], "/" + path), f"{x['id']} {name} request line")
    wrong = [k for k, v in want["headers"].items() if req.header(k) != v]
    wrong += [k for k in want["absent"] if req.header(k.split(" ")[0]) is not None and "(" not in k]
    tap.same(wrong, [], f"{x['id']} {name} header fields")
    tap.same(req.header("host").split(":")[-1], str(side.engine.port), f"{x['id']} {name} Host is the engine's")
    if "raw" in want:
        tap.same(req.body, want["raw"].encode(), f"{x['id']} {name} body, byte for byte")
        return
    chosen.update(chosen_by(req.json()))
    tap.same(req.json(), resolve(want["json"], chosen, host), f"{x['id']} {name} body")


def expected(side, path):
    return [c for c in side.side if c["request"]["url"].endswith(path)]


def sides_ok(x, sides, chosen):
    for side in sides:
        for path in ("/server_info", "/abort_request"):
            want = expected(side, path)
            wait_for(lambda s=side, p=path, w=want: len(s.engine.calls(p)) >= len(w), 3)
            got = side.engine.calls(path)
            tap.same(len(got), len(want), f"{x['id']} {side.name}: {len(want)} calls of {path}")
            for req, call in zip(got, want):
                w = call["request"]
                wrong = [k for k, v in w["headers"].items() if req.header(k) != v]
                wrong += [k for k in w.get("absent", []) if req.header(k)]
                tap.same((req.method, wrong), (w["method"], []), f"{x['id']} {side.name}: {path} as it must be")
                if "json" in w:
                    tap.same(req.json(), resolve(w["json"], chosen, ""), f"{x['id']} {side.name}: body of {path}")


def client_ok(x, got):
    want = x["client_response"]
    tap.same(got.status, want["status"], f"{x['id']} client gets the status")
    wrong = {k: got.header(k) for k, v in want["headers"].items() if got.header(k) != v}
    tap.same(wrong, {}, f"{x['id']} client gets the header fields")
    if "raw" in want:
        tap.same(got.body, want["raw"].encode(), f"{x['id']} client gets the bytes")
        return
    w = want["json"]
    if "error" in w and w["error"].get("message") == "<any non-empty string>":
        error = got.json()["error"]
        tap.ok(error.pop("message"), f"{x['id']} client gets a message")
        tap.same(error, {k: v for k, v in w["error"].items() if k != "message"}, f"{x['id']} client gets the error")
        tap.ok(list(got.json()["error"]) == ["message", "type", "param", "code"], f"{x['id']} in the envelope's order")
    elif "<DISAGG_ID>" not in json.dumps(w):
        tap.same(got.json(), w, f"{x['id']} client gets the value")


def adapter_of(x):
    if x["profile"] == "trt":
        return "trtllm"
    return "sglang" if "side_calls" in x or x["id"] == "E31" else "vllm_nixl"


def body_of(x):
    r = x["client_request"]
    if "json_override" in r:
        value = json.loads(json.dumps(r["json"]))
        value["messages"][1]["content"] = "x" * 4096
        return json.dumps(value).encode()
    return text_of(r)


def send(x, c, prefill):
    r = x["client_request"]
    headers = [(k, v.replace(PREFILL, prefill).replace(PREFILL6, prefill)) for k, v in r["headers"].items()]
    headers += [(k, v.replace(PREFILL, prefill)) for k, v in r.get("repeat_headers", [])]
    c.send(r["method"], r["path"], body_of(x), headers, length=100000 if "event" in r else None)


def run(x):
    six = PREFILL6 in json.dumps(x)
    if six and not has_ipv6():
        print(f"# {x['id']} skipped: no IPv6 here")
        return
    host = "::1" if six else "127.0.0.1"
    p, d = Side(x, "prefill", host), Side(x, "decode", "127.0.0.1")
    p.both = d.both = (p, d)
    refused = free_port()
    prefill = f"127.0.0.1:{refused}" if p.leg and p.leg.get("event") == "ECONNREFUSED" else p.engine.authority
    decode_port = refused if d.leg and d.leg.get("event") == "ECONNREFUSED" else d.engine.port
    env = {"DYN_SIDECAR_PD_ADAPTER": adapter_of(x), **x["client_request"].get("config", {})}
    if x["profile"] == "llmd":
        env["KVPICK_SIDECAR_PROFILE"] = "llmd"
    if x["id"] == "E38":
        env["DYN_SIDECAR_DRAIN_TIMEOUT_MS"] = 200
    s = Sidecar(decode_port, **env)
    chosen, got = {}, None
    with Client(s.port) as c:
        send(x, c, prefill)
        if x["id"] == "E23":
            wait_for(p.engine.generated)
            c.drop()
        elif x["id"] == "E37":
            c.head()
            tap.same(c.chunk(), x["client_response"]["raw"].encode(), "E37 client gets the first bytes")
            c.drop()
        else:
            if x["id"] == "E38":
                wait_for(lambda: p.engine.generated() and d.engine.generated())
                s.signal()
            got = c.read()
    for side in (p, d):
        unreached = side.leg and side.leg.get("event") == "ECONNREFUSED"
        if not unreached:
            leg_ok(x, side, host, chosen)
    sides_ok(x, (p, d), chosen)
    if got:
        client_ok(x, got)
        if x["id"] == "E24":
            tap.same(got.ended, "broken", "E24 client sees the break")
    for side in (p, d):
        event = (side.leg or {}).get("event", "")
        if "closed" in event or "closes" in event or "no body" in event or "no bytes" in event or "open" in event:
            tap.ok(wait_for(lambda w=side: w.closed, 3), f"{x['id']} {side.name} connection is closed")
        tap.same(side.engine.errors, [], f"{x['id']} {side.name} engine understood everything")
    tap.same(s.stop(), 0, f"{x['id']} the sidecar ends with 0")
    # It ends behind the last of its calls: none has come that nobody waited for.
    late = [(side.name, len(side.engine.calls("/abort_request"))) for side in (p, d)]
    want = [(side.name, len(expected(side, "/abort_request"))) for side in (p, d)]
    tap.same(late, want, f"{x['id']} no abort came later")
    for side in (p, d):
        side.engine.close()


# ---- decisions ----


def handoffs(vectors):
    """9.1.3: what is no handoff never reaches decode."""
    x = Pair(None, fixed(200, b"{}"))
    for row in vectors["handoff_validation"]:
        x.p.script = fixed(200, row["prefill_response"])
        x.d.requests.clear()
        got = x.ask(CHAT)
        seen = [r.json()["kv_transfer_params"] for r in x.d.requests]
        if row["valid"]:
            want = (200, None, [row["prefill_response"]["kv_transfer_params"]])
        else:
            want = (502, "invalid_prefill_handoff", [])
        tap.same((got.status, got.code(), seen), want, f"handoff_validation: {row['name']}")
    x.end("handoff_validation")


def gates(vectors):
    codes = vectors["sampling_gate"]["codes"]
    for name in ("vllm_nixl", "sglang"):
        d = Engine(None)
        if name == "sglang":
            p = Engine(sglang("prefill", lambda e=d: e))
            d.script = sglang("decode", lambda e=p: e)
        else:
            baseline = next(r for r in vectors["handoff_validation"] if r["valid"])["prefill_response"]
            p, d.script = Engine(fixed(200, baseline)), fixed(200, b"{}")
        s = Sidecar(d.port, name)
        for row in vectors["sampling_gate"][name]:
            for e in (p, d):
                e.requests.clear()
            own = {} if row["n"] == "<absent>" else {"n": row["n"]}
            got = ask(s.port, {"messages": [], **own}, p.authority)
            want = (200, None, 2) if row["ok"] else (int(codes[name][0]), codes[name][1], 0)
            tap.same(
                (got.status, got.code(), len(p.generated() + d.generated())), want, f"sampling_gate: {name}: n={row['n']!r}"
            )
        tap.same(s.stop(), 0, "sampling_gate: ends with 0")
        p.close()
        d.close()


def bodies(vectors):
    baseline = next(r for r in vectors["handoff_validation"] if r["valid"])["prefill_response"]
    for profile, adapter in (("dyn", "vllm_nixl"), ("llmd", None)):
        x = Pair(fixed(200, baseline), fixed(200, b"{}"), adapter, KVPICK_SIDECAR_PROFILE=profile)
        for row in vectors["body_derivation"]:
            x.ask(row["original"])
            p, d = (e.requests[-1].json() for e in (x.p, x.d))
            tap.same(p, row["vllm_prefill" if adapter else "llmd_prefill"], f"body_derivation: {profile}: prefill leg")
            tap.same(d.pop("kv_transfer_params"), baseline["kv_transfer_params"], f"body_derivation: {profile}: handoff")
            want = {k: v for k, v in row["vllm_decode_minus_handoff"].items() if k != "kv_transfer_params"}
            tap.same(d, want, f"body_derivation: {profile}: decode leg")
        x.end("body_derivation")


def streams(vectors):
    """Answers of SGLang's prefill engine; then of its decode engine, which ends first."""
    good = {s: next(r for r in vectors["sglang_stream_validation"] if r["complete"] and r["streaming"] == s) for s in (False, True)}
    for row in vectors["sglang_stream_validation"]:
        kind = "text/event-stream" if row["streaming"] else "application/json"
        for which in ("prefill", "decode"):
            said = {w: (row if w == which else good[row["streaming"]])["body"] for w in ("prefill", "decode")}
            d = Engine(None)

            def prefill(engine, req, text=said["prefill"], late=which == "decode", other=d):
                if late:
                    wait_for(lambda: other.answered, 5)
                    time.sleep(0.02)
                req.conn.reply(200, text, {"content-type": kind})

            def decode(engine, req, text=said["decode"]):
                req.conn.reply(200, text, {"content-type": kind})
                engine.answered = True

            d.answered = False
            p = Engine(sglang("prefill", script=prefill))
            d.script = sglang("decode", script=decode)
            s = Sidecar(d.port, "sglang")
            got = ask(s.port, {**CHAT, "stream": row["streaming"]}, p.authority)
            want = (200, said["decode"].encode()) if row["complete"] else (502, "sglang_pd_protocol_error")
            have = (got.status, got.body if got.status == 200 else got.code())
            tap.same(have, want, f"sglang_stream_validation: {which} says {row['body']!r}")
            s.stop()
            p.close()
            d.close()


with open("tests/vectors/disagg.json", encoding="utf-8") as f:
    everything = json.load(f)
    exchanges = everything["exchanges"]
only = sys.argv[1:]
for one in exchanges:
    if not only or one["id"] in only:
        try:
            run(one)
        except (OSError, socket.timeout, AssertionError, RuntimeError) as e:
            tap.ok(False, f"{one['id']} runs to its end", repr(e))
tap.same(len(exchanges), 40, "all 40 exchanges")
for decide in (handoffs, gates, bodies, streams):
    if not only or decide.__name__ in only:
        decide(everything)
sys.exit(tap.done())
