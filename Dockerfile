# One image for the server and for contributors: all machines of a cluster need the same versions of Python, Ray and torch.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS build
# Empty: PyPI's torch, for NVIDIA GPUs. It makes the image gigabytes larger.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/constraints.txt PIP_PYTHON=/opt/share-compute
WORKDIR /src
COPY constraints.txt pyproject.toml ./
# --no-deps: PyTorch's index may lack the pinned versions of torch's own dependencies.
# The other dependencies come before the sources, so that a change of these builds in seconds.
RUN python -m venv --without-pip /opt/share-compute \
    && pip install --no-deps ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch \
    && python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
       > dependencies.txt \
    && pip install -r dependencies.txt
COPY . .
RUN pip install --no-deps .

FROM ${BASE}
COPY --from=build /opt/share-compute /opt/share-compute
# share-compute: the user of the Ray head, where the server runs as root. contributor: everything else.
RUN useradd --system share-compute && useradd --create-home contributor
ENV PATH=/opt/share-compute/bin:$PATH
USER contributor
WORKDIR /home/contributor
ENTRYPOINT ["share-compute"]
