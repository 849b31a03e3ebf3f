#!/usr/bin/env bash
# The README's pictures of two pages, by Debian's chromium: ci/screenshots.sh [DEMO.html] [REPORT.html]
# The pages are those of `make demo` and of `SIMULATE=1 make validate`.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
shoot() {
  chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars \
    --user-data-dir="$profile" --window-size="$1" --screenshot="$PWD/docs/images/$2" "file://$(realpath "$3")" 2>/dev/null
}
shoot 1100,420 demo.png "${1:-out/demo/index.html}"
shoot 1100,592 report.png "${2:-out/validate/report/report.html}"
