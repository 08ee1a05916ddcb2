#!/usr/bin/env bash
# Remakes constraints.txt from a fresh environment: the newest versions that pyproject.toml allows. Takes minutes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
"$(find_python)" -m venv "$fresh"
pip=("$fresh/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet "$(grep -E '^torch==' "$root/constraints.txt")"
"${pip[@]}" install --quiet --editable "$root[train,dev,frameworks,examples]"
frozen="$("${pip[@]}" freeze --exclude-editable | sed -E 's/\+[A-Za-z0-9.]+$//')"
{ grep '^#' "$root/constraints.txt"; echo "$frozen"; } >"$fresh/constraints.txt"
cp "$fresh/constraints.txt" "$root/constraints.txt"
say "constraints.txt: $(grep -vc '^#' "$root/constraints.txt") packages"
