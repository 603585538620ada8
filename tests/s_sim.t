#!/usr/bin/env python3
"""kvpick-sim and kvpick-load as real processes: answers, usage, rendering, KV events, replay, a round-robin run."""
import http.client
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, SLOW, Tap, call, wait_for  # noqa: E402

tap = Tap()


class Sim:
    """kvpick-sim with free ports; engines: [{http, events, replay}]."""

    def __init__(self, *args):
        self.proc = subprocess.Popen([f"{BUILD}/kvpick-sim", "--die-with-parent", *args], stdout=subprocess.PIPE,
                                     text=True)
        self.lines, self.engines = [], []
        for line in self.proc.stdout:
            self.lines.append(line)
            words = dict(w.split("=", 1) for w in line.split() if "=" in w)
            if line.startswith("engine="):
                self.engines.append(words)
            if line.startswith("ready"):
                break

    def port(self, engine=0):
        return int(self.engines[engine]["http"].rsplit(":", 1)[1])

    def stop(self):
        self.proc.terminate()
        return self.proc.wait(20 * SLOW)


def stream(port, path, body):
    """A streamed answer as (status, content type, list of parsed events, last line)."""
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=30 * SLOW)
    conn.request("POST", path, json.dumps(dict(body, stream=True)), {"Content-Type": "application/json"})
    reply = conn.getresponse()
    data = [line[6:] for line in reply.read().decode().split("\n") if line.startswith("data: ")]
    conn.close()
    return reply.status, reply.getheader("content-type"), [json.loads(d) for d in data[:-1]], data[-1]


def answers(sim):
    port = sim.port()
    tap.same(call(port, "GET", "/health")[0], 200, "GET /health answers 200")
    status, models = call(port, "GET", "/v1/models")
    tap.same((status, models["data"][0]["id"]), (200, "default"), "GET /v1/models lists the model")
    prompt = list(range(100, 200))
    usage = {"stream_options": {"include_usage": True}, "max_tokens": 5}
    status, kind, events, last = stream(port, "/v1/completions", dict(usage, prompt=prompt))
    tap.same((status, kind.split(";")[0], last), (200, "text/event-stream", "[DONE]"), "a streamed completion")
    text = "".join(e["choices"][0]["text"] for e in events if e["choices"])
    tap.same(len(text.split()), 5, "it has max_tokens tokens")
    tap.same(events[-2]["choices"][0]["finish_reason"], "length", "the piece before the last has a finish reason")
    tap.same((events[-1]["choices"], events[-1]["usage"]),
             ([], {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105,
                   "prompt_tokens_details": {"cached_tokens": 0}}), "the last piece is the usage")
    times = events[-1]["kvpick_sim"]
    # 10 ms + 100 / 16 k per s; each decode step 10 ms + 1 / 16 k per s + 0.1 ms + 30 ns per live token
    tap.same(times["first_ns"] - times["arrival_ns"], 16250000, "virtual time to first token is exact")
    steps = sum(10162500 + 30 * (100 + n) for n in range(1, 5))
    tap.same(times["finish_ns"] - times["first_ns"], steps, "and so is the rest")
    _, _, events, _ = stream(port, "/v1/completions", dict(usage, prompt=prompt))
    tap.same(events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"], 96, "the second time 6 blocks are cached")
    status, whole = call(port, "POST", "/v1/chat/completions",
                         {"model": "default", "messages": [{"role": "user", "content": "hello there"}]})
    tap.same((status, whole["object"], whole["usage"]["completion_tokens"]), (200, "chat.completion", 16),
             "a chat completion in one piece, 16 tokens by default")
    status, _, events, _ = stream(port, "/v1/chat/completions", {"max_tokens": 3, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]}]})
    tap.same((status, events[0]["choices"][0]["delta"]["role"], "usage" in events[-1]), (200, "assistant", False),
             "a streamed chat names the role; no usage unless asked for")


def refusals(sim):
    port = sim.port()
    for name, path, body, want in (
            ("no JSON", "/v1/completions", "{", 400), ("no prompt", "/v1/completions", {}, 400),
            ("an empty prompt", "/v1/completions", {"prompt": []}, 400),
            ("a negative token", "/v1/completions", {"prompt": [-1]}, 400),
            ("max_tokens 0", "/v1/completions", {"prompt": [1], "max_tokens": 0}, 400),
            ("two prompts", "/v1/completions", {"prompt": ["a", "b"]}, 400),
            ("too few ids", "/v1/completions", {"kvpick_hash_ids": [1], "prompt_len": 513}, 400),
            ("messages at the wrong end", "/v1/completions", {"messages": []}, 400),
            ("more than the cache", "/v1/completions", {"prompt": [1] * 2000}, 400),
            ("another model", "/v1/completions", {"model": "x", "prompt": [1]}, 404),
            ("another path", "/v2", {}, 404)):
        status, reply = call(port, "POST", path, body)
        tap.same((status, reply["error"]["code"]), (want, want), f"refused: {name}")


def rendering(sim):
    port = sim.port()
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    status, one = call(port, "POST", "/v1/chat/completions/render", {"messages": messages, "stream": True})
    tap.same((status, one["features"], one["request_id"].split("-")[0]), (200, None, "chatcmpl"),
             "a chat is rendered as one object")
    tap.ok(one["token_ids"] and all(isinstance(t, int) for t in one["token_ids"]), "with token ids")
    _, _, events, _ = stream(port, "/v1/chat/completions", {
        "messages": messages, "max_tokens": 1, "stream_options": {"include_usage": True}})
    tap.same(events[-1]["usage"]["prompt_tokens"], len(one["token_ids"]), "as many as the engine counts")
    status, many = call(port, "POST", "/v1/completions/render", {"prompt": ["abcdefgh", "abcd"]})
    tap.same((status, [len(p["token_ids"]) for p in many]), (200, [2, 1]), "completions are rendered as a list")
    ids = {"kvpick_hash_ids": [5, 6], "prompt_len": 600}
    _, long = call(port, "POST", "/v1/completions/render", ids)
    _, short = call(port, "POST", "/v1/completions/render", {"kvpick_hash_ids": [5], "prompt_len": 512})
    tap.ok(len(long[0]["token_ids"]) == 600 and long[0]["token_ids"][:512] == short[0]["token_ids"],
           "block ids expand to 512 tokens each")


def events(form, replay_form, frames):
    sim = Sim("--engines", "2", "--block-size", "16", "--blocks", "20", "--time-scale", "20", "--event-form", form,
              "--replay-form", replay_form)
    engine = sim.engines[1]
    sub = subprocess.Popen([f"{BUILD}/tests/helpers/h_kvsub", engine["events"], engine["replay"]],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    tap.same(json.loads(sub.stdout.readline())["what"], "connected", f"{form}: a subscriber connects")
    port = sim.port(1)
    prompt = list(range(1000, 1100))
    call(port, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    first = json.loads(sub.stdout.readline())
    event = first["events"][0]
    tap.same((first["seq"], first["seq_len"], first["frames"], first["topic"], first["rank"]),
             (0, 8, 3, "kv-events", 0), f"{form}: topic, sequence number, batch")
    tap.same((event["kind"], event["parent"], event["block_size"], event["medium"], len(event["hashes"])),
             ("stored", None, 16, "GPU", 6), f"{form}: whole blocks are stored")
    tap.same(event["tokens"], prompt[:96], f"{form}: with their tokens")
    call(port, "POST", "/v1/completions", {"prompt": prompt + list(range(30)), "max_tokens": 1})
    more = json.loads(sub.stdout.readline())["events"][0]
    tap.same((more["parent"], len(more["hashes"])), (event["hashes"][5], 2), f"{form}: a longer prompt continues the chain")
    call(port, "POST", "/v1/completions", {"prompt": [7] * 256, "max_tokens": 1})
    evict = json.loads(sub.stdout.readline())["events"]
    tap.same((evict[0]["kind"], evict[0]["hashes"][0]), ("removed", more["hashes"][1]),
             f"{form}: eviction is published, the deepest block first")
    tap.same(call(port, "POST", "/reset_prefix_cache", {})[0], 200, f"{form}: the cache can be reset")
    tap.same(json.loads(sub.stdout.readline())["events"][0]["kind"], "cleared", f"{form}: which is published")
    tap.same(call(port, "GET", "/stats")[1]["cached_blocks"], 0, f"{form}: it is empty then")
    rest = [json.loads(line) for line in sub.communicate(timeout=30 * SLOW)[0].splitlines()]
    replay = [r for r in rest if r["what"] == "replay"]
    tap.same([r["seq"] for r in replay], [0, 1, 2, 3], f"{form}: replay repeats every batch in order")
    tap.same((replay[0]["events"], replay[0]["frames"]), (first["events"], frames), f"{form}: as it was")
    tap.same((rest[-1]["what"], rest[-1]["seq"]), ("end", 2**64 - 1), f"{form}: and ends with the marker")
    tap.same(sim.stop(), 0, f"{form}: SIGTERM ends it with 0")


def cancel():
    sim = Sim("--time-scale", "1", "--block-size", "16", "--step-us", "20000")
    conn = http.client.HTTPConnection("127.0.0.1", sim.port(), timeout=30)
    conn.request("POST", "/v1/completions", json.dumps({"prompt": [1] * 64, "max_tokens": 5000, "stream": True}))
    reply = conn.getresponse()
    reply.read(20)
    tap.same(call(sim.port(), "GET", "/stats")[1]["running_requests"], 1, "a long answer runs")
    reply.close()
    conn.close()
    tap.ok(wait_for(lambda: call(sim.port(), "GET", "/stats")[1]["running_requests"] == 0),
           "it is given up when its client goes")
    sim.stop()


def load():
    sim = Sim("--engines", "16", "--time-scale", "200", "--kv-events", "off")
    ports = [f"127.0.0.1:{sim.port(i)}" for i in range(16)]
    args = [f"{BUILD}/kvpick-load", "--trace", "bench/load/trace_small.jsonl", "--limit", "150", "--time-scale", "200",
            "--compare", "round-robin,least-loaded", "--engines", ",".join(ports[:8]), "--engines", ",".join(ports[8:]),
            "--json"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120 * SLOW)
    tap.same(done.returncode, 0, "kvpick-load replays a trace against two sets of engines")
    runs = json.loads(done.stdout)["runs"] if done.returncode == 0 else [{}]
    tap.same([(r.get("policy"), r.get("finished"), r.get("errors")) for r in runs],
             [("round-robin", 150, 0), ("least-loaded", 150, 0)], "every request finishes under both policies")
    tap.ok(all(r.get("ttft_mean_s", 0) > 0 and r.get("prefilled_tokens", 0) > 0 for r in runs),
           "time to first token and prefilled tokens are reported", done.stderr)
    bad = subprocess.run([f"{BUILD}/kvpick-load", "--speed", "x"], capture_output=True, text=True, timeout=20 * SLOW)
    tap.ok(bad.returncode == 2 and "--speed" in bad.stderr, "a bad option is named")
    sim.stop()


class Picker(http.server.BaseHTTPRequestHandler):
    """A stand-in for a node: registers workers, books the next one, and logs what it was asked."""
    protocol_version = "HTTP/1.1"
    lock, workers, log, turn = threading.Lock(), {}, [], 0

    def log_message(self, *args):
        pass

    def serve(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "null")
        with self.lock:
            self.log.append((self.command, self.path, body))
            status, reply = self.answer(body)
        text = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def answer(self, body):
        if self.path == "/workers":
            self.workers[body["worker_id"]] = body
            return 201, dict(body, lifecycle="schedulable")
        if self.path == "/select_and_reserve":
            Picker.turn += 1
            worker = self.workers[1 + self.turn % len(self.workers)]
            if self.turn % 20 == 0:
                return 503, {"error": "no endpoints available to route work"}
            return 200, {"selection_id": body["selection_id"], "worker_id": worker["worker_id"], "dp_rank": 0,
                         "endpoint": worker["endpoint"]}
        return 200, {}

    do_GET = do_POST = do_DELETE = serve


def booking():
    node = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Picker)
    threading.Thread(target=node.serve_forever, daemon=True).start()
    sim = Sim("--engines", "3", "--time-scale", "200")
    with open("/dev/null", "wb") as null, tempfile.NamedTemporaryFile("w") as engines:
        engines.writelines(sim.lines)
        engines.flush()
        done = subprocess.run([f"{BUILD}/kvpick-load", "--trace", "bench/load/trace_small.jsonl", "--limit", "60",
                               "--time-scale", "200", "--base", f"http://127.0.0.1:{node.server_port}", "--register",
                               "--engines", f"@{engines.name}", "--json"], stdout=subprocess.PIPE, stderr=null,
                              text=True, timeout=120 * SLOW)
    run = json.loads(done.stdout)["runs"][0]
    tap.same((run["finished"], run["errors"], done.returncode), (57, 3, 1), "refused selections are counted as errors")
    worker = Picker.workers[2]
    tap.same((len(Picker.workers), worker["endpoint"], worker["kv_events_endpoints"]["0"], worker["replay_endpoint"]),
             (3, "http://" + sim.engines[1]["http"], sim.engines[1]["events"], sim.engines[1]["replay"]),
             "every engine is registered with its sockets")
    steps = {}
    for method, path, body in Picker.log:
        if path == "/select_and_reserve":
            steps[body["selection_id"]] = []
        elif path.startswith("/reservations/"):
            words = path.split("/")
            steps[words[2]].append(words[3] if len(words) > 3 else method)
    tap.same(sorted(map(tuple, steps.values())), [()] * 3 + [("prefill_complete", "DELETE")] * 57,
             "each booking sees prefill_complete, then DELETE, once")
    sim.stop()
    node.shutdown()


def main():
    sim = Sim("--block-size", "16", "--blocks", "100")
    tap.same(sim.lines[-1], "ready engines=1\n", "kvpick-sim says when it is ready")
    answers(sim)
    refusals(sim)
    rendering(sim)
    tap.same(sim.stop(), 0, "SIGTERM ends it with 0")
    events("array", "topic", 4)
    events("map", "plain", 3)
    cancel()
    load()
    booking()
    return tap.done()


sys.exit(main())
