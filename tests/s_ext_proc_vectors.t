#!/usr/bin/env python3
"""Every exchange of tests/vectors/ext_proc.json, driven over a real node with kvpick-extproc by a client that shares
nothing with it: grpcio's generic stub with bytes as messages (lib/envoy.py starts this test again with the system's
Python where grpcio is only there). The node's workers have the endpoints that the answers of the vectors name, so
nearly every answer is compared byte for byte.

Sent or expected here: every req_* and health_check_* message; resp_req_headers_aggregated and _ipv6 (and both with
another address, for the subset hints), resp_req_body_single, _empty, _chunk_1_of_3 to _3_of_3, _continue, all
resp_response_*; imm_503_no_endpoints, _overloaded, _tokenizer_unavailable, imm_504_tokenizer_timeout,
imm_502_tokenizer_error, imm_400_tokenizer_rejected, imm_431_metadata, both imm_429 of the router;
health_serving, _not_serving, _service_unknown.

Not driven: the messages of NOT_DRIVEN, with the reason. Nothing that a client can do makes the node send them;
tests/t_extproc_msg.c reads and writes them. The last claims compare both lists with the file."""
import hashlib
import http.server
import json
import os
import sys
import tempfile
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from envoy import (BUFFERED, DUPLEX, REQUEST_BODY, REQUEST_HEADERS, RESPONSE_BODY, WAIT, Envoy, body, grpc, headers,
                   one)
from node import SLOW, Node, Tap, free_port, wait_for, worker

NOT_DRIVEN = {
    "resp_req_headers_fallbacks": "the node names one endpoint",
    "resp_req_headers_disaggregated": "needs workers with roles: tests/s_disagg.t",
    "resp_req_body_replace_buffered": "a body is only replaced together with the routing headers",
    "resp_req_body_clear": "never sent: no body is cleared",
    "resp_mode_override": "never sent",
    "resp_override_message_timeout": "never sent",
    "imm_503_cache_not_ready": "discovery through Kubernetes only",
    "imm_429_evicted": "never sent: what was let in is not evicted",
    "imm_409_conflict": "a booking's id is the node's own and new for each request",
    "imm_500_internal": "an internal fault",
    "health_unknown": "never sent: a service is known or not",
}
tap = Tap()
MODEL = "m"
BIG_BODY = bytes((7 * i + 3) % 256 for i in range(130000))
POLICY = """default_policy_family: one
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
- {name: c, quantum: 1, policy_family: one, cache_bucket: all, prefill_busy_threshold: 0,
   request_queue_limit_per_worker: LIMIT}
"""


class Vectors:
    """The file's messages by name; remembers which were used."""

    def __init__(self):
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors", "ext_proc.json")
        with open(path, encoding="utf-8") as f:
            self.entry = {v["name"]: v for v in json.load(f)["vectors"]}
        self.used = set()

    def __getitem__(self, name):
        self.used.add(name)
        return bytes.fromhex(self.entry[name]["hex"])

    def same_digest(self, name, data):
        """The long messages are there by length, digest, first 24 and last 8 bytes."""
        self.used.add(name)
        v = self.entry[name]
        got = (len(data), hashlib.sha256(data).hexdigest(), data[:24].hex(), data[-8:].hex())
        tap.same(got, (v["size"], v["sha256"], v["head_hex"], v["tail_hex"]), f"{name}: length, digest, both ends")


vec = Vectors()


class Renderer:
    """A tokenizer service that answers as told: a status, or not at all before its time is over."""

    def __init__(self):
        self.status, self.asked = 200, 0
        self.go = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                status = outer.status
                outer.asked += 1
                if status == 0:
                    outer.go.wait(60)
                out = json.dumps({"request_id": "r", "token_ids": list(range(1, 9))}).encode()
                try:
                    self.send_response(status or 200)
                    self.send_header("content-length", str(len(out)))
                    self.end_headers()
                    self.wfile.write(out)
                except OSError:
                    pass

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Epp(Node):
    def __init__(self, renderer, **env):
        self.epp_port, self.health_port = free_port(), free_port()
        super().__init__(env={
            "KVPICK_MODE": "both", "DYN_MODEL_NAME": MODEL, "DYN_EPP_METRICS_PORT": "0", "DYN_SECURE_SERVING": "false",
            "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render", "DYN_EPP_TOKENIZER_SERVICE_URL": renderer.url,
            "DYN_ROUTER_USE_KV_EVENTS": "false", "KVPICK_EPP_PORT": str(self.epp_port),
            "KVPICK_EPP_HEALTH_PORT": str(self.health_port), **env})

    def start(self):
        super().start()
        if not wait_for(lambda: self.log_text().count(" extproc.run ") == 2, 20):
            raise RuntimeError("the extproc processes do not run\n" + self.log_text())
        return self

    def envoy(self):
        return Envoy(f"127.0.0.1:{self.epp_port}")

    def have(self, *addresses, **more):
        """The node's workers are those at these addresses, and no others."""
        for w in self.call("GET", "/workers")[1]:
            self.call("DELETE", f"/workers/{w['worker_id']}")
        for i, at in enumerate(addresses, 1):
            status, text = self.call("POST", "/workers", worker(i, model_name=MODEL, **more) |
                                     {"endpoint": f"http://{at}"})
            if status != 201:
                raise RuntimeError(f"worker at {at}: {status} {text}")
        if not wait_for(lambda: self.call("GET", "/ready")[1]["schedulable_workers"] == len(addresses)):
            raise RuntimeError(f"workers {addresses}: {self.call('GET', '/ready')}")

    def load(self):
        return {r["worker_id"]: r["active_requests"] for part in self.call("GET", "/loads")[1]
                for r in part["loads"] if r["active_requests"]}

    def done(self, envoy):
        tap.ok(wait_for(lambda: not self.load()), "no load is left", self.load())
        envoy.close()
        tap.same(self.ctl("check")[0], 0, "kvpickctl check finds no fault")
        tap.same(self.stop(), 0, "the node stops with exit code 0")


def replies(s, n):
    got = []
    while len(got) < n:
        r = s.reply()
        got.append(r.data if r else None)
        if not r:
            break
    return got


def exchange(envoy, *steps, keep=False):
    """Sends each message and compares what comes back: (message, names of the answers). The name of a vector stands
    for its bytes. An answer that the picker gives too early is found before the next one."""
    s = envoy.stream()
    told = []
    for out, back in steps:
        data = vec[out] if isinstance(out, str) else out
        told.append(out if isinstance(out, str) else f"{len(out)} bytes")
        want = [vec[b] if isinstance(b, str) else b for b in back]
        s.send(data)
        got = replies(s, len(want)) if want else []
        if want:
            names = ", ".join(b if isinstance(b, str) else b.hex() if len(b) < 20 else f"{len(b)} bytes" for b in back)
            if not tap.same([g.hex() if g is not None else None for g in got], [w.hex() for w in want],
                            f"{' + '.join(told)} -> {names}"):
                s.reset()
                return s
    if keep:
        return s
    immediate = any(isinstance(b, str) and b.startswith("imm_") for _, back in steps for b in back)
    if not immediate:
        tap.ok(s.silent(), "and nothing more")
        s.half_close()
    tap.ok(s.reply() is None and s.status() == grpc.StatusCode.OK, "and the stream ends with OK", s.status())
    return s


ROUTED = ["resp_req_headers_aggregated", "resp_req_body_single"]
RESPONSE = [("req_response_headers_served", ["resp_response_headers"]),
            ("req_response_body_chunk", ["resp_response_body_chunk"]),
            ("req_response_body_last", ["resp_response_body_last"]),
            ("req_response_trailers", ["resp_response_trailers"])]


def at(name, old, new):
    """A golden answer with another address of the same length."""
    if len(old) != len(new) or vec[name].count(old) != 2:
        raise ValueError(name)
    return vec[name].replace(old, new)


def whole(node, envoy):
    """Requests and responses from their first to their last message."""
    exchange(envoy, ("req_headers_post_full_duplex", []), ("req_body_single_eos", ROUTED), *RESPONSE)
    exchange(envoy, ("req_headers_post_full_duplex", []), ("req_body_chunk1", []), ("req_body_chunk2_eos", ROUTED),
             *RESPONSE[:3])
    exchange(envoy, ("req_headers_value_field", []), ("req_body_single_eos", ROUTED))
    get = headers(REQUEST_HEADERS, [(":method", "GET"), (":path", "/v1/models")])
    exchange(envoy, (get, []), ("req_body_empty_eos", ["resp_req_headers_aggregated", "resp_req_body_empty"]))
    # The answer to trailers of a request has no vector: member 5, empty, as that to a response's is member 6.
    exchange(envoy, (get, []), ("req_request_trailers_empty", ["resp_req_headers_aggregated", b"\x2a\x00"]))
    exchange(envoy, ("req_headers_get_models", ["resp_req_headers_aggregated"]), *RESPONSE)
    exchange(envoy, ("req_empty_message", []), ("req_headers_attributes", []), ("req_empty_message", []),
             ("req_unknown_fields", ROUTED), *RESPONSE)
    s = envoy.stream(vec["req_headers_observability"], vec["req_body_single_eos"])
    tap.ok(s.silent(), "req_headers_observability: nothing is answered")
    s.half_close()
    tap.ok(s.reply() is None and s.status() == grpc.StatusCode.OK, "and the stream ends with OK")
    tap.ok(wait_for(lambda: not node.load()), "nothing of these is booked any more", node.load())
    s = exchange(envoy, ("req_headers_post_full_duplex", []), ("req_body_single_eos", ROUTED), keep=True)
    tap.same(node.load(), {1: 1}, "a routed request is booked")
    exchange(envoy, ("req_headers_get_models", ["resp_req_headers_aggregated"]))
    tap.same(node.load(), {1: 1}, "one without a body is not")
    s.reset()
    many = [(f"x-dynamo-meta-k{i}", "v") for i in range(65)]
    exchange(envoy, (headers(REQUEST_HEADERS, [(":method", "POST"), (":path", "/v1/chat/completions"), *many]), []),
             ("req_body_single_eos", ["imm_431_metadata"]))


def modes(envoy):
    for bad in ("req_cfg_response_none", "req_cfg_request_streamed"):
        s = envoy.stream(vec[bad])
        want = vec.entry[bad]["expect"]
        tap.ok(s.reply() is None and s.status().value[0] == want["grpc_status"] and
               s.status().name == want["grpc_status_name"], f"{bad}: {want['grpc_status_name']}", s.status())
    exchange(envoy, ("req_cfg_flag_false", []), ("req_body_single_eos", ROUTED), *RESPONSE)
    # A buffered response is let through: a BodyResponse without a body, as resp_req_body_continue in member 4.
    let_through = b"\x22" + vec["resp_req_body_continue"][1:]
    exchange(envoy, ("req_cfg_response_buffered", []), ("req_body_single_eos", ROUTED), RESPONSE[0],
             ("req_response_body_chunk", [let_through]), ("req_response_body_last", [let_through]))
    # A buffered request: the headers go on at once, the body's answer has the routing and no body; whatever
    # follows goes on unchanged.
    s = exchange(envoy, (headers(REQUEST_HEADERS, [("x-request-id", "r1")], config=(BUFFERED, DUPLEX)),
                         [b"\x0a\x02\x0a\x00"]), keep=True)
    s.send(vec["req_body_single_eos"])
    got = s.reply()
    common, golden = one(got.data, 3, 1), one(vec["resp_req_headers_aggregated"], 1, 1)
    tap.ok(common == golden and one(got.data, 8) == one(vec["resp_req_headers_aggregated"], 8),
           "buffered: the body's answer has header mutation, clear_route_cache and metadata of "
           "resp_req_headers_aggregated", got.data.hex())
    s.send(vec["req_body_single_eos"])
    tap.same(s.reply().data.hex(), vec["resp_req_body_continue"].hex(), "buffered: more body -> resp_req_body_continue")
    s.reset()


def pieces(envoy):
    """130,000 bytes in three pieces, as request and as response."""
    names = [f"resp_req_body_chunk_{n}_of_3" for n in (1, 2, 3)]
    for whole_body in (True, False):
        s = envoy.stream(headers(REQUEST_HEADERS, [(":method", "POST"), (":path", "/v1/audio/transcriptions"),
                                                   ("content-type", "application/octet-stream")]))
        if whole_body:
            s.send(body(REQUEST_BODY, BIG_BODY, True))
        else:
            s.send(*[body(REQUEST_BODY, BIG_BODY[i:i + 9999], i + 9999 >= len(BIG_BODY))
                     for i in range(0, len(BIG_BODY), 9999)])
        got = replies(s, 4)
        tap.same(got[0].hex(), vec["resp_req_headers_aggregated"].hex(),
                 f"a body of 130000 bytes in {'one message' if whole_body else 'many'} is routed")
        for name, data in zip(names, got[1:]):
            vec.same_digest(name, data)
        tap.ok(s.silent(), "three pieces and nothing more")
        s.send(vec["req_response_headers_served"], body(RESPONSE_BODY, BIG_BODY, True))
        got = replies(s, 4)
        tap.same(got[0].hex(), vec["resp_response_headers"].hex(), "its response")
        for name, data in zip(names, got[1:]):
            tap.same(data[:1], b"\x22", "a piece of the response is member 4")
            vec.same_digest(name, b"\x1a" + data[1:])
        s.half_close()


def hints(node, envoy):
    """The subset hint leaves the named worker, also beside another one that is free."""
    v4, v6 = b"10.0.0.7:8000", b"[fd00::7]:8000"
    v4b, v6b = b"10.0.0.9:8000", b"[fd00::9]:8000"
    none = ["imm_503_no_endpoints"]
    listed, text, empty = "req_headers_subset_list", "req_headers_subset_string", "req_headers_subset_empty_list"
    exchange(envoy, (listed, []), ("req_body_single_eos", ROUTED))
    exchange(envoy, (text, []), ("req_body_single_eos", ROUTED))
    exchange(envoy, (empty, []), ("req_body_single_eos", none))
    node.have("10.0.0.5:8000", v4b.decode(), "10.0.0.6:8000")
    for _ in range(3):
        exchange(envoy, (listed, []), ("req_body_single_eos", [at(ROUTED[0], v4, v4b), ROUTED[1]]))
    exchange(envoy, (text, []), ("req_body_single_eos", none))
    node.have("10.0.0.5:8000", v6b.decode(), "10.0.0.6:8000")
    for _ in range(3):
        exchange(envoy, (text, []), ("req_body_single_eos", [at("resp_req_headers_ipv6", v6, v6b), ROUTED[1]]))
    exchange(envoy, (listed, []), ("req_body_single_eos", none))
    node.have(v6.decode())
    exchange(envoy, ("req_headers_post_full_duplex", []),
             ("req_body_single_eos", ["resp_req_headers_ipv6", ROUTED[1]]), *RESPONSE[1:])


def served(node, envoy):
    """The last address of the list answered: the booking moves there."""
    node.have("10.0.0.7:8000", "10.0.0.9:8000")
    s = envoy.stream(vec["req_headers_post_full_duplex"], vec["req_body_single_eos"])
    first = replies(s, 2)[0]
    tap.ok(first in (vec[ROUTED[0]], at(ROUTED[0], b"10.0.0.7:8000", b"10.0.0.9:8000")), "one of two is chosen")
    s.send(vec["req_response_headers_served_list"])
    tap.same(replies(s, 1)[0].hex(), vec["resp_response_headers"].hex(), "req_response_headers_served_list is answered")
    tap.ok(wait_for(lambda: node.load() == {2: 1}), "and the booking is where the request was served", node.load())
    s.reset()


def health(node, ready):
    """ready: what readiness is now."""
    e = Envoy(f"127.0.0.1:{node.health_port}")
    wanted = {"health_check_inference_extension": ready, "health_check_readiness": ready,
              "health_check_liveness": "health_serving", "health_check_extproc": None, "health_check_overall": None}
    for name, want in wanted.items():
        if want is None and ready != "health_serving":
            continue
        want = want or "health_serving"

        def ask(name=name):
            return e.health_method(vec[name], timeout=WAIT)
        wait_for(lambda ask=ask, want=want: ask() == vec[want])
        tap.same(ask().hex(), vec[want].hex(), f"{name} -> {want}")
    watch = e.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\x06nobody", timeout=WAIT)
    tap.same(next(iter(watch)).hex(), vec["health_service_unknown"].hex(), "a watched unknown service")
    watch.cancel()
    e.close()


def tokenizer(renderer):
    """Answers to what the tokenizer service says; one request at a time."""
    limit = 1500 * SLOW
    with Epp(renderer, DYN_EPP_TOKENIZATION_TIMEOUT_MS=str(limit), DYN_EPP_MAX_INFLIGHT_REQUESTS="1") as node:
        node.have("10.0.0.7:8000")
        e = node.envoy()
        for status, name in ((400, "imm_400_tokenizer_rejected"), (422, "imm_400_tokenizer_rejected"),
                             (500, "imm_502_tokenizer_error"), (404, "imm_502_tokenizer_error"),
                             (503, "imm_503_tokenizer_unavailable"), (429, "imm_503_tokenizer_unavailable")):
            renderer.status = status
            exchange(e, ("req_headers_post_full_duplex", []), ("req_body_single_eos", [name]))
            renderer.status = 200
            exchange(e, ("req_headers_post_full_duplex", []), ("req_body_single_eos", ROUTED))
        renderer.status, before = 0, renderer.asked
        slow = e.stream(vec["req_headers_post_full_duplex"], vec["req_body_single_eos"])
        tap.ok(wait_for(lambda: renderer.asked > before), "a call to the tokenizer service hangs")
        exchange(e, ("req_headers_post_full_duplex", []), ("req_body_single_eos", ["imm_503_overloaded"]))
        tap.same(slow.reply().data.hex(), vec["imm_504_tokenizer_timeout"].hex(), "-> imm_504_tokenizer_timeout")
        tap.ok(slow.reply() is None and slow.status() == grpc.StatusCode.OK, "and the stream ends with OK")
        renderer.status = 200
        renderer.go.set()
        node.done(e)


def limits(renderer, limit, retry_after, name):
    """A class of which `limit` requests may wait."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        f.write(POLICY.replace("LIMIT", str(limit)))
        f.flush()
        with Epp(renderer, DYN_ROUTER_POLICY_CONFIG=f.name, DYN_EPP_SHED_RETRY_AFTER_SECS=str(retry_after)) as node:
            node.have("10.0.0.7:8000", max_num_batched_tokens=512)
            e = node.envoy()
            first = exchange(e, ("req_headers_post_full_duplex", []), ("req_body_single_eos", ROUTED), keep=True)
            waiting = [e.stream(vec["req_headers_post_full_duplex"], vec["req_body_single_eos"]) for _ in range(limit)]
            tap.ok(wait_for(lambda: sum(p["pending_count"] for p in node.call("GET", "/loads")[1]) == limit),
                   f"{limit} wait")
            exchange(e, ("req_headers_post_full_duplex", []), ("req_body_single_eos", [name]))
            reason = "queue_rejected" if limit else "overloaded"
            series = f'dynamo_epp_router_rejections_total{{model="{MODEL}",reason="{reason}"}} 1\n'
            tap.ok(wait_for(lambda: series in node.call("GET", "/metrics")[1]), f"counted as {reason}",
                   [x for x in node.call("GET", "/metrics")[1].splitlines() if "router_rejections" in x])
            for out in RESPONSE[:2]:
                first.send(vec[out[0]])
            tap.same(replies(first, 2), [vec[out[1][0]] for out in RESPONSE[:2]], "the first one's prefill ends")
            for s in waiting:
                tap.same([x.hex() for x in replies(s, 2)], [vec[x].hex() for x in ROUTED], "who waited is routed")
                s.reset()
            first.reset()
            node.done(e)


def main():
    renderer = Renderer()
    frames = [n for n, v in vec.entry.items() if "grpc_frame_hex" in v and bytes.fromhex(v["grpc_frame_hex"]) !=
              b"\0" + len(bytes.fromhex(v["hex"])).to_bytes(4, "big") + bytes.fromhex(v["hex"])]
    tap.same(frames, [], "a frame is the message behind 0 and its length")
    with Epp(renderer, KVPICK_LOG_REQUESTS="1", DYN_ROUTER_MIN_INITIAL_WORKERS="1") as node:
        health(node, "health_not_serving")
        node.have("10.0.0.7:8000")
        health(node, "health_serving")
        envoy = node.envoy()
        whole(node, envoy)
        modes(envoy)
        pieces(envoy)
        hints(node, envoy)
        served(node, envoy)
        tap.ok(wait_for(lambda: "request_id=r1" in node.log_text()), "req_headers_value_field: the id of the request")
        node.done(envoy)
    tokenizer(renderer)
    limits(renderer, 0, 1, "imm_429_shed_retry_after_1")
    limits(renderer, 1, 0, "imm_429_queue_rejected_no_hint")
    names = set(vec.entry)
    tap.same(sorted(names - vec.used - set(NOT_DRIVEN)), [], "every message of the file is driven or has its reason")
    tap.same(sorted(vec.used & set(NOT_DRIVEN) | set(NOT_DRIVEN) - names), [], "no reason is out of date")
    for name, why in NOT_DRIVEN.items():
        print(f"# not driven: {name}: {why}")
    return tap.done()


sys.exit(main())
