#!/usr/bin/env python3
"""kvpick doctor against good and broken set-ups, with real processes: each thing that is wrong is named by the right
check, with what to do; what is right is ok; the exit code is 1 exactly when something failed."""
import contextlib
import http.server
import json
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading

LIB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
sys.path.insert(0, LIB)
from engine import Engine, pack, stored, tokens
from node import BUILD, SLOW, Node, Tap, free_port, wait_for

PROFILE = "deploy/kubernetes/seccomp/kvpick.json"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
tap = Tap()
SMALL = ["--max-ranks", "256", "--index-ranks", "64", "--max-blocks", "200000", "--max-reservations", "4096",
         "--max-active-blocks", "262144"]


class Said:
    """What doctor said: findings, exit code."""

    def __init__(self, done):
        self.code = done.returncode
        self.text = done.stdout + done.stderr
        self.doc = json.loads(done.stdout)
        self.all = self.doc["findings"]

    def has(self, check, result, *words):
        return any(f["check"] == check and f["result"] == result and all(w in f["seen"] + (f["todo"] or "") for w in words)
                   for f in self.all)

    def failed(self):
        return sorted({f["check"] for f in self.all if f["result"] == "FAIL"})


def doctor(*args, env=None, before=(), node=None, **more):
    """Runs it with the settings of a node, or with small ones on free ports."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVPICK_", "KUBE"))}
    own = node.args if node else ["--run-dir", RUN, "--port", str(free_port()), *SMALL]
    base.update(node.env if node else {})
    base.update(env or {})
    done = subprocess.run([*before, f"{BUILD}/kvpick", "doctor", "--json", *own, *args], env=base, capture_output=True,
                          text=True, timeout=60 * SLOW, check=False, **more)
    said = Said(done)
    kinds = all(f["result"] in ("ok", "warn", "FAIL") and (f["todo"] is None) == (f["result"] == "ok") and f["seen"]
                for f in said.all)
    if not kinds or said.code != bool(said.failed()) or said.doc["ok"] is bool(said.failed()):
        tap.ok(False, "every finding says what to do, the exit code follows", said.text)
    return said


def has(said, check, result, *words, name):
    tap.ok(said.has(check, result, *words), name, said.text)


# ---- services to talk to ----

class Service:
    """An HTTP server that answers what `answer(handler)` says: (status, object), or None for silence."""

    def __init__(self, answer, context=None):
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                length = int(self.headers.get("content-length", 0))
                self.body = self.rfile.read(length)
                outer.seen.append(self.path)
                got = answer(self)
                if got is None:
                    outer.closing.wait(20 * SLOW)
                    return
                text = json.dumps(got[1]).encode()
                self.send_response(got[0])
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = handle_any

            def log_message(self, *args):
                pass

        self.seen = []
        self.closing = threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *args: None  # broken handshakes are wanted here
        if context:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


def epp(url, **more):
    return {"KVPICK_MODE": "both", "DYN_MODEL_NAME": "m", "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render",
            "DYN_EPP_TOKENIZER_SERVICE_URL": url, "KVPICK_EPP_PORT": str(free_port()),
            "KVPICK_EPP_HEALTH_PORT": str(free_port()), "DYN_EPP_METRICS_PORT": "0", **more}


# ---- the machine ----

def machine():
    said = doctor()
    tap.same((said.failed(), said.code), ([], 0), "a good machine without a node: nothing fails")
    for check in ("configuration", "programs", "node", "memory file", "open files", "run directory", "ports"):
        has(said, check, "ok", name=f"{check} is ok")
    said = doctor("--max-block", "5")
    has(said, "configuration", "FAIL", "--max-blocks", name="an unknown flag: the configuration fails, with the nearest one")
    has(doctor(env={"KVPICK_PROT": "1"}), "configuration", "FAIL", "KVPICK_PORT", name="and an unknown variable")
    has(doctor(env={"DYN_NAMESPACE": "x"}), "configuration", "warn", "DYN_NAMESPACE", name="a variable without effect is named")
    said = doctor("--max-blocks", "1000000000")
    has(said, "memory", "warn", "KVPICK_MAX_BLOCKS=", name="capacities beyond the machine: how many blocks fit")
    fits = next(f["todo"] for f in said.all if f["check"] == "memory").split("KVPICK_MAX_BLOCKS=")[1]
    has(doctor("--max-blocks", fits), "memory", "ok", name="and those do fit")
    tight = doctor(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)))
    has(tight, "open files", "warn", "256", "LimitNOFILE", name="too few open files")
    text = subprocess.run([f"{BUILD}/kvpick", "doctor", "--run-dir", RUN, "--port", "0", *SMALL], capture_output=True,
                          text=True, timeout=60 * SLOW, check=False)
    tap.ok(text.stdout.startswith("ok    configuration") and text.stdout.rstrip().endswith(" 0 FAIL") and not text.returncode,
           "the text form: a line a finding, and their number", text.stdout)


def filters():
    """What a container may forbid."""
    def under(*calls):
        # The search for leaks traces the process, which the profile forbids.
        return doctor(before=[sys.executable, f"{LIB}/seccomp.py", PROFILE, ",".join(calls)],
                      env={"ASAN_OPTIONS": "detect_leaks=0"})
    said = under("io_uring_setup", "io_uring_enter", "io_uring_register")
    has(said, "io_uring", "warn", "epoll", "seccomp", name="io_uring forbidden: a warning, it goes on with epoll")
    tap.same(said.failed(), [], "and nothing fails")
    said = under("memfd_create")
    has(said, "memory file", "FAIL", "memfd_create", name="no memory files: fails")


def directories():
    with tempfile.TemporaryDirectory() as top:
        bad = os.path.join(top, "open")
        os.mkdir(bad)
        os.chmod(bad, 0o777)
        has(doctor("--run-dir", bad), "run directory", "FAIL", "0700", name="a run directory that others may write to")
        has(doctor("--run-dir", f"{top}/a/b"), "run directory", "FAIL", "can't be made", name="one that can't be made")
        has(doctor("--run-dir", f"{top}/new"), "run directory", "ok", name="one that will be made")
        sock = epp("http://127.0.0.1:1", KVPICK_EPP_LISTEN=f"unix:{top}/none/epp")
        has(doctor(env=sock), "ports", "FAIL", "none", name="no directory for a Unix socket")
        sock["KVPICK_EPP_LISTEN"] = f"unix:{top}/epp"
        has(doctor(env=sock), "ports", "ok", top, name="a directory for a Unix socket")


def memory_group():
    """A control group with a limit: version 1 or 2, where this user may make one."""
    path, file = "/sys/fs/cgroup/kvpick-doctor-test", "memory.max"
    if os.path.isdir("/sys/fs/cgroup/memory"):
        path, file = "/sys/fs/cgroup/memory/kvpick-doctor-test", "memory.limit_in_bytes"
    try:
        os.mkdir(path)
        with open(f"{path}/{file}", "w", encoding="ascii") as f:
            f.write(str(256 << 20))
    except OSError as e:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        tap.ok(True, f"a memory limit below the capacities # SKIP no control group can be made: {e}")
        return
    try:
        enter = ["sh", "-c", f'echo $$ > {path}/cgroup.procs && exec "$@"', "sh"]
        said = doctor("--max-blocks", "1000000", before=enter)
        has(said, "memory", "FAIL", "0.25 GiB", file, name="a memory limit below the capacities fails")
    finally:
        wait_for(lambda: not os.path.isdir(path) or not open(f"{path}/cgroup.procs", encoding="ascii").read())
        os.rmdir(path)


# ---- ports, node, engines ----

def ports():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = doctor("--port", str(port))
        has(said, "ports", "FAIL", str(port), f"pid {os.getpid()}", name="a port held by another process, which is named")
    has(doctor("--bind", "192.0.2.1"), "ports", "FAIL", "192.0.2.1", name="an address that is not of this machine")


def running():
    with Node() as node:
        wait_for(lambda: doctor(node=node).has("node", "ok"))
        said = doctor(node=node)
        tap.same(said.failed(), [], "a running node: nothing fails")
        has(said, "node", "ok", "runs", name="it is seen")
        has(said, "ports", "ok", "held by the node", name="and holds its port")
        has(said, "workers", "warn", "0 of 0", name="no workers: a warning")
        has(doctor("--port", str(free_port()), node=node), "ports", "warn", "settings", name="other settings than the node's")
        engine, quiet = Engine(), Engine()
        engine.register(node, 1)
        said = doctor(node=node)
        has(said, "event ports", "ok", "2 of 2", name="events and replay of a worker answer")
        has(said, "events", "warn", "no message", name="but nothing came yet")
        engine.send(0, stored(1, 0, 4))
        ask = {"token_ids": tokens(1, 4)}
        wait_for(lambda: node.call("POST", "/overlap_scores", ask)[1]["workers"][0]["device_blocks"] == 4)
        # The listener's counters are shown now and then.
        tap.ok(wait_for(lambda: doctor(node=node).has("events", "ok", "1 listeners")), "a message came")
        said = doctor(node=node)
        has(said, "block size", "ok", "4", name="blocks of the registered size")
        has(said, "workers", "ok", "1 of 1", name="the worker is schedulable")
        tap.same(said.failed(), [], "nothing fails")
        has(doctor(node=node, env={"DYN_KV_CACHE_BLOCK_SIZE": "32"}), "block size", "FAIL", "32", "4",
            name="another block size configured than registered")
        other = {"type": "BlockStored", "block_hashes": [77], "parent_block_hash": None, "token_ids": list(range(8)),
                 "block_size": 8, "lora_id": None, "medium": "GPU"}
        engine.send(1, pack([1.0, [other], None]))
        tap.ok(wait_for(lambda: doctor(node=node).has("block size", "FAIL", "another size")),
               "another block size in the events than registered")
        dead = free_port()
        with socket.create_server(("127.0.0.1", 0)) as silent, Service(lambda h: (200, {})) as web:
            for i, port in enumerate((dead, silent.getsockname()[1], web.port)):
                body = {**quiet.body(10 + i), "kv_events_endpoint": f"tcp://127.0.0.1:{port}"}
                node.call("POST", "/workers", body)
            said = doctor(node=node)
        has(said, "event ports", "FAIL", f":{dead}", "refused", name="an event port that nobody holds")
        has(said, "event ports", "FAIL", f":{web.port}", "not ZeroMQ", name="one held by a web server")
        has(said, "event ports", "ok", "3 of 6", name="the others answer")
        engine.close()
        quiet.close()
        code, text = node.ctl("check")
        tap.ok(code == 0, "kvpickctl check finds nothing", text)


def replicas():
    engine = Engine(replay=False)
    away = free_port()
    env = {"KVPICK_REPLICA_SYNC_PORT": str(free_port()), "KVPICK_REPLICA_SYNC_PEERS": f"{engine.at},tcp://127.0.0.1:{away}"}
    said = doctor(env=env)
    has(said, "replicas", "ok", "1 of 2", name="a replica that answers")
    has(said, "replicas", "warn", str(away), name="and one that is away: a warning")
    tap.same(said.failed(), [], "which is no failure")
    engine.close()


def workers_file():
    engine = Engine(replay=False)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        f.write(f"workers:\n- worker_id: 1\n  kv_events_endpoint: {engine.at}\n")
        f.flush()
        said = doctor(env={"KVPICK_WORKERS_FILE": f.name})
        has(said, "workers file", "ok", "1 event", name="a workers file is read")
        has(said, "event ports", "ok", "1 of 1", name="and its event ports are tried, without a node")
        f.write("  - bad: [\n")
        f.flush()
        has(doctor(env={"KVPICK_WORKERS_FILE": f.name}), "workers file", "FAIL", "line", name="a broken one")
    has(doctor(env={"KVPICK_WORKERS_FILE": "/nonexistent"}), "workers file", "FAIL", "No such", name="a missing one")
    engine.close()


# ---- tokenizer, certificate, proxy ----

def tokenizer():
    def render(h):
        asked = json.loads(h.body)
        if h.headers.get("authorization") != "Bearer secret":
            return 401, {"error": "who are you"}
        if asked["model"] != "m":
            return 404, {"error": "no such model"}
        return 200, [{"token_ids": [1, 2, 3]}] if h.path == "/base/v1/completions/render" else {"tokens": [1]}

    with tempfile.NamedTemporaryFile("w") as f, Service(render) as s, Service(lambda h: None) as slow:
        f.write("secret\n")
        f.flush()
        env = epp(f"http://127.0.0.1:{s.port}/base/", KVPICK_EPP_TOKENIZER_TOKEN_FILE=f.name)
        said = doctor(env=env)
        has(said, "tokenizer", "ok", "token ids", name="a tokenizer that renders")
        tap.same(s.seen, ["/base/v1/completions/render"], "was asked once, at the path that kvpick uses")
        has(doctor(env={**env, "DYN_MODEL_NAME": "x"}), "tokenizer", "FAIL", "404", "DYN_MODEL_NAME", name="another model")
        has(doctor(env={**env, "DYN_EPP_TOKENIZER_PROTOCOL": "sglang-renderer"}), "tokenizer", "FAIL", "input_ids",
            name="another protocol")
        has(doctor(env={**env, "DYN_EPP_TOKENIZER_PROTOCOL": "sglang-tokenize"}), "tokenizer", "ok", name="/tokenize")
        del env["KVPICK_EPP_TOKENIZER_TOKEN_FILE"]
        has(doctor(env=env), "tokenizer", "FAIL", "401", "TOKEN_FILE", name="without its token")
        has(doctor(env=epp(f"http://127.0.0.1:{free_port()}")), "tokenizer", "FAIL", "refused", name="nobody there")
        has(doctor(env=epp("http://no-such-host.invalid:1", RES_OPTIONS="timeout:1 attempts:1")), "tokenizer", "FAIL", "resolved", name="an unknown name")
        has(doctor(env=epp(f"http://127.0.0.1:{slow.port}")), "tokenizer", "FAIL", "in time", name="one that does not answer")


def tokenizer_tls(pairs):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pairs[0])
    with Service(lambda h: (200, [{"token_ids": [1]}]), context) as s:
        for n, result in ((0, "ok"), (1, "FAIL")):
            env = epp(f"https://127.0.0.1:{s.port}", KVPICK_EPP_TOKENIZER_CA_FILE=pairs[n][0])
            has(doctor(env=env), "tokenizer", result, *(["TLS", "CA_FILE"] if n else []),
                name=f"a tokenizer over https, vouched for by {'another' if n else 'its own'} certificate")


def certificates(top):
    """Two self-signed pairs for 127.0.0.1: [(cert, key)], or None without the openssl program."""
    if not shutil.which("openssl"):
        return None
    pairs = []
    for n in "ab":
        pair = (f"{top}/{n}.crt", f"{top}/{n}.key")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days",
                        "2", "-subj", f"/CN={n}", "-addext", "subjectAltName=IP:127.0.0.1", "-out", pair[0], "-keyout",
                        pair[1]], check=True, capture_output=True)
        pairs.append(pair)
    return pairs


def certificate(pairs):
    for key, result in ((pairs[0][1], "ok"), (pairs[1][1], "FAIL")):
        env = epp("http://127.0.0.1:1", KVPICK_EPP_TLS_CERT_FILE=pairs[0][0], KVPICK_EPP_TLS_KEY_FILE=key)
        has(doctor(env=env), "certificate", result, name=f"a certificate with {'its' if result == 'ok' else 'another'} key")


def proxy():
    env = epp("http://127.0.0.1:1")
    with Node(env=env) as node:
        # The API answers before the Endpoint Picker has opened its ports.
        held = wait_for(lambda: sum(f["check"] == "ports" and "held by the node" in f["seen"]
                                    for f in doctor(node=node).all) == 3)
        tap.ok(held, "all ports of both roles are held by the node")
        has(doctor(node=node), "envoy", "warn", "deploy/envoy", name="no stream of a proxy yet")


# ---- API server ----

POOL = {"items": [{"metadata": {"name": "pool"}, "spec": {"targetPorts": [{"number": 8000}]}}]}


class Api:
    """An API server that knows one namespace, one pool, one Service; deny: {part of a path: status}."""

    def __init__(self, context=None, token="t1"):
        self.deny, self.token = {}, token
        self.service = Service(self.answer, context)

    def answer(self, h):
        if self.token and h.headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"kind": "Status"}
        for part, status in self.deny.items():
            if part in h.path:
                return status, {"kind": "Status"}
        if "/namespaces/llm/" not in h.path:
            return 403, {"kind": "Status"}
        if "inferencepools" in h.path:
            return 200, POOL if h.path.endswith("metadata.name%3Dpool") else {"items": []}
        return 200, {"items": []}


def cluster(**more):
    return {**epp("http://127.0.0.1:1"), "KVPICK_MODE": "epp", "DYN_EPP_INFERENCE_POOL_NAME": "pool", "POD_NAMESPACE": "llm",
            "DYN_KV_CACHE_BLOCK_SIZE": "16", **more}


def api_plain():
    api = Api(token=None)
    with api.service as s:
        env = cluster(KVPICK_KUBE_API_URL=f"http://127.0.0.1:{s.port}")
        has(doctor(env=env), "api server", "ok", "pool", name="an API server with pods and pool")
        tap.ok(len(s.seen) == 2 and s.seen[0] == "/api/v1/namespaces/llm/pods?limit=1", "was asked for one pod, and the pool",
               s.seen)
        has(doctor(env={**env, "DYN_EPP_INFERENCE_POOL_NAME": "other"}), "api server", "FAIL", "InferencePool other",
            name="no such pool")
        api.deny = {"inferencepools": 404}
        has(doctor(env=env), "api server", "FAIL", "CRD", name="no such kind")
        api.deny = {"inference.networking.k8s.io/v1/": 404}
        has(doctor(env=env), "api server", "warn", "v1alpha2", name="a cluster that has only the older kind")
        api.deny = {"pods": 403}
        has(doctor(env=env), "api server", "FAIL", "403", "rbac.yaml", name="no right to list pods")
        peers = {**env, "DYN_EPP_PEER_SERVICE": "peers", "POD_IP": "127.0.0.1"}
        for part in ("services/peers", "endpointslices"):
            api.deny = {part: 403}
            has(doctor(env=peers), "api server", "FAIL", "403", name=f"no right to {part}")
        api.deny = {"services/peers": 404}
        has(doctor(env=peers), "api server", "FAIL", "DYN_EPP_PEER_SERVICE", name="no peer Service")
        api.deny = {}
        has(doctor(env=peers), "api server", "ok", "peers", name="with peers")
    has(doctor(env=env), "api server", "FAIL", "connect", name="an API server that is away")
    has(doctor(env=cluster()), "api server", "FAIL", "KUBECONFIG", name="no API server known")
    has(doctor(env=cluster(KUBECONFIG="/nonexistent")), "api server", "FAIL", "/nonexistent", name="a kubeconfig that is missing")


def api_kubeconfig(top, pairs):
    path = os.path.join(top, "kubeconfig")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pairs[0])
    with Api(context, token="kc").service as s, open(path, "w", encoding="ascii") as f:
        cluster_at = {"server": f"https://127.0.0.1:{s.port}", "certificate-authority": pairs[0][0]}
        json.dump({"apiVersion": "v1", "kind": "Config", "current-context": "c",
                   "clusters": [{"name": "k", "cluster": cluster_at}], "users": [{"name": "u", "user": {"token": "kc"}}],
                   "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]}, f)
        f.flush()
        has(doctor(env=cluster(KUBECONFIG=path)), "api server", "ok", "pool", name="an API server by kubeconfig")


def api_tls(top, pairs):
    """In the cluster: address from the environment, token and certificate mounted where the kubelet does."""
    mount = ('mount -t tmpfs none /run && mkdir -p "$0" && cp "$1"/* "$0"/ && shift && exec "$@"')
    account = os.path.join(top, "account")
    os.mkdir(account)
    jailed = ["unshare", "-m", "sh", "-c", mount, ACCOUNT, account]
    if os.geteuid() or not shutil.which("unshare") or subprocess.run(
            [*jailed[:4], "mount -t tmpfs none /run && test -w /var/run"], capture_output=True, check=False).returncode:
        tap.ok(True, "an API server over TLS # SKIP no mount name space can be made")
        return

    def put(name, text):
        with open(os.path.join(account, name), "w", encoding="ascii") as f:
            f.write(text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pairs[0])
    put("token", "t1")
    with open(pairs[0][0], encoding="ascii") as f:
        put("ca.crt", f.read())
    with Api(context).service as s:
        env = cluster(KUBERNETES_SERVICE_HOST="127.0.0.1", KUBERNETES_SERVICE_PORT=str(s.port))
        has(doctor(env=env, before=jailed), "api server", "ok", "https://127.0.0.1", name="an API server over TLS")
        put("token", "expired")
        has(doctor(env=env, before=jailed), "api server", "FAIL", "401", "token", name="a token that it refuses")
        put("token", "t1")
        with open(pairs[1][0], encoding="ascii") as f:
            put("ca.crt", f.read())
        has(doctor(env=env, before=jailed), "api server", "FAIL", "ertificate", "ca.crt", name="a certificate of somebody else")
        os.unlink(os.path.join(account, "token"))
        has(doctor(env=env, before=jailed), "api server", "FAIL", "automountServiceAccountToken", name="no token mounted")
    with Api(token=None).service as s:
        put("token", "t1")
        env["KUBERNETES_SERVICE_PORT"] = str(s.port)
        has(doctor(env=env, before=jailed), "api server", "FAIL", "SSL", name="a server without TLS")


def main():
    global RUN
    with tempfile.TemporaryDirectory() as top:
        RUN = os.path.join(top, "run")
        machine()
        filters()
        directories()
        memory_group()
        ports()
        running()
        workers_file()
        replicas()
        tokenizer()
        proxy()
        api_plain()
        pairs = certificates(top)
        if pairs:
            certificate(pairs)
            tokenizer_tls(pairs)
            api_kubeconfig(top, pairs)
            api_tls(top, pairs)
        else:
            tap.ok(True, "certificates # SKIP no openssl program")
    return tap.done()


RUN = ""
sys.exit(main())
