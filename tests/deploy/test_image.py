"""The images `doctor` and `cpu`, built for this machine and run; what takes longer is in ci/image_test.sh."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from hybrid_ep import __version__
from tests.prerequisites import require, require_programs

ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"localhost/hybrid-ep:{__version__}-cpu"
DOCTOR = f"localhost/hybrid-ep:{__version__}-doctor"
OF_DOCTOR = ("architecture", "user", "labels", "health", "contents", "sbom", "doctor", "no_torch")
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


@cache
def build(target: str = "cpu") -> str:
    """Builds an image once; returns what the build said."""
    require_programs("mmdebstrap", "unshare")
    require(os.geteuid() == 0, "root (namespaces and mounts)")
    command = ["ci/image.sh", target]
    variables = os.environ | {"ENGINE": "builder", "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout.splitlines()[-1]


def check(image: str, *names: str, prepare: str = "") -> subprocess.CompletedProcess[str]:
    """Runs checks of ci/image/check.py where the engine is, after the shell commands `prepare`."""
    script = f'{prepare}\nexec python3 ci/image/check.py "$@"'
    command = ["ci/image/builder.sh", "--private-network", "bash", "-ec", script, "check", image, *names]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_size_and_time_are_reported() -> None:
    report = re.fullmatch(
        rf"hybrid-ep:{__version__}-cpu \(linux/\w+\): ([\d.]+) (MB|GB), built in \d+ s by .*", build()
    )
    assert report is not None
    assert float(report[1]) * {"MB": 1e6, "GB": 1e9}[report[2]] <= 1.2e9


@pytest.mark.slow
@pytest.mark.timeout(2200)
def test_image_keeps_its_promises() -> None:
    build()
    done = check(IMAGE)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok  ") == 13, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2200)
def test_image_of_the_doctor_has_no_torch_and_runs_as_the_daemonset_runs_it() -> None:
    build("doctor")
    done = check(DOCTOR, *OF_DOCTOR)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok  ") == len(OF_DOCTOR), done.stdout


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the builder sees."""
    build()
    path = Path(tempfile.mkdtemp(dir=ROOT / ".work"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.timeout(2200)
@pytest.mark.parametrize(
    ("name", "spoilt"),
    [
        ("user", "USER root"),
        ("labels", "LABEL org.opencontainers.image.licenses=unknown"),
        ("labels", "RUN echo all rights reserved >/usr/share/doc/hybrid-ep/LICENSE"),
        ("health", "HEALTHCHECK CMD true"),
        ("contents", "RUN ln -s /bin/true /usr/bin/gcc"),
        ("contents", "RUN touch /usr/local/lib/libnvidia-ml.so.1"),
        ("contents", "RUN ssh-keygen -q -t ed25519 -N '' -f /home/hep/.ssh/id_rsa"),
        ("contents", "RUN echo hep:hep | chpasswd"),
        ("user", "USER hep"),
        ("labels", 'LABEL org.opencontainers.image.base.digest="latest"'),
        ("contents", "RUN chmod u+s /usr/bin/tini"),
        (
            "contents",
            "RUN mkdir -p /usr/local/share/ca-certificates && touch /usr/local/share/ca-certificates/site.crt",
        ),
        ("sbom", "RUN rm /usr/share/doc/hybrid-ep/sbom.spdx.json"),
        ("k8s", "RUN rm /usr/local/bin/kubectl"),
        ("modules", "RUN rm /usr/local/bin/mpirun"),
        ("commands", "RUN rm /usr/local/lib/python3.11/dist-packages/hybrid_ep/bench/measure.py"),
        ("doctor", "RUN sed -i '2i echo hello' /usr/local/bin/hybrid-ep-entrypoint"),
        ("ssh", "RUN sed -i 's/^AuthenticationMethods.*//' /etc/hybrid-ep/ssh/sshd_config"),
        ("ssh", "RUN sed -i 's/^PermitRootLogin.*//' /etc/hybrid-ep/ssh/sshd_config"),
    ],
)
def test_checks_see_a_spoilt_image(name: str, spoilt: str, folder: Path) -> None:
    user = "" if spoilt.startswith("USER") else "USER 1000:1000"
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nUSER root\n{spoilt}\n{user}\n")
    prepare = (
        f"buildah build -q --format docker --pull=never --isolation chroot -t localhost/spoilt {folder} >/dev/null"
    )
    done = check("localhost/spoilt", name, prepare=prepare)
    assert done.returncode == 1, done.stdout
    assert f"FAILED {name}" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["ci/image.sh", "cpu", "linux/riscv64"],
            "PLATFORM=linux/riscv64 is not allowed; it takes linux/amd64 or linux/arm64",
        ),
        (["ci/image.sh", "nothing"], "TARGET=nothing is not allowed; it takes "),
        (["env", "ENGINE=none", "ci/image.sh"], "ENGINE=none is not allowed; it takes docker, buildah or builder"),
        (
            ["env", "ENGINE=docker", "SOURCES=packages", "ci/image.sh"],
            "SOURCES=packages is not allowed with ENGINE=docker",
        ),
        (
            ["env", "ENGINE=docker", "SOURCES=all", "ci/image.sh"],
            "SOURCES=all is not allowed; it takes public or packages",
        ),
        (
            ["env", "-u", "TORCH_CPU_INDEX", "ENGINE=docker", "ci/image.sh", "cpu", "linux/amd64"],
            "TORCH_CPU_INDEX is empty; it takes the address of pytorch's index of wheels for CPUs",
        ),
        (
            [
                "env",
                "TORCH_CPU_INDEX=",
                "BUILD_ARGS=TEST_BASE=cpu",
                "ENGINE=buildah",
                "ci/image.sh",
                "test",
                "linux/amd64",
            ],
            "TORCH_CPU_INDEX is empty; it takes the address of pytorch's index of wheels for CPUs",
        ),
        (
            ["docker/install_packages", "download", "unused", "riscv64", "x"],
            "riscv64 is not allowed; it takes amd64 or arm64",
        ),
        (
            ["docker/install_packages", "download", "unused", "arm64", "docker/requirements/torch-cu12"],
            "docker/requirements/torch-cu12.txt has no packages for arm64",
        ),
        (
            ["docker/build_rdma_core", "docs", "amd64", "unused", "unused"],
            "it takes one .tar.gz with the source of rdma-core",
        ),
    ],
)
def test_bad_words_are_named(words: list[str], message: str) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_locked_packages_are_those_of_the_project() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]

    def locked(arch: str, *names: str) -> dict[str, str]:
        files = [(ROOT / "docker/requirements" / f"{name}.txt").read_text() for name in names]
        lines = [line for file in files for line in file.splitlines()[1:]]
        assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}( # a(md|rm)64)?", line) for line in lines)
        lines = [line for line in lines if "#" not in line or line.endswith(arch)]
        return {line.split("==")[0].lower(): line.split()[0].split("==")[1] for line in lines}

    def name_of(entry: str) -> str:
        return re.split(r"[=<>\[; ]", entry)[0].lower()

    for arch in ("amd64", "arm64"):
        for torch in ("torch-cpu", "torch-cu13", *(["torch-cu12"] if arch == "amd64" else [])):
            there = locked(arch, torch, "cluster", "packages")
            wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["pictures"]]
            assert {name_of(entry) for entry in wanted} <= there.keys()
        of_cluster = {name_of(entry) for entry in project["project"]["optional-dependencies"]["cluster"]}
        assert of_cluster <= locked(arch, "cluster").keys()
        assert not locked(arch, "cluster").keys() & {"torch", "numpy", "matplotlib"}
        tools = locked(arch, "build", "build-cuda")
        pins = dict(entry.split("==") for entry in [*groups["build"], *groups["cuda"]])
        assert {name: tools[name] for name in pins} == pins


def test_the_wheels_script_has_what_it_calls() -> None:
    copied = set(re.search(r"^COPY ((?:ci/\S+ )+)ci/$", DOCKERFILE, re.MULTILINE)[1].split())  # type: ignore[index]
    called = set(re.findall(r"\bci/\w+\.sh", "".join((ROOT / script).read_text() for script in copied)))
    assert called == copied
    admitted = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert copied <= admitted


def test_bake_and_compose_name_this_version_and_real_stages() -> None:
    stages = set(re.findall(r"^FROM .* AS ([\w-]+)$", DOCKERFILE, re.MULTILINE))
    assert {"rdma-core", "build", "runtime", "test", "cpu", "doctor"} <= stages
    bake = (ROOT / "docker" / "docker-bake.hcl").read_text()
    assert set(re.findall(r'^  target += "([^"]+)"', bake, re.MULTILINE)) <= stages
    assert f'variable "VERSION" {{ default = "{__version__}" }}' in bake
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    images = {service["image"] for service in compose["services"].values()}
    assert images == {
        f"${{HYBRID_EP_IMAGE:-hybrid-ep:{__version__}-cpu}}",
        f"${{HYBRID_EP_GPU_IMAGE:-hybrid-ep:{__version__}}}",
    }


def test_gpu_service_has_what_several_ranks_need() -> None:
    """What the page tells `docker run`, as compose says it."""
    service = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]["gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert (service["ipc"], service["ulimits"], service["profiles"]) == ("host", {"memlock": -1}, ["gpu"])


def test_base_images_are_pinned_by_digest() -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", defaults["BASE_DIGEST"])
    assert defaults["BASE_IMAGE"] == "${BASE_NAME}@${BASE_DIGEST}"
    assert defaults["TOOLS_IMAGE"] == "${BASE_IMAGE}"
    assert re.search(r"@sha256:[0-9a-f]{64}$", defaults["CUDA12_IMAGE"])
    outside = {
        name for name in re.findall(r"^FROM (?:--platform=\S+ )?(\S+)", DOCKERFILE, re.MULTILINE) if "_IMAGE" in name
    }
    assert outside == {"${BASE_IMAGE}", "${TOOLS_IMAGE}", "${CUDA12_IMAGE}"}


def test_packages_of_a_root_are_listed(tmp_path: Path) -> None:
    """ci/image/sbom.py, which runs inside the image."""
    (tmp_path / "status").write_text(
        "Package: tini\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:0.19-1\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n"
    )
    (tmp_path / "libibverbs.so.1.14.60.1").touch()
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "ci" / "image" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    sbom = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sbom)
    assert sbom.debian_packages(tmp_path / "status") == [
        ("tini", "1:0.19-1", "pkg:deb/debian/tini@1%3A0.19-1?arch=amd64")
    ]
    assert sbom.rdma_core(tmp_path) == [("rdma-core", "60.1", "pkg:github/linux-rdma/rdma-core@v60.1")]
    torch = next(package for package in sbom.python_packages() if package[0] == "torch")
    document = sbom.document([torch], "2026-01-02T03:04:05Z")
    assert document == sbom.document([torch], "2026-01-02T03:04:05Z")
    (entry,) = document["packages"]
    assert entry["externalRefs"][0]["referenceLocator"].startswith("pkg:pypi/torch@2.")
    assert document["relationships"][0]["relatedSpdxElement"] == entry["SPDXID"]


def test_scan_judges_what_an_sbom_lists(tmp_path: Path) -> None:
    """ci/image/scan.py with lists of apt and a pip-audit of our own: what nobody answered for is never sound."""
    spec = importlib.util.spec_from_file_location("scan", ROOT / "ci" / "image" / "scan.py")
    assert spec is not None
    assert spec.loader is not None
    scan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scan)
    lists = [
        "Package: tini\nVersion: 1:0.19-1\n",
        "Package: tini\nVersion: 1:0.19-1+deb12u1\n\nPackage: zlib\nVersion: 1\n",
    ]
    assert scan.scan_debian({"tini": "1:0.19-1", "zlib": "1"}, lists) == (
        ["tini 1:0.19-1: Debian has 1:0.19-1+deb12u1"],
        [],
    )
    assert scan.scan_debian({"tini": "1:0.19-2", "gone": "1"}, lists) == ([], ["gone: not in apt's lists"])
    assert scan.scan_debian({"tini": "1"}, []) == ([], ["1 Debian packages: apt has no lists of their release here"])
    vulns = [{"id": "PYSEC-1", "fix_versions": ["2.0"]}]
    answers = [
        {"name": "jinja2", "version": "1.0", "vulns": vulns},
        {"name": "rich", "skip_reason": "not found on PyPI: rich (15)"},
        {"name": "click", "version": "8", "vulns": []},
    ]
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps({'dependencies': answers})}\nEND\nexit 1\n")
    program.chmod(0o755)
    sbom = tmp_path / "sbom.json"

    def scanned(*urls: str) -> subprocess.CompletedProcess[str]:
        references = [{"externalRefs": [{"referenceLocator": url}]} for url in urls]
        sbom.write_text(json.dumps({"packages": references}))
        variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        words = [sys.executable, "ci/image/scan.py", str(sbom)]
        return subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)

    done = scanned(
        "pkg:pypi/jinja2@1.0", "pkg:pypi/rich@15", "pkg:pypi/hybrid-ep@0.1.0", "pkg:github/a/rdma-core@v60.1"
    )
    assert done.returncode == 1, done.stderr
    assert "FOUND jinja2 1.0: PYSEC-1, fixed in 2.0\n  unknown rich: not found on PyPI\n" in done.stdout
    assert "not scanned: rdma-core v60.1" in done.stdout
    answers[:2] = []
    program.write_text(f"#!/bin/sh\necho '{json.dumps({'dependencies': answers})}'\n")
    assert scanned("pkg:pypi/click@8").returncode == 0
    program.write_text("#!/bin/sh\necho no route >&2\nexit 1\n")
    done = scanned("pkg:pypi/click@8")
    assert (done.returncode, "pip-audit gave no answer: no route" in done.stdout) == (2, True)


def test_overlays_name_the_image_for_their_nodes() -> None:
    """By the tags that ci/image.sh gives: without GPUs that of the stage `cpu`."""
    images = {
        path.parent.name: yaml.safe_load(path.read_text())["spec"]["image"]
        for path in ROOT.glob("k8s/overlays/*/settings.yaml")
    }
    assert {name for name, image in images.items() if image == f"hybrid-ep:{__version__}-cpu"} == {
        "cpu",
        "cpu-torchrun",
    }
    assert set(images.values()) == {f"hybrid-ep:{__version__}-cpu", f"hybrid-ep:{__version__}"}


def test_versions_stand_in_one_block() -> None:
    """Every ARG with a default comes before the first stage, but for apt's word that nobody is there to answer."""
    _, stages = DOCKERFILE.split("\nFROM ", 1)
    assert set(re.findall(r"^ARG (\w+=.*)$", stages, re.MULTILINE)) == {"DEBIAN_FRONTEND=noninteractive"}
