#!/usr/bin/env bash
# kube_apiserver.sh FOLDER: build kube-apiserver from Debian's sources into FOLDER, if it is not there.
#
# Takes the network once (34 MB, and Go), 3 GB meanwhile, and 10 minutes on two cores. Installs Debian
# packages, so it runs as root, on Debian 12.
set -euo pipefail
folder=$1
if [ -x "$folder/kube-apiserver" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! grep -q bookworm /etc/os-release; then
    echo "kube-apiserver is built from Debian 12's sources, as root; or name one: HOLDFAST_TEST_KUBERNETES"
    exit 1
fi
mkdir -p "$folder"
work=$(mktemp -d "$folder/build.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
mkdir -p parts lists/partial
for file in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
    if [ -f "$file" ]; then sed 's/^Types: deb$/Types: deb-src/; s/^deb /deb-src /' "$file" > "parts/src.${file##*.}"; fi
done
sources=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/parts" -o "Dir::State::lists=$work/lists")
apt-get "${sources[@]}" -qq update
apt-get "${sources[@]}" -qq source --download-only kubernetes
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
    golang-go golang-github-modern-go-reflect2-dev rsync jq etcd-server dpkg-dev make
dpkg-source --no-check -x kubernetes_*.dsc source
cd source
rm -r vendor/github.com/modern-go/reflect2  # crashes under Go 1.18 and later
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/reflect2
GOPATH=$work/gopath GOCACHE=$work/gocache GO111MODULE=off GOFLAGS='' make WHAT=cmd/kube-apiserver
mv _output/local/go/bin/kube-apiserver "$folder/kube-apiserver"
