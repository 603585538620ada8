#!/bin/sh
# The Debian packages of kvpick, in one table, and their installation. Says what it installs; does nothing,
# silently, when all are there.
#
#   deploy/deps.sh                 to build and to test (what `make` asks for)
#   deploy/deps.sh build           to build only
#   deploy/deps.sh runtime         to run what was built (the container image)
#   deploy/deps.sh list WHAT       prints the packages of all, build or runtime
set -eu
build="gcc g++ make pkg-config libc6-dev libck-dev liburing-dev libzmq3-dev libmsgpack-dev
libsimdjson-dev libhttp-parser-dev libxxhash-dev libyaml-dev libyajl-dev libgrpc-dev libabsl-dev
libprotobuf-c-dev protobuf-c-compiler libssl-dev libcurl4-openssl-dev"
test="perl python3 python3-venv openssl curl python3-grpcio python3-yaml iproute2 systemd"
runtime="libc6 libstdc++6 liburing2 libzmq5 libsimdjson14 libhttp-parser2.9 libxxhash0 libyaml-0-2 libyajl2
libgrpc29 libabsl20220623 libprotobuf-c1 libssl3 libcurl4"

list=""
if [ "${1:-}" = list ]; then
	list=yes
	shift
fi
case "${1:-all}" in
all) need="$build $test" ;;
build) need=$build ;;
runtime) need=$runtime ;;
*)
	echo "deps.sh: all, build or runtime; not '$1'" >&2
	exit 2
	;;
esac
if [ -n "$list" ]; then
	# shellcheck disable=SC2086
	printf '%s\n' $need
	exit 0
fi

missing=""
for p in $need; do
	dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -n "$missing" ] || exit 0
sudo=""
if [ "$(id -u)" -ne 0 ]; then
	sudo=$(command -v sudo) || {
		echo "kvpick needs these packages, and this is neither root nor sudo:$missing" >&2
		exit 69
	}
fi
echo "kvpick: installing Debian packages:$missing"
$sudo env DEBIAN_FRONTEND=noninteractive apt-get update -qq
# shellcheck disable=SC2086
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
