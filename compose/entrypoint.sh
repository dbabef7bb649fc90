#!/bin/sh
# headrace COMMAND..., with the token of this stack's NATS in the environment unless one was given.
set -eu
if [ -z "${HEADRACE_NATS_TOKEN:-}" ] && [ -r /run/headrace/nats-token ]; then
    HEADRACE_NATS_TOKEN=$(cat /run/headrace/nats-token)
    export HEADRACE_NATS_TOKEN
fi
exec headrace "$@"
