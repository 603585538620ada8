#!/usr/bin/env python3
"""The manifests of deploy/kubernetes: every directory renders, what comes out is what the API takes, refers only to
what is there, and sets only settings that kvpick has, in values that it accepts."""
import copy
import json
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from kube_schema import object_faults
from manifests import ROOT, WORKLOADS, containers, names, of_kind, pod, ports, read, render, renderer, settings_of, yaml
from node import BUILD, Tap

# What discovery asks the API server for, and with replicas besides.
RULES = {("", "pods"): {"list", "watch"}, ("inference.networking.k8s.io", "inferencepools"): {"list", "watch"},
         ("inference.networking.x-k8s.io", "inferencepools"): {"list", "watch"}}
PEER_RULES = {("", "services"): {"get"}, ("discovery.k8s.io", "endpointslices"): {"list", "watch"}}
tap = Tap()


def directories():
    """(what renders, what is a part of others) below ROOT."""
    whole, parts = [], []
    for path, _, files in sorted(os.walk(ROOT)):
        if "kustomization.yaml" in files:
            kind = yaml.safe_load(read(f"{path}/kustomization.yaml"))["kind"]
            (whole if kind == "Kustomization" else parts).append(path)
    return whole, parts


def selected(labels, workloads):
    return [w for w in workloads if labels.items() <= w["spec"]["template"]["metadata"]["labels"].items()]


def references(objects, everywhere):
    """Complaints about names that lead nowhere."""
    bad, own = [], of_kind(objects, *WORKLOADS)
    for w in own:
        name = f"{w['kind']}/{w['metadata']['name']}"
        spec, labels = pod(w), w["spec"]["template"]["metadata"]["labels"]
        if not w["spec"]["selector"].get("matchLabels", {"": ""}).items() <= labels.items():
            bad.append(f"{name}: the selector does not match its own pods")
        for ref, kind in (("serviceAccountName", "ServiceAccount"), ("priorityClassName", "PriorityClass")):
            if spec.get(ref) and spec[ref] not in names(objects, kind):
                bad.append(f"{name}: no {kind} {spec[ref]}")
        volumes = {v["name"] for v in spec.get("volumes", [])}
        used = {m["name"] for c in containers(w) for m in c.get("volumeMounts", [])}
        if volumes != used:
            bad.append(f"{name}: volumes {volumes ^ used} are declared or mounted, not both")
        maps = {v["configMap"]["name"] for v in spec.get("volumes", []) if "configMap" in v}
        maps |= {s["configMapRef"]["name"] for c in containers(w) for s in c.get("envFrom", [])}
        bad += [f"{name}: no ConfigMap {m}" for m in maps - names(objects, "ConfigMap")]
        numbers, named = set(ports(w).values()), set(ports(w))
        if len(numbers) != len([p for c in containers(w) for p in c.get("ports", [])]):
            bad.append(f"{name}: a port or its name twice")
        for c in containers(w):
            for probe in [c[p] for p in ("readinessProbe", "livenessProbe", "startupProbe")
                          if p in c and "exec" not in c[p]]:
                at = probe.get("grpc", probe.get("httpGet"))["port"]
                if at not in numbers | named:
                    bad.append(f"{name}: a probe asks port {at}")
            seen = [e["name"] for e in c.get("env", [])]
            bad += [f"{name}: {e} twice" for e in seen if seen.count(e) > 1]
    for o in of_kind(objects, "Service", "NetworkPolicy", "PodMonitor", "PodDisruptionBudget"):
        name, spec = f"{o['kind']}/{o['metadata']['name']}", o["spec"]
        labels = spec["selector"] if o["kind"] == "Service" else spec.get("selector", spec.get("podSelector"))["matchLabels"]
        pods = selected(labels, own) or selected(labels, everywhere)
        if not pods:
            bad.append(f"{name} selects no pod")
        wanted = [p.get("targetPort", p["port"]) for p in spec.get("ports", [])]
        wanted += [p["port"] for i in spec.get("ingress", []) for p in i.get("ports", [])]
        wanted += [p["port"] for p in spec.get("podMetricsEndpoints", [])]
        for port in wanted:
            for w in pods:
                if port not in ports(w) and port not in ports(w).values():
                    bad.append(f"{name}: its pods of {w['metadata']['name']} have no port {port}")
    for o in of_kind(objects, "RoleBinding"):
        if o["roleRef"]["name"] not in names(objects, "Role"):
            bad.append(f"no Role {o['roleRef']['name']}")
        bad += [f"no account {s['name']}" for s in o["subjects"] if s["name"] not in names(objects, "ServiceAccount")]
    for o in of_kind(objects, "HTTPRoute"):
        pools = {p["metadata"]["name"]: p["spec"]["targetPorts"] for p in of_kind(objects, "InferencePool")}
        for ref in [b for r in o["spec"]["rules"] for b in r["backendRefs"]]:
            if {"number": ref["port"]} not in pools.get(ref["name"], []):
                bad.append(f"route to {ref['name']}:{ref['port']}, which is no pool")
    services = {s["metadata"]["name"]: s["spec"] for s in of_kind(objects, "Service")}
    for o in of_kind(objects, "InferencePool"):
        ref = o["spec"]["endpointPickerRef"]
        # A pool alone (route/) is applied beside the rest.
        if own and ref["port"]["number"] not in [p["port"] for p in services.get(ref["name"], {}).get("ports", [])]:
            bad.append(f"pool {o['metadata']['name']}: its picker {ref} is no Service here")
    return bad


def hardening(objects):
    """Complaints about containers that may do more than they need: those of kvpick's pods, its sidecar in others'."""
    bad = []
    for w in of_kind(objects, *WORKLOADS):
        spec, own = pod(w), w["metadata"]["name"].startswith("kvpick")
        for c in [c for c in containers(w) if own or c["name"] == "kvpick-sidecar"]:
            at = spec["securityContext"] if own else c.get("securityContext", {})
            if not at.get("runAsNonRoot") or "seccompProfile" not in at:
                bad.append(f"{w['metadata']['name']}: runs as root or without a seccomp profile")
            s = c.get("securityContext", {})
            first = c in spec.get("initContainers", [])
            if s.get("allowPrivilegeEscalation") is not False or not s.get("readOnlyRootFilesystem") or \
                    s.get("capabilities", {}).get("drop") != ["ALL"]:
                bad.append(f"{c['name']}: not hardened")
            if not first and (s.get("runAsUser", 1) == 0 or s["capabilities"].get("add")):
                bad.append(f"{c['name']}: runs as root or has capabilities")
            if c["resources"].get("limits", {}).get("memory") != c["resources"]["requests"].get("memory"):
                bad.append(f"{c['name']}: the memory limit is not requested")
            if "cpu" in c["resources"].get("limits", {}):
                bad.append(f"{c['name']}: a limit on CPU throttles")
    return bad


def image_faults(objects):
    version = re.search(r'KVPICK_VERSION "([^"]+)"', read("include/kvpick/version.h")).group(1)
    bad = []
    for image in {c["image"] for w in of_kind(objects, *WORKLOADS) for c in containers(w)}:
        repo, _, tag = image.rpartition(":")
        if not repo or "/" in tag or tag in ("latest", ""):
            bad.append(f"{image}: no tag, or one that moves")
        if repo.endswith("kvpick") and tag != version:
            bad.append(f"{image}: this tree is version {version}")
    return bad


def check_set(path, objects, everywhere):
    """One rendered directory."""
    bad = [f for o in objects for f in object_faults(o)]
    tap.ok(objects and not bad, f"{path}: fields, types and words are those of the API", "\n".join(bad))
    keys = [(o["kind"], o["metadata"]["name"]) for o in objects]
    tap.same(sorted(k for k in set(keys) if keys.count(k) > 1), [], f"{path}: nothing twice")
    for what, bad in (("every name leads somewhere", references(objects, everywhere)),
                      ("containers may do what they need", hardening(objects)),
                      ("images have fixed tags", image_faults(objects))):
        tap.ok(not bad, f"{path}: {what}", "\n".join(bad))


def check_kvpick(path, objects, known):
    """The settings of kvpick's own pods."""
    for w in [w for w in of_kind(objects, *WORKLOADS) if w["metadata"]["name"] == "kvpick"]:
        env = settings_of(objects, w)
        tap.same(sorted(set(env) - known), [], f"{path}: every variable is a setting of kvpick")
        done = subprocess.run([f"{BUILD}/kvpick", "check-config"], env=env, capture_output=True, text=True, check=False)
        tap.ok(done.returncode == 0, f"{path}: kvpick accepts the settings", done.stderr)
        effective = dict(re.findall(r"^(\w+)=(\S*)", done.stdout, re.M))
        main = next(c for c in containers(w) if c["name"] == "kvpick")
        have = ports(w)
        want = {"grpc": 9002, "grpc-health": 9003, "metrics": 9090}
        if "DYN_EPP_PEER_SERVICE" in env:
            want.update({"replica-agg": int(env["DYN_EPP_REPLICA_SYNC_PORT"]),
                         "selection-http": int(env["DYN_EPP_SELECTION_HTTP_PORT"])})
            if env.get("DYN_EPP_TOPOLOGY_MODE") == "disaggregated":
                want.update({"replica-prefill": int(effective["KVPICK_REPLICA_SYNC_PORT_PREFILL"]),
                             "replica-decode": int(effective["KVPICK_REPLICA_SYNC_PORT_DECODE"])})
            peers = next(o["spec"]["ports"] for o in of_kind(objects, "Service")
                         if o["metadata"]["name"] == env["DYN_EPP_PEER_SERVICE"])
            tap.same({p["name"]: p["port"] for p in peers}, {k: v for k, v in want.items() if k[:3] in ("rep", "sel")},
                     f"{path}: the peer Service has the ports of every plane")
            tap.ok(env["DYN_EPP_PEER_SERVICE"] in names(objects, "Service"), f"{path}: the peer Service is there")
        tap.same(have, want, f"{path}: kvpick's ports are those that it is told")
        wait = int(main["lifecycle"]["preStop"]["exec"]["command"][1])
        tap.ok(pod(w)["terminationGracePeriodSeconds"] * 1000 > wait * 1000 + int(effective["KVPICK_DRAIN_TIMEOUT_MS"]),
               f"{path}: the pod may drain before it is killed")
        served = set(re.findall(r'kvp_grpc_health_set\(x->health, "([^"]*)"', read("daemons/extproc/server.c")))
        asked = {main[p]["grpc"]["service"] for p in ("readinessProbe", "livenessProbe", "startupProbe")}
        tap.ok(asked <= served, f"{path}: probes ask for health services that exist", (asked, served))
        pools = names(objects, "InferencePool")
        tap.ok(not pools or pools == {env["DYN_EPP_INFERENCE_POOL_NAME"]}, f"{path}: the pool has the configured name")
        rights = {(g, r): set(rule["verbs"]) for o in of_kind(objects, "Role") for rule in o["rules"]
                  for g in rule["apiGroups"] for r in rule["resources"]}
        peers = PEER_RULES if "DYN_EPP_PEER_SERVICE" in env else {}
        tap.same(rights, {**RULES, **peers}, f"{path}: the rights are what discovery uses, no more")
        check_sockets(path, objects, env)
        check_memory(path, main, env)


def check_memory(path, main, env):
    """The container's limit holds what the capacities take, as kvpick itself says."""
    alone = {**env, "KVPICK_MODE": "both", "KVPICK_RUN_DIR": "/nonexistent", "DYN_EPP_INFERENCE_POOL_NAME": "",
             "DYN_EPP_TOKENIZER_SERVICE_URL": "http://127.0.0.1:1", "DYN_EPP_PEER_SERVICE": ""}
    done = subprocess.run([f"{BUILD}/kvpick", "doctor", "--json"], env=alone, capture_output=True, text=True, timeout=60,
                          check=False)
    said = [f["seen"] for f in json.loads(done.stdout)["findings"] if f["check"] == "memory"]
    found = re.match(r"shared memory takes ([\d.]+) GiB .* up to ([\d.]+) GiB", said[0]) if said else None
    limit = re.fullmatch(r"(\d+)Gi", main["resources"]["limits"]["memory"])
    tap.ok(found and limit and float(found[1]) + float(found[2]) <= float(limit[1]), f"{path}: the limit covers the capacities",
           done.stdout)
    base = re.search(r"base/kvpick.env`\) \| ([\d.]+) GiB", read(f"{ROOT}/README.md"))
    tap.ok(found and base and abs(float(base[1]) - float(found[1])) < 0.06, f"{path}: the README says the same", (said, base))


def check_sockets(path, objects, env):
    """Where kvpick listens on Unix sockets, Envoy's configuration names each of them."""
    listen = env.get("KVPICK_EPP_LISTEN", "")
    if not listen.startswith("unix:"):
        return
    data = next(o["data"]["envoy.yaml"] for o in of_kind(objects, "ConfigMap") if "envoy.yaml" in o["data"])
    envoy, reference = yaml.safe_load(data), yaml.safe_load(read("deploy/envoy/kvpick.yaml"))
    cluster = next(c for c in envoy["static_resources"]["clusters"] if c["name"] == "kvpick")
    pipes = [e["endpoint"]["address"]["pipe"]["path"] for e in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]]
    want = [f"{listen[5:]}.{n}" for n in range(int(env["KVPICK_EXTPROC_PROCESSES"]))]
    tap.same(pipes, want, f"{path}: Envoy knows the socket of every ext_proc process")
    for config in (envoy, reference):
        for c in config["static_resources"]["clusters"]:
            if c["name"] == "kvpick":
                c["load_assignment"]["endpoints"] = []
    tap.same(envoy["static_resources"], reference["static_resources"],
             f"{path}: all else is that of deploy/envoy/kvpick.yaml")
    mounts = [{m["mountPath"] for m in c["volumeMounts"]} for w in of_kind(objects, "DaemonSet")
              for c in pod(w)["containers"]]
    tap.ok(len(mounts) == 2 and all(os.path.dirname(listen[5:]) in m for m in mounts), f"{path}: both mount their directory")
    users = {pod(w)["securityContext"]["runAsUser"] for w in of_kind(objects, "DaemonSet")}
    tap.same(len(users), 1, f"{path}: both are the same user, whose sockets they are")


def check_code():
    """The rights against the code that uses them: each resource is named there, and no other one."""
    folder = "daemons/discovery"
    if not os.path.isdir(folder):
        return
    code = "".join(read(f"{folder}/{f}") for f in sorted(os.listdir(folder)) if f.endswith(".c"))
    named = {r for r in ("pods", "inferencepools", "services", "endpointslices", "secrets", "configmaps", "nodes", "leases")
             if re.search(rf"[/\"]{r}\b", code)}
    if named:  # else this version has its workers from elsewhere
        tap.same(named, {r for _, r in {**RULES, **PEER_RULES}}, "the code asks for the resources of the Role")


def check_engines(rendered):
    """The engines of the examples against kvpick.env and the pool."""
    env = dict(line.split("=", 1) for line in read(f"{ROOT}/base/kvpick.env").splitlines() if line and line[0] != "#")
    pool = of_kind(rendered[f"{ROOT}/route"], "InferencePool")[0]["spec"]
    for engine in ("vllm", "sglang"):
        objects = rendered[f"{ROOT}/engines/{engine}"]
        work = of_kind(objects, "Deployment")[0]
        args = " ".join(pod(work)["containers"][0]["args"])
        size = re.search(r"--(?:block|page)-size=(\d+)", args).group(1)
        tap.same(size, env["DYN_KV_CACHE_BLOCK_SIZE"], f"{engine}: block size as configured")
        events = json.loads(re.search(r"--kv-events-config=(\{.*?\})", args).group(1))
        tap.same((events["endpoint"], events["replay_endpoint"]),
                 (f"tcp://*:{env['DYN_EPP_KV_EVENT_PORT']}", f"tcp://*:{env['DYN_EPP_KV_EVENT_REPLAY_PORT']}"),
                 f"{engine}: ports of events and replay as configured")
        tap.ok(env["DYN_MODEL_NAME"] in args, f"{engine}: model as configured")
        tap.ok(selected(pool["selector"]["matchLabels"], [work]), f"{engine}: the pool selects its pods")
        tap.ok(pool["targetPorts"][0]["number"] == ports(work)["http"], f"{engine}: the pool's port is the engine's")
        url = env["DYN_EPP_TOKENIZER_SERVICE_URL"]
        service = of_kind(objects, "Service")[0]
        tap.same(url, f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}",
                 f"{engine}: the tokenizer service is there")


def flags(container):
    """{flag: value} of a container's arguments of the form --flag=value."""
    return dict(re.findall(r"^--([\w-]+)=(.*)$", "\n".join(container["args"]), re.M))


def check_disagg(engine, objects, known):
    """Prefill and decode engines against kvpick's settings, the pool, the sidecar's settings and the policies."""
    path = f"disagg-{engine}"
    works = {w["metadata"]["name"]: w for w in of_kind(objects, *WORKLOADS)}
    env = settings_of(objects, works["kvpick"])
    pool = of_kind(objects, "InferencePool")[0]["spec"]
    target, label = pool["targetPorts"][0]["number"], env["DYN_EPP_WORKER_ROLE_LABEL"]
    tap.same(env["DYN_EPP_TOPOLOGY_MODE"], "disaggregated", f"{path}: two roles")
    chosen = {w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"].get(label)
              for w in selected(pool["selector"]["matchLabels"], works.values())}
    tap.same(chosen, {"llm-prefill": "prefill", "llm-decode": "decode"}, f"{path}: the pool selects both, each has its role")
    (side,) = [c for c in containers(works["llm-decode"]) if c["name"] == "kvpick-sidecar"]
    (decode,) = [c for c in containers(works["llm-decode"]) if c is not side]
    (prefill,) = containers(works["llm-prefill"])
    own = {e["name"]: e["value"] for e in side["env"]}
    tap.same(sorted(set(own) - known), [], f"{path}: every variable of the sidecar is a setting")
    done = subprocess.run([f"{BUILD}/{side['command'][0]}", "--check-config"], env=own, capture_output=True, text=True, check=False)
    tap.ok(done.returncode == 0, f"{path}: the sidecar accepts them", done.stderr)
    have = dict(re.findall(r"^(\w+)=(\S*)", done.stdout, re.M))
    adapter = {"vllm": "vllm_nixl"}.get(engine, engine)
    tap.same((int(have["DYN_SIDECAR_PORT"]), have["DYN_DECODE_ENGINE_PORT"], have["DYN_SIDECAR_PD_ADAPTER"]),
             (target, flags(decode)["port"], adapter), f"{path}: it listens on the pool's port, before the engine's, in its protocol")
    tap.same(ports(works["llm-decode"])["http"], target, f"{path}: which is the pod's port http")
    tap.same(ports(works["llm-decode"])["sidecar-metrics"], int(have["KVPICK_SIDECAR_METRICS_PORT"]), f"{path}: and its port of metrics")
    tap.same(flags(decode)["host"], "127.0.0.1", f"{path}: nobody else reaches the engine")
    tap.same((int(flags(prefill)["port"]), ports(works["llm-prefill"])["http"]), (target, target),
             f"{path}: a prefill engine listens on the pool's port itself")
    tap.ok("kvpick-sidecar" not in [c["name"] for c in containers(works["llm-prefill"])], f"{path}: without a sidecar")
    tap.same((side["readinessProbe"]["httpGet"]["path"], side["readinessProbe"]["httpGet"]["port"]), ("/ready", "sidecar-metrics"),
             f"{path}: the pod is ready when its engine is")
    asked = [" ".join(decode[p]["exec"]["command"]) for p in ("startupProbe", "readinessProbe")]
    tap.ok(all(f"//127.0.0.1:{flags(decode)['port']}/health" in a for a in asked), f"{path}: and says so itself", asked)
    stop = {c["name"]: int(c["lifecycle"]["preStop"]["exec"]["command"][1]) for c in (side, decode)}
    ends = stop["kvpick-sidecar"] + int(have["DYN_SIDECAR_DRAIN_TIMEOUT_MS"]) / 1000
    tap.ok(ends < stop[decode["name"]] < pod(works["llm-decode"])["terminationGracePeriodSeconds"],
           f"{path}: the engine outlasts the sidecar's drain, the pod both", (ends, stop))
    check_disagg_engine(engine, objects, env, prefill, decode, have)
    service = next(o for o in of_kind(objects, "Service") if o["metadata"]["name"] == "kvpick-render")
    tap.same(env["DYN_EPP_TOKENIZER_SERVICE_URL"], f"http://kvpick-render:{service['spec']['ports'][0]['port']}",
             f"{path}: the tokenizer service is there")
    asked = [w["metadata"]["name"] for w in selected(service["spec"]["selector"], works.values())]
    tap.same(asked, ["llm-render" if engine == "trtllm" else "llm-prefill"], f"{path}: and asks those that can tell")
    callers = {}
    for policy in ("llm-prefill", "llm-decode"):  # by name; those who may call the sidecar's ports are told by the namespace
        rules = next(o["spec"]["ingress"] for o in of_kind(objects, "NetworkPolicy") if o["metadata"]["name"] == policy)
        callers[policy] = [sorted(w["metadata"]["name"] for w in selected(f["podSelector"]["matchLabels"], works.values()))
                           for r in rules if policy == "llm-prefill" or "ports" not in r for f in r["from"]]
    tap.same(callers["llm-prefill"], [["kvpick"], ["llm-decode"]], f"{path}: only kvpick and decode pods may call prefill engines")
    tap.same(callers["llm-decode"], [["llm-prefill"], ["kvpick"]],
             f"{path}: prefill pods reach decode engines, and so does kvpick, for events, where they are asked for")


def check_disagg_engine(engine, objects, env, prefill, decode, sidecar):
    """What each engine needs to be told, and that both roles are told the same."""
    path, size = f"disagg-{engine}", env["DYN_KV_CACHE_BLOCK_SIZE"]
    both = (prefill, decode)
    tap.ok(all(env["DYN_MODEL_NAME"] in " ".join(c["args"]) for c in both) and prefill["image"] == decode["image"],
           f"{path}: one model and one release in both roles")
    if engine == "trtllm":
        options = next(o["data"] for o in of_kind(objects, "ConfigMap") if "decode.yaml" in o["data"])
        of = {}
        for c, role in ((prefill, "prefill"), (decode, "decode")):
            tap.same(os.path.basename(flags(c)["extra_llm_api_options"]), f"{role}.yaml", f"{path}: options of the {role} role")
            of[role] = yaml.safe_load(options[f"{role}.yaml"])
            tap.same(str(of[role]["kv_cache_config"]["tokens_per_block"]), size, f"{path}: block size as configured ({role})")
        tap.same(of["prefill"]["cache_transceiver_config"], of["decode"]["cache_transceiver_config"], f"{path}: one transport")
        tap.same(env["DYN_ROUTER_USE_KV_EVENTS"], "false", f"{path}: no events are waited for")
        return
    option = "block-size" if engine == "vllm" else "page-size"
    tap.same([flags(c)[option] for c in both], [size, size], f"{path}: block size as configured")
    events = json.loads(flags(prefill)["kv-events-config"])
    tap.same((events["endpoint"], events["replay_endpoint"]),
             (f"tcp://*:{env['DYN_EPP_KV_EVENT_PORT']}", f"tcp://*:{env['DYN_EPP_KV_EVENT_REPLAY_PORT']}"),
             f"{path}: prefill engines publish events where kvpick follows them")
    tag = prefill["image"].rpartition(":")[2]
    if engine == "vllm":
        tap.same(sidecar["DYN_VLLM_NIXL_PROTOCOL_VERSION"], f"vllm-{tag}-nixl-pull", f"{path}: the release that the sidecar speaks")
        tap.same(flags(prefill)["kv-transfer-config"], flags(decode)["kv-transfer-config"], f"{path}: one transfer configuration")
        hosts = [e.get("valueFrom") for c in both for e in c["env"] if e["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST"]
        tap.same(hosts, [{"fieldRef": {"fieldPath": "status.podIP"}}] * 2, f"{path}: engines name their pod's address")
    else:
        tap.same("v" + sidecar["KVPICK_SIDECAR_SGLANG_VERSION"], tag, f"{path}: the release that the sidecar speaks")
        tap.same([flags(c)["disaggregation-mode"] for c in both], ["prefill", "decode"], f"{path}: each engine has its role")
        tap.ok(int(flags(prefill)["disaggregation-bootstrap-port"]) in [p["containerPort"] for p in prefill["ports"]],
               f"{path}: the meeting port is there")


def check_commands(everywhere):
    """What containers of kvpick's image start is in the image."""
    wanted = {c.get("command", ["kvpick"])[0] for w in everywhere for c in containers(w)
              if c["image"].rpartition(":")[0].endswith("/kvpick")} - {"chown"}
    removed = set(re.findall(r"/out/usr/bin/(kvpick[\w-]*)", read("Dockerfile")))
    made = subprocess.run(["make", "-n", "install", "DESTDIR=/x"], capture_output=True, text=True, check=False).stdout
    installed = set(re.findall(r"/(kvpick[\w-]*)(?= )", " ".join(re.findall(r"install -m 755 .*", made))))
    tap.ok("kvpick-sidecar" in wanted, "sidecars were looked at", wanted)
    tap.same(sorted(wanted - (installed - removed)), [], "the image has the programs that its containers start")


def check_files(whole, parts):
    """Every file is used by a kustomization, or read on its own."""
    used = set()
    for path in whole + parts:
        k = yaml.safe_load(read(f"{path}/kustomization.yaml"))
        used.add(f"{path}/kustomization.yaml")
        files = [r for r in k.get("resources", [])] + [p["path"] for p in k.get("patches", []) if "path" in p]
        files += [f for g in k.get("configMapGenerator", []) for f in g.get("envs", []) + g.get("files", [])]
        used |= {os.path.normpath(f"{path}/{f}") for f in files}
    have = {os.path.join(p, f) for p, _, fs in os.walk(ROOT) for f in fs}
    tap.same(sorted(have - used - {f"{ROOT}/README.md", f"{ROOT}/seccomp/kvpick.json"}), [], "no file is left over")


def check_validator(objects, disagg):
    """The checks find what they are for: broken copies of a good set."""
    def broken(change, objects=objects):
        copied = copy.deepcopy(objects)
        change({(o["kind"], o["metadata"]["name"]): o for o in copied})
        own = of_kind(copied, *WORKLOADS)
        return [f for o in copied for f in object_faults(o)] + references(copied, own) + hardening(copied) + image_faults(copied)

    tap.same(broken(lambda o: None), [], "a good set has no faults")
    work, service, pool = ("Deployment", "kvpick"), ("Service", "kvpick"), ("InferencePool", "kvpick-pool")
    for what, change in {
            "a misspelled field": lambda o: o[work]["spec"].update(replica=1),
            "a missing field": lambda o: o[pool]["spec"].pop("selector"),
            "a wrong type": lambda o: o[work]["spec"].update(replicas="1"),
            "a selector beside the labels": lambda o: o[service]["spec"]["selector"].update(tier="x"),
            "a port nobody has": lambda o: o[service]["spec"]["ports"][0].update(targetPort="gprc"),
            "a moving tag": lambda o: pod(o[work])["containers"][0].update(image="registry.example.com/kvpick:latest"),
            "an account that is not there": lambda o: pod(o[work]).update(serviceAccountName="root"),
            "a picker that is not there": lambda o: o[pool]["spec"]["endpointPickerRef"].update(name="epp"),
            "a writable root": lambda o: pod(o[work])["containers"][0]["securityContext"].pop("readOnlyRootFilesystem")}.items():
        tap.ok(broken(change), f"the checks see {what}")
    tap.same(broken(lambda o: None, disagg), [], "a good set with two roles has no faults")
    peers = ("Service", "kvpick-peers")

    def side(o):
        return next(c for c in containers(o[("Deployment", "llm-decode")]) if c["name"] == "kvpick-sidecar")
    for what, change in {
            "a sidecar that runs as root": lambda o: side(o)["securityContext"].pop("runAsNonRoot"),
            "a probe of a port that the sidecar has not": lambda o: side(o)["ports"].pop(),
            "a port of replicas that nobody has": lambda o: o[peers]["spec"]["ports"][-1].update(targetPort="replica-decoder"),
            "a policy for nobody": lambda o: o[("NetworkPolicy", "llm-prefill")]["spec"]["podSelector"].update(
                matchLabels={"nvidia.com/role": "encode"})}.items():
        tap.ok(broken(change, disagg), f"the checks see {what}")


def main():
    kubectl = renderer()
    whole, parts = directories()
    rendered = {}
    for path in whole:
        rendered[path], wrong = render(kubectl, path)
        tap.ok(not wrong, f"{path} renders", wrong)
    everywhere = [w for objects in rendered.values() for w in of_kind(objects, *WORKLOADS)]
    table = subprocess.run([f"{BUILD}/kvpick", "help", "settings"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"^\| `([A-Z0-9_]+)`", table, re.M))
    for path, objects in rendered.items():
        check_set(path, objects, everywhere)
        if path.startswith(f"{ROOT}/overlays"):
            check_kvpick(path, objects, known)
    check_engines(rendered)
    for engine in ("vllm", "sglang", "trtllm"):
        check_disagg(engine, rendered[f"{ROOT}/overlays/disagg-{engine}"], known)
    check_commands(everywhere)
    check_files(whole, parts)
    check_code()
    check_validator(rendered[f"{ROOT}/overlays/gateway"], rendered[f"{ROOT}/overlays/disagg-vllm"])
    return tap.done()


sys.exit(main())
