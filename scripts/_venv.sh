# Sourced by the other scripts: `venv DIR SPEC` makes a virtual environment and installs qrun into it
# with pip's SPEC (".[cpu]", "-e .[cpu,test]"). Does nothing if what it installed last is unchanged,
# so that a second run needs no network and takes no time. Leaves the shell in the repository root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}

venv() {
  local dir=$1 spec=$2 stamp
  # An editable install sees changes of Python by itself: there only what is compiled counts.
  local sources="pyproject.toml kernels qrun models"
  [[ $spec == -e* ]] && sources="pyproject.toml $(find kernels -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt')"
  stamp=$({ echo "$spec"; "$PYTHON" --version; find $sources -type f ! -name '*.pyc' ! -name '*.so' \
    -print0 | LC_ALL=C sort -z | xargs -0 cat; } | cksum)
  if [[ -x $dir/bin/python && $(cat "$dir/qrun.stamp" 2>/dev/null) == "$stamp" ]]; then return; fi
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "qrun needs Python 3.10 or newer; set PYTHON to one" >&2; exit 1; }
  echo "Installing qrun into $dir (a few minutes the first time)" >&2
  [[ -x $dir/bin/python ]] || "$PYTHON" -m venv "$dir"
  # shellcheck disable=SC2086  # the spec may be two words
  "$dir/bin/python" -m pip install --quiet --disable-pip-version-check $spec
  echo "$stamp" > "$dir/qrun.stamp"
}
