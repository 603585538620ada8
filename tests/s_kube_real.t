#!/usr/bin/env python3
"""Discovery against a real API server: kube-apiserver and etcd. Skipped where these are not: KVP_KUBE_APISERVER and
KVP_ETCD name them, else they are looked for in build/tools and in PATH. tests/get_apiserver.sh fetches and builds them
(Go and a quarter of an hour). The rights are those of deploy/kubernetes/base/rbac.yaml."""
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from epp import MODEL, Epp, Renderer  # noqa: E402
from kube_stub import make_tls, pool  # noqa: E402
from node import Tap, free_port, skip, wait_for  # noqa: E402


def program(variable, name):
    path = os.environ.get(variable) or shutil.which(name, path="build/tools:" + os.environ.get("PATH", ""))
    if not path or not os.access(path, os.X_OK):
        skip(f"no {name}: neither {variable} nor build/tools nor PATH; tests/get_apiserver.sh makes it")
    return path


APISERVER, ETCD = program("KVP_KUBE_APISERVER", "kube-apiserver"), program("KVP_ETCD", "etcd")
tap = Tap()
NS = "/api/v1/namespaces/kv"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/kv/inferencepools"
CRD = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
       "metadata": {"name": "inferencepools.inference.networking.k8s.io", "annotations": {
           "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api-inference-extension/pull/1173"}},
       "spec": {"group": "inference.networking.k8s.io", "scope": "Namespaced",
                "names": {"plural": "inferencepools", "singular": "inferencepool", "kind": "InferencePool"},
                "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
                    "type": "object", "x-kubernetes-preserve-unknown-fields": True}}}]}}


class Server:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="kvpick-real-")
        self.dir = self.folder.name
        self.files = make_tls(self.dir)
        self.log = open(self.dir + "/log", "wb")
        with open(self.dir + "/tokens", "w", encoding="ascii") as f:
            f.write("admin,admin,1,system:masters\nkvp,system:serviceaccount:kv:kvpick,2\n")
        with open(self.dir + "/token", "w", encoding="ascii") as f:
            f.write("kvp\n")
        self.port, etcd, peer = free_port(), free_port(), free_port()
        at = f"http://127.0.0.1:{etcd}"
        self.etcd = subprocess.Popen([ETCD, "--data-dir", self.dir + "/etcd", "--listen-client-urls", at,
                                      "--advertise-client-urls", at, "--listen-peer-urls",
                                      f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls",
                                      f"http://127.0.0.1:{peer}", "--initial-cluster",
                                      f"default=http://127.0.0.1:{peer}"], stdout=self.log, stderr=self.log)
        self.args = [APISERVER, "--etcd-servers", at, "--secure-port", str(self.port), "--bind-address", "127.0.0.1",
                     "--advertise-address", "127.0.0.1", "--endpoint-reconciler-type", "none", "--tls-cert-file",
                     self.files["srv.crt"], "--tls-private-key-file", self.files["srv.key"], "--client-ca-file",
                     self.files["ca.crt"], "--service-account-issuer", "https://kubernetes.default.svc",
                     "--service-account-key-file", self.files["ca.key"], "--service-account-signing-key-file",
                     self.files["ca.key"], "--token-auth-file", self.dir + "/tokens", "--authorization-mode", "RBAC",
                     "--service-cluster-ip-range", "10.96.0.0/24", "--disable-admission-plugins", "ServiceAccount",
                     "--cert-dir", self.dir]
        self.proc = None
        self.start()

    def start(self):
        self.proc = subprocess.Popen(self.args, stdout=self.log, stderr=self.log)
        if not wait_for(lambda: self.proc.poll() is not None or self.is_up(), 120) or self.proc.poll() is not None:
            self.log.flush()
            with open(self.dir + "/log", encoding="utf-8", errors="replace") as f:
                raise RuntimeError("kube-apiserver does not start\n" + f.read()[-3000:])

    def is_up(self):
        try:
            return self.call("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def stop(self, sig=signal.SIGKILL):
        self.proc.send_signal(sig)
        self.proc.wait()

    def call(self, method, path, body=None, kind="application/json"):
        context = ssl.create_default_context(cafile=self.files["ca.crt"])
        conn = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=30)
        data = body if isinstance(body, (str, bytes, type(None))) else json.dumps(body)
        conn.request(method, path, data, {"Authorization": "Bearer admin", "Content-Type": kind})
        reply = conn.getresponse()
        text = reply.read().decode()
        conn.close()
        return reply.status, text

    def must(self, *args, **kw):
        status, text = self.call(*args, **kw)
        if status not in (200, 201):
            raise RuntimeError(f"{args[:2]}: {status} {text[:500]}")
        return json.loads(text)

    def pod(self, name, ip, ready=True, labels=None, node=None):
        """Makes a pod, if there is none, and has it ready or not."""
        spec = {"containers": [{"name": "engine", "image": "engine"}], **({"nodeName": node} if node else {})}
        if self.call("GET", f"{NS}/pods/{name}")[0] == 404:
            self.must("POST", f"{NS}/pods", {"metadata": {"name": name, "labels": labels or {"app": "engine"}},
                                             "spec": spec})
        self.must("PATCH", f"{NS}/pods/{name}/status", {"status": {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}},
            kind="application/merge-patch+json")

    def kubeconfig(self):
        doc = {"apiVersion": "v1", "kind": "Config", "current-context": "c",
               "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
               "clusters": [{"name": "k", "cluster": {"server": f"https://127.0.0.1:{self.port}",
                                                      "certificate-authority": "ca.crt"}}],
               "users": [{"name": "u", "user": {"tokenFile": "token"}}]}
        with open(self.dir + "/config", "w", encoding="ascii") as f:
            json.dump(doc, f)
        return self.dir + "/config"

    def close(self):
        self.stop()
        self.etcd.kill()
        self.etcd.wait()
        self.log.close()
        self.folder.cleanup()


def prepare(api):
    api.must("POST", "/api/v1/namespaces", {"metadata": {"name": "kv"}})
    api.must("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", CRD)
    wait_for(lambda: api.call("GET", POOLS)[0] == 200, 30)
    kinds = {"Role": "roles", "RoleBinding": "rolebindings", "ServiceAccount": None}
    with open("deploy/kubernetes/base/rbac.yaml", encoding="utf-8") as f:
        for doc in f.read().split("\n---\n"):
            kind = next(line.split()[1] for line in doc.splitlines() if line.startswith("kind:"))
            if kinds[kind]:
                api.must("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/kv/{kinds[kind]}", doc,
                         kind="application/yaml")
            else:
                api.must("POST", f"{NS}/serviceaccounts", doc, kind="application/yaml")
    # The account of a binding without a namespace is that of the binding's own: named here, as kustomize does.
    binding = api.must("GET", "/apis/rbac.authorization.k8s.io/v1/namespaces/kv/rolebindings")["items"][0]
    for s in binding["subjects"]:
        s["namespace"] = "kv"
    api.must("PUT", f"/apis/rbac.authorization.k8s.io/v1/namespaces/kv/rolebindings/{binding['metadata']['name']}",
             binding)
    doc = pool()
    doc.update(apiVersion="inference.networking.k8s.io/v1", kind="InferencePool")
    api.must("POST", POOLS, doc)


def endpoints(node):
    return sorted(w["endpoint"][7:] for w in node.call("GET", "/workers")[1] if w["lifecycle"] == "schedulable")


def becomes(node, *want, name, seconds=15):
    tap.ok(wait_for(lambda: endpoints(node) == sorted(want), seconds), name, f"{endpoints(node)}\n{want}")


def metric(node, name):
    return sum(float(line.split()[-1]) for line in node.call("GET", "/metrics")[1].splitlines()
               if line.startswith(f"kvpick_{name} "))


def run(api, node):
    becomes(node, "10.0.0.1:8000", "10.0.0.2:8000", name="ready pods are workers, with the rights of the manifests")
    tap.ok("trouble=forbidden" not in node.log_text(), "nothing is forbidden", node.log_text()[-2000:])
    api.pod("c", "10.0.0.3", ready=False)
    api.pod("b", "10.0.0.2", ready=False)
    becomes(node, "10.0.0.1:8000", name="one that is not ready")
    api.pod("b", "10.0.0.2")
    api.pod("c", "10.0.0.3")
    becomes(node, "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", name="and is")
    api.must("DELETE", f"{NS}/pods/a")
    becomes(node, "10.0.0.2:8000", "10.0.0.3:8000", name="one that is being deleted, though it is still there and ready")
    tap.ok(json.loads(api.call("GET", f"{NS}/pods/a")[1])["metadata"].get("deletionTimestamp"), "as it is")
    api.must("PATCH", f"{NS}/pods/c", {"metadata": {"labels": {"app": "x"}}}, kind="application/merge-patch+json")
    becomes(node, "10.0.0.2:8000", name="another label")
    api.must("PATCH", f"{POOLS}/pool", {"spec": {"targetPorts": [{"number": 9000}]}},
             kind="application/merge-patch+json")
    becomes(node, "10.0.0.2:9000", name="another port of the pool")
    api.must("DELETE", f"{POOLS}/pool")
    becomes(node, name="the pool is deleted: nobody")
    doc = pool()
    doc.update(apiVersion="inference.networking.k8s.io/v1", kind="InferencePool")
    api.must("POST", POOLS, doc)
    becomes(node, "10.0.0.2:8000", name="and made again")


def pages(api, node):
    for i in range(40):
        api.pod(f"p{i}", f"10.1.0.{i}")
    want = ["10.0.0.2:8000"] + [f"10.1.0.{i}:8000" for i in range(40)]
    becomes(node, *want, name="forty more", seconds=30)
    return want


def away(api, node, want):
    lists = metric(node, "discovery_kube_lists_total")
    api.stop()
    time.sleep(1)
    tap.same(endpoints(node), sorted(want), "the API server is killed: nothing changes")
    api.start()
    api.pod("p0", "10.1.0.0", ready=False)
    api.must("DELETE", f"{NS}/pods/p1?gracePeriodSeconds=0")
    want = [w for w in want if w not in ("10.1.0.0:8000", "10.1.0.1:8000")]
    becomes(node, *want, name="it is back: converged", seconds=60)
    tap.ok(wait_for(lambda: metric(node, "discovery_kube_watching") == 2, 30), "both watches are open again")
    print(f"# lists: {lists} before, {metric(node, 'discovery_kube_lists_total')} after")
    return want


def too_old(api, node, want):
    """The process sleeps while the server forgets where it was."""
    pid, = node.children()["kvpick-discovery"]
    gone = metric(node, "discovery_kube_gone_total")
    os.kill(pid, signal.SIGSTOP)
    api.stop()
    rev = None
    api.start()
    for i in range(3):
        api.pod("p2", "10.1.0.2", ready=bool(i % 2))
    rev = json.loads(api.call("GET", f"{NS}/pods")[1])["metadata"]["resourceVersion"]
    compact(api, int(rev))
    api.stop()
    api.start()
    os.kill(pid, signal.SIGCONT)
    want = [w for w in want if w != "10.1.0.2:8000"]
    becomes(node, *want, name="a version that the server has forgotten: listed anew", seconds=60)
    tap.ok(metric(node, "discovery_kube_gone_total") > gone, "410, as counted",
           metric(node, "discovery_kube_gone_total"))
    return want


def compact(api, revision):
    """etcd forgets everything before a revision; its JSON gateway does without a client."""
    at = api.args[api.args.index("--etcd-servers") + 1].removeprefix("http://")
    host, port = at.split(":")
    conn = http.client.HTTPConnection(host, int(port), timeout=20)
    conn.request("POST", "/v3/kv/compaction", json.dumps({"revision": str(revision), "physical": True}))
    reply = conn.getresponse()
    reply.read()
    conn.close()
    if reply.status != 200:
        raise RuntimeError(f"compaction: {reply.status}")


def main():
    api = Server()
    renderer = Renderer()
    try:
        version = json.loads(api.call("GET", "/version")[1])["gitVersion"]
        print(f"# kube-apiserver {version}")
        prepare(api)
        api.pod("a", "10.0.0.1", node="n1")
        api.pod("b", "10.0.0.2")
        node = Epp(renderer, env={"KUBECONFIG": api.kubeconfig(), "POD_NAMESPACE": "kv",
                                  "DYN_EPP_INFERENCE_POOL_NAME": "pool", "DYN_KV_CACHE_BLOCK_SIZE": "4",
                                  "DYN_MODEL_NAME": MODEL, "DYN_ROUTER_USE_KV_EVENTS": "false"})
        for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
            node.env.pop(name, None)
        with node:
            run(api, node)
            want = pages(api, node)
            want = away(api, node, want)
            too_old(api, node, want)
            tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
            tap.same(node.stop(), 0, "the node stops with exit code 0")
    finally:
        api.close()
    return tap.done()


sys.exit(main())
