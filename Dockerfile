# wgrad for processors and GPUs with a Vulkan driver: docs/how-to/install.md says how to run it.
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
COPY device device
COPY wgsl wgsl
COPY hip hip
COPY autograd autograd
COPY train train
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.13-slim
# The loader; Mesa's drivers for AMD, Intel and processors; libraries that NVIDIA's driver opens.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libvulkan1 mesa-vulkan-drivers libegl1 libxext6 \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=from=build,source=/wheel,target=/wheel \
    pip install --no-cache-dir "$(echo /wheel/*.whl)[hub,gguf,serve]"
# Any user may write here, so that --user makes files of yours.
RUN useradd --create-home --uid 1000 wgrad && install -d -m 777 /home/wgrad/.cache && chmod 777 /home/wgrad
# NVIDIA's toolkit mounts the Vulkan driver for "graphics" only.
ENV HOME=/home/wgrad NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
USER wgrad
WORKDIR /work
ENTRYPOINT ["wgrad"]
CMD ["devices"]
