# The images for docker buildx; ci/containers.py sets the variables: python -m ci.containers --engine docker
variable "CONTEXT" {}
variable "BASE_IMAGE" {}
variable "CUDA" {}
variable "FLASH_KDA_SOURCE_COMMIT" {}
variable "SOURCE_DATE_EPOCH" {}

target "builder" {
  context    = CONTEXT
  dockerfile = "docker/builder.Dockerfile"
  target     = "builder"
  tags       = ["localhost/flash-kda-builder:${CUDA}"]
  output     = ["type=docker"]
  args = {
    BASE_IMAGE = BASE_IMAGE
    CUDA       = CUDA
  }
}

target "wheel" {
  inherits = ["builder"]
  target   = "wheel"
  tags     = []
  args = {
    FLASH_KDA_SOURCE_COMMIT = FLASH_KDA_SOURCE_COMMIT
    SOURCE_DATE_EPOCH       = SOURCE_DATE_EPOCH
  }
}

target "gpu-test" {
  context    = CONTEXT
  dockerfile = "docker/gpu-test.Dockerfile"
  tags       = ["localhost/flash-kda-gpu-test:${CUDA}"]
  output     = ["type=docker"]
  args = {
    BASE_IMAGE = BASE_IMAGE
  }
}
