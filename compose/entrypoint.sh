#!/bin/sh
# headrace COMMAND..., with this service's password for the stack's NATS in the environment unless one was given.
set -eu
if [ -z "${HEADRACE_NATS_PASSWORD:-}" ] && [ -z "${HEADRACE_NATS_TOKEN:-}" ] && [ -r /run/headrace/nats-password ]; then
    HEADRACE_NATS_PASSWORD=$(cat /run/headrace/nats-password)
    export HEADRACE_NATS_PASSWORD
fi
exec headrace "$@"
