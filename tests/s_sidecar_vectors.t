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
from pd import Client, Engine, Sidecar, has_ipv6

tap = Tap()
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


def sides_ok(x, sides, chosen):
    def expected(side, path):
        return [c for c in side.side if c["request"]["url"].endswith(path)]

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
    for side in (p, d):
        side.engine.close()


with open("tests/vectors/disagg.json", encoding="utf-8") as f:
    exchanges = json.load(f)["exchanges"]
only = sys.argv[1:]
for one in exchanges:
    if not only or one["id"] in only:
        try:
            run(one)
        except (OSError, socket.timeout, AssertionError, RuntimeError) as e:
            tap.ok(False, f"{one['id']} runs to its end", repr(e))
tap.same(len(exchanges), 40, "all 40 exchanges")
sys.exit(tap.done())
