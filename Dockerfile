# trainer in a container: `python -m trainer` as a user without rights, in /runs.
#
#   docker build -t trainer .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/runs" --user "$(id -u):$(id -g)" trainer +recipe=resnet50_flowers
#
# slim fetches a C++ compiler from Debian; where only the Python registry can be reached, a base that has one needs no
# other network: docker build --build-arg BASE=python:3.11 -t trainer .
# The digest is that of python:3.11-slim (3.11.16, Debian trixie) of 2026-08-25, as Docker's official images publish it
# (docker-library/repo-info). A newer one: docker buildx imagetools inspect python:3.11-slim
ARG BASE=python:3.11-slim@sha256:be1575ed968de893bd54f4c56315ff7c4736ce522c1bca08fd521731aafc0d76
FROM ${BASE}

# torch.compile calls a C++ compiler while training.
RUN command -v g++ || (apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*)

# Anyone may write to both, so that --user with the owner of a mounted folder works.
RUN useradd --uid 1000 --home-dir /cache --no-create-home trainer && install -d -m 1777 /runs /cache

ENV VIRTUAL_ENV=/opt/trainer PATH=/opt/trainer/bin:$PATH UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
WORKDIR /src

# The dependencies first: a change of the code alone leaves their layer as it is.
COPY pyproject.toml ./
RUN python -m venv /opt/trainer && python -m pip install --no-cache-dir uv && uv pip install -r pyproject.toml

COPY README.md LICENSE CHANGELOG.md ./
COPY trainer trainer
COPY conf conf
COPY recipes recipes
RUN uv pip install --no-deps .

# Names a user whatever the number given by --user, which torch asks for when it compiles.
ENV USER=trainer HOME=/cache TRAINER_CACHE=/cache
USER trainer
WORKDIR /runs
ENTRYPOINT ["python", "-m", "trainer"]
CMD ["--help"]
