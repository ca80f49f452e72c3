#!/bin/bash
# Builds workspace/ as a project elsewhere would, against this checkout, and runs its tests. The
# Bazel inside has its own server and output base; downloads and compiled files come from the
# user's caches.
set -eu
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

out=$(mktemp -d "${TEST_TMPDIR:-/tmp}/consumer.XXXXXX")
# Bazel puts everything under TEST_TMPDIR where that is set, and a test's HOME is not the user's.
unset TEST_TMPDIR
HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
export HOME
bazel() { "$here/../bazel" --output_base="$out/base" --max_idle_secs=60 "$@"; }

stop() {
  bazel shutdown || true
  chmod -R u+w "$out"
  rm -rf "$out"
}
trap stop EXIT

cd "$here/workspace"
bazel test --symlink_prefix=/ //... </dev/null 2>&1 | tee "$out/log"
for test in "$@"; do
  grep -qE "^$test +(\(cached\) )?PASSED" "$out/log" || { echo "consumer_test: $test did not run"; exit 1; }
done
