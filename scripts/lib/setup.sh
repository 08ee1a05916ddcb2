# Sourced by everything in scripts/: `setup` brings up .venv with pinned dependencies, `fetch_model NAME` a model.
# Both are idempotent, quick when there is nothing to do, and safe when two scripts run them at once.
#
#   PYTHON=python3.12 scripts/test      another interpreter than the first suitable python3 on PATH
#
# pip's own settings are honoured: offer it an index with CPU builds of torch and it takes those.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"

say() { printf '%s\n' "$*" >&2; }
die() { say "$@"; exit 2; }

# The first interpreter that is new enough: $PYTHON, then python3, then versioned names.
find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer is needed and none is on PATH: install python3, or set PYTHON to one."
}

# Install Debian packages where that is possible; otherwise say what to type.
apt_install() {
  local sudo=""
  [ "$(id -u)" = 0 ] || sudo="sudo "
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "missing: $*. Install it with your package manager (Debian, Ubuntu: ${sudo}apt-get install $*) and run this again."
  fi
  say "installing $* with apt-get"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null 2>&1 ||
    { apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null; } ||
    die "apt-get could not install $*: install it by hand and run this again."
}

# What the environment was built from; a change of any of it builds anew.
environment_stamp() {
  { cat "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/lib/setup.sh"; "$1" -VV; echo "$root"; } |
    sha256sum | cut -d' ' -f1
}

build_environment() {
  local base="$1" torch pip
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    apt_install "$("$base" -c 'import sys; print(f"python3.{sys.version_info[1]}-venv")')"
  "$python" -c 'import pip' 2>/dev/null || "$base" -m venv --clear "$root/.venv"
  torch="$(grep -E '^torch==' "$root/constraints.txt")"
  pip=("$python" -m pip --disable-pip-version-check install --quiet --constraint "$root/constraints.txt")
  say "setting up .venv: about two minutes and 2.7 GB, once"
  # torch first and alone: pip then takes a CPU build where one is offered, and nothing later replaces it.
  "${pip[@]}" "$torch"
  "${pip[@]}" --editable "$root[train,dev,frameworks]"
  # A package of theirs is compiled here: without a C compiler only these are missing.
  "${pip[@]}" --editable "$root[examples]" ||
    say "the extra \"examples\" could not be installed (does this machine have a C compiler?): its tests are skipped"
}

# Bring up .venv; returns at once when it is current. A lock on scripts/ lets one process build and the others wait.
setup() {
  local base stamp
  command -v tmux >/dev/null || apt_install tmux
  base="$(find_python)"
  stamp="$(environment_stamp "$base")"
  if [ "$(cat "$root/.venv/.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  (
    flock 9
    if [ "$(cat "$root/.venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
      rm -f "$root/.venv/.stamp"
      build_environment "$base" 9<&-
      echo "$stamp" >"$root/.venv/.stamp"
    fi
  ) 9<"$root/scripts"
}

fetch_model() { "$python" -m a3r.models_cli get "$1" >/dev/null; }
