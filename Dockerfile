# forerun's server in a container: no weights inside; mount models at /models.
#
#   docker build -t forerun .
#   docker run --rm -p 8000:8000 -v ~/models:/models forerun /models/model.gguf
#
# Without a model it serves `demo`, which it fetches into the volume at its first start. Options follow the model, or come
# from the environment: FORERUN_SPEC, FORERUN_API_KEY, ... (`forerun serve --help`). The instruction set is chosen at run
# time, so one image serves all x86-64 machines.

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python -m pip wheel --no-cache-dir --wheel-dir /wheels /src

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir --no-index --find-links /wheels forerun && rm -rf /wheels \
    && useradd --create-home --uid 1000 forerun && mkdir /models && chown forerun /models
USER forerun
ENV FORERUN_CACHE=/models FORERUN_HOST=0.0.0.0
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s --interval=10s --timeout=3s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["forerun", "serve"]
CMD ["demo"]
