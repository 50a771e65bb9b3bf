# One image for the server and for contributors: both must have the same versions of Python, Ray and torch.
FROM python:3.11-slim
# Set it to PyTorch's index of CPU builds where no machine has an NVIDIA GPU: the image is gigabytes smaller.
ARG TORCH_INDEX=""
WORKDIR /src
COPY constraints.txt .
RUN pip install --no-cache-dir --no-deps -c constraints.txt ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt . && useradd --create-home contributor
USER contributor
WORKDIR /home/contributor
# A volume that is mounted there takes its owner from it.
RUN mkdir data
ENTRYPOINT ["share-compute"]
