# A clean Python with torch, and one wheel to be tested on a GPU: docker run --gpus all IMAGE --target sm90a
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ENV PATH=/opt/python/cp311-cp311/bin:${PATH} \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/flash_kda
COPY ci/requirements/gpu.txt ci/requirements/gpu.txt
RUN python -m pip install --require-hashes -r ci/requirements/gpu.txt
COPY . .
ENTRYPOINT ["python", "-m", "ci.gpu_tests"]
