#!/bin/sh
# Installs the Debian packages that building and testing kvpick needs, and says so. Does nothing, silently,
# when all are there.
set -eu
need="gcc g++ make pkg-config perl python3 libc6-dev libck-dev liburing-dev libzmq3-dev libmsgpack-dev
libsimdjson-dev libhttp-parser-dev libxxhash-dev libyaml-dev libyajl-dev libgrpc-dev libprotobuf-c-dev
protobuf-c-compiler libssl-dev libcurl4-openssl-dev openssl python3-grpcio python3-yaml"
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
