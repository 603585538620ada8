#!/usr/bin/env python3
"""What the Endpoint Picker shows of itself: every published series, a text that any scraper reads, labels that traffic
can't multiply, series of workers that end with them, and logs as JSON lines without prompts, headers or tokens."""
import json
import math
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from envoy import REQUEST_BODY, REQUEST_HEADERS, body, headers
from epp import CHAT, COMPLETIONS, FULL, MODEL, SSE, Epp, Renderer, chat, prompt, respond, routed, schedulable
from node import Tap, wait_for, worker

tap = Tap()
SERIES = {  # name: (type, labels)
    "dynamo_epp_requests_total": ("counter", {"model", "outcome"}),
    "dynamo_epp_request_duration_seconds": ("histogram", {"model", "outcome"}),
    "dynamo_epp_streams_inflight": ("gauge", {"model"}),
    "dynamo_epp_phase_duration_seconds": ("histogram", {"model", "phase", "outcome"}),
    "dynamo_epp_first_response_body_seconds": ("histogram", {"model"}),
    "dynamo_epp_lifecycle_callbacks_total": ("counter", {"model", "operation", "result"}),
    "dynamo_epp_cached_tokens": ("histogram", {"model"}),
    "dynamo_component_router_requests_started_total": ("counter", {"model", "inference_pool"}),
    "dynamo_component_router_input_sequence_tokens": ("histogram", {"model", "inference_pool"}),
    "dynamo_component_router_output_sequence_tokens": ("histogram", {"model", "inference_pool"}),
    "dynamo_epp_index_mismatch": ("gauge", {"model"}),
    "dynamo_epp_predicted_cached_tokens_total": ("counter", {"model"}),
    "dynamo_epp_reported_cached_tokens_total": ("counter", {"model"}),
    "dynamo_epp_endpoint_mismatch_total": ("counter", {"model"}),
    "dynamo_epp_router_rejections_total": ("counter", {"model", "reason"}),
    "dynamo_epp_selections_total": ("counter", {"model", "role", "result"}),
    "dynamo_epp_selection_errors_total": ("counter", {"model", "role", "reason"}),
    "dynamo_epp_selected_overlap_ratio": ("histogram", {"model", "role"}),
    "dynamo_epp_queue_pending": ("gauge", {"role"}),
    "dynamo_epp_queue_wait_seconds": ("histogram", {"model", "role"}),
    "dynamo_epp_queue_rejected_total": ("counter", {"model", "role"}),
    "dynamo_epp_reservations_active": ("gauge", {"role"}),
    "dynamo_epp_reservations_expired_total": ("counter", set()),
    "dynamo_epp_reservations_swept_total": ("counter", {"reason"}),
    "dynamo_epp_workers": ("gauge", {"role", "lifecycle"}),
    "dynamo_epp_worker_active_prefill_tokens": ("gauge", {"worker_id", "dp_rank", "role"}),
    "dynamo_epp_worker_active_decode_blocks": ("gauge", {"worker_id", "dp_rank", "role"}),
    "dynamo_epp_worker_active_requests": ("gauge", {"worker_id", "dp_rank", "role"}),
    "dynamo_epp_index_nodes": ("gauge", {"kind"}),
    "dynamo_epp_kv_events_total": ("counter", {"type", "result"}),
    "dynamo_epp_kv_event_gaps_total": ("counter", set()),
    "dynamo_epp_kv_replay_total": ("counter", {"result"}),
    "dynamo_epp_shm_bytes": ("gauge", {"segment"}),
    "dynamo_epp_replica_recovery_state": ("gauge", set()),
    "dynamo_epp_recovery_duration_seconds": ("gauge", set()),
    "inference_pool_ready_pods": ("gauge", {"name"}),
    "inference_pool_average_queue_size": ("gauge", {"name"}),
    "inference_pool_average_running_requests": ("gauge", {"name"}),
    "inference_objective_running_requests": ("gauge", {"model_name"}),
    "inference_objective_request_total": ("counter", {"model_name", "target_model_name"}),
    "inference_objective_request_error_total": ("counter", {"model_name", "target_model_name", "error_code"}),
    "inference_extension_scheduler_e2e_duration_seconds": ("histogram", {"role"}),
    "inference_extension_scheduler_attempts_total": ("counter", {"model_name", "target_model_name", "status"}),
    "inference_extension_prefix_indexer_size": ("gauge", {"role"}),
    "inference_extension_prefix_indexer_hit_ratio": ("histogram", {"role"}),
    "inference_extension_flow_control_queue_size": ("gauge", {"inference_pool", "model_name", "target_model_name"}),
    "inference_extension_info": ("gauge", {"build_ref"}),
}
for _name in ("request_duration_seconds", "request_ttft_seconds", "request_tpot_seconds", "request_sizes",
              "response_sizes", "input_tokens", "output_tokens", "prompt_cached_tokens",
              "normalized_time_per_output_token_seconds"):
    SERIES["inference_objective_" + _name] = ("histogram", {"model_name", "target_model_name"})
LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)$')
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def scrape(node):
    """{family: (type, {(name, labels): value})}, and what breaks the text format."""
    kinds, values, faults = {}, {}, []
    for line in node.call("GET", "/metrics")[1].splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            if name in kinds:
                faults.append(f"two types of {name}")
            kinds[name] = kind
            continue
        if line.startswith("# HELP "):
            continue
        m = LINE.match(line)
        if not m:
            faults.append(line)
            continue
        name, labels = m.group(1), tuple(sorted(LABEL.findall(m.group(2) or "")))
        family = name
        for suffix in ("_bucket", "_sum", "_count"):
            if name.endswith(suffix) and kinds.get(name[:-len(suffix)]) == "histogram":
                family = name[:-len(suffix)]
        if family not in kinds:
            faults.append(f"no type: {line}")
        if (name, labels) in values:
            faults.append(f"twice: {line}")
        values[name, labels] = float(m.group(3))
    return kinds, values, faults + histograms(kinds, values)


def histograms(kinds, values):
    """Buckets rise, the last one is the count."""
    faults, buckets = [], {}
    for (name, labels), v in values.items():
        if name.endswith("_bucket") and kinds.get(name[:-7]) == "histogram":
            le = dict(labels)["le"]
            rest = tuple(x for x in labels if x[0] != "le")
            buckets.setdefault((name[:-7], rest), []).append((math.inf if le == "+Inf" else float(le), v))
    for (family, rest), row in buckets.items():
        row.sort()
        if [v for _, v in row] != sorted(v for _, v in row) or row[-1][0] != math.inf or \
                row[-1][1] != values.get((family + "_count", rest)):
            faults.append(f"buckets of {family} {rest}")
    return faults


def families(node, envoy):
    s, _, _ = routed(envoy, COMPLETIONS, prompt(1, 8))
    usage = b'{"usage":{"prompt_tokens":32,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}'
    respond(s, (b"data: " + usage + b"\n\n", b"data: [DONE]\n\n"))
    s.half_close()
    s.reply()
    # A stream is counted when it has ended, a moment after its last answer.
    last = "inference_objective_normalized_time_per_output_token_seconds_count"
    wait_for(lambda: any(n == last and v for (n, _), v in scrape(node)[1].items()))
    kinds, values, faults = scrape(node)
    tap.same(faults, [], "the text is in the exposition format")
    for name, (kind, labels) in SERIES.items():
        suffix = "_count" if kind == "histogram" else ""
        got = [dict(x) for n, x in values if n == name + suffix]
        tap.ok(kinds.get(name) == kind and got and all(set(g) == labels for g in got), f"{name}: {kind} {sorted(labels)}",
               (kinds.get(name), got[:1]))
    model = {v for _, labels in values for k, v in labels if k in ("model", "model_name", "target_model_name")}
    tap.same(model, {MODEL}, "the model of every series is the configured one")
    one = {n: v for (n, _), v in values.items()}
    tap.ok(one["inference_objective_request_sizes_count"] == 1 and
           one["inference_objective_request_sizes_sum"] == len(prompt(1, 8)) and
           one["inference_objective_response_sizes_sum"] == len(usage) + 22 and
           one["inference_objective_output_tokens_sum"] == 5 and
           one["inference_objective_request_tpot_seconds_count"] == 1 and
           one["inference_objective_normalized_time_per_output_token_seconds_count"] == 1,
           "sizes and times of the one request", {k: v for k, v in one.items() if "objective" in k and "bucket" not in k})


def cardinality(node, envoy):
    """Thousands of model names, tenants, sessions and request ids: the same series as before."""
    before = set(scrape(node)[1])
    for i in range(300):
        data = json.dumps({"model": f"model-{i}", "prompt": [i, 2, 3, 4]}).encode()
        more = [("x-tenant-id", f"t{i}"), ("x-request-id", f"r{i}"), ("x-session-id", f"s{i}"),
                ("x-dynamo-meta-policy-class", f"c{i}")]
        routed(envoy, COMPLETIONS + more, data)[0].reset()
    wait_for(lambda: not node.load())
    tap.same(set(scrape(node)[1]) - before, set(), "no series of 300 models, tenants, sessions and classes")


def life_of_series(node, envoy):
    def of(name, **labels):
        want = set((k, str(v)) for k, v in labels.items())
        return [v for (n, x), v in scrape(node)[1].items() if n == name and want <= set(x)]
    s, head, _ = routed(envoy, COMPLETIONS, prompt(70, 4))
    w = int(head.destination.split(":")[0].rsplit(".", 1)[1])
    tap.same((of("dynamo_epp_worker_active_prefill_tokens", worker_id=w),
              of("dynamo_epp_worker_active_decode_blocks", worker_id=w),
              of("dynamo_epp_worker_active_requests", worker_id=w),
              of("dynamo_epp_reservations_active", role="aggregated")), ([16.0], [4.0], [1.0], [1.0]),
             "the load of a worker")
    s.reset()
    tap.ok(wait_for(lambda: of("dynamo_epp_reservations_active", role="aggregated") == [0.0]), "no booking is left")
    node.call("DELETE", f"/workers/{w}")
    tap.ok(wait_for(lambda: not of("dynamo_epp_worker_active_requests", worker_id=w), 2),
           "a worker's series end with it")
    tap.same(of("dynamo_epp_workers", role="aggregated", lifecycle="schedulable"), [1.0], "one is left")


REFUSALS = [("invalid_request", CHAT, b"{", {}), ("subset_empty", COMPLETIONS, prompt(1, 1), {"subset": []}),
            ("metadata_headers", COMPLETIONS + [(f"x-dynamo-meta-{i}", "v") for i in range(65)], prompt(1, 1), {})]


def refusals(node, envoy):
    """Every stage of a pick that fails has a reason of its own."""
    from envoy import SUBSET, metadata

    def count(reason):
        return sum(v for (n, x), v in scrape(node)[1].items()
                   if n == "dynamo_epp_selection_errors_total" and ("reason", reason) in x)
    for reason, path, data, more in REFUSALS:
        before = count(reason)
        _, head, _ = routed(envoy, path, data, more=metadata(SUBSET, more["subset"]) if more else b"")
        tap.ok(head.kind == "immediate" and count(reason) == before + 1, f"refused: {reason}")


def log_lines(renderer):
    """JSON lines; every event of a request with its identities; nothing that a client sent."""
    env = {"DYN_LOGGING_JSONL": "true", "KVPICK_LOG_REQUESTS": "1", "DYN_ROUTER_USE_KV_EVENTS": "false"}
    secret = "SECRET-WORDS"
    with Epp(renderer, env=env) as node:
        node.call("POST", "/workers", worker(1, model_name=MODEL))
        wait_for(lambda: schedulable(node) == 1)
        envoy = node.envoy()
        more = [("x-request-id", "r-1"), ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
                ("authorization", "Bearer " + secret), ("x-tenant-id", secret), ("x-session-id", secret)]
        data = json.loads(chat(3, 2))
        data["messages"].append({"role": "user", "content": secret})
        s, head, _ = routed(envoy, CHAT + more, json.dumps(data).encode())
        tap.ok(head.destination, "a request")
        respond(s, (secret.encode(),))
        s.half_close()
        s.reply()
        routed(envoy, CHAT + more, b'{"messages": "' + secret.encode())[0].reply()
        s = envoy.stream(headers(REQUEST_HEADERS, COMPLETIONS + more, config=FULL), body(REQUEST_BODY, b"{"))
        s.send(headers(REQUEST_HEADERS, COMPLETIONS + more, config=FULL))
        wait_for(lambda: node.counter("message_out_of_order_total") == 1)
        s.reset()
        wait_for(lambda: node.log_text().count("epp.request_finished") == 3)
        envoy.close()
        lines, bad = [], []
        for text in node.log_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                bad.append(text)
        tap.same(bad, [], "every line of the log is JSON")
        mine = [x for x in lines if str(x.get("event", x.get("message", ""))).startswith("epp.")]
        tap.ok(len(mine) >= 6, "the events of three requests", [x.get("event") for x in lines])
        finished = [x for x in mine if "epp.request_finished" in json.dumps(x)]
        tap.same(len(finished), 3, "exactly one end a stream")
        tap.ok(all("r-1" in json.dumps(x) and "4bf92f3577b34da6a3ce929d0e0e4736" in json.dumps(x) for x in finished),
               "with request id and trace", finished)
        tap.ok(secret not in node.log_text(), "no prompt, header, session, tenant or response in the log")
    renderer.gate.set()


def main():
    renderer = Renderer()
    with Epp(renderer, env={"DYN_ROUTER_USE_KV_EVENTS": "false"}) as node:
        for i in (1, 2):
            node.call("POST", "/workers", worker(i, model_name=MODEL))
        wait_for(lambda: schedulable(node) == 2)
        envoy = node.envoy()
        for test in (families, refusals, cardinality, life_of_series):
            test(node, envoy)
        envoy.close()
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
    log_lines(renderer)
    return tap.done()


sys.exit(main())
