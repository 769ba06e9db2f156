# What wheels of one CUDA row are built in (target builder), and the wheel itself (target wheel).  ci/containers.py
# gives the arguments; each step is a command of ci/ that runs without a container too.
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS builder
ARG CUDA
ENV PATH=/opt/python/cp311-cp311/bin:${PATH} \
    FLASH_KDA_CACHE=/opt/flash_kda/cache \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/flash_kda/factory
COPY ci ci
COPY flash_kda/arch.py flash_kda/arch.py
RUN python -m pip install --require-hashes -r ci/requirements/ci.txt -r ci/requirements/verify.txt && \
    python -m ci.prepare --cuda "${CUDA}"

FROM builder AS build
ARG CUDA
ARG FLASH_KDA_SOURCE_COMMIT
ARG SOURCE_DATE_EPOCH
WORKDIR /src
COPY . .
RUN python -m ci.build --cuda "${CUDA}" --out /wheels

FROM scratch AS wheel
COPY --from=build /wheels/*.whl /
