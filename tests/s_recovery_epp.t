#!/usr/bin/env python3
"""The Endpoint Picker of a node that recovers its index from a peer: NOT_SERVING and no picks until it has."""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from dump_peer import Peer
from engine import Engine
from envoy import DUPLEX, Envoy, REQUEST_BODY, REQUEST_HEADERS, body, headers
from node import Node, Tap, free_port, wait_for

tap = Tap()
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
DUMP = json.dumps({"m:default": {"block_size": 4, "events": [{"worker_id": 1, "event": {
    "event_id": 0, "data": {"stored": {"blocks": [{"block_hash": 5, "tokens_hash": 6}]}}}}]}}).encode()


def pick(envoy):
    """Status (0 = picked) of a completion with token ids."""
    s = envoy.stream(headers(REQUEST_HEADERS, [(":method", "POST"), (":path", "/v1/completions"),
                                               ("content-type", "application/json")], config=(DUPLEX, DUPLEX)),
                     body(REQUEST_BODY, b'{"model":"m","prompt":[1,2,3,4,5]}', end=True))
    r = s.reply()
    s.reset()
    return r and (r.status or (0 if r.destination else r.kind))


peer = Peer(DUMP)
engine = Engine(replay=False)
epp, health = free_port(), free_port()
with Node("--indexer-peers", peer.at("held"), env={
        "KVPICK_MODE": "both", "DYN_MODEL_NAME": "m", "DYN_EPP_METRICS_PORT": "0", "DYN_SECURE_SERVING": "false",
        "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render", "DYN_EPP_TOKENIZER_SERVICE_URL": "http://127.0.0.1:9",
        "KVPICK_EPP_PORT": str(epp), "KVPICK_EPP_HEALTH_PORT": str(health), "KVPICK_EXTPROC_PROCESSES": "1",
        "DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS": "60000"}) as node:
    tap.ok(wait_for(lambda: " extproc.run " in node.log_text(), 20), "the Endpoint Picker runs")
    engine.register(node, 1, model_name="m")
    tap.ok(peer.hold.wait(20), "the peer is asked")
    e, probe = Envoy(f"127.0.0.1:{epp}"), Envoy(f"127.0.0.1:{health}")
    for name in ("readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"):
        tap.same(probe.health(name), NOT_SERVING, f"{name} is NOT_SERVING meanwhile")
    tap.same(probe.health("liveness"), SERVING, "liveness is SERVING")
    tap.same(pick(e), 503, "a pick is answered 503")
    tap.same(node.call("GET", "/ready")[0], 503, "/ready, too")
    peer.go.set()
    tap.ok(wait_for(lambda: probe.health("readiness") == SERVING), "the dump comes: readiness is SERVING")
    tap.same(pick(e), 0, "and picks name a worker")
    tap.same(node.call("GET", "/ready")[0], 200, "/ready is 200")
    e.close()
    probe.close()
    tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
engine.close()
sys.exit(tap.done())
