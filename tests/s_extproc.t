#!/usr/bin/env python3
"""The Endpoint Picker over a real node: two kvpick-extproc processes, engines that publish KV events, a renderer,
and a client that plays Envoy. Picks follow the cached prefix; load is booked and returns to zero whatever ends a
stream: its response, a reset at any moment, the death of the process."""
import json
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import Engine, stored, tokens
from envoy import (BUFFERED, DUPLEX, NONE, REQUEST_BODY, REQUEST_HEADERS, REQUEST_TRAILERS, RESPONSE_BODY,
                   RESPONSE_HEADERS, RESPONSE_TRAILERS, SERVED, STREAMED, SUBSET, Envoy, body, grpc, headers,
                   metadata, trailers)
from epp import CHAT, COMPLETIONS, FULL, MODEL, SSE, Epp, Renderer, chat, prompt, respond, routed, schedulable
from node import BUILD, Tap, free_port, wait_for, worker

tap = Tap()
HERE = os.path.dirname(os.path.abspath(__file__))


def idle(node, name):
    tap.ok(wait_for(lambda: not node.load()), f"{name}: no load is left", node.load())


def cached_prefix(node, envoy):
    for first, want in ((1, "10.0.0.1:8000"), (2, "10.0.0.2:8000")):
        for path, data in ((COMPLETIONS, prompt(first, 8)), (CHAT, chat(first, 8))):
            s, head, pieces = routed(envoy, path, data)
            what = path[1][1]
            tap.same((head.destination, head.metadata), (want, want), f"{what}: prompt {first} goes to its cache")
            tap.same(head.clear_route_cache, 1, f"{what}: the route is chosen anew")
            tap.same(b"".join(p.piece for p in pieces), data, f"{what}: the body is unchanged")
            tap.same(node.load(), {first: (0, 8, 1)}, f"{what}: all 8 blocks are cached, one request is booked")
            respond(s)
            idle(node, f"{what} {first}")
            s.half_close()
            tap.ok(s.reply() is None and s.status() == grpc.StatusCode.OK, f"{what}: the stream ends with OK")


def prefill_and_end(node, envoy):
    s, _, _ = routed(envoy, COMPLETIONS, prompt(7, 5))
    (_, blocks, _), = node.load().values()
    tap.same(node.load().popitem()[1], (20, 5, 1), "an uncached prompt counts its tokens and blocks")
    s.send(headers(RESPONSE_HEADERS, SSE))
    s.reply()
    tap.same(node.load().popitem()[1][0], 20, "response headers do not end prefill")
    s.send(body(RESPONSE_BODY, b"", False))
    s.reply()
    tap.same(node.load().popitem()[1][0], 20, "an empty body message does not either")
    s.send(body(RESPONSE_BODY, b"data: x\n\n", False))
    s.reply()
    tap.ok(wait_for(lambda: node.load().popitem()[1] == (0, blocks, 1)), "the first bytes do", node.load())
    s.send(trailers(RESPONSE_TRAILERS))
    tap.same(s.reply().kind, "response_trailers", "trailers are answered")
    idle(node, "trailers")
    s.reset()
    before = node.counter("booking_prefilled_total")
    # R15: events cut anywhere; the end is the end of the stream, not the text [DONE].
    text = b'data: {"x":1}\n\ndata: [DONE]\n\n'
    for cut in range(1, len(text), 3):
        s, _, _ = routed(envoy, COMPLETIONS, prompt(8, 2))
        got = respond(s, (text[:cut], text[cut:]))
        tap.ok(b"".join(g.piece for g in got[1:]) == text and got[-1].end, f"R15: a response cut at {cut}")
        s.half_close()
    idle(node, "R15")
    tap.same(node.counter("booking_prefilled_total") - before, len(range(1, len(text), 3)),
             "R15: prefill ends once a stream")


def resets(node, envoy):
    """The proxy leaves at every stage."""
    data = prompt(9, 6)
    stages = [
        [], [headers(REQUEST_HEADERS, COMPLETIONS, config=FULL)],
        [headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, data[:9])],
        [headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, data, True)],
        [headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, data, True),
         headers(RESPONSE_HEADERS, SSE)],
        [headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, data, True),
         headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n")],
        [headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, data, True),
         headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n", True)]]
    answers = [0, 0, 0, 2, 3, 4, 5 - 1]
    for how in ("reset", "half close"):
        for n, messages in enumerate(stages):
            s = envoy.stream(*messages)
            for _ in range(answers[n]):
                s.reply()
            if n in (3, 4, 5):
                tap.same(sum(x[2] for x in node.load().values()), 1, f"{how} at stage {n}: booked before")
            if how == "reset":
                s.reset()
            else:
                s.half_close()
                tap.ok(s.reply() is None, f"{how} at stage {n}: the stream ends")
            idle(node, f"{how} at stage {n}")


def modes(node, envoy):
    s = envoy.stream(headers(REQUEST_HEADERS, COMPLETIONS, config=(BUFFERED, STREAMED)))
    tap.same((s.reply().kind, s.silent()), ("request_headers", True), "buffered: headers are answered at once")
    s.send(body(REQUEST_BODY, prompt(1, 4), True))
    r = s.reply()
    tap.same((r.kind, r.destination, r.metadata, r.piece), ("request_body", "10.0.0.1:8000", "10.0.0.1:8000", None),
             "buffered: the body's answer routes")
    tap.ok([g.piece for g in respond(s)] == [None] * 3, "streamed response: one answer without a body each")
    idle(node, "buffered")
    s.half_close()
    for config in ((DUPLEX, NONE), (STREAMED, DUPLEX), (NONE, DUPLEX), (3, DUPLEX), (DUPLEX, 3)):
        s = envoy.stream(headers(REQUEST_HEADERS, COMPLETIONS, config=config))
        tap.ok(s.reply() is None and s.status() == grpc.StatusCode.FAILED_PRECONDITION and
               "response_body_mode" in s.details(), f"modes {config} are refused")
    s, head, _ = routed(envoy, COMPLETIONS, prompt(2, 4), config=None)
    tap.same(head.destination, "10.0.0.2:8000", "no configuration: full duplex is assumed")
    s.reset()
    s = envoy.stream(headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, prompt(1, 4)))
    tap.ok(s.silent(), "nothing is answered before the body has ended")
    s.send(trailers(REQUEST_TRAILERS))
    got = [s.reply() for _ in range(3)]
    tap.same([(g.kind, g.end) for g in got], [("request_headers", False), ("request_body", False),
                                             ("request_trailers", False)], "trailers end the body")
    s.reset()
    # R03: a request without a body, in both forms.
    get = [(":method", "GET"), (":path", "/v1/models")]
    a = envoy.stream(headers(REQUEST_HEADERS, get, True, FULL))
    b = envoy.stream(headers(REQUEST_HEADERS, get, False, FULL), body(REQUEST_BODY, b"", True))
    first, second = a.reply(), b.reply()
    tap.ok(first.destination and second.destination and b.reply().end, "R03: both forms go to some worker")
    tap.same(node.load(), {}, "R03: nothing is booked")
    a.reset()
    b.reset()
    # R02: the body once more behind its end.
    s, _, _ = routed(envoy, COMPLETIONS, prompt(1, 4))
    s.send(body(REQUEST_BODY, prompt(1, 4), True), body(REQUEST_BODY, b"{garbage", True))
    tap.ok(s.silent(), "R02: a second end of the body is not answered")
    tap.same(node.load(), {1: (0, 4, 1)}, "R02: and books nothing")
    respond(s)
    idle(node, "R02")
    s.half_close()


def refusals(node, envoy):
    for hint, want in ((["10.0.0.2"], "10.0.0.2:8000"), ("10.0.0.9:1, 10.0.0.2:8000", "10.0.0.2:8000"),
                       (["10.0.0.1:8000"], "10.0.0.1:8000")):
        s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 4), more=metadata(SUBSET, hint))
        tap.same(head.destination, want, f"subset hint {hint}")
        s.reset()
    idle(node, "subset hint")
    for hint in ([], "", " , ", ["10.0.0.1:8001"], ["10.0.0.77"]):
        s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 4), more=metadata(SUBSET, hint))
        tap.same((head.kind, head.status, head.text), ("immediate", 503, "no endpoints available"),
                 f"subset hint {hint!r} leaves nobody")
        tap.ok(s.reply() is None and s.status() == grpc.StatusCode.OK, "and the stream ends with OK")
    for path, data, status in ((CHAT, b"{", 400), (CHAT, b"x", 400), (CHAT, b"", 400), (COMPLETIONS, b"[1]", 400)):
        _, head, _ = routed(envoy, path, data)
        tap.same((head.kind, head.status), ("immediate", status), f"{path[1][1]} with {data!r}")
    many = [(f"x-dynamo-meta-k{i}", "v") for i in range(65)]
    _, head, _ = routed(envoy, COMPLETIONS + many, prompt(1, 4))
    tap.same((head.status, head.text), (431, "metadata headers exceed the limit of 64 entries"), "65 headers")
    # R10: what the client may not say.
    bad = [("X-Prefiller-Host-Port", "127.0.0.1:9"), ("x-prefiller-url", "http://127.0.0.1:9"),
           ("x-gateway-destination-endpoint", "127.0.0.1:9")]
    s, head, _ = routed(envoy, COMPLETIONS + bad, prompt(1, 4))
    tap.ok(head.destination == "10.0.0.1:8000" and {"x-prefiller-host-port", "x-prefiller-url"} <= set(head.removed)
           and "x-prefiller-host-port" not in head.set, "R10: headers of the client are removed or overwritten")
    s.reset()
    idle(node, "refusals")


def large(node, envoy):
    """R01: bodies of many sizes come back in pieces, byte for byte."""
    for size in (61999, 62000, 62001, 65537, 130000, 3 << 20):
        text = "a" * (size - len(chat(1, 0)) - 1)
        data = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" + text}]}).encode()
        s = envoy.stream(headers(REQUEST_HEADERS, CHAT, config=FULL))
        for at in range(0, len(data), 65536):
            s.send(body(REQUEST_BODY, data[at:at + 65536], at + 65536 >= len(data)))
        head, got = s.reply(), []
        while not (got and got[-1].end):
            got.append(s.reply())
        tap.ok(head.destination and b"".join(g.piece for g in got) == data and
               max(len(g.piece) for g in got) <= 62000 and [g.end for g in got].count(True) == 1,
               f"R01: {len(data)} bytes in {len(got)} pieces")
        s.reset()
    idle(node, "R01")


def served_elsewhere(node, envoy):
    s, head, _ = routed(envoy, COMPLETIONS, prompt(1, 8))
    tap.same((head.destination, node.load()), ("10.0.0.1:8000", {1: (0, 8, 1)}), "booked on the chosen worker")
    s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, "10.0.0.1:8000,10.0.0.2:8000")))
    s.reply()
    tap.ok(wait_for(lambda: set(node.load()) == {2}), "the booking moves to the worker that served", node.load())
    tap.same(node.load()[2][1:], (8, 1), "with its blocks")
    s.send(body(RESPONSE_BODY, b"x", True))
    s.reply()
    idle(node, "served elsewhere")
    tap.same((node.counter("booking_mismatch_total"), node.counter("booking_moved_total")), (1, 1), "counted")
    s.half_close()
    s, _, _ = routed(envoy, COMPLETIONS, prompt(1, 8))
    s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, "10.9.9.9:1")))
    s.reply()
    tap.same(node.load(), {1: (0, 8, 1)}, "an unknown endpoint moves nothing")
    s.reset()
    idle(node, "served by nobody known")


def exchange(node, envoy):
    """Golden bytes, both ways."""
    with open(os.path.join(HERE, "vectors", "ext_proc.json"), encoding="utf-8") as f:
        vec = {v["name"]: bytes.fromhex(v["hex"]) for v in json.load(f)["vectors"] if "hex" in v}
    node.call("POST", "/workers", worker(7, NODE_ENGINES[2].at, model_name=MODEL))
    wait_for(lambda: schedulable(node) == 3)
    only = metadata(SUBSET, ["10.0.0.7:8000"])
    for steps in (
            [("req_headers_post_full_duplex", []), ("req_body_single_eos",
                                                    ["resp_req_headers_aggregated", "resp_req_body_single"]),
             ("req_response_headers_served", ["resp_response_headers"]),
             ("req_response_body_chunk", ["resp_response_body_chunk"]),
             ("req_response_body_last", ["resp_response_body_last"]),
             ("req_response_trailers", ["resp_response_trailers"])],
            [("req_headers_post_full_duplex", []), ("req_body_chunk1", []),
             ("req_body_chunk2_eos", ["resp_req_headers_aggregated", "resp_req_body_single"])],
            [("req_headers_get_models", ["resp_req_headers_aggregated"])],
            [("req_headers_subset_empty_list", []), ("req_body_single_eos", ["imm_503_no_endpoints"])],
            [("req_empty_message", []), ("req_headers_attributes", []),
             ("req_unknown_fields", ["resp_req_headers_aggregated", "resp_req_body_single"])]):
        s = envoy.stream()
        for n, (out, back) in enumerate(steps):
            hint = b"" if "subset" in steps[0][0] or n > 1 else only
            s.send(vec[out] + hint)
            got = [s.reply().data for _ in back]
            tap.same([g.hex() for g in got], [vec[b].hex() for b in back], f"golden bytes: {out} -> {back}")
        s.reset()
    for bad in ("req_cfg_response_none", "req_cfg_request_streamed"):
        s = envoy.stream(vec[bad])
        tap.ok(s.reply() is None and s.status() == grpc.StatusCode.FAILED_PRECONDITION, f"golden bytes: {bad}")
    s = envoy.stream(vec["req_headers_observability"], vec["req_body_single_eos"])
    tap.ok(s.silent(), "observability mode is not answered")
    s.half_close()
    tap.ok(s.reply() is None and s.status() == grpc.StatusCode.OK, "and ends with OK")
    idle(node, "golden bytes")
    node.call("DELETE", "/workers/7")
    h = Envoy(f"127.0.0.1:{node.health_port}")
    for service, want in (("inference-extension", b"\x08\x01"), ("readiness", b"\x08\x01"),
                          ("liveness", b"\x08\x01"), ("", b"\x08\x01"),
                          ("envoy.service.ext_proc.v3.ExternalProcessor", b"\x08\x01"),
                          ("nobody", grpc.StatusCode.NOT_FOUND)):
        tap.same(h.health(service), want, f"health of {service!r}")
    tap.same(envoy.health("inference-extension"), b"\x08\x01", "health is answered on the ext_proc port, too")
    h.close()


def metrics(node, envoy):
    """One sample a stream; usage of the response; an index that never matches."""
    def value(series):
        return sum(float(line.rsplit(" ", 1)[1]) for line in node.call("GET", "/metrics")[1].splitlines()
                   if line.startswith(series + " "))
    model = f'{{model="{MODEL}"'
    ended = f'dynamo_epp_requests_total{model},outcome="%s"}}'
    before = {o: value(ended % o) for o in ("response_eos", "upstream_http_error", "incomplete", "early_reject")}
    started = value(f'dynamo_component_router_requests_started_total{model},inference_pool="default"}}')
    labels = f'{model},inference_pool="default"}}'

    def output():
        return (value(f"dynamo_component_router_output_sequence_tokens_count{labels}"),
                value(f"dynamo_component_router_output_sequence_tokens_sum{labels}"),
                value(f"dynamo_epp_reported_cached_tokens_total{model}}}"))
    told = output()
    usage = [b'{"usage":{"prompt_tokens":4,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}',
             b'{"usage":{"completion_tokens":0}}', b'{}', b'{"usage":{"prompt_tokens":4}}']
    for u in usage:
        s, _, _ = routed(envoy, COMPLETIONS, prompt(1, 1))
        respond(s, (b"data: " + u[:20], u[20:] + b"\n\ndata: [DONE]\n\n"))
        s.half_close()
        s.reply()
    s, _, _ = routed(envoy, COMPLETIONS, prompt(1, 1))
    respond(s, status="500")
    s.half_close()
    s.reply()
    s, _, _ = routed(envoy, COMPLETIONS, prompt(1, 1))
    s.reset()
    routed(envoy, CHAT, b"{")[0].reply()
    want = {"response_eos": 4, "upstream_http_error": 1, "incomplete": 1, "early_reject": 1}
    tap.ok(wait_for(lambda: {o: value(ended % o) - before[o] for o in before} == want), "one sample a stream",
           {o: value(ended % o) - before[o] for o in before})
    tap.same(value(f"dynamo_component_router_requests_started_total{labels}") - started, 6, "requests started")
    tap.same([a - b for a, b in zip(output(), told)], [2, 5, 4],
             "output tokens: 0 counts, absence does not; cached tokens")
    tap.same(value(f"dynamo_epp_index_mismatch{model}}}"), 0, "predictions come true")
    first = iter(range(100, 100000))

    def never_matching():
        for _ in range(100):
            routed(envoy, COMPLETIONS, prompt(next(first), 2))[0].reset()
        return value(f"dynamo_epp_index_mismatch{model}}}") == 1
    tap.ok(wait_for(never_matching, 40), "R33: prompts that never match an index with blocks")
    tap.ok(wait_for(lambda: node.log_text().count(" index.unmatched ") == 1), "R33: one warning")
    parts = {p: node.counter(f"timed_{p}_total") for p in ("streams", "json_seconds", "hash_seconds",
                                                           "select_seconds", "book_seconds")}
    tap.ok(all(v > 0 for v in parts.values()) and parts["streams"] < node.counter("stream_opened_total"),
           "processor time of some streams by part", parts)
    idle(node, "metrics")


def played(node, *args):
    """The C program that plays Envoy; its figures."""
    done = subprocess.run([f"{BUILD}/tests/helpers/h_envoy", f"127.0.0.1:{node.epp_port}", *map(str, args)],
                          capture_output=True, text=True, timeout=120, check=False)
    got = dict(x.split("=", 1) for x in done.stdout.split()[:9] if "=" in x)
    got["code"], got["all"] = done.returncode, done.stdout + done.stderr
    return got


def many(node, _envoy):
    """Hundreds of streams at once that end in every way, judged by an independent reading of the filter's rules."""
    for args in ((600, 64, 4, "tokens", 200, "mix"), (300, 64, 4, "chat", 3000, "mix"),
                 (300, 32, 4, "tokens", 100, "mix", BUFFERED), (60, 8, 2, "chat", 220000, "whole")):
        got = played(node, *args)
        tap.ok(got["code"] == 0 and got["streams"] == str(args[0]) and got["refused"] == "0" and got["failed"] == "0",
               f"{args}: no rule of the filter is broken", got["all"])
        idle(node, f"{args}")


def killed_under_load(node, _envoy):
    """200 streams are open when a process dies; the others serve on."""
    load = subprocess.Popen([f"{BUILD}/tests/helpers/h_envoy", f"127.0.0.1:{node.epp_port}", "6000", "200", "16",
                             "tokens", "300", "mix"], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: sum(x[2] for x in node.load().values()) > 20)
    for _ in range(3):
        pids = wait_for(lambda: len(node.children().get("kvpick-extproc", [])) == 2 and
                        node.children()["kvpick-extproc"])
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: pids[0] not in node.children().get("kvpick-extproc", []))
    out = load.communicate(timeout=120)[0]
    print("# " + out.strip())
    tap.ok(" streams=6000 " in " " + out and "nothing came" not in out, "three kills: every stream ends", out)
    idle(node, "killed under load")
    tap.ok(wait_for(lambda: node.log_text().count(" child.swept ") >= 3), "and is swept", node.log_text()[-2000:])


def kill(node, renderer):
    """A process dies with streams open at every stage."""
    envoys = [node.envoy() for _ in range(12)]
    streams = [routed(e, COMPLETIONS, prompt(20 + i, 3))[0] for i, e in enumerate(envoys)]
    tap.same(sum(x[2] for x in node.load().values()), 12, "12 streams are booked")
    renderer.gate.clear()
    waiting = [e.stream(headers(REQUEST_HEADERS, CHAT, config=FULL), body(REQUEST_BODY, chat(5, 2), True))
               for e in envoys]
    tap.ok(wait_for(lambda: renderer.waiting == 12), "12 more wait for the renderer", renderer.waiting)
    pids = node.children()["kvpick-extproc"]
    os.kill(pids[0], signal.SIGKILL)
    start = time.monotonic()
    wait_for(lambda: sum(x[2] for x in node.load().values()) < 12)
    print(f"# bookings freed {time.monotonic() - start:.3f} s after the kill")
    # Each connection has one booked stream and one that waits.
    tap.ok(wait_for(lambda: 0 < sum(x[2] for x in node.load().values()) ==
                    sum(s.call.is_active() for s in waiting) < 12),
           "the streams of one process break and its bookings are freed; the other process keeps its own", node.load())
    dead = [i for i, s in enumerate(waiting) if not s.call.is_active()]
    renderer.gate.set()
    alive = [s for i, s in enumerate(waiting) if i not in dead]
    tap.ok(all(s.reply().destination for s in alive), "streams of the other process get their answers")
    for s in alive + [s for i, s in enumerate(streams) if i not in dead]:
        s.reset()
    idle(node, "kill")
    tap.ok(wait_for(lambda: len(node.children().get("kvpick-extproc", [])) == 2), "the process is started again")
    for e in envoys:
        def answers(e=e):
            s, head, _ = routed(e, COMPLETIONS, prompt(1, 4))
            s.reset()
            return head and head.destination == "10.0.0.1:8000"
        tap.ok(wait_for(answers), "the same clients are served on")
        e.close()
    idle(node, "after the kill")


def ceiling(renderer):
    """Two requests at a time over both processes; a dead process's share comes back."""
    with Epp(renderer, env={"DYN_EPP_MAX_INFLIGHT_REQUESTS": "2"}) as node:
        one_worker(node)
        envoys = [node.envoy() for _ in range(8)]
        wait_for(lambda: routed(envoys[0], COMPLETIONS, prompt(1, 1))[1].destination)
        renderer.gate.clear()
        first = [e.stream(headers(REQUEST_HEADERS, CHAT, config=FULL), body(REQUEST_BODY, chat(5, 2), True))
                 for e in envoys[:2]]
        tap.ok(wait_for(lambda: renderer.waiting == 2), "two requests are under way", renderer.waiting)
        for e in envoys[2:]:
            _, head, _ = routed(e, COMPLETIONS, prompt(1, 1))
            tap.same((head.status, head.text), (503, "endpoint picker overloaded"), "one more is refused at once")
        s = envoys[0].stream(headers(REQUEST_HEADERS, [(":method", "GET"), (":path", "/x")], True, FULL))
        tap.ok(s.reply().destination, "a request without a body needs no place")
        first[0].reset()
        tap.ok(wait_for(lambda: routed(envoys[5], COMPLETIONS, prompt(1, 1))[1].destination),
               "a request that leaves gives its place back")
        for pid in node.children()["kvpick-extproc"]:
            os.kill(pid, signal.SIGKILL)
        renderer.gate.set()

        def again():
            e = node.envoy()
            try:
                _, head, _ = routed(e, COMPLETIONS, prompt(1, 1))
                return head and head.destination
            finally:
                e.close()
        tap.ok(wait_for(again), "both processes are killed: places are free again")
        for e in envoys:
            e.close()
        idle(node, "ceiling")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
        tap.same(node.stop(), 0, "the node stops with exit code 0")


def one_worker(node, **extra):
    node.call("POST", "/workers", worker(1, NODE_ENGINES[3].at, model_name=MODEL, **extra))
    tap.ok(wait_for(lambda: schedulable(node) == 1), "a worker")


def start(envoy, data):
    return envoy.stream(headers(REQUEST_HEADERS, COMPLETIONS, config=FULL), body(REQUEST_BODY, data, True))


def waiting_turns(renderer):
    """With a queue: the second request waits for the first one's prefill; who leaves is out; there is a limit."""
    env = {"DYN_ROUTER_QUEUE_THRESHOLD": "1.0", "KVPICK_EPP_SELECTION_DEADLINE_MS": str(3000),
           "DYN_EPP_SHED_RETRY_AFTER_SECS": "7", "DYN_ROUTER_TRACK_OUTPUT_BLOCKS": "true"}
    with Epp(renderer, env=env) as node:
        one_worker(node, max_num_batched_tokens=16)
        envoys = [node.envoy() for _ in range(6)]

        def pending():
            return sum(p["pending_count"] for p in node.call("GET", "/loads")[1])
        first, head, _ = routed(envoys[0], COMPLETIONS, prompt(30, 5))
        tap.ok(head.destination, "the first request is routed")
        others = [start(e, prompt(31 + i, 5)) for i, e in enumerate(envoys[1:])]
        tap.ok(wait_for(lambda: pending() == 5), "five others wait", pending())
        others[0].reset()
        others[1].half_close()
        tap.ok(wait_for(lambda: pending() == 3), "two leave and are out of the queue", pending())
        tap.same(sum(x[2] for x in node.load().values()), 1, "nothing is booked for them")
        first.send(headers(RESPONSE_HEADERS, SSE), body(RESPONSE_BODY, b"data: 1\n\n"))
        answered = wait_for(lambda: [s for s in others[2:] if not s.got.empty()])
        tap.same(len(answered), 1, "the end of the first one's prefill lets one in, whichever process it is at")
        tap.ok(answered[0].reply().destination, "with a route")
        late = [s for s in others[2:] if s is not answered[0]]
        got = [s.reply() for s in late]
        tap.same([(g.status, g.text, g.set) for g in got],
                 [(429, "no worker became free in time", {"retry-after": "7"})] * 2, "the others run out of time")
        tap.same(pending(), 0, "and are out of the queue")
        # One block of output each four events.
        blocks = node.load()[1][1]
        first.send(*[body(RESPONSE_BODY, b"data: 1\n\n") for _ in range(7)])
        tap.ok(wait_for(lambda: node.load()[1][1] == blocks + 2), "output blocks are counted", node.load())
        first.send(body(RESPONSE_BODY, b"data: [DONE]\n\n", True))
        answered[0].reset()
        idle(node, "queue")
        # A process that dies takes what waits in it along.
        first = routed(envoys[0], COMPLETIONS, prompt(40, 5))[0]
        others = [start(e, prompt(41 + i, 5)) for i, e in enumerate(envoys[1:])]
        wait_for(lambda: pending() == 5)
        for pid in node.children()["kvpick-extproc"]:
            os.kill(pid, signal.SIGKILL)
        tap.ok(wait_for(lambda: pending() == 0), "killed: nothing waits any more", pending())
        idle(node, "killed with a queue")
        for e in envoys:
            e.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def unix_and_drain(renderer):
    """A socket for each process; SIGTERM lets streams end."""
    path = os.path.join(renderer.dir.name, "epp")
    with Epp(renderer, env={"KVPICK_EPP_LISTEN": f"unix:{path},127.0.0.1:{free_port()}"}) as node:
        one_worker(node)
        streams = []
        for n in (0, 1):
            e = Envoy(f"unix:{path}.{n}")
            s, head, _ = routed(e, COMPLETIONS, prompt(50 + n, 3))
            tap.ok(head and head.destination, f"process {n} answers at its own path")
            streams.append((e, s))
        pids = node.children()["kvpick-extproc"]
        node.proc.send_signal(signal.SIGTERM)

        def refused():
            again = Envoy(f"unix:{path}.0")
            s = start(again, prompt(1, 1))
            answer = s.reply()
            s.reset()
            again.close()
            return answer is None
        tap.ok(wait_for(refused), "after SIGTERM no new stream is served")
        tap.ok(len(pids) == 2 and all(os.path.exists(f"/proc/{p}") for p in pids), "open streams keep the processes")
        tap.ok(all(respond(s)[-1].end for _, s in streams), "and are served to their end")
        for _, s in streams:
            s.half_close()
        tap.same(wait_for(lambda: node.proc.poll() is not None) and node.proc.returncode, 0, "then the node ends")
        for x, _ in streams:
            x.close()


def ranks_and_sessions(renderer):
    """The rank that is booked is the rank that is told; a session's first requests all land together."""
    for routing in ("header", "port"):
        env = {"KVPICK_EPP_DP_ROUTING": routing, "KVPICK_EPP_DATA_PARALLEL_SIZE": "2",
               "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": "60", "DYN_ROUTER_USE_KV_EVENTS": "false"}
        with Epp(renderer, env=env) as node:
            for i in (1, 2):
                node.call("POST", "/workers", worker(i, model_name=MODEL, data_parallel_size=2))
            tap.ok(wait_for(lambda: schedulable(node) == 2), f"{routing}: two workers of two ranks")
            envoys = [node.envoy() for _ in range(8)]
            seen = set()
            for n in range(8):
                client = [("X-Data-Parallel-Rank", "77")]
                s, head, _ = routed(envoys[0], COMPLETIONS + client, prompt(60 + n, 4))
                (w, rank), = [(r["worker_id"], r["dp_rank"]) for part in node.call("GET", "/loads")[1]
                              for r in part["loads"] if r["active_requests"]]
                want = (f"10.0.0.{w}:8000", str(rank)) if routing == "header" else (f"10.0.0.{w}:{8000 + rank}", None)
                told = (head.destination, head.set.get("x-data-parallel-rank"))
                removed = "x-data-parallel-rank" in head.removed
                tap.ok(told == want and removed == (routing == "port"), f"{routing}: the booked rank is told",
                       (told, want))
                seen.add((w, rank))
                if routing == "port" and n == 0:
                    other = f"10.0.0.{w}:{8001 - rank}"
                    s.send(headers(RESPONSE_HEADERS, SSE, more=metadata(SERVED, other)))
                    s.reply()
                    tap.ok(wait_for(lambda: [r["dp_rank"] for part in node.call("GET", "/loads")[1]
                                             for r in part["loads"] if r["active_requests"]] == [1 - rank]),
                           "port: a response of the worker's other rank moves the booking there")
                respond(s)
                s.half_close()
                s.reply()
            for turn in range(3):
                session = [("x-session-id", f"s{turn}")]
                many_at_once = [e.stream(headers(REQUEST_HEADERS, COMPLETIONS + session, config=FULL),
                                         body(REQUEST_BODY, prompt(70 + 10 * turn + n, 4), True))
                                for n, e in enumerate(envoys)]
                got = {(h.destination, h.set.get("x-data-parallel-rank")) for h in (s.reply() for s in many_at_once)}
                tap.same(len(got), 1, f"{routing}: eight first requests of a session over both processes land together")
                for s in many_at_once:
                    s.reset()
            idle(node, routing)
            for e in envoys:
                e.close()
            tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")


def without_tokenizer(renderer):
    """Text blocks: the index learns from the bookings themselves."""
    env = {"DYN_EPP_TOKENIZER_PROTOCOL": "text-blocks", "DYN_EPP_TOKENIZER_SERVICE_URL": "",
           "DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_MIN_INITIAL_WORKERS": "3"}
    with Epp(renderer, env=env) as node:
        health = Envoy(f"127.0.0.1:{node.health_port}")
        tap.same((health.health("readiness"), health.health("liveness")), (b"\x08\x02", b"\x08\x01"),
                 "not ready before three workers were there")
        for i in (1, 2, 3):
            node.call("POST", "/workers", worker(i, model_name=MODEL))
        tap.ok(wait_for(lambda: schedulable(node) == 3), "three workers without events")
        tap.ok(wait_for(lambda: health.health("readiness") == b"\x08\x01"), "then ready")
        health.close()
        envoy = node.envoy()
        home = {}
        for turn in range(3):
            streams = []
            for n in range(6):
                text = f"conversation {n}: " + f"word{n} " * 200 + "and more " * turn
                data = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode()
                s, head, _ = routed(envoy, CHAT, data)
                home.setdefault(n, set()).add(head.destination)
                streams.append(s)
            for s in streams:
                respond(s)
                s.half_close()
                s.reply()
            idle(node, f"turn {turn}")
        tap.ok(all(len(h) == 1 for h in home.values()), "text blocks: a conversation stays where it began", home)
        tap.ok(len(set.union(*home.values())) > 1, "and conversations spread", home)
        envoy.close()


def trusting(node):
    """An Envoy that trusts the generated certificate; None if the server shows another one."""
    with open(os.path.join(node.dir.name, "default.crt"), "rb") as f:
        e = Envoy(f"localhost:{node.epp_port}", grpc.ssl_channel_credentials(f.read()))
    try:
        grpc.channel_ready_future(e.channel).result(2)
        return e
    except grpc.FutureTimeoutError:
        e.close()
        return None


def tls(renderer):
    env = {"DYN_SECURE_SERVING": "true", "KVPICK_LOG_REQUESTS": "1",
           "KVPICK_EPP_CACHE_SALT_FORWARDING": "native-vllm"}
    with Epp(renderer, env=env) as node:
        one_worker(node)
        e = wait_for(lambda: trusting(node))  # its processes make one certificate each, and agree on one
        s, head, _ = routed(e, COMPLETIONS, prompt(1, 1))
        tap.same(head and head.destination, "10.0.0.1:8000", "TLS with the generated certificate")
        s.reset()
        more = [("x-tenant-id", "blue"), ("x-request-id", "r-77"), ("traceparent", "00-aa-bb-01")]
        s, head, pieces = routed(e, COMPLETIONS + more, prompt(3, 2))
        sent = json.loads(b"".join(p.piece for p in pieces))
        tap.same(sent, {**json.loads(prompt(3, 2)), "cache_salt": "dynamo-cache-salt:blue"},
                 "the cache namespace is written into the body where that is asked for")
        respond(s)
        s.half_close()
        s.reply()
        routed(e, CHAT + more, b'{"messages": "PRIVATE"')[0].reply()
        wait_for(lambda: node.log_text().count("epp.request_finished") == 3)
        log = node.log_text()
        tap.ok("request_id=r-77" in log and "traceparent=00-aa-bb-01" in log and "outcome=response_eos" in log,
               "events of a request carry its id and its trace context")
        tap.ok(log.count("epp.lifecycle_callback") == 3 and "code=invalid_request" in log,
               "ends of prefill and booking, and refusals", log)
        ids = ",".join(str(t) for t in tokens(3, 2)[:2])
        tap.ok("PRIVATE" not in log and "blue" not in log and ids not in log.replace(" ", ""),
               "prompts and tenants are not logged")
        e.close()
        idle(node, "TLS")


NODE_ENGINES = [Engine() for _ in range(4)]


def main():
    renderer = Renderer()
    with Epp(renderer) as node:
        for i in (1, 2):
            node.call("POST", "/workers", NODE_ENGINES[i - 1].body(i, model_name=MODEL))
            NODE_ENGINES[i - 1].subscribed()
            NODE_ENGINES[i - 1].send(0, stored(i, 0, 8))
        wait_for(lambda: all(
            any(w["device_blocks"] == 8 for w in node.call("POST", "/overlap_scores", {
                "model_name": MODEL, "token_ids": tokens(i, 8)})[1].get("workers", [])) for i in (1, 2)))
        envoy = node.envoy()
        wait_for(lambda: envoy.health("readiness") == b"\x08\x01")
        for test in (cached_prefix, prefill_and_end, resets, modes, refusals, large, served_elsewhere, exchange, many,
                     metrics):
            test(node, envoy)
        kill(node, renderer)
        killed_under_load(node, envoy)
        envoy.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
        tap.same(node.stop(), 0, "the node stops with exit code 0")
    for test in (ceiling, waiting_turns, unix_and_drain, ranks_and_sessions, without_tokenizer,
                 tls):
        test(renderer)
    return tap.done()


sys.exit(main())
