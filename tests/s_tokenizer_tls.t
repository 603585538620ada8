#!/usr/bin/env python3
"""A tokenizer service over https: with the certificate that the Endpoint Picker is told to trust, and without."""
import os
import ssl
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from epp import CHAT, MODEL, Epp, Renderer, chat, respond, routed, schedulable
from node import Tap, skip, wait_for, worker

tap = Tap()


def certificate(folder):
    """Self-signed, for localhost."""
    made = [os.path.join(folder, f) for f in ("tokenizer.crt", "tokenizer.key")]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
               "2", "-subj", "/CN=tokenizer", "-addext", "subjectAltName=DNS:localhost", "-out", made[0], "-keyout",
               made[1]]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        skip("no openssl program to make a certificate")
    return made


def main():
    renderer = Renderer()
    cert, key = certificate(renderer.dir.name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    renderer.server.socket = context.wrap_socket(renderer.server.socket, server_side=True)
    url = renderer.url.replace("http://127.0.0.1", "https://localhost")
    env = {"DYN_EPP_TOKENIZER_SERVICE_URL": url, "DYN_ROUTER_USE_KV_EVENTS": "false"}
    with Epp(renderer, env={**env, "KVPICK_EPP_TOKENIZER_CA_FILE": cert}) as node:
        node.call("POST", "/workers", worker(1, model_name=MODEL))
        wait_for(lambda: schedulable(node) == 1)
        envoy = node.envoy()
        for i in range(5):
            s, head, _ = routed(envoy, CHAT, chat(i, 50))
            tap.ok(head.destination == "10.0.0.1:8000" and node.load()[1][1] == 50,
                   "a chat is tokenized over https: its 50 blocks are booked", (head, node.load()))
            respond(s)
            s.half_close()
            s.reply()
        envoy.close()
        wait_for(lambda: not node.load())
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    with Epp(renderer, env=env) as node:
        node.call("POST", "/workers", worker(1, model_name=MODEL))
        wait_for(lambda: schedulable(node) == 1)
        envoy = node.envoy()
        s, head, _ = routed(envoy, CHAT, chat(1, 4))
        tap.same((head.kind, head.status, head.text), ("immediate", 503, "tokenization service unavailable"),
                 "a certificate that nobody vouches for: 503")
        tap.ok(wait_for(lambda: "certificate: self-signed certificate" in node.log_text()), "and the log says why")
        envoy.close()
    return tap.done()


sys.exit(main())
