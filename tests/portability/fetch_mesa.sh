#!/usr/bin/env bash
# Mesa's lavapipe (libvulkan_lvp.so) from Debian's backports into the folder mesa beside this file: Debian 12's own, 22.3,
# has no ray queries, by which the patched wgpu library is tested. `make test-all` runs Dawn on it, too. Lists and package
# go through a folder of their own; no package of the system is touched, and root is not needed. What the library links is
# what Debian 12's mesa-vulkan-drivers depends on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ -e mesa/libvulkan_lvp.so ]; then exit 0; fi
. /etc/os-release
if [ "${VERSION_CODENAME:-}" != bookworm ] || ! command -v apt-get >/dev/null; then
    echo "fetch_mesa.sh: only for Debian 12, this is ${PRETTY_NAME:-unknown}: the tests try the system's own Mesa" >&2
    exit 1
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"/{lists,cache,unpacked}
# From the mirror that the system has for its own packages, signed by Debian.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Release: $VERSION_CODENAME" 'Component: main' |
    sed -n 1p)
[ -n "$mirror" ] || { echo "fetch_mesa.sh: apt has no source of $VERSION_CODENAME main" >&2; exit 1; }
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $VERSION_CODENAME-backports main" \
    >"$folder/sources.list"
options=(
    -qq -o Dir::Etc::SourceList="$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$folder/lists" -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root
    -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20
)
timeout 120 apt-get "${options[@]}" update
(cd "$folder" && timeout 120 apt-get "${options[@]}" download mesa-vulkan-drivers)
dpkg -x "$folder"/mesa-vulkan-drivers_*.deb "$folder/unpacked"
mkdir -p mesa
cp "$folder"/unpacked/usr/lib/*/libvulkan_lvp.so mesa/part
mv mesa/part mesa/libvulkan_lvp.so # whole or not at all
echo "fetch_mesa.sh: lavapipe of $(dpkg-deb -f "$folder"/mesa-vulkan-drivers_*.deb Version)"
