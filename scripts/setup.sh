# Sourced by the other scripts: makes .venv with qkit in it, and the backends' environments.
# `setup` for use, `setup dev` with the tools for tests.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${QKIT_VENV:-$root/.venv}

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
      2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: qkit needs Python 3.11, 3.12 or 3.13 with the venv module; set PYTHON to one" >&2
  exit 2
}

setup() {
  local accelerator=${QKIT_ACCELERATOR:-cpu}
  if [ ! -x "$venv/bin/uv" ]; then
    "$(find_python)" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
  fi
  local group=()
  [ "${1:-}" = dev ] && group=(--group dev)
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" \
    ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} --editable "$root" "${group[@]}"
  # The tests also run the other backends that work on a CPU.
  local backends=(quantize serve)
  [ "${1:-}" = dev ] && backends+=(autoawq gptqmodel)
  "$venv/bin/qkit" env create "${backends[@]}" --accelerator "$accelerator"
}
