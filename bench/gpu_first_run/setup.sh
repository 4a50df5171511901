# Sourced from the repository's root by the scripts beside it: the package, and wheels in .whl/.
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/tandem-triton}
test -x .venv/bin/python && usual=.venv/bin/python || usual=python3
PYTHON=${PYTHON:-$usual} OUT=${OUT:-/tmp/tandem-first-run} STATE=/tmp/tandem-first-run-state
mkdir -p "$OUT" "$STATE" build/typing/tandem
if compgen -G ".whl/*.whl" >/dev/null; then
  test -d /tmp/site || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile \
    --no-cache-dir --target /tmp/site .whl/*.whl
  export PATH=/tmp/site/bin:$PATH PYTHONPATH=/tmp/site${PYTHONPATH:+:$PYTHONPATH}
fi
for room in */; do
  room=${room%/}
  case $room in build | docs | examples | tests | tools | *.egg-info) continue ;; esac
  ln -sfn "../../../$room" "build/typing/tandem/$room"
done
export PYTHONPATH=$PWD/build/typing${PYTHONPATH:+:$PYTHONPATH}
run() { "$PYTHON" -m "$@"; }
