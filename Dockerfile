# One image for the server and for contributors: both must have the same versions of Python, Ray and torch.
FROM python:3.11-slim
# Set it to PyTorch's index of CPU builds where no machine has an NVIDIA GPU: the image is gigabytes smaller.
ARG TORCH_INDEX=""
WORKDIR /src
COPY constraints.txt .
RUN pip install --no-cache-dir --no-deps -c constraints.txt ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch
COPY . .
# share-compute: the user of the Ray head, where the server runs as root. contributor: everything else.
RUN pip install --no-cache-dir -c constraints.txt . \
    && useradd --system share-compute && useradd --create-home contributor
USER contributor
WORKDIR /home/contributor
ENTRYPOINT ["share-compute"]
