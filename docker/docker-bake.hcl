// All images for both architectures: docker buildx bake -f docker/docker-bake.hcl [TARGET]; with --push to a registry.
// Versions of what goes in are the ARGs of docker/Dockerfile and the lists in docker/requirements.
variable "REGISTRY" { default = "" } // with its slash at the end
variable "VERSION" { default = "0.1.0" }
variable "REVISION" { default = "unknown" }
variable "CREATED" { default = timestamp() }
variable "SOURCE_URL" { default = "unknown" } // where the source is, for the label
variable "TORCH_CPU_INDEX" { default = "" } // for cpu on amd64, see docs/images.md

group "default" { targets = ["doctor", "cpu", "runtime"] }
group "all" { targets = ["doctor", "cpu", "runtime", "runtime-cu12", "test"] }

target "_common" {
  context    = "."
  dockerfile = "docker/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  args       = { VERSION = VERSION, REVISION = REVISION, CREATED = CREATED, SOURCE_URL = SOURCE_URL }
  attest     = ["type=provenance,mode=max", "type=sbom"]
}

target "doctor" {
  inherits = ["_common"]
  target   = "doctor"
  tags     = ["${REGISTRY}hybrid-ep:${VERSION}-doctor"]
}

target "cpu" {
  inherits = ["_common"]
  args     = { TORCH_CPU_INDEX = TORCH_CPU_INDEX }
  target   = "cpu"
  tags     = ["${REGISTRY}hybrid-ep:${VERSION}-cpu"]
}

target "runtime" {
  inherits = ["_common"]
  target   = "runtime"
  tags     = ["${REGISTRY}hybrid-ep:${VERSION}"]
}

// torch for CUDA 12 is on PyPI for x86-64 only.
target "runtime-cu12" {
  inherits  = ["runtime"]
  platforms = ["linux/amd64"]
  args      = { CUDA = "cu12" }
  tags      = ["${REGISTRY}hybrid-ep:${VERSION}-cu12"]
}

target "test" {
  inherits = ["_common"]
  target   = "test"
  tags     = ["${REGISTRY}hybrid-ep:${VERSION}-test"]
}
