# The image of `docker compose run train`. One file for all bases; the argument CUDA_IMAGE takes another:
#   docker build .                                                    CUDA 13.0, the pinned default
#   docker build --build-arg CUDA_IMAGE=ubuntu:24.04 .                no CUDA base: for boxes without a GPU
# Bases are Ubuntu 24.04 or Debian 12, for the Python that requirements.lock spans. ROCm, and how to move a pin: deploy/README.md.

ARG CUDA_IMAGE=nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1

FROM ${CUDA_IMAGE} AS system
# Ubuntu's archive as it was at this moment, no earlier than the base; another base has its packages as they are now.
ARG SNAPSHOT=20261115T000000Z
# Triton compiles with gcc and the Python headers at run time, torch.compile's CPU code with g++. Lists and logs carry times,
# so that they stay out of the layer. The lists of NVIDIA and AMD have no snapshots, and nothing is wanted from them; those of
# Ubuntu come by https, for which its bare image lacks the certificates.
# hadolint ignore=DL3008  # versions are pinned by the snapshot
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=tmpfs,target=/var/log \
    rm -f /etc/apt/sources.list.d/cuda*.list /etc/apt/sources.list.d/rocm*.list /etc/apt/sources.list.d/amdgpu*.list \
    && { [ -e /etc/ssl/certs/ca-certificates.crt ] \
       || { apt-get update && apt-get install --yes --no-install-recommends ca-certificates; }; } \
    && apt-get -o APT::Snapshot="$SNAPSHOT" update \
    && DEBIAN_FRONTEND=noninteractive apt-get -o APT::Snapshot="$SNAPSHOT" install --yes --no-install-recommends \
       ca-certificates g++ gcc libc6-dev python3 python3-dev python3-venv tini \
    && rm -f /var/cache/ldconfig/aux-cache

FROM system AS packages
ARG LOCK=requirements.lock
ARG PIP_EXTRA_INDEX_URL
COPY ${LOCK} /requirements.lock
# Bytecode that is valid by its source's hash and not by its time is the same in each build; what Python starts with must not
# be written before by Python itself.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --disable-pip-version-check --require-hashes --no-deps --no-compile -r /requirements.lock \
    && find /opt/venv -name __pycache__ -prune -exec rm -r {} + \
    && { PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/venv/lib || true; }

FROM system AS project
COPY . /project/workspace
RUN chmod -R u=rwX,go=rX /project && install -d -m 1777 /project/workspace/outputs /project/cache

FROM system
COPY --from=packages /opt/venv /opt/venv
# The oldest driver that runs this CUDA. NVIDIA's container runtime refuses an older one, and so does Lockstep where that
# runtime does not look; NVIDIA_DISABLE_REQUIRE=1 is for data-centre cards with NVIDIA's forward-compatibility package.
ARG MINIMUM_DRIVER=580.65.06
ENV NVIDIA_REQUIRE_CUDA="driver>=${MINIMUM_DRIVER}" \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Any uid may run this, also one without a name, a home or a writable root: whatever is written goes to /cache and outputs.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/workspace \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    USER=lockstep
COPY --from=project /project/ /
# For the receipts of runs: there is no .git in here to ask.
ARG LOCKSTEP_COMMIT
ENV LOCKSTEP_COMMIT=${LOCKSTEP_COMMIT}
WORKDIR /workspace
USER 10001:10001
# -g: a signal reaches the trainer too, which accelerate's launcher does not tell.
ENTRYPOINT ["tini", "-g", "--", "deploy/container/run", "deploy/container/train"]
