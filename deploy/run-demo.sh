#!/bin/bash
# The demonstration behind `make run`: a node, two sets of eight simulated engines, one trace replayed under kvpick
# and under round-robin at once, a table, a check of the region, and everything stopped again.
#
# KVP_BUILD_DIR  programs, default build/release
# TRACE          trace in the Mooncake format, default bench/load/trace_small.jsonl
# SCALE          virtual seconds a second, default 12, with another trace 30
# POLICY         selection policy of the node, default reference
# LOAD_ARGS      more arguments for kvpick-load, such as --limit 500 or --json
set -euo pipefail
cd "$(dirname "$0")/.."
build=${KVP_BUILD_DIR:-build/release}
small=bench/load/trace_small.jsonl
trace=${TRACE:-$small}
if [ "$trace" = "$small" ]; then scale=${SCALE:-12}; else scale=${SCALE:-30}; fi
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvpick-run.XXXXXX")
pids=()

stop() { # pid: ask, wait, insist
	local pid=$1 i
	kill -TERM "$pid" 2>/dev/null || return 0
	for ((i = 0; i < 100; i++)); do
		kill -0 "$pid" 2>/dev/null || break
		sleep 0.1
	done
	kill -KILL "$pid" 2>/dev/null || true
	wait "$pid" 2>/dev/null || true
}
finish() {
	local code=$?
	trap - EXIT INT TERM
	local i
	for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
		stop "${pids[i]}"
	done
	if [ "$code" -ne 0 ] && [ -s "$dir/node.log" ]; then
		echo "--- last lines of the node's log ---" >&2
		tail -n 20 "$dir/node.log" >&2
	fi
	rm -rf "$dir"
	exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

wait_line() { # file, line start, pid: until the line is there
	local i
	for ((i = 0; i < 300; i++)); do
		grep -q "^$2" "$1" 2>/dev/null && return 0
		kill -0 "$3" 2>/dev/null || break
		sleep 0.1
	done
	echo "run-demo: no '$2' in $1" >&2
	return 1
}

port=$(python3 deploy/free_port.py 1)
echo "starting a node on port $port and 2 x 8 engines at $scale times real time"
env -i PATH="$PATH" "$build/kvpick" run --run-dir "$dir" --instance demo --port "$port" --bind 127.0.0.1 \
	--selection-policy "${POLICY:-reference}" \
	--max-ranks 256 --index-ranks 64 --max-blocks 1000000 --max-reservations 16384 >"$dir/node.log" 2>&1 &
pids+=($!)
"$build/kvpick-sim" --engines 8 --time-scale "$scale" --die-with-parent >"$dir/kv.engines" &
pids+=($!)
wait_line "$dir/kv.engines" ready $!
"$build/kvpick-sim" --engines 8 --time-scale "$scale" --kv-events off --die-with-parent >"$dir/rr.engines" &
pids+=($!)
wait_line "$dir/rr.engines" ready $!

echo "look at it meanwhile: $build/kvpickctl --run-dir $dir --instance demo top"
# shellcheck disable=SC2086
"$build/kvpick-load" --trace "$trace" --time-scale "$scale" --compare kv,round-robin --base "http://127.0.0.1:$port" \
	--register --engines "@$dir/kv.engines" --engines "@$dir/rr.engines" ${LOAD_ARGS:-}
echo "kvpickctl check:"
"$build/kvpickctl" --run-dir "$dir" --instance demo check
