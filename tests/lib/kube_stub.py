"""A Kubernetes API server as far as kvpick needs one: TLS with a CA of its own, bearer tokens, lists in pages,
watches with bookmarks, 410, and every way of misbehaving that a test asks for. Its methods are the control API;
it runs in threads of the test."""
import base64
import copy
import http.server
import json
import os
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.parse

KINDS = {"pods": ("v1", "Pod"), "services": ("v1", "Service"),
         "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
         "inferencepools": ("inference.networking.k8s.io/v1", "InferencePool")}
OLD_POOLS = "/apis/inference.networking.x-k8s.io/v1alpha2"


def make_tls(folder):
    """A CA and a server certificate for 127.0.0.1, and a client certificate; paths in a dictionary."""
    at = {n: os.path.join(folder, n) for n in ("ca.crt", "ca.key", "srv.crt", "srv.key", "srv.csr", "srv.ext",
                                              "cli.crt", "cli.key", "cli.csr")}

    def run(*args):
        subprocess.run(["openssl", *args], check=True, capture_output=True)

    def key(path):
        run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)

    key(at["ca.key"])
    run("req", "-x509", "-new", "-key", at["ca.key"], "-subj", "/CN=stub CA", "-days", "2", "-out", at["ca.crt"])
    with open(at["srv.ext"], "w", encoding="ascii") as f:
        f.write("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name, subject, more in (("srv", "/CN=kube", ("-extfile", at["srv.ext"])), ("cli", "/CN=client", ())):
        key(at[name + ".key"])
        run("req", "-new", "-key", at[name + ".key"], "-subj", subject, "-out", at[name + ".csr"])
        run("x509", "-req", "-in", at[name + ".csr"], "-CA", at["ca.crt"], "-CAkey", at["ca.key"], "-CAcreateserial",
            "-days", "2", "-out", at[name + ".crt"], *more)
    return at


class Fault:
    """What happens to the next `times` requests of a kind. status: answered so; cut: the connection ends after
    that many bytes of the answer's body; hang: no answer for so many seconds; drip: seconds between bytes;
    body: sent instead; error: code of an ERROR event at the start of a watch."""

    def __init__(self, match, verb=None, times=1, **what):
        self.match, self.verb, self.times, self.what = match, verb, times, what

    def get(self, name):
        return self.what.get(name)


class Gone(Exception):
    pass


class KubeStub:
    """put, delete, bookmark, ... may be called from any thread."""

    def __init__(self, namespace="ns", token="first", tls=True):
        self.folder = tempfile.TemporaryDirectory(prefix="kvpick-kube-")
        self.account = os.path.join(self.folder.name, "account")
        os.mkdir(self.account)
        self.namespace, self.tls = namespace, tls
        self.lock = threading.Condition(threading.RLock())
        self.rv, self.compacted, self.epoch = 1000, 0, 0
        self.objects = {}   # collection path -> {name: object}
        self.log = []       # (rv, path, type, object); rv None: bytes that all open watches get as they are
        self.faults, self.requests, self.tokens = [], [], {token}
        self.lists_kept = {}
        self.served = {self.path(k) for k in KINDS}
        self.bookmark_s, self.watch_limit_s, self.page_max = None, None, None
        self.open, self.stopped, self.client_cert = set(), False, False
        self.watching = 0
        self.files = make_tls(self.folder.name) if tls else None
        self.write_token(token)
        if tls:
            with open(self.files["ca.crt"], "rb") as f, open(self.account + "/ca.crt", "wb") as to:
                to.write(f.read())
        with open(self.account + "/namespace", "w", encoding="ascii") as f:
            f.write(namespace)
        self.server, self.port = None, 0
        self.start()

    # ---- server ----

    def start(self):
        """Listens; after stop() again on the same port."""
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                stub.serve(self)

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 64

            def get_request(self):
                sock, addr = super().get_request()
                with stub.lock:
                    stub.open.add(sock)
                return sock, addr

            def finish_request(self, request, client_address):
                if stub.tls:
                    request = stub.context.wrap_socket(request, server_side=True)
                    with stub.lock:
                        stub.open.add(request)
                try:
                    super().finish_request(request, client_address)
                finally:
                    request.close()

            def handle_error(self, request, client_address):
                pass

        if self.tls:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(self.files["srv.crt"], self.files["srv.key"])
            if self.client_cert:
                self.context.verify_mode = ssl.CERT_REQUIRED
                self.context.load_verify_locations(self.files["ca.crt"])
        self.stopped = False
        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def cut_all(self):
        """Every connection breaks."""
        with self.lock:
            socks, self.open = self.open, set()
        for s in socks:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except (OSError, ValueError):
                pass

    def stop(self):
        """The server is away: nothing listens, everything that was open breaks."""
        with self.lock:
            self.stopped = True
            self.lock.notify_all()
        self.server.shutdown()
        self.server.server_close()
        self.cut_all()

    def close(self):
        if not self.stopped:
            self.stop()
        self.folder.cleanup()

    @property
    def url(self):
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    # ---- control ----

    def path(self, kind, namespace=None):
        group, _ = KINDS[kind]
        root = "/api/v1" if group == "v1" else f"/apis/{group}"
        return f"{root}/namespaces/{namespace or self.namespace}/{kind}"

    def old_pools(self):
        return f"{OLD_POOLS}/namespaces/{self.namespace}/inferencepools"

    def write_token(self, token):
        tmp = self.account + "/.token"
        with open(tmp, "w", encoding="ascii") as f:
            f.write(token + "\n")
        os.rename(tmp, self.account + "/token")

    def fault(self, match, verb=None, times=1, **what):
        with self.lock:
            self.faults.append(Fault(match, verb, times, **what))

    def no_faults(self):
        with self.lock:
            self.faults = []

    def put(self, kind, obj, at=None):
        """Creates or replaces an object; its resourceVersion."""
        path, obj = at or self.path(kind), copy.deepcopy(obj)
        name = obj["metadata"]["name"]
        with self.lock:
            self.rv += 1
            store = self.objects.setdefault(path, {})
            typ = "MODIFIED" if name in store else "ADDED"
            obj["metadata"].update(resourceVersion=str(self.rv), namespace=self.namespace)
            obj["metadata"].setdefault("uid", f"uid-{self.rv}")
            store[name] = obj
            self.log.append((self.rv, path, typ, obj))
            self.lock.notify_all()
            return self.rv

    def delete(self, kind, name, at=None):
        path = at or self.path(kind)
        with self.lock:
            self.rv += 1
            obj = copy.deepcopy(self.objects[path].pop(name))
            obj["metadata"]["resourceVersion"] = str(self.rv)
            self.log.append((self.rv, path, "DELETED", obj))
            self.lock.notify_all()

    def forget(self, kind, name):
        """Deletes an object without an event, and nobody may watch from before it."""
        with self.lock:
            self.rv += 1
            del self.objects[self.path(kind)][name]
            self.compact()

    def compact(self):
        """Versions up to now are too old to be watched from."""
        with self.lock:
            self.rv += 1
            self.compacted = self.rv
            self.log = []
            self.lists_kept = {}

    def gone_in_stream(self, path):
        """Every watch of a path is told in the stream that its version is too old."""
        self.compact()
        self.send_raw(path, {"type": "ERROR", "object": {"kind": "Status", "status": "Failure", "code": 410,
                                                         "reason": "Expired", "message": "too old"}})

    def send_raw(self, path, line):
        """Sends a line (bytes, or an object as JSON) to all watches of a path, as it is."""
        data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        with self.lock:
            self.log.append((None, path, "RAW", data))
            self.lock.notify_all()

    def bookmark(self, kind, at=None):
        with self.lock:
            path = at or self.path(kind)
            self.send_raw(path, {"type": "BOOKMARK", "object": {"kind": "x", "metadata":
                                                                {"resourceVersion": str(self.rv)}}})

    def seen(self, match="", verb=None):
        """Requests so far: [(verb, path with query)]."""
        with self.lock:
            return [(v, p) for v, p in self.requests if match in p and verb in (None, v)]

    def kubeconfig(self, name="config", **user):
        """Writes one; user: members of the user. Data of the CA inline."""
        with open(self.files["ca.crt"], "rb") as f:
            ca = base64.b64encode(f.read()).decode()
        doc = {"apiVersion": "v1", "kind": "Config", "current-context": "c",
               "contexts": [{"name": "other", "context": {"cluster": "x", "user": "y"}},
                            {"name": "c", "context": {"cluster": "k", "user": "u", "namespace": self.namespace}}],
               "clusters": [{"name": "k", "cluster": {"server": self.url, "certificate-authority-data": ca}}],
               "users": [{"name": "u", "user": user}]}
        path = os.path.join(self.folder.name, name)
        with open(path, "w", encoding="ascii") as f:
            json.dump(doc, f, indent=1)
        return path

    # ---- requests ----

    def take_fault(self, path, verb):
        with self.lock:
            for f in self.faults:
                if f.match in path and f.verb in (None, verb) and f.times:
                    f.times -= 1
                    return f
        return None

    def serve(self, h):
        url = urllib.parse.urlsplit(h.path)
        query = {k: v[0] for k, v in urllib.parse.parse_qs(url.query, keep_blank_values=True).items()}
        parts = url.path.rsplit("/", 1)
        single = url.path not in self.served and parts[0] in self.served
        verb = "watch" if query.get("watch") == "true" else "get" if single else "list"
        with self.lock:
            self.requests.append((verb, h.path))
            token_ok = not self.tokens or h.headers.get("Authorization", "").removeprefix("Bearer ") in self.tokens
        fault = self.take_fault(h.path, verb)
        if fault and fault.get("hang"):
            with self.lock:
                self.lock.wait_for(lambda: self.stopped, fault.get("hang"))
            raise OSError
        if not token_ok:
            return self.refuse(h, 401, "Unauthorized")
        if fault and fault.get("status"):
            return self.refuse(h, fault.get("status"), fault.get("message") or "as asked for",
                               fault.get("headers") or {})
        if fault and fault.get("body") is not None:
            return self.send(h, 200, fault.get("body"), fault)
        if single:
            return self.get_one(h, parts[0], parts[1], fault)
        if url.path not in self.served:
            return self.refuse(h, 404, "the server could not find the requested resource")
        if verb == "watch":
            return self.watch(h, url.path, query, fault)
        return self.list(h, url.path, query, fault)

    def send(self, h, status, body, fault=None, headers=None):
        h.send_response(status)
        h.send_header("Content-Type", "application/json")
        h.send_header("Content-Length", str(len(body)))
        for k, v in (headers or {}).items():
            h.send_header(k, str(v))
        h.end_headers()
        self.write(h, body, fault)

    def write(self, h, data, fault, sent=0):
        """Sends, as slow and as much as the fault allows; bytes sent so far."""
        cut, drip = (fault.get("cut"), fault.get("drip")) if fault else (None, None)
        if cut is not None and sent + len(data) > cut:
            data, end = data[:cut - sent], True
        else:
            end = False
        for i in range(0, len(data), 1 if drip else len(data) or 1):
            h.wfile.write(data[i:i + 1] if drip else data)
            if drip:
                h.wfile.flush()
                time.sleep(drip)  # the slowness that the fault is
        h.wfile.flush()
        if end:
            h.connection.shutdown(socket.SHUT_RDWR)
            h.close_connection = True
            raise OSError
        return sent + len(data)

    def refuse(self, h, status, message, headers=None):
        body = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status,
                           "message": message}).encode()
        self.send(h, status, body, headers=headers)

    def get_one(self, h, path, name, fault):
        with self.lock:
            obj = copy.deepcopy(self.objects.get(path, {}).get(name))
        if obj is None:
            return self.refuse(h, 404, f'"{name}" not found')
        return self.send(h, 200, json.dumps(obj).encode(), fault)

    @staticmethod
    def chosen(obj, query):
        meta = obj["metadata"]
        for part in filter(None, query.get("fieldSelector", "").split(",")):
            key, _, want = part.partition("=")
            if key == "metadata.name" and meta["name"] != want:
                return False
        for part in filter(None, query.get("labelSelector", "").split(",")):
            key, _, want = part.partition("=")
            if meta.get("labels", {}).get(key) != want:
                return False
        return True

    def list(self, h, path, query, fault):
        kind = "InferencePool" if path.endswith("inferencepools") else KINDS[path.rsplit("/", 1)[1]][1]
        limit = int(query.get("limit", "0")) or 1 << 30
        limit = min(limit, self.page_max or limit)
        with self.lock:
            if "continue" in query:
                rv, at = query["continue"].split("/")[1:3]
                if int(rv) not in self.lists_kept:
                    return self.refuse(h, 410, "The provided continue parameter is too old")
                items, at = self.lists_kept[int(rv)], int(at)
            else:
                rv, at = self.rv, 0
                items = [o for _, o in sorted(self.objects.get(path, {}).items()) if self.chosen(o, query)]
                if len(items) > limit:
                    self.lists_kept[rv] = items
        page = items[at:at + limit]
        meta = {"resourceVersion": str(rv)}
        if at + limit < len(items):
            meta["continue"] = f"tok+/{rv}/{at + limit}/=&"
        body = json.dumps({"kind": kind + "List", "apiVersion": "v1", "metadata": meta, "items": page}).encode()
        return self.send(h, 200, body, fault)

    def watch(self, h, path, query, fault):
        rv = int(query.get("resourceVersion") or 0)
        end = time.monotonic() + float(query.get("timeoutSeconds", 300))
        if self.watch_limit_s is not None:
            end = time.monotonic() + self.watch_limit_s
        with self.lock:
            if rv < self.compacted:
                return self.refuse(h, 410, f"too old resource version: {rv}")
            log, old = self.log, len(self.log)  # raw lines up to here were not for this watch
        h.send_response(200)
        h.send_header("Content-Type", "application/json")
        h.send_header("Transfer-Encoding", "chunked")
        h.end_headers()
        h.wfile.flush()
        if fault and fault.get("error"):
            self.chunk(h, json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": fault.get("error"),
                                                                  "message": "as asked for"}}).encode() + b"\n", None)
            self.chunk(h, b"", None)
            return None
        with self.lock:
            self.watching += 1
        try:
            self.stream(h, path, query, fault, rv, log, old, end)
        finally:
            with self.lock:
                self.watching -= 1
        return None

    def stream(self, h, path, query, fault, rv, log, old, end):
        sent, at, marked = 0, 0, time.monotonic()
        while True:
            with self.lock:
                if self.log is not log:
                    log, at, old = self.log, 0, 0
                lines = []
                while at < len(log):
                    ver, where, typ, obj = log[at]
                    at += 1
                    if where != path:
                        continue
                    if ver is None and at > old:
                        lines.append(obj)
                    elif ver is not None and ver > rv and self.chosen(obj, query):
                        lines.append(json.dumps({"type": typ, "object": obj}).encode() + b"\n")
                now = time.monotonic()
                if self.bookmark_s and now - marked > self.bookmark_s:
                    marked = now
                    lines.append(json.dumps({"type": "BOOKMARK", "object": {"metadata": {
                        "resourceVersion": str(self.rv)}}}).encode() + b"\n")
                if not lines:
                    if now > end or self.stopped:
                        break
                    self.lock.wait(0.05)
                    continue
            for line in lines:
                sent = self.chunk(h, line, fault, sent)
        self.chunk(h, b"", None)

    def chunk(self, h, data, fault, sent=0):
        """One chunk; a drip or a cut goes through the chunk, byte by byte."""
        if fault and (fault.get("drip") or fault.get("cut") is not None):
            for i in range(len(data)):
                if fault.get("cut") is not None and sent >= fault.get("cut"):
                    h.connection.shutdown(socket.SHUT_RDWR)
                    raise OSError
                h.wfile.write(b"1\r\n" + data[i:i + 1] + b"\r\n")
                h.wfile.flush()
                sent += 1
                if fault.get("drip"):
                    time.sleep(fault.get("drip"))  # likewise
            return sent
        h.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
        h.wfile.flush()
        return sent + len(data)


# ---- objects ----

def pod(name, ip="10.0.0.1", ready=True, labels=None, annotations=None, deleting=False, created=None,
        **status):
    meta = {"name": name, "labels": dict(labels or {"app": "engine"})}
    if created:
        meta["creationTimestamp"] = created
    if annotations:
        meta["annotations"] = dict(annotations)
    if deleting:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stat = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [{"type": "PodScheduled", "status": "True"},
                           {"type": "Ready", "status": "True" if ready else "False"}]}
    stat.update(status)
    return {"metadata": meta, "spec": {"containers": [{"name": "engine"}]}, "status": stat}


def pool(name="pool", ports=(8000,), labels=None, **spec):
    body = {"selector": {"matchLabels": dict(labels if labels is not None else {"app": "engine"})},
            "targetPorts": [{"number": p} for p in ports],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}}}
    body.update(spec)
    return {"metadata": {"name": name}, "spec": body}


def old_pool(name="pool", port=8000, labels=None):
    return {"metadata": {"name": name},
            "spec": {"selector": dict(labels or {"app": "engine"}), "targetPortNumber": port}}


def endpoint_slice(name, service, endpoints, family="IPv4"):
    """endpoints: (address, conditions or None)."""
    return {"metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}}, "addressType": family,
            "endpoints": [dict({"addresses": [a]}, **({} if c is None else {"conditions": c}))
                          for a, c in endpoints]}
