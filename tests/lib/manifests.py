"""The manifests of deploy/kubernetes, rendered: for tests that read them and for tests that live by them."""
import os
import re
import shutil
import subprocess
import sys

from node import skip

try:
    import yaml
except ImportError:
    SYSTEM = "/usr/bin/python3"
    if os.path.realpath(sys.executable) == os.path.realpath(SYSTEM) or subprocess.run(
            [SYSTEM, "-c", "import yaml"], capture_output=True, check=False).returncode:
        skip("python3-yaml is not installed")
    os.execv(SYSTEM, [SYSTEM, *sys.argv])

ROOT = "deploy/kubernetes"
WORKLOADS = ("Deployment", "DaemonSet")


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def renderer():
    kubectl = os.environ.get("KUBECTL") or shutil.which("kubectl")
    if not kubectl:
        skip("no kubectl 1.25 or newer: neither KUBECTL nor PATH (the one of Debian 12 is older)")
    said = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True, check=False).stdout
    # Components and labels came with the kustomize of kubectl 1.25; Debian's is 1.20.
    found = re.search(r"Kustomize Version: v(\d+)\.", said)
    if not found or int(found.group(1)) < 5:
        skip(f"{kubectl} is too old: it does not render components (1.25 and newer do)")
    return kubectl


def of_kind(objects, *kinds):
    return [o for o in objects if o["kind"] in kinds]


def names(objects, kind):
    return {o["metadata"]["name"] for o in of_kind(objects, kind)}


def pod(workload):
    return workload["spec"]["template"]["spec"]


def containers(workload):
    return pod(workload).get("initContainers", []) + pod(workload)["containers"]


def ports(workload):
    """{name: number} of the ports of a workload's containers."""
    return {p["name"]: p["containerPort"] for c in containers(workload) for p in c.get("ports", [])}


def settings_of(objects, workload):
    """The environment of kvpick's container, with values for what the platform fills in."""
    env = {}
    main = next(c for c in containers(workload) if c["name"] == "kvpick")
    for source in main.get("envFrom", []):
        for o in of_kind(objects, "ConfigMap"):
            if o["metadata"]["name"] == source["configMapRef"]["name"]:
                env.update(o["data"])
    for e in main.get("env", []):
        env[e["name"]] = e.get("value", {"POD_IP": "10.1.2.3"}.get(e["name"], "llm"))
    return env


def render(kubectl, path):
    """(objects, what kubectl complained about)."""
    done = subprocess.run([kubectl, "kustomize", path], capture_output=True, text=True, timeout=60, check=False)
    return [o for o in yaml.safe_load_all(done.stdout) if o], done.stderr or (done.returncode and "no reason given")
