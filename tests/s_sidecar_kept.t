#!/usr/bin/env python3
"""Kept connections between sidecar and engines, broken by the engine: what is asked again on a new one. A generation
of SGLang's pair is not, once the engine may have got it: a room and an id are used once."""

import os
import ssl
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import pd
from node import Tap, wait_for
from pd import Engine, Sidecar, ask, certificate, sglang, vllm_decode, vllm_prefill

tap = Tap()
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 9}
STREAM = {**CHAT, "stream": True}
LONG = {**CHAT, "messages": [{"role": "user", "content": "y" * 12_000_000}]}
UPSTREAM = (502, "sglang_pd_upstream_error")


class Conn(pd.Conn):
    """Breaks while it takes a body, if the engine says so."""

    def take(self, n):
        if n > 1_000_000 and self.engine.breaks_in_body:
            self.engine.breaks_in_body -= 1
            super().take(100_000)
            raise ConnectionError
        return super().take(n)


pd.Conn = Conn
Engine.breaks_in_body = 0


def closes(_engine, _req):
    raise ConnectionError


def resets(_engine, req):
    req.conn.reset()


class Pair:
    def __init__(self, prefill, decode, adapter, **env):
        self.p, self.d = Engine(prefill), Engine(decode)
        self.s = Sidecar(self.d.port, adapter, **env)

    def ask(self, body, **how):
        return ask(self.s.port, body, self.p.authority, **how)

    def counts(self):
        return tuple(int(self.s.metric(f"engine_{n}_total")) for n in ("retries", "unrepeated"))

    def close_idle(self):
        """Both engines close what they keep; the sidecar has not been asked anything since."""
        self.p.hang_up()
        self.d.hang_up()

    def end(self, name):
        tap.ok(wait_for(lambda: self.s.metric("requests_inflight") == 0, 5), f"{name}: no request is left running")
        tap.ok(self.s.stop() == 0, f"{name}: the sidecar ends with 0", self.s.log.decode())
        tap.same(self.p.errors + self.d.errors, [], f"{name}: the engines understood everything")
        self.p.close()
        self.d.close()


def pair(prefill=None, decode=None, **env):
    return Pair(sglang("prefill", None, prefill), sglang("decode", None, decode), "sglang", **env)


def aborts(x):
    return tuple(len(e.calls("/abort_request")) for e in (x.p, x.d))


def generations(x):
    return tuple(len(e.generated()) for e in (x.p, x.d))


def holds(_engine, req):
    """The other engine of a pair, which waits for its partner."""
    req.conn.hang()
    raise ConnectionError


def last(script, others):
    """The script, when the other engine has its request, too."""

    def run(engine, req):
        wait_for(others)
        script(engine, req)

    return run


def sgl_breaks(name, prefill, decode, body=STREAM, begun=None):
    x = pair(
        prefill if prefill is holds else last(prefill, lambda: x.d.generated()),
        decode if decode is holds else last(decode, lambda: x.p.generated()),
    )
    if begun:
        getattr(x, begun).breaks_in_body = 5
    got = x.ask(body)
    tap.same((got.status, got.code()), UPSTREAM, f"SGLang, {name}: 502, not what a second try would bring")
    if not begun:
        wait_for(lambda: sum(generations(x)) >= 2, 3)
        tap.same(generations(x), (1, 1), f"SGLang, {name}: each engine was asked once")
    tap.same(x.counts(), (0, 1), f"SGLang, {name}: not repeated, and counted")
    if begun:
        left = getattr(x, begun)
        tap.same((len(left.generated()), left.breaks_in_body), (0, 4), f"SGLang, {name}: it got it in part, once")
    tap.ok(wait_for(lambda: aborts(x) == (1, 1), 3), f"SGLang, {name}: both are told to stop", aborts(x))
    x.end(f"SGLang, {name}")


def sgl():
    sgl_breaks("decode closes when it has read the request", holds, closes)
    sgl_breaks("prefill closes when it has read the request", closes, holds)
    sgl_breaks("decode resets when it has read the request", holds, resets)
    sgl_breaks("prefill resets when it has read the request", resets, holds)
    sgl_breaks("decode closes while the request arrives", holds, holds, LONG, "d")
    sgl_breaks("prefill closes while the request arrives", holds, holds, LONG, "p")


def sgl_before():
    x = pair()
    tap.same(x.ask(CHAT).status, 200, "SGLang: a first request")
    for i in range(3):
        kept = (x.p.accepted, x.d.accepted)
        x.close_idle()
        tap.same(x.ask(CHAT).status, 200, f"SGLang: kept connections closed before the request ({i}): served")
        tap.same(
            (x.p.accepted, x.d.accepted), (kept[0] + 1, kept[1] + 1), f"SGLang: on a new connection each ({i})"
        )
    tap.same((generations(x), x.counts()[1]), ((4, 4), 0), "SGLang: each generation was asked for once")
    tap.ok(x.s.metric("engine_connections_stale_total") + x.counts()[0] == 6, "SGLang: dead connections are counted")
    x.end("SGLang, closed before")


def sgl_info():
    """What an engine says about itself may be asked again."""
    x = pair()
    tap.same(x.ask(CHAT).status, 200, "SGLang: a first request")
    for e in (x.p, x.d):
        asked = e.script

        def once(engine, req, asked=asked):
            engine.script = asked
            raise ConnectionError

        e.script = once
    tap.same(x.ask(CHAT).status, 200, "SGLang: both engines break when they have read GET /server_info: served")
    tap.same(x.counts(), (2, 0), "SGLang: both were asked again")
    tap.same([len(e.calls("/server_info")) for e in (x.p, x.d)], [3, 3], "SGLang: once more each")
    tap.same(generations(x), (2, 2), "SGLang: and to generate once")
    x.end("SGLang, server info")


def sgl_tls():
    folder = tempfile.TemporaryDirectory()
    made = certificate(folder.name)
    if not made:
        tap.ok(True, "SGLang over TLS # SKIP no openssl program to make a certificate")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*made)
    x = pair(holds, last(closes, lambda: x.p.generated()), KVPICK_SIDECAR_ENGINE_TLS="both", KVPICK_SIDECAR_ENGINE_CA_FILE=made[0])
    x.p.tls = x.d.tls = context
    got = x.ask(STREAM)
    tap.same((got.status, got.code()), UPSTREAM, "SGLang over TLS: decode closes when it has read the request: 502")
    tap.same((generations(x), x.counts()), ((1, 1), (0, 1)), "SGLang over TLS: not repeated")
    x.end("SGLang over TLS")


def others():
    """Where nothing says that it must not be seen twice."""
    x = Pair(vllm_prefill(), vllm_decode(), "vllm_nixl")
    tap.same(x.ask(CHAT).status, 200, "vLLM: a first request")
    for name, e in (("prefill", x.p), ("decode", x.d)):
        good = e.script

        def once(engine, req, good=good):
            engine.script = good
            raise ConnectionError

        e.script = once
        before = (len(e.requests), x.counts())
        tap.same(x.ask(CHAT).status, 200, f"vLLM: {name} closes a kept connection when it has read the request: served")
        tap.same(
            (len(e.requests), x.counts()),
            (before[0] + 2, (before[1][0] + 1, 0)),
            f"vLLM: {name} was asked again",
        )
    x.end("vLLM")


for section in (sgl, sgl_before, sgl_info, sgl_tls, others):
    section()
sys.exit(tap.done())
