#!/usr/bin/env python3
"""kvpick as a pod of deploy/kubernetes: with the environment of the rendered manifests, a service account mounted where
the kubelet does, an API server (tests/lib/kube_stub.py) and engines that pretend, in name spaces of its own. It becomes
ready as its probes ask, finds the pods, picks; and all that it asks of the API server is what its Role allows, no rule
of which is idle. With two roles the sidecar runs with its environment, too, and a request goes through both engines."""
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from spaces import enter  # noqa: E402  (before those that start threads)

enter()
from envoy import Envoy  # noqa: E402
from epp import COMPLETIONS, routed  # noqa: E402
from kube_stub import KubeStub, endpoint_slice, old_pool, pod  # noqa: E402
from manifests import ROOT, containers, of_kind, render, renderer, settings_of  # noqa: E402
from node import BUILD, SLOW, Tap, call, wait_for  # noqa: E402

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SERVING = b"\x08\x01"
ENGINES = {"engine-0": "127.0.0.2", "engine-1": "127.0.0.3"}
tap = Tap()
processes = []


def start(args, log, env=None):
    proc = subprocess.Popen(args, env=env, stdout=log, stderr=log)
    processes.append(proc)
    return proc


def stop(proc):
    if proc.poll() is None:
        proc.send_signal(signal.SIGTERM)
        try:
            proc.wait(60 * SLOW)
        except subprocess.TimeoutExpired:
            proc.kill()
            proc.wait()
    return proc.returncode


def resolve(top, names):
    """What the cluster's name service would answer."""
    with open(f"{top}/hosts", "w", encoding="ascii") as f:
        f.write("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in names.items()))
    subprocess.run(["mount", "--bind", f"{top}/hosts", "/etc/hosts"], check=True)


def mount_account(stub):
    os.makedirs(os.path.dirname(ACCOUNT), exist_ok=True)
    if os.path.islink(ACCOUNT):
        os.unlink(ACCOUNT)
    os.symlink(stub.account, ACCOUNT)


def asked(stub):
    """{(group, resource): verbs} that the API server was asked for."""
    out = {}
    for verb, path in stub.seen():
        words = path.split("?")[0].strip("/").split("/")
        group = "" if words[0] == "api" else words[1]
        out.setdefault((group, words[words.index("namespaces") + 2]), set()).add(verb)
    return out


def rules(objects):
    return {(g, r): set(rule["verbs"]) for o in of_kind(objects, "Role") for rule in o["rules"]
            for g in rule["apiGroups"] for r in rule["resources"]}


def cluster(objects, env, engines, old=False):
    """An API server that holds the rendered pool, the engines' pods {name: (address, more labels)}, the peer Service."""
    stub = KubeStub()
    shown = of_kind(objects, "InferencePool")[0]
    labels = shown["spec"]["selector"]["matchLabels"]
    if old:
        stub.served = {stub.path(k) for k in ("pods", "services", "endpointslices")} | {stub.old_pools()}
        stub.put("inferencepools", old_pool(shown["metadata"]["name"], labels=labels), at=stub.old_pools())
    else:
        stub.put("inferencepools", shown)
    for name, (ip, more) in engines.items():
        stub.put("pods", pod(name, ip, labels={**labels, **more}))
    stub.put("pods", pod("stranger", "127.0.0.9", labels={"app": "other"}))
    if "DYN_EPP_PEER_SERVICE" in env:
        peers = env["DYN_EPP_PEER_SERVICE"]
        stub.put("services", next(o for o in of_kind(objects, "Service") if o["metadata"]["name"] == peers))
        stub.put("endpointslices", endpoint_slice("s", peers, [(env["POD_IP"], {"ready": True, "serving": True})]))
    return stub


def environment(objects):
    work = next(w for w in of_kind(objects, "Deployment") if w["metadata"]["name"] == "kvpick")
    main = next(c for c in containers(work) if c["name"] == "kvpick")
    env = settings_of(objects, work)
    env.update(POD_NAMESPACE="ns", POD_IP="127.0.0.1", PATH=os.environ["PATH"])
    os.makedirs("/run/kvpick", exist_ok=True)
    return env, main


def serves(main):
    """Whether all three probes of the manifest are answered with SERVING."""
    asks = [main[p]["grpc"] for p in ("startupProbe", "livenessProbe", "readinessProbe")]
    channel = Envoy(f"127.0.0.1:{asks[0]['port']}")
    good = all(channel.health(a["service"]) == SERVING for a in asks)
    channel.close()
    return good


def schedulable():
    try:
        return call(9090, "GET", "/status?format=json")[1]["workers"]["schedulable"]
    except (OSError, TypeError, KeyError):
        return None


def one(name, objects, log, old=False):
    """Runs a pod; answers {(group, resource): verbs} that it used."""
    env, main = environment(objects)
    with tempfile.TemporaryDirectory() as top:
        stub = cluster(objects, env, {name: (ip, {}) for name, ip in ENGINES.items()}, old)
        resolve(top, {"kvpick-render": ENGINES["engine-0"]})
        mount_account(stub)
        env.update(KUBERNETES_SERVICE_HOST="127.0.0.1", KUBERNETES_SERVICE_PORT=str(stub.port))
        sims = [start([f"{BUILD}/kvpick-sim", "--ip", ip, "--http-port", "8000", "--event-port", env["DYN_EPP_KV_EVENT_PORT"],
                       "--replay-port", env["DYN_EPP_KV_EVENT_REPLAY_PORT"], "--model", env["DYN_MODEL_NAME"],
                       "--block-size", env["DYN_KV_CACHE_BLOCK_SIZE"]], log) for ip in ENGINES.values()]
        # The proxy of the test speaks no TLS; all else is as rendered.
        node = start([f"{BUILD}/kvpick", *main["args"]], log, {**env, "DYN_SECURE_SERVING": "false"})
        tap.ok(wait_for(lambda: serves(main), 30), f"{name}: startup, liveness and readiness probe are answered")
        tap.ok(wait_for(lambda: schedulable() == 2), f"{name}: it finds the pods of the pool, and only these")
        proxy = Envoy("127.0.0.1:9002")
        ask = b'{"model": "%s", "prompt": "Is anybody there?"}' % env["DYN_MODEL_NAME"].encode()
        stream, head, _ = routed(proxy, COMPLETIONS, ask)
        tap.ok(head.destination in [f"{ip}:8000" for ip in ENGINES.values()], f"{name}: a request is sent to one of them",
               head)
        stream.reset()
        proxy.close()
        used = asked(stub)
        done = subprocess.run([f"{BUILD}/kvpick", "doctor"], env={**env, "DYN_SECURE_SERVING": "false"}, capture_output=True,
                              text=True, timeout=60 * SLOW, check=False)
        tap.ok(done.returncode == 0 and "ok    api server" in done.stdout and "ok    tokenizer" in done.stdout,
               f"{name}: kvpick doctor, in the pod, finds nothing that fails", done.stdout)
        after = asked(stub)
        allowed = rules(objects)
        bad = {k: v for k, v in after.items() if not v <= allowed.get(k, set())}
        tap.same(bad, {}, f"{name}: the Role allows all that was asked of the API server, by doctor, too")
        check = subprocess.run([f"{BUILD}/kvpickctl", "check"], env={k: env[k] for k in ("PATH", "KVPICK_RUN_DIR")},
                               capture_output=True, text=True, timeout=60 * SLOW, check=False)
        tap.ok(check.returncode == 0, f"{name}: kvpickctl check finds nothing", check.stdout + check.stderr)
        tap.same(stop(node), 0, f"{name}: SIGTERM drains it")
        for sim in sims:
            stop(sim)
        stub.close()
        subprocess.run(["umount", "/etc/hosts"], check=True)
    return used


def probe(ip, port, path):
    """The status of a GET as the kubelet makes it; None = nobody listens."""
    conn = http.client.HTTPConnection(ip, port, timeout=10 * SLOW)
    try:
        conn.request("GET", path)
        return conn.getresponse().status
    except OSError:
        return None
    finally:
        conn.close()


def start_sidecar(objects, ip, log):
    """(process, its port of metrics) of the sidecar in the decode pod, with the environment of the manifest."""
    work = next(w for w in of_kind(objects, "Deployment") if w["metadata"]["name"] == "llm-decode")
    side = next(c for c in containers(work) if c["name"] == "kvpick-sidecar")
    env = {e["name"]: e["value"] for e in side["env"]}
    # A pod has its address alone; here the other engine has the same port.
    proc = start([f"{BUILD}/{side['command'][0]}"], log, {**env, "KVPICK_SIDECAR_BIND": ip})
    return proc, int(env["KVPICK_SIDECAR_METRICS_PORT"])


def two_roles(engine, objects, log):
    """The prefill pod is 127.0.0.1, the decode pod 127.0.0.3 with its engine on localhost, all as rendered."""
    name, prefill, decode = f"disagg-{engine}", "127.0.0.1", "127.0.0.3"
    env, main = environment(objects)
    label = env["DYN_EPP_WORKER_ROLE_LABEL"]
    with tempfile.TemporaryDirectory() as top:
        stub = cluster(objects, env, {"p": (prefill, {label: "prefill"}), "d": (decode, {label: "decode"}),
                                      "none": ("127.0.0.4", {})})
        resolve(top, {"kvpick-render": prefill})
        mount_account(stub)
        env.update(KUBERNETES_SERVICE_HOST="127.0.0.1", KUBERNETES_SERVICE_PORT=str(stub.port), DYN_SECURE_SERVING="false")
        # The simulated engines give token ids in vLLM's form only.
        env["DYN_EPP_TOKENIZER_PROTOCOL"] = "vllm-render"
        side, metrics = start_sidecar(objects, decode, log)
        tap.ok(wait_for(lambda: probe(decode, metrics, "/ready") == 503), f"{name}: without its engine the sidecar is not ready")
        sim = start([f"{BUILD}/kvpick-sim", "--engines", "2", "--pd", engine, "--pd-prefill", "1", "--http-port", "8000",
                     "--event-port", env["DYN_EPP_KV_EVENT_PORT"], "--replay-port", env["DYN_EPP_KV_EVENT_REPLAY_PORT"],
                     "--model", env["DYN_MODEL_NAME"], "--block-size", env["DYN_KV_CACHE_BLOCK_SIZE"]], log)
        tap.ok(wait_for(lambda: probe(decode, metrics, "/ready") == 200), f"{name}: with it it is")
        node = start([f"{BUILD}/kvpick", *main["args"]], log, env)
        tap.ok(wait_for(lambda: serves(main), 30), f"{name}: all probes of kvpick are answered")
        tap.ok(wait_for(lambda: schedulable() == 2), f"{name}: a worker of each role, none without one")
        proxy = Envoy("127.0.0.1:9002")
        ask = json.dumps({"model": env["DYN_MODEL_NAME"], "prompt": "Is anybody there? " * 20, "max_tokens": 4}).encode()
        stream, head, _ = routed(proxy, COMPLETIONS, ask)
        hint = head.set.get("x-prefiller-host-port")
        tap.same((head.destination, hint), (f"{decode}:8000", f"{prefill}:8000"), f"{name}: a request gets both")
        conn = http.client.HTTPConnection(decode, 8000, timeout=20 * SLOW)
        conn.request("POST", "/v1/completions", ask, {"content-type": "application/json", "x-prefiller-host-port": hint})
        answer = conn.getresponse()
        text = answer.read()
        tap.ok(answer.status == 200 and b"choices" in text, f"{name}: the sidecar runs it on both engines", (answer.status, text))
        conn.close()
        stream.reset()
        proxy.close()
        done = subprocess.run([f"{BUILD}/kvpick", "doctor"], env=env, capture_output=True, text=True, timeout=60 * SLOW, check=False)
        tap.ok(done.returncode == 0, f"{name}: kvpick doctor, in the pod, finds nothing that fails", done.stdout)
        bad = {k: v for k, v in asked(stub).items() if not v <= rules(objects).get(k, set())}
        tap.same(bad, {}, f"{name}: the Role allows all that was asked of the API server")
        check = subprocess.run([f"{BUILD}/kvpickctl", "check"], env={k: env[k] for k in ("PATH", "KVPICK_RUN_DIR")},
                               capture_output=True, text=True, timeout=60 * SLOW, check=False)
        tap.ok(check.returncode == 0, f"{name}: kvpickctl check finds nothing", check.stdout + check.stderr)
        tap.same((stop(node), stop(side)), (0, 0), f"{name}: SIGTERM drains both")
        stop(sim)
        stub.close()
        subprocess.run(["umount", "/etc/hosts"], check=True)


def main():
    kubectl = renderer()
    with tempfile.TemporaryFile() as log:
        try:
            gateway, _ = render(kubectl, f"{ROOT}/overlays/gateway")
            replicated, _ = render(kubectl, f"{ROOT}/overlays/replicated")
            one("gateway", gateway, log)
            used = one("replicated", replicated, log)
            for key, verbs in one("gateway, older pools", gateway, log, old=True).items():
                used.setdefault(key, set()).update(verbs)
            tap.same(used, rules(replicated), "no rule of the Role is idle")
            for engine in ("vllm", "sglang", "trtllm"):
                two_roles(engine, render(kubectl, f"{ROOT}/overlays/disagg-{engine}")[0], log)
        finally:
            for proc in processes:
                stop(proc)
            if tap.failed:
                log.seek(0)
                print("# " + log.read()[-12000:].decode("utf-8", "replace").replace("\n", "\n# "))
    return tap.done()


sys.exit(main())
