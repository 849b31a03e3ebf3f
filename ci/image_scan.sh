#!/usr/bin/env bash
# Scans an image's packages by its SBOM: ci/image_scan.sh [IMAGE]; ENGINE=builder|docker|podman. The default image is `cpu`.
# pip-audit comes into a virtual environment of its own, because it is no tool of the build.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' hybrid_ep/_version.py)
case ${ENGINE:-builder} in
  builder) run=(ci/image/builder.sh --private-network podman) image=${1:-localhost/hybrid-ep:$version-cpu} ;;
  docker | podman) run=("$ENGINE") image=${1:-hybrid-ep:$version-cpu} ;;
  *) echo "ENGINE=$ENGINE is not allowed; it takes builder, docker or podman" >&2; exit 2 ;;
esac
mkdir -p .work/image
sbom=.work/image/sbom.spdx.json tools=.work/image/scan-tools
"${run[@]}" run --rm --network none --entrypoint cat "$image" /usr/share/doc/hybrid-ep/sbom.spdx.json >"$sbom"
[ -x "$tools/bin/pip-audit" ] || { "${PYTHON:-python3}" -m venv "$tools" && "$tools/bin/pip" install -q pip-audit==2.10.1; }
PATH="$PWD/$tools/bin:$PATH" exec "${PYTHON:-python3}" ci/image/scan.py "$sbom"
