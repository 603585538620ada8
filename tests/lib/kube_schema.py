"""What the API documentation says about the kinds in deploy/kubernetes: their fields, types and which must be there.
Only fields that the manifests may use are listed, so that a misspelled one is found.

A schema is a type, a tuple of types, a list of one schema, or a dict of fields; a field with '!' is required, '*'
stands for any name."""

IOS = (int, str)  # "int or string"
NAME = {"name!": str}
PORT_REF = {"number!": int}
LABELS = {"*": str}
SELECTOR = {"matchLabels": LABELS}
KEY_REF = {"name!": str, "key!": str, "optional": bool}
ENV = {"name!": str, "value": str,
       "valueFrom": {"fieldRef": {"fieldPath!": str}, "secretKeyRef": KEY_REF, "configMapKeyRef": KEY_REF}}
PROBE_TIMES = {"initialDelaySeconds": int, "periodSeconds": int, "timeoutSeconds": int, "failureThreshold": int,
               "successThreshold": int}
PROBE = {**PROBE_TIMES, "exec": {"command!": [str]}, "grpc": {"port!": int, "service": str},
         "httpGet": {"path": str, "port!": IOS, "scheme": str}}
SECCOMP = {"type!": str, "localhostProfile": str}
CONTAINER = {
    "name!": str, "image!": str, "command": [str], "args": [str], "env": [ENV],
    "envFrom": [{"configMapRef": NAME, "secretRef": NAME}],
    "ports": [{"name": str, "containerPort!": int, "protocol": str}],
    "readinessProbe": PROBE, "livenessProbe": PROBE, "startupProbe": PROBE,
    "lifecycle": {"preStop": {"exec": {"command!": [str]}}},
    "resources": {"requests": {"*": str}, "limits": {"*": str}},
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "runAsGroup": int, "allowPrivilegeEscalation": bool,
                        "readOnlyRootFilesystem": bool, "capabilities": {"add": [str], "drop": [str]},
                        "seccompProfile": SECCOMP},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
POD = {
    "serviceAccountName": str, "automountServiceAccountToken": bool, "priorityClassName": str,
    "terminationGracePeriodSeconds": int, "nodeSelector": LABELS,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "runAsGroup": int, "fsGroup": int,
                        "seccompProfile": SECCOMP},
    "topologySpreadConstraints": [{"maxSkew!": int, "topologyKey!": str, "whenUnsatisfiable!": str,
                                   "labelSelector": SELECTOR}],
    "initContainers": [CONTAINER], "containers!": [CONTAINER],
    "volumes": [{"name!": str, "emptyDir": {"medium": str, "sizeLimit": str},
                 "hostPath": {"path!": str, "type": str}, "configMap": NAME}],
}
META = {"name!": str, "labels": LABELS, "annotations": LABELS, "namespace": str}
TEMPLATE = {"metadata!": {"labels!": LABELS}, "spec!": POD}
ROLLING = {"type": str, "rollingUpdate": {"maxSurge": IOS, "maxUnavailable": IOS}}
PEER = {"podSelector": SELECTOR, "namespaceSelector": SELECTOR}
KINDS = {
    ("v1", "ServiceAccount"): {},
    ("v1", "ConfigMap"): {"data": {"*": str}},
    ("v1", "Service"): {"spec!": {
        "clusterIP": str, "publishNotReadyAddresses": bool, "internalTrafficPolicy": str, "selector!": LABELS,
        "ports!": [{"name!": str, "port!": int, "targetPort": IOS, "protocol": str, "appProtocol": str}]}},
    ("apps/v1", "Deployment"): {"spec!": {"replicas": int, "strategy": ROLLING, "selector!": SELECTOR,
                                          "template!": TEMPLATE}},
    ("apps/v1", "DaemonSet"): {"spec!": {"updateStrategy": ROLLING, "selector!": SELECTOR, "template!": TEMPLATE}},
    ("policy/v1", "PodDisruptionBudget"): {"spec!": {"maxUnavailable": IOS, "minAvailable": IOS,
                                                     "selector!": SELECTOR}},
    ("rbac.authorization.k8s.io/v1", "Role"): {"rules!": [{"apiGroups!": [str], "resources!": [str],
                                                           "verbs!": [str], "resourceNames": [str]}]},
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): {
        "roleRef!": {"apiGroup!": str, "kind!": str, "name!": str},
        "subjects!": [{"kind!": str, "name!": str, "namespace": str, "apiGroup": str}]},
    ("networking.k8s.io/v1", "NetworkPolicy"): {"spec!": {
        "podSelector!": SELECTOR, "policyTypes": [str],
        "ingress": [{"from": [PEER], "ports": [{"port": IOS, "protocol": str, "endPort": int}]}]}},
    ("scheduling.k8s.io/v1", "PriorityClass"): {"value!": int, "globalDefault": bool, "preemptionPolicy": str,
                                                "description": str},
    ("inference.networking.k8s.io/v1", "InferencePool"): {"spec!": {
        "selector!": {"matchLabels!": LABELS}, "targetPorts!": [PORT_REF],
        "endpointPickerRef!": {"group": str, "kind": str, "name!": str, "port": PORT_REF, "failureMode": str}}},
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {"spec!": {
        "hostnames": [str],
        "parentRefs": [{"group": str, "kind": str, "name!": str, "namespace": str, "sectionName": str, "port": int}],
        "rules": [{"matches": [{"path": {"type": str, "value": str}}],
                   "backendRefs": [{"group": str, "kind": str, "name!": str, "namespace": str, "port": int,
                                    "weight": int}],
                   "timeouts": {"request": str, "backendRequest": str}}]}},
    ("monitoring.coreos.com/v1", "PodMonitor"): {"spec!": {
        "selector!": SELECTOR, "podMetricsEndpoints": [{"port": str, "path": str, "interval": str, "scheme": str}]}},
}
# Words that the API takes.
WORDS = {"failureMode": {"FailClose", "FailOpen"}, "protocol": {"TCP", "UDP", "SCTP"},
         "internalTrafficPolicy": {"Local", "Cluster"}, "whenUnsatisfiable": {"ScheduleAnyway", "DoNotSchedule"},
         "preemptionPolicy": {"PreemptLowerPriority", "Never"}, "medium": {"", "Memory"}}


def faults(value, schema, path):
    """Complaints about a value: missing, unknown and wrong fields."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{path}: not a mapping"]
        out = []
        known = {k.rstrip("!"): v for k, v in schema.items()}
        out += [f"{path}.{k[:-1]} is missing" for k in schema if k.endswith("!") and k[:-1] not in value]
        for k, v in value.items():
            if k not in known and "*" not in known:
                out.append(f"{path}.{k} is no field of it")
            else:
                out += faults(v, known.get(k, known.get("*")), f"{path}.{k}")
                if k in WORDS and v not in WORDS[k]:
                    out.append(f"{path}.{k}: {v!r} is none of {sorted(WORDS[k])}")
        return out
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{path}: not a list with members"]
        return [f for i, v in enumerate(value) for f in faults(v, schema[0], f"{path}[{i}]")]
    types = schema if isinstance(schema, tuple) else (schema,)
    good = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    return [] if good else [f"{path}: {value!r} is not {' or '.join(t.__name__ for t in types)}"]


def object_faults(obj):
    kind = (obj.get("apiVersion"), obj.get("kind"))
    if kind not in KINDS:
        return [f"{kind}: not one of the kinds known"]
    name = f"{kind[1]}/{obj.get('metadata', {}).get('name')}"
    return faults(obj, {"apiVersion!": str, "kind!": str, "metadata!": META, **KINDS[kind]}, name)
