#!/bin/sh
# Makes build/tools/kube-apiserver (from the Go module proxy, a quarter of an hour) and build/tools/etcd (from the
# Debian package etcd-server) for tests/s_kube_real.t. Needs Go 1.24 or newer.
set -eu
version=${KUBERNETES_VERSION:-1.34.1}
tools=$(pwd)/build/tools
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir -p "$tools"
cd "$work"
if [ ! -x "$tools/etcd" ]; then
	apt-get download etcd-server
	dpkg -x etcd-server*.deb etcd
	cp etcd/usr/bin/etcd "$tools/"
fi
[ ! -x "$tools/kube-apiserver" ] || exit 0
cat >main.go <<'GO'
package main

import (
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	os.Exit(cli.Run(app.NewAPIServerCommand()))
}
GO
# Modules that Kubernetes keeps in its own tree have version 0 there; published they have its minor and patch.
export GOMODCACHE="$work/mod" GOCACHE="$work/cache" GOFLAGS=-mod=mod
printf 'module apiserver\n\ngo 1.24.0\n' >go.mod
own=$(go mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
{
	printf 'module apiserver\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v%s\n\n' "$version"
	sed -n "s|^\t\(k8s.io/[^ ]*\) v0\.0\.0\$|replace \1 => \1 v0.${version#1.}|p" "$own"
} >go.mod
nice go build -trimpath -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$version" -o "$tools/kube-apiserver" .
